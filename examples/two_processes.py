"""Prefill and decode as two processes: a room that succeeds, one that decode aborts, and one that decode turns down.

``python two_processes.py`` runs both sides; ``two_processes.py prefill`` and ``two_processes.py decode`` run one each, for two
terminals, in either order.
"""

import multiprocessing
import multiprocessing.connection
import sys

import numpy as np

import kvcore

PORT = 8999
PAGES, PAGE_SIZE, LAYERS = 32, 16, 4
LIMITS = kvcore.Limits(bootstrap_s=60)  # for how long one side looks for the other; five minutes if nothing is said
GOOD, ABORTED, REJECTED = 1, 2, 3  # room numbers; in an engine the router chooses them and tells both sides
MOVED = {20: 3, 2: 4, 11: 5, 12: 9}  # which page of prefill arrives in which page of decode


def memory():
    """One tensor a layer. Both sides need pages of one form; how many of them each has is its own affair."""
    return [np.zeros((PAGES, PAGE_SIZE, 8), np.float32) for _ in range(LAYERS)]


def pool(tensors):
    """One page of a pool is one slice of each of its tensors."""
    return kvcore.Pool.from_tensors("kv", tensors, page_size=PAGE_SIZE)


def prefill(port):
    kv = memory()
    for n, layer in enumerate(kv):
        for page in range(PAGES):
            layer[page] = 100 * n + page  # stands for what the model computes; decode knows what to expect
    config = kvcore.Config(role="prefill", bootstrap_port=port, limits=LIMITS)
    with kvcore.KVManager(config, pools=[pool(kv)]) as manager:
        # Open a sender as soon as a request arrives: decode can join it while prefill still computes.
        good, aborted, rejected = (manager.sender(room) for room in (GOOD, ABORTED, REJECTED))

        good.send([3, 4, 5])  # the pages that the first chunk has filled
        good.send([9], last=True, record=b"first token: 42")  # the rest, and a few bytes for decode
        good.wait()
        print(f"prefill: room {GOOD} {good.poll().name}, {good.metrics.bytes} bytes")

        aborted.send([10, 11])  # never the last chunk: this room ends by decode's abort
        aborted.wait()
        rejected.wait()
        for sender in (aborted, rejected):
            why = sender.failure
            print(f"prefill: room {sender.room} {sender.poll().name}, {why.code.value} by {why.side}: {why.reason}")

        for sender in (good, aborted, rejected):
            sender.wait_release_safe()  # only now may the pages be computed over
            sender.clear()


def decode(port):
    address = f"127.0.0.1:{port}"
    kv = memory()
    with kvcore.KVManager(kvcore.Config(role="decode", limits=LIMITS), pools=[pool(kv)]) as manager:
        good = manager.receiver(GOOD, prefill=address)
        good.receive([20, 2, 11, 12])  # the i-th page sent goes to the i-th page listed here
        good.wait()
        good.raise_for_failure()
        print(f"decode: room {GOOD} {good.poll().name}, record {good.record!r}")
        right = all((layer[mine] == 100 * n + theirs).all() for n, layer in enumerate(kv) for mine, theirs in MOVED.items())
        print("decode: the bytes are equal" if right else "decode: the bytes DIFFER")
        good.clear()

        aborted = manager.receiver(ABORTED, prefill=address)
        aborted.receive([5, 6, 7])
        aborted.abort("the user went away")  # at any time, in any state; prefill hears of it
        print(f"decode: room {ABORTED} {aborted.poll().name} at once; pages free again: {aborted.wait_release_safe(timeout=30)}")
        aborted.clear()

        manager.reject(REJECTED, "no pages left today", prefill=address)  # a request that never gets a receiver


def main():
    side, port = (sys.argv[1:2] or ["both"])[0], int((sys.argv[2:3] or [PORT])[0])
    if side == "both":
        sys.exit(run_both(port))
    (prefill if side == "prefill" else decode)(port)


def run_both(port):
    """Both sides in processes of their own; if one fails, nothing is left for the other to wait for."""
    spawn = multiprocessing.get_context("spawn")
    sides = [spawn.Process(target=side, args=(port,), daemon=True) for side in (prefill, decode)]
    for process in sides:
        process.start()
    while running := [process.sentinel for process in sides if process.exitcode is None]:
        multiprocessing.connection.wait(running)
        if any(process.exitcode for process in sides):
            return 1  # the other one is a daemon, and ends with this process
    return 0


if __name__ == "__main__":
    main()
