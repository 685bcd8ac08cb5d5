"""From page indices to descriptors: which bytes of which region go where. Pure arithmetic, no I/O.

The i-th local page goes to the i-th remote page in every region of its pool (T1). Runs of pages contiguous on both sides are found
once per pool and broadcast over the pool's regions; nothing loops over pages or layers in Python. Where ranks are unlike, a page goes in
strides (``mapping``), which are written out batch by batch. Offsets are exact: a ``Layout``
holds only regions that end within 64 bits, and a page inside its pool's bound lies inside its region (T2).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvcore.errors import ConfigError, IncompatiblePeerError, PageError, shown
from kvcore.mapping import Share
from kvcore.memory import Indices, PoolGeometry, Region, check_distinct, check_pages, total

U64 = npt.NDArray[np.uint64]
I32 = npt.NDArray[np.int32]

_ONE: U64 = np.ones(1, np.uint64)


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


class Descriptors(msgspec.Struct, frozen=True, eq=False):
    """The five arrays of ``hookspecs.Transfer``, each of shape ``(n,)``: int32 region indices, uint64 offsets and lengths in bytes."""

    local_region: I32
    remote_region: I32
    local_offset: U64
    remote_offset: U64
    length: U64

    def __len__(self) -> int:
        return self.length.size

    @classmethod
    def empty(cls, size: int) -> Descriptors:
        """Room for so many."""
        regions, numbers = np.empty((2, size), np.int32), np.empty((3, size), np.uint64)
        return cls(*regions, *numbers)

    def __getitem__(self, which: slice | npt.NDArray[np.intp]) -> Descriptors:
        """Some of them; of a slice, views."""
        return Descriptors(
            self.local_region[which], self.remote_region[which], self.local_offset[which], self.remote_offset[which], self.length[which]
        )

    def further(self, local: U64, remote: U64, length: U64) -> Descriptors:
        """Each so much further in its regions, and so long."""
        return Descriptors(self.local_region, self.remote_region, self.local_offset + local, self.remote_offset + remote, length)

    @property
    def nbytes(self) -> int:
        """Bytes of all descriptors."""
        return total(self.length)


@dataclass(frozen=True, slots=True, eq=False)
class Strides:
    """How often each row's descriptor is repeated, and how far each next one lies from the one before, in bytes; of shape ``(n,)``."""

    count: U64
    local: U64
    remote: U64

    def __getitem__(self, which: slice) -> Strides:
        return Strides(self.count[which], self.local[which], self.remote[which])


class Plan(msgspec.Struct, frozen=True, eq=False):
    """Descriptors in strided form: the first one of each row, sorted by region pair and within it by remote offset, and how they go on;
    without strides each row is one descriptor. No length is zero."""

    first: Descriptors
    strides: Strides | None = None

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, which: slice) -> Plan:
        """Some rows, as views."""
        return Plan(self.first[which], None if self.strides is None else self.strides[which])

    @property
    def count(self) -> U64 | None:
        """Descriptors of each row; None where each has one."""
        return None if self.strides is None else self.strides.count

    @property
    def nbytes(self) -> U64:
        """Bytes of each row."""
        return self.first.length if self.count is None else self.first.length * self.count

    def descriptors(self) -> Descriptors:
        """Each row written out."""
        if self.strides is None:
            return self.first
        count = self.strides.count
        row = np.repeat(np.arange(len(self)), count.astype(np.int64))
        number = np.arange(row.size, dtype=np.uint64) - (np.cumsum(count, dtype=np.uint64) - count)[row]
        each = self.first[row]
        return each.further(number * self.strides.local[row], number * self.strides.remote[row], each.length)


def plan(local: Layout, remote: Layout, pages: Mapping[str, tuple[Indices, Indices]], shares: Mapping[str, Share]) -> Plan:
    """What copies, pool by pool, this rank's share of the i-th local page to the i-th remote page in every region (T1).

    ``pages`` are by the remote pool, and such as ``check`` lets pass; of a pool without a share nothing is copied.
    """
    work = []
    for name, (mine, theirs) in pages.items():
        if name in shares:
            there = _place(remote, name)
            work.append((_place(local, there.geometry.source), there, shares[name], _runs(mine, theirs, shares[name].whole)))
    if len(work) == 1 and work[0][2].whole and work[0][3].count.size == 1:
        return Plan(_one_run(*work[0]))
    work.sort(key=lambda item: item[0].first_region)
    size = sum(len(share) * runs.count.size for _, _, share, runs in work)
    strided = any(not share.whole for _, _, share, _ in work)
    out = Plan(Descriptors.empty(size), Strides(*np.empty((3, size), np.uint64)) if strided else None)
    start = 0
    for here, there, share, runs in work:
        stop = start + len(share) * runs.count.size
        _broadcast(out[start:stop], here, there, share, runs)
        start = stop
    return out


def check(local: Layout, remote: Layout, pages: Mapping[str, tuple[Indices, Indices]]) -> None:
    """Raise ``PageError`` unless ``pages`` maps remote pools to local and remote page indices, two int64 arrays of one shape ``(n,)``.

    Names pool, index and bound of indices that either side does not have, of a remote page named twice and of unequal numbers (T2).
    """
    for name, (mine, theirs) in pages.items():
        there = _place(remote, name)
        _check_pair(_place(local, there.geometry.source), there, mine, theirs)


def check_listed(remote: Layout, listed: Mapping[str, tuple[str, Indices]]) -> None:
    """Raise ``PageError`` unless all that a destination lists, for whatever chunk, are pages of the peer's pools, each once, and listed
    for the pool whose pages these take (T1, T2)."""
    for name, (source, pages) in listed.items():
        geometry = _place(remote, name).geometry
        if geometry.source != source:
            raise PageError(f"pool {shown(name)} takes pages of {shown(geometry.source)} and is listed for {shown(source)}; list another")
        num_pages = geometry.num_pages
        check_pages(name, pages, num_pages)
        check_distinct(name, pages, num_pages)


def split(planned: Plan, max_descriptors: int | None, max_bytes: int | None) -> Iterator[Plan]:
    """Cut into batches of at most ``max_descriptors`` descriptors and ``max_bytes`` bytes (None: no limit), order kept.

    A row above a limit is itself cut. What is within the limits comes back unchanged, and nothing at all for no rows, since a backend
    is never given an empty batch. Raises ``ConfigError`` for a limit below 1.
    """
    for what, limit in (("max_descriptors", max_descriptors), ("max_bytes", max_bytes)):
        if limit is not None and limit < 1:
            raise ConfigError(f"{what} is {limit}, which no batch can keep; declare at least 1, or None for no limit")
    rows = planned.first.length.size
    if not rows:
        return
    counted = rows if planned.count is None else int(planned.count.sum())
    if (max_descriptors is None or counted <= max_descriptors) and (max_bytes is None or total(planned.nbytes) <= max_bytes):
        yield planned
        return
    planned = _cut(planned, max_descriptors, max_bytes)
    rows, limits = len(planned), []
    if max_descriptors is not None:
        if planned.count is None:
            rows = max_descriptors
        else:
            limits.append((np.cumsum(planned.count, dtype=np.uint64), max_descriptors))
    if max_bytes is not None:
        limits.append((np.cumsum(planned.nbytes, dtype=np.uint64), max_bytes))
    start = 0
    while start < len(planned):
        stop = min(start + rows, len(planned))
        for ends, most in limits:
            done = int(ends[start - 1]) if start else 0
            stop = min(stop, int(np.searchsorted(ends, np.uint64(min(done + most, 2**64 - 1)), side="right")))
        yield planned[start:stop]
        start = stop


class _Runs(msgspec.Struct, frozen=True, eq=False):
    """Stretches of pages: first local and first remote page, and number of pages, each of shape ``(m,)``."""

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
    for pages in (local, remote):
        if pages.ndim != 1 or pages.dtype != np.int64:
            raise PageError(f"pool {shown(name)}: page indices are {pages.dtype} of shape {pages.shape}; pass one flat int64 array")
    if local.size != remote.size:
        raise PageError(f"pool {shown(name)}: {local.size} local pages are to go to {remote.size} remote pages; list one for one")
    check_pages(name, local, here.geometry.num_pages)
    check_pages(name, remote, there.geometry.num_pages)
    check_distinct(name, remote, there.geometry.num_pages)


def _runs(local: Indices, remote: Indices, merge: bool) -> _Runs:
    """In the order of the remote pages, which are distinct: so every pair that can be merged stands side by side, however it was listed."""
    if local.size == 1:
        return _Runs(local.astype(np.uint64), remote.astype(np.uint64), _ONE)
    order = np.argsort(remote, kind="stable")
    local, remote = local[order], remote[order]
    if not merge:
        return _Runs(local.astype(np.uint64), remote.astype(np.uint64), np.ones(local.size, np.uint64))
    breaks = (np.diff(local) != 1) | (np.diff(remote) != 1)
    starts = np.flatnonzero(np.concatenate((np.ones(min(local.size, 1), np.bool_), breaks)))
    counts = np.diff(starts, append=local.size)
    return _Runs(local[starts].astype(np.uint64), remote[starts].astype(np.uint64), counts.astype(np.uint64))


class _Rows(NamedTuple):
    """What a pool's part of a plan has of each region pair, whatever the pages: its two regions, and the bytes of a page in either."""

    local_region: I32
    remote_region: I32
    local_bytes: U64
    remote_bytes: U64


@functools.lru_cache(maxsize=1024)
def _rows(here: PoolPlace, there: PoolPlace, share: Share) -> _Rows:
    return _Rows(
        share.local_region + np.int32(here.first_region),
        share.remote_region + np.int32(there.first_region),
        here.page_bytes[share.local_region],
        there.page_bytes[share.remote_region],
    )


@functools.lru_cache(maxsize=1024)
def alike(here: PoolPlace, there: PoolPlace, share: Share) -> bool:
    """Whether page by page all of a pool goes to the pool of that name in the other's regions in the same places."""
    return here.geometry.name == there.geometry.name and share.is_all(here.page_bytes.size, there.page_bytes.size)


def _one_run(here: PoolPlace, there: PoolPlace, share: Share, runs: _Runs) -> Descriptors:
    """One run of whole pages, a descriptor for each region pair: most rooms of a few pages are this, and go without the general way."""
    rows = _rows(here, there, share)
    length = share.length if runs.count is _ONE else share.length * runs.count
    return Descriptors(rows.local_region, rows.remote_region, rows.local_bytes * runs.local, rows.remote_bytes * runs.remote, length)


def _broadcast(out: Plan, here: PoolPlace, there: PoolPlace, share: Share, runs: _Runs) -> None:
    first, shape, rows = out.first, (len(share), runs.count.size), _rows(here, there, share)
    first.local_region.reshape(shape)[:] = rows.local_region[:, None]
    first.remote_region.reshape(shape)[:] = rows.remote_region[:, None]
    for offset, pages, page_bytes, base in (
        (first.local_offset.reshape(shape), runs.local, rows.local_bytes, share.local_base),
        (first.remote_offset.reshape(shape), runs.remote, rows.remote_bytes, share.remote_base),
    ):
        np.multiply(page_bytes[:, None], pages, out=offset)
        if not share.whole:
            offset += base[:, None]
    np.multiply(share.length[:, None], runs.count, out=first.length.reshape(shape))
    if out.strides is not None:
        for column, value in (
            (out.strides.count, share.count),
            (out.strides.local, share.local_stride),
            (out.strides.remote, share.remote_stride),
        ):
            column.reshape(shape)[:] = value[:, None]


def _cut(planned: Plan, max_descriptors: int | None, max_bytes: int | None) -> Plan:
    """No row above a limit: written out if too many or too large together, its descriptors cut if one alone is too large."""
    if planned.count is not None and (
        (max_descriptors is not None and int(planned.count.max()) > max_descriptors)
        or (max_bytes is not None and int(planned.nbytes.max()) > max_bytes)
    ):
        planned = Plan(planned.descriptors())
    length = planned.first.length
    if max_bytes is None or int(length.max()) <= max_bytes:
        return planned
    step = np.uint64(max_bytes)
    pieces = (length - np.uint64(1)) // step + np.uint64(1)
    whole = np.repeat(np.arange(length.size), pieces.astype(np.int64))
    first = np.cumsum(pieces, dtype=np.uint64) - pieces
    skip = (np.arange(whole.size, dtype=np.uint64) - first[whole]) * step
    return Plan(planned.first[whole].further(skip, skip, np.minimum(length[whole] - skip, step)))
