"""The contract's rules, as checks of one step, of one state, of one moment of all processes, and of how they end."""

from __future__ import annotations

from typing import Any

from kvcore.protocol import events as ev
from kvcore.protocol.messages import Abort, Drained, RoomMessage, Status
from kvcore.states import FailureCode, KVPoll
from tests.protocol.world import Engine, Modules, Past, Proc, Scope, Violation, Write

LIMITS = {KVPoll.BOOTSTRAPPING: "bootstrap_s", KVPoll.WAITING_FOR_INPUT: "input_s", KVPoll.TRANSFERRING: "transfer_s"}

# --- one step


def check_step(modules: Modules, proc: Proc, event: ev.Event, after: Any, effects: tuple[ev.Effect, ...]) -> None:
    """S1, S3, S5, S6, A2, A3, A5, C1, C2, S8 on one step of one process; ``proc`` is as it was before."""
    old, new = proc.state.life, after.life
    same = old is not None and new is not None and old.generation == new.generation
    if same:
        _check_forward(proc, old, new)
        if new.state is KVPoll.FAILED and old.state is not KVPoll.FAILED:
            _check_cause(proc, event, old, new)
    _check_removal(proc, event, old, new)
    if new is not None and (new.state is KVPoll.FAILED) != (new.reason is not None):
        raise Violation("S6", f"{proc.instance} is {new.state.name} with reason {new.reason}")
    _check_answer(proc, event, old, new)
    _check_effects(proc, after, effects)
    _check_cleanup(proc, after, effects)
    _check_stale_timers(modules, proc, after)
    _check_repeated(modules.step(proc.side), proc, event, after)


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
    """S5: a failure that was heard of is reported as it was told; T5: a rank that said success cannot fail the room."""
    if isinstance(event, ev.Got):
        told = getattr(event.message, "reason", None)
        if told is not None and new.reason != told:
            raise Violation("S5", f"{proc.instance} was told {told} and reports {new.reason}")
        source = old.source(event.source.instance) if proc.side == "R" else None
        if source is not None and source.state is KVPoll.SUCCESS:
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


def _check_repeated(module: Any, proc: Proc, event: ev.Event, after: Any) -> None:
    """Once more the same: no effect at all."""
    rule = {ev.Clear: "C2", ev.Fail: "A3", ev.Ended: "S6", ev.Hand: "T1"}.get(type(event))
    if rule is None or (isinstance(event, ev.Hand) and not event.last):
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
        if not past.stored:
            for event, rule in _old_handle(proc, past.generation):
                _check_inert(module, proc, event, rule)


def _old_handle(proc: Proc, generation: int) -> list[tuple[ev.Event, str]]:
    why = ev.Lost("", proc.state.life.reason).reason if proc.state.life is not None else None
    late = why or _LATE
    more: ev.Event = ev.Hand(generation, (("kv", 1),), True) if proc.side == "S" else ev.Receive(generation, ())
    return [(ev.Clear(generation), "C2"), (ev.Fail(generation, late), "C4"), (more, "C4")]


def _check_inert(module: Any, proc: Proc, event: ev.Event, rule: str) -> None:
    if module.step(proc.state, event) != (proc.state, ()):
        raise Violation(rule, f"{proc.instance}: {event} is about nothing that lives here and did something")


# --- one moment of all processes


def check_start(procs: list[Proc], me: Proc, start: ev.Start, engine: Engine) -> None:
    """C4: a request's bytes go to its own receiver; R3: no ticket is started twice."""
    again = [write for write in engine.writes | engine.landed if write[:3] == (me.instance, start.pair, start.chunk)]
    if again:
        raise Violation("R3", f"{me.instance} started chunk {start.chunk} of {start.pair} again")
    mine = me.opened(start.pair.sg)
    for proc in procs:
        theirs = proc.opened(start.pair.rg) if proc.instance == start.pair.peer else None
        if mine is not None and theirs is not None and mine.request != theirs.request:
            raise Violation("C4", f"request {mine.request} is written to the pages of request {theirs.request}")


def check_heard(procs: list[Proc], before: Proc, after: Proc, got: ev.Got) -> None:
    """C4: a message of an old lifetime does not change one of a newer request."""
    old, new = before.state.life, after.state.life
    if old is None or new is None or old.state is new.state:
        return
    generation = got.message.rg if before.side == "S" else got.message.sg
    mine = before.opened(old.generation)
    for proc in procs:
        theirs = proc.opened(generation) if proc.instance == got.source.instance else None
        if theirs is not None and mine is not None and theirs.request != mine.request:
            text = f"{before.instance}, of request {mine.request}, became {new.state.name} by a message of request {theirs.request}"
            raise Violation("C4", text)


def check_moment(scope: Scope, modules: Modules, procs: list[Proc], engine: Engine) -> None:
    """R1, R2, R5, R6, P6, S5, T5 in one reachable world."""
    for write in engine.writes:
        _check_write(modules, procs, write)
    for proc in procs:
        life = proc.state.life
        if life is not None and life.state is KVPoll.SUCCESS:
            (_check_sent if proc.side == "S" else _check_received)(scope, procs, proc, engine)
        if life is not None and life.state is KVPoll.FAILED:
            _check_origin(procs, proc)


def _check_write(modules: Modules, procs: list[Proc], write: Write) -> None:
    """While a write may land, nobody calls its pages safe by evidence."""
    for proc in procs:
        if proc.instance not in (write.sender, write.pair.peer):
            continue
        generation, rule = (write.pair.sg, "R5") if proc.side == "S" else (write.pair.rg, "R1")
        if generation not in proc.unproven and modules.facts(proc.side).release_safe(proc.state, generation):
            raise Violation(rule, f"{proc.instance} calls the pages of lifetime {generation} safe while {write} may still happen")


def _missing(scope: Scope, engine: Engine, pair: ev.Pair, sender: str) -> list[int]:
    count = sum(pages for pages, _ in scope.chunks)
    landed = {write.chunk for write in engine.landed if (write.sender, write.pair) == (sender, pair)}
    running = {write.chunk for write in engine.writes if (write.sender, write.pair) == (sender, pair)}
    return [chunk for chunk in range(1, count + 1) if chunk not in landed or chunk in running]


def _check_sent(scope: Scope, procs: list[Proc], proc: Proc, engine: Engine) -> None:
    life = proc.state.life
    if len(life.dests) != scope.receivers:
        raise Violation("T5", f"{proc.instance} succeeded with {len(life.dests)} of {scope.receivers} destinations")
    for dest in life.dests:
        missing = _missing(scope, engine, life.pair(dest), proc.instance)
        if missing:
            raise Violation("T5", f"{proc.instance} succeeded without chunk {missing} for {dest.party.instance}")


def _check_received(scope: Scope, procs: list[Proc], proc: Proc, engine: Engine) -> None:
    life = proc.state.life
    if len(life.sources) != scope.senders:
        raise Violation("R6", f"{proc.instance} succeeded with {len(life.sources)} of {scope.senders} senders")
    for source in life.sources:
        missing = _missing(scope, engine, ev.Pair(proc.instance, life.generation, source.sg), source.party.instance)
        if missing:
            raise Violation("R6", f"{proc.instance} succeeded without chunk {missing} of {source.party.instance}")
        for other in procs:
            past = other.opened(source.sg) if other.instance == source.party.instance else None
            if past is not None and scope.receivers == 1 and past.state is not KVPoll.SUCCESS:
                raise Violation("P6", f"{proc.instance} succeeded and {other.instance} is {past.state.name}")


def _check_origin(procs: list[Proc], proc: Proc) -> None:
    """S5: the reason named as the other side's is the one that side has; T5: a rank that succeeded failed nobody."""
    life = proc.state.life
    if life.reason.code in (FailureCode.NO_SUCH_ROOM, FailureCode.PEER_LOST) or any(other.run or other.gave_up for other in procs):
        return
    side = "S" if life.reason.side == "prefill" else "R"
    mine = proc.opened(life.generation)
    for other in procs:
        theirs = other.state.life
        if (other.side, other.rank) != (side, life.reason.rank) or theirs is None or not theirs.state.terminal or other is proc:
            continue
        past = other.opened(theirs.generation)
        if mine is not None and past is not None and past.request == mine.request and theirs.reason != life.reason:
            raise Violation("S5", f"{proc.instance} failed by {life.reason}, but {other.instance} is {theirs.state.name}: {theirs.reason}")


_LATE = ev.cleared(ev.RoomId(7), "prefill", 0)


# --- how it ends


def check_told(procs: list[Proc], engine: Engine) -> None:
    """A4, A7, T5: with all traffic answered, nobody waits for a side that has ended, and every unopened room is noted."""
    newest = max((past.request for proc in procs for past in proc.lives), default=0)
    ends: list[tuple[Proc, Past | None]] = [(proc, proc.use(newest)) for proc in procs]
    opened = {proc.side for proc, past in ends if past is not None}
    if len(opened) == 2:
        for proc, past in ends:
            others = [past for other, past in ends if past is not None and other.side != proc.side]
            if past is not None and past.stored and not past.state.terminal and not _credited(proc):
                _check_knows(proc, past, ends, others)
    for proc, past in ends:
        if proc.side == "R" and past is not None and past.stored and not past.state.terminal:
            _check_noted(proc, past, [other for other, _ in ends if other.side == "S"])


def _check_knows(proc: Proc, past: Past, ends: list[tuple[Proc, Past | None]], others: list[Past]) -> None:
    credited = any(_credited(other) and theirs is not None and not theirs.state.terminal for other, theirs in ends)
    failed = [
        other.instance
        for other, theirs in ends
        if theirs is not None and theirs.state is KVPoll.FAILED and not (credited and other.side == "R")
    ]
    if failed:
        raise Violation("A4", f"{proc.instance} stays {past.state.name} after {failed} failed")
    if len(others) == sum(other.side != proc.side for other, _ in ends) and all(theirs.state is KVPoll.SUCCESS for theirs in others):
        raise Violation("T5", f"{proc.instance} stays {past.state.name} after the other side succeeded")


def _credited(proc: Proc) -> bool:
    """C4: an unpaired abort of the new use may be taken for the old one, whose sender then ends by its own limit."""
    return proc.side == "S" and any(old.unpaired for old in proc.lives[:-1])


def _check_noted(proc: Proc, past: Past, senders: list[Proc]) -> None:
    """A7: a join for a room that nobody opened waits at the sender, which says "no such room" after orphan_s."""
    for sender in senders:
        life = sender.state.life
        waits = any((party.instance, rg) == (proc.instance, past.generation) for party, rg in sender.state.waiting)
        if (life is None or life.state.terminal) and not waits:
            source = proc.state.life.source(sender.instance)
            if source is None or source.state is not KVPoll.SUCCESS:
                raise Violation("A7", f"{sender.instance} would never answer {proc.instance}, which waits")


def check_cleared(procs: list[Proc], *, disturbed: bool) -> None:
    """C1, C7: with all rooms cleared, words heard and tickets ended, only unpaired ends and unheard joins are still kept."""
    for proc in procs:
        state = proc.state
        if state.life is not None:
            raise Violation("C1", f"{proc.instance} still stores {state.life}")
        if disturbed:
            continue
        unpaired = any(past.unpaired for past in proc.lives)
        if proc.side == "S":
            kept = (*state.flights, *state.words, *(() if unpaired else state.marks))
        else:
            kept = tuple(drain for drain in state.drains if drain.asking and (drain.published or not unpaired))
        if kept:
            raise Violation("C7", f"{proc.instance} keeps {kept}")


def check_gone(procs: list[Proc]) -> None:
    """C7: after every limit nothing at all is kept."""
    for proc in procs:
        if not proc.state.empty:
            raise Violation("C7", f"{proc.instance} keeps {proc.state} after every limit")


def drained(write: Write) -> tuple[str, str, Any]:
    """The message (from, to, what) that must not have been said while that write may land (R2)."""
    pair = write.pair
    return write.sender, pair.peer, Drained(7, 0, pair.rg, pair.sg, False)


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
