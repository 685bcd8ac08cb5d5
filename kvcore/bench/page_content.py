"""Content of pages that can be made anywhere from a number, and is unlike for unlike numbers: a piece of random bytes, then the number."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvcore.bench.setup import MIB, SEED, Setup, verify
from kvcore.buffers import Buffer, Bytes
from kvcore.memory import Indices

START, STRIDE = 1 << 16, 40_503
"""Numbers that follow each other begin far apart in the random bytes; the stride is odd, so all starts are used."""


class PageContent:
    """Pages of ``page_bytes`` bytes. Written and compared a MiB at a time, since a copy keeps other threads from running."""

    def __init__(self, page_bytes: int) -> None:
        source = np.frombuffer(np.random.default_rng(SEED).bytes(START + page_bytes), np.uint8)
        self._from = np.lib.stride_tricks.sliding_window_view(source, page_bytes)
        self._at_once = max(1, MIB // page_bytes)

    def of(self, numbers: Indices) -> Bytes:
        """Bytes of shape ``[numbers, page_bytes]``."""
        made: Bytes = self._from[numbers * STRIDE % START]
        named = numbers.astype("<i8")[:, None].view(np.uint8)[:, : made.shape[1]]
        made[:, : named.shape[1]] = named
        return made

    def write(self, buffer: Buffer, pages: Indices, numbers: Indices) -> None:
        """Fill pages, each with the content of its number."""
        for part in self._parts(pages):
            buffer.put(pages[part], self.of(numbers[part]))

    def check(self, buffer: Buffer, pages: Indices, numbers: Indices, setup: Setup) -> None:
        """Compare pages; raises ``ToolError`` if one has other bytes."""
        for part in self._parts(pages):
            verify(buffer.take(pages[part]), self.of(numbers[part]), setup)

    def _parts(self, pages: Indices) -> Iterator[slice]:
        return (slice(first, first + self._at_once) for first in range(0, len(pages), self._at_once))
