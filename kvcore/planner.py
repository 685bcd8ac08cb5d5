"""From page indices to descriptors: which bytes of which region go where. Pure arithmetic, no I/O.

The i-th local page goes to the i-th remote page in every region of its pool (T1). Runs of pages contiguous on both sides are found
once per pool and broadcast over the pool's regions; nothing loops over pages or layers in Python. Where ranks are unlike, a page goes in
strides (``mapping``), which are written out batch by batch. Offsets are exact: a ``Layout``
holds only regions that end within 64 bits, and a page inside its pool's bound lies inside its region (T2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcore.errors import ConfigError, IncompatiblePeerError, PageError, shown
from kvcore.mapping import Share
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


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Descriptors in strided form, arrays of shape ``(n,)``: row i stands for ``count[i]`` of ``length[i]`` bytes, the first at the two
    offsets and each next one a stride further. Sorted by region pair and within it by remote offset; no length is zero."""

    local_region: I32
    remote_region: I32
    local_offset: U64
    remote_offset: U64
    count: U64
    local_stride: U64
    remote_stride: U64
    length: U64

    def __len__(self) -> int:
        return self.length.size

    @classmethod
    def empty(cls, size: int) -> Plan:
        """Room for so many rows."""
        regions, numbers = np.empty((2, size), np.int32), np.empty((6, size), np.uint64)
        return cls(regions[0], regions[1], *numbers)

    def part(self, start: int, stop: int) -> Plan:
        """Rows ``start .. stop-1``, as views."""
        cut = slice(start, stop)
        return Plan(
            self.local_region[cut], self.remote_region[cut], self.local_offset[cut], self.remote_offset[cut],
            self.count[cut], self.local_stride[cut], self.remote_stride[cut], self.length[cut],
        )  # fmt: skip

    @classmethod
    def of(cls, each: Descriptors) -> Plan:
        """A row for each descriptor."""
        zero, one = np.zeros(len(each), np.uint64), np.ones(len(each), np.uint64)
        return cls(each.local_region, each.remote_region, each.local_offset, each.remote_offset, one, zero, zero, each.length)

    def descriptors(self) -> Descriptors:
        """Each row written out."""
        if self.count.size == 0 or int(self.count.max()) == 1:
            return Descriptors(self.local_region, self.remote_region, self.local_offset, self.remote_offset, self.length)
        row = np.repeat(np.arange(len(self)), self.count.astype(np.int64))
        first = np.cumsum(self.count, dtype=np.uint64) - self.count
        number: U64 = np.arange(row.size, dtype=np.uint64) - first[row]
        return Descriptors(
            self.local_region[row],
            self.remote_region[row],
            self.local_offset[row] + number * self.local_stride[row],
            self.remote_offset[row] + number * self.remote_stride[row],
            self.length[row],
        )


def plan(local: Layout, remote: Layout, pages: Mapping[str, tuple[Indices, Indices]], shares: Mapping[str, Share]) -> Plan:
    """What copies, pool by pool, this rank's share of the i-th local page to the i-th remote page in every region (T1).

    ``pages`` are such as ``check`` lets pass; of a pool without a share nothing is copied.
    """
    work = []
    for name, (mine, theirs) in pages.items():
        if name in shares:
            work.append((_place(local, name), _place(remote, name), shares[name], _runs(mine, theirs, shares[name].whole)))
    work.sort(key=lambda item: item[0].first_region)
    out = Plan.empty(sum(len(share) * runs.count.size for _, _, share, runs in work))
    start = 0
    for here, there, share, runs in work:
        stop = start + len(share) * runs.count.size
        _broadcast(out.part(start, stop), here, there, share, runs)
        start = stop
    return out


def check(local: Layout, remote: Layout, pages: Mapping[str, tuple[Indices, Indices]]) -> None:
    """Raise ``PageError`` unless ``pages`` maps pools to local and remote page indices, two int64 arrays of one shape ``(n,)``.

    Names pool, index and bound of indices that either side does not have, of a remote page named twice and of unequal numbers (T2).
    """
    for name, (mine, theirs) in pages.items():
        _check_pair(_place(local, name), _place(remote, name), mine, theirs)


def check_listed(remote: Layout, listed: Mapping[str, Indices]) -> None:
    """Raise ``PageError`` unless all that a destination lists, for whatever chunk, are pages of the peer's pools, each once (T1, T2)."""
    for name, pages in listed.items():
        num_pages = _place(remote, name).geometry.num_pages
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
    if not len(planned):
        return
    planned = _cut(planned, max_descriptors, max_bytes)
    limits = [(np.cumsum(planned.count, dtype=np.uint64), max_descriptors)]
    limits += [(np.cumsum(planned.count * planned.length, dtype=np.uint64), max_bytes)]
    start = 0
    while start < len(planned):
        stop = len(planned)
        for ends, most in limits:
            if most is not None:
                done = int(ends[start - 1]) if start else 0
                stop = min(stop, int(np.searchsorted(ends, np.uint64(min(done + most, 2**64 - 1)), side="right")))
        yield planned.part(start, stop) if (start, stop) != (0, len(planned)) else planned
        start = stop


@dataclass(frozen=True, slots=True, eq=False)
class _Runs:
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
    order = np.argsort(remote, kind="stable")
    local, remote = local[order], remote[order]
    if not merge:
        return _Runs(local.astype(np.uint64), remote.astype(np.uint64), np.ones(local.size, np.uint64))
    breaks = (np.diff(local) != 1) | (np.diff(remote) != 1)
    starts = np.flatnonzero(np.concatenate((np.ones(min(local.size, 1), np.bool_), breaks)))
    counts = np.diff(starts, append=local.size)
    return _Runs(local[starts].astype(np.uint64), remote[starts].astype(np.uint64), counts.astype(np.uint64))


def _broadcast(out: Plan, here: PoolPlace, there: PoolPlace, share: Share, runs: _Runs) -> None:
    shape = len(share), runs.count.size
    out.local_region.reshape(shape)[:] = (share.local_region + np.int32(here.first_region))[:, None]
    out.remote_region.reshape(shape)[:] = (share.remote_region + np.int32(there.first_region))[:, None]
    for offset, pages, page_bytes, base in (
        (out.local_offset.reshape(shape), runs.local, here.page_bytes[share.local_region], share.local_base),
        (out.remote_offset.reshape(shape), runs.remote, there.page_bytes[share.remote_region], share.remote_base),
    ):
        np.multiply(page_bytes[:, None], pages, out=offset)
        offset += base[:, None]
    for column, value in ((out.count, share.count), (out.local_stride, share.local_stride), (out.remote_stride, share.remote_stride)):
        column.reshape(shape)[:] = value[:, None]
    np.multiply(share.length[:, None], runs.count, out=out.length.reshape(shape))


def _cut(planned: Plan, max_descriptors: int | None, max_bytes: int | None) -> Plan:
    """No row above a limit: written out if too many or too large together, its descriptors cut if one alone is too large."""
    too_many = max_descriptors is not None and int(planned.count.max()) > max_descriptors
    too_large = max_bytes is not None and int((planned.count * planned.length).max()) > max_bytes
    if too_many or too_large:
        planned = Plan.of(planned.descriptors())
    if max_bytes is None or int(planned.length.max()) <= max_bytes:
        return planned
    step = np.uint64(max_bytes)
    pieces = (planned.length - np.uint64(1)) // step + np.uint64(1)
    whole = np.repeat(np.arange(len(planned)), pieces.astype(np.int64))
    first = np.cumsum(pieces, dtype=np.uint64) - pieces
    skip = (np.arange(whole.size, dtype=np.uint64) - first[whole]) * step
    return Plan.of(
        Descriptors(
            planned.local_region[whole],
            planned.remote_region[whole],
            planned.local_offset[whole] + skip,
            planned.remote_offset[whole] + skip,
            np.minimum(planned.length[whole] - skip, step),
        )
    )
