"""One side's rooms in a measurement: how they are opened, and many that wait while something else is measured."""

from __future__ import annotations

import threading
import time

import numpy as np

import kvcore
from kvcore.bench.setup import Address, Setup, finish
from kvcore.sides import Link, ToolError
from kvcore.states import KVPoll, Side

SETTLE_S = 1.0
STEP_S = 0.01
GROUP = 64
"""Rooms are opened so many at a time: of thousands at once each repeats itself before it is answered."""
PAGE_BYTES = 256
SPARE_PAGE = 0
"""What decode publishes for rooms that are about no bytes."""


class Opener:
    """Opens one side of rooms. Made on both sides at once, since that of prefill's first rank tells decode's where it is."""

    def __init__(self, mine: kvcore.KVManager, side: Side, link: Link) -> None:
        self._mine = mine
        if side == "prefill" and not link.rank:
            link.tell(Address(mine.address))
        self._prefill = link.hear(Address).text if side == "decode" else ""

    def open(self, room: int, attempt: int = 0) -> kvcore.Handle:
        """A sender, or a receiver that has published nothing yet."""
        if self._prefill:
            return self._mine.receiver(room, prefill=self._prefill, attempt=attempt)
        return self._mine.sender(room, attempt)

    def begin(self, room: int, page: int, attempt: int = 0) -> kvcore.Handle:
        """One side of a room of one page that goes all its way."""
        handle = self.open(room, attempt)
        hand_over(handle, page)
        return handle

    def meet(self, setup: Setup) -> None:
        """Carry room 0, so that the two sides are paired."""
        with self.begin(0, SPARE_PAGE) as handle:
            finish(handle, setup)


def hand_over(handle: kvcore.Handle, page: int) -> None:
    """Send a room's one page, or publish where it goes."""
    if isinstance(handle, kvcore.Sender):
        handle.send([page], last=True)
    elif isinstance(handle, kvcore.Receiver):
        handle.receive([page])


class Waiting:
    """Rooms, from number 1 on, of an attempt of their own that wait: published on decode, with nothing handed over on prefill."""

    def __init__(self, opener: Opener, setup: Setup, attempt: int = 1) -> None:
        self.handles: list[kvcore.Handle] = []
        self._opener, self._setup, self._attempt = opener, setup, attempt

    def grow(self, count: int) -> None:
        """Open more until there are so many, and wait until all wait and the threads have noticed. Raises ``ToolError`` if one does not."""
        if count <= len(self.handles):
            return
        while (opened := len(self.handles)) < count:
            group = [self._open(room) for room in range(opened + 1, min(opened + GROUP, count) + 1)]
            self.handles += group
            deadline = time.monotonic() + self._setup.patience_s
            while any(handle.poll() is KVPoll.BOOTSTRAPPING for handle in group) and time.monotonic() < deadline:
                threading.Event().wait(STEP_S)
        self.check()
        threading.Event().wait(SETTLE_S)

    def _open(self, room: int) -> kvcore.Handle:
        handle = self._opener.open(room, self._attempt)
        if isinstance(handle, kvcore.Receiver):
            handle.receive([SPARE_PAGE])
        return handle

    def check(self) -> None:
        """Raises ``ToolError`` if one does not wait."""
        states = np.array([handle.poll() for handle in self.handles])
        strays = np.flatnonzero(states != KVPoll.WAITING_FOR_INPUT)
        if strays.size:
            first = self.handles[int(strays[0])]
            raise ToolError(
                f"{strays.size} of {len(self.handles)} rooms do not wait: room {first.room} is {first.poll().name} ({first.failure}); "
                "try fewer rooms"
            )

    def clear(self) -> None:
        """Clear all: this ends them on the other side too, which must have looked before."""
        for handle in self.handles:
            handle.clear()
        self.handles.clear()
