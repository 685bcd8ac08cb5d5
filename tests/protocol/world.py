"""A world of sender and receiver processes around one room, for exhaustive exploration of the shipped protocol module.

A world is a tuple of interned numbers: one per process, one for the engine, and the network. In the *set network* every message ever
sent may arrive at any time, any number of times, or never; with *links* each direction is a queue that may lose its head.
Requests are ghosts: the i-th request is what the i-th lifetime of either side is opened for, and C4 says when request 2 may begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

from kvcore.protocol import events as ev
from kvcore.protocol import receiver as shipped_receiver
from kvcore.protocol import receiver_state, sender_state
from kvcore.protocol import sender as shipped_sender
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
    links: int = 0  # 0: set network; n: in-order links that hold n messages
    abort: bool = True
    clear: bool = True
    faults: bool = True  # tickets that fail, quiescent or not
    limits: bool = True  # state limits
    expiry: bool = True  # orphan, mark and quarantine limits
    restart: bool = False
    lost: bool = False
    chunks: tuple[tuple[bool, bool], ...] = ((True, True),)  # (pages, last) of each send
    any_order: bool = False  # reuse outside C4's order: only S, R and C4's bytes are then promised
    check_addressee: bool = True


class Past(NamedTuple):
    """A lifetime that was opened here, as a ghost: what it was for and how it stands."""

    generation: int
    request: int
    state: KVPoll
    unpaired: bool
    stored: bool
    expired: bool = False  # its mark or unpaired abort was given up


class Proc(NamedTuple):
    """One process: which run of it this is, its protocol state, its lifetimes, what it marked as expired."""

    side: str
    rank: int
    run: int
    state: Any
    lives: tuple[Past, ...] = ()
    sent: int = 0  # chunks handed over in the newest lifetime
    expired: tuple[tuple[str, int], ...] = ()
    unproven: frozenset[int] = frozenset()
    gave_up: bool = False
    lost: frozenset[str] = frozenset()

    @property
    def instance(self) -> str:
        return f"{self.side}{self.rank}.{self.run}"


class Write(NamedTuple):
    """A ticket that may still write: the sender process, the pair, the chunk, and whether the core was told that it is stuck."""

    sender: int
    pair: ev.Pair
    chunk: int
    stuck: bool


class Action(NamedTuple):
    """One thing that can happen: a name for traces, the process it happens to, and what."""

    name: str
    proc: int
    what: Any


class Violation(AssertionError):
    """A rule of the contract does not hold; ``rule`` is its id."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


@dataclass
class Model:
    """The rules of movement: from a world to its successors, using the step functions given (shipped, or a mutant's)."""

    scope: Scope
    sender: ModuleType = shipped_sender
    receiver: ModuleType = shipped_receiver

    def start(self) -> tuple[Proc, ...]:
        scope = self.scope
        senders = [Proc("S", rank, 0, sender_state.Sender(ROOM)) for rank in range(scope.senders)]
        receivers = [Proc("R", rank, 0, receiver_state.Receiver(ROOM)) for rank in range(scope.receivers)]
        return (*senders, *receivers)

    # --- parts

    def party(self, proc: Proc, seen_by: Proc) -> ev.Party:
        size = self.scope.senders if proc.side == "S" else self.scope.receivers
        expired = next((high for who, high in seen_by.expired if who == proc.instance), 0)
        return ev.Party(proc.instance, proc.rank, size, expired)

    def step(self, proc: Proc, event: ev.Event) -> tuple[Proc, tuple[ev.Effect, ...]]:
        """One step of one process by the module under test, with the rules that hold for every single step."""
        module = self.sender if proc.side == "S" else self.receiver
        before = proc.state
        after, effects = module.step(before, event)
        check_step(proc, event, before, after, effects)
        check_step_again(module, proc, event, after)
        proc = proc._replace(state=after, lives=_lives(proc, event, after))
        for effect in effects:
            if isinstance(effect, ev.Unproven):
                proc = proc._replace(unproven=proc.unproven | {effect.generation})
                if proc.side == "S":
                    table = dict(proc.expired)
                    table[effect.pair.peer] = max(table.get(effect.pair.peer, 0), effect.pair.rg)
                    proc = proc._replace(expired=tuple(sorted(table.items())))
        if isinstance(event, ev.Timeout) and event.timer.subject[0] != "state":
            proc = proc._replace(gave_up=True)
        return proc, effects

    # --- what may happen

    def local_actions(self, procs: tuple[Proc, ...], index: int) -> Iterator[tuple[str, ev.Event]]:
        proc, scope = procs[index], self.scope
        life = proc.state.life
        live = life is not None and not life.state.terminal
        for request in range(1, scope.requests + 1):
            if not live and may_open(scope, procs, index, request):
                yield f"open{request}", ev.Open(len(proc.lives) + 1)
        if live and proc.side == "S" and proc.sent < len(scope.chunks):
            pages, last = scope.chunks[proc.sent]
            yield "send", ev.Hand(life.generation, pages, last)
        if live and proc.side == "R":
            if not life.sources:
                senders = tuple(self.party(other, proc) for other in procs if other.side == "S")
                yield "route", ev.Route(life.generation, senders, scope.receivers)
            if life.pages is None:
                yield "receive", ev.Receive(life.generation, (PoolPages("kv", bytes([life.generation])),))
        if proc.side == "R" and proc.state.unrouted:
            senders = tuple(self.party(other, proc) for other in procs if other.side == "S")
            yield "route", ev.Route(proc.state.unrouted[0].rg, senders, scope.receivers)
        if live and scope.abort:
            yield "abort", ev.Fail(life.generation, reason(proc, "abort"))
        if life is not None and scope.clear:
            yield "clear", ev.Clear(life.generation)
        yield from self._timeouts(procs, proc)

    def _timeouts(self, procs: tuple[Proc, ...], proc: Proc) -> Iterator[tuple[str, ev.Event]]:
        module = sender_state if proc.side == "S" else receiver_state
        for timer in module.timers(proc.state):
            kind = timer.subject[0]
            if kind == "state":
                if self.scope.limits:
                    yield timer.limit, ev.Timeout(timer)
            elif self.scope.expiry and not (kind == "mark" and self._mark_holds(procs, proc)):
                yield f"{timer.limit}:{kind}", ev.Timeout(timer)

    def _mark_holds(self, procs: tuple[Proc, ...], proc: Proc) -> bool:
        """C4's order makes a mark outlive the receiver's unpaired abort once the room was reopened here."""
        unpaired = any(not drain.sg for other in procs if other.side == "R" for drain in other.state.drains)
        unrouted = any(other.state.unrouted for other in procs if other.side == "R")
        return self.scope.requests > 1 and len(proc.lives) > 1 and (unpaired or unrouted)

    def resends(self, proc: Proc) -> tuple[ev.Send, ...]:
        module = sender_state if proc.side == "S" else receiver_state
        return module.resend(proc.state)


def reason(proc: Proc, text: str) -> Reason:
    """A reason that names the process it arose on."""
    return Reason(FailureCode.ABORTED, text, "prefill" if proc.side == "S" else "decode", proc.rank)


def may_open(scope: Scope, procs: tuple[Proc, ...], index: int, request: int) -> bool:
    """C4 for one attempt number: whether this process may now open its lifetime for that request."""
    proc = procs[index]
    newest = max((life.request for other in procs for life in other.lives), default=0)
    if any(life.request >= request for life in proc.lives) or request < newest or proc.run:
        return False
    if request == newest or request == 1:
        return True
    if any(other.run for other in procs) or any(life.stored and not life.state.terminal for other in procs for life in other.lives):
        return False
    if scope.any_order:
        return True
    unpaired = {other.side for other in procs for life in other.lives if life.request == request - 1 and life.unpaired}
    if not unpaired:
        return True
    if _all_expired(procs):
        return True
    if "S" in unpaired:  # the sender first, within orphan_s of its end: its mark still stands
        return proc.side == "S" and not any(life.expired for life in proc.lives)
    return proc.side == "R"


def _all_expired(procs: tuple[Proc, ...]) -> bool:
    """2 x orphan_s after the later end: nothing is kept any more."""
    for proc in procs:
        state = proc.state
        if proc.side == "S" and (state.marks or state.words or state.waiting):
            return False
        if proc.side == "R" and (state.drains or state.unrouted):
            return False
    return True


def _lives(proc: Proc, event: ev.Event, after: Any) -> tuple[Past, ...]:
    """Bring the ghosts of this process' lifetimes up to date."""
    lives = list(proc.lives)
    life = after.life
    if isinstance(event, ev.Open) and life is not None and life.generation == event.generation and len(lives) < life.generation:
        lives.append(Past(life.generation, 0, life.state, False, True))
    for position, past in enumerate(lives):
        if life is not None and life.generation == past.generation:
            lives[position] = past._replace(state=life.state, unpaired=life.unpaired)
        elif past.stored:
            before = proc.state.life
            ended = before is not None and before.generation == past.generation and before.state.terminal
            if not ended:  # cleared while live: C3 aborts first
                unpaired = any(mark.generation == past.generation for mark in after.marks) if proc.side == "S" else _drains_unpaired(after, past)
                past = past._replace(state=KVPoll.FAILED, unpaired=unpaired)
            lives[position] = past._replace(stored=False)
    if isinstance(event, ev.Timeout) and event.timer.subject[0] == "mark":
        lives = [past._replace(expired=True) if past.generation == event.timer.subject[1] else past for past in lives]
    return tuple(lives)


def _drains_unpaired(after: Any, past: Past) -> bool:
    return any(drain.rg == past.generation and not drain.sg for drain in after.drains) or any(item.rg == past.generation for item in after.unrouted)


# --- rules that hold for every single step


def check_step(proc: Proc, event: ev.Event, before: Any, after: Any, effects: tuple[ev.Effect, ...]) -> None:
    """S1, S3, S5, S6, A2, A5, C2, C3 on one step of one process."""
    old, new = before.life, after.life
    if old is not None and new is not None and old.generation == new.generation:
        if old.state.terminal and new.state is not old.state:
            raise Violation("S1", f"{proc.instance} left {old.state.name} for {new.state.name}")
        if new.state is not KVPoll.FAILED and new.state < old.state:
            raise Violation("S1", f"{proc.instance} went back from {old.state.name} to {new.state.name}")
        if old.reason is not None and new.reason != old.reason:
            raise Violation("S5", f"{proc.instance} replaced its first reason {old.reason} by {new.reason}")
    if new is not None and (new.state is KVPoll.FAILED) != (new.reason is not None):
        raise Violation("S6", f"{proc.instance} is {new.state.name} with reason {new.reason}")
    replaced = isinstance(event, ev.Open) and old is not None and old.state.terminal
    cleared = isinstance(event, ev.Clear) and old is not None and old.generation == event.generation
    if old is not None and (new is None or new.generation != old.generation) and not (replaced or cleared):
        raise Violation("S3", f"{proc.instance}: {event} removed a stored lifetime")
    if cleared and new is not None:
        raise Violation("C1", f"{proc.instance}: clear left the lifetime stored")
    if isinstance(event, ev.Fail) and old is not None and old.generation == event.generation and not old.state.terminal:
        if new is None or new.state is not KVPoll.FAILED or new.reason != event.reason:
            raise Violation("A2", f"{proc.instance}: abort left the room {new and new.state.name}")
    module = sender_state if proc.side == "S" else receiver_state
    if new is not None and not new.state.terminal and not any(timer.subject[0] == "state" for timer in module.timers(after)):
        raise Violation("S8", f"{proc.instance} is {new.state.name} without a limit")
    for effect in effects:
        if isinstance(effect, ev.Start) and (old is not None and old.state.terminal and old.generation == effect.pair.sg):
            raise Violation("A5", f"{proc.instance} started a ticket of an ended lifetime")


def check_step_again(module: ModuleType, proc: Proc, event: ev.Event, after: Any) -> None:
    """C2: a second clear, an abort of an ended room and a stale handle's clear have no effect at all."""
    if not isinstance(event, ev.Clear | ev.Fail):
        return
    again, effects = module.step(after, event)
    if again != after or effects:
        raise Violation("C2" if isinstance(event, ev.Clear) else "A3", f"{proc.instance}: a second {type(event).__name__} changed something")
