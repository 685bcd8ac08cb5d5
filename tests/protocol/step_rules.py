"""The contract's rules about one step of one process, and about one state of it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from kvcore.protocol import events as ev
from kvcore.protocol.messages import Abort, Relay, RoomMessage, Status
from kvcore.states import KVPoll
from tests.protocol.world import ROOM, Modules, Past, Proc, Violation

LIMITS = {KVPoll.BOOTSTRAPPING: "bootstrap_s", KVPoll.WAITING_FOR_INPUT: "input_s", KVPoll.TRANSFERRING: "transfer_s"}

# --- one step


def check_step(modules: Modules, proc: Proc, event: ev.Event, after: Any, effects: tuple[ev.Effect, ...]) -> None:
    """S1, S3, S5, S6, A2, A3, A5, C1, C2, S8 on one step of one process; ``proc`` is as it was before."""
    old, new = proc.state.life, after.life
    if new is not None and (new.state is KVPoll.FAILED) != (new.reason is not None):
        raise Violation("S6", f"{proc.instance} is {new.state.name} with reason {new.reason}")
    same = old is not None and new is not None and old.generation == new.generation
    if same:
        _check_forward(proc, old, new)
        if new.state is KVPoll.FAILED and old.state is not KVPoll.FAILED:
            _check_cause(proc, event, old, new)
    _check_removal(proc, event, old, new)
    _check_answer(proc, event, old, new)
    _check_effects(proc, after, effects)
    _check_cleanup(proc, after, effects)
    _check_stale_timers(modules, proc, after)
    _check_repeated(modules.step(proc.side), proc, event, after, effects)


def _check_forward(proc: Proc, old: Any, new: Any) -> None:
    if old.state.terminal and new.state is not old.state:
        raise Violation("S1", f"{proc.instance} left {old.state.name} for {new.state.name}")
    if new.state is not KVPoll.FAILED and new.state < old.state:
        raise Violation("S1", f"{proc.instance} went back from {old.state.name} to {new.state.name}")
    if old.reason is not None and new.reason != old.reason:
        raise Violation("S5", f"{proc.instance} replaced its first reason {old.reason} by {new.reason}")
    if old.state.terminal and old.unpaired != new.unpaired:
        raise Violation("C4", f"{proc.instance} changed whether its lifetime ended unpaired")
    if proc.side == "R":
        for before in old.sources:
            now = new.source(before.party.instance)
            if before.state is KVPoll.SUCCESS and now.state is not KVPoll.SUCCESS:
                raise Violation("T5", f"{proc.instance} took back the success of {before.party.instance}")


def _check_cause(proc: Proc, event: ev.Event, old: Any, new: Any) -> None:
    """S5: a failure that was heard of is reported as it was told; T5: a rank that said success fails the room for another only."""
    if isinstance(event, ev.Got):
        told = getattr(event.message, "reason", None)
        if told is not None and new.reason != told:
            raise Violation("S5", f"{proc.instance} was told {told} and reports {new.reason}")
        source = old.source(event.source.instance) if proc.side == "R" else None
        if source is not None and source.state is KVPoll.SUCCESS and not isinstance(event.message, Relay):
            raise Violation("T5", f"{proc.instance} was failed by {event.source.instance} after its success")
        return
    given = event.reason if isinstance(event, ev.Fail | ev.Lost | ev.Ended) else None
    if given is not None and new.reason != given:
        raise Violation("S5", f"{proc.instance} was given {given} and reports {new.reason}")
    if given is None and (new.reason.side, new.reason.rank) != ("prefill" if proc.side == "S" else "decode", proc.rank):
        raise Violation("S5", f"{proc.instance} failed by itself and blames {new.reason}")


def _check_removal(proc: Proc, event: ev.Event, old: Any, new: Any) -> None:
    replaced = isinstance(event, ev.Open) and old is not None and old.state.terminal
    cleared = isinstance(event, ev.Clear) and old is not None and old.generation == event.generation
    gone = old is not None and (new is None or new.generation != old.generation)
    if gone and not (replaced or cleared):
        raise Violation("C2" if isinstance(event, ev.Clear) else "S3", f"{proc.instance}: {event} removed a stored lifetime")
    if cleared and new is not None:
        raise Violation("C1", f"{proc.instance}: clear left the lifetime stored")


def _check_answer(proc: Proc, event: ev.Event, old: Any, new: Any) -> None:
    """An abort, and a limit, end a live room at once."""
    if old is None or old.state.terminal:
        return
    limit = isinstance(event, ev.Timeout) and event.timer.subject[:2] == ("state", old.generation)
    abort = isinstance(event, ev.Fail) and old.generation == event.generation
    if (limit or abort) and (new is None or new.state is not KVPoll.FAILED):
        raise Violation("S8" if limit else "A2", f"{proc.instance}: {event} left the room {new and new.state.name}")


def _check_effects(proc: Proc, after: Any, effects: tuple[ev.Effect, ...]) -> None:
    new = after.life
    for effect in effects:
        if isinstance(effect, ev.Start):
            if new is None or new.generation != effect.pair.sg or new.state is not KVPoll.TRANSFERRING:
                raise Violation("A5", f"{proc.instance} started a ticket of a lifetime that is {new and new.state.name}")
            if not any(new.pair(dest) == effect.pair for dest in new.dests):
                raise Violation("P6", f"{proc.instance} started a ticket of an unpaired room")
        elif isinstance(effect, ev.Send):
            _check_told(proc, new, effect.message)


def _check_told(proc: Proc, new: Any, message: RoomMessage) -> None:
    """S5: what a side says of a stored lifetime's failure is that lifetime's reason, and never nothing."""
    if isinstance(message, Status) and message.state is KVPoll.FAILED:
        mine = new is not None and new.state is KVPoll.FAILED and message.sg == new.generation
    elif isinstance(message, Abort):
        mine = new is not None and new.state is KVPoll.FAILED and message.rg == new.generation
    else:
        return
    if message.reason is None or (mine and message.reason != new.reason):
        raise Violation("S5", f"{proc.instance} tells {message.reason} of a room that failed with {new and new.reason}")


def _check_cleanup(proc: Proc, after: Any, effects: tuple[ev.Effect, ...]) -> None:
    """A5: tickets of a lifetime that fails are cancelled; C1: the backend forgets one that is cleared when its last ticket is over."""
    old, new = proc.state.life, after.life
    forgotten = {effect.generation for effect in effects if isinstance(effect, ev.Forget)}
    held, holds = _held(proc.state), _held(after)
    if forgotten & holds or held - holds - forgotten:
        raise Violation("C1", f"{proc.instance} forgets {forgotten} while it holds {holds} of {held}")
    ended = old is not None and not old.state.terminal and (new is None or new.state is KVPoll.FAILED)
    if proc.side == "S" and ended and ev.Cancel(old.generation) not in effects:
        raise Violation("A5", f"{proc.instance} failed without cancelling its tickets")


def _held(state: Any) -> set[int]:
    """Generations of which the backend may hold something."""
    flights = {flight.pair.sg for flight in getattr(state, "flights", ())}
    return flights | ({state.life.generation} if state.life is not None else set())


def _check_stale_timers(modules: Modules, proc: Proc, after: Any) -> None:
    facts, module = modules.facts(proc.side), modules.step(proc.side)
    armed = facts.timers(after)
    for timer in facts.timers(proc.state):
        if timer not in armed and module.step(after, ev.Timeout(timer)) != (after, ()):
            raise Violation("C4", f"{proc.instance}: {timer} is no longer armed and still does something")


def _check_repeated(module: ModuleType, proc: Proc, event: ev.Event, after: Any, first: tuple[ev.Effect, ...]) -> None:
    """Once more the same: no effect at all."""
    rule = {ev.Clear: "C2", ev.Fail: "A3", ev.Ended: "S6", ev.Hand: "T1"}.get(type(event))
    begun = any(isinstance(effect, ev.Start) for effect in first)  # the next chunk, or a retry
    if rule is None or begun or (isinstance(event, ev.Hand) and not event.last):
        return
    again, effects = module.step(after, event)
    if again != after or effects:
        raise Violation(rule, f"{proc.instance}: a second {type(event).__name__} changed something")


# --- one state of one process


def check_state(modules: Modules, proc: Proc) -> None:
    """S8: a live room has its limit; C2, C4, C6: handles of old lifetimes, and another open, do nothing."""
    module, life = modules.step(proc.side), proc.state.life
    live = life is not None and not life.state.terminal
    if live:
        limits = [timer.limit for timer in modules.facts(proc.side).timers(proc.state) if timer.subject[:2] == ("state", life.generation)]
        if limits != [LIMITS[life.state]]:
            raise Violation("S8", f"{proc.instance} is {life.state.name} with the limits {limits}")
        _check_inert(module, proc, ev.Open(len(proc.lives) + 1), "C6")
    for past in proc.lives:
        if not past.stored or not live:
            for event, rule in _old_handle(proc.side, past):
                _check_inert(module, proc, event, rule)
    _check_alone(modules, proc)


def _old_handle(side: str, past: Past) -> list[tuple[ev.Event, str]]:
    """What the handle of a lifetime that has ended may still say."""
    generation = past.generation
    more: ev.Event = ev.Hand(generation, (("kv", 1, 1),), True) if side == "S" else ev.Receive(generation, ())
    clear: list[tuple[ev.Event, str]] = [] if past.stored else [(ev.Clear(generation), "C2")]
    return [*clear, (ev.Fail(generation, ev.cleared(ROOM, "prefill", 9)), "A3"), (more, "A5")]


def _check_alone(modules: Modules, proc: Proc) -> None:
    """C7: cleared, and with the other side silent for ever, nothing is kept once tickets have ended and limits have passed."""
    module, facts, state = modules.step(proc.side), modules.facts(proc.side), proc.state
    if state.life is not None:
        state, _ = module.step(state, ev.Clear(state.life.generation))
    for flight in state.flights if proc.side == "S" else ():
        for chunk in flight.running | flight.stuck:
            state, _ = module.step(state, ev.Ended(flight.pair, chunk, True, True))
    for timer in facts.timers(state):
        state, _ = module.step(state, ev.Timeout(timer))
    if not state.empty:
        raise Violation("C7", f"{proc.instance} would keep {state} for ever")


def _check_inert(module: ModuleType, proc: Proc, event: ev.Event, rule: str) -> None:
    if module.step(proc.state, event) != (proc.state, ()):
        raise Violation(rule, f"{proc.instance}: {event} is about nothing that lives here and did something")
