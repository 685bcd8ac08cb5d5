"""Faults put into the protocol one at a time, each with the scope that must show it and the rules that must name it.

The first fifteen stand for the traces that break simpler schemes; the others are mistakes that are easily made.
"""

# ruff: noqa: E501 - the texts are the modules' own lines
from __future__ import annotations

from tests.protocol.mutation import Mutant, Patch
from tests.protocol.scopes import plain
from tests.protocol.world import Scope

ONE = plain("one lifetime, abort and clear")
FAULTS = plain("one lifetime, abort, faults", faults=True, quarantine=True)
LIMITS = plain("one lifetime, limits", limits=True, expiry=True, abort=False)
BYTES = plain("one lifetime, safety only", any_order=True, abort=False)
TWO = plain("two lifetimes, clear", requests=2, abort=False)
TWO_ABORT = plain("two lifetimes, abort and clear", requests=2)
TWO_EXPIRY = plain("two lifetimes, clear, marks expire", requests=2, expiry=True, abort=False)
CHUNKS = plain("two chunks", chunks=((True, False), (True, True)), abort=False)
MISFIT = plain("a page too many", extra_pages=1, abort=False)
SENDERS = plain("2 senders", senders=2, abort=False)
SENDERS_BYTES = plain("2 senders, safety only", senders=2, any_order=True, abort=False)
RECEIVERS = plain("2 receivers", receivers=2, abort=False)
RESTART = plain("restart, addressee not checked", restart=True, check_addressee=False)
FENCE = plain("restart", restart=True, abort=False)


def _mutant(name: str, scope: Scope, rules: str, *patches: tuple[str, str, str]) -> Mutant:
    return Mutant(name, tuple(Patch(*patch) for patch in patches), scope, frozenset(rules.split()))


TRACES = (
    _mutant(
        "corruption without loss or reorder",
        TWO,
        "C4",
        ("sender", "        life = self.live(message.sg)\n        if life is None:\n            return self.answer_ended", "        life = self.live()\n        if life is None:\n            return self.answer_ended"),
    ),
    _mutant(
        "corruption with reorder",
        BYTES,
        "R1 R2",
        ("receiver", "            if source.sg:\n                life = self.publish", "            if True:\n                life = self.publish"),
        ("sender", "        life = self.live(message.sg)\n        if life is None:\n            return self.answer_ended", "        life = self.live(message.sg or None)\n        if life is None:\n            return self.answer_ended"),
        ("sender", "        life = self.live()\n        if life is None:\n            return\n        bound = life.dest(party.rank)\n        if bound is not None and (", "        life = self.live()\n        if life is None:\n            return self.say_drained(Pair(party.instance, message.rg, 0), expired=False)\n        bound = life.dest(party.rank)\n        if bound is not None and ("),
    ),
    _mutant(
        "a new room killed by an old receiver",
        TWO,
        "C4",
        ("sender", "        self.out.append(Send(party.instance, Which(room.number, room.attempt, message.rg, life.generation)))", '        self.fail(message.reason or Reason(FailureCode.ABORTED, f"aborted in {room}", "decode"))'),
    ),
    _mutant(
        "a lost verdict",
        ONE,
        "P6",
        ("sender_turn", "self.say(Word(life.pair(dest), KVPoll.SUCCESS, None, life.record))", "self.status(life.pair(dest), KVPoll.SUCCESS, None, life.record)"),
    ),
    _mutant(
        "an invisible receiver",
        ONE,
        "A4",
        ("sender_turn", "        pairs += [Pair(party.instance, rg, life.generation) for party, rg in life.joined if life.dest(party.rank) is None]\n", ""),
        ("receiver_state", "if source.state is not KVPoll.SUCCESS]", "if not source.sg or source.published]"),
    ),
    _mutant(
        "untrue drained",
        FAULTS,
        "R1 R2",
        ("sender_turn", "expired = dest.expired if known and dest is not None else pair.rg <= party.expired", "expired = False"),
    ),
    _mutant(
        "a retry that hides a writer",
        FAULTS,
        "R1 R3",
        ("sender", '            return self.fail(event.reason or Reason(FailureCode.BACKEND, "the backend gave no reason", "prefill", self.state.rank))', "            return self.start(life, life.dests[0], event.chunk)"),
    ),
    _mutant(
        "a verdict recomputed",
        ONE,
        "S1 S6",
        ("sender", "        life = self.live(event.pair.sg)\n", "        life = self.state.life\n"),
        ("sender_turn", "        life = self.live()\n        if life is None or not life.last", "        life = self.state.life\n        if life is None or not life.last"),
    ),
    _mutant(
        "two ranks, one forgets",
        SENDERS,
        "T5",
        ("receiver", "if source.sg != message.sg or source.state is KVPoll.SUCCESS:", "if source.sg != message.sg:"),
    ),
    _mutant(
        "one tombstone for all ranks",
        RECEIVERS,
        "A4 A7",
        ("sender_turn", "unpaired = size == 0 or len(met) < size", "unpaired = not met"),
    ),
    _mutant(
        "success taken as an answer to an abort",
        RECEIVERS,
        "A4",
        ("receiver", "        live = source is not None and source.sg == message.sg\n", "        live = source is not None and source.sg == message.sg\n        for drain in self.state.drains:\n            self.drop(drain)\n"),
    ),
    _mutant(
        "a new process answers for the old",
        RESTART,
        "R1",
        ("receiver", "if (drain.party.instance, drain.rg) == (instance, rg)), None)", "if (drain.party.instance[:2], drain.rg) == (instance[:2], rg)), None)"),
    ),
    _mutant(
        "Here used as Which",
        TWO,
        "C4",
        ("receiver", "        if life is None or source is None or source.sg or not event.message.sg:\n            return\n", "        if life is None or source is None or source.sg or not event.message.sg:\n            return self.on_which(event)\n"),
    ),
    _mutant(
        '"unpaired" taken as "nobody joined"',
        TWO_ABORT,
        "A4 A7",
        ("sender_turn", "unpaired = size == 0 or len(met) < size", "unpaired = not life.joined"),
    ),
    _mutant(
        "marks that expire in the wrong order",
        TWO_EXPIRY,
        "C4",
        ("sender_state", 'Timer("mark_s", ', 'Timer("orphan_s", '),
    ),
)  # fmt: skip

MISTAKES = (
    _mutant(
        "an abort that does not end the sender",
        ONE,
        "A2",
        ("sender", "            self.fail(event.reason)\n", "            pass\n"),
    ),
    _mutant(
        "an abort that does not end the receiver",
        ONE,
        "A2",
        ("receiver", "            self.fail(event.reason)\n", "            pass\n"),
    ),
    _mutant(
        "a late success after a failure",
        ONE,
        "S1 S5",
        ("receiver", "        life = self.live(message.rg)\n        source = life.source(instance) if life is not None else None\n        if life is not None and source", "        life = self.state.life\n        source = life.source(instance) if life is not None else None\n        if life is not None and source"),
    ),
    _mutant(
        "a failure that overwrites the first reason",
        ONE,
        "A3 S1 S5",
        ("sender_turn", "        life = self.live()\n        if life is None:\n            return\n        pairs", "        life = self.state.life\n        if life is None:\n            return\n        pairs"),
        ("sender", "        if self.live(event.generation) is not None:\n", "        if True:\n"),
    ),
    _mutant(
        "a failure that is reported as one's own",
        ONE,
        "S5",
        ("receiver", 'return self.fail(message.reason or Reason(', 'return self.fail(Reason('),
    ),
    _mutant(
        "a sender's limit that is not armed",
        LIMITS,
        "S8",
        ("sender_state", "if life is not None and not life.state.terminal:", "if life is not None and life.state is KVPoll.BOOTSTRAPPING:"),
    ),
    _mutant(
        "a receiver's limit that is not armed",
        LIMITS,
        "S8",
        ("receiver_state", "if life is not None and not life.state.terminal:\n        restarted", "if life is not None and life.pages is not None:\n        restarted"),
    ),
    _mutant(
        "a last word that is kept for ever",
        ONE,
        "C7",
        ("sender_state", '        wanted.append(Timer("orphan_s", ("word", word.pair)))\n', "        pass\n"),
    ),
    _mutant(
        "a limit that fires late",
        LIMITS,
        "C4",
        ("sender", "        if event.timer not in timers(self.state):\n            return\n", ""),
    ),
    _mutant(
        "a clear that forgets marks",
        ONE,
        "A4 A7",
        ("sender", "        self.set_life(None)\n", "        self.state = replace(self.state, life=None, marks=())\n"),
    ),
    _mutant(
        "a clear that forgets last words",
        ONE,
        "P6 A4 C4",
        ("sender", "        self.set_life(None)\n", "        self.state = replace(self.state, life=None, words=())\n"),
    ),
    _mutant(
        "a clear of a live sender that tells nobody",
        ONE,
        "A5",
        ("sender", '        self.fail(cleared(self.state.room, "prefill", self.state.rank))\n', ""),
    ),
    _mutant(
        "a clear of a live receiver that tells nobody",
        ONE,
        "A4 R1",
        ("receiver", '        self.fail(cleared(self.state.room, "decode", self.state.rank))\n', ""),
    ),
    _mutant(
        "a second clear that wipes a newer sender",
        TWO,
        "C2",
        ("sender", "        if life is None or life.generation != event.generation:\n            return\n        self.fail(cleared", "        if life is None:\n            return\n        self.fail(cleared"),
    ),
    _mutant(
        "a second clear that wipes a newer receiver",
        TWO,
        "C2",
        ("receiver", "        if life is None or life.generation != event.generation:\n            return\n        self.fail(cleared", "        if life is None:\n            return\n        self.fail(cleared"),
    ),
    _mutant(
        "an open that disturbs a live room",
        ONE,
        "C6",
        ("sender", "        if self.live() is not None:\n            return\n        if self.state.life", "        if self.state.life"),
    ),
    _mutant(
        "a dead receiver's Ack that ends the refusal",
        TWO,
        "A4 C4",
        ("sender", "        if not message.live:\n            return\n", ""),
    ),
    _mutant(
        '"expired" taken as "drained"',
        FAULTS,
        "R1",
        ("receiver", "        if message.expired and drain.published:\n", "        if False:\n"),
    ),
    _mutant(
        "a success before the last chunk",
        CHUNKS,
        "T5",
        ("sender_turn", "if life is None or not life.last or not life.complete:", "if life is None or not life.complete:"),
    ),
    _mutant(
        "a success while tickets run",
        CHUNKS,
        "A5 T5",
        ("sender_turn", "            if not dest.done and dest.ok == life.chunks:\n", "            if not dest.done:\n"),
        ("sender_turn", "replace(dest, done=dest.ok == life.chunks)", "replace(dest, done=True)"),
    ),
    _mutant(
        "a success with a page too few",
        MISFIT,
        "T3",
        ("sender", "        return misfit is None\n", "        return True\n"),
        ("sender", "        if misfit is not None:\n            text", "        if misfit is None:\n            text"),
    ),
    _mutant(
        "a relay to the first destination only",
        RECEIVERS,
        "A4 P6",
        ("sender_turn", "pairs = [life.pair(dest) for dest in life.dests if not dest.done]", "pairs = [life.pair(dest) for dest in life.dests[:1] if not dest.done]"),
    ),
    _mutant(
        "tickets that are not cancelled",
        ONE,
        "A5",
        ("sender_turn", "        self.out.append(Cancel(life.generation))\n", ""),
    ),
    _mutant(
        "a ticket after the end",
        ONE,
        "A5",
        ("sender", "        life = self.live(event.generation)\n        if life is None or life.last:", "        life = self.state.life\n        if life is None or life.last:"),
    ),
    _mutant(
        "a lost peer taken as a dead one",
        FENCE,
        "R1",
        ("receiver", "if drain.party.instance == event.instance and not drain.published:", "if drain.party.instance == event.instance:"),
    ),
    _mutant(
        "a fence that frees nothing",
        FENCE,
        "C7",
        ("sender", "                self.set_flight(Flight(flight.pair))\n", "                pass\n"),
    ),
    _mutant(
        "source pages that are safe at the verdict",
        ONE,
        "R5",
        ("sender_state", "    if any(flight.pair.sg == generation for flight in state.flights):\n        return False\n", ""),
    ),
    _mutant(
        "destination pages that are safe at the abort",
        ONE,
        "R1",
        ("receiver_state", "    if any(drain.published and drain.rg == generation for drain in state.drains):\n        return False\n", ""),
    ),
    _mutant(
        "a drained that does not wait for tickets",
        ONE,
        "R1 R2",
        ("sender_turn", "            return self.set_flight(replace(flight, asked=True))\n", "            pass\n"),
    ),
    _mutant(
        "tickets that the backend never forgets",
        ONE,
        "C1",
        ("sender_turn", "        self.forget(flight.pair.sg)\n", ""),
    ),
    _mutant(
        "a room nobody opened that is never answered",
        ONE,
        "A7",
        ("sender", "            self.state = replace(self.state, waiting=_with_newest(self.state.waiting, party, message.rg))\n", "            pass\n"),
    ),
    _mutant(
        "a rejection before the route is known, forgotten",
        plain("rejections", abort=False, reject=True),
        "A4",
        ("receiver", "        if not life.sources:\n            self.state = replace", "        if False:\n            self.state = replace"),
    ),
    _mutant(
        "a failure without a reason",
        ONE,
        "S6",
        ("sender_turn", "state=KVPoll.FAILED, reason=reason, unpaired=unpaired))", "state=KVPoll.FAILED, unpaired=unpaired))"),
    ),
    _mutant(
        "a peer's abort that removes the room",
        ONE,
        "S3",
        ("sender", "        self.answer_drained(pair, party)\n\n    def on_unnamed_abort", "        self.set_life(None)\n        self.answer_drained(pair, party)\n\n    def on_unnamed_abort"),
    ),
    _mutant(
        "a first chunk taken as the last",
        BYTES,
        "P6 R1 R6",
        ("receiver", "self.set_source(life, replace(source, state=message.state))", "self.set_source(life, replace(source, state=KVPoll.SUCCESS))"),
    ),
    _mutant(
        "a success of one sender rank taken as all",
        SENDERS_BYTES,
        "R6",
        ("receiver", "if min(states) is KVPoll.SUCCESS:", "if max(states) is KVPoll.SUCCESS:"),
    ),
    _mutant(
        "a chunk after the last",
        ONE,
        "T1",
        ("sender", "        if life is None or life.last:\n", "        if life is None:\n"),
    ),
    _mutant(
        "an unpaired abort that reopening does not withdraw",
        TWO,
        "A4 C4",
        ("receiver", "tuple(drain for drain in self.state.drains if drain.sg or drain.published)", "self.state.drains"),
    ),
)  # fmt: skip

MUTANTS = TRACES + MISTAKES
