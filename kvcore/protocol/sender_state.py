"""What a prefill rank stores of one room, and what follows from it: timers, resends, release safety.

Four stores, as the contract has them: the lifetime, tickets in flight (``flights``), last words (``words``) and marks of unpaired
ends (``marks``); besides, joins for a room nobody has opened here (``waiting``).
"""

from __future__ import annotations

import msgspec

from kvcore.protocol.events import LIMIT_OF, Pair, Party, Send, Timer
from kvcore.protocol.messages import PoolPages, Status
from kvcore.states import KVPoll, Reason, RoomId


class Dest(msgspec.Struct, frozen=True, gc=False):
    """A bound destination rank. ``ok`` counts its tickets that ended well, ``ready`` are the layers it was told of last; ``done``: success
    was said (final)."""

    party: Party
    rg: int
    pages: tuple[PoolPages, ...] = ()
    ok: int = 0
    ready: tuple[int, ...] = ()
    done: bool = False
    expired: bool = False


class Life(msgspec.Struct, frozen=True, gc=False):
    """A stored lifetime. ``chunks`` counts the chunks with pages, ``pages`` says how many pages of each pool they have (in the layer with
    the fewest, and with the most); ``n_dest`` is 0 until it is named. ``layered``: layers of the chunks that are of some only; ``full``:
    layers of which all pages so far are handed over, once there is such a chunk."""

    generation: int
    state: KVPoll = KVPoll.BOOTSTRAPPING
    reason: Reason | None = None
    joined: tuple[tuple[Party, int], ...] = ()
    dests: tuple[Dest, ...] = ()
    n_dest: int = 0
    chunks: int = 0
    pages: tuple[tuple[str, int, int], ...] = ()
    layered: tuple[tuple[int, tuple[int, ...]], ...] = ()
    full: tuple[int, ...] = ()
    handed: bool = False
    last: bool = False
    record: bytes = b""
    unpaired: bool = False

    @property
    def complete(self) -> bool:
        """Every destination rank is bound."""
        return 0 < self.n_dest == len(self.dests)

    def misfit(self) -> str | None:
        """How the pages handed over do not fit those of a destination, naming both numbers (T3); None while they may."""
        handed = {pool: (fewest, most) for pool, fewest, most in self.pages}
        prefixes = [{item.pool: item.prefix for item in dest.pages if item.prefix} for dest in self.dests]
        for dest, prefix in zip(self.dests, prefixes, strict=True):
            if prefix != prefixes[0]:
                return f"destination rank {self.dests[0].party.rank} has prefix pages {prefixes[0]} and rank {dest.party.rank} {prefix}"
            listed = {item.pool: len(item.pages) // 4 for item in dest.pages}
            for pool in sorted(handed.keys() | listed.keys()):
                (fewest, most), theirs = handed.get(pool, (0, 0)), listed.get(pool, 0)
                if most > theirs or (self.last and fewest != theirs):
                    mine = f"{most}" if fewest == most else f"{fewest} to {most} (by layer)"
                    return f"pool {pool!r}: the sender handed over {mine} pages and destination rank {dest.party.rank} listed {theirs}"
        return None

    def ready(self, running: frozenset[int]) -> tuple[int, ...]:
        """Layers of which all pages handed over so far are in, where these chunks are still under way."""
        layered = dict(self.layered)
        if not running <= layered.keys():
            return ()
        return tuple(sorted(set(self.full).difference(*(layered[chunk] for chunk in running))))

    def dest(self, rank: int) -> Dest | None:
        """The bound destination of that rank."""
        for dest in self.dests:
            if dest.party.rank == rank:
                return dest
        return None

    def pair(self, dest: Dest) -> Pair:
        """The pair a bound destination makes with this lifetime."""
        return Pair(dest.party.instance, dest.rg, self.generation)


class Word(msgspec.Struct, frozen=True, gc=False):
    """A verdict that its receiver has not acknowledged."""

    pair: Pair
    state: KVPoll
    reason: Reason | None = None
    record: bytes = b""


class Mark(msgspec.Struct, frozen=True, gc=False):
    """An end that some destination ranks do not know of: those not in ``met``. It refuses joins while it is the last lifetime here."""

    generation: int
    reason: Reason
    met: frozenset[int]
    size: int
    refuses: bool = True


class Flight(msgspec.Struct, frozen=True, gc=False):
    """Tickets of one pair that are not over: running, or stuck (quarantined). ``asked``: the receiver waits for
    Drained; ``expired``: a ticket was given up without proof."""

    pair: Pair
    running: frozenset[int] = frozenset()
    stuck: frozenset[int] = frozenset()
    asked: bool = False
    expired: bool = False


class Sender(msgspec.Struct, frozen=True, gc=False):
    """All that one prefill rank, ``rank`` of its group, knows of one room."""

    room: RoomId
    life: Life | None = None
    flights: tuple[Flight, ...] = ()
    words: tuple[Word, ...] = ()
    marks: tuple[Mark, ...] = ()
    waiting: tuple[tuple[Party, int], ...] = ()
    rank: int = 0

    arriving = False
    """Nothing is written here."""

    @property
    def empty(self) -> bool:
        """Nothing is stored."""
        return self.life is None and not (self.flights or self.words or self.marks or self.waiting)

    @property
    def orphan(self) -> bool:
        """Somebody has joined a room that nobody has opened here."""
        return bool(self.waiting)


def timers(state: Sender) -> tuple[Timer, ...]:
    """The limits that must be running in this state (S8, C1)."""
    wanted: list[Timer] = []
    life = state.life
    if life is not None and not life.state.terminal:
        wanted.append(Timer(LIMIT_OF[life.state], ("state", life.generation)))
    for flight in state.flights:
        wanted += [Timer("quarantine_s", ("ticket", flight.pair, chunk)) for chunk in sorted(flight.stuck)]
    for word in state.words:
        wanted.append(Timer("orphan_s", ("word", word.pair)))
    for mark in state.marks:
        wanted.append(Timer("mark_s", ("mark", mark.generation)))
    for party, rg in state.waiting:
        wanted.append(Timer("orphan_s", ("join", party.instance, rg)))
    return tuple(wanted)


def resends(state: Sender) -> bool:
    """Whether ``resend`` has anything to say."""
    return bool(state.words)


def resend(state: Sender) -> tuple[Send, ...]:
    """What is sent again until it is answered: verdicts that nobody acknowledged."""
    return tuple(tell(state.room, word) for word in state.words)


def release_safe(state: Sender, generation: int) -> bool:
    """R1: no engine can read the pages of that lifetime any more, as far as this state knows."""
    if any(flight.pair.sg == generation for flight in state.flights):
        return False
    life = state.life
    return life is None or life.generation != generation or life.state.terminal or not life.handed


def tell(room: RoomId, word: Word) -> Send:
    """The message that says a verdict."""
    pair = word.pair
    return Send(pair.peer, Status(room.number, room.attempt, pair.rg, pair.sg, word.state, word.reason, word.record))
