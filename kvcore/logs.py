"""Log lines that may come thousandfold at once, of which only some are worth a person's attention."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter

from kvcore.states import FailureCode, Reason, Side


class LimitsLog:
    """Says what rooms waited for that ran into a limit: at most one line in ``every_s`` seconds, and the next counts those left out."""

    def __init__(self, logger: logging.Logger, every_s: float = 1.0) -> None:
        self._log, self._every_s = logger, every_s
        self._lock = threading.Lock()
        self._quiet_until = 0.0
        self._left_out = 0

    def ended(self, side: Side, reason: Reason | None) -> None:
        """A room of this side ended; logged if a limit here was the reason. From any thread."""
        if reason is None or reason.code is not FailureCode.TIMEOUT or reason.side != side:
            return
        now = time.monotonic()
        with self._lock:
            if now < self._quiet_until:
                self._left_out += 1
                return
            self._quiet_until = now + self._every_s
            left_out, self._left_out = self._left_out, 0
        self._log.warning("%s%s", reason.text, f" (and {left_out} more since the last such line)" if left_out else "")


class Failures:
    """Logs errors that may come again and again (C107). From any thread."""

    def __init__(self, logger: logging.Logger) -> None:
        self._log = logger
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def note(self, kind: str, text: str) -> None:
        """Log the error at hand, with its traceback: of each kind the first few, and then one in a thousand."""
        with self._lock:
            self._counts[kind] += 1
            number = self._counts[kind]
        if number <= 10 or number % 1000 == 0:
            self._log.exception("%s (number %d)", text, number)
