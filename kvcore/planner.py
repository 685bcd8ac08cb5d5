"""From page indices to descriptors: which bytes of which region go where. Pure arithmetic, no I/O.

The i-th local page goes to the i-th remote page in every region of its pool (T1). Runs of pages contiguous on both sides are found
once per pool and broadcast over the pool's regions; nothing loops over pages or layers in Python. Offsets are exact: a ``Layout``
holds only regions that end within 64 bits, and a page inside its pool's bound lies inside its region (T2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcore.errors import ConfigError, IncompatiblePeerError, PageError, shown
from kvcore.memory import Indices, PoolGeometry, Region, check_distinct, check_pages

U64 = npt.NDArray[np.uint64]
I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class PoolPlace:
    """One pool's part of a layout: its geometry, the index of its first region, and bytes per page of each region, shape ``(k,)``."""

    geometry: PoolGeometry
    first_region: int
    page_bytes: U64


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where one side's pools lie: its pools by name, and address and length in bytes of each region, in registration order."""

    pools: Mapping[str, PoolPlace]
    base: U64
    nbytes: U64

    @classmethod
    def of(cls, geometries: Sequence[PoolGeometry], regions: Sequence[Region]) -> Layout:
        """The layout of pools whose regions are listed one pool after the other.

        A peer's hello is untrusted, so this raises ``IncompatiblePeerError`` naming both values if a pool is listed twice, or if
        regions and geometry do not describe the same whole pages within 64 bits (T3).
        """
        expected = sum(len(geometry.page_bytes) for geometry in geometries)
        if expected != len(regions):
            raise IncompatiblePeerError(f"{len(regions)} regions are listed and the pools have {expected}; list each pool's regions once")
        pools: dict[str, PoolPlace] = {}
        first = 0
        for geometry in geometries:
            if geometry.name in pools:
                raise IncompatiblePeerError(f"pool {shown(geometry.name)} is listed twice; give each pool its own name")
            last = first + len(geometry.page_bytes)
            _check_regions(geometry, first, regions[first:last])
            pools[geometry.name] = PoolPlace(geometry, first, np.array(geometry.page_bytes, np.uint64))
            first = last
        return cls(pools, np.array([r.ptr for r in regions], np.uint64), np.array([r.nbytes for r in regions], np.uint64))


@dataclass(frozen=True, slots=True, eq=False)
class Descriptors:
    """The five arrays of ``hookspecs.Transfer``, each of shape ``(n,)``: int32 region indices, uint64 offsets and lengths in bytes."""

    local_region: I32
    remote_region: I32
    local_offset: U64
    remote_offset: U64
    length: U64

    def __len__(self) -> int:
        return self.length.size

    @property
    def nbytes(self) -> int:
        """Bytes of all descriptors."""
        return int(self.length.sum(dtype=np.uint64))

    def part(self, start: int, stop: int) -> Descriptors:
        """Descriptors ``start .. stop-1``, as views."""
        cut = slice(start, stop)
        return Descriptors(
            self.local_region[cut], self.remote_region[cut], self.local_offset[cut], self.remote_offset[cut], self.length[cut]
        )


def plan(local: Layout, remote: Layout, pages: Mapping[str, tuple[Indices, Indices]]) -> Descriptors:
    """Descriptors that copy, pool by pool, the i-th local page to the i-th remote page in every region (T1).

    ``pages`` maps a pool to its local and remote page indices, two int64 arrays of one shape ``(n,)``. The result is sorted by
    region pair and within it by remote offset, has no zero lengths, and is empty if no pool has pages.
    Raises ``PageError`` naming pool, index and bound for indices that either side does not have, for a remote page named twice and
    for unequal numbers of pages (T2); ``IncompatiblePeerError`` if the two sides' pools are unlike (T3).
    """
    work = []
    for name, (mine, theirs) in pages.items():
        here, there = _place(local, name), _place(remote, name)
        _check_pair(here, there, mine, theirs)
        work.append((here, there, _runs(mine, theirs)))
    work.sort(key=lambda item: item[0].first_region)
    out = _empty(sum(here.page_bytes.size * runs.count.size for here, _, runs in work))
    start = 0
    for here, there, runs in work:
        stop = start + here.page_bytes.size * runs.count.size
        _broadcast(out.part(start, stop), here, there, runs)
        start = stop
    return out


def check_listed(remote: Layout, listed: Mapping[str, Indices]) -> None:
    """Raise ``PageError`` unless all that a destination lists, for whatever chunk, are pages of the peer's pools, each once (T1, T2)."""
    for name, pages in listed.items():
        num_pages = _place(remote, name).geometry.num_pages
        check_pages(name, pages, num_pages)
        check_distinct(name, pages, num_pages)


def split(descriptors: Descriptors, max_descriptors: int | None, max_bytes: int | None) -> Iterator[Descriptors]:
    """Cut into batches of at most ``max_descriptors`` descriptors and ``max_bytes`` bytes (None: no limit), order kept.

    A descriptor above ``max_bytes`` is itself cut. What is within the limits comes back unchanged, and nothing at all for no
    descriptors, since a backend is never given an empty batch. Raises ``ConfigError`` for a limit below 1.
    """
    for what, limit in (("max_descriptors", max_descriptors), ("max_bytes", max_bytes)):
        if limit is not None and limit < 1:
            raise ConfigError(f"{what} is {limit}, which no batch can keep; declare at least 1, or None for no limit")
    if not len(descriptors):
        return
    if max_bytes is not None:
        descriptors = _cut(descriptors, max_bytes)
    total, most = len(descriptors), max_descriptors or len(descriptors)
    if total <= most and (max_bytes is None or descriptors.nbytes <= max_bytes):
        yield descriptors
        return
    ends = np.cumsum(descriptors.length, dtype=np.uint64)
    start = done = 0
    while start < total:
        stop = min(start + most, total)
        if max_bytes is not None:
            stop = min(stop, int(np.searchsorted(ends, np.uint64(min(done + max_bytes, 2**64 - 1)), side="right")))
        yield descriptors.part(start, stop)
        start, done = stop, int(ends[stop - 1])


@dataclass(frozen=True, slots=True, eq=False)
class _Runs:
    """Stretches of pages contiguous on both sides: first local and first remote page, and number of pages, each of shape ``(m,)``."""

    local: U64
    remote: U64
    count: U64


def _check_regions(geometry: PoolGeometry, first: int, regions: Sequence[Region]) -> None:
    for number, (region, page_bytes) in enumerate(zip(regions, geometry.page_bytes, strict=True), first):
        if geometry.num_pages < 1 or page_bytes < 1 or region.nbytes != geometry.num_pages * page_bytes:
            raise IncompatiblePeerError(
                f"pool {shown(geometry.name)}: region {number} has {region.nbytes} bytes and its geometry says "
                f"{geometry.num_pages} pages of {page_bytes}; both must describe the same memory"
            )
        if not 0 < region.ptr <= 2**64 - region.nbytes:
            raise IncompatiblePeerError(
                f"pool {shown(geometry.name)}: region {number} at {region.ptr:#x} with {region.nbytes} bytes is outside the 64-bit range; "
                "it must describe allocated memory"
            )


def _place(layout: Layout, name: str) -> PoolPlace:
    if name not in layout.pools:
        raise PageError(f"there is no pool {shown(name)}; choose from {', '.join(map(shown, layout.pools))}")
    return layout.pools[name]


def _check_pair(here: PoolPlace, there: PoolPlace, local: Indices, remote: Indices) -> None:
    name = here.geometry.name
    difference = here.geometry.mismatch(there.geometry)
    if difference is not None:
        raise IncompatiblePeerError(f"{difference}; give both sides one layout")
    for pages in (local, remote):
        if pages.ndim != 1 or pages.dtype != np.int64:
            raise PageError(f"pool {shown(name)}: page indices are {pages.dtype} of shape {pages.shape}; pass one flat int64 array")
    if local.size != remote.size:
        raise PageError(f"pool {shown(name)}: {local.size} local pages are to go to {remote.size} remote pages; list one for one")
    check_pages(name, local, here.geometry.num_pages)
    check_pages(name, remote, there.geometry.num_pages)
    check_distinct(name, remote, there.geometry.num_pages)


def _runs(local: Indices, remote: Indices) -> _Runs:
    # Remote pages are distinct, so in their order every pair that can be merged stands side by side, whatever order they came in.
    order = np.argsort(remote, kind="stable")
    local, remote = local[order], remote[order]
    breaks = (np.diff(local) != 1) | (np.diff(remote) != 1)
    starts = np.flatnonzero(np.concatenate((np.ones(min(local.size, 1), np.bool_), breaks)))
    counts = np.diff(starts, append=local.size)
    return _Runs(local[starts].astype(np.uint64), remote[starts].astype(np.uint64), counts.astype(np.uint64))


def _empty(size: int) -> Descriptors:
    regions = np.empty((2, size), np.int32)
    numbers = np.empty((3, size), np.uint64)
    return Descriptors(regions[0], regions[1], numbers[0], numbers[1], numbers[2])


def _broadcast(out: Descriptors, here: PoolPlace, there: PoolPlace, runs: _Runs) -> None:
    shape = here.page_bytes.size, runs.count.size
    number = np.arange(shape[0], dtype=np.int32)[:, None]
    page_bytes = here.page_bytes[:, None]
    out.local_region.reshape(shape)[:] = number + np.int32(here.first_region)
    out.remote_region.reshape(shape)[:] = number + np.int32(there.first_region)
    np.multiply(page_bytes, runs.local, out=out.local_offset.reshape(shape))
    np.multiply(page_bytes, runs.remote, out=out.remote_offset.reshape(shape))
    np.multiply(page_bytes, runs.count, out=out.length.reshape(shape))


def _cut(descriptors: Descriptors, most: int) -> Descriptors:
    length = descriptors.length
    if int(length.max()) <= most:
        return descriptors
    step = np.uint64(most)
    pieces = (length - np.uint64(1)) // step + np.uint64(1)
    whole = np.repeat(np.arange(length.size), pieces.astype(np.int64))
    first = np.cumsum(pieces, dtype=np.uint64) - pieces
    skip = (np.arange(whole.size, dtype=np.uint64) - first[whole]) * step
    return Descriptors(
        descriptors.local_region[whole],
        descriptors.remote_region[whole],
        descriptors.local_offset[whole] + skip,
        descriptors.remote_offset[whole] + skip,
        np.minimum(length[whole] - skip, step),
    )
