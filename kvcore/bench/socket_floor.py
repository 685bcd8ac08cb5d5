"""The floor of ``local``: the same bytes over one TCP connection, from memory into memory, with an answer for each transfer."""

from __future__ import annotations

import ctypes
import select
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from kvcore.hookspecs import Endpoint, OpenContext, Peer, Transfer
from kvcore.memory import Region

MOST_VIEWS = 1024
"""Of one system call."""
LOOK_MS = 10
"""How often a connection on which nothing comes looks whether the turn is over."""
ANSWER = b"\1"


class SocketFloor:
    """Prefill sends, for each transfer, a number of rows, the rows (offset and length in decode's one region), and the bytes."""

    ways = ("sendmsg",)

    def open(self, options: BaseModel, context: OpenContext, regions: Sequence[Region]) -> Endpoint:
        """Decode listens."""
        (region,) = regions
        self._memory = memoryview((ctypes.c_char * region.nbytes).from_address(region.ptr)).cast("B")
        self._sock: socket.socket | None = None
        self._listener = _listener(context.host) if context.side == "decode" else None
        return Endpoint(msgspec.json.encode((context.host, self._listener.getsockname()[1]) if self._listener else ()))

    def connect(self, peer: Peer) -> None:
        """Connect to decode."""
        self._sock = socket.create_connection(msgspec.json.decode(peer.endpoint.data, type=tuple[str, int]))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def prepare(self, way: str, transfers: Sequence[Transfer], at_once: int) -> Callable[[], None]:
        """What sends each while no more than so many answers are outstanding."""
        return partial(self._write, transfers, at_once)

    def serve(self, stop: threading.Event) -> None:
        """Receive until ``stop``."""
        if self._sock is None:
            assert self._listener is not None
            self._sock = self._listener.accept()[0]
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock, number = self._sock, np.empty(1, np.uint64)

        def receive(views: Sequence[memoryview]) -> int:
            return sock.recvmsg_into(views)[0]

        poller = select.poll()
        poller.register(sock, select.POLLIN)
        while not stop.is_set():
            if not poller.poll(LOOK_MS):
                continue
            _carry(receive, [number.data.cast("B")])
            rows = np.empty((int(number[0]), 2), np.uint64)
            _carry(receive, [rows.data.cast("B")])
            _carry(receive, self._views(rows[:, 0], rows[:, 1]))
            sock.sendall(ANSWER)

    def close(self) -> None:
        """Close both sockets."""
        for one in (self._sock, self._listener):
            if one is not None:
                one.close()

    def _write(self, transfers: Sequence[Transfer], at_once: int) -> None:
        assert self._sock is not None
        outstanding = 0
        for transfer in transfers:
            if outstanding == at_once:
                outstanding -= len(self._sock.recv(at_once))
            rows = np.stack((transfer.remote_offset, transfer.length), axis=1)
            _carry(self._sock.sendmsg, [_number(len(rows)), rows.data.cast("B"), *self._views(transfer.local_offset, transfer.length)])
            outstanding += 1
        while outstanding:
            outstanding -= len(self._sock.recv(outstanding))

    def _views(self, offsets: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint64]) -> list[memoryview]:
        return [self._memory[first : first + size] for first, size in zip(offsets.tolist(), lengths.tolist(), strict=True)]


def _listener(host: str) -> socket.socket:
    """At a free port of any family's address."""
    family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server(place, family=family)


def _number(value: int) -> memoryview:
    return np.array([value], np.uint64).data.cast("B")


def _carry(call: Callable[[Sequence[memoryview]], int], views: list[memoryview]) -> None:
    """Send, or receive, all of these, however much of it one system call takes; ``ConnectionError`` if the other side has gone."""
    first = 0
    while first < len(views):
        done = call(views[first : first + MOST_VIEWS])
        if not done:
            raise ConnectionError("the other side's floor has closed its connection")
        while done:
            size = views[first].nbytes
            if done < size:
                views[first] = views[first][done:]
                break
            done -= size
            first += 1
