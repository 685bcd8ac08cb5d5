"""What is known of other instances: paired, dialled, departed; and what pairing needs of the core."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvcore import hookspecs, mapping
from kvcore.channel import Route
from kvcore.hookspecs import Endpoint
from kvcore.mapping import Share
from kvcore.planner import Layout
from kvcore.protocol.events import Party
from kvcore.protocol.messages import Abort, Ack, Destination, Join
from kvcore.states import FailureCode, RoomKey, Side
from kvcore.stories import Stories
from kvcore.wire import Introduction, RoomBody

FIRST_HELLO_S = 0.2
_TO_SENDER = (Join, Destination, Ack, Abort)


@dataclass(frozen=True, slots=True)
class Gathered:
    """What prefill ranks write here: the instances that write each layer, and which layer is not written once, in words."""

    writers: Mapping[int, frozenset[str]]
    wrong: str | None


@dataclass(eq=False, slots=True)
class Peer:
    """A paired instance, as seen from our ``side``.

    ``heard`` is when a letter of it last came, ``excused`` how long we ourselves did not listen since.
    """

    side: Side
    mine: Introduction
    intro: Introduction
    layout: Layout
    pairing: int
    route: Route
    welcome: bytes
    heard: float
    liveness_s: float
    expired: int = 0
    excused: float = 0.0
    pinged: float = 0.0
    poisoned: bool = False
    """The path to it is broken, and it is about to be lost: rooms that it announces now are left to the pairing that follows."""
    _parties: dict[int, Party] = field(default_factory=dict)
    _shares: dict[int, Mapping[str, Share]] = field(default_factory=dict)
    gathered: dict[tuple[int, tuple[str, ...]], Gathered] = field(default_factory=dict)
    """What it and other prefill ranks write here, see ``gathering``."""

    @property
    def instance(self) -> str:
        return self.intro.instance

    def party(self, room: int) -> Party:
        """The peer as the protocol of that room knows it."""
        prefill, decode = (self.mine, self.intro) if self.side == "prefill" else (self.intro, self.mine)
        turn = room % prefill.place.tp_size
        party = self._parties.get(turn)
        if party is None or party.expired != self.expired:
            met, place = len(mapping.destinations(mapping.sent(prefill.pools), prefill.place, decode.place, turn)), self.intro.place
            party = Party(self.intro.instance, place.rank, met, self.expired, (place.tp_size, place.pp_size))
            self._parties[turn] = party
        return party

    def shares(self, room: int) -> Mapping[str, Share]:
        """What this prefill rank writes in that room to each of its pools."""
        turn = room % self.mine.place.tp_size
        if turn not in self._shares:
            self._shares[turn] = mapping.shares(self.mine.pools, self.intro.pools, self.mine.place, self.intro.place, turn)
        return self._shares[turn]

    def heard_lately(self, now: float) -> bool:
        """R7: whether a ticket may be started towards it."""
        return now - self.heard <= self.liveness_s


class Waiter(Protocol):
    """Somebody who waits for a link to be paired."""

    def wanted(self) -> bool:
        """Whether the answer is still of interest."""
        ...

    def paired(self, peer: Peer) -> None: ...
    def refused(self, code: FailureCode, text: str) -> None: ...


@dataclass(eq=False, slots=True)
class Link:
    """A dialled control address, from the first hello on."""

    address: str
    route: Route
    pairing: int
    hello: bytes = b""
    hello_s: float = FIRST_HELLO_S
    next_hello: float = 0.0
    connecting: bool = False
    peer: Peer | None = None
    waiters: list[Waiter] = field(default_factory=list)
    idle_since: float = 0.0
    curve: str = ""
    """The public key that the instance there must have."""


@dataclass(eq=False, slots=True)
class Departed:
    """A lost peer for which pages here still wait for proof."""

    intro: Introduction
    gone: bool
    disconnected: bool = False


class Home(Protocol):
    """What the peers reach of their manager."""

    stories: Stories

    def got(self, side: Side, message: RoomBody, party: Party) -> bool: ...
    def lost(self, instance: str, text: str, replaced: bool) -> None: ...
    def fenced(self, instance: str, side: Side) -> None: ...
    def slowly(self, call: Callable[[], object], then: Callable[[object, BaseException | None], None]) -> None: ...
    def holds(self, instance: str) -> bool: ...
    def spoken_to(self) -> dict[str, int]: ...
    def event(self, name: str, room: RoomKey | None = None, **details: str | int | float) -> None: ...


def addressee(message: RoomBody) -> Side:
    """The side that a room message is for."""
    return "prefill" if isinstance(message, _TO_SENDER) else "decode"


def other_side(side: Side) -> Side:
    """The opposite side."""
    return "decode" if side == "prefill" else "prefill"


def engine_peer(intro: Introduction, data: bytes, keys: tuple[bytes, ...]) -> hookspecs.Peer:
    return hookspecs.Peer(intro.instance, Endpoint(data, list(keys)), tuple(info.region() for info in intro.regions), intro.pools)
