"""The mapping of ranks against one global KV tensor cut by plain numpy slices, which knows nothing of kvcore."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest

from kvcore.layouts import Heads, Latent, PageLayout, Place, Record
from kvcore.mapping import destinations, shares, sources, uncovered, why_not
from kvcore.memory import PoolGeometry, Region
from kvcore.planner import Layout, plan, split

TOKENS, DIM, PAGES, LAYERS = 2, 2, 5, 5
"""Tokens of a page, bytes of a head of a token, pages of a pool, layers of the model."""


@dataclass(frozen=True)
class Model:
    """KV heads of the model (0: one latent copy), and whether a side pool goes along."""

    heads: int
    side: bool = False


MODELS = {"mha": Model(8), "gqa 8": Model(8), "gqa 2": Model(2), "mla": Model(0), "hybrid": Model(2, side=True)}


# --- the oracle


def whole(model: Model, order: str, side: str) -> np.ndarray:
    """All of the model's KV on one side, with different bytes everywhere it matters: [layer, page, token, head, dim] in that order."""
    shape = (LAYERS, PAGES, TOKENS, max(1, model.heads), DIM)
    values = np.random.default_rng(1 if side == "prefill" else 2).integers(0, 256, shape, np.uint8)
    return values if order == "token" else values.transpose(0, 1, 3, 2, 4)


def cut(values: np.ndarray, model: Model, order: str, layers: list[int], tp: int, rank: int) -> np.ndarray:
    """The part of it that one rank holds."""
    if not model.heads:
        return np.ascontiguousarray(values[layers])
    first = rank * model.heads // tp
    heads = slice(first, first + max(1, model.heads // tp))
    return np.ascontiguousarray(values[layers][:, :, :, heads] if order == "token" else values[layers][:, :, heads])


def stages(pp: int, uneven: bool) -> list[list[int]]:
    """The layers of each pipeline stage."""
    bounds = [round(LAYERS * stage / pp) for stage in range(pp + 1)]
    if uneven and pp > 1:
        bounds[1] = 1
    return [list(range(start, stop)) for start, stop in itertools.pairwise(bounds)]


# --- ranks in plain memory


class Rank:
    """One rank's pools, in one stretch of bytes with a gap after each region."""

    def __init__(self, model: Model, order: str, side: str, place: Place, layers: list[int]) -> None:
        self.place, self.layers = place, layers
        self.kv = cut(whole(model, order, side), model, order, layers, place.tp_size, place.tp_rank)
        pools = [("kv", self.kv, Heads(model.heads, DIM, order) if model.heads else Latent())]  # type: ignore[arg-type]
        if model.side:
            self.side = np.full((1, PAGES, 3), 7 if side == "prefill" else 9, np.uint8)
            pools.append(("side", self.side, Record()))
        self.geometries = [self._geometry(*pool) for pool in pools]
        self.memory = np.concatenate([np.append(region.reshape(-1), np.uint8(0xEE)) for _, values, _ in pools for region in values])
        regions, self.views, at = [], [], 0
        for _, values, _ in pools:
            for region in values:
                regions.append(Region(1 + at, region.size))
                self.views.append(slice(at, at + region.size))
                at += region.size + 1
        self.layout = Layout.of(self.geometries, regions)
        self.written = np.zeros(self.memory.size, np.int64)

    def _geometry(self, name: str, values: np.ndarray, layout: PageLayout) -> PoolGeometry:
        layers = tuple(self.layers) if name == "kv" else (0,)
        return PoolGeometry(name, PAGES, TOKENS, "uint8", (values[0, 0].size,) * len(layers), layers, ("",) * len(layers), layout)


def group(model: Model, order: str, side: str, tp: int, pp: int, uneven: bool = False) -> list[Rank]:
    split_layers = stages(pp, uneven)
    return [
        Rank(model, order, side, Place(tp_size=tp, tp_rank=rank, pp_size=pp, pp_rank=stage), split_layers[stage])
        for stage in range(pp)
        for rank in range(tp)
    ]


FROM, TO = np.array([4, 0, 3]), np.array([1, 2, 0])


def move(model: Model, prefill: list[Rank], decode: list[Rank], turn: int) -> None:
    """One room from group to group, each pair by its own mapping, planned and split as an engine would get it."""
    names = tuple((pool.name, pool.layout) for pool in prefill[0].geometries)
    for there in decode:
        expected = sources(names, prefill[0].place, there.place, turn)
        for here in prefill:
            met = here.place.rank in expected
            assert met == (there.place.rank in destinations(names, here.place, decode[0].place, turn))
            assert why_not(here.geometries, there.geometries, here.place, there.place) is None
            assert why_not(there.geometries, here.geometries, there.place, here.place) is None
            share = shares(here.geometries, there.geometries, here.place, there.place, turn)
            if not met:
                assert not share
                continue
            pages = {pool.name: (FROM, TO) for pool in here.geometries}
            for part in split(plan(here.layout, there.layout, pages, share), 7, 64):
                each = part.descriptors()
                assert len(each) <= 7 and each.nbytes <= 64
                local = here.layout.base[each.local_region] + each.local_offset - np.uint64(1)
                remote = there.layout.base[each.remote_region] + each.remote_offset - np.uint64(1)
                for source, target, length in zip(local.tolist(), remote.tolist(), each.length.tolist(), strict=True):
                    there.memory[target : target + length] = here.memory[source : source + length]
                    there.written[target : target + length] += 1
        assert uncovered(there.geometries, [prefill[rank].geometries for rank in expected]) is None


def check(model: Model, order: str, decode: list[Rank]) -> None:
    """Every byte is that of the global tensor cut for decode, or as it was; each is written once."""
    values = whole(model, order, "decode").copy()
    values[:, TO] = whole(model, order, "prefill")[:, FROM]
    for rank in decode:
        kv = cut(values, model, order, rank.layers, rank.place.tp_size, rank.place.tp_rank)
        expected = [np.ascontiguousarray(layer).reshape(-1) for layer in kv]
        touched = [np.isin(np.arange(PAGES), TO).repeat(layer.size // PAGES) for layer in kv]
        if model.side:
            side = rank.side.copy()
            side[:, TO] = 7
            expected.append(side.reshape(-1))
            touched.append(np.isin(np.arange(PAGES), TO).repeat(3))
        gap = np.array([0xEE], np.uint8)
        assert np.array_equal(rank.memory, np.concatenate([part for region in expected for part in (region, gap)]))
        assert np.array_equal(rank.written, np.concatenate([part for region in touched for part in (region, gap * 0)]))


SIZES = list(itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4), (1, 2)))


@pytest.mark.parametrize("order", ["token", "head"])
@pytest.mark.parametrize("name", MODELS)
def test_every_byte_comes_once_and_from_where_the_whole_has_it(name: str, order: str) -> None:
    """Prefill tp x decode tp x prefill pp x decode pp, even and uneven stages, and turns of those that hold the same."""
    for number, (prefill_tp, decode_tp, prefill_pp, decode_pp) in enumerate(SIZES):
        prefill = group(MODELS[name], order, "prefill", prefill_tp, prefill_pp, uneven=bool(number % 2))
        decode = group(MODELS[name], order, "decode", decode_tp, decode_pp)
        move(MODELS[name], prefill, decode, turn=number)
        check(MODELS[name], order, decode)


# --- what does not fit

KV = PoolGeometry("kv", 8, 16, "float16", (64, 64), (0, 1), ("k", "k"))
ALONE = Place()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "vk"}, "pools ['kv'] here and ['vk'] there"),
        ({"page_size": 32}, "page_size is 16 here and 32 there"),
        ({"dtype": "bfloat16"}, "dtype is 'float16' here and 'bfloat16' there"),
        ({"page_bytes": (64, 128)}, "page_bytes of layer 1 is 64 here and 128 there"),
        ({"layers": (0, 2)}, "layers is (0, 1) here and (0, 2) there"),
        ({"parts": ("k", "v")}, "parts is ('k', 'k') here and ('k', 'v') there"),
        (
            {"layers": (0, 1, 2, 3, 4), "parts": ("k",) * 5, "page_bytes": (64,) * 5},
            "layers is (0, 1) here and 5 entries starting (0, 1) there",
        ),
        ({"layout": Latent()}, "layout is Opaque() here and Latent() there"),
    ],
)
def test_t3_what_differs_is_named_with_both_values(change: dict[str, Any], says: str) -> None:
    told = why_not([KV], [msgspec.structs.replace(KV, **change)], ALONE, ALONE)
    assert told is not None and told.removeprefix("pool 'kv': ") == says


def test_c90_the_number_of_pages_may_differ() -> None:
    assert why_not([KV], [msgspec.structs.replace(KV, num_pages=9)], ALONE, ALONE) is None


def heads(total: int, page_bytes: int, dim: int = 2) -> PoolGeometry:
    return PoolGeometry("kv", 8, 2, "uint8", (page_bytes,), (0,), ("",), Heads(total, dim))


@pytest.mark.parametrize(
    ("mine", "theirs", "here", "there", "says"),
    [
        (KV, KV, Place(tp_size=2), Place(), "an opaque page needs tp sizes that are equal, and they are 2 and 1"),
        (heads(8, 16), heads(8, 16), Place(tp_size=2), Place(tp_size=3), "8 heads cannot be shared out over tp 3"),
        (heads(8, 16), heads(8, 64), Place(tp_size=2), Place(), "page_bytes of a head of layer 0 is 4 here and 8 there"),
        (heads(8, 15), heads(8, 30), Place(tp_size=2), Place(), "region 0 has pages of 15 bytes"),
        (heads(8, 16), heads(6, 12), Place(tp_size=2), Place(tp_size=2), "layout is Heads(total=8"),
    ],
)
def test_c88_ranks_that_cannot_be_mapped_are_refused_on_either_side(
    mine: PoolGeometry, theirs: PoolGeometry, here: Place, there: Place, says: str
) -> None:
    told, other = why_not([mine], [theirs], here, there), why_not([theirs], [mine], there, here)
    assert told is not None and says in told
    assert other is not None


def test_t3_layers_that_no_stage_has_are_named() -> None:
    stage = msgspec.structs.replace(KV, layers=(0, 1))
    assert uncovered([msgspec.structs.replace(KV, layers=(1, 4))], [[stage]]) == "pool 'kv': no prefill rank has layers [4]"
