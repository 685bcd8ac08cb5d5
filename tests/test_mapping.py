"""The mapping of ranks against one global KV tensor cut by plain numpy slices (``ranks``)."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest

from kvcore.layouts import Heads, Latent, Place, SideRecord
from kvcore.mapping import destinations, not_once, shares, sources, why_not
from kvcore.memory import PoolGeometry, Region
from kvcore.planner import Layout, plan, split
from tests.ranks import DIM, FROM, MODELS, PAGES, TO, TOKENS, Held, Model, group


class Rank:
    """One rank's pools as kvcore describes them, and how often each byte was written."""

    def __init__(self, held: Held) -> None:
        self.held = held
        self.place = Place(tp_size=held.tp, tp_rank=held.tp_rank, pp_size=held.pp, pp_rank=held.pp_rank)
        self.geometries: list[PoolGeometry] = []
        regions = []
        for name, some in itertools.groupby(held.regions(), key=lambda region: region[0]):
            layers, arrays = zip(*[(layer, memory) for _, layer, memory in some], strict=True)
            layout = layout_of(held.model, held.order) if name == "kv" else SideRecord()
            self.geometries.append(
                PoolGeometry(name, PAGES, TOKENS, "uint8", (arrays[0][0].size,) * len(arrays), layers, ("",) * len(arrays), layout)
            )
            regions += [Region(1 + memory.ctypes.data - held.memory.ctypes.data, memory.size) for memory in arrays]
        self.layout = Layout.of(self.geometries, regions)
        self.written = np.zeros(held.memory.size, np.int64)


def layout_of(model: Model, order: str) -> Heads | Latent:
    return Heads(model.heads, DIM, order) if model.heads else Latent()  # type: ignore[arg-type]


def ranks(*sizes: Any, uneven: bool = False) -> list[Rank]:
    return [Rank(held) for held in group(*sizes, uneven)]


def move(prefill: list[Rank], decode: list[Rank], turn: int) -> None:
    """One room from group to group, each pair by its own mapping, planned and split as an engine would get it."""
    names = tuple((pool.name, pool.layout) for pool in prefill[0].geometries)
    for there in decode:
        expected, incoming = sources(names, prefill[0].place, there.place, turn), []
        for here in prefill:
            met = here.place.rank in expected
            assert met == (there.place.rank in destinations(names, here.place, decode[0].place, turn))
            assert why_not(here.geometries, there.geometries, here.place, there.place) is None
            assert why_not(there.geometries, here.geometries, there.place, here.place) is None
            share = shares(here.geometries, there.geometries, here.place, there.place, turn)
            incoming.append(share)
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
                    there.held.memory[target : target + length] = here.held.memory[source : source + length]
                    there.written[target : target + length] += 1
        assert not_once(there.geometries, incoming) is None


SIZES = list(itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4), (1, 2)))


@pytest.mark.parametrize("order", ["token", "head"])
@pytest.mark.parametrize("name", MODELS)
def test_every_byte_comes_once_and_from_where_the_whole_has_it(name: str, order: str) -> None:
    """Prefill tp x decode tp x prefill pp x decode pp, even and uneven stages, and turns of those that hold the same."""
    for number, (prefill_tp, decode_tp, prefill_pp, decode_pp) in enumerate(SIZES):
        prefill = ranks(MODELS[name], order, "prefill", prefill_tp, prefill_pp, uneven=bool(number % 2))
        decode = ranks(MODELS[name], order, "decode", decode_tp, decode_pp)
        move(prefill, decode, turn=number)
        for rank in decode:
            assert np.array_equal(rank.held.memory, rank.held.expected())
            assert np.array_equal(rank.written, rank.held.touched())


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


def heads(total: int, page_bytes: int, dim: int = 2, dtype: str = "") -> PoolGeometry:
    return PoolGeometry("kv", 8, 2, dtype, (page_bytes,), (0,), ("",), Heads(total, dim))


@pytest.mark.parametrize(
    ("mine", "theirs", "here", "there", "says"),
    [
        (KV, KV, Place(tp_size=2), Place(), "an opaque page needs tp sizes that are equal, and they are 2 and 1"),
        (heads(8, 16), heads(8, 16), Place(tp_size=2), Place(tp_size=3), "8 heads cannot be shared out over tp 3"),
        (heads(8, 16), heads(8, 64), Place(tp_size=2), Place(), "page_bytes of a head of layer 0 is 4 here and 8 there"),
        (
            heads(8, 64, dtype="int8"),
            heads(8, 64, dtype="int8"),
            Place(tp_size=2),
            Place(tp_size=2),
            "x 4 heads of 2 in int8 are 16 (tp rank 0",
        ),
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


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ([(0, 1), (2,)], None),
        ([(0, 1)], "layer 2 not at all"),
        ([(0, 1), (1, 2)], "layer 1 more than once"),
    ],
)
def test_t3_layers_that_no_stage_or_several_have_are_named(stages: list[tuple[int, ...]], says: str | None) -> None:
    def pool(layers: tuple[int, ...]) -> list[PoolGeometry]:
        many = len(layers)
        return [msgspec.structs.replace(KV, layers=layers, parts=("",) * many, page_bytes=(64,) * many, layout=Latent())]

    decode = pool((0, 1, 2))
    incoming = [shares(pool(layers), decode, Place(pp_size=len(stages), pp_rank=rank), ALONE, 0) for rank, layers in enumerate(stages)]
    assert not_once(decode, incoming) == (says and f"pool 'kv': prefill writes {says}")


def test_t3_heads_of_a_layer_that_one_rank_of_a_stage_lacks_are_named() -> None:
    decode = [heads(2, 8)]
    first = shares([heads(2, 4)], decode, Place(tp_size=2), ALONE, 0)
    assert not_once(decode, [first]) == "pool 'kv': prefill writes layer 0 in part"
    assert not_once(decode, [first, first]) == "pool 'kv': prefill writes layer 0 more than once"
