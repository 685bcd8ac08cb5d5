"""What is said late, and only if it is still true then: that a sender is TRANSFERRING, which an end that follows at once says as well."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from kvcore.protocol import events as ev
from kvcore.room import Room
from kvcore.states import RoomId, Side

LATE_S = 0.001


class LateWords:
    """Letters of senders' rooms. ``find`` is a side's stored room; a letter is posted, and all are sent by ``settle``. For any thread."""

    def __init__(self, find: Callable[[Side, RoomId], Room | None], post: Callable[[ev.Send], None], settle: Callable[[], None]) -> None:
        self._find, self._post, self._settle = find, post, settle
        self._waiting: deque[tuple[float, ev.Send]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, word: ev.Send) -> None:
        """One more, due ``LATE_S`` after the next ``tell``: the tickets may have to wait for their turn."""
        self._waiting.append((math.inf, word))

    def tell(self, now: float) -> float:
        """Drop those of rooms that have ended, and say what is due of the others; when the next is due, infinite without one."""
        next_due = math.inf
        for _ in range(len(self._waiting)):
            try:
                due, word = self._waiting.popleft()
            except IndexError:  # another thread has them
                break
            room = self._find("prefill", RoomId(word.message.room, word.message.attempt))
            if room is None or room.key.generation != word.message.sg or room.status.terminal:
                continue
            if due <= now:
                self._post(word)
                continue
            due = min(due, now + LATE_S)
            self._waiting.append((due, word))
            next_due = min(due, next_due)
        self._settle()
        return next_due
