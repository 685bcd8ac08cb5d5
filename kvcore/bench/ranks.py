"""How many ranks of either side a measurement has, each a process of its own.

They are tensor-parallel: a room is one room on all of them, a page holds all heads over a whole side, and each rank its share of them.
There are as few heads as both sides can share out, so every piece that is sent is as long as it can be.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from kvcore.states import Side

MOST_RANKS = 64
"""Of one side."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Of both sides; in words ``p4d2``."""

    prefill: int = 1
    decode: int = 1

    @classmethod
    def named(cls, text: str) -> Ranks:
        """From these words; ``ValueError`` says what they are to be."""
        found = re.fullmatch(r"p([0-9]{1,9})d([0-9]{1,9})", text, re.ASCII)
        counts = [int(each) for each in found.groups()] if found is not None else [0]
        if not all(1 <= count <= MOST_RANKS for count in counts):
            raise ValueError(f"{text!r} is not pNdM with N prefill and M decode ranks, each from 1 to {MOST_RANKS}, such as p4d2")
        return cls(*counts)

    def __str__(self) -> str:
        return f"p{self.prefill}d{self.decode}"

    @property
    def each(self) -> tuple[int, int]:
        """Of prefill and of decode."""
        return self.prefill, self.decode

    @property
    def alone(self) -> bool:
        """Whether either side is one process."""
        return self.each == (1, 1)

    @property
    def heads(self) -> int:
        """Of a page; a page's bytes are a multiple of it."""
        return math.lcm(*self.each)

    def of(self, side: Side) -> int:
        """Of one side."""
        return self.prefill if side == "prefill" else self.decode

    def heads_of(self, side: Side, rank: int) -> range:
        """Those that a rank holds."""
        here = self.heads // self.of(side)
        return range(rank * here, (rank + 1) * here)


ALONE = Ranks()
"""One process a side."""
