"""A loop's sign of life: whether its thread runs, and for how long it has been at one turn."""

from __future__ import annotations

import threading
import time


class Pulse:
    """Kept by a loop, read by anyone. A turn that takes longer than ``still_s`` seconds is a fault: the loop stands still."""

    def __init__(self, thread: threading.Thread, still_s: float = 5.0) -> None:
        self._thread, self._still_s = thread, still_s
        self._since: float | None = None

    def began(self) -> None:
        """A turn begins, or goes on: one after another that never came to its end is the same standstill."""
        if self._since is None:
            self._since = time.monotonic()

    def rests(self) -> None:
        """A turn came to its end: the loop waits for something to do."""
        self._since = None

    @property
    def trouble(self) -> str:
        """What is wrong; "" if nothing is."""
        since = self._since
        if not self._thread.is_alive():
            return f"thread {self._thread.name} does not run"
        for_s = time.monotonic() - since if since is not None else 0.0
        return f"thread {self._thread.name} has stood still for {for_s:.1f} s" if for_s > self._still_s else ""
