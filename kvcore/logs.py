"""Log lines that may come thousandfold at once, of which only some are worth a person's attention."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping

from kvcore.errors import MOST_TEXT, one_line
from kvcore.states import FailureCode, Reason, RoomKey


def about(room: RoomKey | None = None, peer: str = "") -> dict[str, object]:
    """The ``extra`` of a log record: fields for those who search logs by room or by peer."""
    fields: dict[str, object] = {"peer": peer} if peer else {}
    if room is not None:
        fields |= {"room": room.number, "attempt": room.attempt, "side": room.side, "generation": room.generation}
    return fields


class SparingLog:
    """Lines of one kind that peers, or a crowd of rooms, can cause: ``burst`` at once, then one in ``every_s`` seconds, and the next
    counts those left out. From any thread. What is logged is one line, whatever it holds."""

    def __init__(self, logger: logging.Logger, burst: int = 50, every_s: float = 1.0) -> None:
        self._log, self._burst, self._every_s = logger, burst, every_s
        self._lock = threading.Lock()
        self._spent_until = 0.0
        self._left_out = 0

    def say(self, level: int, text: str, fields: Mapping[str, object] | None = None) -> None:
        """Log a line, with fields of ``about``, or count it."""
        now = time.monotonic()
        with self._lock:
            spent_until = max(self._spent_until, now) + self._every_s
            if spent_until > now + self._burst * self._every_s:
                self._left_out += 1
                return
            self._spent_until = spent_until
            left_out, self._left_out = self._left_out, 0
        more = f" (and {left_out} more since the last such line)" if left_out else ""
        self._log.log(level, "%s%s", one_line(text, MOST_TEXT), more, extra=fields)


class LimitsLog:
    """Says what rooms waited for that ran into a limit: at most one line in ``every_s`` seconds, and the next counts those left out."""

    def __init__(self, logger: logging.Logger, every_s: float = 1.0) -> None:
        self._log = SparingLog(logger, 1, every_s)

    def ended(self, key: RoomKey, reason: Reason | None) -> None:
        """A lifetime ended; logged if a limit here was the reason. From any thread."""
        if reason is not None and reason.code is FailureCode.TIMEOUT and reason.side == key.side:
            self._log.say(logging.WARNING, reason.text, about(key))


class Once:
    """Which of many things come for the first time; of more than ``most`` kinds, those after the first are none."""

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._seen: set[str] = set()

    def first(self, what: str) -> bool:
        """Whether it is worth a line."""
        if what in self._seen or len(self._seen) >= self._most:
            return False
        self._seen.add(what)
        return True


class Failures:
    """Logs errors that may come again and again (C107). From any thread."""

    def __init__(self, logger: logging.Logger) -> None:
        self._log = logger
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def note(self, kind: str, text: str, fields: Mapping[str, object] | None = None) -> None:
        """Log the error at hand, with its traceback: of each kind the first few, and then one in a thousand."""
        with self._lock:
            self._counts[kind] += 1
            number = self._counts[kind]
        if number <= 10 or number % 1000 == 0:
            self._log.exception("%s (number %d)", text, number, extra=fields)
