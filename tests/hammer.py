"""Uses of rooms, and the pages they move, with an oracle of their bytes.

Pages belong to one use at a time, and change hands only when the handle says that they are release-safe. So each side's memory tells
on everybody else: of what a use is given every byte is zero before it, and after it zero or the byte that was sent.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from kvcore import Handle, KVPoll, Receiver, Sender
from tests.helpers import Array, Duo

PAGES, MOST_PAGES, PAGE_BYTES = 8192, 4, 64
LIMITS = {
    "bootstrap_s": 2.0, "input_s": 2.0, "transfer_s": 3.0, "ticket_s": 1.0, "liveness_s": 4.0, "quarantine_s": 5.5, "orphan_s": 0.5,
}  # fmt: skip
LONGEST_S = 2.0 + 2 * 2.0 + 3.0 + 4.0
"""No room lives longer: all its limits one after the other, ``input_s`` twice since ``receive`` restarts it, and a busy machine."""

PLAIN, RACED, ALIKE, REJECTED, NO_RECEIVER, NO_SENDER = range(6)
"""Chunks handed over one by one; all by several threads at once; pages that are all alike, by several threads at once; and uses that one
side never opens."""
BOTH = (PLAIN, RACED, ALIKE)


@dataclass(eq=False)
class Use:
    """One use of a room by both sides: its handles, pages and bytes, as any thread finds them."""

    room: int
    attempt: int
    kind: int
    mine: list[int]
    theirs: list[int]
    sent: list[Array]
    """By layer, what the pages hold that are sent."""
    chunks: deque[list[int]]
    opened: float
    """When its newest side was."""
    sender: Sender | None = None
    receiver: Receiver | None = None
    turn: threading.Lock = field(default_factory=threading.Lock)
    """For who opens a side, and for who hands over the next chunk, whose order is what the bytes are checked by."""
    handed: int = 0
    received: bool = False
    kept: set[str] = field(default_factory=lambda: {"prefill", "decode"})
    """Sides that have not given their pages back."""

    @property
    def handles(self) -> list[Handle]:
        return [handle for handle in (self.sender, self.receiver) if handle is not None]

    @property
    def complete(self) -> bool:
        """Whether nobody will open another side of it."""
        return len(self.handles) == (2 if self.kind in BOTH else 1)

    @property
    def over(self) -> bool:
        return self.complete and all(handle.poll().terminal for handle in self.handles)


@dataclass(eq=False)
class Slot:
    """A room's number, and the use that it is at."""

    number: int
    use: Use | None = None
    old: Use | None = None
    """The use before, whose handles must do nothing any more."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    touched: dict[str, set[int]] = field(default_factory=lambda: {"prefill": set(), "decode": set()})
    """By side, the threads that made a call on a handle."""


class Memory:
    """The pages of both sides: who has them, and whether anybody else wrote to them."""

    def __init__(self, pair: Duo) -> None:
        self._pair = pair
        self._lock = threading.Lock()
        self._free = {"prefill": deque(range(PAGES)), "decode": deque(range(PAGES))}

    def take(self, number: int) -> tuple[list[int], list[int]] | None:
        """Pages of each side, those that came back last, so that a late write is seen; None if there are not enough."""
        with self._lock:
            if min(len(free) for free in self._free.values()) < number:
                return None
            mine, theirs = ([free.pop() for _ in range(number)] for free in self._free.values())
        assert self._pair.untouched(theirs), f"pages {theirs} were written to while nobody had them"
        return mine, theirs

    def give_back(self, use: Use, side: str) -> None:
        """Check what became of a side's pages, and let others have them."""
        if side == "prefill":
            assert all(np.array_equal(layer[use.mine], sent) for layer, sent in zip(self._pair.source, use.sent, strict=True))
        else:
            self._check_arrived(use)
            for layer in self._pair.target:
                layer[use.theirs] = 0
        with self._lock:
            self._free[side].extend(use.mine if side == "prefill" else use.theirs)

    def _check_arrived(self, use: Use) -> None:
        whole = use.receiver is not None and use.receiver.poll() is KVPoll.SUCCESS
        for layer, sent in zip(self._pair.target, use.sent, strict=True):
            found = layer[use.theirs]
            right = found == sent if whole else (found == sent) | (found == 0)
            assert right.all(), f"{use.receiver}: {(~right).sum()} bytes of pages {use.theirs} are not those of {use.mine}"
        if whole:
            assert use.receiver is not None and use.receiver.record == record_of(use)


def record_of(use: Use) -> bytes:
    return f"{use.room}/{use.attempt}/{use.mine}".encode()


def release(memory: Memory, use: Use) -> bool:
    """Give back the pages that are safe; whether all are."""
    for side, handle in (("prefill", use.sender), ("decode", use.receiver)):
        if side in use.kept and (handle is None or (handle.poll().terminal and handle.is_release_safe())):
            memory.give_back(use, side)
            use.kept.discard(side)
    return not use.kept
