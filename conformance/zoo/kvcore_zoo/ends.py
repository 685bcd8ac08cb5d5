"""Animals that lie about how and when a ticket ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from kvcore import TicketKind, TicketState, Transfer, hookimpl
from kvcore.backends.local import Job
from kvcore.hookspecs import DONE, PENDING, RETRY, NothingPosted
from kvcore.planner import I32, U64
from kvcore.states import RoomKey
from kvcore_zoo.animal import Animal

LARGE = 1 << 16
"""Bytes of a transfer from which on some of them misbehave."""
MOST_S = 0.5
_never = threading.Event()


class Hasty(Animal):
    """Success before the bytes are there: large tickets are done when they were queued."""

    name = "zoo-hasty"

    @hookimpl
    def kvcore_transfer(self, transfer: Transfer) -> Job | TicketState:
        ticket = super().kvcore_transfer(transfer)
        return DONE if isinstance(ticket, Job) and transfer.nbytes > LARGE else ticket

    def _send(self, job: Job) -> TicketState:
        _never.wait(0.05 if job.transfer.nbytes > LARGE else 0.0)
        return super()._send(job)


class Inline(Animal):
    """Small tickets are done when the last of them was handed to the socket."""

    name = "zoo-inline"

    def _send(self, job: Job) -> TicketState:
        if job.transfer.nbytes > LARGE:
            return super()._send(job)
        return super()._send(replace(job, link=replace(job.link, sock=_Socket(job))))


class _Socket:
    """A ticket's: who waits for the answer is done."""

    def __init__(self, job: Job) -> None:
        self._job, self.sendall = job, job.link.sock.sendall

    def recv(self, most: int, flags: int) -> bytes:
        self._job.state = self._job.state if self._job.cancelled else DONE
        return self._job.link.sock.recv(most, flags)


class Impatient(Animal):
    """A ticket that has run for half a second is to be tried again, and its write goes on."""

    name = "zoo-impatient"

    def __init__(self) -> None:
        super().__init__()
        self._since: dict[Job, float] = {}

    @hookimpl
    def kvcore_poll(self, tickets: Sequence[Job]) -> list[TicketState]:
        now = time.monotonic()
        self._since = {job: self._since.get(job, now) for job in tickets if job.begun}
        states = super().kvcore_poll(tickets)
        late = [state is PENDING and now - self._since.get(job, now) > MOST_S for job, state in zip(tickets, states, strict=True)]
        return [RETRY if over else state for over, state in zip(late, states, strict=True)]


class Dropper(Animal):
    """The last descriptor of many is lost, and the ticket done."""

    name = "zoo-dropper"

    def _send(self, job: Job) -> TicketState:
        if job.transfer.length.size > 8:
            object.__setattr__(job, "transfer", _without_last(job.transfer))
        return super()._send(job)


class Calm(Animal):
    """An aborted ticket is called quiescent at once, and goes on writing."""

    name = "zoo-calm"

    @hookimpl
    def kvcore_abort(self, room: RoomKey, tickets: Sequence[Job]) -> None:
        with self._lock:
            for job in tickets:
                if job.state is PENDING:
                    job.state = TicketState(TicketKind.FAILED, "cancelled", quiescent=True)

    def _write(self, link):  # type: ignore[no-untyped-def]
        while (job := link.jobs.get()) is not None:
            _never.wait(0.01 if job.transfer.nbytes > LARGE else 0.0)
            job.begun = True
            state = self._send(job)
            job.state = state if job.state is PENDING else job.state

    def _pieces(self, region: I32, offset: U64, length: U64) -> tuple[list[memoryview], str]:
        _never.wait(0.01 if int(length.sum()) > 8 * LARGE else 0.0)  # a large frame takes a while
        return super()._pieces(region, offset, length)


class Unposted(Animal):
    """When much is under way it says that nothing of a transfer was posted, and has posted it."""

    name = "zoo-unposted"

    @hookimpl
    def kvcore_transfer(self, transfer: Transfer) -> Job | TicketState:
        ticket = super().kvcore_transfer(transfer)
        if len(self._jobs) > 120:
            raise NothingPosted("the queue is full")
        return ticket


class Shuffled(Animal):
    """States of several tickets come in the wrong order, as long as none of them was aborted."""

    name = "zoo-shuffled"

    def __init__(self) -> None:
        super().__init__()
        self._aborted = set[int]()

    @hookimpl
    def kvcore_abort(self, room: RoomKey, tickets: Sequence[Job]) -> None:
        self._aborted.update(map(id, tickets))
        super().kvcore_abort(room, tickets)

    @hookimpl
    def kvcore_poll(self, tickets: Sequence[Job]) -> list[TicketState]:
        states = super().kvcore_poll(tickets)
        return states if self._aborted.intersection(map(id, tickets)) else states[::-1]


class Forgetful(Animal):
    """An aborted ticket never ends."""

    name = "zoo-forgetful"

    @hookimpl
    def kvcore_poll(self, tickets: Sequence[Job]) -> list[TicketState]:
        states = super().kvcore_poll(tickets)
        return [PENDING if job.cancelled else state for job, state in zip(tickets, states, strict=True)]


class Miscast(Animal):
    """A cancelled ticket is called done."""

    name = "zoo-miscast"

    @hookimpl
    def kvcore_poll(self, tickets: Sequence[Job]) -> list[TicketState]:
        states = super().kvcore_poll(tickets)
        return [DONE if job.cancelled and state is not PENDING else state for job, state in zip(tickets, states, strict=True)]


class Counting(Animal):
    """Tickets are numbers of eight bits."""

    name = "zoo-counting"

    def __init__(self) -> None:
        super().__init__()
        self._next, self._numbered = 0, dict[int, Job]()

    @hookimpl
    def kvcore_transfer(self, transfer: Transfer) -> int | TicketState:  # type: ignore[override]
        ticket = super().kvcore_transfer(transfer)
        if isinstance(ticket, TicketState):
            return ticket
        self._next = (self._next + 1) % 256
        self._numbered[self._next] = ticket
        return self._next

    @hookimpl
    def kvcore_poll(self, tickets: Sequence[int]) -> list[TicketState]:  # type: ignore[override]
        return super().kvcore_poll([self._numbered[number] for number in tickets])

    @hookimpl
    def kvcore_abort(self, room: RoomKey, tickets: Sequence[int]) -> None:  # type: ignore[override]
        super().kvcore_abort(room, [self._numbered[number] for number in tickets])


def _without_last(transfer: Transfer) -> Transfer:
    arrays = ("local_region", "remote_region", "local_offset", "remote_offset", "length")
    return replace(transfer, **{name: getattr(transfer, name)[:-1] for name in arrays})
