"""The contract's rules about one moment of all processes, and about how they end."""

from __future__ import annotations

from kvcore.protocol import events as ev
from kvcore.protocol.messages import Drained
from kvcore.states import FailureCode, KVPoll
from tests.protocol.steps import Packet
from tests.protocol.world import ROOM, Engine, Modules, Past, Proc, Scope, Violation, Write

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
        if life is not None and life.state is KVPoll.FAILED and not scope.any_order:
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
    if scope.extra_pages:
        raise Violation("T3", f"{proc.instance} succeeded though its receivers listed {scope.extra_pages} pages more")
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
    if life.reason.code is FailureCode.PEER_LOST or any(other.run or other.lost or other.gave_up for other in procs):
        return
    if life.reason.code is FailureCode.NO_SUCH_ROOM:
        if proc.side == "R" and any(source.sg and source.party.rank == life.reason.rank for source in life.sources):
            raise Violation("P6", f"{proc.instance} was told {life.reason} of a lifetime whose end must still be known")
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


# --- how it ends


def check_told(procs: list[Proc]) -> None:
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


def drained(write: Write) -> Packet:
    """What must not have been said while that write may land (R2)."""
    pair = write.pair
    return Packet(write.sender, pair.peer, Drained(*ROOM, pair.rg, pair.sg, False))
