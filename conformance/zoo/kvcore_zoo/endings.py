"""Animals that misbehave only when a room is aborted or cleared."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvcore import TicketKind, TicketState, Transfer, hookimpl
from kvcore.backends.local import Job
from kvcore.hookspecs import DONE, PENDING
from kvcore.states import RoomKey
from kvcore_zoo.animal import Animal

_never = threading.Event()


class Touchy(Animal):
    """The second clear of a room raises."""

    name = "zoo-touchy"

    def __init__(self) -> None:
        super().__init__()
        self._cleared: set[RoomKey] = set()

    @hookimpl
    def kvcore_clear(self, room: RoomKey) -> None:
        if room in self._cleared:
            raise KeyError(room)
        self._cleared.add(room)
        super().kvcore_clear(room)


class Strict(Animal):
    """Clear of a room that it never heard of raises."""

    name = "zoo-strict"

    def __init__(self) -> None:
        super().__init__()
        self._heard_of: set[RoomKey] = set()

    @hookimpl
    def kvcore_transfer(self, transfer: Transfer) -> Job | TicketState:
        self._heard_of.add(transfer.room)
        return super().kvcore_transfer(transfer)

    @hookimpl
    def kvcore_clear(self, room: RoomKey) -> None:
        if room not in self._heard_of:
            raise KeyError(room)
        super().kvcore_clear(room)


class Hoarder(Animal):
    """Holds every room that was aborted for ever."""

    name = "zoo-hoarder"

    def __init__(self) -> None:
        super().__init__()
        self._hoard: set[RoomKey] = set()

    @hookimpl
    def kvcore_abort(self, room: RoomKey, tickets: Sequence[Job]) -> None:
        self._hoard.add(room)
        super().kvcore_abort(room, tickets)

    @hookimpl
    def kvcore_held_rooms(self) -> list[RoomKey]:
        return list({*super().kvcore_held_rooms(), *self._hoard})


class Sticky(Animal):
    """Abort waits for the engine, half a second."""

    name = "zoo-sticky"

    @hookimpl
    def kvcore_abort(self, room: RoomKey, tickets: Sequence[Job]) -> None:
        super().kvcore_abort(room, tickets)
        _never.wait(0.5)


class Clinging(Animal):
    """Abort takes 30 ms."""

    name = "zoo-clinging"

    @hookimpl
    def kvcore_abort(self, room: RoomKey, tickets: Sequence[Job]) -> None:
        super().kvcore_abort(room, tickets)
        _never.wait(0.03)


class Quitter(Animal):
    """Abort raises SystemExit, and has cancelled nothing."""

    name = "zoo-quitter"

    @hookimpl
    def kvcore_abort(self, room: RoomKey, tickets: Sequence[Job]) -> None:
        raise SystemExit(1)


class Sweeping(Animal):
    """Abort of a room cancels all tickets there are."""

    name = "zoo-sweeping"

    @hookimpl
    def kvcore_abort(self, room: RoomKey, tickets: Sequence[Job]) -> None:
        super().kvcore_abort(room, list(self._jobs))


class Namesake(Animal):
    """Clear goes by the room's number alone, so another attempt's tickets go too."""

    name = "zoo-namesake"

    @hookimpl
    def kvcore_clear(self, room: RoomKey) -> None:
        for held in {job.transfer.room for job in list(self._jobs) if job.transfer.room.number == room.number}:
            super().kvcore_clear(held)
        super().kvcore_clear(room)


class Kinsman(Animal):
    """Clear goes by number and attempt, so the next lifetime's tickets go too."""

    name = "zoo-kinsman"

    @hookimpl
    def kvcore_clear(self, room: RoomKey) -> None:
        for held in {job.transfer.room for job in list(self._jobs)}:
            if (held.number, held.attempt) == (room.number, room.attempt):
                super().kvcore_clear(held)


class Grudging(Animal):
    """A room that was aborted is refused for ever, by number and attempt, also when it is a new one."""

    name = "zoo-grudging"

    def __init__(self) -> None:
        super().__init__()
        self._aborted: set[tuple[int, int]] = set()

    @hookimpl
    def kvcore_abort(self, room: RoomKey, tickets: Sequence[Job]) -> None:
        self._aborted.add((room.number, room.attempt))
        super().kvcore_abort(room, tickets)

    @hookimpl
    def kvcore_transfer(self, transfer: Transfer) -> Job | TicketState:
        if (transfer.room.number, transfer.room.attempt) in self._aborted:
            return TicketState(TicketKind.FAILED, "aborted", quiescent=True)
        return super().kvcore_transfer(transfer)


class Deaf(Animal):
    """Declares cancel and does nothing."""

    name = "zoo-deaf"

    @hookimpl
    def kvcore_abort(self, room: RoomKey, tickets: Sequence[Job]) -> None:
        pass


class Ghost(Animal):
    """A write that ends after its room was cleared, a little late, ends the tickets of other rooms."""

    name = "zoo-ghost"

    def _send(self, job: Job) -> TicketState:
        state = super()._send(job)
        if job not in self._jobs:
            _never.wait(0.02)
            for other in list(self._jobs):
                other.state = DONE if other.state is PENDING else other.state
        return state


class Revenant(Animal):
    """A write that ends after its room was cleared brings the room back, and it is held for ever."""

    name = "zoo-revenant"

    def __init__(self) -> None:
        super().__init__()
        self._back: set[RoomKey] = set()

    def _send(self, job: Job) -> TicketState:
        state = super()._send(job)
        if job not in self._jobs:
            self._back.add(job.transfer.room)
        return state

    @hookimpl
    def kvcore_held_rooms(self) -> list[RoomKey]:
        return list({*super().kvcore_held_rooms(), *self._back})


class Squirrel(Animal):
    """Remembers every room that was cleared with a megabyte each, and does not say so."""

    name = "zoo-squirrel"

    def __init__(self) -> None:
        super().__init__()
        self._nuts: list[bytearray] = []

    @hookimpl
    def kvcore_clear(self, room: RoomKey) -> None:
        self._nuts.append(bytearray(b"\1" * (1 << 20)))
        super().kvcore_clear(room)
