"""The fast hooks as the ledger calls them: whatever one raises or answers becomes a ticket's state, or a line in the log (T7)."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from kvcore.errors import cause, one_line
from kvcore.exclusive import HookBusy
from kvcore.hookspecs import PENDING, RETRY, Hooks, NothingPosted, Ticket, TicketKind, TicketState, Transfer
from kvcore.logs import Failures, about
from kvcore.states import RoomKey

log = logging.getLogger("kvcore.fast_hooks")

WORK_S = 0.0002
"""CPU seconds. A call that drives an engine with nothing to do takes less, also when nothing of it is in a cache any more."""


class FastHooks:
    """Calls that never raise. All but ``transfer`` are made by one thread."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._owed: deque[tuple[str, Callable[[], object]]] = deque()
        self._failures = Failures(log)

    def transfer(self, transfer: Transfer, may_wait: bool) -> Ticket | TicketState:
        """The ticket, or how it has ended already; DONE, RETRY or FAILED, whatever the backend does. From any thread."""
        try:
            result = self._hooks.kvcore_transfer(transfer=transfer, may_wait=may_wait)
        except HookBusy:
            return RETRY
        except NothingPosted as error:
            return TicketState(TicketKind.FAILED, one_line(error) or "nothing posted", quiescent=True)
        except BaseException as error:
            self._log_error("kvcore_transfer", transfer.room)
            return TicketState(TicketKind.FAILED, f"transfer raised {cause(error)}")
        if result is None:
            return TicketState(TicketKind.FAILED, "transfer returned no ticket")
        if isinstance(result, TicketState) and result.kind is TicketKind.PENDING:
            return TicketState(TicketKind.FAILED, "transfer returned PENDING instead of a ticket")
        return _sound(result) if isinstance(result, TicketState) else result

    def poll(self, tickets: list[Ticket]) -> list[TicketState]:
        """One state per ticket. If asking for all at once fails, they are asked one by one, so that one's error stays there (T7)."""
        try:
            states = self._hooks.kvcore_poll(tickets=tickets)
            if not isinstance(states, list) or len(states) != len(tickets):
                raise TypeError(f"it answered {str(states)[:100]} for {len(tickets)} tickets")
            return [_sound(state) for state in states]
        except HookBusy:
            return [PENDING] * len(tickets)
        except BaseException as error:
            if len(tickets) == 1:
                self._log_error("kvcore_poll", None)
                return [TicketState(TicketKind.FAILED, f"poll raised {cause(error)}")]
        return [state for ticket in tickets for state in self.poll([ticket])]

    def progress(self) -> bool:
        """Drive the engine; whether that took so long that something was moved, which the engine itself does not tell."""
        began = time.thread_time()
        try:
            self._hooks.kvcore_progress()
        except HookBusy:
            return False
        except BaseException:
            self._log_error("kvcore_progress", None)
        return time.thread_time() - began > WORK_S

    def held_rooms(self) -> int | None:
        """Lifetimes that the backend holds anything for (B4); None if it does not say now."""
        try:
            return len(self._hooks.kvcore_held_rooms())
        except HookBusy:
            return None
        except BaseException:
            self._log_error("kvcore_held_rooms", None)
            return None

    def abort(self, room: RoomKey, tickets: list[Ticket]) -> None:
        """Cancel a lifetime's tickets; now, or as soon as the backend is free."""
        self._owed.append(("kvcore_abort", lambda: self._hooks.kvcore_abort(room=room, tickets=tickets)))
        self.catch_up()

    @property
    def clears(self) -> bool:
        """Whether anybody wants to hear of ``clear``: the backend, or an observer around it."""
        implementations = getattr(self._hooks.kvcore_clear, "get_hookimpls", None)
        return implementations is None or bool(implementations())

    def clear(self, room: RoomKey) -> None:
        """Drop what is held for a lifetime; now, or as soon as the backend is free."""
        self._owed.append(("kvcore_clear", lambda: self._hooks.kvcore_clear(room=room)))
        self.catch_up()

    @property
    def owed(self) -> int:
        """Calls of ``abort`` and ``clear`` that wait until the backend is free."""
        return len(self._owed)

    def catch_up(self) -> None:
        """Make the calls that are owed, in order."""
        while self._owed:
            name, call = self._owed[0]
            try:
                call()
            except HookBusy:
                return
            except BaseException:
                self._log_error(name, None)
            self._owed.popleft()

    def _log_error(self, hook: str, room: RoomKey | None) -> None:
        text = f"the backend's {hook} failed{f' for room {room}' if room else ''}; the core goes on"
        self._failures.note(hook, text, about(room))


def _sound(state: object) -> TicketState:
    """The state, or a failure without proof in place of anything else: an odd answer must not pass for a success."""
    if isinstance(state, TicketState) and isinstance(state.kind, TicketKind):
        return state
    return TicketState(TicketKind.FAILED, f"the backend reported {str(state)[:100]}, which is no state of a ticket")
