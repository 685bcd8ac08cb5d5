"""An observer that notes each call of a backend's hooks: on which thread, for how long, and what ran beside it that must not (B5, B6)."""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator

import kvcore
from kvcore.hookspecs import Transfer

SLOW = ("kvcore_endpoint", "kvcore_connect", "kvcore_disconnect", "kvcore_unregister", "kvcore_close")
QUICK = ("kvcore_poll", "kvcore_progress", "kvcore_abort", "kvcore_clear", "kvcore_held_rooms")
TRANSFER = "kvcore_transfer"
CORE = "kvcore-"
"""How the names of the core's threads begin."""

Call = tuple[str, int]
"""A hook, and the thread that it runs on."""


class Spy:
    """Notes the calls of a manager's backend from now on."""

    def __init__(self, manager: kvcore.KVManager) -> None:
        self._able = kvcore.registry.plugin_manager(kvcore.load_backend(manager.config.backend))[2].capabilities
        self._lock = threading.Lock()
        self._running: list[Call] = []
        self._took: dict[str, list[float]] = defaultdict(list)
        self._beside: set[str] = set()
        self._threads: set[str] = set()
        self._sizes: list[tuple[int, int]] = []
        manager.add_observer(self)

    def strangers(self) -> list[str]:
        """Threads that are not the core's, each with the hook it called."""
        return sorted(self._threads)

    def beside(self) -> list[str]:
        """Pairs of hooks that ran at one time and must not."""
        return sorted(self._beside)

    def called(self) -> dict[str, int]:
        """How often each hook was called."""
        return {hook: len(took) for hook, took in self._took.items()}

    def quick(self) -> dict[str, tuple[float, float]]:
        """Of those hooks that must be quick: the least and the median of the seconds that a call took."""
        quick = QUICK if self._able.blocking else (*QUICK, TRANSFER)
        return {hook: (min(took), statistics.median(took)) for hook, took in self._took.items() if hook in quick}

    def largest(self) -> list[int]:
        """Most descriptors and most bytes of one transfer."""
        return [max(some, default=0) for some in zip(*self._sizes, strict=True)]

    def enter(self, hook: str, transfer: Transfer | None = None) -> tuple[Call, float]:
        """A call begins."""
        call, thread = (hook, threading.get_ident()), threading.current_thread().name
        with self._lock:
            if not thread.startswith(CORE):
                self._threads.add(f"{hook} on {thread}")
            self._beside |= {
                " and ".join(sorted((hook, other))) for other, its in self._running if its != call[1] and self._clash(hook, other)
            }
            transfers = {its for other, its in (*self._running, call) if other == TRANSFER}
            if len(transfers) > self._able.parallel:
                self._beside.add(f"more than {self._able.parallel} transfers")
            if transfer is not None:
                self._sizes.append((transfer.length.size, transfer.nbytes))
            self._running.append(call)
        return call, time.monotonic()

    def leave(self, call: Call, since: float) -> None:
        """It ends."""
        took = time.monotonic() - since
        with self._lock:
            self._running.remove(call)
            self._took[call[0]].append(took)

    def _clash(self, hook: str, other: str) -> bool:
        if self._able.exclusive:
            return True
        if self._able.blocking and TRANSFER in (hook, other):
            return False
        return (hook in SLOW) == (other in SLOW)


def _around(hook: str) -> Callable[..., Generator[None, object, object]]:
    @kvcore.hookimpl(wrapper=True, tryfirst=True)
    def around(self: Spy) -> Generator[None, object, object]:
        call = self.enter(hook)
        try:
            return (yield)
        finally:
            self.leave(*call)

    return around


@kvcore.hookimpl(wrapper=True, tryfirst=True)
def _around_transfer(self: Spy, transfer: Transfer) -> Generator[None, object, object]:
    call = self.enter(TRANSFER, transfer)
    try:
        return (yield)
    finally:
        self.leave(*call)


for _hook in (*SLOW, *QUICK):
    setattr(Spy, _hook, _around(_hook))
setattr(Spy, TRANSFER, _around_transfer)
