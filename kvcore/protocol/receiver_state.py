"""What a decode rank stores of one room, and what follows from it: timers, resends, release safety.

Besides the lifetime: a ``Drain`` per sender rank that must still hear of a failure or say drained, and ``unrouted`` failures of
lifetimes that ended before it was known who to tell. A receiver needs no tombstones: the sender never speaks first.
"""

from __future__ import annotations

import msgspec

from kvcore.protocol.events import LIMIT_OF, Party, Send, Timer
from kvcore.protocol.messages import Abort, Destination, Join, PoolPages
from kvcore.states import KVPoll, Reason, RoomId


class Source(msgspec.Struct, frozen=True, gc=False):
    """One expected sender rank. ``sg`` is 0 until it answered the join; ``state`` is its verdict (SUCCESS is final)."""

    party: Party
    sg: int = 0
    published: bool = False
    state: KVPoll = KVPoll.BOOTSTRAPPING
    step: int = 0
    layers: tuple[int, ...] = ()
    """Those it said last are complete, and how many of its tickets had ended then."""


class Life(msgspec.Struct, frozen=True, gc=False):
    """A stored lifetime. ``pages`` is None until ``receive``; ``sources`` is empty until the route is known."""

    generation: int
    state: KVPoll = KVPoll.BOOTSTRAPPING
    reason: Reason | None = None
    sources: tuple[Source, ...] = ()
    pages: tuple[PoolPages, ...] | None = None
    record: bytes = b""
    unpaired: bool = False

    @property
    def joined(self) -> bool:
        """Every expected sender rank answered."""
        return bool(self.sources) and all(source.sg for source in self.sources)

    @property
    def listed(self) -> int:
        """Pages of the destination, of all pools."""
        return sum(len(item.pages) // 4 for item in self.pages or ())

    def source(self, instance: str) -> Source | None:
        """The expected sender rank that is this instance."""
        for source in self.sources:
            if source.party.instance == instance:
                return source
        return None


class Drain(msgspec.Struct, frozen=True, gc=False):
    """A sender rank that must hear of a failed lifetime; with ``published`` the ``pages`` wait for its Drained.

    ``asking`` ends when it said "expired": then only a fence or ``quarantine_s`` ends the wait.
    """

    party: Party
    rg: int
    sg: int
    published: bool
    reason: Reason
    pages: int = 0
    asking: bool = True


class Unrouted(msgspec.Struct, frozen=True, gc=False):
    """A lifetime that failed before its sender ranks were known."""

    rg: int
    reason: Reason


class Receiver(msgspec.Struct, frozen=True, gc=False):
    """All that one decode rank, ``rank`` of its group, knows of one room."""

    room: RoomId
    life: Life | None = None
    drains: tuple[Drain, ...] = ()
    unrouted: tuple[Unrouted, ...] = ()
    rank: int = 0

    orphan = False
    """A receiver speaks first."""

    @property
    def empty(self) -> bool:
        """Nothing is stored."""
        return self.life is None and not (self.drains or self.unrouted)

    @property
    def arriving(self) -> bool:
        """Data may be on its way."""
        return bool(self.drains) or (self.life is not None and self.life.state is KVPoll.TRANSFERRING)


def timers(state: Receiver) -> tuple[Timer, ...]:
    """The limits that must be running in this state (S8, C1). ``receive`` restarts ``input_s``."""
    wanted: list[Timer] = []
    life = state.life
    if life is not None and not life.state.terminal:
        restarted = life.state is KVPoll.WAITING_FOR_INPUT and life.pages is not None
        wanted.append(Timer(LIMIT_OF[life.state], ("state", life.generation, restarted)))
    for drain in state.drains:
        wanted.append(Timer("quarantine_s" if drain.published else "orphan_s", ("drain", drain.party.instance, drain.rg)))
    for item in state.unrouted:
        wanted.append(Timer("orphan_s", ("unrouted", item.rg)))
    return tuple(wanted)


def resends(state: Receiver) -> bool:
    """Whether ``resend`` has anything to say."""
    life = state.life
    if life is not None and life.sources and not life.state.terminal:
        return True
    return bool(state.drains) and any(drain.asking for drain in state.drains)


def resend(state: Receiver) -> tuple[Send, ...]:
    """What is sent again until it is answered: joins, destinations and aborts."""
    life = state.life
    asked = [drain for drain in state.drains if drain.asking]
    sends = [tell(state.room, drain) for drain in asked]
    if life is not None and not life.state.terminal:
        sends += [ask(state.room, life, source) for source in life.sources if source.state is not KVPoll.SUCCESS]
    return tuple(sends)


def tell(room: RoomId, drain: Drain) -> Send:
    """The abort that a drain record stands for."""
    return Send(drain.party.instance, Abort(room.number, room.attempt, drain.rg, drain.sg, drain.reason))


def ask(room: RoomId, life: Life, source: Source) -> Send:
    """What a live receiver says to a sender rank: its destination once both are known, else that it is here."""
    head = (room.number, room.attempt, life.generation, source.sg)
    if source.published and life.pages is not None:
        return Send(source.party.instance, Destination(*head, life.pages, source.party.size))
    return Send(source.party.instance, Join(*head))


def release_safe(state: Receiver, generation: int) -> bool:
    """R1: no engine can write the pages of that lifetime any more, as far as this state knows."""
    if any(drain.published and drain.rg == generation for drain in state.drains):
        return False
    life = state.life
    if life is None or life.generation != generation or life.state.terminal:
        return True
    return not any(source.published for source in life.sources)
