"""What a process holds of the operating system, looked at from outside."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from kvcore_conformance.stage.driver import Child
from kvcore_conformance.stage.waits import SOON_S, STEP_S, stays

T = TypeVar("T")

WINDOWS = 3
"""How often idle processes are looked at: what else a machine does can only add to what they take."""


class Footprint(NamedTuple):
    """Threads, file descriptors, and resident KiB of memory."""

    threads: int
    descriptors: int
    resident: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        """That of a process now."""
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
        status = dict(line.split(":", 1) for line in lines)
        return cls(int(status["Threads"]), len(list(Path(f"/proc/{pid}/fd").iterdir())), int(status["VmRSS"].split()[0]))

    def exceeds(self, most: Footprint) -> list[str]:
        """In what it is above another, such as ``threads: 12 > 10``."""
        pairs = zip(self._fields, self, most, strict=True)
        return [f"{name}: {now} > {then}" for name, now, then in pairs if now > then]

    def plus(self, threads: int, descriptors: int, resident: int) -> Footprint:
        """With a margin."""
        return Footprint(self.threads + threads, self.descriptors + descriptors, self.resident + resident)


def idle_s(*children: Child, seconds: float) -> float:
    """CPU seconds that the busiest of some idle processes takes in a stretch of time; the least of a few stretches."""
    found = list[float]()
    for _ in range(WINDOWS):
        before = [child.work("cpu_s") for child in children]
        stays(lambda: all(child.running for child in children), "the processes run", seconds)
        found.append(max(child.work("cpu_s") - was for child, was in zip(children, before, strict=True)))
    return min(found)


def lastly(look: Callable[[], T]) -> T:
    """What is seen as soon as it is nothing, or at last."""
    deadline = time.monotonic() + SOON_S
    while (seen := look()) and time.monotonic() < deadline:
        threading.Event().wait(STEP_S)
    return seen
