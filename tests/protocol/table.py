"""The protocol as tables: what each event makes of a room in each state, and how each message is answered.

The tables are the truth, and docs/protocol.md shows them: exploration must reach every entry and may reach no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from kvcore.protocol import events as ev
from kvcore.protocol.messages import Ack, Drained, Status

SENDER = """\
| sender | none | BOOTSTRAPPING | WAITING_FOR_INPUT | TRANSFERRING | SUCCESS | FAILED |
|---|---|---|---|---|---|---|
| open | B | | | | B | B |
| send | | = | T, F | =, F | | |
| send, the last | | = | T, S, F | =, S, F | | |
| abort | | F | F | F | | |
| clear | | none | none | none | none | none |
| Destination | | =, W, T, S, F | = | = | = | = |
| Abort | | F | =, F | =, F | = | = |
| ticket done | | | | =, S | | = |
| ticket failed | | | | F | | = |
| its limit | | F | F | F | | |
| peer lost | = | =, F | =, F | =, F | = | = |
| anything else | = | = | = | = | = | = |
"""

RECEIVER = """\
| receiver | none | BOOTSTRAPPING | WAITING_FOR_INPUT | TRANSFERRING | SUCCESS | FAILED |
|---|---|---|---|---|---|---|
| open | B | | | | B | B |
| abort | | F | F | F | | |
| clear | | none | none | none | none | none |
| Here | | =, W, T | = | = | = | = |
| Status(T) | | = | T | = | = | = |
| Status(S) | | = | T, S | =, S | = | = |
| Status(F) | | =, F | =, F | =, F | = | = |
| no such room | | =, F | = | = | = | = |
| Relay | | F | F | F | = | = |
| its limit | | F | F | F | | |
| peer lost | = | =, F | =, F | =, F | = | = |
| anything else | = | = | = | = | = | = |
"""

TO_SENDER = """\
| to the sender | live | ended | not stored | none: live | none: not live |
|---|---|---|---|---|---|
| Join | Here, - | Status(F), Status(S) | Status(F), Status(S) | Here, - | Status(F), - |
| Destination | Status(T), Status(S), Status(F), - | Status(S), Status(F) | Status(S), Status(F) | | |
| Abort | Drained, - | Drained, Drained(expired), - | Drained, Drained(expired), - | Which, Drained | Drained, Drained(expired), - |
| Ack | - | - | - | | |
| Ack(live) | - | - | - | | |
"""

TO_RECEIVER = """\
| to the receiver | live | ended | not stored |
|---|---|---|---|
| Here | Destination, - | - | - |
| Status(T) | - | - | - |
| Status(S) | Ack(live) | Ack(live) | Ack |
| Status(F) | Ack(live), Ack, Abort | Ack(live), Ack | Ack |
| no such room | Abort, - | - | - |
| Which | | Abort, - | Abort, - |
| Drained | | - | - |
| Drained(expired) | | - | - |
| Layers | - | - | - |
| Relay | Abort | - | - |
"""

TABLES = (SENDER, RECEIVER, TO_SENDER, TO_RECEIVER)


class Entry(NamedTuple):
    """One thing that a step did: the table, its row and column, and one outcome."""

    table: str
    row: str
    column: str
    outcome: str


def _read(text: str) -> Iterator[Entry]:
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    for row, *cells in rows:
        for column, cell in zip(header[1:], cells, strict=True):
            for outcome in cell.split(", ") if cell else ():
                yield Entry(header[0], row, column, outcome)


EXPECTED = frozenset(entry for text in TABLES for entry in _read(text))
_ROWS = {(entry.table, entry.row) for entry in EXPECTED}


def entries(side: str, event: ev.Event, before: Any, after: Any, effects: tuple[ev.Effect, ...]) -> set[Entry]:
    """What one step of a process says about the tables."""
    found = {_moved("sender" if side == "S" else "receiver", event, before, after)}
    if isinstance(event, ev.Got):
        found |= set(_answered("to the sender" if side == "S" else "to the receiver", event, before, effects))
    return found


# --- what became of the room's state


def _moved(table: str, event: ev.Event, before: Any, after: Any) -> Entry:
    old, new = _state(before), _state(after)
    row = _cause(event) if _concerns(table, event, before) else ""
    outcome = "=" if new == old and not isinstance(event, ev.Open) else new if new == "none" else new[0]
    return Entry(table, row if (table, row) in _ROWS else "anything else", old, outcome)


def _state(state: Any) -> str:
    return "none" if state.life is None else str(state.life.state.name)


def _concerns(table: str, event: ev.Event, before: Any) -> bool:
    """Whether an event is about the stored lifetime, or names none."""
    match event:
        case ev.Open() | ev.Lost() | ev.Fenced() | ev.Timeout():
            return True
        case ev.Got():
            named = event.message.sg if table == "sender" else event.message.rg
        case ev.Ended():
            named = event.pair.sg
        case _:
            named = event.generation
    return bool(named) and before.life is not None and before.life.generation == named


_CAUSES: dict[type, str] = {ev.Open: "open", ev.Fail: "abort", ev.Clear: "clear", ev.Lost: "peer lost"}


def _cause(event: ev.Event) -> str:
    match event:
        case ev.Got():
            return _said(event.message)
        case ev.Timeout():
            return "its limit" if event.timer.subject[0] == "state" else ""
        case ev.Hand():
            return "send, the last" if event.last else "send"
        case ev.Ended():
            return "ticket done" if event.ok else "ticket failed"
    return _CAUSES.get(type(event), "")


# --- how a message was answered


def _answered(table: str, event: ev.Got, before: Any, effects: tuple[ev.Effect, ...]) -> Iterator[Entry]:
    """The answers to whom the message came from; what a failure makes a side tell others is none."""
    replies = {_said(effect.message) for effect in effects if isinstance(effect, ev.Send) and effect.to == event.source.instance}
    column = _named(event.message.sg if table == "to the sender" else event.message.rg, before)
    for reply in replies or {"-"}:
        yield Entry(table, _said(event.message), column, reply)


def _named(generation: int, before: Any) -> str:
    """How the lifetime that a message names stands here; it may name none."""
    life = before.life
    live = life is not None and not life.state.terminal
    if not generation:
        return "none: live" if live else "none: not live"
    if life is None or life.generation != generation:
        return "not stored"
    return "live" if live else "ended"


def _said(message: Any) -> str:
    """A message, as the tables call it."""
    name = type(message).__name__
    match message:
        case Status():
            return f"{name}({message.state.name[0]})" if message.sg else "no such room"
        case Ack() if message.live:
            return f"{name}(live)"
        case Drained() if message.expired:
            return f"{name}(expired)"
    return name
