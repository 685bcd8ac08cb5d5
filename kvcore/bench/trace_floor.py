"""The floor of ``bench trace``: what moved when it was played first is moved again, one request's pages after the other, by the engine
alone and by the bare machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcore.bench.floor import BARE, Beside
from kvcore.bench.page_content import PageContent
from kvcore.bench.scheduler import Settings
from kvcore.bench.setup import Measured
from kvcore.buffers import Buffer
from kvcore.memory import Indices


@dataclass(frozen=True, slots=True, eq=False)
class Moved:
    """To a side: the other's pages, by request, so that the engine alone can move the same."""

    pages: list[Indices]


class PrefillTurns:
    """Prefill's turns of the engine alone: what moved when the trace was played first. The content of a page is then that of its
    place, by a number that no block has."""

    def __init__(self, beside: Beside, buffer: Buffer, settings: Settings) -> None:
        self._beside, self._buffer, self._content = beside, buffer, PageContent(settings[1].page_bytes)
        self._moved: list[tuple[Indices, Indices]] = []

    def follow(self, mine: Sequence[Indices], theirs: Sequence[Indices]) -> None:
        """The trace was played, and these pages moved."""
        self._moved = self._moved or pairs(mine, theirs)
        every = np.unique(np.concatenate([here for here, _ in self._moved]))
        self._content.write(self._buffer, every, place_number(every))

    def take(self, way: str) -> Measured:
        """A turn."""
        return self._beside.write(way, self._moved)


class DecodeTurns:
    """Decode's. A page that is written more than once is compared with what came last."""

    def __init__(self, beside: Beside, buffer: Buffer, settings: Settings) -> None:
        self._beside, self._buffer, self._content = beside, buffer, PageContent(settings[1].page_bytes)
        self._setup, self._last = settings[0], np.full(settings[1].pages, -1, np.int64)

    def follow(self, mine: Sequence[Indices], theirs: Sequence[Indices]) -> None:
        """The trace was played, and these pages moved."""
        if (self._last < 0).all():
            for here, there in pairs(mine, theirs):
                self._last[here] = there

    def take(self, way: str) -> Measured:
        """A turn."""
        places = np.flatnonzero(self._last >= 0)
        numbers = place_number(self._last[places])
        self._content.write(self._buffer, places, numbers - len(self._last))  # what no page of prefill's has
        copied = self._content.of(numbers if way == BARE else numbers[:0])
        measured = self._beside.serve(way, copied, np.arange(len(places)), places)
        self._content.check(self._buffer, places, numbers, self._setup)
        return measured


def pairs(mine: Sequence[Indices], theirs: Sequence[Indices]) -> list[tuple[Indices, Indices]]:
    """Of each request of which pages moved: here and there."""
    return [pages for pages in zip(mine, theirs, strict=True) if pages[0].size]


def place_number(pages: Indices) -> Indices:
    """Which content prefill's pages have in turns of the engine alone."""
    return -1 - pages
