"""Letters that no honest peer would send, as if they came to this manager's control port: without sense, without end, or not its own."""

from __future__ import annotations

import threading

import msgspec
from msgspec.structs import replace

from kvcore.faults import ControlTap
from kvcore.protocol.messages import Abort, Destination, Drained, Join, RoomMessage
from kvcore.states import FailureCode, Reason
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
        asked, body = self._destination(room, outgoing=True)
        self.inject(Letter(asked.v, source, asked.source, Drained(room, body.attempt, body.rg, body.sg)))

    def aborted(self, room: int, source: str, to: str) -> None:
        """An instance says to another that the lifetime has failed whose destination came here; "" is who that was from, or for."""
        asked, body = self._destination(room, outgoing=False)
        reason = Reason.of(FailureCode.ABORTED, "somebody says so", "decode")
        letter = Letter(asked.v, source or asked.source, to or asked.to, Abort(room, body.attempt, body.rg, body.sg, reason))
        self.inject(msgspec.msgpack.encode(letter), peer=asked.source)  # by the way that the destination came

    def _destination(self, room: int, outgoing: bool) -> tuple[Letter, Destination]:
        for letter, out in self.seen:
            if out is outgoing and isinstance(letter.body, Destination) and letter.body.room == room:
                return letter, letter.body
        raise AssertionError(f"no destination of room {room} was seen")

    def said(self, kind: str, room: int | None = None) -> int:
        """How many letters of a kind, of a room if one is named, have gone out from here so far."""
        bodies = [letter.body for letter, outgoing in self.seen if outgoing and type(letter.body).__name__ == kind]
        return len([body for body in bodies if room is None or (isinstance(body, RoomMessage) and body.room == room)])
