"""A transformers cache into pages and back: every token lands where the page table says, and nowhere else."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import DynamicCache, LlamaConfig, MistralConfig, PretrainedConfig

from kvcore.demo.models import fill, greedy, load
from kvcore.errors import ConfigError, PageError
from kvcore.integrations.transformers import PagedKV

LAYERS, HEADS, HEAD_DIM = 3, 2, 4
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=HEADS,
    bos_token_id=None,
    eos_token_id=None,
)
MARK = -7.0


def filled(n_tokens: int, config: PretrainedConfig = CONFIG) -> DynamicCache:
    """A cache in which every number is another one."""
    cache = DynamicCache(config=config)
    count = HEADS * n_tokens * HEAD_DIM
    for layer in range(LAYERS):
        k = torch.arange(count, dtype=torch.float32).reshape(1, HEADS, n_tokens, HEAD_DIM) + 2 * layer * count
        cache.update(k, k + count, layer)
    return cache


def tensors(cache: DynamicCache) -> list[torch.Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def equal(one: DynamicCache, other: DynamicCache) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))


def scattered(kv: PagedKV, n_tokens: int, seed: int = 0) -> list[int]:
    pages = kv.allocate(kv.free_pages)
    random.Random(seed).shuffle(pages)
    kept = kv.pages_for(n_tokens)
    kv.free(pages[kept:])
    return pages[:kept]


@settings(max_examples=60, deadline=None)
@given(
    page_size=st.sampled_from([1, 16, 64]),
    chunks=st.lists(st.integers(0, 70), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_what_is_written_in_chunks_is_read_back_whole(page_size: int, chunks: list[int], seed: int) -> None:
    n_tokens = sum(chunks)
    kv = PagedKV(CONFIG, num_pages=n_tokens // page_size + 3, page_size=page_size)
    for tensor in (*kv.keys, *kv.values):
        tensor.fill_(MARK)
    pages = scattered(kv, n_tokens, seed)
    source, start = filled(n_tokens), 0
    for chunk in chunks:
        kv.write(source, pages, start, chunk)
        start += chunk
    if n_tokens:
        assert equal(kv.read(pages, n_tokens), source)
    assert kv.read(pages, n_tokens).get_seq_length() == n_tokens
    for tensor in (*kv.keys, *kv.values):
        assert int((tensor != MARK).all(dim=-1).all(dim=-1).sum()) == n_tokens  # no token too many was written
        others = [page for page in range(kv.pool.num_pages) if page not in pages]
        assert bool((tensor[others] == MARK).all())


def test_token_i_lies_in_page_i_over_page_size_of_every_tensor() -> None:
    kv = PagedKV(CONFIG, num_pages=5, page_size=4)
    source = filled(10)
    kv.write(source, [3, 0, 4], 0, 10)
    for layer in range(LAYERS):
        for pool, cache in ((kv.keys[layer], source.layers[layer].keys), (kv.values[layer], source.layers[layer].values)):
            assert torch.equal(pool[0, 1], cache[0, :, 5])
            assert torch.equal(pool[4, 1], cache[0, :, 9])


def test_a_chunk_writes_its_own_tokens_only() -> None:
    kv = PagedKV(CONFIG, num_pages=2, page_size=4)
    kv.write(filled(8), [0, 1], 3, 2)
    written = (kv.keys[0] != 0).any(dim=-1).any(dim=-1).flatten()
    assert written.nonzero().flatten().tolist() == [3, 4]


def test_pages_moved_byte_for_byte_to_other_indices_read_the_same() -> None:
    here, there = (PagedKV(CONFIG, num_pages=8, page_size=4) for _ in range(2))
    source = filled(27)
    mine, theirs = scattered(here, 27, seed=1), scattered(there, 27, seed=2)
    here.write(source, mine, 0, 27)
    assert mine != theirs
    for a, b in zip((*here.keys, *here.values), (*there.keys, *there.values), strict=True):
        b[theirs] = a[mine]
    assert equal(there.read(theirs, 27), source)


def test_layers_may_be_given_as_pairs_of_tensors() -> None:
    kv = PagedKV(CONFIG, num_pages=4, page_size=4)
    source = filled(6)
    kv.write([(layer.keys, layer.values) for layer in source.layers], [1, 2], 0, 6)
    assert equal(kv.read([1, 2], 6), source)


def test_the_cache_read_shares_no_memory_with_the_pool() -> None:
    kv = PagedKV(CONFIG, num_pages=2, page_size=4)
    source = filled(8)
    kv.write(source, [0, 1], 0, 8)
    cache = kv.read([0, 1], 8)
    for tensor in (*kv.keys, *kv.values):
        tensor.zero_()
    assert equal(cache, source)


def test_a_model_goes_on_from_read_pages_as_in_one_process() -> None:
    loaded = load("tiny", str)
    prompt = loaded.tokenizer.encode("prefill here, decode there")
    whole = loaded.model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0)
    cache = DynamicCache(config=loaded.model.config)
    fill(loaded, cache, prompt[:-1])
    kv = PagedKV(loaded.model.config, num_pages=8, page_size=8)
    pages = scattered(kv, len(prompt) - 1)
    kv.write(cache, pages, 0, len(prompt) - 1)
    assert greedy(loaded, kv.read(pages, len(prompt) - 1), prompt[-1:], 8) == whole[0, len(prompt) :].tolist()


def test_the_pool_names_k_and_v_of_each_layer() -> None:
    kv = PagedKV(CONFIG, num_pages=6, page_size=4, dtype=torch.bfloat16, name="draft")
    geometry = kv.pool.geometry
    assert (geometry.name, geometry.num_pages, geometry.page_size, geometry.dtype) == ("draft", 6, 4, "bfloat16")
    assert geometry.parts == ("k",) * LAYERS + ("v",) * LAYERS
    assert geometry.layers == (0, 1, 2, 0, 1, 2)
    assert set(geometry.page_bytes) == {4 * HEADS * HEAD_DIM * 2}
    assert [region.ptr for region in kv.pool.regions] == [tensor.data_ptr() for tensor in (*kv.keys, *kv.values)]


def test_pages_are_handed_out_once_and_again_when_freed() -> None:
    kv = PagedKV(CONFIG, num_pages=4, page_size=4)
    first = kv.allocate(3)
    assert len(set(first)) == 3
    assert kv.free_pages == 1
    assert kv.allocate(0) == []
    with pytest.raises(PageError, match="2 pages asked for, 1 free"):
        kv.allocate(2)
    kv.free(first[:2])
    again = kv.allocate(3)
    assert sorted([*again, first[2]]) == [0, 1, 2, 3]


def test_a_page_is_freed_once_and_a_wrong_list_frees_nothing() -> None:
    kv = PagedKV(CONFIG, num_pages=4, page_size=4)
    pages = kv.allocate(3)
    kv.free(pages[:1])
    for wrong, text in (
        (pages, "not allocated"),
        ([pages[1], pages[1]], "twice"),
        ([pages[1], 4], "not in 0 .. 3"),
        ([pages[1], -1], "not in 0 .. 3"),
    ):
        with pytest.raises(PageError, match=text):
            kv.free(wrong)
        assert kv.free_pages == 2
    kv.free(pages[1:])
    assert kv.free_pages == 4


def test_what_does_not_fit_is_refused_and_nothing_is_written() -> None:
    kv = PagedKV(CONFIG, num_pages=4, page_size=4)
    good = [(layer.keys, layer.values) for layer in filled(8).layers]
    narrow = [*good[:-1], (good[-1][0], good[-1][1][..., :2])]
    double = [*good[:-1], (good[-1][0], good[-1][1].double())]
    batch = [(k.repeat(2, 1, 1, 1), v.repeat(2, 1, 1, 1)) for k, v in good]
    for layers, pages, start, n_tokens, text in (
        (good[:-1], [0, 1], 0, 8, "has 2 layers, not 3"),
        (narrow, [0, 1], 0, 8, "V of layer 2 has shape"),
        (double, [0, 1], 0, 8, "V of layer 2 is torch.float64"),
        (batch, [0, 1], 0, 8, "K of layer 0 has shape"),
        (good, [0, 1, 2], 4, 5, "holds 8 tokens of 9"),
        (good, [0, 1], 0, 9, "do not lie in 2 pages of 4"),
        (good, [0, 1], -1, 4, "do not lie in 2 pages"),
        (good, [0, 4], 0, 8, "page index 4 is not in 0 .. 3"),
        (good, [0, 0], 0, 8, "twice"),
    ):
        with pytest.raises(PageError, match=text):
            kv.write(layers, pages, start, n_tokens)
        assert all(not tensor.any() for tensor in (*kv.keys, *kv.values))
    with pytest.raises(PageError, match="has 0 layers"):
        kv.write(DynamicCache(), [0, 1], 0, 8)
    with pytest.raises(PageError, match="do not lie in 2 pages of 4"):
        kv.read([0, 1], 9)


def test_a_model_with_sliding_windows_is_refused() -> None:
    config = MistralConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, sliding_window=8)
    with pytest.raises(ConfigError, match="'mistral': layer 0 caches as DynamicSlidingWindowLayer"):
        PagedKV(config, num_pages=4, page_size=4)


@pytest.mark.parametrize("wrong", [{"num_pages": 0}, {"page_size": 0}, {"page_size": -1}, {"num_pages": 2.5}, {"num_pages": True}])
def test_a_pool_of_no_whole_pages_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must be an integer of at least 1"):
        PagedKV(CONFIG, **{"num_pages": 4, "page_size": 4, **wrong})
