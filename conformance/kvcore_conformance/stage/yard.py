"""Pages that rooms use one after the other, as under a scheduler: lent to a room, and used anew the instant both sides call them safe."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

import numpy as np

from kvcore_conformance.stage.arena import Pair, Room
from kvcore_conformance.stage.oracle import Memory

POOL = "kv"
MINE, THEIRS = (1, 5, 3), (3, 1, 5)
"""Where a plot's pages lie in it, at the source and at the target: no two side by side, so that a byte too far is nobody's."""
PLOT = 8
"""Pages of a plot."""


class Stuck(AssertionError):
    """Pages that nothing holds up do not become safe."""


class Yard:
    """The plots of a pair's memory. ``found`` tells by rule what was first seen to be wrong, and what was done until then."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.found: dict[str, str] = {}
        self.steps: deque[str] = deque(maxlen=100)
        self._free = deque(range(pair.source.pages(POOL).shape[1] // PLOT))
        self._lent: dict[str, tuple[Room, int]] = {}
        self._arrived: set[str] = set()
        self._used: set[int] = set()
        self._seeds = itertools.count(1)

    def note(self, rule: str, text: str) -> None:
        """Something is wrong; what was first is kept."""
        if not self.found:
            self.found[rule] = "\n  ".join([text, "after", *self.steps])

    @property
    def plots_left(self) -> int:
        """How many more rooms can be opened before one is settled."""
        return len(self._free)

    def open(self, number: int, attempt: int = 0) -> Room:
        """A room with pages of its own."""
        room, plot = self.pair.open(number, attempt), self._free.popleft()
        room.mine = {POOL: [PLOT * plot + offset for offset in MINE]}
        room.theirs = {POOL: [PLOT * plot + offset for offset in THEIRS]}
        self._lent[room.sender.name] = room, plot
        return room

    def arrived(self, room: Room) -> None:
        """The receiver says SUCCESS: what it got is right (R6), and does not change until the pages are used anew."""
        if room.sender.name in self._arrived or room.sender.name not in self._lent:
            return
        self._arrived.add(room.sender.name)
        content = self.pair.source.pages(POOL)[:, list(room.mine[POOL])]
        self.pair.target.expect(POOL, room.theirs[POOL], content)
        if (self.pair.target.pages(POOL)[:, list(room.theirs[POOL])] != content).any():
            self.note("R6", f"{_name(room)} is SUCCESS at the receiver, and not all of its bytes are there")

    def settle(self, room: Room) -> None:
        """Use an ended room's pages anew once both sides call them safe; raises ``Stuck`` if they do not."""
        if room.sender.name not in self._lent:
            return
        for handle in (room.sender, room.receiver):
            if not handle.safe():
                raise Stuck(f"{_name(room)} has ended, nothing holds it up, and {handle.child.role} does not call its pages safe")
        _, plot = self._lent.pop(room.sender.name)
        self._fill(self.pair.source, room.mine[POOL])
        self._fill(self.pair.target, room.theirs[POOL])
        self._used |= set(room.theirs[POOL])
        self._free.append(plot)

    def _fill(self, memory: Memory, pages: Sequence[int]) -> None:
        """Somebody else's bytes, other than those before."""
        content = memory.pages(POOL)
        content[:, list(pages)] = np.random.default_rng(next(self._seeds)).integers(0, 255, content[:, list(pages)].shape, np.uint8)
        memory.accept(POOL, pages)

    def look(self) -> None:
        """No byte has changed but in pages that are lent now: released ones (R2), and those of nobody (T2)."""
        written = {page for room, _ in self._lent.values() if room.sender.name not in self._arrived for page in room.theirs[POOL]}
        for side, memory in (("prefill", self.pair.source), ("decode", self.pair.target)):
            wrong = {page: count for page, count in memory.wrong(POOL).items() if side == "prefill" or page not in written}
            if wrong:
                late = side == "decode" and wrong.keys() <= self._used
                what = "used anew since they were called safe" if late else "of nobody"
                self.note("R2" if late else "T2", f"bytes of {side} have changed in pages {what} (page: bytes): {wrong}")


def _name(room: Room) -> str:
    return f"room {room.number}.{room.sender.attempt}"
