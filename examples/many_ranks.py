"""Two tensor-parallel prefill ranks and one decode rank, each a process: prefill hands each layer over when it is computed.

``python many_ranks.py`` runs all three; ``many_ranks.py prefill 0``, ``many_ranks.py prefill 1`` and ``many_ranks.py decode`` run one
each, in any order. Each prefill rank holds half of the heads of every page; decode holds all of them.
"""

import multiprocessing
import multiprocessing.connection
import sys

import numpy as np

import kvcore

PORT = 8999
RANKS = 2
PAGES, PAGE_SIZE, LAYERS, HEADS, DIM = 32, 16, 4, 8, 64
ROOM, SOURCE, TARGET = 1, [3, 4, 5], [20, 2, 11]  # the same room on every rank, and the same pages on all ranks of a side
LIMITS = kvcore.Limits(bootstrap_s=60)


def whole_model():
    """What the model computes: [layer, page, token, head, dim]; made up here, so that decode knows what to expect."""
    return np.random.default_rng(seed=0).random((LAYERS, PAGES, PAGE_SIZE, HEADS, DIM), np.float32)


def pool(layers):
    """``layout`` says what a page holds, and so which rank has which part of it."""
    return kvcore.Pool.from_tensors("kv", layers, page_size=PAGE_SIZE, layout=kvcore.Heads(total=HEADS, dim=DIM))


def prefill(rank, port):
    mine = np.array_split(whole_model(), RANKS, axis=3)[rank]  # this rank's heads
    layers = [np.zeros_like(layer) for layer in mine]
    config = kvcore.Config(
        role="prefill",
        topology=kvcore.Topology(tp_size=RANKS, tp_rank=rank),
        bootstrap_port=port if rank == 0 else 0,  # rank 0 serves the group, and the others name it
        bootstrap=None if rank == 0 else f"127.0.0.1:{port}",
        limits=LIMITS,
    )
    with kvcore.KVManager(config, pools=[pool(layers)]) as manager, manager.sender(ROOM) as sender:
        for number, layer in enumerate(layers):
            layer[SOURCE] = mine[number][SOURCE]  # stands for computing it
            sender.send(SOURCE, layers=range(number, number + 1), last=number == LAYERS - 1)
        sender.wait()
        sender.raise_for_failure()
        print(f"prefill rank {rank}: {sender.poll().name}, {sender.metrics.bytes} bytes")


def decode(port):
    layers = [np.zeros((PAGES, PAGE_SIZE, HEADS, DIM), np.float32) for _ in range(LAYERS)]
    with (
        kvcore.KVManager(kvcore.Config(role="decode", limits=LIMITS), pools=[pool(layers)]) as manager,
        manager.receiver(ROOM, prefill=f"127.0.0.1:{port}") as receiver,
    ):
        receiver.receive(TARGET)  # layers come whole here, so receiver.layers_ready() says meanwhile which can be read
        receiver.wait()
        receiver.raise_for_failure()
        print(f"decode: {receiver.poll().name}, layers {sorted(receiver.layers_ready())}")
    equal = all(np.array_equal(layer[TARGET], expected[SOURCE]) for layer, expected in zip(layers, whole_model(), strict=True))
    print("decode: the bytes are equal" if equal else "decode: the bytes DIFFER")


def main():
    match sys.argv[1:]:
        case ["prefill", rank, *port]:
            prefill(int(rank), int((port or [PORT])[0]))
        case ["decode", *port]:
            decode(int((port or [PORT])[0]))
        case ["all", port]:
            sys.exit(run_all(int(port)))
        case _:
            sys.exit(run_all(PORT))


def run_all(port):
    """Every rank in a process of its own; if one fails, nothing is left for the others to wait for."""
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=prefill, args=(rank, port), daemon=True) for rank in range(RANKS)]
    ranks.append(spawn.Process(target=decode, args=(port,), daemon=True))
    for process in ranks:
        process.start()
    while running := [process.sentinel for process in ranks if process.exitcode is None]:
        multiprocessing.connection.wait(running)
        if any(process.exitcode for process in ranks):
            return 1  # the others are daemons, and end with this process
    return 0


if __name__ == "__main__":
    main()
