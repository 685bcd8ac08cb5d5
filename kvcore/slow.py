"""The slow thread: hooks that may take their time (open, register, connect, disconnect, close) run here, one after the other (B5)."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kvcore.pulse import Pulse

log = logging.getLogger("kvcore.slow")

STILL_S = 120.0
"""An engine that takes longer for one call, such as a connect, holds up all others."""

T = TypeVar("T")


class SlowThread:
    """Runs calls in order on one daemon thread."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.pulse = Pulse(self._thread, STILL_S)
        self._thread.start()

    def run(self, call: Callable[[], T]) -> Future[T]:
        """Have a call made; its result or exception is in the future."""
        future: Future[T] = Future()

        def work() -> None:
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._calls.put(work)
        return future

    @property
    def calls(self) -> int:
        """Calls that wait."""
        return self._calls.qsize()

    def stop(self, timeout_s: float) -> bool:
        """Make what is queued, then end the thread; True if it ended in time."""
        self._calls.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def running(self) -> list[threading.Thread]:
        """The thread, unless it has ended."""
        return [self._thread] if self._thread.is_alive() else []

    def _run(self) -> None:
        while (work := self._calls.get()) is not None:
            self.pulse.began()
            try:
                work()
            except Exception:
                log.exception("what followed a slow call failed; the thread goes on")
            self.pulse.rests()
