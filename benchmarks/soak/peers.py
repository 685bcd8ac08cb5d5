"""The processes of a soak: each has a manager, and its memory lies before the eyes of this process too."""

from __future__ import annotations

import os
import random
import shutil
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from kvcore_conformance.stage.driver import Child, PoolSpec
from kvcore_conformance.stage.footprint import Footprint
from kvcore_conformance.stage.oracle import Memory

Role = Literal["prefill", "decode"]
Kept = tuple[int, int]
"""Threads and file descriptors that an engine keeps of each peer that it has met, until it is closed."""
State = Literal["starting", "here", "frozen", "closing", "gone"]

LIMITS = {
    "bootstrap_s": 8.0, "input_s": 8.0, "transfer_s": 12.0, "ticket_s": 3.0, "liveness_s": 4.0, "quarantine_s": 9.0,
    "orphan_s": 4.0, "send_s": 3.0, "drain_s": 0.5,
}  # fmt: skip
"""Short, so that all of them fire; and above what a busy machine takes for what nothing holds up."""
SLOW_S = 60.0
"""How long an engine may take to start, and to stop."""
POOL, LAYERS, PAGE_BYTES = "kv", 2, 4096
PLOT, PLOTS = 16, 32
"""Pages of a plot, which one room has to itself, and plots of a process."""


@dataclass(frozen=True)
class Held:
    """What a process holds of the operating system and in its manager's stores, once all rooms are cleared."""

    threads: int
    descriptors: int
    sockets: int
    resident_kib: int
    stores: int
    """Entries of all stores, those of peers."""

    def plus(self, times: int, of_each: Kept) -> Held:
        """With what an engine keeps of so many peers."""
        threads, descriptors = of_each
        more = {"threads": threads, "descriptors": descriptors, "sockets": descriptors}
        return replace(self, **{name: getattr(self, name) + times * each for name, each in more.items()})

    def above(self, first: Held, margin: Held) -> list[str]:
        """In what it is above another by more than a margin."""
        return [
            f"{name}: {now} > {getattr(first, name)} + {getattr(margin, name)}"
            for name, now in vars(self).items()
            if now > getattr(first, name) + getattr(margin, name)
        ]


@dataclass(frozen=True)
class Lot:
    """Pages that a room has to itself, and the plot they are of."""

    plot: int
    pages: list[int]


class Peer:
    """One process with a manager. Its pages are lent in plots, and filled anew the instant that they are given back."""

    def __init__(self, role: Role, name: str, backend: str, options: dict[str, Any], folder: Path, seed: int) -> None:
        folder.mkdir()
        self._folder = folder
        self.role, self.name = role, name
        self.state: State = "starting"
        self.child = Child(backend=backend, options=options)
        self.memory = Memory(folder, [PoolSpec(POOL, PLOT * PLOTS, PAGE_BYTES, LAYERS)])
        self.memory.poke(seed)
        self._random = random.Random(seed)
        self._bytes = np.random.default_rng(seed)
        self._free = deque(range(PLOTS))
        self._written: set[int] = set()

    def start(self) -> None:
        """Make its manager."""
        self.child.start(self.role, self.memory.specs, waits_s=SLOW_S, limits=LIMITS)

    def close(self) -> None:
        """Close its manager."""
        self.child.work("stop", waits_s=SLOW_S)

    def end(self) -> None:
        """End the process, whatever state it is in. Idempotent."""
        self.state = "gone"
        self.child.end()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def free(self) -> bool:
        """Whether there are pages for another room."""
        return bool(self._free)

    def lend(self, number: int) -> Lot:
        """So many pages of a plot of their own, in any order."""
        plot = self._free.popleft()
        lot = Lot(plot, [PLOT * plot + offset for offset in self._random.sample(range(PLOT), number)])
        if self.role == "decode":
            self._written |= set(lot.pages)
        return lot

    def content(self, lot: Lot) -> npt.NDArray[np.uint8]:
        """A copy of what its pages hold now."""
        return self.memory.pages(POOL)[:, lot.pages]

    def arrived(self, lot: Lot, content: npt.NDArray[np.uint8]) -> bool:
        """Whether its pages hold this; from now on nothing may change them."""
        self._written -= set(lot.pages)
        self.memory.expect(POOL, lot.pages, content)
        return bool((self.content(lot) == content).all())

    def give_back(self, lot: Lot) -> None:
        """Its pages are release-safe: used anew at once, so that whatever comes late is seen."""
        self._written -= set(lot.pages)
        shape = (LAYERS, len(lot.pages), PAGE_BYTES)
        self.memory.pages(POOL)[:, lot.pages] = self._bytes.integers(0, 255, shape, np.uint8)
        self.memory.accept(POOL, lot.pages)
        self._free.append(lot.plot)

    def wrong(self) -> dict[int, int]:
        """Pages in which bytes have changed that nobody may write, and how many bytes; -1: around the pages."""
        return {page: count for page, count in self.memory.wrong(POOL).items() if page not in self._written}

    def held(self) -> Held:
        """What it holds now."""
        footprint = Footprint.of(self.child.pid)
        stores = self.child.work("stats")["stores"]
        kept = sum(size for name, size in stores.items() if name != "flight_record")  # a ring, which fills up
        return Held(*footprint[:2], _sockets(self.child.pid), footprint.resident, kept)


def _sockets(pid: int) -> int:
    found = 0
    for file in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found += os.readlink(file).startswith("socket:")
        except FileNotFoundError:
            pass  # closed meanwhile
    return found
