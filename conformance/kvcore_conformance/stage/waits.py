"""How long tests wait for what is to happen, or to stay as it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

STEP_S = 0.002
SOON_S = 4.0
"""For what must happen long before a room's own limits, on a machine that is busy."""


def until(condition: Callable[[], bool], what: str, timeout: float = SOON_S, step_s: float = STEP_S) -> None:
    """Wait for a condition; fails with ``what`` if it does not come true in time."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        threading.Event().wait(step_s)


def stays(condition: Callable[[], bool], what: str, seconds: float = 0.3) -> None:
    """Fails with ``what`` if a condition is not true all through a stretch of time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert condition(), f"not so before {seconds:g} s had passed: {what}"
        threading.Event().wait(STEP_S)
