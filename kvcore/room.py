"""One lifetime of a room, as handle, table and ledger share it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, cast

from kvcore.errors import RoomError, shown
from kvcore.flight import Entry
from kvcore.memory import Indices
from kvcore.metrics import Meter
from kvcore.protocol import events as ev, receiver_state, sender_state
from kvcore.states import MAX_ATTEMPT, MAX_ROOM, KVPoll, RoomId, RoomKey

Life = sender_state.Life | receiver_state.Life


class Ready(Protocol):
    """What says that a chunk's pages are filled; a torch event fits (T4)."""

    def query(self) -> bool:
        """Whether the pages may be read now."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Pages handed over with one ``send``: per pool the source indices and where they stand in the sender's sequence. ``layers``: those
    it is of; None: all."""

    pages: Mapping[str, Indices]
    offset: Mapping[str, int]
    ready: Ready | None
    layers: range | None = None


class PrefillGroup(NamedTuple):
    """A prefill group as a receiver names it: its address, and which data-parallel rank of it (None: the one that has the room)."""

    address: str = ""
    dp_rank: int | None = None


NOWHERE = PrefillGroup()


class _Referable:
    """What ``dataclass`` adds from Python 3.11 on: slots, and a place for weak references."""

    __slots__ = ("__weakref__",)


@dataclass(eq=False, slots=True)
class Room(_Referable):
    """One lifetime of a room on one side, shared by its handle, the table and the ledger. Only the table replaces ``life``."""

    id: RoomId
    key: RoomKey
    life: Life
    meter: Meter
    group: PrefillGroup = NOWHERE
    """Receiver: whose ranks it expects."""
    chunks: list[Chunk] = field(default_factory=list)
    pages: dict[str, list[int]] = field(default_factory=dict)
    """Pages handed over so far, per pool and layer of it."""
    layer_sources: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """Receiver: the sender ranks that write each layer."""
    cleared: bool = False
    unproven: bool = False
    history: list[Entry] = field(default_factory=list)
    """Its states; the flight record has them too, but not for ever."""

    @property
    def opened(self) -> float:
        """When, on the monotonic clock."""
        return self.history[0].at

    @property
    def status(self) -> KVPoll:
        """The one status of this lifetime (S4)."""
        return self.life.state


def room_id(room: object, attempt: object) -> RoomId:
    """A checked room id; raises ``RoomError`` naming the range (C6)."""
    for what, value, most, text in (("room", room, MAX_ROOM, "2**63-1"), ("attempt", attempt, MAX_ATTEMPT, "2**31-1")):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise RoomError(f"{what} {shown(value)} ({type(value).__name__}) is refused; pass an integer in 0 .. {text}")
    return RoomId(int(cast("int", room)), int(cast("int", attempt)))  # plain ones: they travel


class Outside(Protocol):
    """What the table's effects reach: the control plane, the ledger, observers. Called under the table's lock; must not block."""

    def send(self, effect: ev.Send) -> None: ...
    def start(self, room: Room, effect: ev.Start) -> None: ...
    def seek(self, room: Room) -> None: ...
    def why_not_reached(self, room: Room) -> str: ...
    def cancel(self, key: RoomKey) -> None: ...
    def forget(self, key: RoomKey) -> None: ...
    def unproven(self, key: RoomKey, effect: ev.Unproven) -> None: ...
    def changed(self, room: Room, old: KVPoll | None) -> None: ...
    def wake_by(self, when: float) -> None: ...
    def listen(self) -> None: ...
    def settle(self) -> None: ...
