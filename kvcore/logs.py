"""Log lines that may come thousandfold at once, of which only some are worth a person's attention."""

from __future__ import annotations

import logging
import threading
import time

from kvcore.states import FailureCode, Reason, RoomKey


def about(room: RoomKey | None = None, peer: str = "") -> dict[str, object]:
    """The ``extra`` of a log record: fields for those who search logs by room or by peer."""
    fields: dict[str, object] = {"peer": peer} if peer else {}
    if room is not None:
        fields |= {"room": room.number, "attempt": room.attempt, "side": room.side, "generation": room.generation}
    return fields


class LimitsLog:
    """Says what rooms waited for that ran into a limit: at most one line in ``every_s`` seconds, and the next counts those left out."""

    def __init__(self, logger: logging.Logger, every_s: float = 1.0) -> None:
        self._log, self._every_s = logger, every_s
        self._lock = threading.Lock()
        self._quiet_until = 0.0
        self._left_out = 0

    def ended(self, key: RoomKey, reason: Reason | None) -> None:
        """A lifetime ended; logged if a limit here was the reason. From any thread."""
        if reason is None or reason.code is not FailureCode.TIMEOUT or reason.side != key.side:
            return
        now = time.monotonic()
        with self._lock:
            if now < self._quiet_until:
                self._left_out += 1
                return
            self._quiet_until = now + self._every_s
            left_out, self._left_out = self._left_out, 0
        self._log.warning("%s%s", reason.text, f" (and {left_out} more since the last such line)" if left_out else "", extra=about(key))


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
