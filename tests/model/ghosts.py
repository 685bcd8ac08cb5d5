"""What the model knows of rooms beside the code under test: what each lifetime was opened for, and when C4 lets a name be used again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from kvcore import alarms, handles, ledger, rooms
from kvcore.room import Room
from kvcore.states import KVPoll, Reason, RoomId, RoomKey, Side
from tests.protocol.world import Violation as Violation

if TYPE_CHECKING:
    from tests.model.node import Node

BOTH: tuple[Side, ...] = ("prefill", "decode")


class Modules(NamedTuple):
    """The modules under test: shipped, or a mutant's."""

    rooms: ModuleType = rooms
    ledger: ModuleType = ledger
    handles: ModuleType = handles
    alarms: ModuleType = alarms


@dataclass(frozen=True)
class Limits:
    """The limits of one instance, in seconds of the model's clock."""

    bootstrap_s: float = 8.0
    input_s: float = 8.0
    transfer_s: float = 8.0
    ticket_s: float = 4.0
    liveness_s: float = 4.0
    quarantine_s: float | None = 16.0
    orphan_s: float = 2.0

    def of(self, state: KVPoll) -> float:
        """The limit of a state that is not terminal."""
        return {1: self.bootstrap_s, 2: self.input_s, 3: self.transfer_s}[state]

    @property
    def table(self) -> dict[str, float | None]:
        """As the core gives them to its table."""
        names = ("bootstrap_s", "input_s", "transfer_s", "quarantine_s", "orphan_s")
        return {name: getattr(self, name) for name in names} | {"mark_s": 2 * self.orphan_s}

    @property
    def total(self) -> float:
        """After so long without traffic every limit has passed, one after the other."""
        return self.bootstrap_s + 2 * self.input_s + self.transfer_s + self.ticket_s + (self.quarantine_s or 0.0) + 2 * self.orphan_s + 1.0


class Clock:
    """The model's time, moved by hand. All times are multiples of 1/64 second, so that sums are exact."""

    def __init__(self) -> None:
        self.now = 1024.0

    def __call__(self) -> float:
        return self.now


class Flag:
    """A ready event, and the pages that it says are filled."""

    def __init__(self, life: Lifetime, pages: Sequence[int], first: int) -> None:
        self.life, self.pages, self.first = life, pages, first
        self.fired = False

    def query(self) -> bool:
        return self.fired


@dataclass(eq=False)
class Use:
    """One request: the n-th use of a room, for which each side opens at most one lifetime."""

    id: RoomId
    number: int
    pages: int
    place: str
    """Which decode instance's address it goes to."""
    first: tuple[Side, ...] = BOTH
    """The sides of which one must open first (C4)."""
    sender: Lifetime | None = None
    receiver: Lifetime | None = None

    def life(self, side: Side) -> Lifetime | None:
        return self.sender if side == "prefill" else self.receiver

    @property
    def lives(self) -> list[Lifetime]:
        return [life for life in (self.sender, self.receiver) if life is not None]

    def may_open(self, side: Side) -> bool:
        """Whether this side may open now."""
        return self.life(side) is None and (side in self.first or bool(self.lives))

    def stamp(self, position: int) -> int:
        """What the page of that position in the sender's sequence holds."""
        return self.number * 100 + position

    def __str__(self) -> str:
        return f"use {self.number} of room {self.id}"


@dataclass(eq=False)
class Lifetime:
    """One lifetime that was opened, by its handle, with how it stood when it was last looked at."""

    node: Node
    use: Use
    room: Room
    handle: handles.Sender | handles.Receiver
    limit_from: float
    """When the limit of its state began."""
    state: KVPoll = KVPoll.BOOTSTRAPPING
    reason: Reason | None = None
    ended_at: float = 0.0
    pages: list[int] = field(default_factory=list)
    """Source pages in order, or the destination's; empty once they are free for others."""
    handed: int = 0
    last: bool = False
    received: bool = False
    stored: bool = True
    released: bool = False

    @property
    def key(self) -> RoomKey:
        return self.room.key

    def __str__(self) -> str:
        return f"{self.use}, {self.key.side} generation {self.key.generation} at {self.node.name}"


def first_to_open(uses: Sequence[Use], now: float, orphan_s: float) -> tuple[Side, ...]:
    """C4 for one name: the sides that may open its next use first; none if that must not begin yet."""
    lives = [life for use in uses for life in use.lives]
    if any(not life.handle.poll().terminal or life.node.dead for life in lives):
        return ()
    if now - max((life.ended_at for life in lives), default=now - 2 * orphan_s) >= 2 * orphan_s:
        return BOTH
    newest = {side: next((life for use in reversed(uses) if (life := use.life(side)) is not None), None) for side in BOTH}
    unpaired = tuple(side for side, life in newest.items() if life is not None and life.handle.unpaired)
    if len(unpaired) < 2:
        return unpaired or BOTH
    sender = newest["prefill"]
    assert sender is not None
    return ("prefill",) if now - sender.ended_at < orphan_s else ()
