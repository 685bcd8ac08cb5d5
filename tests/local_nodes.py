"""What the tests of the local backend share: backends with memory of their own."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from kvcore.backends.local import LocalBackend, LocalOptions
from kvcore.hookspecs import OpenContext, Peer, Ticket, TicketKind, TicketState, Transfer
from kvcore.memory import Region
from kvcore.states import RoomKey

MIB = 1 << 20
LOG = logging.getLogger("test")
Row = tuple[int, int, int, int, int]  # local region, local offset, remote region, remote offset, length


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline, tick = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        tick.wait(0.001)


def room(number: int = 1) -> RoomKey:
    return RoomKey("prefill", number, 0, 1)


def region(array: np.ndarray) -> Region:
    return Region(array.ctypes.data, array.nbytes)


def batch(peer: str, rows: list[Row] | np.ndarray, number: int = 1) -> Transfer:
    table = np.array(rows, dtype=object).T
    lr, rr = table[0].astype(np.int32), table[2].astype(np.int32)
    lo, ro, n = (table[i].astype(np.uint64) for i in (1, 3, 4))
    base = np.zeros(1, np.uint64)
    return Transfer(room(number), peer, lr, rr, lo, ro, n, base, base)


class Node:
    def __init__(self, name: str, side: str, nbytes: int = MIB, regions: int = 1, host: str = "127.0.0.1", **options: object) -> None:
        self.name, self.side, self.host = name, side, host
        self.options = LocalOptions(**options)
        self.memory = [np.zeros(nbytes, np.uint8) for _ in range(regions)]
        self.regions = tuple(region(array) for array in self.memory)
        self.backend = LocalBackend()
        self.open()

    def open(self) -> None:
        self.backend.kvcore_open(options=self.options, context=OpenContext(self.name, self.side, 0, self.host, "", LOG))
        self.backend.kvcore_register(regions=self.regions)

    def peer(self) -> Peer:
        return Peer(self.name, self.backend.kvcore_endpoint(), self.regions)

    def connect(self, other: Node | Peer) -> None:
        self.backend.kvcore_connect(peer=other if isinstance(other, Peer) else other.peer())

    def send(self, peer: str, rows: list[Row] | np.ndarray, number: int = 1) -> Ticket | TicketState:
        return self.backend.kvcore_transfer(transfer=batch(peer, rows, number))

    def pending(self, ticket: Ticket) -> bool:
        return self.backend.kvcore_poll(tickets=[ticket])[0].kind is TicketKind.PENDING

    def ended(self, ticket: Ticket) -> TicketState:
        states: list[TicketState] = []

        def over() -> bool:
            states[:] = self.backend.kvcore_poll(tickets=[ticket])
            return states[0].kind is not TicketKind.PENDING

        until(over)
        return states[0]


MakeNode = Callable[..., Node]


@contextlib.contextmanager
def making() -> Iterator[MakeNode]:
    """A maker of nodes, which are closed at the end."""
    nodes: list[Node] = []

    def make(*args: object, **options: object) -> Node:
        nodes.append(Node(*args, **options))  # type: ignore[arg-type]
        return nodes[-1]

    yield make
    for one in nodes:
        one.backend.kvcore_close()


def pair_of(node: MakeNode, **options: object) -> tuple[Node, Node]:
    sender, receiver = node("p", "prefill", **options), node("d", "decode", **options)
    sender.memory[0][:] = np.random.default_rng(0).integers(1, 256, sender.memory[0].size)
    receiver.connect(sender)
    sender.connect(receiver)
    return sender, receiver


GOOD: Row = (0, 0, 0, 0, 16)
ENDLESS: list[Row] = [(0, 0, 0, 0, MIB)] * 20_000  # 20 GB into one MiB: never done within a test


def assert_not_posted(state: object, text: str) -> None:
    """``kvcore_transfer`` said that nothing was posted, that the peer must be paired again, and why."""
    assert isinstance(state, TicketState)
    assert (state.kind, state.quiescent, state.peer_broken) == (TicketKind.FAILED, True, True)
    assert text in state.reason
