"""What is said late, and only if it is still true then: that a sender is TRANSFERRING, which an end that follows at once says as well."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvcore.protocol import events as ev
from kvcore.room import Room
from kvcore.states import RoomId, Side


class LateWords:
    """Letters that wait for their ``tell``, which may come on several threads at once. ``find`` is a side's stored room; a letter is posted,
    and all are sent by ``settle``."""

    def __init__(self, find: Callable[[Side, RoomId], Room | None], post: Callable[[ev.Send], None], settle: Callable[[], None]) -> None:
        self._find, self._post, self._settle = find, post, settle
        self._waiting: deque[ev.Send] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, word: ev.Send) -> None:
        """One more, of a sender's room."""
        self._waiting.append(word)

    def tell(self) -> None:
        """Say all of them, but those of rooms that have ended meanwhile."""
        for _ in range(len(self._waiting)):
            try:
                word = self._waiting.popleft()
            except IndexError:  # another thread says them too
                break
            room = self._find("prefill", RoomId(word.message.room, word.message.attempt))
            if room is not None and not room.status.terminal:
                self._post(word)
        self._settle()
