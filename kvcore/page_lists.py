"""All pages of a pool in one fixed order, for engines that prepare a list of descriptors once and then pick from it by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcore.memory import Indices, PoolGeometry, Region


@dataclass(frozen=True, slots=True, eq=False)
class PageList:
    """A pool's pages, region by region. ``address`` and ``length`` in bytes: uint64 of shape ``(regions * num_pages,)``."""

    address: npt.NDArray[np.uint64]
    length: npt.NDArray[np.uint64]
    num_pages: int
    regions: tuple[Region, ...]
    first: npt.NDArray[np.int32] = field(init=False)
    """Where the first page of each region stands: shape ``(regions, 1)``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "first", np.arange(len(self.regions), dtype=np.int32)[:, None] * np.int32(self.num_pages))

    def __len__(self) -> int:
        return self.length.size

    def positions(self, pages: Indices) -> npt.NDArray[np.int32]:
        """Where these pages of every region stand: int32 of shape ``(regions * pages.size,)``, in the same order on both sides."""
        return (self.first + pages.astype(np.int32)).reshape(-1)


def page_lists(pools: Sequence[PoolGeometry], regions: Sequence[Region], most: int) -> dict[str, PageList]:
    """The page list of each pool by name, as ``OpenContext`` or ``Peer`` and the registered regions describe them.

    A pool of more than ``most`` entries (at most 2**31-1) is left out; its pages come as plain descriptors.
    """
    lists: dict[str, PageList] = {}
    first = 0
    for pool in pools:
        mine = tuple(regions[first : first + len(pool.page_bytes)])
        first += len(mine)
        if len(mine) * pool.num_pages > min(most, np.iinfo(np.int32).max):
            continue
        length = np.array(pool.page_bytes, np.uint64)
        base = np.array([region.ptr for region in mine], np.uint64)
        address = np.empty((len(mine), pool.num_pages), np.uint64)
        np.multiply(length[:, None], np.arange(pool.num_pages, dtype=np.uint64), out=address)
        address += base[:, None]
        lists[pool.name] = PageList(address.reshape(-1), np.repeat(length, pool.num_pages), pool.num_pages, mine)
    return lists
