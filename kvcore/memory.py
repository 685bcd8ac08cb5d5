"""Pools: the KV memory an allocator hands out in pages, and how it is described to a peer."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvcore.errors import MOST_CAUSE, MOST_SHOWN, ConfigError, PageError, one_line, shown
from kvcore.layouts import OPAQUE, Heads, Latent, Opaque, PageLayout, SideRecord

T = TypeVar("T")
Indices = npt.NDArray[np.int64]
FEW, DENSE = 16, 16
_BOOLS = frozenset((bool, np.bool_))


@dataclass(frozen=True, slots=True)
class Region:
    """A stretch of memory to be registered: address and length in bytes, the device it is on, and which part of the cache it is."""

    ptr: int
    nbytes: int
    device: str = "cpu:0"
    layer: int = 0
    part: str = ""

    def __str__(self) -> str:
        return f"region of {self.nbytes} bytes at {self.ptr:#x} on {self.device}"


class PoolGeometry(msgspec.Struct, frozen=True):
    """What a pool is, as a peer is told. ``page_bytes``, ``layers`` and ``parts`` have one entry per region."""

    name: str
    num_pages: int
    page_size: int
    dtype: str
    page_bytes: tuple[int, ...]
    layers: tuple[int, ...]
    parts: tuple[str, ...]
    layout: PageLayout = OPAQUE
    pairs_with: str = ""

    def __post_init__(self) -> None:
        if not len(self.page_bytes) == len(self.layers) == len(self.parts):
            raise ValueError("page_bytes, layers and parts are not of one length")

    @property
    def source(self) -> str:
        """The name of the pool whose pages it takes."""
        return self.pairs_with or self.name


class Pool:
    """A set of equally long regions addressed by one page index; one page is one slice of each region.

    ``page_size`` is the number of tokens in a page, ``layout`` what it holds. ``dtype`` is only compared with the peer's ("" = not stated).
    ``pairs_with``: it receives the pages of the sender's pool of that name, in place of one so named here (as a host pool may), and is not
    sent from. Raises ``ConfigError`` if a region does not divide into ``num_pages`` equal pages.
    """

    def __init__(
        self,
        name: str,
        regions: Sequence[Region],
        *,
        num_pages: int,
        page_size: int,
        dtype: str = "",
        layout: PageLayout = OPAQUE,
        pairs_with: str = "",
        owners: Sequence[object] = (),
    ) -> None:
        _positive(name, "num_pages", num_pages)
        _positive(name, "page_size", page_size)
        if num_pages > np.iinfo(np.int32).max:
            raise ConfigError(f"pool {shown(name)}: {num_pages} pages are more than an index of 31 bits names; split the pool")
        if not all(isinstance(word, str) for word in (name, dtype, pairs_with)):
            raise ConfigError(f"pool {shown(name)}: name, dtype {shown(dtype)} and pairs_with {shown(pairs_with)} must be text")
        if pairs_with and pairs_with == name:
            raise ConfigError(f"pool {shown(name)}: pairs_with is its own name; leave it out, or name the pool whose pages it takes")
        regions = [_plain(name, number, region) for number, region in enumerate(_listed(name, "regions", regions))]
        if not isinstance(layout, Heads | Latent | SideRecord | Opaque):
            raise ConfigError(f"pool {shown(name)}: layout is {shown(layout)}; pass kvcore.Heads, Latent, SideRecord or Opaque")
        if not name or not regions:
            raise ConfigError(f"pool {shown(name)}: it has {len(regions)} regions; give it a name and at least one region")
        for number, region in enumerate(regions):
            if region.nbytes <= 0 or region.nbytes % num_pages:
                raise ConfigError(
                    f"pool {shown(name)}: region {number} has {region.nbytes} bytes, not a multiple of {num_pages} pages; "
                    "allocate whole pages"
                )
            if not 0 < region.ptr <= 2**64 - region.nbytes:
                raise ConfigError(
                    f"pool {shown(name)}: region {number} at {region.ptr:#x} with {region.nbytes} bytes is outside the 64-bit range; "
                    "pass the address of allocated memory"
                )
        self.name = str(name)
        self.regions: tuple[Region, ...] = tuple(regions)
        self.num_pages = int(num_pages)
        self.page_size = int(page_size)
        self.dtype = str(dtype)
        self.layout = layout
        self.pairs_with = str(pairs_with)
        self.layers = tuple(sorted({region.layer for region in regions}))
        """Ids of the layers it has."""
        self.page_bytes = sum(region.nbytes for region in regions) // num_pages
        """Bytes of one page, in all regions together."""
        self._owners = tuple(owners)  # keeps the memory alive as long as the pool

    @classmethod
    def from_tensors(
        cls,
        name: str,
        tensors: Sequence[Any],
        *,
        page_size: int,
        rows: Literal["page", "token"] = "page",
        part: str = "",
        layers: Sequence[int] | None = None,
        layout: PageLayout = OPAQUE,
        pairs_with: str = "",
    ) -> Pool:
        """A pool over torch tensors or numpy arrays of shape ``[num_pages, ...]``, one region each, of the ``layers`` named or of 0, 1, ….

        With ``rows="token"`` the first axis counts tokens and a page is ``page_size`` rows.
        Raises ``ConfigError`` for tensors that are not contiguous, or differ in length or dtype.
        """
        tensors = _listed(name, "tensors", tensors)
        if not tensors:
            raise ConfigError(f"pool {shown(name)}: no tensors given; pass one per layer and part")
        length, dtype = _length(name, 0, tensors[0]), str(tensors[0].dtype).removeprefix("torch.")
        layers = list(range(len(tensors))) if layers is None else _listed(name, "layers", layers)
        if len(layers) != len(tensors):
            raise ConfigError(f"pool {shown(name)}: {len(layers)} layers are named for {len(tensors)} tensors; name one for each")
        regions = []
        for number, tensor in enumerate(tensors):
            region, rows_here, dtype_here = _region(name, number, tensor, layers[number], part)
            if rows_here != length:
                raise ConfigError(
                    f"pool {shown(name)}: tensor {number} has {rows_here} rows and tensor 0 has {length}; "
                    "give all as many, for one page index"
                )
            if dtype_here != dtype:
                raise ConfigError(
                    f"pool {shown(name)}: tensor {number} is {dtype_here} and tensor 0 is {dtype}; put them in separate pools"
                )
            regions.append(region)
        if not isinstance(rows, str) or rows not in ("page", "token"):
            raise ConfigError(f"pool {shown(name)}: rows must be 'page' or 'token', got {shown(rows)}")
        num_pages, rest = (length, 0) if rows == "page" else divmod(length, _positive(name, "page_size", page_size))
        if rest or num_pages < 1:
            raise ConfigError(f"pool {shown(name)}: {length} token rows are not whole pages of {page_size}; allocate a multiple")
        return cls(
            name, regions, num_pages=num_pages, page_size=page_size, dtype=dtype, layout=layout, pairs_with=pairs_with, owners=tensors
        )

    @property
    def geometry(self) -> PoolGeometry:
        """What is compared with a peer's pool, and what it is compared by."""
        return PoolGeometry(
            self.name,
            self.num_pages,
            self.page_size,
            self.dtype,
            tuple(region.nbytes // self.num_pages for region in self.regions),
            tuple(region.layer for region in self.regions),
            tuple(region.part for region in self.regions),
            self.layout,
            self.pairs_with,
        )

    @property
    def source(self) -> str:
        """The name of the sender's pool whose pages it takes."""
        return self.pairs_with or self.name

    def indices(self, pages: Iterable[int] | npt.ArrayLike) -> Indices:
        """A private copy of page indices as int64 of shape ``(n,)``; raises ``PageError`` naming the bad index and the bound (T2)."""
        array = _integers(self.name, pages, self.num_pages)
        check_pages(self.name, array, self.num_pages)
        return array


def by_name(pools: Iterable[Pool]) -> dict[str, Pool]:
    """A manager's pools by name; raises ``ConfigError`` unless they are a list of pools, each with a name of its own, and none pairs with
    one that itself only receives."""
    listed = list(pools) if isinstance(pools, Iterable) else []
    if not isinstance(pools, Iterable) or not all(isinstance(pool, Pool) for pool in listed):
        raise ConfigError(f"pools is {shown(pools)}; pass a list of kvcore.Pool")
    named = {pool.name: pool for pool in listed}
    if not named or len(named) != len(listed):
        raise ConfigError(f"pools are named {shown([pool.name for pool in listed])}; give at least one pool, each with a name of its own")
    for pool in listed:
        if pool.source in named and named[pool.source].pairs_with:
            raise ConfigError(f"pool {shown(pool.name)} pairs with {shown(pool.source)}, which is not sent from; name a pool that is")
    return named


def total(numbers: npt.NDArray[np.uint64]) -> int:
    """The sum. Of few it is taken in Python: numpy needs 5 us to begin."""
    return sum(numbers.tolist()) if numbers.size <= FEW else int(numbers.sum(dtype=np.uint64))


def check_pages(name: str, pages: Indices, num_pages: int) -> None:
    """Raise ``PageError`` unless every index is in ``0 .. num_pages-1`` (T2)."""
    if pages.size <= FEW:
        outside = any(not 0 <= page < num_pages for page in pages.tolist())
    else:
        outside = int(pages.view(np.uint64).max()) >= num_pages  # one below 0 is a large one so
    if outside:
        bad = pages[(pages < 0) | (pages >= num_pages)][0]
        raise PageError(
            f"pool {shown(name)}: page index {bad} is not in 0 .. {num_pages - 1}; pass physical page indices, not token or logical ones"
        )


def check_distinct(name: str, pages: Indices, num_pages: int) -> None:
    """Raise ``PageError`` if a page is named twice: two pages of the sender would land on one (T1)."""
    if pages.size < 2 or bool((np.diff(pages) > 0).all()):
        return
    if num_pages <= DENSE * pages.size:  # a mark for each page of the pool costs less than sorting, and at most 16 bytes a page listed
        marks = np.zeros(num_pages, np.bool_)
        marks[pages] = True
        if int(np.count_nonzero(marks)) == pages.size:
            return
    ordered = np.sort(pages)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        raise PageError(f"pool {shown(name)}: page index {twice[0]} is listed twice (pool has {num_pages} pages); list each page once")


def _integers(name: str, pages: Iterable[int] | npt.ArrayLike, num_pages: int) -> Indices:
    try:
        if not isinstance(pages, np.ndarray) and type(pages).__module__.partition(".")[0] == "torch":
            pages = pages.detach().cpu().numpy()  # type: ignore[union-attr]
        given = pages if isinstance(pages, np.ndarray) else list(pages)  # type: ignore[arg-type]
        array = np.asarray(given)
    except (TypeError, ValueError, AttributeError) as error:
        what = type(pages).__name__
        raise PageError(
            f"pool {shown(name)}: a {what} is not a list of page indices ({one_line(error, MOST_CAUSE)}); pass one flat list of integers"
        ) from error
    if array.ndim != 1:
        raise PageError(f"pool {shown(name)}: page indices have shape {array.shape}; pass one flat list")
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu" or _has_bools(given) or (array.dtype == np.uint64 and int(array.max()) > np.iinfo(np.int64).max):
        wrong = (page for page in given if not isinstance(page, (int, np.integer)) or isinstance(page, bool) or not 0 <= page < num_pages)
        bad = next(wrong, given[0])
        what = f"page index {shown(str(bad) if isinstance(bad, str) else one_line(bad, MOST_SHOWN))} ({array.dtype})"
        raise PageError(f"pool {shown(name)}: {what} is not an integer in 0 .. {num_pages - 1}; pass physical page indices")
    return array.astype(np.int64)


def _has_bools(given: object) -> bool:
    """Whether a list has bools among its integers; in an array of integers there are none."""
    return isinstance(given, list) and not _BOOLS.isdisjoint(map(type, given))


def _listed(name: str, what: str, given: Iterable[T]) -> list[T]:
    if not isinstance(given, Iterable):
        raise ConfigError(f"pool {shown(name)}: {what} is {shown(given)}; pass a list")
    return list(given)


def _plain(name: str, number: int, region: Region) -> Region:
    """The region in plain numbers, as it travels, whatever kind of integers it was given in."""
    if not isinstance(region, Region):
        raise ConfigError(f"pool {shown(name)}: region {number} is {shown(region)}; pass a kvcore.Region")
    if not isinstance(region.device, str) or not isinstance(region.part, str):
        raise ConfigError(
            f"pool {shown(name)}: region {number} has device {shown(region.device)} and part {shown(region.part)}; pass text for both"
        )
    try:
        ptr, nbytes, layer = (operator.index(value) for value in (region.ptr, region.nbytes, region.layer))
    except TypeError as error:
        raise ConfigError(
            f"pool {shown(name)}: region {number}: {one_line(error, MOST_CAUSE)}; pass integers for ptr, nbytes and layer"
        ) from error
    if not 0 <= layer < 2**31:
        raise ConfigError(f"pool {shown(name)}: region {number} is of layer {layer}; pass a layer id in 0 .. 2**31-1")
    return Region(ptr, nbytes, str(region.device), layer, str(region.part))


def _positive(name: str, what: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"pool {shown(name)}: {what} must be an integer of at least 1, got {shown(value)}")
    return value


def _length(name: str, number: int, tensor: Any) -> int:
    if not isinstance(tensor, np.ndarray) and not callable(getattr(tensor, "data_ptr", None)):
        raise ConfigError(f"pool {shown(name)}: tensor {number} is a {type(tensor).__name__}; pass torch tensors or numpy arrays")
    if getattr(tensor, "ndim", 0) < 1:
        raise ConfigError(f"pool {shown(name)}: tensor {number} has no axis to count pages along; pass tensors of shape [num_pages, ...]")
    return int(tensor.shape[0])


def _region(name: str, number: int, tensor: Any, layer: int, part: str) -> tuple[Region, int, str]:
    length = _length(name, number, tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if isinstance(tensor, np.ndarray):
        if tensor.dtype.hasobject:
            raise ConfigError(f"pool {shown(name)}: tensor {number} holds Python objects, which mean nothing elsewhere; use a number dtype")
        if not tensor.flags.c_contiguous or not tensor.flags.writeable:
            raise ConfigError(f"pool {shown(name)}: tensor {number} is not contiguous and writable; allocate it whole, do not pass a view")
        return Region(int(tensor.ctypes.data), int(tensor.nbytes), "cpu:0", layer, part), length, dtype
    if not tensor.is_contiguous():
        raise ConfigError(f"pool {shown(name)}: tensor {number} is not contiguous; allocate it whole, do not pass a view")
    device = f"{tensor.device.type}:{tensor.device.index or 0}"
    return Region(int(tensor.data_ptr()), int(tensor.nbytes), device, layer, part), length, dtype
