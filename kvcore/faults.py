"""Faults on purpose, for tests: ``FaultPlan`` disturbs any backend through its hooks, ``ControlTap`` the control messages.

A plan stands between the core and the backend. For a transfer that a fault is meant for it gives the core a ticket of its own and
answers for it, since hooks on the progress thread must not block: what is held or late is simply PENDING.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvcore.control_tap import ControlTap, TapRule
from kvcore.errors import cause, one_line
from kvcore.fault_rules import MOST_DELAY_S, Delay, Gate, Hold, Where, allowed_hook, narrowed, number, raisable
from kvcore.hookspecs import PENDING, RETRY, Endpoint, NothingPosted, Peer, Ticket, TicketKind, TicketState, Transfer, hookimpl
from kvcore.observers import Interposer
from kvcore.states import RoomKey

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ControlTap", "FaultPlan", "Hold", "TapRule", "Where"]

TRANSFER, POLL = "kvcore_transfer", "kvcore_poll"
SLOW = ("kvcore_endpoint", "kvcore_connect", "kvcore_disconnect")
QUICK = (TRANSFER, POLL, "kvcore_abort", "kvcore_clear", "kvcore_held_rooms")


@dataclass(eq=False, slots=True)
class _StandIn:
    """The plan's own ticket for a transfer: what the engine made of it, and what the core is told."""

    transfer: Transfer
    since: float = 0.0
    gate: Gate | None = None
    """The engine is given the transfer when this opens."""
    veil: Gate | None = None
    """The end is told when this opens."""
    verdict: TicketState | None = None
    """Told at the first poll, whatever the engine says."""
    ticket: Ticket | None = None
    state: TicketState = PENDING

    @property
    def running(self) -> bool:
        return self.ticket is not None and self.state is PENDING


@dataclass(eq=False, slots=True)
class _Rule:
    """A fault, what it is narrowed to, and how often it was met and acted."""

    kind: str
    hook: str
    on_transfer: Callable[[Transfer], Ticket | TicketState] | None = None
    error: BaseException | type[BaseException] | None = None
    gate: Gate | None = None
    room: int | None = None
    chunk: int | None = None
    nth: int | None = None
    times: int | None = None
    rate: float = 1.0
    met: int = 0
    acted: int = 0

    def fits(self, hook: str, room: int | None, chunk: int | None) -> bool:
        return self.hook == hook and self.room in (None, room) and self.chunk in (None, chunk)


class FaultPlan(Interposer):
    """Faults for the backend of one manager: ``plan = FaultPlan(); manager.add_observer(plan); plan.fail(room=7, times=1)``.

    Of several faults that fit a call, the one asked for first acts. An abort does not reach what a fault holds back, as with an
    engine that cannot cancel; when the core has the backend clear the lifetime, what the engine was not given is dropped.
    """

    def __init__(self, seed: int = 0) -> None:
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._rules: list[_Rule] = []
        self._counts: Counter[str] = Counter()
        self._stand_ins: dict[_StandIn, None] = {}
        self._through: set[Transfer] = set()  # passed on, perhaps to another plan that gives them to the engine later

    @property
    def counts(self) -> Mapping[str, int]:
        """How often each kind of fault (the method's name) has acted."""
        with self._lock:
            return dict(self._counts)

    def fail(
        self, reason: str = "injected", *, quiescent: bool = True, peer_broken: bool = False, hook: str = POLL, **where: Unpack[Where]
    ) -> FaultPlan:
        """Tickets fail at their first poll, or in ``kvcore_transfer`` itself. Quiescent: the engine is given nothing; otherwise it
        is, and goes on unseen (R3)."""
        state = TicketState(TicketKind.FAILED, reason, quiescent, peer_broken)
        return self._add_answer("fail", state, hook, where)

    def raise_(
        self, error: BaseException | type[BaseException] = RuntimeError, *, hook: str = TRANSFER, **where: Unpack[Where]
    ) -> FaultPlan:
        """A hook raises before the backend is called. With ``kvcore_poll``, room and chunk are those of transfers posted later."""
        raisable(error)
        return self._add(_Rule("raise_", allowed_hook(hook, QUICK + SLOW), error=error, **narrowed(where)))

    def hold(self, *, hook: str = TRANSFER, **where: Unpack[Where]) -> Hold:
        """Hold back until ``release``: the write itself, which then lands late; with ``kvcore_poll`` only the news of its end; or
        a call of a slow hook."""
        hold = Hold()
        self._add_gate("hold", hold, hook, where)
        return hold

    def delay(self, seconds: float, *, hook: str = TRANSFER, **where: Unpack[Where]) -> FaultPlan:
        """As ``hold``, released by itself after ``seconds``."""
        return self._add_gate("delay", Delay(number("seconds", seconds, MOST_DELAY_S)), hook, where)

    def retry(self, *, hook: str = TRANSFER, **where: Unpack[Where]) -> FaultPlan:
        """The backend answers RETRY, in ``kvcore_transfer`` or at the first poll, and does nothing (T6)."""
        return self._add_answer("retry", RETRY, hook, where)

    def drop_done(self, *, hook: str = TRANSFER, **where: Unpack[Where]) -> FaultPlan:
        """The data moves, and no end is ever reported."""
        allowed_hook(hook, [TRANSFER])
        return self._add(_Rule("drop_done", hook, lambda one: self._stand_in(one, True, veil=Hold()), **narrowed(where)))

    def partial(self, share: float = 0.5, *, hook: str = TRANSFER, **where: Unpack[Where]) -> FaultPlan:
        """The engine is given this share of the descriptors, but never none nor all of the bytes, and then the hook raises."""

        number("share", share, 1.0)

        def act(transfer: Transfer) -> Ticket:
            part = _StandIn(_some(transfer, share))
            self._post(part)
            self._forget(part)
            raise RuntimeError("injected error after a partial post")

        return self._add(_Rule("partial", allowed_hook(hook, [TRANSFER]), act, **narrowed(where)))

    def heal(self) -> None:
        """No more faults from now on: holds and delays are over, and dropped ends are reported."""
        with self._lock:
            rules, self._rules = self._rules, []
            stand_ins = list(self._stand_ins)
        for stand_in in stand_ins:
            stand_in.gate = stand_in.veil = None
        for rule in rules:
            if isinstance(rule.gate, Hold):
                rule.gate.release()

    # --- rules

    def _add(self, rule: _Rule) -> FaultPlan:
        with self._lock:
            self._rules.append(rule)
        return self

    def _add_answer(self, kind: str, state: TicketState, hook: str, where: Where) -> FaultPlan:
        allowed_hook(hook, (TRANSFER, POLL))

        def act(transfer: Transfer) -> Ticket | TicketState:
            stand_in = self._stand_in(transfer, state.kind is TicketKind.FAILED and not state.quiescent, verdict=state)
            return stand_in if hook == POLL else self._told(stand_in)

        return self._add(_Rule(kind, TRANSFER, act, **narrowed(where)))

    def _add_gate(self, kind: str, gate: Gate, hook: str, where: Where) -> FaultPlan:
        allowed_hook(hook, (TRANSFER, POLL, *SLOW))

        def act(transfer: Transfer) -> Ticket:
            posted = hook == POLL
            stand_in = self._stand_in(transfer, posted, gate=None if posted else gate, veil=gate if posted else None)
            if isinstance(gate, Hold):
                gate.note(stand_in)
            return stand_in

        if hook in SLOW:
            return self._add(_Rule(kind, hook, gate=gate, **narrowed(where)))
        return self._add(_Rule(kind, TRANSFER, act, gate=gate, **narrowed(where)))

    def _choose(self, hook: str, room: int | None = None, chunk: int | None = None) -> _Rule | None:
        """The fault that acts on a call, if one does."""
        with self._lock:
            for rule in self._rules:
                if not rule.fits(hook, room, chunk):
                    continue
                rule.met += 1
                due = rule.nth in (None, rule.met) and (rule.times is None or rule.acted < rule.times)
                if due and self._random.random() < rule.rate:
                    rule.acted += 1
                    self._counts[rule.kind] += 1
                    return rule
        return None

    def _meet(self, hook: str, room: int | None = None, chunk: int | None = None) -> None:
        """Raise or wait, if a fault says so."""
        rule = self._choose(hook, room, chunk)
        if rule is not None and rule.error is not None:
            raise rule.error
        if rule is not None and rule.gate is not None:
            rule.gate.wait()

    # --- tickets

    def _stand_in(
        self, transfer: Transfer, posted: bool, *, gate: Gate | None = None, veil: Gate | None = None, verdict: TicketState | None = None
    ) -> _StandIn:
        stand_in = _StandIn(transfer, time.monotonic(), gate, veil, verdict)
        self._stand_ins[stand_in] = None
        if posted:
            self._post(stand_in)
        return stand_in

    def _forget(self, stand_in: _StandIn) -> None:
        self._stand_ins.pop(stand_in, None)
        self._through.discard(stand_in.transfer)
        for gate in (stand_in.gate, stand_in.veil):
            if isinstance(gate, Hold):
                gate.drop(stand_in)

    def _post(self, stand_in: _StandIn) -> None:
        """Give the engine a transfer, past this plan."""
        self._through.add(stand_in.transfer)
        try:
            result = self.hooks.kvcore_transfer(transfer=stand_in.transfer, may_wait=True)
        except NothingPosted as error:
            result = TicketState(TicketKind.FAILED, one_line(error), quiescent=True)
        except Exception as error:
            result = TicketState(TicketKind.FAILED, cause(error))
        if isinstance(result, TicketState):
            stand_in.state = result
        else:
            stand_in.ticket = result

    def _told(self, stand_in: _StandIn) -> TicketState:
        """What the core is told now; an end only once."""
        state = stand_in.verdict or stand_in.state
        if state is PENDING or (stand_in.veil is not None and not stand_in.veil.opened(stand_in.since)):
            return PENDING
        self._forget(stand_in)
        return state

    # --- hooks. Plain implementations that come first answer in the backend's place; None lets the call go on to it.

    @hookimpl(tryfirst=True)
    def kvcore_transfer(self, transfer: Transfer) -> Ticket | TicketState | None:
        if transfer in self._through:
            return None
        room, chunk = transfer.room.number, transfer.chunk
        rule = self._choose(TRANSFER, room, chunk)
        if rule is None:
            with self._lock:
                watched = any(rule.fits(POLL, room, chunk) for rule in self._rules)
            return self._stand_in(transfer, True) if watched else None
        if rule.error is not None:
            raise rule.error
        return rule.on_transfer(transfer) if rule.on_transfer is not None else None

    @hookimpl(tryfirst=True)
    def kvcore_poll(self, tickets: Sequence[Ticket]) -> list[TicketState] | None:
        mine = [ticket for ticket in tickets if isinstance(ticket, _StandIn) and ticket in self._stand_ins]
        for stand_in in mine:
            self._meet(POLL, stand_in.transfer.room.number, stand_in.transfer.chunk)
            waits = stand_in.ticket is None and stand_in.state is PENDING and stand_in.verdict is None
            if waits and (stand_in.gate is None or stand_in.gate.opened(stand_in.since)):
                self._post(stand_in)
        if not mine:
            return None
        running = [stand_in for stand_in in mine if stand_in.running]
        others = [ticket for ticket in tickets if ticket not in mine]
        asked = [*others, *(stand_in.ticket for stand_in in running)]
        states = self.hooks.kvcore_poll(tickets=asked) if asked else []
        for stand_in, state in zip(running, states[len(others) :], strict=True):
            stand_in.state = state if state.kind is not TicketKind.PENDING else PENDING
        theirs = iter(states)
        return [self._told(ticket) if isinstance(ticket, _StandIn) and ticket in mine else next(theirs) for ticket in tickets]

    @hookimpl(tryfirst=True)
    def kvcore_abort(self, room: RoomKey, tickets: Sequence[Ticket]) -> bool | None:
        self._meet("kvcore_abort", room.number)
        mine = [ticket for ticket in tickets if isinstance(ticket, _StandIn) and ticket in self._stand_ins]
        if not mine:
            return None
        theirs = [ticket for ticket in tickets if ticket not in mine] + [stand_in.ticket for stand_in in mine if stand_in.running]
        if theirs:
            self.hooks.kvcore_abort(room=room, tickets=theirs)
        return True

    @hookimpl(wrapper=True)
    def kvcore_clear(self, room: RoomKey) -> Generator[None, None, None]:
        for stand_in in [stand_in for stand_in in list(self._stand_ins) if stand_in.transfer.room == room]:  # workers add to them
            self._forget(stand_in)
        self._meet("kvcore_clear", room.number)
        yield

    @hookimpl(wrapper=True)
    def kvcore_held_rooms(self) -> Generator[None, list[RoomKey], list[RoomKey]]:
        self._meet("kvcore_held_rooms")
        held = yield
        return list({*held, *(stand_in.transfer.room for stand_in in list(self._stand_ins))})

    @hookimpl(wrapper=True)
    def kvcore_endpoint(self) -> Generator[None, Endpoint, Endpoint]:
        self._meet("kvcore_endpoint")
        return (yield)

    @hookimpl(wrapper=True)
    def kvcore_connect(self, peer: Peer) -> Generator[None, None, None]:
        self._meet("kvcore_connect")
        yield

    @hookimpl(wrapper=True)
    def kvcore_disconnect(self, peer: str) -> Generator[None, bool, bool]:
        self._meet("kvcore_disconnect")
        return (yield)


def _some(transfer: Transfer, share: float) -> Transfer:
    """The first descriptors of a transfer; of a single one the first bytes. Its pages are all of it, so they are left out."""
    transfer = replace(transfer, pool="", local_pages=None, remote_pages=None)
    most = len(transfer.length)
    if most == 1:
        nbytes = int(transfer.length[0])
        length = transfer.length.copy()
        length[0] = min(max(int(nbytes * share), 1), max(nbytes - 1, 1))
        return replace(transfer, length=length)
    part = slice(0, min(max(int(most * share), 1), most - 1))
    return replace(
        transfer, local_region=transfer.local_region[part], remote_region=transfer.remote_region[part],
        local_offset=transfer.local_offset[part], remote_offset=transfer.remote_offset[part], length=transfer.length[part],
    )  # fmt: skip
