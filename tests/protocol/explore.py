"""Breadth-first exploration of a ``Scope``: every reachable world is checked, and finished off to check how it ends."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.protocol import rules
from tests.protocol.endings import Endings, ended, fence, lost
from tests.protocol.network import Arrival, Links, Network, Procs, SetNetwork
from tests.protocol.steps import Interner, Move, Steps
from tests.protocol.table import Entry
from tests.protocol.world import Action, Engine, Modules, Proc, Scope, Violation

Label = str | int  # an action's name, or the number of a packet that arrived, or -1 - that of one that was lost


class World(NamedTuple):
    """Interned processes, the interned engine, and the network."""

    procs: Procs
    engine: int
    net: Any


@dataclass
class Result:
    """How far an exploration came."""

    scope: Scope
    states: int = 0
    transitions: int = 0
    moments: int = 0  # states without their networks: each was also ended in peace, and checked
    complete: bool = False
    seconds: float = 0.0
    handled: set[tuple[str, str]] = field(default_factory=set)  # by side: events, messages and limits that did something
    reached: set[Entry] = field(default_factory=set)

    def __str__(self) -> str:
        how = "complete" if self.complete else "bounded"
        counts = f"{self.states} states, {self.transitions} transitions, {self.moments} endings"
        return f"{self.scope.name}: {how}, {counts}, {self.seconds:.1f} s"


class Explorer:
    """Explores one scope with the modules given."""

    def __init__(self, scope: Scope, modules: Modules | None = None) -> None:
        self.scope, self.modules = scope, modules or Modules()
        self.steps, self.engines, self.nodes = Steps(scope, self.modules), Interner(), Interner()
        self.network: Network = Links(self.steps) if scope.links else SetNetwork(self.steps)
        self.endings = Endings(self.steps, self.engines)
        self._where, self._nets = array("q"), list[Any]()  # of each world: its node, its network
        self._parents, self._labels = array("q"), list[Label]()
        self._at = 0  # the world at hand, for traces
        self._tickets: dict[int, list[tuple[str, int, str, Action]]] = {}

    def run(self, max_states: int = 10**9, max_seconds: float = 1e9) -> Result:
        """Explore until everything was seen or a bound is met; raises ``Violation`` with the shortest trace."""
        result, begun = Result(self.scope, handled=self.steps.handled, reached=self.steps.reached), time.monotonic()
        at = -1
        try:
            procs = tuple(self.steps.number(proc) for proc in self.steps.model.start())
            self.visit(World(procs, self.engines(Engine()), self.network.sent(procs, self.network.empty, (), 0)), -1, "")
            while at + 1 < len(self._where) and len(self._where) < max_states:
                if at % 256 == 0 and time.monotonic() - begun > max_seconds:
                    break
                at += 1
                node, net = self._where[at], self._nets[at]
                if self.network.superseded(node, net):
                    continue
                self._at = at
                procs, engine = self.nodes.values[node]
                for label, world in self.successors(World(procs, engine, net)):
                    result.transitions += 1
                    self.visit(world, at, label)
        except Violation as violation:
            raise Violation(violation.rule, f"{violation.text}\n  after: {'; '.join(self.trace(self._at))}") from None
        result.complete = at + 1 == len(self._where)
        result.states, result.moments, result.seconds = len(self._where), len(self.nodes.values), time.monotonic() - begun
        return result

    def visit(self, world: World, parent: int, label: Label) -> None:
        known = len(self.nodes.values)
        node = self.nodes((world.procs, world.engine))
        if not self.network.visit(node, world.net):
            return
        self._where.append(node)
        self._nets.append(world.net)
        self._parents.append(parent)
        self._labels.append(label)
        before, self._at = self._at, len(self._where) - 1
        if node == known:
            self.check(world)
        self.check_drained(world)
        self._at = before

    def trace(self, at: int) -> list[str]:
        names: list[str] = []
        while at > 0:
            label = self._labels[at]
            if isinstance(label, int):
                packet = self.steps.packets.values[label if label >= 0 else -1 - label]
                label = f"{packet.to} gets {packet}" if label >= 0 else f"{packet} is lost"
            names.append(label)
            at = self._parents[at]
        return names[::-1]

    # --- rules

    def check(self, world: World) -> None:
        procs = [self.steps.procs.values[number] for number in world.procs]
        rules.check_moment(self.scope, self.modules, procs, self.engines.values[world.engine])
        self.endings.check(world.procs, world.engine)

    def check_drained(self, world: World) -> None:
        """R2: no ticket is running, or will start, of a pair that was called drained."""
        for write in self.engines.values[world.engine].writes:
            packet = self.steps.packets.numbers.get(rules.drained(write))
            if packet is not None and self.network.holds(world.net, packet):
                raise Violation("R2", f"{write.sender} said that {write.pair} is drained, and a ticket may still write")

    # --- everything that may happen next

    def successors(self, world: World) -> Iterator[tuple[Label, World]]:
        steps = self.steps
        for arrival in self.network.arrivals(world.procs, world.net):
            yield self.arrived(world, arrival)
        for packet, net in self.network.resends(world.procs, world.net):
            yield f"{steps.packets.values[packet]} is sent again", world._replace(net=net)
        procs = tuple(steps.procs.values[number] for number in world.procs)
        for index, number in enumerate(world.procs):
            for name, move in steps.actions(number):
                yield name, self.placed(world, index, move)
            for action in steps.model.shared_actions(procs, index):
                yield f"{procs[index].instance} {action.name}", self.placed(world, index, steps.act(number, action))
        yield from self.ended_tickets(world, procs)
        if self.scope.restart or self.scope.lost:
            yield from self.deaths(world, procs)

    def placed(self, world: World, index: int, move: Move, net: Any = None) -> World:
        """The world after a process moved: its state, what it sent, what it started."""
        procs = (*world.procs[:index], move.after, *world.procs[index + 1 :])
        engine = world.engine
        for start in move.starts:
            engine = self.endings.started(procs, engine, index, start)
        return World(procs, engine, self.network.sent(procs, world.net if net is None else net, move.sends, move.mask))

    def arrived(self, world: World, arrival: Arrival) -> tuple[Label, World]:
        if arrival.move is None:
            return -1 - arrival.packet, world._replace(net=arrival.net)
        if arrival.move.heard is not None and not self.scope.any_order:
            procs = [self.steps.procs.values[number] for number in world.procs]
            rules.check_heard(procs, procs[arrival.place], self.steps.procs.values[arrival.move.after], arrival.move.heard)
        return arrival.packet, self.placed(world, arrival.place, arrival.move, arrival.net)

    def ended_tickets(self, world: World, procs: tuple[Proc, ...]) -> Iterator[tuple[str, World]]:
        endings = self._tickets.get(world.engine)
        if endings is None:
            endings = self._tickets[world.engine] = list(self.ticket_endings(self.engines.values[world.engine]))
        for name, engine, sender, action in endings:
            for index, proc in enumerate(procs):
                if proc.instance == sender:
                    yield name, self.placed(world._replace(engine=engine), index, self.steps.act(world.procs[index], action))

    def ticket_endings(self, engine: Engine) -> Iterator[tuple[str, int, str, Action]]:
        for write in engine.writes:
            name = f"{write.sender} ticket {write.pair.rg}, {write.pair.sg}, #{write.chunk}"
            without = engine.writes - {write}
            gone = self.engines(Engine(without, engine.landed))
            if write.stuck:
                yield f"{name} lands late", gone, write.sender, ended(write, ok=True, quiescent=True)
                continue
            done = self.engines(Engine(without, engine.landed | {write}))
            yield f"{name} is done", done, write.sender, ended(write, ok=True, quiescent=True)
            if self.scope.faults:
                yield f"{name} fails", gone, write.sender, ended(write, ok=False, quiescent=True)
                stuck = self.engines(Engine(without | {write._replace(stuck=True)}, engine.landed))
                yield f"{name} is stuck", stuck, write.sender, ended(write, ok=False, quiescent=False)

    def deaths(self, world: World, procs: tuple[Proc, ...]) -> Iterator[tuple[str, World]]:
        for index, proc in enumerate(procs):
            if self.scope.restart and not any(other.run for other in procs):
                fresh = self.steps.number(self.steps.model.fresh(proc.side, proc.rank, run=1))
                yield f"{proc.instance} dies", self.placed(world, index, Move(fresh))
            for other in procs:
                gone = other.dead or (other.instance if self.scope.lost else "")
                if other.side == proc.side or not gone:
                    continue
                if gone not in proc.lost:
                    move = self.steps.act(world.procs[index], lost(gone, 0 if other.run else len(other.lives)))
                    yield f"{proc.instance} loses {gone}", self.placed(world, index, move)
                    move = self.steps.act(world.procs[index], lost(gone, 0 if other.run else len(other.lives), replaced=True))
                    yield f"{proc.instance} hears that {gone} was replaced", self.placed(world, index, move)
                elif other.dead:
                    fenced = world._replace(engine=self.engines(self.endings.fenced(self.engines.values[world.engine], proc, gone)))
                    move = self.steps.act(world.procs[index], fence(gone))
                    yield f"{proc.instance} fences {gone}", self.placed(fenced, index, move)


def explore(scope: Scope, **bounds: Any) -> Result:
    """Explore the shipped modules in one scope."""
    return Explorer(scope).run(**bounds)
