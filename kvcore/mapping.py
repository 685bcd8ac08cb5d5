"""Which prefill rank writes which bytes of a page to which decode rank. Pure arithmetic on what the two sides state of themselves.

Both sides compute the same from the same facts: their sizes, what the pools hold, and the room's number, by which those take turns that
hold the same bytes. Every byte of a decode rank's page is written by exactly one prefill rank. Pipeline stages are matched by the layers
they have, so every stage of the one side meets every stage of the other, if only to find nothing to write.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcore.errors import shown
from kvcore.layouts import Heads, Opaque, PageLayout, Place, SideRecord, heads_of, holders_of
from kvcore.memory import PoolGeometry

U64 = npt.NDArray[np.uint64]
I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """What one prefill rank writes of a pool's pages to one decode rank: a row for each region pair, all arrays of shape ``(k,)``.

    Regions count from the pool's first. From ``local_base`` on in the page, ``count`` pieces of ``length`` bytes, ``local_stride``
    apart; in the other's page likewise. ``whole``: each row is all of the page on both sides.
    """

    local_region: I32
    remote_region: I32
    local_base: U64
    remote_base: U64
    count: U64
    local_stride: U64
    remote_stride: U64
    length: U64
    whole: bool
    straight: bool = field(init=False)
    """Each row leads to the region in the same place."""
    page_bytes: int = field(init=False)
    """Bytes of one page that it writes, in all regions."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "straight", bool(np.array_equal(self.local_region, self.remote_region)))
        object.__setattr__(self, "page_bytes", int((self.count * self.length).sum(dtype=np.uint64)))

    def __len__(self) -> int:
        return self.length.size

    def of_layers(self, layers: Sequence[int], wanted: range) -> Share:
        """Only some layers; ``layers`` has that of each region of the pool."""
        keep = np.array([layers[region] in wanted for region in self.local_region.tolist()], np.bool_)
        return Share(
            self.local_region[keep], self.remote_region[keep], self.local_base[keep], self.remote_base[keep],
            self.count[keep], self.local_stride[keep], self.remote_stride[keep], self.length[keep], self.whole,
        )  # fmt: skip

    def is_all(self, regions_here: int, regions_there: int) -> bool:
        """Whether it is all of each page, from every region to the one in the same place."""
        return self.whole and self.straight and len(self) == regions_here == regions_there

    @property
    def remote_rows(self) -> U64:
        """Of each row the remote region, the offset in its page and the bytes of one page: shape ``(k, 3)``."""
        return np.stack((self.remote_region.astype(np.uint64), self.remote_base, self.count * self.length), axis=1)


ITEM_BYTES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Of dtypes that pages come in; of others a page's length is not checked so closely."""

Pools = tuple[tuple[str, PageLayout], ...]
"""Names and layouts of the pools that prefill sends from, the same on both sides."""


def sent(pools: Iterable[PoolGeometry]) -> Pools:
    """The pools that are sent from, as either side knows them."""
    return tuple(dict.fromkeys((pool.source, pool.layout) for pool in pools))


def sources(pools: Pools, prefill: Place, decode: Place, turn: int) -> tuple[int, ...]:
    """The prefill ranks that a decode rank expects: those that write to it, the leader, and those that have nobody else."""
    return tuple(np.flatnonzero(_pairs(pools, _sizes(prefill), _sizes(decode), _turns(turn, prefill))[:, decode.rank]).tolist())


def destinations(pools: Pools, prefill: Place, decode: Place, turn: int) -> tuple[int, ...]:
    """The decode ranks that expect a prefill rank: the other direction of ``sources``."""
    return tuple(np.flatnonzero(_pairs(pools, _sizes(prefill), _sizes(decode), _turns(turn, prefill))[prefill.rank]).tolist())


def shares(mine: Sequence[PoolGeometry], theirs: Sequence[PoolGeometry], prefill: Place, decode: Place, turn: int) -> Mapping[str, Share]:
    """What this prefill rank (``mine``) writes to that decode rank (``theirs``), by pool there; without pools it writes nothing of.

    Raises ``ValueError`` in one line, with both values, if they cannot be mapped (T3).
    """
    here = {pool.name: pool for pool in mine if not pool.pairs_with}
    found = {pool.name: _share(here[pool.source], pool, prefill, decode, _turns(turn, prefill)) for pool in theirs if pool.source in here}
    return {name: share for name, share in found.items() if len(share)}


def whole(pools: Sequence[PoolGeometry]) -> Mapping[str, Share]:
    """All of each page, between two single ranks with like pools."""
    alone = Place()
    return shares(pools, pools, alone, alone, 0)


def why_not(mine: Sequence[PoolGeometry], theirs: Sequence[PoolGeometry], here: Place, there: Place) -> str | None:
    """Why pages cannot move between two ranks, one of each side, naming both values (T3); None if they can."""
    names, others = ({pool.source for pool in pools} for pools in (mine, theirs))
    if names != others:
        return f"pools {shown(sorted(names))} here and {shown(sorted(others))} there"
    for pool, other in itertools.product(mine, theirs):
        difference = _difference(pool, other, here, there) if pool.source == other.source else None
        if difference is not None:
            return f"pool {shown(pool.name)}{'' if pool.name == other.name else f' and {shown(other.name)}'}: {difference}"
    return None


def not_once(decode: Sequence[PoolGeometry], incoming: Sequence[Mapping[str, Share]]) -> str | None:
    """The layer of a decode rank that prefill ranks, by what each writes there, do not write once, in words; None if there is none."""
    for pool in decode:
        written = [shares[pool.name] for shares in incoming if pool.name in shares]
        rows = np.concatenate([np.empty((0, 3), np.uint64), *(share.remote_rows for share in written)])
        for number, page_bytes in enumerate(pool.page_bytes):
            here = rows[rows[:, 0] == number]
            found, twice = int(here[:, 2].sum()), np.unique(here[:, 1]).size < len(here)
            if twice or found != page_bytes:
                how = "more than once" if twice or found > page_bytes else "in part" if found else "not at all"
                return f"pool {shown(pool.name)}: prefill writes layer {pool.layers[number]} {how}"
    return None


def check_rank(pool: PoolGeometry, place: Place) -> None:
    """Raise ``ValueError`` in one line unless a rank's pages are as long as its layout says."""
    if not isinstance(pool.layout, Heads):
        return
    heads = len(heads_of(pool.layout, place.tp_size, place.tp_rank))
    cells = pool.page_size * heads * pool.layout.dim
    item = ITEM_BYTES.get(pool.dtype, 0)
    for number, page_bytes in enumerate(pool.page_bytes):
        if page_bytes % cells or (item and page_bytes != cells * item):
            raise ValueError(
                f"region {number} has pages of {page_bytes} bytes, and {pool.page_size} tokens x {heads} heads of {pool.layout.dim}"
                f"{f' in {pool.dtype} are {cells * item}' if item else ' do not divide them'} "
                f"(tp rank {place.tp_rank} of {place.tp_size}, {pool.layout.total} heads in all)"
            )


# --- who writes to whom


def _sizes(place: Place) -> tuple[int, int]:
    return place.tp_size, place.pp_size


def _turns(turn: int, prefill: Place) -> int:
    """As many turns as there are ranks to take them."""
    return turn % prefill.tp_size


@functools.lru_cache(1024)
def _pairs(pools: Pools, prefill: tuple[int, int], decode: tuple[int, int], turn: int) -> npt.NDArray[np.bool_]:
    """Which prefill rank (row) has to do with which decode rank (column)."""
    met = np.zeros((prefill[0], decode[0]), np.bool_)
    for _, layout in pools:
        for there, writers in enumerate(_writers(layout, prefill[0], decode[0], turn)):
            met[[writer for writer, _ in writers], there] = True
    pairs = np.tile(met, (prefill[1], decode[1]))
    pairs[0] = True  # the leader, which passes failures on
    for rank in np.flatnonzero(~pairs.any(axis=1)):
        pairs[rank, rank % pairs.shape[1]] = True
    return pairs


@functools.lru_cache(1024)
def _writers(layout: PageLayout, prefill: int, decode: int, turn: int) -> tuple[tuple[tuple[int, range], ...], ...]:
    """For each decode tensor-parallel rank the prefill ones that write to it, with the heads that each writes (none: the whole page)."""
    if isinstance(layout, Heads):
        return tuple(tuple(_head_writers(layout, prefill, decode, rank, turn)) for rank in range(decode))
    if isinstance(layout, Opaque):
        if prefill != decode:
            raise ValueError(f"an opaque page needs tp sizes that are equal, and they are {prefill} and {decode}; state the pool's layout")
        return tuple(((rank, range(0)),) for rank in range(decode))
    per = max(1, prefill // decode)
    return tuple(((rank * prefill // decode + turn % per, range(0)),) for rank in range(decode))


def _head_writers(layout: Heads, prefill: int, decode: int, rank: int, turn: int) -> Iterator[tuple[int, range]]:
    """The writers of one decode rank's heads, each with a run of them. Of ranks that hold the same head each serves as many."""
    heads_of(layout, prefill, 0)  # or they cannot be shared out
    run: tuple[int, range] | None = None
    for head in heads_of(layout, decode, rank):
        holders, alike = holders_of(layout, prefill, head), holders_of(layout, decode, head)
        writer = holders[(alike.index(rank) * len(holders) // len(alike) + turn) % len(holders)]
        if run is not None and run[0] == writer:
            run = writer, range(run[1].start, head + 1)
            continue
        if run is not None:
            yield run
        run = writer, range(head, head + 1)
    if run is not None:
        yield run


# --- which bytes


def _difference(pool: PoolGeometry, other: PoolGeometry, here: Place, there: Place) -> str | None:
    """What no mapping of ranks bridges, or what leaves no mapping."""
    for what in ("page_size", "dtype", "layout"):
        mine, theirs = getattr(pool, what), getattr(other, what)
        if mine != theirs:
            return f"{what} is {shown(mine)} here and {shown(theirs)} there"
    try:
        _writers(pool.layout, here.tp_size, there.tp_size, 0)
        _writers(pool.layout, there.tp_size, here.tp_size, 0)
        check_rank(pool, here)
        check_rank(other, there)
    except ValueError as error:
        return str(error)
    ours, its = (
        dict(zip(_keys(pool), _unit_bytes(pool, here), strict=True)),
        dict(zip(_keys(other), _unit_bytes(other, there), strict=True)),
    )
    if (there.pp_size == 1 and ours.keys() - its) or (here.pp_size == 1 and its.keys() - ours):
        for what in ("layers", "parts"):
            mine, theirs = getattr(pool, what), getattr(other, what)
            if sorted(mine) != sorted(theirs):
                return f"{what} is {_short(mine)} here and {_short(theirs)} there"
        return f"layers and parts are {_short(tuple(ours))} here and {_short(tuple(its))} there"
    unlike = next((key for key in ours if its.get(key, ours[key]) != ours[key]), None)
    if unlike is not None:
        of = "page_bytes of a head" if isinstance(pool.layout, Heads) else "page_bytes"
        return f"{of} of layer {unlike[0]} is {ours[unlike]} here and {its[unlike]} there"
    return None


def _short(values: tuple[object, ...]) -> str:
    return f"{len(values)} entries starting {shown(values[:2])}" if len(values) > 4 else shown(values)


def _unit_bytes(pool: PoolGeometry, place: Place) -> list[int]:
    """What must be equal on both sides: bytes of one head of a page, or of the whole page."""
    if not isinstance(pool.layout, Heads):
        return list(pool.page_bytes)
    return [page_bytes // len(heads_of(pool.layout, place.tp_size, place.tp_rank)) for page_bytes in pool.page_bytes]


def _keys(pool: PoolGeometry) -> list[tuple[int, str, int]]:
    """What the regions are matched by: layer, part, and of those that have both alike their order."""
    if isinstance(pool.layout, SideRecord):
        return [(0, "", number) for number in range(len(pool.page_bytes))]
    seen: dict[tuple[int, str], int] = {}
    keys = []
    for key in zip(pool.layers, pool.parts, strict=True):
        seen[key] = seen.get(key, -1) + 1
        keys.append((*key, seen[key]))
    return keys


def _share(mine: PoolGeometry, theirs: PoolGeometry, prefill: Place, decode: Place, turn: int) -> Share:
    runs = [heads for writer, heads in _writers(mine.layout, *_tp(prefill, decode), turn)[decode.tp_rank] if writer == prefill.tp_rank]
    if isinstance(mine.layout, SideRecord) and prefill.pp_rank != prefill.pp_size - 1:
        runs = []
    at = {key: number for number, key in enumerate(_keys(theirs))}
    rows = [(number, at[key], heads) for number, key in enumerate(_keys(mine)) if key in at for heads in runs]
    local = np.array([row[0] for row in rows], np.int32)
    remote = np.array([row[1] for row in rows], np.int32)
    size = np.array(mine.page_bytes, np.uint64)[local]
    zero, one = np.zeros(local.size, np.uint64), np.ones(local.size, np.uint64)
    if not isinstance(mine.layout, Heads):
        return Share(local, remote, zero, zero, one, zero, zero, size, whole=True)
    ours, its = (heads_of(mine.layout, place.tp_size, place.tp_rank) for place in (prefill, decode))
    first, many = (np.array([value(row[2]) for row in rows], np.uint64) for value in (lambda heads: heads.start, len))
    here, there = first - np.uint64(ours.start), first - np.uint64(its.start)
    head = size // np.uint64(len(ours))  # bytes of one head in a page
    if (len(ours) == len(its)) and bool((many == len(ours)).all()):
        return Share(local, remote, zero, zero, one, zero, zero, size, whole=True)
    if mine.layout.order == "head":
        return Share(local, remote, here * head, there * head, one, zero, zero, many * head, whole=False)
    tokens = np.uint64(mine.page_size)
    cell = head // tokens  # bytes of one head of one token
    strides = cell * np.uint64(len(ours)), cell * np.uint64(len(its))
    return Share(local, remote, here * cell, there * cell, one * tokens, *strides, many * cell, whole=False)


def _tp(prefill: Place, decode: Place) -> tuple[int, int]:
    return prefill.tp_size, decode.tp_size
