"""Pools over torch tensors, numpy arrays and bare regions; what they refuse; page indices."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kvcore.errors import ConfigError, KVCoreError, PageError
from kvcore.memory import Pool, PoolGeometry, Region, check_distinct, check_pages


def pool(num_pages: int = 8) -> Pool:
    return Pool("kv", [Region(4096, num_pages * 64)], num_pages=num_pages, page_size=16)


def test_a_pool_of_numpy_arrays_has_a_region_a_layer() -> None:
    arrays = [np.zeros((6, 16, 2), np.float32) for _ in range(3)]
    made = Pool.from_tensors("kv", arrays, page_size=16, part="k")
    assert made.regions == tuple(Region(array.ctypes.data, 6 * 128, "cpu:0", layer, "k") for layer, array in enumerate(arrays))
    assert made.geometry == PoolGeometry("kv", 6, 16, "float32", (128, 128, 128), (0, 1, 2), ("k", "k", "k"))


def test_torch_and_numpy_describe_one_memory_alike() -> None:
    tensors = [torch.zeros((6, 16, 2), dtype=torch.float16) for _ in range(2)]
    of_torch = Pool.from_tensors("kv", tensors, page_size=16)
    of_numpy = Pool.from_tensors("kv", [tensor.numpy() for tensor in tensors], page_size=16)
    assert of_torch.regions == of_numpy.regions
    assert of_torch.geometry == of_numpy.geometry
    assert [region.ptr for region in of_torch.regions] == [tensor.data_ptr() for tensor in tensors]


def test_dtypes_that_numpy_lacks_are_named_as_torch_names_them() -> None:
    made = Pool.from_tensors("kv", [torch.zeros((4, 8), dtype=torch.bfloat16)], page_size=1)
    assert made.dtype == "bfloat16" and made.geometry.page_bytes == (16,)


def test_rows_of_tokens_are_gathered_into_pages() -> None:
    made = Pool.from_tensors("kv", [np.zeros((64, 4), np.float16)], page_size=16, rows="token")
    assert made.num_pages == 4 and made.geometry.page_bytes == (16 * 8,)


def test_tensors_of_unlike_page_bytes_share_a_pool() -> None:
    made = Pool.from_tensors("kv", [np.zeros((4, 8), np.float16), np.zeros((4, 2), np.float16)], page_size=1)
    assert made.geometry.page_bytes == (16, 4)


def test_a_pool_keeps_its_tensors_alive() -> None:
    tensor = torch.zeros((4, 8))
    alive = weakref.ref(tensor)
    made = Pool.from_tensors("kv", [tensor], page_size=1)
    del tensor
    gc.collect()
    assert alive() is not None
    del made
    gc.collect()
    assert alive() is None


READ_ONLY = np.zeros((4, 8))
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("tensors", "options", "says"),
    [
        ([], {}, "no tensors"),
        ([np.zeros((4, 8))[:, :4]], {}, "tensor 0 is not contiguous"),
        ([torch.zeros((4, 8)), torch.zeros((8, 4)).T], {}, "tensor 1 is not contiguous"),
        ([READ_ONLY], {}, "tensor 0 is not contiguous and writable"),
        ([np.zeros((4, 8)), np.zeros((5, 8))], {}, "tensor 1 has 5 rows and tensor 0 has 4"),
        ([np.zeros((4, 8)), np.zeros((4, 8), np.float32)], {}, "tensor 1 is float32 and tensor 0 is float64"),
        ([np.zeros(())], {}, "tensor 0 has no axis"),
        ([np.zeros((0, 8))], {}, "0"),
        ([np.zeros((4, 0))], {}, "region 0 has 0 bytes"),
        ([np.zeros((63, 8))], {"rows": "token", "page_size": 16}, "63 token rows.*16"),
        ([np.zeros((64, 8))], {"rows": "token", "page_size": 0}, "page_size must be an integer of at least 1, got 0"),
        ([np.zeros((64, 8))], {"rows": "token", "page_size": 2.0}, "page_size.*2.0"),
        ([np.zeros((64, 8))], {"rows": "tokens", "page_size": 16}, "rows must be 'page' or 'token', got 'tokens'"),
        ([np.zeros((64, 8))], {"page_size": True}, "page_size.*True"),
        ([torch.zeros((4, 8), device="meta")], {}, "region 0 at 0x0"),
    ],
)
def test_tensors_that_cannot_be_a_pool_are_refused_in_one_line(tensors: list[Any], options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        Pool.from_tensors("kv", tensors, **{"page_size": 1, **options})
    assert "'kv'" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("regions", "options", "says"),
    [
        ([], {}, "at least one region"),
        ([Region(4096, 65)], {}, "region 0 has 65 bytes, not a multiple of 8 pages"),
        ([Region(4096, 64), Region(8192, 0)], {}, "region 1 has 0 bytes"),
        ([Region(0, 64)], {}, "region 0 at 0x0"),
        ([Region(-4096, 64)], {}, "64-bit range"),
        ([Region(2**64 - 63, 64)], {}, "region 0 at 0xffffffffffffffc1"),
        ([Region(4096, 64)], {"num_pages": 0}, "num_pages.*0"),
        ([Region(4096, 64)], {"num_pages": 8.0}, "num_pages.*8.0"),
        ([Region(4096, 2**31)], {"num_pages": 2**31}, "31 bits"),
        ([Region(4096, 64)], {"page_size": -1}, "page_size.*-1"),
    ],
)
def test_regions_that_cannot_be_a_pool_are_refused_in_one_line(regions: list[Region], options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        Pool("kv", regions, **{"num_pages": 8, "page_size": 1, **options})
    assert "\n" not in str(error.value)


def test_a_pool_needs_a_name() -> None:
    with pytest.raises(ConfigError, match="name"):
        Pool("", [Region(4096, 64)], num_pages=8, page_size=1)


def test_p5_a_geometry_whose_lists_are_of_unlike_length_is_none() -> None:
    with pytest.raises(ValueError, match="not of one length"):
        PoolGeometry("kv", 8, 16, "uint8", (64, 64), (0, 1), ("",))


def test_c89_a_region_may_lie_at_the_top_of_the_address_space() -> None:
    made = Pool("kv", [Region(0xFFFF_0000_0000_0000, 2**48, "cuda:3")], num_pages=2**30, page_size=1)
    assert made.geometry.page_bytes == (2**18,)
    assert made.regions[0].ptr + made.regions[0].nbytes == 2**64


@pytest.mark.parametrize(
    "pages",
    [
        [0, 7, 3],
        (0, 7, 3),
        iter([0, 7, 3]),
        np.array([0, 7, 3]),
        np.array([0, 7, 3], np.int32),
        np.array([0, 7, 3], np.uint64),
        np.array([0, 1, 7, 1, 3, 1])[::2],
        torch.tensor([0, 7, 3]),
        torch.tensor([0, 7, 3], dtype=torch.int32),
        [np.int64(0), 7, np.uint8(3)],
    ],
)
def test_indices_of_any_integer_kind_come_back_as_int64(pages: Any) -> None:
    made = pool().indices(pages)
    assert made.dtype == np.int64 and made.tolist() == [0, 7, 3]


@pytest.mark.parametrize("pages", [[], (), np.empty(0), torch.empty(0), range(0)])
def test_no_indices_are_fine_whatever_their_type(pages: Any) -> None:
    made = pool().indices(pages)
    assert made.dtype == np.int64 and made.shape == (0,)


@pytest.mark.parametrize("given", [np.array([1, 2, 3]), torch.tensor([1, 2, 3])])
def test_indices_are_a_private_copy(given: Any) -> None:
    made = pool().indices(given)
    given[0] = 7
    assert made.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("pages", "index"),
    [
        ([0, 8], "8"),
        ([9, 0], "9"),
        ([2**40], str(2**40)),
        ([0, -1], "-1"),
        ([-(2**63)], str(-(2**63))),
        ([0, 2**63], str(2**63)),
        ([0, 2**64], str(2**64)),
        (np.array([0, 2**63], np.uint64), str(2**63)),
        (torch.tensor([0, 8]), "8"),
        ([1.0], "1.0"),
        ([0, 1.5], "1.5"),
        (np.array([1.0]), "1.0"),
        (torch.tensor([1.0]), "1.0"),
        (["a\nb"], r"a\nb"),
        ("12", "1"),
        ([None], "None"),
        ([True], "True"),
        (np.array([True]), "True"),
        (np.array([1], object), "1"),
    ],
)
def test_c85_an_index_that_is_no_page_is_named_with_the_bound(pages: Any, index: str) -> None:
    with pytest.raises(PageError) as error:
        pool().indices(pages)
    text = str(error.value)
    assert re.search(rf"index '?{re.escape(index)}'? ", text)
    assert "'kv'" in text and "0 .. 7" in text and "\n" not in text


@pytest.mark.parametrize("pages", [5, None, [[1, 2]], [[1], [1, 2]], np.array(3), np.empty((0, 3)), torch.ones(1, dtype=torch.bfloat16)])
def test_c85_what_is_no_flat_list_is_refused(pages: Any) -> None:
    with pytest.raises(PageError, match="flat list") as error:
        pool().indices(pages)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("bad", [-1, 4, 5, 2**62])
def test_c85_check_pages_names_the_first_bad_index(bad: int) -> None:
    check_pages("kv", np.array([0, 3]), 4)
    check_pages("kv", np.empty(0, np.int64), 4)
    with pytest.raises(PageError, match=rf"'kv'.*index {bad} .*0 \.\. 3"):
        check_pages("kv", np.array([0, bad, 3, -9]), 4)


@pytest.mark.parametrize("pages", [[3, 3], [0, 3, 1, 3], [3, 2, 1, 3]])
def test_c85_check_distinct_names_the_page_listed_twice(pages: list[int]) -> None:
    with pytest.raises(PageError, match="'kv'.*index 3 .*twice"):
        check_distinct("kv", np.array(pages), 4)


@pytest.mark.parametrize("pages", [[], [3], [0, 1, 3], [3, 1, 0], [1, 3, 0]])
def test_distinct_pages_pass_in_any_order(pages: list[int]) -> None:
    check_distinct("kv", np.array(pages, np.int64), 4)


GEOMETRY = PoolGeometry("kv", 8, 16, "float16", (64, 64), (0, 1), ("k", "k"))


def test_a_geometry_travels_unchanged() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(GEOMETRY), type=PoolGeometry) == GEOMETRY


def test_errors_of_pools_are_errors_of_kvcore_and_value_errors() -> None:
    assert issubclass(PageError, KVCoreError) and issubclass(PageError, ValueError)
