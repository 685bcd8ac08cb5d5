"""The model as a hypothesis state machine: many rooms, several attempts, every fault, and limits that pass in any order."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvcore.states import Side
from tests.model.engine import ANSWERS, ENDS, Write
from tests.model.ghosts import BOTH, Lifetime, Limits, Use
from tests.model.node import Node
from tests.model.world import SHIPPED, World

ANY = st.integers(0, 15)
SECONDS = st.sampled_from((0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0))
SHORT = (0.5, 1.0, 2.0, 3.0, 5.0, 8.0)
MANY = 10
"""Rooms that live at once, over both sides."""


@st.composite
def limits(draw: st.DrawFn) -> tuple[Limits, Limits]:
    """Of both sides, in any order that a pairing accepts: ``orphan_s`` equal, ``quarantine_s`` above ``liveness_s + ticket_s`` (R7)."""
    orphan_s, *ten = draw(st.lists(st.sampled_from(SHORT), min_size=11, max_size=11))
    least = max(ten[3] + ten[4], ten[8] + ten[9])
    prefill, decode = (
        Limits(*ten[at : at + 5], quarantine_s=None if draw(ANY) == 15 else least + draw(st.sampled_from(SHORT)), orphan_s=orphan_s)
        for at in (0, 5)
    )
    return prefill, decode


def chosen(items: list[Lifetime], index: int) -> Lifetime:
    """The newest for 0, and so on."""
    return items[-1 - index % len(items)]


class Machine(RuleBasedStateMachine):
    """Rules draw small numbers and name what they mean with them; what makes no sense now does nothing."""

    modules = SHIPPED
    world: World

    @initialize(both=limits(), engine=ANY)
    def begin(self, both: tuple[Limits, Limits], engine: int) -> None:
        self.world = World(*both, self.modules, fences=engine % 2 == 1, split=engine % 4 >= 2)

    # --- what a rule may choose from

    @property
    def lives(self) -> list[Lifetime]:
        return [life for life in self.world.lives if not life.node.dead]

    @property
    def live(self) -> list[Lifetime]:
        return [life for life in self.lives if not life.state.terminal]

    @property
    def halves(self) -> list[tuple[Use, Side]]:
        """Sides that the newest use of a name could still open."""
        return [(uses[-1], side) for uses in self.world.uses.values() for side in BOTH if uses[-1].lives and uses[-1].may_open(side)]

    @property
    def searching(self) -> list[Node]:
        return [node for node in self.world.nodes.values() if node.searches]

    @property
    def lingering(self) -> list[Write]:
        """Writes whose end nobody knows, and that may still land."""
        return [write for write in self.prefill.engine.writes if write.writes and write.state in (ENDS["unproven"], ENDS["broken"])]

    @property
    def prefill(self) -> Node:
        return self.world.nodes["P"]

    # --- requests

    @rule(number=st.integers(0, 2), kind=ANY, how=ANY, far=ANY)
    def open(self, number: int, kind: int, how: int, far: int) -> None:
        """Open the next use of a room on one side or both, and bring it some way."""
        if len(self.live) >= MANY:
            return
        use = self.world.new_use(number, "AB"[kind % 2], pages=how % 4, next_attempt=kind >= 12)
        order: list[Side] = ["decode", "prefill"] if "decode" in use.first and how % 2 else ["prefill", "decode"]
        if order[0] not in use.first:
            order.reverse()
        for side in order[: 1 if far in (14, 15) else 2]:
            self.world.open(use, side)
        if far < 14:
            self.bring(use, far)

    def bring(self, use: Use, far: int) -> None:
        assert use.sender is not None and use.receiver is not None
        if far >= 1:
            self.world.settle()
        if far >= 3:
            self.world.receive(use.receiver)
        if far >= 5:
            self.world.settle()
        if far >= 6:
            self.world.send(use.sender, min(1, use.pages), last=False)
        if far >= 8:
            self.world.send(use.sender, use.pages - use.sender.handed, last=True, wait=far == 8)
        if far >= 10:
            self.world.settle()
        if far == 13:
            self.end(list(self.prefill.engine.pending), "done")

    @precondition(lambda self: self.halves)
    @rule(index=ANY)
    def open_other_side(self, index: int) -> None:
        self.world.open(*self.halves[-1 - index % len(self.halves)])

    @precondition(lambda self: self.lives)
    @rule(index=ANY, count=st.integers(0, 2), how=ANY)
    def hand_over(self, index: int, count: int, how: int) -> None:
        """A chunk, or a destination; mostly such as the request needs."""
        life, last = chosen(self.live or self.lives, index), how % 2 == 0
        if life.key.side == "decode":
            return self.world.receive(life, extra=how == 15)
        left = life.use.pages - life.handed
        if how < 14:
            count = left if last else min(count, left)
        self.world.send(life, max(0, count), last, wait=how % 4 == 3)

    @precondition(lambda self: self.lives)
    @rule(index=ANY, what=ANY)
    def abort_or_clear(self, index: int, what: int) -> None:
        life = chosen(self.live or self.lives if what < 8 else self.lives, index)
        if what % 4 != 1:
            self.world.abort(life)
        if what % 4:
            self.world.clear(life)

    @rule(number=st.integers(0, 2), what=ANY)
    def odd_call(self, number: int, what: int) -> None:
        """Turn a request down, open what lives, hand an engine's next transfer an answer of its own, or let a lost write land."""
        if what < 3:
            use = self.world.new_use(number, "AB"[what % 2])
            if "decode" in use.first:
                self.world.reject(use)
        elif what < 6 and self.live:
            self.world.open_live(chosen(self.live, number))
        elif what < 12:
            self.prefill.engine.answers.append(ANSWERS[what % 4])
        elif self.lingering:
            self.world.land(self.prefill, self.lingering[number % len(self.lingering)])
            self.world.rules.check()

    @precondition(lambda self: self.world.flags)
    @rule(index=ANY)
    def fire(self, index: int) -> None:
        self.world.fire(self.world.flags[index % len(self.world.flags)])

    # --- the network

    @precondition(lambda self: self.world.letters)
    @rule(index=ANY)
    def deliver(self, index: int) -> None:
        self.world.deliver(index % len(self.world.letters))

    @precondition(lambda self: self.world.letters)
    @rule(index=ANY, what=st.booleans())
    def lose_or_double(self, index: int, what: bool) -> None:
        (self.world.lose_letter if what else self.world.double)(index % len(self.world.letters))

    @rule()
    def settle(self) -> None:
        self.world.settle()

    @precondition(lambda self: self.searching)
    @rule(how=ANY)
    def route(self, how: int) -> None:
        (self.world.unroutable if how >= 13 else self.world.route)(self.searching[0])

    # --- tickets

    @precondition(lambda self: self.prefill.ledger.tickets or self.prefill.engine.pending)
    @rule(how=st.sampled_from(("done", "done", "done", *ENDS)), index=ANY)
    def end_ticket(self, how: str, index: int) -> None:
        """A ticket has come to something, or all have; the ledger hears of it at once, or later."""
        pending = self.prefill.engine.pending
        if pending:
            self.end(pending if index % 3 == 0 else [pending[index % len(pending)]], how)
        if index >= 4:
            self.world.work(self.prefill)

    def end(self, tickets: list[int], how: str) -> None:
        for ticket in tickets:
            self.prefill.engine.end(ticket, how)
        self.world.rules.check()

    # --- peers and time

    @rule(place=st.sampled_from("AB"), what=ANY)
    def trouble(self, place: str, what: int) -> None:
        """A link is cut or healed, a peer is given up that lives, a process dies and comes back as another."""
        here, there = self.prefill, self.world.nodes[place]
        if what < 7:
            self.world.cut.discard(place)
        elif what < 9:
            self.world.cut.add(place)
        elif what < 13:
            self.world.give_up(*((here, there.name) if what % 2 else (there, here.name)))
        else:
            self.world.restart("P" if what == 13 else place)

    @rule(seconds=SECONDS)
    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule(seconds=SECONDS, backwards=st.booleans())
    def jump(self, seconds: float, backwards: bool) -> None:
        self.world.jump(seconds, backwards)

    def teardown(self) -> None:
        if "world" in self.__dict__:  # not where drawing its limits was broken off
            if self.world.numbers % 3 == 0:
                self.world.calm()
            self.world.finish(silent=self.world.numbers % 2 == 0)
