"""Breadth-first exploration of a ``Scope``: every reachable world is checked, and finished off to check how it ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, NamedTuple

from kvcore.protocol import events as ev
from kvcore.protocol import receiver_state, sender_state
from kvcore.protocol import receiver as shipped_receiver
from kvcore.protocol import sender as shipped_sender
from kvcore.states import FailureCode, KVPoll, Reason
from tests.protocol.world import Model, Past, Proc, Scope, Violation, Write


class World(NamedTuple):
    """Interned processes, the engine's writes and landed chunks, and the network (a bit mask, or one tuple of numbers a link)."""

    procs: tuple[int, ...]
    engine: int
    net: Any


class Engine(NamedTuple):
    """Writes that may still land, and chunks that have: (receiver instance, rg, sender process, chunk)."""

    writes: frozenset[Write] = frozenset()
    landed: frozenset[tuple[str, int, int, int]] = frozenset()


class Packet(NamedTuple):
    """A message on its way."""

    source: str
    to: str
    message: Any


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


@dataclass
class Result:
    """How far an exploration came."""

    scope: Scope
    worlds: int = 0
    transitions: int = 0
    endings: int = 0
    complete: bool = False
    seconds: float = 0.0
    reached: set[Any] = field(default_factory=set)

    def __str__(self) -> str:
        how = "complete" if self.complete else "bounded"
        return f"{self.scope.name}: {self.worlds} states, {self.transitions} transitions, {self.endings} endings, {how}, {self.seconds:.1f} s"


class Explorer:
    """Explores one scope with one pair of step modules."""

    def __init__(self, scope: Scope, sender: ModuleType = shipped_sender, receiver: ModuleType = shipped_receiver) -> None:
        self.model = Model(scope, sender, receiver)
        self.scope = scope
        self.procs, self.engines, self.packets = Interner(), Interner(), Interner()
        self.steps: dict[Any, tuple[int, tuple[ev.Effect, ...]]] = {}
        self.events = Interner()
        self.safe: set[Any] = set()
        self.ended: set[Any] = set()
        self.local: dict[Any, list[tuple[str, int, int, int]]] = {}
        self.parents: dict[World, tuple[World | None, str]] = {}

    def run(self, max_worlds: int = 10**9, max_seconds: float = 1e9) -> Result:
        """Explore until everything was seen or a bound is met; raises ``Violation`` with the shortest trace."""
        result, begun = Result(self.scope), time.monotonic()
        first = World(tuple(self.procs(proc) for proc in self.model.start()), self.engines(Engine()), self.empty_net())
        self.parents[first] = (None, "")
        frontier = [first]
        while frontier:
            following: list[World] = []
            for world in frontier:
                try:
                    self.check(world)
                    for name, successor in self.successors(world):
                        result.transitions += 1
                        if successor not in self.parents:
                            self.parents[successor] = (world, name)
                            following.append(successor)
                except Violation as violation:
                    raise Violation(violation.rule, f"{str(violation)}\n  after: {'; '.join(self.trace(world))}") from None
                if len(self.parents) > max_worlds or (len(self.parents) % 64 == 0 and time.monotonic() - begun > max_seconds):
                    return self.finish(result, False, begun)
            frontier = following
        return self.finish(result, True, begun)

    def finish(self, result: Result, complete: bool, begun: float) -> Result:
        result.complete, result.worlds, result.endings = complete, len(self.parents), len(self.ended)
        result.seconds = time.monotonic() - begun
        return result

    def trace(self, world: World) -> list[str]:
        names = []
        at: World | None = world
        while at is not None:
            at, name = self.parents[at]
            if name:
                names.append(name)
        return names[::-1]

    # --- one step of one process

    def apply(self, proc: int, event: int) -> tuple[int, tuple[ev.Effect, ...]]:
        key = (proc, event)
        found = self.steps.get(key)
        if found is None:
            after, effects = self.model.step(self.procs.values[proc], self.events.values[event])
            found = self.steps[key] = (self.procs(after), effects)
        return found

    def moved(self, world: World, index: int, event: ev.Event, net: Any = None) -> World:
        """The world after a process took an event: its state, what it sent, what it started."""
        return self.placed(world, index, *self.apply(world.procs[index], self.events(event)), world.net if net is None else net)

    def placed(self, world: World, index: int, proc: int, effects: tuple[ev.Effect, ...], net: Any) -> World:
        procs = (*world.procs[:index], proc, *world.procs[index + 1 :])
        engine = world.engine
        me = self.procs.values[proc]
        for effect in effects:
            if isinstance(effect, ev.Send):
                net = self.with_packet(net, index, Packet(me.instance, effect.to, effect.message))
            elif isinstance(effect, ev.Start):
                self.check_start(procs, index, effect)
                old = self.engines.values[engine]
                engine = self.engines(old._replace(writes=old.writes | {Write(index, effect.pair, effect.chunk, False)}))
        return World(procs, engine, net)

    # --- network

    def empty_net(self) -> Any:
        if not self.scope.links:
            return 0
        return ((),) * ((self.scope.senders + self.scope.receivers) ** 2)

    def with_packet(self, net: Any, index: int, packet: Packet) -> Any:
        number = self.packets(packet)
        if not self.scope.links:
            return net | (1 << number)
        link = self.link(index, packet.to)
        queue = net[link]
        if len(queue) >= self.scope.links:
            return net  # lost
        return (*net[:link], (*queue, number), *net[link + 1 :])

    def link(self, index: int, to: str) -> int:
        count = self.scope.senders + self.scope.receivers
        rank = int(to[1:].partition(".")[0])
        return index * count + (rank if to[0] == "S" else self.scope.senders + rank)

    def deliveries(self, world: World) -> Iterator[tuple[str, World]]:
        if not self.scope.links:
            mask, number = world.net, 0
            while mask:
                low = (mask & -mask).bit_length() - 1
                number += low
                yield from self.delivered(world, number, world.net)
                mask >>= low + 1
                number += 1
            return
        for link, queue in enumerate(world.net):
            if queue:
                rest = (*world.net[:link], queue[1:], *world.net[link + 1 :])
                yield f"lose {queue[0]}", world._replace(net=rest)
                yield from self.delivered(world._replace(net=rest), queue[0], rest)

    def delivered(self, world: World, number: int, net: Any) -> Iterator[tuple[str, World]]:
        packet = self.packets.values[number]
        values = [self.procs.values[proc] for proc in world.procs]
        for index, proc in enumerate(values):
            addressed = proc.instance == packet.to or (not self.scope.check_addressee and proc.instance[:2] == packet.to[:2])
            if not addressed:
                continue
            source = next((other for other in values if other.instance == packet.source), None)
            if source is None:
                source = next(other for other in values if other.instance[:2] == packet.source[:2])
                if packet.source in proc.lost:
                    continue  # of an older instance: dropped
                source = source._replace(run=int(packet.source.partition(".")[2]))
            event = ev.Got(packet.message, self.model.party(source, proc))
            after = self.moved(world, index, event, net)
            if after != world:
                yield f"{proc.instance} gets {describe(packet)}", after

    # --- everything that may happen next

    def successors(self, world: World) -> Iterator[tuple[str, World]]:
        yield from self.deliveries(world)
        values = tuple(self.procs.values[proc] for proc in world.procs)
        for index, proc in enumerate(values):
            for name, event in self.model.local_actions(values, index):
                after, effects = self.apply(world.procs[index], self.events(event))
                after = self.ghosted(after, name)
                yield f"{proc.instance} {name}", self.placed(world, index, after, effects, world.net)
            for send in self.model.resends(proc):
                net = self.with_packet(world.net, index, Packet(proc.instance, send.to, send.message))
                if net != world.net:
                    yield f"{proc.instance} resends", world._replace(net=net)
        yield from self.endings_of_tickets(world)
        if self.scope.restart or self.scope.lost:
            yield from self.deaths(world, values)

    def ghosted(self, number: int, name: str) -> int:
        """Note the request a lifetime was opened for, and chunks handed over."""
        proc = self.procs.values[number]
        if name.startswith("open"):
            lives = (*proc.lives[:-1], proc.lives[-1]._replace(request=int(name[4:])))
            return self.procs(proc._replace(lives=lives, sent=0))
        return self.procs(proc._replace(sent=proc.sent + 1)) if name == "send" else number

    def endings_of_tickets(self, world: World) -> Iterator[tuple[str, World]]:
        engine = self.engines.values[world.engine]
        for write in engine.writes:
            name = f"ticket {write.pair.rg}.{write.pair.sg}#{write.chunk}"
            without = engine._replace(writes=engine.writes - {write})
            landed = (write.pair.peer, write.pair.rg, write.sender, write.chunk)
            if write.stuck:
                yield f"{name} lands late", self.ticket_ended(world, without, write, ok=True, quiescent=True)
                continue
            done = without._replace(landed=engine.landed | {landed})
            yield f"{name} done", self.ticket_ended(world, done, write, ok=True, quiescent=True)
            if self.scope.faults:
                yield f"{name} fails", self.ticket_ended(world, without, write, ok=False, quiescent=True)
                stuck = without._replace(writes=without.writes | {write._replace(stuck=True)})
                yield f"{name} is stuck", self.ticket_ended(world, stuck, write, ok=False, quiescent=False)

    def ticket_ended(self, world: World, engine: Engine, write: Write, *, ok: bool, quiescent: bool) -> World:
        why = None if ok else Reason(FailureCode.BACKEND, "ticket failed", "prefill", write.sender)
        event = ev.Ended(write.pair, write.chunk, ok, quiescent, why)
        return self.moved(world._replace(engine=self.engines(engine)), write.sender, event)

    def deaths(self, world: World, values: tuple[Proc, ...]) -> Iterator[tuple[str, World]]:
        engine = self.engines.values[world.engine]
        for index, proc in enumerate(values):
            if self.scope.restart and not any(other.run for other in values):
                empty = self.model.start()[index]._replace(run=1)
                writes = frozenset(w for w in engine.writes if w.sender != index and w.pair.peer != proc.instance)
                procs = (*world.procs[:index], self.procs(empty), *world.procs[index + 1 :])
                yield f"{proc.instance} dies", World(procs, self.engines(engine._replace(writes=writes)), world.net)
            for other in values:
                if other.side == proc.side:
                    continue
                dead = f"{other.instance[:-1]}{other.run - 1}" if other.run else (other.instance if self.scope.lost else "")
                if dead and dead not in proc.lost:
                    why = Reason(FailureCode.PEER_LOST, "peer lost", "prefill" if proc.side == "S" else "decode", proc.rank)
                    noted = self.moved(world, index, ev.Lost(dead, why))
                    marked = self.procs(self.procs.values[noted.procs[index]]._replace(lost=proc.lost | {dead}))
                    noted = noted._replace(procs=(*noted.procs[:index], marked, *noted.procs[index + 1 :]))
                    yield f"{proc.instance} loses {dead}", noted
                    if other.run:
                        writes = frozenset(write for write in engine.writes if write.pair.peer != dead or write.sender != index)
                        fenced = noted._replace(engine=self.engines(engine._replace(writes=writes)))
                        yield f"{proc.instance} loses and fences {dead}", self.moved(fenced, index, ev.Fenced(dead))

    # --- rules that hold in every world

    def check_start(self, procs: tuple[int, ...], index: int, start: ev.Start) -> None:
        sender = self.procs.values[procs[index]]
        mine = next((life.request for life in sender.lives if life.generation == start.pair.sg), None)
        for number in procs:
            proc = self.procs.values[number]
            if proc.instance == start.pair.peer:
                theirs = next((life.request for life in proc.lives if life.generation == start.pair.rg), None)
                if mine != theirs and mine is not None:
                    raise Violation("C4", f"request {mine} is written to the pages of request {theirs}")

    def check(self, world: World) -> None:
        key = (world.procs, world.engine)
        if key in self.safe:
            return
        self.safe.add(key)
        procs = [self.procs.values[number] for number in world.procs]
        engine = self.engines.values[world.engine]
        for write in engine.writes:
            check_write(procs, write)
        for proc in procs:
            if proc.side == "R":
                self.check_success(procs, proc, engine)
        self.check_end(world)

    def check_success(self, procs: list[Proc], proc: Proc, engine: Engine) -> None:
        life = proc.state.life
        if life is None or life.state is not KVPoll.SUCCESS:
            return
        chunks = [number for number, (pages, _last) in enumerate((c for c in self.scope.chunks if c[0]), 1)]
        for index, other in enumerate(procs):
            if other.side != "S":
                continue
            missing = [chunk for chunk in chunks if (proc.instance, life.generation, index, chunk) not in engine.landed]
            if missing:
                raise Violation("R6", f"{proc.instance} succeeded without chunk {missing} of {other.instance}")
            if self.scope.receivers == 1 and not other.run:
                source = life.source(other.instance)
                past = next(past for past in other.lives if past.generation == source.sg)
                if past.state is not KVPoll.SUCCESS:
                    raise Violation("P6", f"{proc.instance} succeeded and {other.instance} is {past.state.name}")

    # --- how a world ends when all traffic is dropped

    def check_end(self, world: World) -> None:
        key = (world.procs, world.engine)
        if key in self.ended:
            return
        self.ended.add(key)
        world = self.settled(self.mourned(world._replace(net=())))
        procs = [self.procs.values[number] for number in world.procs]
        disturbed = any(proc.gave_up or proc.run or proc.lost for proc in procs)
        if not disturbed and not self.scope.any_order:
            check_told(procs)
        for index in range(len(world.procs)):
            life = self.procs.values[world.procs[index]].state.life
            if life is not None:
                world = self.moved_on(world, index, ev.Clear(life.generation))
        world = self.settled(world)
        procs = [self.procs.values[number] for number in world.procs]
        for proc in procs:
            check_cleared(proc, lossy=any(other.run or other.lost for other in procs))
        for _ in range(3):
            for index in range(len(world.procs)):
                module = sender_state if procs[index].side == "S" else receiver_state
                for timer in module.timers(self.procs.values[world.procs[index]].state):
                    world = self.moved_on(world, index, ev.Timeout(timer))
            world = self.settled(world)
        for number in world.procs:
            proc = self.procs.values[number]
            if not proc.state.empty:
                raise Violation("C7", f"{proc.instance} keeps {proc.state} after every limit")

    def mourned(self, world: World) -> World:
        """Everybody learns of the dead, and that they write no more."""
        values = [self.procs.values[number] for number in world.procs]
        for index, proc in enumerate(values):
            for other in values:
                if other.side != proc.side and other.run:
                    dead = f"{other.instance[:-1]}{other.run - 1}"
                    why = Reason(FailureCode.PEER_LOST, "peer lost", "prefill" if proc.side == "S" else "decode", proc.rank)
                    engine = self.engines.values[world.engine]
                    writes = frozenset(write for write in engine.writes if write.pair.peer != dead)
                    world = self.moved_on(world._replace(engine=self.engines(engine._replace(writes=writes))), index, ev.Lost(dead, why))
                    world = self.moved_on(world, index, ev.Fenced(dead))
        return world

    def settled(self, world: World) -> World:
        """Resend and deliver in order, and let every ticket end, until nothing changes any more."""
        for _ in range(40):
            before = world
            for index, number in enumerate(world.procs):
                for send in self.model.resends(self.procs.values[number]):
                    world = world._replace(net=(*world.net, Packet(self.procs.values[number].instance, send.to, send.message)))
            while world.net:
                packet, world = world.net[0], world._replace(net=world.net[1:])
                world = self.handed(world, packet)
            engine = self.engines.values[world.engine]
            for write in sorted(engine.writes):
                without = self.engines(self.engines.values[world.engine]._replace(writes=self.engines.values[world.engine].writes - {write}))
                event = ev.Ended(write.pair, write.chunk, True, True)
                world = self.moved_on(world._replace(engine=without), write.sender, event)
            if world == before:
                return world
        raise Violation("A4", "the two sides never fall silent")

    def handed(self, world: World, packet: Packet) -> World:
        values = [self.procs.values[number] for number in world.procs]
        target = next((i for i, proc in enumerate(values) if proc.instance == packet.to), None)
        source = next((proc for proc in values if proc.instance == packet.source), None)
        if target is None or source is None:
            return world
        return self.moved_on(world, target, ev.Got(packet.message, self.model.party(source, values[target])))

    def moved_on(self, world: World, index: int, event: ev.Event) -> World:
        after, effects = self.apply(world.procs[index], self.events(event))
        procs = (*world.procs[:index], after, *world.procs[index + 1 :])
        me = self.procs.values[after]
        net, engine = world.net, self.engines.values[world.engine]
        for effect in effects:
            if isinstance(effect, ev.Send):
                net = (*net, Packet(me.instance, effect.to, effect.message))
            elif isinstance(effect, ev.Start):
                self.check_start(procs, index, effect)
                engine = engine._replace(writes=engine.writes | {Write(index, effect.pair, effect.chunk, False)})
        return World(procs, self.engines(engine), net)


def check_write(procs: list[Proc], write: Write) -> None:
    """R1, R2, R5: while a write may land, nobody calls its pages safe by evidence."""
    sender = procs[write.sender]
    if write.pair.sg not in sender.unproven and sender_state.release_safe(sender.state, write.pair.sg):
        raise Violation("R5", f"{sender.instance} calls the source pages of {write.pair} safe while a ticket may read them")
    if write.pair.sg in sender.unproven:
        return
    for proc in procs:
        if proc.instance == write.pair.peer and write.pair.rg not in proc.unproven:
            if receiver_state.release_safe(proc.state, write.pair.rg):
                raise Violation("R1", f"{proc.instance} calls the pages of {write.pair} safe while a write may land")


def check_told(procs: list[Proc]) -> None:
    """A4, A7: once one side of a request failed, the other side does not stay live."""
    newest = max((past.request for proc in procs for past in proc.lives), default=0)
    ends: list[tuple[Proc, Past]] = [(proc, past) for proc in procs for past in proc.lives if past.request == newest]
    failed = {proc.side for proc, past in ends if past.state is KVPoll.FAILED}
    for proc, past in ends:
        routed = proc.side == "S" or past.state.terminal or proc.state.life.sources
        if failed - {proc.side} and past.stored and not past.state.terminal and routed and len({p.side for p, _ in ends}) == 2:
            unrouted = any(other.side == "R" and other.state.unrouted for other in procs)
            # C4: an unpaired abort of the new use may be taken for the old one, whose sender then ends by its own limit
            credited = proc.side == "S" and any(old.unpaired for old in proc.lives[:-1])
            if not unrouted and not credited:
                raise Violation("A4", f"{proc.instance} stays {past.state.name} after the other side failed")


def check_cleared(proc: Proc, *, lossy: bool) -> None:
    """C7: with all rooms cleared and the tickets ended, only unpaired ends may still be kept."""
    state = proc.state
    if state.life is not None:
        raise Violation("C1", f"{proc.instance} still stores {state.life}")
    if lossy:
        return
    if proc.side == "S" and (state.flights or state.words):
        raise Violation("C7", f"{proc.instance} keeps flights {state.flights} and words {state.words}")
    if proc.side == "R" and any(drain.published and drain.asking for drain in state.drains):
        raise Violation("C7", f"{proc.instance} keeps drain records {state.drains}")


def describe(packet: Packet) -> str:
    """A message in a trace: name, generations, and what else matters."""
    message = packet.message
    more = f",{message.state.name}" if hasattr(message, "state") else ""
    return f"{type(message).__name__}({message.rg},{message.sg}{more}) from {packet.source}"


def explore(scope: Scope, **bounds: Any) -> Result:
    """Explore the shipped module in one scope."""
    return Explorer(scope).run(**bounds)


__all__ = ["Explorer", "Result", "Violation", "explore", "replace"]
