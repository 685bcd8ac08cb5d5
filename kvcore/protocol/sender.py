"""The sender's half of the room protocol: what each event does to one room of one prefill rank (``sender_turn`` has the means)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from kvcore.protocol.events import (
    Clear,
    Effect,
    Ended,
    Event,
    Fail,
    Fenced,
    Got,
    Hand,
    Lost,
    Open,
    Pair,
    Party,
    Send,
    Timeout,
    Unproven,
    cleared,
    timed_out,
)
from kvcore.protocol.messages import Abort, Ack, Destination, Here, Join, Layers, Which
from kvcore.protocol.sender_state import Dest, Flight, Life, Sender, timers
from kvcore.protocol.sender_turn import Turn
from kvcore.states import FailureCode, KVPoll, Reason


def step(state: Sender, event: Event) -> tuple[Sender, tuple[Effect, ...]]:
    """Take one event. The state is unchanged, and nothing is to be done, where the event is about nothing that lives here."""
    turn = _Turn(state)
    kind = type(event.message) if isinstance(event, Got) else type(event)
    handler = _HANDLERS.get(kind)
    if handler is not None:
        handler(turn, event)
    return turn.state, tuple(turn.out)


class _Turn(Turn):
    """A handler for each event."""

    # --- events from the handle

    def on_open(self, event: Open) -> None:
        if self.live() is not None:
            return
        if self.state.life is not None:
            self.on_clear(Clear(self.state.life.generation))
        marks = tuple(replace(mark, refuses=False) for mark in self.state.marks)
        waiting, self.state = self.state.waiting, replace(self.state, life=Life(event.generation), marks=marks, waiting=())
        for party, rg in waiting:
            self.welcome(party, rg)

    def on_hand(self, event: Hand) -> None:
        life = self.live(event.generation)
        if life is None or life.last:
            return
        life = replace(life, handed=True, last=event.last, record=event.record)
        if event.pages:
            layered = (*life.layered, (life.chunks + 1, event.layers)) if event.layers else life.layered
            life = replace(life, chunks=life.chunks + 1, pages=event.pages, layered=layered, full=event.full if layered else ())
        self.set_life(life)
        if not life.complete or not self.fits(life):
            return
        if life.state < KVPoll.TRANSFERRING:
            self.begin(life)
        if event.pages:
            for dest in life.dests:
                self.start(life, dest, life.chunks)
        self.settle()

    def fits(self, life: Life) -> bool:
        """Whether the pages handed over so far fit every destination; fails the room if not (T3)."""
        misfit = life.misfit()
        if misfit is not None:
            text = f"room {self.state.room}: {misfit}; both sides must count the same pages, prefix excluded"
            self.fail(Reason.of(FailureCode.BAD_PAGES, text, "prefill", self.state.rank))
        return misfit is None

    def begin(self, life: Life) -> None:
        """First chunk handed over and all destinations known."""
        self.set_life(replace(life, state=KVPoll.TRANSFERRING))
        for dest in life.dests:
            self.status(life.pair(dest), KVPoll.TRANSFERRING)

    def on_fail(self, event: Fail) -> None:
        if self.live(event.generation) is not None:
            self.fail(event.reason)

    def on_clear(self, event: Clear) -> None:
        life = self.state.life
        if life is None or life.generation != event.generation:
            return
        self.fail(cleared(self.state.room, "prefill", self.state.rank))
        self.set_life(None)
        self.forget(event.generation)

    # --- messages

    def on_join(self, event: Got) -> None:
        message, party = event.message, event.source
        life = self.live()
        if life is not None and message.sg in (0, life.generation):
            bound = life.dest(party.rank)
            if bound is None or (bound.party.instance, bound.rg) == (party.instance, message.rg):
                self.welcome(party, message.rg)
            return
        if message.sg:
            return self.answer_ended(Pair(party.instance, message.rg, message.sg), party.rank)
        mark = self.unmet_mark(party.rank)
        if mark is not None and mark.refuses:
            return self.status(Pair(party.instance, message.rg, mark.generation), KVPoll.FAILED, mark.reason)
        if life is None:
            self.state = replace(self.state, waiting=_with_newest(self.state.waiting, party, message.rg))

    def welcome(self, party: Party, rg: int) -> None:
        """Tell a receiver that a live sender is here; note it, so that it hears of a failure (the newest of each instance)."""
        life = self.live()
        if life is None:
            return
        self.set_life(replace(life, joined=_with_newest(life.joined, party, rg)))
        room = self.state.room
        self.out.append(Send(party.instance, Here(room.number, room.attempt, rg, life.generation)))

    def on_destination(self, event: Got) -> None:
        message, party = event.message, event.source
        assert isinstance(message, Destination)
        pair = Pair(party.instance, message.rg, message.sg)
        life = self.live(message.sg)
        if life is None:
            return self.answer_ended(pair, party.rank)
        bound = life.dest(party.rank)
        if bound is None:
            return self.bind(life, party, message)
        if life.pair(bound) != pair:
            text = f"room {self.state.room} is already bound to another receiver of rank {party.rank}; use another attempt for a retry"
            return self.status(pair, KVPoll.FAILED, Reason.of(FailureCode.NO_SUCH_ROOM, text, "prefill", self.state.rank))
        if bound.done:
            self.status(pair, KVPoll.SUCCESS, None, life.record)
        elif life.state is KVPoll.TRANSFERRING:
            self.status(pair, KVPoll.TRANSFERRING)

    def bind(self, life: Life, party: Party, message: Destination) -> None:
        """Pair the two lifetimes; with the last destination rank the room can move."""
        life = replace(life, dests=(*life.dests, Dest(party, message.rg, message.pages)), n_dest=life.n_dest or message.n_dest)
        self.set_life(life)
        first = life.dests[0]
        if (message.n_dest, party.shape) != (life.n_dest, first.party.shape) or message.n_dest != party.size:
            text = (
                f"room {self.state.room}: destination rank {party.rank} names {message.n_dest} destination ranks, of {_shape(party)}, "
                f"where {party.size} are due, and rank {first.party.rank} named {life.n_dest}, of {_shape(first.party)}; "
                "start all ranks with one topology"
            )
            return self.fail(Reason.of(FailureCode.INCOMPATIBLE, text, "prefill", self.state.rank))
        if not life.complete:
            return
        self.set_life(replace(life, state=KVPoll.WAITING_FOR_INPUT))
        if life.handed and self.fits(life):
            self.begin(life)
            for dest in life.dests:
                for chunk in range(1, life.chunks + 1):
                    self.start(life, dest, chunk)
            self.settle()

    def on_abort(self, event: Got) -> None:
        message, party = event.message, event.source
        assert isinstance(message, Abort)
        if message.sg == 0:
            return self.on_unnamed_abort(message, party)
        pair = Pair(party.instance, message.rg, message.sg)
        self.drop_word(pair)
        life = self.live(message.sg)
        if life is not None:
            bound = life.dest(party.rank)
            if bound is None:
                life = replace(life, dests=(*life.dests, Dest(party, message.rg)))
                self.set_life(replace(life, n_dest=life.n_dest or party.size))
            if bound is None or life.pair(bound) == pair:
                self.fail(message.reason or Reason(FailureCode.ABORTED, "aborted by peer", "decode", party.rank), told=pair)
        ended = self.state.life
        if ended is not None and ended.state is KVPoll.SUCCESS and pair in map(ended.pair, ended.dests):
            self.relay(ended, message.reason, pair)
        self.answer_drained(pair, party)

    def on_unnamed_abort(self, message: Abort, party: Party) -> None:
        """An abort that names no sender: it fails nothing by itself (A7)."""
        for word in self.state.words:
            if (word.pair.peer, word.pair.rg) == (party.instance, message.rg):
                self.drop_word(word.pair)
                return self.answer_drained(word.pair, party)
        mark = self.unmet_mark(party.rank)
        if mark is not None:
            return self.say_drained(Pair(party.instance, message.rg, mark.generation), expired=False)
        life = self.live()
        if life is None:
            return
        bound = life.dest(party.rank)
        if bound is not None and (bound.party.instance, bound.rg) != (party.instance, message.rg):
            return self.say_drained(Pair(party.instance, message.rg, life.generation), expired=False)
        room = self.state.room
        self.out.append(Send(party.instance, Which(room.number, room.attempt, message.rg, life.generation)))

    def on_ack(self, event: Got) -> None:
        message, party = event.message, event.source
        assert isinstance(message, Ack)
        self.drop_word(Pair(party.instance, message.rg, message.sg))
        if not message.live:
            return
        marks = []
        for mark in self.state.marks:
            if mark.generation == message.sg:
                mark = replace(mark, met=mark.met | {party.rank}, size=mark.size or party.size)
            if mark.size == 0 or len(mark.met) < mark.size:
                marks.append(mark)
        self.state = replace(self.state, marks=tuple(marks))

    # --- tickets, peers and timers

    def on_ended(self, event: Ended) -> None:
        flight = self.flight(event.pair)
        if flight is None or event.chunk not in flight.running | flight.stuck:
            return
        was_running = event.chunk in flight.running
        running = flight.running - {event.chunk}
        stuck = flight.stuck - {event.chunk} if event.quiescent else flight.stuck | {event.chunk}
        self.set_flight(replace(flight, running=running, stuck=stuck))
        if was_running:
            self.book(event)
        if flight.asked and self.flight(event.pair) is None:
            self.say_drained(event.pair, flight.expired)

    def book(self, event: Ended) -> None:
        """What a ticket's end means for the lifetime it belongs to, if that still lives."""
        life = self.live(event.pair.sg)
        if life is None:
            return
        if not event.ok:
            return self.fail(event.reason or Reason(FailureCode.BACKEND, "the backend gave no reason", "prefill", self.state.rank))
        dests = tuple(self.ticket_done(life, dest) if life.pair(dest) == event.pair else dest for dest in life.dests)
        self.set_life(replace(life, dests=dests))
        self.settle()

    def ticket_done(self, life: Life, dest: Dest) -> Dest:
        """One more ticket towards a destination has ended well; it is told if that made layers complete."""
        dest = replace(dest, ok=dest.ok + 1)
        if not life.layered:
            return dest
        pair, room = life.pair(dest), self.state.room
        flight = self.flight(pair)
        ready = life.ready(flight.running if flight is not None else frozenset())
        if ready != dest.ready:
            self.out.append(Send(pair.peer, Layers(room.number, room.attempt, pair.rg, pair.sg, dest.ok, ready)))
        return replace(dest, ready=ready)

    def on_lost(self, event: Lost) -> None:
        gone = event.instance
        words = tuple(word for word in self.state.words if word.pair.peer != gone)
        waiting = tuple(item for item in self.state.waiting if item[0].instance != gone)
        self.state = replace(self.state, words=words, waiting=waiting)
        life = self.live()
        if life is None:
            return
        joined = tuple(item for item in life.joined if item[0].instance != gone)
        left = {party.rank for party, _ in joined} | {dest.party.rank for dest in life.dests}
        alone = any(party.rank not in left for party, _ in life.joined)  # no other instance has joined for its rank
        bound = any(dest.party.instance == gone and not dest.done for dest in life.dests)
        self.set_life(replace(life, joined=joined))
        if alone or bound:
            self.fail(event.reason, lost=gone)

    def on_fenced(self, event: Fenced) -> None:
        for flight in self.state.flights:
            if flight.pair.peer == event.instance:
                self.set_flight(Flight(flight.pair))

    def on_timeout(self, event: Timeout) -> None:
        if event.timer not in timers(self.state):
            return
        kind, *subject = event.timer.subject
        _TIMEOUTS[str(kind)](self, event, *subject)

    def on_state_timeout(self, event: Timeout, generation: int) -> None:
        life = self.live(generation)
        if life is None:
            return
        waited_for = _WAITED_FOR[life.state]
        if life.state is KVPoll.BOOTSTRAPPING and life.dests:
            waited_for = f"{life.n_dest - len(life.dests)} of {life.n_dest} destination ranks"
        elif life.state is KVPoll.BOOTSTRAPPING and life.joined:
            waited_for = "a destination (a receiver has joined)"
        text = timed_out(self.state.room, event.timer.limit, waited_for, event.note)
        self.fail(Reason.of(FailureCode.TIMEOUT, text, "prefill", self.state.rank))

    def on_ticket_timeout(self, event: Timeout, pair: Pair, chunk: int) -> None:
        flight = self.flight(pair)
        life = self.state.life
        if flight is None:
            return
        if life is not None:
            dests = tuple(replace(dest, expired=True) if life.pair(dest) == pair else dest for dest in life.dests)
            self.set_life(replace(life, dests=dests))
        self.out.append(Unproven(pair.sg, pair, chunk))
        self.set_flight(replace(flight, stuck=flight.stuck - {chunk}, expired=True))
        if flight.asked and self.flight(pair) is None:
            self.say_drained(pair, expired=True)

    def on_word_timeout(self, event: Timeout, pair: Pair) -> None:
        self.drop_word(pair)

    def on_mark_timeout(self, event: Timeout, generation: int) -> None:
        self.state = replace(self.state, marks=tuple(mark for mark in self.state.marks if mark.generation != generation))

    def on_join_timeout(self, event: Timeout, instance: str, rg: int) -> None:
        waiting = tuple(item for item in self.state.waiting if (item[0].instance, item[1]) != (instance, rg))
        self.state = replace(self.state, waiting=waiting)
        text = f"no such room {self.state.room}: nobody opened a sender for it within orphan_s"
        self.status(Pair(instance, rg, 0), KVPoll.FAILED, Reason.of(FailureCode.NO_SUCH_ROOM, text, "prefill", self.state.rank))


def _with_newest(joins: tuple[tuple[Party, int], ...], party: Party, rg: int) -> tuple[tuple[Party, int], ...]:
    """Joins with one more; of each instance only the newest lifetime counts, so there are no more than peers."""
    if any(known.instance == party.instance and old >= rg for known, old in joins):
        return joins
    return (*(item for item in joins if item[0].instance != party.instance), (party, rg))


def _shape(party: Party) -> str:
    return f"a group of tp {party.shape[0]}, pp {party.shape[1]}"


_WAITED_FOR = {
    KVPoll.BOOTSTRAPPING: "a receiver to join",
    KVPoll.WAITING_FOR_INPUT: "the first chunk to be handed over with send",
    KVPoll.TRANSFERRING: "the last chunk, or the end of its tickets",
}

_TIMEOUTS: dict[str, Callable[..., None]] = {
    "state": _Turn.on_state_timeout,
    "ticket": _Turn.on_ticket_timeout,
    "word": _Turn.on_word_timeout,
    "mark": _Turn.on_mark_timeout,
    "join": _Turn.on_join_timeout,
}

_HANDLERS: dict[type, Callable[[_Turn, Any], None]] = {
    Open: _Turn.on_open,
    Hand: _Turn.on_hand,
    Fail: _Turn.on_fail,
    Clear: _Turn.on_clear,
    Join: _Turn.on_join,
    Destination: _Turn.on_destination,
    Abort: _Turn.on_abort,
    Ack: _Turn.on_ack,
    Ended: _Turn.on_ended,
    Lost: _Turn.on_lost,
    Fenced: _Turn.on_fenced,
    Timeout: _Turn.on_timeout,
}
