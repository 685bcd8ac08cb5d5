"""Whether a measurement fits into the machine's memory, which is told before it begins."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from kvcore.bench.ranks import ALONE, Ranks

GIB = 1 << 30
MOST_SHARE = 0.75
"""Of what is available."""
PAGE_COST = 768
"""Bytes that both sides together take to list and describe one page, beside the page; roughly."""
ROOM_COST = 8 << 10
"""Bytes that both sides together take for one room; roughly."""
RANK_COST = 32 << 20
"""Bytes that a process takes with nothing in it; roughly."""


def afford(option: str, nbytes: int, pages: int = 0, rooms: int = 0, ranks: Ranks = ALONE) -> None:
    """Raises ``BadParameter`` if both sides together would take more than the machine can give: ``nbytes`` for content, and what comes
    with so many pages and rooms on each rank, and with ranks beyond the first."""
    processes, there = sum(ranks.each), available()
    needed = nbytes + (PAGE_COST * pages + ROOM_COST * rooms) * processes // 2 + RANK_COST * (processes - 2)
    if there is not None and needed > MOST_SHARE * there:
        what = f"this takes about {needed / GIB:,.1f} GiB of memory on both sides together, and of the {there / GIB:,.1f} GiB available"
        raise typer.BadParameter(f"{what} at most {MOST_SHARE:.0%} may be taken; choose less", param_hint=option)


def available() -> int | None:
    """Bytes of memory that can be had without swapping; None where the system does not tell."""
    try:
        found = re.search(r"^MemAvailable: *([0-9]+) kB$", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) << 10 if found else None
