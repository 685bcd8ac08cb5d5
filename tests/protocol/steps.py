"""Steps of single processes, each taken once: processes, messages and actions are interned, so that exploring is looking up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from kvcore.protocol import events as ev
from kvcore.protocol.messages import Drained
from tests.protocol.step_rules import check_state, check_step
from tests.protocol.table import Entry, entries
from tests.protocol.world import Action, Model, Modules, Proc, Scope, lives_after


class Interner:
    """Values as small numbers."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}
        self.values: list[Any] = []

    def __call__(self, value: Any) -> int:
        number = self.numbers.get(value)
        if number is None:
            number = self.numbers[value] = len(self.values)
            self.values.append(value)
        return number


class Packet(NamedTuple):
    """A message on its way."""

    source: str
    to: str
    message: Any

    def __str__(self) -> str:
        message = self.message
        more = f", {message.state.name}" if type(message).__name__ == "Status" else ""
        return f"{type(message).__name__}({message.rg}, {message.sg}{more}) from {self.source}"


class Move(NamedTuple):
    """What became of a process, by number; the packets it sent, in order and as a bit mask; the tickets it started."""

    after: int
    sends: tuple[int, ...] = ()
    mask: int = 0
    starts: tuple[ev.Start, ...] = ()
    heard: ev.Got | None = None  # a message that changed the room's state


class Steps:
    """The steps of one scope, with the rules that hold for every single step."""

    def __init__(self, scope: Scope, modules: Modules) -> None:
        self.scope, self.modules, self.model = scope, modules, Model(scope, modules)
        self.procs, self.packets = Interner(), Interner()
        self.instances: list[str] = []  # of each process
        self.addressed: dict[str, int] = {}
        self.forbidden = 0  # packets that a rule may forbid (R2)
        self.handled: set[tuple[str, str]] = set()
        self.reached: set[Entry] = set()
        self._acted: dict[tuple[int, Action], Move] = {}
        self._delivered: dict[tuple[int, int], Move] = {}
        self._actions: dict[int, list[tuple[str, Move]]] = {}
        self._resends: dict[int, tuple[int, ...]] = {}

    def address(self, instance: str) -> str:
        return instance if self.scope.check_addressee else instance.partition(".")[0]

    def packet(self, packet: Packet) -> int:
        known = len(self.packets.values)
        number = self.packets(packet)
        if number == known:
            to = self.address(packet.to)
            self.addressed[to] = self.addressed.get(to, 0) | 1 << number
            self.forbidden |= isinstance(packet.message, Drained) << number
        return number

    def number(self, proc: Proc) -> int:
        """A process by number; a new one is checked."""
        number = self.procs.numbers.get(proc)
        if number is None:
            check_state(self.modules, proc)
            number = self.procs(proc)
            self.instances.append(proc.instance)
        return number

    def act(self, number: int, action: Action) -> Move:
        move = self._acted.get((number, action))
        if move is None:
            move = self._acted[number, action] = self._take(self.procs.values[number], action)
        return move

    def deliver(self, number: int, packet: int) -> Move:
        """What a message does to a process it is addressed to."""
        move = self._delivered.get((number, packet))
        if move is None:
            if self.deaf(number, packet):
                move = Move(number)
            else:
                proc, what = self.procs.values[number], self.packets.values[packet]
                move = self._take(proc, Action("", (ev.Got(what.message, self.model.party(what.source, proc)),)))
            self._delivered[number, packet] = move
        return move

    def deaf(self, number: int, packet: int) -> bool:
        """Whether a message of an older instance is dropped, now and for ever, by one that knows that it is gone (P3)."""
        return self.scope.restart and self.packets.values[packet].source in self.procs.values[number].lost

    def actions(self, number: int) -> list[tuple[str, Move]]:
        """What may happen to a process whatever the others do."""
        found = self._actions.get(number)
        if found is None:
            proc = self.procs.values[number]
            moves = [(f"{proc.instance} {action.name}", self.act(number, action)) for action in self.model.own_actions(proc)]
            found = self._actions[number] = [(name, move) for name, move in moves if move.after != number or move.mask]
        return found

    def resends(self, number: int) -> tuple[int, ...]:
        found = self._resends.get(number)
        if found is None:
            proc = self.procs.values[number]
            sends = self.modules.facts(proc.side).resend(proc.state)
            found = self._resends[number] = tuple(self.packet(Packet(proc.instance, send.to, send.message)) for send in sends)
        return found

    def _take(self, proc: Proc, action: Action) -> Move:
        first, all_effects = proc, list[ev.Effect]()
        for event in action.events:
            before = proc
            proc, effects = self._step(proc, event, action)
            all_effects += effects
            self.reached |= entries(proc.side, event, before.state, proc.state, effects)
            if proc.state != before.state or effects:
                self._note(proc, event)
        sends = tuple(
            self.packet(Packet(proc.instance, effect.to, effect.message)) for effect in all_effects if isinstance(effect, ev.Send)
        )
        starts = tuple(effect for effect in all_effects if isinstance(effect, ev.Start))
        got = action.events[0]
        heard = got if isinstance(got, ev.Got) and _state(first) is not _state(proc) else None
        return Move(self.number(proc), sends, _mask(sends), starts, heard)

    def _step(self, proc: Proc, event: ev.Event, action: Action) -> tuple[Proc, tuple[ev.Effect, ...]]:
        state, effects = self.modules.step(proc.side).step(proc.state, event)
        check_step(self.modules, proc, event, state, effects)
        after = proc._replace(state=state, lives=lives_after(proc, event, state, action.request))
        if isinstance(event, ev.Open):
            after = after._replace(sent=0)
        elif isinstance(event, ev.Hand):
            after = after._replace(sent=proc.sent + 1)
        elif isinstance(event, ev.Lost):
            after = after._replace(lost=proc.lost | {event.instance})
            after = _given_up(after, event.instance, action.expired)
        elif isinstance(event, ev.Timeout) and event.timer.subject[0] in ("word", "mark", "drain", "unrouted"):
            after = after._replace(gave_up=True)
        for effect in effects:
            if isinstance(effect, ev.Unproven):
                after = _given_up(after._replace(unproven=after.unproven | {effect.generation}), effect.pair.peer, effect.pair.rg)
        return after, effects

    def _note(self, proc: Proc, event: ev.Event) -> None:
        """Which handlers did something."""
        kind = type(event.message if isinstance(event, ev.Got) else event).__name__
        self.handled.add((proc.side, kind))
        if isinstance(event, ev.Timeout):
            self.handled.add((proc.side, str(event.timer.subject[0])))


def _state(proc: Proc) -> Any:
    return proc.state.life and proc.state.life.state


def _given_up(proc: Proc, peer: str, generation: int) -> Proc:
    """R2: the high-water mark of generations for which a ticket was given up without proof."""
    if proc.side != "S" or not generation:
        return proc
    table = dict(proc.expired)
    table[peer] = max(table.get(peer, 0), generation)
    return proc._replace(expired=tuple(sorted(table.items())))


def _mask(numbers: tuple[int, ...]) -> int:
    mask = 0
    for number in numbers:
        mask |= 1 << number
    return mask


def bits(mask: int) -> Iterator[int]:
    """The numbers of the bits that are set."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
