"""Letters that no honest peer would send, as if they came to this manager's control port: without sense, without end, or not its own."""

from __future__ import annotations

import threading

from msgspec.structs import replace

from kvcore.faults import ControlTap
from kvcore.protocol.messages import Abort, Destination, Drained, Join
from kvcore.wire import Letter

NONSENSE = b"\xc1 is never used in msgpack"
AT_ONCE = 500
PATIENCE_S = 10.0


class Impostor(ControlTap):
    """A tap that has such letters arrive."""

    def nonsense(self, times: int) -> None:
        """Letters that cannot be read."""
        for _ in range(times):
            self.inject(NONSENSE)

    def joins(self, first: int, rooms: int) -> None:
        """A peer joins so many rooms, from a number on, and no faster than its letters are read."""
        letter = next(seen.letter for seen in self.seen if isinstance(seen.letter.body, Join) and not seen.outgoing)
        assert isinstance(letter.body, Join)
        for room in range(first, first + rooms):
            self.inject(replace(letter, body=replace(letter.body, room=room, sg=0)))
            if room % AT_ONCE == 0:
                taken = threading.Event()
                self._channel.call(taken.set)
                taken.wait(PATIENCE_S)

    def drained(self, room: int, source: str) -> None:
        """An instance says drained of a destination that went out from here."""
        letters = (seen.letter for seen in self.seen if seen.outgoing and isinstance(seen.letter.body, Destination))
        asked = next(letter for letter in letters if letter.body.room == room)  # type: ignore[union-attr]
        assert isinstance(asked.body, Destination)
        self.inject(Letter(asked.v, source, asked.source, Drained(room, asked.body.attempt, asked.body.rg, asked.body.sg)))

    def aborts(self, room: int) -> int:
        """How many aborts of a room have gone out from here so far."""
        bodies = [seen.letter.body for seen in self.seen if seen.outgoing]
        return len([body for body in bodies if isinstance(body, Abort) and body.room == room])
