"""What a process holds of the operating system, looked at from outside."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


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
