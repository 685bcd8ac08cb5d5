"""Anything in any order: a hypothesis state machine over a pair, against a small model of what each room was asked to do.

What it draws depends on the model alone, so a seed draws the same steps again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, Verbosity, seed, settings, strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from kvcore_conformance.stage.arena import Pair, Room, number
from kvcore_conformance.stage.driver import Handle
from kvcore_conformance.stage.yard import POOL, Stuck, Yard

SLOTS = 3
"""Rooms at once."""
ORDER = ("BOOTSTRAPPING", "WAITING_FOR_INPUT", "TRANSFERRING", "SUCCESS")
ENDED = ("SUCCESS", "FAILED")
which, sides = st.integers(0, 5), st.sampled_from(("prefill", "decode"))


class Wrong(Exception):
    """Ends an example: something was found."""


@dataclass
class Use:
    """One use of a number, and what was asked of it."""

    room: Room
    received: bool = False
    chunks: int = 0
    last: bool = False
    held: bool = False
    ended: bool = False
    """Aborted or cleared by us, so that it may fail."""
    cleared: set[str] = field(default_factory=set)
    seen: dict[str, str] = field(default_factory=dict)
    """The last state of each side."""

    @property
    def handles(self) -> tuple[Handle, Handle]:
        """Both."""
        return self.room.sender, self.room.receiver

    def stored(self) -> bool:
        """Whether a side has not cleared it."""
        return len(self.cleared) < 2

    def replaceable(self) -> bool:
        """Whether its number may be used again."""
        return not self.stored() and not self.held

    def takes(self) -> bool:
        """Whether the destination can be published."""
        return not self.received and "decode" not in self.cleared

    def gives(self) -> bool:
        """Whether a chunk can be handed over."""
        return not self.last and "prefill" not in self.cleared

    def whole(self) -> bool:
        """Whether it may still go the whole way."""
        return not self.ended and not (self.received and self.last)

    def holds(self) -> bool:
        """Whether a write of it is held back."""
        return self.held

    def ends(self) -> bool:
        """Whether it needs nothing more to end."""
        return self.stored() and not self.held and (self.ended or (self.received and self.last))

    def __str__(self) -> str:
        return f"room {self.room.number}.{self.room.sender.attempt}"


class AnyOrder(RuleBasedStateMachine):
    """A few rooms; each step is done to one of them."""

    yard: Yard

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[int, Use] = {}  # by number

    @initialize()
    def begin(self) -> None:
        """What was found ends the whole run."""
        self._check()
        self.yard.steps.clear()

    def _check(self) -> None:
        if self.yard.found:
            raise Wrong

    def _pick(self, one: int, fits: Callable[[Use], bool], what: str) -> Use:
        """The use that a step is done to: one of those that it fits."""
        use = [use for use in self._uses.values() if fits(use)][one % sum(map(fits, self._uses.values()))]
        self.yard.steps.append(f"{use}: {what}")
        return use

    def _any(self, fits: Callable[[Use], bool]) -> bool:
        return any(map(fits, self._uses.values()))

    # --- steps

    @precondition(lambda self: len(self._uses) < SLOTS or self._any(Use.replaceable))
    @rule(one=which, same=st.booleans())
    def open(self, one: int, same: bool) -> None:
        """A number's first use, or its next; of the same attempt where that is allowed (C4)."""
        if len(self._uses) < SLOTS:
            chosen, attempt = number(), 0
        else:
            old = self._pick(one, Use.replaceable, "is cleared")
            self._settle(old)
            met = not any(handle.unpaired for handle in old.handles)
            chosen, attempt = old.room.number, old.room.sender.attempt + (0 if same and met else 1)
        use = self._uses[chosen] = Use(self.yard.open(chosen, attempt))
        self.yard.steps.append(f"{use}: open")
        self._look(use)

    @precondition(lambda self: self._any(Use.takes))
    @rule(one=which)
    def receive(self, one: int) -> None:
        """Publish the destination."""
        use = self._pick(one, Use.takes, "receive")
        use.received = True
        use.room.receive()
        self._look(use)

    @precondition(lambda self: self._any(Use.gives))
    @rule(one=which, last=st.booleans(), hold=st.booleans())
    def send(self, one: int, last: bool, hold: bool) -> None:
        """Hand over the next page, or all that are left as the last chunk; perhaps its write is held back."""
        use = self._pick(one, Use.gives, f"send{' the last' if last else ''}{', held back' if hold else ''}")
        pages = list(use.room.mine[POOL])[use.chunks :]
        use.last = last or len(pages) == 1
        if hold and not use.held:
            use.held = True
            self.yard.pair.prefill.hold(use.room.number)
        use.chunks += 1
        use.room.sender.send(pages if use.last else pages[:1], last=use.last)
        self._look(use)

    @precondition(lambda self: self._any(Use.whole))
    @rule(one=which)
    def carry(self, one: int) -> None:
        """All that is left to do, so that it ends well if nobody has ended it."""
        use = self._pick(one, Use.whole, "receive and send what is left")
        if not use.received:
            use.received = True
            use.room.receive()
        if not use.last:
            use.last = True
            use.room.sender.send(list(use.room.mine[POOL])[use.chunks :], last=True)
        self._look(use)

    @precondition(lambda self: self._any(Use.holds))
    @rule(one=which)
    def release(self, one: int) -> None:
        """Let the write that is held back go on."""
        use = self._pick(one, Use.holds, "release")
        use.held = False
        self.yard.pair.release(use.room)
        self._look(use)

    @precondition(lambda self: self._any(Use.stored))
    @rule(one=which, side=sides, clear=st.booleans())
    def end(self, one: int, side: str, clear: bool) -> None:
        """Abort or clear it on one side."""
        use = self._pick(one, Use.stored, f"{'clear' if clear else 'abort'} on {side}")
        use.ended = True
        if clear:
            use.cleared.add(side)
            use.room.side(side).clear()
        else:
            use.room.side(side).abort("as it comes")
        self._look(use)

    @precondition(lambda self: self._any(Use.ends))
    @rule(one=which)
    def settle(self, one: int) -> None:
        """Wait for its end, use its pages anew, and clear it."""
        use = self._pick(one, Use.ends, "wait for its end, and clear")
        self._settle(use)
        use.room.clear()
        use.cleared |= {"prefill", "decode"}
        self._look(use)

    def teardown(self) -> None:
        """Everything ends, and whatever was released is as it was left."""
        self.yard.pair.prefill.heal()
        for use in self._uses.values():
            use.held = False
            use.ended |= not (use.received and use.last)
            if use.ended:
                use.room.clear()
            if not self.yard.found:
                self._settle(use)
            use.room.clear()

    # --- what must hold

    def _settle(self, use: Use) -> None:
        for handle in use.handles:
            handle.wait()
        self._look(use)
        states = [use.seen[handle.child.role] for handle in use.handles]
        if not use.ended and states != ["SUCCESS", "SUCCESS"]:
            self.yard.note("T7", f"nobody has ended {use}, and it is {states}: {use.room.reasons()}")
        try:
            self.yard.settle(use.room)
        except Stuck as error:
            self.yard.note("R2", str(error))
        self.yard.look()
        self._check()

    def _look(self, use: Use) -> None:
        """What both handles say, and every byte."""
        for handle in use.handles:
            role, now = handle.child.role, handle.poll()
            before = use.seen.get(role, ORDER[0])
            if (before in ENDED and now != before) or (now in ORDER and before in ORDER and ORDER.index(now) < ORDER.index(before)):
                self.yard.note("S1", f"{use} on {role} was {before}, and is {now}")
            use.seen[role] = now
        if use.seen["decode"] == "SUCCESS":
            self.yard.arrived(use.room)
        self.yard.look()
        self._check()


def run(pair: Pair, chosen: int, examples: int, steps: int) -> dict[str, str]:
    """Run the machine; what it has found first, by its rule."""

    class Machine(AnyOrder):
        yard = Yard(pair)

    how = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, database=None, phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck), verbosity=Verbosity.quiet,
    )  # fmt: skip
    try:
        run_state_machine_as_test(seed(chosen)(Machine), settings=how)
    except (Wrong, Flaky):
        if not Machine.yard.found:
            raise
    return Machine.yard.found
