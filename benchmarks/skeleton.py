"""``python -m benchmarks.skeleton``: a room's five letters and its transfer over NIXL, by one thread a side that knows of no room.

The letters are kvcore's, made, sent and read in Python; what kvcore does for a room beside them (its states and limits, the record of what
happened, release safety, calls from any thread) is missing, so that the difference is what that costs.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import zmq
from kvcore_nixl import native
from kvcore_nixl.options import NixlOptions

from kvcore.protocol.messages import Ack, Destination, Here, Join, PoolPages, Status
from kvcore.states import KVPoll
from kvcore.wire import RoomBody, decode, encode

PAGES, PAGE_BYTES, PATIENCE_S, LOOK_MS = 256, 16384, 10.0, 1
NAMES = {"prefill": "prefill-0123456789abcdef", "decode": "decode-0123456789abcdef"}


class Engine:
    """An agent with pages, which are ``number`` in each byte."""

    def __init__(self, side: str, number: int) -> None:
        options = NixlOptions.model_validate({})
        native.prepare_environment(options.environment, logging.getLogger("nixl"))
        library, _ = native.load()
        self.agent, self.memory = native.new_agent(library, side, options), np.full((PAGES, PAGE_BYTES), number, np.uint8)
        self.agent.register_memory([(self.memory.ctypes.data, self.memory.nbytes, 0, "")], "DRAM")
        addresses = self.memory.ctypes.data + PAGE_BYTES * np.arange(PAGES)
        self.rows = np.stack((addresses, np.full(PAGES, PAGE_BYTES), np.zeros(PAGES)), axis=1).astype(np.uint64)


class Port:
    """A socket on which letters come, and go to whom the last one came from."""

    def __init__(self, side: str, kind: int, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.socket = context.socket(kind)
        self._from, self._to = NAMES[side], NAMES["decode" if side == "prefill" else "prefill"]
        self._whom: list[bytes] = []

    def say(self, body: RoomBody) -> None:
        self.socket.send_multipart([*self._whom, encode(self._from, self._to, body)], zmq.NOBLOCK)

    def hear(self, meanwhile: Callable[[], object] = lambda: None) -> Iterator[Any]:
        """The bodies of all letters that are here, once there is one. Raises ``TimeoutError``."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.socket.poll(LOOK_MS) and time.monotonic() < deadline:
            meanwhile()
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{self._from} has heard nothing for {PATIENCE_S:.0f} s; see what became of the other side")
        while self.socket.poll(0):
            *self._whom, frame = self.socket.recv_multipart(zmq.NOBLOCK)
            yield decode(frame).body


def prefill(rooms: int, pipe: Connection) -> None:
    """Answer joins, carry what destinations ask for, and say so, until all verdicts are acknowledged."""
    engine, port = Engine("prefill", 1), Port("prefill", zmq.ROUTER, zmq.Context())
    pipe.send((port.socket.bind_to_random_port("tcp://127.0.0.1"), engine.agent.get_agent_metadata()))
    metadata, rows = pipe.recv()
    engine.agent.add_remote_agent(metadata)
    mine, theirs = (
        engine.agent.prep_xfer_dlist(whose, each, "DRAM") for whose, each in (("NIXL_INIT_AGENT", engine.rows), ("decode", rows))
    )

    def carry(page: np.ndarray[Any, Any]) -> None:
        request = engine.agent.make_prepped_xfer("WRITE", mine, page, theirs, page)
        state = engine.agent.transfer(request)
        while state == "PROC":
            state = engine.agent.check_xfer_state(request)
        assert state == "DONE", state
        engine.agent.release_xfer_handle(request)

    carry(np.zeros(1, np.int32))  # which connects the agents, with decode's help
    pipe.send("ready")
    began, over = time.process_time(), 0
    while over < rooms:
        for body in port.hear():
            if isinstance(body, Join):
                port.say(Here(body.room, 0, body.rg, 1))
            elif isinstance(body, Destination):
                carry(np.frombuffer(body.pages[0].pages, "<i4"))
                port.say(Status(body.room, 0, body.rg, body.sg, KVPoll.SUCCESS))
            else:
                over += 1
    pipe.send(time.process_time() - began)


def decode_side(rooms: int, at_once: int, pipe: Connection) -> str:
    """Carry so many rooms, some at a time; the figures in one line."""
    port_number, metadata = pipe.recv()
    engine, port = Engine("decode", 0), Port("decode", zmq.DEALER, zmq.Context())
    engine.agent.add_remote_agent(metadata)
    pipe.send((engine.agent.get_agent_metadata(), engine.rows))
    while not pipe.poll():
        engine.agent.get_new_notifs()
    pipe.recv()
    port.socket.connect(f"tcp://127.0.0.1:{port_number}")
    opened, published, done = (np.zeros(rooms) for _ in range(3))
    began, cpu_s, first, over = time.perf_counter(), time.process_time(), 0, 0
    while over < rooms:
        while first < min(rooms, over + at_once):
            opened[first] = time.perf_counter()
            port.say(Join(first, 0, 1, 0))
            first += 1
        for body in port.hear(engine.agent.get_new_notifs):  # the target of a connection that is still being made must work, too
            if isinstance(body, Here):
                published[body.room] = time.perf_counter()
                page = (body.room % PAGES).to_bytes(4, "little")
                port.say(Destination(body.room, 0, 1, body.sg, (PoolPages("kv", page),)))
            else:
                done[body.room] = time.perf_counter()
                port.say(Ack(body.room, 0, 1, body.sg, live=True))
                over += 1
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
    assert engine.memory[:rooms].all(), "every page was written"
    latency = [1e3 * statistics.median(done - since) for since in (opened, published)]
    cpu = [1e6 * each / rooms for each in (pipe.recv(), cpu_s)]
    return (
        f"{at_once} in flight: {rooms / seconds:.0f} rooms/s; ms from opening {latency[0]:.2f}, from the destination {latency[1]:.2f}; "
        f"CPU us a room: prefill {cpu[0]:.0f}, decode {cpu[1]:.0f}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each number in flight."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.skeleton", description=__doc__.split("\n\n")[0].partition(": ")[2])
    parser.add_argument("--rooms", type=int, default=5000, help="how many (default: 5000)")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 64], help="rooms at a time (default: 1 64)")
    chosen = parser.parse_args(arguments)
    for at_once in chosen.in_flight:
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=prefill, args=(chosen.rooms, theirs), daemon=True)
        process.start()
        print(decode_side(chosen.rooms, at_once, ours))
        process.join(PATIENCE_S)


if __name__ == "__main__":
    main()
