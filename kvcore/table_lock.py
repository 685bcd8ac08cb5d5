"""The room table's lock: what is said under it goes out when it is let go, so that nobody waits for it while letters are sent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType


class TableLock:
    """One thread may take it several times. Where something was ``said`` meanwhile, letting it go for the last of them calls ``after``,
    without it."""

    def __init__(self, after: Callable[[], None]) -> None:
        self._lock, self._after, self._depth = threading.RLock(), after, 0
        self.said = False

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._depth -= 1
        goes_out = self.said and not self._depth
        if goes_out:
            self.said = False
        self._lock.release()
        if goes_out:
            self._after()
