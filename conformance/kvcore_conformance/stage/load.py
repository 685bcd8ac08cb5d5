"""A mixed load on a pair: rooms that end well, in chunks, by abort or clear on either side and at any moment, and numbers used again."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from kvcore_conformance.stage.arena import MOMENTS, Pair, Room, number
from kvcore_conformance.stage.driver import Child
from kvcore_conformance.stage.yard import MINE, POOL, Stuck, Yard

BESIDE = 3
"""Rooms that are not settled while the next ones run."""


class Load:
    """``run(n)`` brings n rooms to their ends; what was seen to be wrong is in ``yard.found``."""

    def __init__(self, pair: Pair, seed: int) -> None:
        self.yard = Yard(pair)
        self._pair, self._random = pair, random.Random(seed)
        self._open: deque[Room] = deque()
        self._turn = 0

    def run(self, rooms: int) -> None:
        """So many more rooms, or until something is wrong; all are cleared when it returns, and their pages used anew."""
        for _ in range(rooms):
            if self.yard.found:
                break
            self._one()
            while len(self._open) > BESIDE:
                self._close(self._open.popleft())
        while self._open:
            self._close(self._open.popleft())
        self.yard.look()

    def _one(self) -> None:
        fates: tuple[Callable[[], None], ...] = (self._whole, self._chunks, self._aborted, self._cleared, self._again)
        self._turn += 1
        fates[self._turn % len(fates)]()

    def _begin(self, room: int | None = None, attempt: int = 0) -> Room:
        found = self.yard.open(number() if room is None else room, attempt)
        self._open.append(found)
        return found

    def _whole(self) -> None:
        room = self._begin()
        room.receive()
        room.send()

    def _chunks(self) -> None:
        room = self._begin()
        room.receive()
        for page in room.mine[POOL]:
            room.sender.send([page])
        room.sender.send(last=True)

    def _aborted(self) -> None:
        room = self._somewhere()
        self._random.choice((room.sender, room.receiver)).abort("not wanted")

    def _cleared(self) -> None:
        room = self._somewhere()
        self._random.choice((room.sender, room.receiver)).clear()

    def _again(self) -> None:
        """A number at once with another attempt, while the old use is perhaps still at work."""
        old = self._somewhere()
        old.clear()
        room = self._begin(old.number, 1)
        room.receive()
        room.send()

    def _somewhere(self) -> Room:
        """A room on its way: what was said last may not have arrived yet."""
        room, moment = self._begin(), self._random.choice(MOMENTS[:4])
        if moment != "opened":
            room.receiver.until("WAITING_FOR_INPUT", "FAILED")
        if moment in ("published", "in flight"):
            room.receive()
        if moment == "in flight":
            room.sender.send(list(room.mine[POOL])[: self._random.randrange(1, len(MINE))])
        return room

    def _close(self, room: Room) -> None:
        """Wait for its end, see that its bytes are right, and have its pages used anew."""
        found = (room.receiver.poll(), room.sender.poll()) if self.yard.found else (room.receiver.wait(), room.sender.wait())
        self.yard.steps.append(f"room {room.number}.{room.sender.attempt} ended as {found}")
        if not set(found) <= {"SUCCESS", "FAILED"}:
            self.yard.note("S8", f"room {room.number}.{room.sender.attempt} has all that it needs to end, and is {found}")
        elif found[0] == "SUCCESS":
            self.yard.arrived(room)
        room.clear()
        if not self.yard.found:
            try:
                self.yard.settle(room)
            except Stuck as error:
                self.yard.note("R2", str(error))
        self.yard.look()
        for handle in (room.sender, room.receiver):
            handle.child.work("drop", handle.name)


def letters(prefill: Child, decode: Child) -> None:
    """Letters come twice or late, until both are healed."""
    for message in ("Join", "Destination", "Abort", "Ack"):
        prefill.tap("duplicate", message, outgoing=False)
    for message in ("Here", "Drained", "Status"):
        decode.tap("delay", message, outgoing=False, seconds=0.03, copies=1)
