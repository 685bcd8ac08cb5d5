"""The oracle: it knows what every byte of both sides' memory must be, and looks at the memory itself, never through a backend.

Pools lie in files that the tests' process maps too, so it can look while a manager's process stands still or is gone. Every region lies
between guard bytes. Nothing outside the pages that a room listed may ever change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvcore_conformance.stage.driver import PoolSpec
from kvcore_conformance.stage.waits import until

Bytes = npt.NDArray[np.uint8]
Pages = Mapping[str, Sequence[int]]

GUARD = 4096
"""Bytes before and after each region."""
LATE_S = 1.0
"""How long late bytes are waited for."""
FILL = 0xA5
"""Every byte that nobody has written."""


class Memory:
    """One side's pools in files of a folder. ``specs`` are what its process makes pools of."""

    def __init__(self, folder: Path, specs: Sequence[PoolSpec]) -> None:
        self.specs = [replace(spec, file=str(folder / spec.name), guard=GUARD) for spec in specs]
        self._whole = {spec.name: _map(spec) for spec in self.specs}
        self._shape = {spec.name: (spec.layers, spec.pages, spec.page_bytes) for spec in self.specs}
        self._expected = {name: array.copy() for name, array in self._whole.items()}

    def pages(self, pool: str) -> Bytes:
        """The memory of a pool, shape ``(layers, pages, page_bytes)``."""
        return self._inner(self._whole[pool], pool)

    def _inner(self, whole: Bytes, pool: str) -> Bytes:
        return whole[:, GUARD:-GUARD].reshape(self._shape[pool])

    def wipe(self) -> None:
        """Make everything FILL again, and expect that."""
        for name, array in self._whole.items():
            array[:] = FILL
            self._expected[name][:] = FILL

    def poke(self, seed: int) -> None:
        """Fill all pages with random bytes, none of them FILL, and expect those."""
        random = np.random.default_rng(seed)
        for name in self._whole:
            inner = self.pages(name)
            inner[:] = np.frombuffer(random.bytes(inner.size), np.uint8).reshape(inner.shape)
            inner[inner == FILL] = 0
            self._expected[name][:] = self._whole[name]

    def expect(self, pool: str, pages: Sequence[int], content: Bytes) -> None:
        """From now on these pages are to hold ``content``, shape ``(layers, len(pages), page_bytes)``."""
        self._inner(self._expected[pool], pool)[:, list(pages)] = content

    def accept(self, pool: str, pages: Sequence[int]) -> None:
        """Take what these pages hold for right: they were listed by a room that has failed."""
        self.expect(pool, pages, self.pages(pool)[:, list(pages)])

    def wrong(self, pool: str) -> dict[int, int]:
        """Pages that hold what they must not, with how many bytes; -1 stands for the guard bytes around the regions."""
        differs = self._whole[pool] != self._expected[pool]
        if not differs.any():
            return {}
        inner = self._inner(differs, pool)
        counts = {int(page): int(inner[:, page].sum()) for page in np.flatnonzero(inner.any(axis=(0, 2)))}
        guards = int(differs.sum()) - sum(counts.values())
        return counts | ({-1: guards} if guards else {})

    def changed(self, pool: str) -> list[int]:
        """Pages that are not all FILL."""
        return [int(page) for page in np.flatnonzero((self.pages(pool) != FILL).any(axis=(0, 2)))]

    def gets_right(self) -> None:
        """Wait until every byte is what is expected, but not for long: what is late may still come."""
        with suppress(AssertionError):
            until(lambda: not any(self.wrong(pool) for pool in self._whole), "all bytes are there", LATE_S)

    def intact(self) -> None:
        """Fail unless every byte of every pool is what is expected."""
        for pool in self._whole:
            wrong = self.wrong(pool)
            assert not wrong, f"bytes that differ from what they must be, in pool {pool!r}, by page (-1: outside the pages): {wrong}"


def _map(spec: PoolSpec) -> Bytes:
    shape = (spec.layers, GUARD + spec.pages * spec.page_bytes + GUARD)
    array = np.memmap(spec.file, np.uint8, "w+", shape=shape)
    array[:] = FILL
    return np.asarray(array)


def moved(source: Memory, target: Memory, mine: Pages, theirs: Pages) -> None:
    """Expect the target's pages to hold what the source's hold now: the i-th of one goes to the i-th of the other (T1)."""
    for pool, pages in mine.items():
        target.expect(pool, theirs[pool], source.pages(pool)[:, list(pages)])
