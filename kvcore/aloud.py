"""What is said under the room table's lock goes out when it is let go, so that nobody waits for it while letters are sent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType


class Aloud:
    """Stands before the lock in a ``with`` in which something may be ``said``: once the thread has let go of the lock for the last time,
    it calls ``after``. The lock itself is taken and let go of by no Python code, in which a signal handler might raise and leave it taken.
    """

    def __init__(self, lock: threading.RLock, after: Callable[[], None]) -> None:
        self._lock, self._after = lock, after
        self.said = False
        """Set after what was said, since another thread may be the one that looks."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.said and not self._lock._is_owned():  # type: ignore[attr-defined]
            self.said = False
            self._after()
