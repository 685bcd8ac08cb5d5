"""A transformers cache as pages, and back. Needs the extra ``kvcore[transformers]``.

A transformers cache holds one tensor ``[1, kv_heads, tokens, head_dim]`` per layer for K and one for V; what moves between
instances is pages. :class:`PagedKV` owns the paged memory of one model on one instance and copies between the two::

    kv = PagedKV(model.config, num_pages=1024, page_size=16)          # the same page size on both sides
    with kvcore.KVManager(config, pools=[kv.pool]) as manager:
        table = kv.allocate(kv.pages_for(n_tokens))
        kv.write(cache, table, start=0, n_tokens=n_tokens)            # prefill: after each chunk, then send its pages
        cache = kv.read(table, n_tokens)                              # decode: when the room has succeeded
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import Cache, DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

from kvcore.errors import ConfigError, PageError, shown
from kvcore.layouts import Heads, heads_of
from kvcore.memory import Pool, check_distinct

Layers = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""K and V of each layer, each of shape ``[1, kv_heads, tokens, head_dim]``, beginning with the request's first token."""


class PagedKV:
    """The paged K and V of one model: per layer two tensors ``[num_pages, page_size, kv_heads, head_dim]``, and their free pages.

    With ``tp_size`` above 1 it is one rank's part: the heads of ``tp_rank`` only, cut from caches of all heads, or of its own.
    ``pool`` is what a ``KVManager`` registers: one page is one slice of each of its ``2 * layers`` regions, the K of all layers
    (part ``"k"``) before the V (part ``"v"``). Raises ``ConfigError`` for models whose cache is not plain attention over all
    tokens (sliding windows, recurrent layers): their caches do not hold one K and V per token. For one thread at a time.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        name: str = "kv",
        tp_size: int = 1,
        tp_rank: int = 0,
    ) -> None:
        for what, value in (("num_pages", num_pages), ("page_size", page_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"pool {shown(name)}: {what} must be an integer of at least 1, got {shown(value)}")
        layers, heads, head_dim = _geometry(config)
        layout = Heads(heads, head_dim)
        try:
            self._heads = heads_of(layout, tp_size, tp_rank)
        except ValueError as error:
            raise ConfigError(f"pool {shown(name)}: {error}; choose another tp_size") from error
        shape = (num_pages, page_size, len(self._heads), head_dim)
        self.config, self._total = config, heads
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        k = Pool.from_tensors(name, self.keys, page_size=page_size, part="k")
        v = Pool.from_tensors(name, self.values, page_size=page_size, part="v")
        owners = (*self.keys, *self.values)
        self.pool = Pool(name, k.regions + v.regions, num_pages=num_pages, page_size=page_size, dtype=k.dtype, layout=layout, owners=owners)
        self._free = list(range(num_pages))
        self._used: set[int] = set()

    @property
    def free_pages(self) -> int:
        """Number of pages that can still be allocated."""
        return len(self._free)

    def pages_for(self, n_tokens: int) -> int:
        """Number of pages that hold ``n_tokens`` tokens, the last of them perhaps in part."""
        return -(-n_tokens // self.pool.page_size)

    def allocate(self, n_pages: int) -> list[int]:
        """Take ``n_pages`` pages, in the order in which they became free; raises ``PageError`` if there are not as many."""
        if not 0 <= n_pages <= len(self._free):
            raise PageError(f"{self._of}: {n_pages} pages asked for, {len(self._free)} free; free some or build a larger pool")
        taken, self._free = self._free[:n_pages], self._free[n_pages:]
        self._used.update(taken)
        return taken

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back; of a room only when its handle ``is_release_safe`` (R1).

        Raises ``PageError``, and frees nothing, if a page is not allocated or named twice.
        """
        self._check(pages)
        for page in pages:
            if page not in self._used:
                raise PageError(f"{self._of}: page {page} is not allocated; free each page once, by the owner of the list")
        self._used.difference_update(pages)
        self._free.extend(int(page) for page in pages)

    @torch.no_grad()
    def write(self, cache: Cache | Layers, pages: Sequence[int], start: int, n_tokens: int) -> None:
        """Copy tokens ``start .. start+n_tokens`` of a request's cache into its pages; token ``i`` goes to ``pages[i // page_size]``.

        A chunk may begin and end in the middle of a page; a page is complete once ``start + n_tokens`` has passed its end.
        Raises ``PageError``, and writes nothing, if the cache does not fit the pool, or the pages or the cache do not reach that far.
        """
        slots = self._slots(pages, start, n_tokens)
        if n_tokens == 0:
            return
        targets = [tensor for layer in zip(self.keys, self.values, strict=True) for tensor in layer]
        sources = [self._fitting(number, tensor, targets[number], start + n_tokens) for number, tensor in enumerate(self._tensors(cache))]
        for source, target in zip(sources, targets, strict=True):
            heads = source[0] if source.shape[1] == len(self._heads) else source[0, self._heads.start : self._heads.stop]
            chunk = heads[:, start : start + n_tokens].transpose(0, 1)
            target.flatten(0, 1).index_copy_(0, slots, chunk.to(target.device))

    @torch.no_grad()
    def read(self, pages: Sequence[int], n_tokens: int) -> DynamicCache:
        """A new cache of the first ``n_tokens`` tokens that lie in ``pages``, of the heads here; it shares no memory with the pool.

        Raises ``PageError`` if the pages do not reach that far.
        """
        slots = self._slots(pages, 0, n_tokens)
        cache = DynamicCache(config=self.config)
        if n_tokens == 0:
            return cache
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            k, v = (tensor.flatten(0, 1)[slots].transpose(0, 1).unsqueeze(0).contiguous() for tensor in (keys, values))
            cache.update(k, v, layer)
        return cache

    @property
    def _of(self) -> str:
        return f"pool {shown(self.pool.name)}"

    def _check(self, pages: Sequence[int]) -> None:
        check_distinct(self.pool.name, self.pool.indices(pages), self.pool.num_pages)

    def _slots(self, pages: Sequence[int], start: int, n_tokens: int) -> torch.Tensor:
        """Row of each token in a tensor whose pages are laid end to end; int64, shape ``[n_tokens]``."""
        self._check(pages)
        size, end = self.pool.page_size, start + n_tokens
        if start < 0 or n_tokens < 0 or end > len(pages) * size:
            raise PageError(f"{self._of}: tokens {start} .. {end} do not lie in {len(pages)} pages of {size}; pass the whole page table")
        device = self.keys[0].device
        tokens = torch.arange(start, end, device=device)
        table = torch.tensor([int(page) for page in pages], dtype=torch.int64, device=device)
        return table[tokens // size] * size + tokens % size if n_tokens else tokens

    def _tensors(self, cache: Cache | Layers) -> list[torch.Tensor | None]:
        """K and V of layer 0, K and V of layer 1, and so on."""
        layers = _dynamic(cache) if isinstance(cache, Cache) else cache
        if len(layers) != len(self.keys):
            raise PageError(
                f"{self._of}: the cache has {len(layers)} layers, not {len(self.keys)}; pass a DynamicCache of the pool's model"
            )
        return [tensor for layer in layers for tensor in layer]

    def _fitting(self, number: int, tensor: torch.Tensor | None, target: torch.Tensor, end: int) -> torch.Tensor:
        """The tensor as given, once it is known to be of the pool's shape and to hold ``end`` tokens."""
        what = f"{self._of}: {'KV'[number % 2]} of layer {number // 2}"
        heads, head_dim = self._total, target.shape[3]
        shape = [] if tensor is None else list(tensor.shape)
        if tensor is None or len(shape) != 4 or [shape[0], shape[3]] != [1, head_dim] or shape[1] not in (heads, len(self._heads)):
            raise PageError(f"{what} has shape {shape}, not [1, {heads}, tokens, {head_dim}]; pass the cache of one request of this model")
        if tensor.dtype != target.dtype:
            raise PageError(f"{what} is {tensor.dtype}, the pool {target.dtype}; build the pool with the model's dtype")
        if shape[2] < end:
            raise PageError(f"{what} holds {shape[2]} tokens of {end}; write a chunk after the model has run it")
        return tensor


def _dynamic(cache: Cache) -> list[tuple[torch.Tensor | None, torch.Tensor | None]]:
    return [(layer.keys, layer.values) for layer in cache.layers if type(layer) is DynamicLayer]


def _geometry(config: PretrainedConfig) -> tuple[int, int, int]:
    """Layers, KV heads and head size of a decoder; raises ``ConfigError`` if its layers are not all plain attention."""
    layers = DynamicCache(config=config).layers
    for number, layer in enumerate(layers):
        if type(layer) is not DynamicLayer:
            kind = type(layer).__name__
            raise ConfigError(f"model {shown(config.model_type)}: layer {number} caches as {kind}; choose a model of full attention")
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return len(layers), int(heads), int(head_dim)
