"""The one seat at what a single thread may use at a time: taken by waiting for it, or tried for by whoever may wait for nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Seat:
    """Taken in a ``with``, or for one piece of work. A signal handler or a finalizer that comes in the middle of its use finds it taken."""

    def __init__(self) -> None:
        # It knows whose it is: a plain lock stays taken for ever where a signal handler raises at the wrong moment.
        self._lock = threading.RLock()
        self._taken = False

    def attempt(self, work: Callable[[], None]) -> bool:
        """Do this, unless the seat is taken; whether it was done. Never blocks, and whatever a signal handler raises, it is free again."""
        try:
            if not self._lock.acquire(blocking=False) or self._taken:
                return False
            self._taken = True
            try:
                work()
            finally:
                self._taken = False
            return True
        finally:
            try:  # no ``suppress``: a signal handler may raise in any call that comes before this one
                self._lock.release()
            except RuntimeError:  # another thread's
                pass

    def __enter__(self) -> None:
        self._lock.acquire()
        self._taken = True

    def __exit__(self, *_error: object) -> None:
        self._taken = False
        self._lock.release()
