"""Animals that lie about how and when a ticket ends."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvcore import TicketKind, TicketState, Transfer, hookimpl
from kvcore.backends.local import Job
from kvcore.hookspecs import DONE, PENDING, RETRY, NothingPosted
from kvcore.states import RoomKey
from kvcore_zoo.animal import Animal

LARGE = 1 << 16
"""Bytes of a transfer from which on some of them misbehave."""
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
            _never.wait(0.3 if job.transfer.nbytes > LARGE else 0.0)
            job.begun = True
            state = self._send(job)
            job.state = state if job.state is PENDING else job.state


class Unposted(Animal):
    """A refusal says that nothing was posted, when some of it was: of many descriptors, the first time."""

    name = "zoo-unposted"
    refused = False

    @hookimpl
    def kvcore_transfer(self, transfer: Transfer) -> Job | TicketState:
        ticket = super().kvcore_transfer(transfer)
        if transfer.length.size > 8 and not self.refused:
            self.refused = True
            raise NothingPosted("no room in the queue")
        return ticket

    def _send(self, job: Job) -> TicketState:
        _never.wait(0.2 if self.refused and job.transfer.length.size > 8 else 0.0)
        return super()._send(job)


class Repeater(Animal):
    """Answers RETRY for what it has posted all the same, once a room."""

    name = "zoo-repeater"

    def __init__(self) -> None:
        super().__init__()
        self._met: set[RoomKey] = set()

    @hookimpl
    def kvcore_transfer(self, transfer: Transfer) -> Job | TicketState:
        ticket = super().kvcore_transfer(transfer)
        if transfer.length.size > 8 and transfer.room not in self._met:
            self._met.add(transfer.room)
            return RETRY
        return ticket


class Shuffled(Animal):
    """States of several tickets come in the wrong order."""

    name = "zoo-shuffled"

    @hookimpl
    def kvcore_poll(self, tickets: Sequence[Job]) -> list[TicketState]:
        return super().kvcore_poll(tickets)[::-1]


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


def _without_last(transfer: Transfer) -> Transfer:
    from dataclasses import replace

    arrays = ("local_region", "remote_region", "local_offset", "remote_offset", "length")
    return replace(transfer, **{name: getattr(transfer, name)[:-1] for name in arrays})
