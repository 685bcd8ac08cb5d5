"""Sender and receiver processes around one room, and what may happen to each: the vocabulary of the exploration.

Requests are ghosts: the i-th request is what the i-th use of the room is opened for, and ``may_open`` is C4's rule for when the next
one may begin. They are never seen by the protocol, so that the rules can tell whose bytes went where.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

from kvcore.protocol import events as ev, receiver, receiver_state, sender, sender_state
from kvcore.protocol.messages import PoolPages
from kvcore.states import FailureCode, KVPoll, Reason, RoomId

ROOM = RoomId(7)


@dataclass(frozen=True)
class Scope:
    """What may happen in one exploration."""

    name: str
    senders: int = 1
    receivers: int = 1
    requests: int = 1
    links: int = 0  # 0: set network; n: in-order links that lose, and hold n messages
    abort: bool = True
    clear: bool = True
    reject: bool = False  # a receiver's lifetime that ends at once (A8)
    faults: bool = True  # tickets that fail, quiescent or not
    limits: bool = True  # state limits
    expiry: bool = True  # orphan and mark limits
    quarantine: bool = True  # quarantine limits
    restart: bool = False  # one process dies and comes back empty
    lost: bool = False  # a peer is given up though it lives
    chunks: tuple[tuple[bool, bool], ...] = ((True, True),)  # (pages, last) of each send
    layered: bool = False  # chunks are of one layer each, which is told apart
    extra_pages: int = 0  # how many pages the receivers list that nobody sends
    any_order: bool = False  # reuse outside C4's order
    check_addressee: bool = True  # a message addressed to another instance is dropped (P3)


class Modules(NamedTuple):
    """The four modules under test: shipped, or a mutant's."""

    sender: ModuleType = sender
    receiver: ModuleType = receiver
    sender_state: ModuleType = sender_state
    receiver_state: ModuleType = receiver_state

    def step(self, side: str) -> ModuleType:
        return self.sender if side == "S" else self.receiver

    def facts(self, side: str) -> ModuleType:
        return self.sender_state if side == "S" else self.receiver_state


class Past(NamedTuple):
    """A lifetime that was opened here, as a ghost: what it was for and how it stands."""

    generation: int
    request: int
    state: KVPoll
    unpaired: bool
    stored: bool
    expired: bool = False  # its mark was given up


class Proc(NamedTuple):
    """One process: which run of it this is, its protocol state, its lifetimes, what was given up."""

    side: str
    rank: int
    run: int
    state: Any
    lives: tuple[Past, ...] = ()
    sent: int = 0  # chunks handed over in the newest lifetime
    expired: tuple[tuple[str, int], ...] = ()  # peer instance, highest generation given up without proof
    unproven: frozenset[int] = frozenset()  # own generations released by limit
    gave_up: bool = False  # a last word or mark was given up
    lost: frozenset[str] = frozenset()

    @property
    def instance(self) -> str:
        return f"{self.side}{self.rank}.{self.run}"

    @property
    def dead(self) -> str:
        """The instance that died when this one began, if any."""
        return f"{self.side}{self.rank}.{self.run - 1}" if self.run else ""

    def opened(self, generation: int) -> Past | None:
        return next((past for past in self.lives if past.generation == generation), None)

    def use(self, request: int) -> Past | None:
        return next((past for past in self.lives if past.request == request), None)


class Write(NamedTuple):
    """A ticket that may still write: the sender instance, the pair, the chunk, and whether the core was told that it is stuck."""

    sender: str
    pair: ev.Pair
    chunk: int
    stuck: bool = False


class Engine(NamedTuple):
    """Writes that may still land, and those that have."""

    writes: frozenset[Write] = frozenset()
    landed: frozenset[Write] = frozenset()


class Action(NamedTuple):
    """Something a process does or suffers: a name for traces, and its events; ``request`` is what it opens a lifetime for."""

    name: str
    events: tuple[ev.Event, ...]
    request: int = 0
    expired: int = 0  # a lost peer's generations up to this one count as given up


class Violation(AssertionError):
    """A rule of the contract does not hold; ``rule`` is its id."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(rule, text)
        self.rule, self.text = rule, text

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


@dataclass
class Model:
    """The rules of movement of single processes."""

    scope: Scope
    modules: Modules

    def start(self) -> tuple[Proc, ...]:
        senders = [self.fresh("S", rank) for rank in range(self.scope.senders)]
        receivers = [self.fresh("R", rank) for rank in range(self.scope.receivers)]
        return (*senders, *receivers)

    def fresh(self, side: str, rank: int, run: int = 0) -> Proc:
        facts = self.modules.facts(side)
        return Proc(side, rank, run, (facts.Sender if side == "S" else facts.Receiver)(ROOM, rank=rank))

    def party(self, instance: str, seen_by: Proc) -> ev.Party:
        rank = int(instance[1:].partition(".")[0])
        return ev.Party(instance, rank, self.scope.receivers, dict(seen_by.expired).get(instance, 0))

    def own_actions(self, proc: Proc) -> Iterator[Action]:
        """What may happen to a process whatever the others do."""
        scope, life = self.scope, proc.state.life
        if life is not None and scope.clear:
            yield Action("clear", (ev.Clear(life.generation),))
        if life is not None and not life.state.terminal:
            if scope.abort:
                yield Action("abort", (ev.Fail(life.generation, reason(proc, f"abort of lifetime {life.generation}")),))
            if proc.side == "S" and proc.sent < len(scope.chunks):
                pages, last = scope.chunks[proc.sent]
                counts = (("kv", life.chunks + 1, life.chunks + 1),) if pages else ()
                layer = (0,) if scope.layered and pages else ()
                yield Action("send", (ev.Hand(life.generation, counts, last, b"", layer, layer),))
            if proc.side == "R" and life.pages is None:
                yield Action("receive", (ev.Receive(life.generation, self.listed(life.generation)),))
        for timer in self.modules.facts(proc.side).timers(proc.state):
            if self.may_fire(timer):
                yield Action(f"{timer.limit} of {timer.subject[0]}", (ev.Timeout(timer),))

    def listed(self, generation: int) -> tuple[PoolPages, ...]:
        """The pages a receiver lists: one for each chunk with pages, and the numbers tell its lifetime."""
        count = sum(pages for pages, _ in self.scope.chunks) + self.scope.extra_pages
        return (PoolPages("kv", generation.to_bytes(4, "little") * count),)

    def may_fire(self, timer: ev.Timer) -> bool:
        kind = timer.subject[0]
        if kind == "state":
            return self.scope.limits
        if timer.limit == "quarantine_s":
            return self.scope.quarantine
        return self.scope.expiry and not (timer.limit == "mark_s" and self.scope.requests > 1)

    def shared_actions(self, procs: tuple[Proc, ...], index: int) -> Iterator[Action]:
        """What may happen to a process depending on how the others stand: opening, routing, and marks that C4's order keeps."""
        proc, scope = procs[index], self.scope
        life = proc.state.life
        if life is None or life.state.terminal:
            for request in range(1, scope.requests + 1):
                if may_open(scope, procs, index, request):
                    number = len(proc.lives) + 1
                    yield Action(f"open {request}", (ev.Open(number),), request)
                    if scope.reject and proc.side == "R":
                        turned_down = Reason(FailureCode.REJECTED, f"rejected {number}", "decode", proc.rank)
                        yield Action(f"reject {request}", (ev.Open(number), ev.Fail(number, turned_down), ev.Clear(number)), request)
        if proc.side == "R":
            yield from self.routes(procs, proc)
        elif scope.requests > 1 and scope.expiry and not _mark_holds(procs, proc):
            for timer in self.modules.sender_state.timers(proc.state):
                if timer.limit == "mark_s":
                    yield Action("mark_s of mark", (ev.Timeout(timer),))

    def routes(self, procs: tuple[Proc, ...], proc: Proc) -> Iterator[Action]:
        """The sender ranks become known, for a live receiver or for one that ended before."""
        life = proc.state.life
        generations = [item.rg for item in proc.state.unrouted]
        if life is not None and not life.state.terminal and not life.sources:
            generations.append(life.generation)
        if not generations:
            return
        senders = tuple(self.party(other.instance, proc) for other in procs if other.side == "S")
        for generation in generations:
            yield Action("route", (ev.Route(generation, senders),))


def reason(proc: Proc, text: str) -> Reason:
    """A reason that names the process it arose on."""
    return Reason(FailureCode.ABORTED, text, "prefill" if proc.side == "S" else "decode", proc.rank)


# --- C4's rule of reuse


def may_open(scope: Scope, procs: tuple[Proc, ...], index: int, request: int) -> bool:
    """C4 for one attempt number: whether this process may now open its lifetime for that request."""
    proc = procs[index]
    newest = max((life.request for other in procs for life in other.lives), default=0)
    if any(life.request >= request for life in proc.lives) or request < newest:
        return False
    if request == 1:
        return not proc.run or scope.requests == 1  # by C4 a restarted process begins a new use
    if request > newest and any(life.stored and not life.state.terminal for other in procs for life in other.lives):
        return False
    if scope.any_order or _all_expired(procs):
        return True
    first = _goes_first(procs, request)
    if request > newest and "S" in first:
        # if both sides' ended unpaired, within orphan_s: the marks still stand, and stand at every rank an unpaired abort may reach
        ready = not _late(procs, request) and not any(_unmarked(procs, other, request) for other in procs)
        return ready and proc.side == "S"
    if "S" in first and _unmarked(procs, proc, request):
        return False  # a sender rank that comes too late: within orphan_s is said to each
    return not first or proc.side in first or any(other.side not in first and other.use(request) for other in procs)


def _goes_first(procs: tuple[Proc, ...], request: int) -> set[str]:
    """The side that must open first: the one with an unpaired end, the sender's if both have one; empty once it has opened."""
    waiting: set[str] = set()
    for proc in procs:
        old = proc.use(request - 1)
        if old is not None and old.unpaired and proc.use(request) is None:
            waiting.add(proc.side)
    senders_opened = any(proc.side == "S" and proc.use(request) for proc in procs)
    if "S" in waiting:
        return {"S"}
    return set() if senders_opened else waiting


def _late(procs: tuple[Proc, ...], request: int) -> bool:
    """Whether a receiver's lifetime ended unpaired too, and a sender's mark has expired."""
    expired = any(past.expired for proc in procs for past in proc.lives)
    return expired and any(past.unpaired for proc in procs if proc.side == "R" for past in proc.lives if past.request == request - 1)


def _unmarked(procs: tuple[Proc, ...], proc: Proc, request: int) -> bool:
    """Whether an unpaired abort of an older use is on its way to a sender rank without a mark: then only waiting helps."""
    if proc.side == "R" or proc.state.marks:
        return False
    for other in procs:
        if other.side == "R":
            unpaired = [drain.rg for drain in other.state.drains if not drain.sg and drain.party.instance == proc.instance]
            unpaired += [item.rg for item in other.state.unrouted]
            if any(past.request < request for past in other.lives if past.generation in unpaired):
                return True
    return False


def _all_expired(procs: tuple[Proc, ...]) -> bool:
    """2 x orphan_s after the later end: nothing is kept any more."""
    for proc in procs:
        state = proc.state
        if proc.side == "S" and (state.marks or state.words or state.waiting):
            return False
        if proc.side == "R" and (state.drains or state.unrouted):
            return False
    return True


def _mark_holds(procs: tuple[Proc, ...], proc: Proc) -> bool:
    """C4's order makes a mark outlive the receiver's unpaired abort once the room was reopened here."""
    unpaired = any(not drain.sg for other in procs if other.side == "R" for drain in other.state.drains)
    unrouted = any(other.state.unrouted for other in procs if other.side == "R")
    return len(proc.lives) > 1 and (unpaired or unrouted)


# --- ghosts


def lives_after(proc: Proc, event: ev.Event, after: Any, request: int) -> tuple[Past, ...]:
    """The ghosts of this process' lifetimes, brought up to date."""
    lives, life = list(proc.lives), after.life
    if isinstance(event, ev.Open) and life is not None and life.generation == event.generation and len(lives) < life.generation:
        lives.append(Past(life.generation, request, life.state, False, True))
    for position, past in enumerate(lives):
        if life is not None and life.generation == past.generation:
            lives[position] = past._replace(state=life.state, unpaired=life.unpaired)
        elif past.stored:
            lives[position] = _removed(proc, past, after)
    if isinstance(event, ev.Timeout) and event.timer.subject[0] == "mark":
        lives = [past._replace(expired=True) if past.generation == event.timer.subject[1] else past for past in lives]
    return tuple(lives)


def _removed(proc: Proc, past: Past, after: Any) -> Past:
    """A lifetime that is stored no more; one that was cleared while it lived has failed (C3)."""
    if past.state.terminal:
        return past._replace(stored=False)
    unpaired = any(mark.generation == past.generation for mark in after.marks) if proc.side == "S" else not proc.state.life.joined
    return past._replace(state=KVPoll.FAILED, unpaired=unpaired, stored=False)
