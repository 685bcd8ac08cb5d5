"""Aids in a manager's process: the letters of an old lifetime come again, and what the backend is told to drop is noted."""

from __future__ import annotations

from collections.abc import Generator

import kvcore
from kvcore.faults import ControlTap
from kvcore.hookspecs import hookimpl
from kvcore.states import RoomKey
from kvcore.wire import RoomBody


class Echo(ControlTap):
    """A tap that has the letters of a room arrive once more, whenever it is told to."""

    def keep(self, room: int) -> list[str]:
        """Keep what has arrived of a room so far; the kinds of letters."""
        self._kept = [seen.letter for seen in self.seen if not seen.outgoing and _of(seen.letter.body, room)]
        return sorted({type(letter.body).__name__ for letter in self._kept})

    def again(self) -> None:
        """Have it all arrive again, in order."""
        for letter in self._kept:
            self.inject(letter)


def _of(body: object, room: int) -> bool:
    return isinstance(body, RoomBody) and body.room == room


class Clears:
    """An observer that notes which rooms the backend is told to drop."""

    def __init__(self, manager: kvcore.KVManager) -> None:
        self._rooms: list[int] = []
        manager.add_observer(self)

    def rooms(self) -> list[int]:
        """The rooms' numbers so far."""
        return list(self._rooms)

    @hookimpl(wrapper=True)
    def kvcore_clear(self, room: RoomKey) -> Generator[None, None, None]:
        """Note it once it is done."""
        yield
        self._rooms.append(room.number)
