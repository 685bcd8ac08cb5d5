"""The planner against a model in plain Python integers that writes into bytearrays and knows nothing of numpy."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kvcore import planner
from kvcore.errors import ConfigError, IncompatiblePeerError, PageError
from kvcore.hookspecs import Transfer
from kvcore.mapping import whole
from kvcore.memory import PoolGeometry, Region
from kvcore.planner import Descriptors, Layout, Plan, check, split
from kvcore.states import RoomKey


def plan(local: Layout, remote: Layout, pages: dict[str, tuple[np.ndarray, np.ndarray]]) -> Descriptors:
    """All of each page, between two single ranks."""
    check(local, remote, pages)
    return planner.plan(local, remote, pages, whole([place.geometry for place in local.pools.values()])).descriptors()


TOP = 0xFFFF_0000_0000_0000
Pages = dict[str, tuple[list[int], list[int]]]


def geometry(name: str, num_pages: int, page_bytes: list[int]) -> PoolGeometry:
    numbers = tuple(range(len(page_bytes)))
    return PoolGeometry(name, num_pages, 16, "float16", tuple(page_bytes), numbers, tuple("k" for _ in numbers))


def layout(*geometries: PoolGeometry, base: int = TOP) -> Layout:
    """The pools one after the other in memory from ``base`` on, with a gap of a byte after each region."""
    regions = []
    for pool in geometries:
        for page_bytes in pool.page_bytes:
            regions.append(Region(base, pool.num_pages * page_bytes))
            base += pool.num_pages * page_bytes + 1
    return Layout.of(geometries, regions)


def arrays(pages: Pages) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {name: (np.array(local, np.int64), np.array(remote, np.int64)) for name, (local, remote) in pages.items()}


def rows(descriptors: Descriptors) -> list[tuple[int, int, int, int, int]]:
    columns = (
        descriptors.local_region,
        descriptors.remote_region,
        descriptors.local_offset,
        descriptors.remote_offset,
        descriptors.length,
    )
    return list(zip(*(column.tolist() for column in columns), strict=True))


def model(local: Layout, remote: Layout, pages: Pages) -> list[tuple[int, int, int, int, int]]:
    """What the plan must be: page by page, region by region, neighbours merged, sorted by region pair and remote offset."""
    merged: list[tuple[int, int, int, int, int]] = []
    for name, (mine, theirs) in sorted(pages.items(), key=lambda item: local.pools[item[0]].first_region):
        here, there = local.pools[name], remote.pools[name]
        for number, page_bytes in enumerate(here.geometry.page_bytes):
            pair = (here.first_region + number, there.first_region + number)
            for target, source in sorted(zip(theirs, mine, strict=True)):
                row = (*pair, source * page_bytes, target * page_bytes, page_bytes)
                last = merged[-1] if merged else None
                if last and last[:2] == pair and last[2] + last[4] == row[2] and last[3] + last[4] == row[3]:
                    merged[-1] = (*last[:4], last[4] + page_bytes)
                else:
                    merged.append(row)
    return merged


@st.composite
def cases(draw: st.DrawFn, page_bytes: st.SearchStrategy[int], most_pages: int) -> tuple[Layout, Layout, Pages]:
    """Two pools laid out in either order on each side, and lists of pages with and without runs."""
    sizes = {name: draw(st.lists(page_bytes, min_size=1, max_size=3)) for name in ("kv", "aux")}
    sides, counts = [], []
    for _ in range(2):
        count = {name: draw(st.integers(1, most_pages)) for name in sizes}
        order = draw(st.permutations(sorted(sizes)))
        sides.append(layout(*(geometry(name, count[name], sizes[name]) for name in order)))
        counts.append(count)
    pages: Pages = {}
    for name in draw(st.permutations(sorted(sizes))):
        few, many = sorted((counts[0][name], counts[1][name]))
        if draw(st.booleans()):
            start, number = draw(st.integers(0, many - few)), draw(st.integers(0, few))
            short, long = list(range(number)), list(range(start, start + number))
            pages[name] = (short, long) if counts[0][name] == few else (long, short)
            continue
        targets = draw(st.lists(st.integers(0, counts[1][name] - 1), unique=True, max_size=12))
        sources = draw(st.lists(st.integers(0, counts[0][name] - 1), min_size=len(targets), max_size=len(targets)))
        pages[name] = (sources, targets)
    return sides[0], sides[1], pages


def cut(descriptors: Descriptors, most: int | None, most_bytes: int | None) -> list[Descriptors]:
    """The batches, at most 1000 of them, so that a split that never ends fails instead of hanging."""
    return [batch.descriptors() for batch in itertools.islice(split(Plan(descriptors), most, most_bytes), 1000)]


def run(batches: list[Descriptors], source: list[bytearray], target: list[bytearray]) -> None:
    for batch in batches:
        for here, there, read, write, length in rows(batch):
            assert read >= 0 and read + length <= len(source[here])
            assert write >= 0 and write + length <= len(target[there])
            target[there][write : write + length] = source[here][read : read + length]


@settings(max_examples=150, deadline=None)
@given(
    cases(st.integers(1, 5), 14),
    st.none() | st.integers(1, 6),
    st.none() | st.integers(1, 9),
)
def test_t1_the_ith_page_goes_to_the_ith_page_and_t2_nothing_else_is_written(
    case: tuple[Layout, Layout, Pages], most: int | None, most_bytes: int | None
) -> None:
    local, remote, pages = case
    random = np.random.default_rng(0)
    source = [bytearray(random.bytes(int(size))) for size in local.nbytes]
    wanted = [bytearray(int(size)) for size in remote.nbytes]
    for name, (mine, theirs) in pages.items():
        here, there = local.pools[name], remote.pools[name]
        for number, size in enumerate(here.geometry.page_bytes):
            for page, target in zip(mine, theirs, strict=True):
                piece = source[here.first_region + number][page * size : (page + 1) * size]
                wanted[there.first_region + number][target * size : (target + 1) * size] = piece

    batches = cut(plan(local, remote, arrays(pages)), most, most_bytes)

    got = [bytearray(int(size)) for size in remote.nbytes]
    run(batches, source, got)
    assert got == wanted
    for batch in batches:
        assert 1 <= len(batch) <= (most or len(batch))
        assert 1 <= batch.nbytes <= (most_bytes or batch.nbytes)
        assert (batch.length > 0).all()


@settings(max_examples=150, deadline=None)
@given(cases(st.integers(1, 2**33), 2**12))
def test_c89_offsets_and_addresses_are_exact_at_the_top_of_the_address_space(case: tuple[Layout, Layout, Pages]) -> None:
    local, remote, pages = case
    made = plan(local, remote, arrays(pages))
    expected = model(local, remote, pages)
    assert rows(made) == expected
    assert made.nbytes == sum(row[4] for row in expected)
    if not expected:
        return
    transfer = Transfer(
        RoomKey("prefill", 1, 0, 1),
        "peer",
        made.local_region,
        made.remote_region,
        made.local_offset,
        made.remote_offset,
        made.length,
        local.base,
        remote.base,
    )
    assert transfer.local_address.tolist() == [int(local.base[row[0]]) + row[2] for row in expected]
    assert transfer.remote_address.tolist() == [int(remote.base[row[1]]) + row[3] for row in expected]


def test_c89_the_last_byte_of_the_64_bit_range_is_reached_exactly() -> None:
    pages, page_bytes = 2**20, 2**28
    side = Layout.of([geometry("kv", pages, [page_bytes])], [Region(TOP, 2**48)])
    made = plan(side, side, arrays({"kv": ([0, pages - 1], [pages - 1, 0])}))
    assert rows(made) == [(0, 0, (pages - 1) * page_bytes, 0, page_bytes), (0, 0, 0, (pages - 1) * page_bytes, page_bytes)]
    assert int(side.base[0]) + int(made.remote_offset[1]) + int(made.length[1]) == 2**64


def test_the_arrays_have_the_types_of_a_transfer_also_when_empty() -> None:
    side = layout(geometry("kv", 8, [4, 4]))
    for pages in ({"kv": ([1, 2], [3, 5])}, {"kv": ([], [])}, {}):
        made = plan(side, side, arrays(pages))
        assert made.local_region.dtype == made.remote_region.dtype == np.int32
        assert made.local_offset.dtype == made.remote_offset.dtype == made.length.dtype == np.uint64
        assert len({column.shape for column in (made.local_region, made.remote_region, made.local_offset, made.remote_offset)}) == 1
    assert len(made) == 0 and made.nbytes == 0


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_a_run_is_one_descriptor_a_region_in_whatever_order_its_pages_come(order: tuple[int, ...]) -> None:
    side = layout(geometry("kv", 32, [8, 2]))
    made = plan(side, side, arrays({"kv": ([4 + page for page in order], [20 + page for page in order])}))
    assert rows(made) == [(0, 0, 32, 160, 32), (1, 1, 8, 40, 8)]


def test_a_run_on_one_side_only_is_not_merged() -> None:
    side = layout(geometry("kv", 32, [8]))
    assert len(plan(side, side, arrays({"kv": ([1, 2, 3], [4, 6, 8])}))) == 3
    assert len(plan(side, side, arrays({"kv": ([1, 3, 5], [4, 5, 6])}))) == 3
    assert len(plan(side, side, arrays({"kv": ([3, 2, 1], [4, 5, 6])}))) == 3


def test_one_local_page_may_go_to_many() -> None:
    side = layout(geometry("kv", 8, [4]))
    assert rows(plan(side, side, arrays({"kv": ([2, 2], [0, 5])}))) == [(0, 0, 8, 0, 4), (0, 0, 8, 20, 4)]


def test_regions_of_a_pool_are_paired_in_order_wherever_the_pool_stands() -> None:
    kv, aux = geometry("kv", 4, [8, 8]), geometry("aux", 2, [3])
    made = plan(layout(kv, aux), layout(aux, kv), arrays({"aux": ([1], [0]), "kv": ([0], [3])}))
    assert rows(made) == [(0, 1, 0, 24, 8), (1, 2, 0, 24, 8), (2, 0, 3, 0, 3)]


@pytest.mark.parametrize(
    ("local", "remote", "says"),
    [
        ([0], [9], ("page index 9", "0 .. 8")),
        ([0], [1000], ("page index 1000", "0 .. 8")),
        ([0], [-1], ("page index -1", "0 .. 8")),
        ([5], [0], ("page index 5", "0 .. 4")),
        ([-3], [0], ("page index -3", "0 .. 4")),
        ([0, 1], [7, 7], ("page index 7", "twice")),
        ([0, 1, 2], [7, 6, 7], ("page index 7", "twice")),
        ([0, 1], [7], ("2 local pages", "1 remote pages")),
    ],
)
def test_c85_indices_that_are_no_pages_of_the_pool_are_refused(local: list[int], remote: list[int], says: tuple[str, ...]) -> None:
    with pytest.raises(PageError) as error:
        plan(layout(geometry("kv", 5, [4])), layout(geometry("kv", 9, [4])), arrays({"kv": (local, remote)}))
    for words in ("'kv'", *says):
        assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("bad", [np.array([1.0]), np.array([1], np.int32), np.array([1], np.uint64), np.array([[1]]), np.array(1)])
@pytest.mark.parametrize("side", [0, 1])
def test_c85_indices_of_another_type_or_shape_are_refused(bad: np.ndarray, side: int) -> None:
    pair = [np.array([1]), np.array([1])]
    pair[side] = bad
    place = layout(geometry("kv", 5, [4]))
    with pytest.raises(PageError, match="int64"):
        plan(place, place, {"kv": (pair[0], pair[1])})


def test_an_unknown_pool_is_refused_with_the_known_ones() -> None:
    side = layout(geometry("kv", 5, [4]), geometry("aux", 5, [4]))
    with pytest.raises(PageError, match=r"no pool 'kw'.*'kv', 'aux'"):
        plan(side, side, arrays({"kw": ([0], [0])}))
    with pytest.raises(PageError, match="no pool 'aux'"):
        plan(side, layout(geometry("kv", 5, [4])), arrays({"aux": ([0], [0])}))


@pytest.mark.parametrize(
    ("geometries", "regions", "says"),
    [
        ([geometry("kv", 2, [4])], [Region(16, 9)], "9 bytes.*2 pages of 4"),
        ([geometry("kv", 2, [4])], [], "0 regions.*1"),
        ([geometry("kv", 2, [4])], [Region(16, 8), Region(32, 8)], "2 regions.*1"),
        ([geometry("kv", 2, [4]), geometry("kv", 2, [4])], [Region(16, 8), Region(32, 8)], "'kv' is listed twice"),
        ([geometry("kv", 2, [4])], [Region(2**64 - 7, 8)], "64-bit"),
        ([geometry("kv", 2, [4])], [Region(0, 8)], "64-bit"),
        ([geometry("kv", 2, [4])], [Region(-16, 8)], "64-bit"),
        ([geometry("kv", 0, [4])], [Region(16, 0)], "0 pages"),
        ([geometry("kv", 2, [0])], [Region(16, 0)], "pages of 0"),
        ([geometry("kv", -2, [-4])], [Region(16, 8)], "-2 pages"),
    ],
)
def test_t2_a_layout_that_does_not_describe_its_regions_is_refused(
    geometries: list[PoolGeometry], regions: list[Region], says: str
) -> None:
    with pytest.raises(IncompatiblePeerError, match=says):
        Layout.of(geometries, regions)


def test_a_region_may_end_with_the_address_space() -> None:
    assert Layout.of([geometry("kv", 2, [4])], [Region(2**64 - 8, 8)]).base.tolist() == [2**64 - 8]


def test_split_gives_back_what_is_within_the_limits() -> None:
    side = layout(geometry("kv", 32, [8]))
    made = plan(side, side, arrays({"kv": ([1, 3, 5], [4, 6, 8])}))
    for limits in ((None, None), (3, None), (None, 24), (3, 24), (100, 2**70)):
        assert [rows(batch) for batch in cut(made, *limits)] == [rows(made)]


def test_split_gives_no_batch_for_no_descriptors() -> None:
    side = layout(geometry("kv", 32, [8]))
    assert cut(plan(side, side, {}), 1, 1) == []


def test_split_keeps_order_and_fills_batches() -> None:
    side = layout(geometry("kv", 32, [8]))
    made = plan(side, side, arrays({"kv": ([1, 3, 5, 7, 9], [4, 6, 8, 10, 12])}))
    assert [len(batch) for batch in cut(made, 2, None)] == [2, 2, 1]
    assert [len(batch) for batch in cut(made, None, 25)] == [3, 2]
    assert [len(batch) for batch in cut(made, 2, 25)] == [2, 2, 1]
    assert [row for batch in cut(made, 2, 25) for row in rows(batch)] == rows(made)


def test_split_cuts_a_descriptor_above_the_byte_limit() -> None:
    side = layout(geometry("kv", 32, [8]))
    made = plan(side, side, arrays({"kv": ([1, 2], [4, 5])}))
    assert [rows(batch) for batch in cut(made, None, 7)] == [[(0, 0, 8, 32, 7)], [(0, 0, 15, 39, 7)], [(0, 0, 22, 46, 2)]]


@pytest.mark.parametrize(("limits", "name"), [((0, None), "max_descriptors"), ((None, 0), "max_bytes"), ((-1, None), "max_descriptors")])
def test_split_refuses_limits_that_no_batch_can_keep(limits: tuple[int | None, int | None], name: str) -> None:
    side = layout(geometry("kv", 32, [8]))
    with pytest.raises(ConfigError, match=name):
        cut(plan(side, side, arrays({"kv": ([1], [1])})), *limits)


def steps_of(call: Callable[[], object]) -> int:
    """How many steps Python takes for a call, of its own and into C: as many for a loop as it has rounds."""
    count = 0

    def step(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += 1
        return step

    def entered(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "c_call"

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(step)
    sys.setprofile(entered)
    try:
        call()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    return count


@pytest.mark.parametrize("scattered", [True, False], ids=["scattered", "a run"])
def test_the_planner_never_loops_over_pages_or_layers(scattered: bool) -> None:
    """It takes the same steps for 8192 pages of 128 regions as for 64 of 4. (How long it takes: ``kvcore bench plan``.)"""

    def steps(layers: int, pages: int) -> int:
        side = layout(geometry("kv", 65536, [32768] * layers), base=2**40)
        random = np.random.default_rng(0)
        mine, theirs = np.arange(pages), np.arange(7, 7 + pages)
        if scattered:
            mine, theirs = random.permutation(65536)[:pages], random.permutation(65536)[:pages]
        share = whole([side.pools["kv"].geometry])
        made = planner.plan(side, side, {"kv": (mine, theirs)}, share)
        assert len(made) == layers if not scattered else len(made) > layers * pages * 0.9
        return steps_of(lambda: planner.plan(side, side, {"kv": (mine, theirs)}, share))

    assert steps(128, 8192) == steps(4, 64)
