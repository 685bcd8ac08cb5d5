"""Small complete backends for tests of the core: they move bytes within one process, and do on purpose what real engines do by accident.

``install`` makes a class of its own for each test and has the core load it under any name; ``made`` lists its instances, in the order
in which the managers were made. ``running`` makes the managers, the prefill one first.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import pytest

from kvcore import KVManager, Receiver, Sender, registry
from kvcore.hookspecs import (
    API_VERSION,
    DONE,
    PENDING,
    BackendInfo,
    Capabilities,
    Endpoint,
    OpenContext,
    Peer,
    Ticket,
    TicketKind,
    TicketState,
    Transfer,
    hookimpl,
)
from kvcore.memory import Region
from kvcore.states import RoomKey
from tests.helpers import Duo, manager, memory

MOST_HELD_S = 60.0

F = TypeVar("F", bound="MemoryBackend")

_kept: list[tuple[Sender, Receiver]] = []


def install(monkeypatch: pytest.MonkeyPatch, base: type[F], **capabilities: Any) -> type[F]:
    """Have every manager made from now on use a fresh subclass of ``base`` with these capabilities."""
    made = type(base.__name__, (base,), {"made": [], "able": replace(base.able, **capabilities)})
    monkeypatch.setattr(registry, "load_backend", lambda name: made)
    return made


@contextmanager
def running(fake: type[MemoryBackend], decodes: int = 1, **limits: float | None) -> Iterator[list[Duo]]:
    """A prefill manager, and some decode managers that share it, with the backend installed. Gates are open when they close."""
    source = memory(32, seed=3)
    made: list[KVManager] = []
    try:
        made.append(manager("prefill", source, backend="fake", limits=limits))
        duos = []
        for _ in range(decodes):
            target = memory(32)
            made.append(manager("decode", target, backend="fake", limits=limits))
            duos.append(Duo(made[0], made[-1], source, target))
        yield duos
    finally:
        for backend in fake.made:
            backend.open_gates()
        for one in reversed(made):
            one.close()
        _kept.clear()


def start(duo: Duo, page: int = 1, room: int | None = None, pages: int = 1) -> tuple[Sender, Receiver]:
    """A room of one page, or a few, under way; its handles live as long as the managers do."""
    handles = duo.open(room)
    _kept.append(handles)
    sender, receiver = handles
    receiver.receive(range(page, page + pages))
    sender.send(range(page, page + pages), last=True)
    return sender, receiver


def failed(reason: str, quiescent: bool = True, peer_broken: bool = False) -> TicketState:
    """The state of a ticket that has failed."""
    return TicketState(TicketKind.FAILED, reason, quiescent, peer_broken)


def copy(transfer: Transfer) -> None:
    """Move the bytes; both sides are in this process."""
    for source, target, length in zip(transfer.local_address, transfer.remote_address, transfer.length, strict=True):
        ctypes.memmove(int(target), int(source), int(length))


class MemoryBackend:
    """Does not block: bytes move when a ticket is polled, unless ``held``. ``answers`` replaces what transfer does, by room."""

    able: ClassVar[Capabilities] = Capabilities(cancel=True)
    made: ClassVar[list[Any]]

    def __init__(self) -> None:
        self.answers: dict[int, Callable[[Transfer], object]] = {}
        self.calls: list[str] = []
        self.transfers: list[Transfer] = []
        self.aborted: list[tuple[RoomKey, list[Ticket]]] = []
        self.cleared: list[RoomKey] = []
        self.regions: list[Region] = []
        self.jobs: dict[Ticket, Transfer] = {}
        self.cancelled: set[Ticket] = set()
        self.held = threading.Event()
        self.lock = threading.Lock()
        self.gates: dict[str | int, Gate] = {}
        self._tickets = itertools.count(1)
        self.made.append(self)

    @hookimpl
    def kvcore_backend_info(self) -> BackendInfo:
        return BackendInfo("fake", "1", "1", API_VERSION, capabilities=self.able)

    @hookimpl
    def kvcore_open(self, context: OpenContext) -> Any:
        self.calls.append("open")

    @hookimpl
    def kvcore_register(self, regions: Sequence[Region]) -> Any:
        self.regions += regions

    @hookimpl
    def kvcore_unregister(self, regions: Sequence[Region]) -> None:
        self.calls.append("unregister")
        self.regions.clear()

    @hookimpl
    def kvcore_endpoint(self) -> Endpoint:
        return Endpoint(b"here")

    @hookimpl
    def kvcore_connect(self, peer: Peer) -> None:
        self.calls.append("connect")

    @hookimpl
    def kvcore_disconnect(self, peer: str) -> bool:
        self.calls.append("disconnect")
        return False

    @hookimpl
    def kvcore_transfer(self, transfer: Transfer) -> Any:
        self.transfers.append(transfer)
        answer = self.answers.get(transfer.room.number)
        return self.post(transfer) if answer is None else answer(transfer)

    def post(self, transfer: Transfer) -> Any:
        """What a transfer does by itself: a ticket that is done when it is polled."""
        ticket = next(self._tickets)
        with self.lock:
            self.jobs[ticket] = transfer
        return ticket

    @hookimpl
    def kvcore_poll(self, tickets: Sequence[Ticket]) -> Any:
        return [self.state(ticket) for ticket in tickets]

    def state(self, ticket: Ticket) -> Any:
        """What ``poll`` says of one ticket."""
        with self.lock:
            if ticket in self.cancelled:
                del self.jobs[ticket]
                self.cancelled.discard(ticket)
                return failed("cancelled")
            if self.held.is_set():
                return PENDING
            copy(self.jobs.pop(ticket))
        return DONE

    @hookimpl
    def kvcore_abort(self, room: RoomKey, tickets: Sequence[Ticket]) -> None:
        self.aborted.append((room, list(tickets)))
        if self.able.cancel:
            with self.lock:
                self.cancelled |= {ticket for ticket in tickets if ticket in self.jobs}

    @hookimpl
    def kvcore_clear(self, room: RoomKey) -> None:
        self.cleared.append(room)
        with self.lock:
            self.jobs = {ticket: job for ticket, job in self.jobs.items() if job.room != room}

    @hookimpl
    def kvcore_held_rooms(self) -> list[RoomKey]:
        with self.lock:
            return list({job.room for job in self.jobs.values()})

    @hookimpl
    def kvcore_close(self) -> None:
        self.calls.append("close")

    def gate(self, name: str | int) -> Gate:
        """For backends that block: hold transfers to a peer (its instance id) or of a room (its number) from now on."""
        return self.gates.setdefault(name, Gate())

    def open_gates(self) -> None:
        """Let everything through, now and later."""
        for gate in self.gates.values():
            gate.opened.set()


class Gate:
    """What a blocking transfer waits at. ``met`` counts those that came."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.met = 0

    def wait(self) -> None:
        self.met += 1
        assert self.opened.wait(MOST_HELD_S), "a gate was never opened"


class BlockingBackend(MemoryBackend):
    """Transfer blocks at the gate of its peer or its room, if there is one, then moves the bytes and says DONE."""

    able = Capabilities(blocking=True)
    opened_by_close: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.at_once = self.most_at_once = 0

    def post(self, transfer: Transfer) -> Any:
        with self.lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            for name in (transfer.peer, transfer.room.number):
                if name in self.gates:
                    self.gates[name].wait()
            copy(transfer)
        finally:
            with self.lock:
                self.at_once -= 1
        return DONE

    @hookimpl
    def kvcore_close(self) -> None:
        super().kvcore_close()
        if self.opened_by_close:
            self.open_gates()


class ExclusiveBackend(MemoryBackend):
    """Every hook takes its time, and notes the names of two that overlap."""

    able = Capabilities(exclusive=True, cancel=True)

    def __init__(self) -> None:
        super().__init__()
        self.overlaps: list[tuple[str, str]] = []
        self.ran: set[str] = set()
        self.connecting = Gate()
        """What ``connect`` waits at; open by itself."""
        self.connecting.opened.set()
        self._alone = threading.Lock()
        self._now = ""
        self._never = threading.Event()

    @contextmanager
    def alone(self, hook: str) -> Iterator[None]:
        """A hook's time within the engine."""
        self.ran.add(hook)
        if not self._alone.acquire(blocking=False):
            self.overlaps.append((self._now, hook))
            yield
            return
        self._now = hook
        try:
            self._never.wait(0.001)
            yield
        finally:
            self._alone.release()

    @hookimpl
    def kvcore_open(self, context: OpenContext) -> None:
        with self.alone("open"):
            super().kvcore_open(context)

    @hookimpl
    def kvcore_register(self, regions: Sequence[Region]) -> None:
        with self.alone("register"):
            super().kvcore_register(regions)

    @hookimpl
    def kvcore_endpoint(self) -> Endpoint:
        with self.alone("endpoint"):
            return super().kvcore_endpoint()

    @hookimpl
    def kvcore_connect(self, peer: Peer) -> None:
        with self.alone("connect"):
            self.connecting.wait()
            super().kvcore_connect(peer)

    @hookimpl
    def kvcore_disconnect(self, peer: str) -> bool:
        with self.alone("disconnect"):
            return super().kvcore_disconnect(peer)

    @hookimpl
    def kvcore_transfer(self, transfer: Transfer) -> Any:
        with self.alone("transfer"):
            return super().kvcore_transfer(transfer)

    @hookimpl
    def kvcore_poll(self, tickets: Sequence[Ticket]) -> Any:
        with self.alone("poll"):
            return super().kvcore_poll(tickets)

    @hookimpl
    def kvcore_abort(self, room: RoomKey, tickets: Sequence[Ticket]) -> None:
        with self.alone("abort"):
            super().kvcore_abort(room, tickets)

    @hookimpl
    def kvcore_clear(self, room: RoomKey) -> None:
        with self.alone("clear"):
            super().kvcore_clear(room)

    @hookimpl
    def kvcore_held_rooms(self) -> list[RoomKey]:
        with self.alone("held_rooms"):
            return super().kvcore_held_rooms()

    @hookimpl
    def kvcore_close(self) -> None:
        with self.alone("close"):
            super().kvcore_close()


class HangingBackend(MemoryBackend):
    """Hooks at whose names there is a gate wait at it."""

    def _stand(self, hook: str) -> None:
        if hook in self.gates:
            self.gates[hook].wait()

    @hookimpl
    def kvcore_connect(self, peer: Peer) -> None:
        self._stand("connect")
        super().kvcore_connect(peer)

    @hookimpl
    def kvcore_transfer(self, transfer: Transfer) -> Any:
        self._stand("transfer")
        return super().kvcore_transfer(transfer)

    @hookimpl
    def kvcore_poll(self, tickets: Sequence[Ticket]) -> Any:
        self._stand("poll")
        return super().kvcore_poll(tickets)

    @hookimpl
    def kvcore_abort(self, room: RoomKey, tickets: Sequence[Ticket]) -> None:
        self._stand("abort")
        super().kvcore_abort(room, tickets)

    @hookimpl
    def kvcore_disconnect(self, peer: str) -> bool:
        self._stand("disconnect")
        return super().kvcore_disconnect(peer)

    @hookimpl
    def kvcore_unregister(self, regions: Sequence[Region]) -> None:
        self._stand("unregister")
        super().kvcore_unregister(regions)

    @hookimpl
    def kvcore_close(self) -> None:
        self._stand("close")
        super().kvcore_close()


class BadStartBackend(MemoryBackend):
    """``at_open``, or ``at_second`` for the second region, is raised if it is an exception, else returned. Only ``tidy`` ones leave
    nothing registered then."""

    at_open: ClassVar[object] = None
    at_second: ClassVar[object] = None
    tidy: ClassVar[bool] = False

    @hookimpl
    def kvcore_open(self, context: OpenContext) -> Any:
        super().kvcore_open(context)
        return _do(self.at_open)

    @hookimpl
    def kvcore_register(self, regions: Sequence[Region]) -> Any:
        if not self.tidy:
            self.regions.append(regions[0])
        bad = _do(self.at_second)
        if bad is None:
            self.regions = list(regions)
        return bad


class OddBackend(MemoryBackend):
    """``said`` by room is what poll reports of its tickets: raised if it is an exception. ``hooks`` that are named raise."""

    def __init__(self) -> None:
        super().__init__()
        self.said: dict[int, object] = {}
        self.raises: dict[str, BaseException] = {}
        self.progressed = 0

    def state(self, ticket: Ticket) -> Any:
        number = self.jobs[ticket].room.number
        return _do(self.said[number]) if number in self.said else super().state(ticket)

    @hookimpl
    def kvcore_progress(self) -> None:
        self.progressed += 1
        _do(self.raises.get("progress"))

    @hookimpl
    def kvcore_abort(self, room: RoomKey, tickets: Sequence[Ticket]) -> None:
        _do(self.raises.get("abort"))
        super().kvcore_abort(room, tickets)

    @hookimpl
    def kvcore_clear(self, room: RoomKey) -> None:
        super().kvcore_clear(room)
        _do(self.raises.get("clear"))

    @hookimpl
    def kvcore_held_rooms(self) -> list[RoomKey]:
        _do(self.raises.get("held_rooms"))
        return super().kvcore_held_rooms()

    @hookimpl
    def kvcore_close(self) -> None:
        super().kvcore_close()
        _do(self.raises.get("close"))


def _do(what: object) -> object:
    if isinstance(what, BaseException):
        raise what
    return what
