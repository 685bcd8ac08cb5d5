"""A side's pages, shared by requests that begin alike: what one has left there need not be written, or sent, for the next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvcore.memory import Indices


@dataclass(slots=True, eq=False)
class Block:
    """Pages of one block. ``users``: leases that it is part of."""

    number: int
    pages: list[int]
    users: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """A request's blocks, in order, of which the first ``held`` were there before."""

    blocks: list[Block]
    held: int

    @property
    def pages(self) -> Indices:
        """All pages of the request, in order."""
        return np.array([page for block in self.blocks for page in block.pages], np.int64)

    @property
    def prefix(self) -> int:
        """How many pages were there before."""
        return sum(len(block.pages) for block in self.blocks[: self.held])


class PrefixCache:
    """Blocks stay when nobody uses them any more, until their pages are needed: then the one that was used longest ago goes, and of
    one request the last block first, since without those before it a block is of no use. A page in use is never given away.

    ``pages``: all that there are, those to be given out last first.
    """

    def __init__(self, pages: Iterable[int]) -> None:
        self.in_use = 0
        """Pages that are leased."""
        self._free = list(pages)
        self._pages = len(self._free)
        self._known: dict[int, Block] = {}
        """By number, what holds its content; used or not."""
        self._idle: OrderedDict[int, Block] = OrderedDict()
        """Of these what nobody uses, the next to go first."""

    def lease(self, numbers: Sequence[int], pages: Sequence[int]) -> Lease | None:
        """Pages for these blocks, each of so many, as far as they are not there; None if too many pages are in use."""
        held = list(self._leading(numbers))
        missing = [Block(number, [0] * count) for number, count in zip(numbers[len(held) :], pages[len(held) :], strict=True)]
        more = sum(len(block.pages) for block in (*held, *missing) if not block.users)
        if self.in_use + more > self._pages:
            return None
        self.in_use += more
        for block in held:
            self._idle.pop(block.number, None)
        for block in missing:
            block.pages = [self._page() for _ in block.pages]
        for block in (*held, *missing):
            block.users += 1
        return Lease([*held, *missing], len(held))

    def filled(self, lease: Lease) -> None:
        """All of its pages are written, or have arrived: whoever comes next may share them."""
        for block in lease.blocks:
            self._known.setdefault(block.number, block)

    def release(self, lease: Lease) -> None:
        """Its request is over, and its pages are release-safe."""
        for block in reversed(lease.blocks):
            block.users -= 1
            if block.users:
                continue
            self.in_use -= len(block.pages)
            if self._known.get(block.number) is block:
                self._idle[block.number] = block
            else:  # another request brought the same at the same time
                self._free += block.pages

    def _leading(self, numbers: Sequence[int]) -> Iterator[Block]:
        for number in numbers:
            if (block := self._known.get(number)) is None:
                return
            yield block

    def _page(self) -> int:
        while not self._free:
            number, block = self._idle.popitem(last=False)
            del self._known[number]
            self._free += block.pages
        return self._free.pop()
