"""What a step of the sender may do: the guarded ways to change a room, and the answers from kept facts.

A verdict is recorded once and never derived from tickets (S6). ``Turn.fail`` is the only way to FAILED, ``Turn.start`` the only way to
a ticket, ``Turn.live`` the only question whether a lifetime may still change.
"""

from __future__ import annotations

from msgspec.structs import replace

from kvcore.protocol.events import Cancel, Effect, Forget, Pair, Party, Send, Start
from kvcore.protocol.messages import Drained, Relay
from kvcore.protocol.sender_state import Dest, Flight, Life, Mark, Sender, Word, tell
from kvcore.states import FailureCode, KVPoll, Reason


class Turn:
    """One step under way: the state so far, the effects, and the few ways to change them."""

    def __init__(self, state: Sender) -> None:
        self.state = state
        self.out: list[Effect] = []

    # --- the guarded core

    def live(self, generation: int | None = None) -> Life | None:
        """The stored lifetime if it is not terminal (and is the one named)."""
        life = self.state.life
        if life is None or life.state.terminal or (generation is not None and life.generation != generation):
            return None
        return life

    def set_life(self, life: Life | None) -> None:
        self.state = replace(self.state, life=life)

    def fail(self, reason: Reason, told: Pair | None = None, lost: str | None = None) -> None:
        """Become FAILED, once, with the reason (S5, S6); keep a last word for everyone but ``told`` and instance ``lost``."""
        life = self.live()
        if life is None:
            return
        pairs = [life.pair(dest) for dest in life.dests if not dest.done]
        pairs += [Pair(party.instance, rg, life.generation) for party, rg in life.joined if life.dest(party.rank) is None]
        size = life.n_dest or max((party.size for party, _ in life.joined), default=0)
        met = frozenset(dest.party.rank for dest in life.dests)
        unpaired = size == 0 or len(met) < size
        self.set_life(replace(life, state=KVPoll.FAILED, reason=reason, unpaired=unpaired))
        if unpaired:
            self.add_mark(Mark(life.generation, reason, met, size))
        for pair in pairs:
            if pair != told and pair.peer != lost:
                self.say(Word(pair, KVPoll.FAILED, reason))
        self.relay(life, reason, told)
        self.out.append(Cancel(life.generation))

    def relay(self, life: Life, reason: Reason | None, told: Pair | None) -> None:
        """Pass a failure on to those destinations that keep this rank's success: they may hear of it from nobody else (T5)."""
        room = self.state.room
        for pair in (life.pair(dest) for dest in life.dests if dest.done):
            if pair != told:
                self.out.append(Send(pair.peer, Relay(room.number, room.attempt, pair.rg, pair.sg, reason)))

    def start(self, life: Life, dest: Dest, chunk: int) -> None:
        """Start one ticket of a live, complete lifetime."""
        pair = life.pair(dest)
        flight = self.flight(pair) or Flight(pair)
        self.set_flight(replace(flight, running=flight.running | {chunk}))
        self.out.append(Start(pair, chunk))

    def settle(self) -> None:
        """Say success to each destination all of whose tickets ended well after the last chunk; then succeed (T5)."""
        life = self.live()
        if life is None or not life.last or not life.complete:
            return
        for dest in life.dests:
            if not dest.done and dest.ok == life.chunks:
                self.say(Word(life.pair(dest), KVPoll.SUCCESS, None, life.record))
        life = replace(life, dests=tuple(replace(dest, done=dest.ok == life.chunks) for dest in life.dests))
        self.set_life(replace(life, state=KVPoll.SUCCESS) if all(dest.done for dest in life.dests) else life)

    # --- small stores

    def flight(self, pair: Pair) -> Flight | None:
        return next((flight for flight in self.state.flights if flight.pair == pair), None)

    def set_flight(self, flight: Flight) -> None:
        """Store a pair's tickets; when none is left, answer a receiver that asked and let the backend forget."""
        rest = tuple(other for other in self.state.flights if other.pair != flight.pair)
        if flight.running or flight.stuck:
            self.state = replace(self.state, flights=(*rest, flight))
            return
        self.state = replace(self.state, flights=rest)
        self.forget(flight.pair.sg)

    def forget(self, generation: int) -> None:
        life = self.state.life
        stored = life is not None and life.generation == generation
        if not stored and not any(flight.pair.sg == generation for flight in self.state.flights):
            self.out.append(Forget(generation))

    def word(self, pair: Pair) -> Word | None:
        return next((word for word in self.state.words if word.pair == pair), None)

    def say(self, word: Word) -> None:
        self.drop_word(word.pair)
        self.state = replace(self.state, words=(*self.state.words, word))
        self.out.append(tell(self.state.room, word))

    def drop_word(self, pair: Pair) -> None:
        if self.word(pair) is not None:
            self.state = replace(self.state, words=tuple(word for word in self.state.words if word.pair != pair))

    def add_mark(self, mark: Mark) -> None:
        """Keep a mark; older ones stay only for ranks that the new one does not cover."""
        kept = tuple(old for old in self.state.marks if not mark.met <= old.met)
        self.state = replace(self.state, marks=(*kept, mark))

    def unmet_mark(self, rank: int) -> Mark | None:
        return next((mark for mark in reversed(self.state.marks) if rank not in mark.met), None)

    # --- answers

    def status(self, pair: Pair, state: KVPoll, reason: Reason | None = None, record: bytes = b"") -> None:
        self.out.append(tell(self.state.room, Word(pair, state, reason, record)))

    def answer_ended(self, pair: Pair, rank: int) -> None:
        """How a pair that is not live here ended, from kept facts (P6)."""
        word = self.word(pair)
        if word is not None:
            return self.status(pair, word.state, word.reason, word.record)
        life = self.state.life
        if life is not None and life.generation == pair.sg:
            dest = life.dest(rank)
            if dest is not None and dest.done and life.pair(dest) == pair:
                return self.status(pair, KVPoll.SUCCESS, None, life.record)
            if life.state is KVPoll.FAILED:
                return self.status(pair, KVPoll.FAILED, life.reason)
        for mark in self.state.marks:
            if mark.generation == pair.sg and rank not in mark.met:
                return self.status(pair, KVPoll.FAILED, mark.reason)
        text = f"unknown lifetime of room {self.state.room}: it ended here and its verdict is no longer kept; use another attempt"
        self.status(pair, KVPoll.FAILED, Reason.of(FailureCode.NO_SUCH_ROOM, text, "prefill", self.state.rank))

    def answer_drained(self, pair: Pair, party: Party) -> None:
        """R2: say drained if no ticket of the pair is left, else when the last has ended."""
        flight = self.flight(pair)
        if flight is not None:
            return self.set_flight(replace(flight, asked=True))
        life = self.state.life
        dest = life.dest(party.rank) if life is not None else None
        known = life is not None and dest is not None and life.pair(dest) == pair
        expired = dest.expired if known and dest is not None else pair.rg <= party.expired
        self.say_drained(pair, expired)

    def say_drained(self, pair: Pair, expired: bool) -> None:
        room = self.state.room
        self.out.append(Send(pair.peer, Drained(room.number, room.attempt, pair.rg, pair.sg, expired)))
