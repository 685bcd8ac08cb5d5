"""What the machine takes with neither kvcore nor an engine: a small message there and back over ZeroMQ, the same of two of a room's letters
that are made and read in Python, and a copy of the same pages.

A control message of kvcore's cannot be quicker than half the way there and back, what is written in Python not than one thread on each side
that knows of no room, nor an engine that copies within one host than one thread that does nothing else.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import zmq

from kvcore import interfaces
from kvcore.addresses import Address
from kvcore.bench.fields import repeated, told
from kvcore.bench.setup import Clock, Measured, Setup
from kvcore.buffers import Buffer, Bytes
from kvcore.memory import Indices
from kvcore.protocol.messages import Destination, PoolPages, Status
from kvcore.sides import ToolError
from kvcore.states import KVPoll
from kvcore.wire import decode, encode

PLAIN = bytes(200)
"""About as long as a message about a room."""
TRIPS = 300
QUESTION, ANSWER = Destination(1, 0, 1, 1, (PoolPages("kv", bytes(4)),)), Status(1, 0, 1, 1, KVPoll.SUCCESS)
"""The two letters of a room that was opened before."""
LOOK_MS = 10
"""How often a socket on which nothing comes looks whether the turn is over."""


@dataclass(frozen=True, slots=True)
class Bare:
    """What the machine takes in the same two processes: 200 bytes there and back over ZeroMQ (a DEALER and a ROUTER, each on one thread
    that does nothing else), the same with a destination one way and a verdict the other, each made and read as kvcore does it, and one
    thread's copy of the same pages to the same places, where they are in CPU memory. Medians of the turns, of which each has the median of
    300 round trips. A GB is 10**9 bytes."""

    round_trip_ms: Annotated[float, told("Milliseconds that 200 bytes take there and back over ZeroMQ.")]
    round_trip_ms_each: tuple[float, ...]
    letters_ms: Annotated[float, told("Milliseconds that two of a room's letters take there and back, made and read in Python.")]
    letters_ms_each: tuple[float, ...]
    copy_gb_per_s: Annotated[
        float | None, told("GB (10^9 bytes) a second of one thread's copy of the same pages; null where they are not in CPU memory.")
    ]
    copy_gb_per_s_each: tuple[float, ...]

    def __str__(self) -> str:
        copying = f", a copy of the pages {self.copy_gb_per_s:.3g} GB/s" if self.copy_gb_per_s is not None else ""
        trip, letters = 1e3 * self.round_trip_ms, 1e3 * self.letters_ms
        return f"  bare machine: a round trip {trip:.0f} us, of two letters {letters:.0f} us{copying}"


def bare(calls: Sequence[Measured], copies_s: Sequence[float], nbytes: int) -> Bare:
    """From the turns of a ``Caller``, the seconds of the copies, and the bytes that each of these moved."""
    trips, letters = ([1e3 * statistics.median(call.latencies_s[part]) for call in calls] for part in (slice(TRIPS), slice(TRIPS, None)))
    return Bare(**repeated(round_trip_ms=trips, letters_ms=letters, copy_gb_per_s=[nbytes / each / 1e9 for each in copies_s]))


def over(times_ms: Sequence[float], raw_ms: Sequence[float], one_way: int, machine: Bare) -> tuple[float, ...]:
    """How often what the wire takes goes into what kvcore took, repeat by repeat: the engine's own transfer and so many control messages
    one way, as they were measured in the turns that followed. Empty if the engine was not measured."""
    if not raw_ms:
        return ()
    turns = zip(times_ms, raw_ms, machine.round_trip_ms_each, strict=True)
    return tuple(mine / (raw + one_way * trip / 2) for mine, raw, trip in turns)


class Echo:
    """Decode's end: sends back whatever comes, and an answer to a letter."""

    def __init__(self, setup: Setup) -> None:
        self._socket = _socket(zmq.ROUTER, LOOK_MS)
        host = interfaces.placed(setup.host, "")["host"]
        self._socket.bind(Address(host, 0).zmq.removesuffix(":0") + ":*")
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.address = str(Address(host, int(endpoint.rstrip(b"\0").rpartition(b":")[2])))

    def serve(self, stop: threading.Event) -> None:
        """Until ``stop``."""
        while not stop.is_set():
            try:
                caller, frame = self._socket.recv_multipart()
                if frame != PLAIN:
                    decode(frame)
                    frame = _letter(ANSWER)
                self._socket.send_multipart([caller, frame])
            except zmq.Again:
                continue

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class Caller:
    """Prefill's end: waits for each answer before it sends again."""

    def __init__(self, address: str, setup: Setup) -> None:
        self._socket, self._address = _socket(zmq.DEALER, round(setup.patience_s * 1e3)), address
        self._socket.connect(f"tcp://{address}")

    def measure(self) -> Measured:
        """A turn. Its ``latencies_s`` are the round trips, then those of letters. Raises ``ToolError`` if decode's end does not answer."""
        clock, took = Clock(), []
        for trip in range(2 * TRIPS):
            began = time.perf_counter()
            self._socket.send(PLAIN if trip < TRIPS else _letter(QUESTION))
            try:
                frame = self._socket.recv()
            except zmq.Again as error:
                raise ToolError(f"decode's process does not answer at {self._address}; try another --host") from error
            if trip >= TRIPS:
                decode(frame)
            took.append(time.perf_counter() - began)
        return clock.read(tuple(took))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def _letter(body: Destination | Status) -> bytes:
    return encode("prefill-0123456789abcdef", "decode-0123456789abcdef", body)


def copy(pages: Bytes, sources: Indices, into: Buffer, places: Indices) -> Measured:
    """Copy page ``sources[n]`` of ``pages`` to ``places[n]`` of ``into``, each another. What is measured is a copy page by page in the
    order of where they go, into the buffer itself if that is all of it. Of interest only where its pages are in CPU memory."""
    order = np.argsort(places)
    whole = isinstance(into.tensor, np.ndarray) and len(places) == len(into.tensor)
    target = into.tensor if whole else np.zeros((len(places), pages.shape[1]), np.uint8)
    clock = Clock()
    np.take(pages, sources[order], axis=0, out=target, mode="clip")  # otherwise it would go through a buffer
    measured = clock.read()
    if not whole:
        into.put(places[order], target)
    return measured


def _socket(kind: int, patience_ms: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.RCVTIMEO, patience_ms)
    return socket
