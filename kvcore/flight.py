"""The flight record: what happened to rooms here lately, in a ring, so that a room can be explained while it lives and after it is gone."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from typing import Any

import msgspec

from kvcore.errors import MOST_TEXT, one_line
from kvcore.protocol import events as ev, receiver_state, sender_state
from kvcore.protocol.messages import Abort, AnyRoomMessage, Destination, Join, Layers, Relay, Status
from kvcore.states import Reason, RoomId, Side

MOST_TOLD = 512
"""Of one room: the newest. A room of thousands of chunks has more."""
MOST_REASON = 400
"""Characters of a reason in an entry."""
MOST_ENTRIES = 32_768
"""Entries of one manager; of more the oldest goes. A room takes about twenty."""


Life = sender_state.Life | receiver_state.Life


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One thing that happened to a room: at a monotonic time, and what, as text or as the event that tells it; what was done about it;
    and the state that it brought, in words ("": none)."""

    at: float
    side: Side
    room: RoomId
    what: str | ev.Event
    effects: tuple[ev.Effect, ...] = ()
    news: str = ""

    @property
    def texts(self) -> list[str]:
        """In words, a line each."""
        told = [self.what, self.news, *self.effects] if self.news else [self.what, *self.effects]
        words = [each if isinstance(each, str) else _WORDS[type(each)](each) for each in told]
        return [text if text.isprintable() and len(text) <= MOST_TEXT else one_line(text) for text in words]

    @property
    def begins(self) -> bool:
        """Whether it can be the first of a room: it is opened, or somebody asks for it."""
        return isinstance(self.what, ev.Open) or (isinstance(self.what, ev.Got) and isinstance(self.what.message, Join | Abort))

    @property
    def peers(self) -> set[str]:
        """The other instances that were part of it."""
        found = {each.to if isinstance(each, ev.Send) else each.pair.peer for each in self.effects if isinstance(each, (ev.Send, ev.Start))}
        if isinstance(self.what, ev.Got):
            found.add(self.what.source.instance)
        return found | {self.what.pair.peer} if isinstance(self.what, ev.Ended) else found


class FlightRecord:
    """A bounded ring of entries, that finds those of a room at once. Not thread-safe: the table's lock guards it.

    ``clock`` counts seconds and never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ring: deque[Entry] = deque()
        self._rooms: dict[tuple[Side, RoomId], list[Entry]] = {}

    def __len__(self) -> int:
        return len(self._ring)

    def note(self, side: Side, room: RoomId, what: str | ev.Event, effects: tuple[ev.Effect, ...] = (), news: str = "") -> Entry:
        """Add an entry. Costs about a microsecond; what holds page lists or records is kept as the few words it is shown as."""
        if type(what) in _HEAVY:
            what = _lightened(what)
        for effect in effects:
            if type(effect) is ev.Send and type(effect.message) in _HEAVY_MESSAGES:
                effects = tuple(map(_lightened, effects))
                break
        entry = Entry(self._clock(), side, room, what, effects, news[: 2 * MOST_REASON])
        self._ring.append(entry)
        self._rooms.setdefault((side, room), []).append(entry)
        while len(self._ring) > MOST_ENTRIES:
            self._drop_oldest()
        return entry

    def _drop_oldest(self) -> None:
        """From its room first: where a signal handler raises in the middle, it is in the ring still, and dropped by the next note."""
        oldest = self._ring[0]
        entries = self._rooms.get((oldest.side, oldest.room), [])
        if entries and entries[0] is oldest:
            del entries[0]
        if not entries:
            self._rooms.pop((oldest.side, oldest.room), None)
        self._ring.popleft()

    def of(self, side: Side, room: RoomId) -> list[Entry]:
        """What the ring still has of a room, the newest ``MOST_TOLD``, in order."""
        return self._rooms.get((side, room), [])[-MOST_TOLD:]

    def lines(self, entries: Iterable[Entry]) -> list[str]:
        """One line for each entry: UTC, seconds since the first, what happened; and before them one that says so if the first are lost."""
        found = sorted(entries, key=lambda entry: entry.at)
        wall = time.time() - self._clock()
        lost = ["  what came before has left the record; seconds count from the oldest entry that is kept"]
        return lost * bool(found and not found[0].begins) + [
            f"  {datetime.fromtimestamp(wall + entry.at, timezone.utc):%H:%M:%S.%f} {entry.at - found[0].at:+.6f} s {text}"
            for entry in found
            for text in entry.texts
        ]


def news(old: Life | None, new: Life | None) -> str:
    """What a step has made of a lifetime's state, in words; "" if nothing."""
    if new is None or (old is not None and new.state is old.state and new.generation == old.generation):
        return ""
    return f"{new.state.name}: {new.reason}" if new.reason is not None else new.state.name


def kept(state: sender_state.Sender | receiver_state.Receiver) -> list[str]:
    """What is kept of a room beyond its lifetime, a line each (C1)."""
    if isinstance(state, receiver_state.Receiver):
        drains = [
            f"{drain.pages} pages until {drain.party.instance} says that it left them" if drain.published
            else f"a failure that {drain.party.instance} has not heard of" for drain in state.drains
        ]  # fmt: skip
        return drains + [f"a failure of generation {item.rg}, whose sender ranks are not known" for item in state.unrouted]
    flights = [
        f"tickets to {flight.pair.peer}: {len(flight.running)} run, {len(flight.stuck)} may still touch their pages"
        for flight in state.flights
    ]
    words = [f"{word.state.name}, which {word.pair.peer} has not acknowledged" for word in state.words]
    marks = [f"the end of generation {mark.generation}, of which {mark.size - len(mark.met)} ranks have not heard" for mark in state.marks]
    return flights + words + marks + [f"a join of {party.instance}, for which nobody has opened the room" for party, _ in state.waiting]


_HEAVY = frozenset((ev.Got, ev.Hand, ev.Receive, str))
_HEAVY_MESSAGES = frozenset((Abort, Destination, Layers, Relay, Status))


def _lightened(what: Any) -> Any:
    """The same without page lists and records, which would be kept alive by it."""
    if isinstance(what, str):
        return what[: 2 * MOST_REASON]
    if isinstance(what, (ev.Hand, ev.Receive)):
        return _WORDS[type(what)](what)
    if not isinstance(what, (ev.Got, ev.Send)) or type(what.message) not in _HEAVY_MESSAGES:
        return what
    return msgspec.structs.replace(what, message=_slim(what.message))


def _slim(message: AnyRoomMessage) -> AnyRoomMessage:
    if isinstance(message, Destination):
        return msgspec.structs.replace(message, pages=())
    if isinstance(message, Layers):
        return msgspec.structs.replace(message, layers=())
    if isinstance(message, Status) and message.record:
        message = msgspec.structs.replace(message, record=b"")
    reason: Reason | None = getattr(message, "reason", None)
    if reason is None or len(reason.text) <= MOST_REASON:
        return message
    return msgspec.structs.replace(message, reason=Reason.of(reason.code, reason.text[:MOST_REASON], reason.side, reason.rank))


def _message(message: AnyRoomMessage) -> str:
    said = f" {message.state.name}" if isinstance(message, Status) else ""
    reason = getattr(message, "reason", None)
    return f"{type(message).__name__}{said} (receiver {message.rg or '?'}, sender {message.sg or '?'})" + (f": {reason}" if reason else "")


def _handed(event: ev.Hand) -> str:
    pages = ", ".join(f"{most} pages of {pool!r} so far" for pool, _, most in event.pages) or "no pages"
    return f"a chunk was handed over: {pages}" + (", the last" if event.last else "")


def _received(event: ev.Receive) -> str:
    pages = ", ".join(f"{len(item.pages) // 4} pages of {item.pool!r}" for item in event.pages) or "no pages"
    return f"the destination was handed over: {pages}"


def _ended(event: ev.Ended) -> str:
    how = "done" if event.ok else f"failed ({event.reason})" if event.reason else "failed"
    return f"ticket of chunk {event.chunk} to {event.pair.peer}: {how}" + ("" if event.quiescent else "; its pages may still be in use")


_WORDS: dict[type, Callable[[Any], str]] = {
    ev.Open: lambda event: f"opened, generation {event.generation}",
    ev.Hand: _handed,
    ev.Receive: _received,
    ev.Fail: lambda event: "failed here",
    ev.Clear: lambda event: "cleared",
    ev.Route: lambda event: "sender ranks: " + ", ".join(party.instance for party in event.parties),
    ev.Got: lambda event: f"got {_message(event.message)} from {event.source.instance}",
    ev.Ended: _ended,
    ev.Lost: lambda event: f"peer {event.instance} was lost",
    ev.Fenced: lambda event: f"peer {event.instance} touches no pages here any more",
    ev.Timeout: lambda event: (
        f"{event.timer.limit} ran out" + ("" if event.timer.subject[0] == "state" else f" ({event.timer.subject[0]})")
    ),
    ev.Send: lambda effect: f"sent {_message(effect.message)} to {effect.to}",
    ev.Start: lambda effect: f"ticket of chunk {effect.chunk} to {effect.pair.peer} started",
    ev.Cancel: lambda effect: "its tickets are cancelled",
    ev.Seek: lambda effect: "looks for its sender ranks",
    ev.Forget: lambda effect: "the backend may drop what it holds",
    ev.Unproven: lambda effect: f"pages released after quarantine_s without proof that {effect.pair.peer} left them",
}
