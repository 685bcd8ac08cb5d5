"""In a child: many threads at once on one room, and an engine that is stuck inside a hook."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from itertools import groupby

import kvcore
from kvcore.hookspecs import Ticket, Transfer
from kvcore.states import RoomKey

PAUSE_S = 0.0005
"""Between two looks, so that the threads looked at get their turn."""
JOIN_S = 5.0
WATCH_S = 30.0
"""Nobody looks for longer, also when a test ends before it has called them off."""
STUCK_S = 5.0
"""An engine is stuck no longer than this, so that a call that waits for it comes back and is seen to be slow."""


class Watch:
    """Threads that look at a room without pause: what its handle polls, whether that has a reason, and what the shared store says."""

    def __init__(self, manager: kvcore.KVManager, handle: kvcore.Handle, threads: int = 3) -> None:
        self._manager, self._handle = manager, handle
        self._stop, self._until = threading.Event(), time.monotonic() + WATCH_S
        self._unexplained = 0
        self._polled: list[list[str]] = [[] for _ in range(threads)]
        self._stored: list[list[str]] = [[] for _ in range(threads)]
        self._threads = [threading.Thread(target=self._look, args=(number,), daemon=True) for number in range(threads)]
        for thread in self._threads:
            thread.start()

    def _look(self, number: int) -> None:
        room, attempt = self._handle.room, self._handle.attempt
        while not self._stop.wait(PAUSE_S) and time.monotonic() < self._until:
            state = self._handle.poll()
            self._unexplained += state is kvcore.KVPoll.FAILED and self._handle.failure is None
            stored = self._manager.status(room, attempt)
            self._polled[number].append(state.name)
            self._stored[number].append(stored.name if stored is not None else "gone")

    def ended(self) -> dict[str, object]:
        """Stop them. Per thread what it saw, each state once as long as it stayed; and how often a failure had no reason."""
        self._stop.set()
        for thread in self._threads:
            thread.join(JOIN_S)
        return {
            "polled": [_changes(seen) for seen in self._polled],
            "stored": [_changes(seen) for seen in self._stored],
            "unexplained": self._unexplained,
        }


def _changes(seen: list[str]) -> list[str]:
    return [state for state, _ in groupby(seen)]


def together(calls: Sequence[Callable[[], object]]) -> dict[str, object]:
    """Make all calls at one moment, each from a thread of its own: what they raised, and the seconds of the slowest."""
    start = threading.Barrier(len(calls))
    errors, seconds = list[str](), [JOIN_S] * len(calls)

    def make(number: int) -> None:
        start.wait(JOIN_S)
        began = time.monotonic()
        try:
            calls[number]()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
        seconds[number] = time.monotonic() - began

    threads = [threading.Thread(target=make, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + JOIN_S
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    return {"errors": errors, "slowest_s": max(seconds)}


class Stall:
    """An observer that stops the engine's work on a room inside a hook, on whichever thread of the core calls it."""

    def __init__(self) -> None:
        self._room = 0
        self._go_on = threading.Event()
        self.stuck = False
        """Whether a call is stuck now."""

    def room(self, number: int) -> None:
        """The next transfer of this room is where it gets stuck."""
        self._go_on.clear()
        self._room = number

    def release(self) -> None:
        """Let it go on."""
        self._room = 0
        self._go_on.set()

    @kvcore.hookimpl(wrapper=True)
    def kvcore_transfer(self, transfer: Transfer) -> Generator[None, object, object]:
        """Stuck before the engine gets it."""
        self._stand(transfer.room)
        return (yield)

    @kvcore.hookimpl(wrapper=True)
    def kvcore_abort(self, room: RoomKey, tickets: Sequence[Ticket]) -> Generator[None, object, object]:
        """Stuck before the engine is told."""
        self._stand(room)
        return (yield)

    def _stand(self, room: RoomKey) -> None:
        if room.number == self._room:
            self.stuck = True
            self._go_on.wait(STUCK_S)
            self.stuck = False
