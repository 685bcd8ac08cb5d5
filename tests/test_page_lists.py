"""All pages of a pool in one order, for engines with prepared lists."""

from __future__ import annotations

import numpy as np
import pytest

from kvcore import Pool, Region
from kvcore.page_lists import page_lists

KV = Pool("kv", [Region(4096, 8 * 16), Region(2**64 - 2**20, 8 * 32)], num_pages=8, page_size=1)
AUX = Pool("aux", [Region(512, 4 * 8)], num_pages=4, page_size=1)
POOLS, REGIONS = (KV.geometry, AUX.geometry), (*KV.regions, *AUX.regions)


def test_positions_name_the_same_page_of_every_region() -> None:
    kv = page_lists(POOLS, REGIONS, 100)["kv"]
    at = kv.positions(np.array([7, 0]))
    assert at.dtype == np.int32
    assert kv.address[at].tolist() == [4096 + 7 * 16, 4096, 2**64 - 2**20 + 7 * 32, 2**64 - 2**20]
    assert kv.length[at].tolist() == [16, 16, 32, 32]


def test_each_pool_begins_with_its_own_regions() -> None:
    aux = page_lists(POOLS, REGIONS, 100)["aux"]
    assert aux.address.tolist() == [512, 520, 528, 536]
    assert aux.regions == AUX.regions


@pytest.mark.parametrize(("most", "names"), [(16, {"kv", "aux"}), (15, {"aux"}), (3, set())])
def test_a_pool_that_is_too_large_is_left_out(most: int, names: set[str]) -> None:
    assert set(page_lists(POOLS, REGIONS, most)) == names
