"""A bell that one thread sleeps by and any thread rings: an event that resets itself, at the price of one lock."""

from __future__ import annotations

import threading


class Bell:
    """Rings once for however many rang since it was last heard."""

    def __init__(self) -> None:
        self._silence = threading.Lock()
        self._silence.acquire()

    def ring(self) -> None:
        """Wake the thread that sleeps by it, or keep it from its next sleep. Never blocks; also from a signal handler or a finalizer."""
        if self._silence.locked():
            try:
                self._silence.release()
            except RuntimeError:  # another thread rang just now
                return

    def sleep(self, timeout_s: float | None) -> None:
        """Until it rings, or so many seconds; None: without end. Only one thread may."""
        self._silence.acquire(timeout=-1 if timeout_s is None else timeout_s)
