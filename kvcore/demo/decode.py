"""The decode side: publish pages of its own for every prompt, wait for them to be filled, go on from them alone.

With several ranks each gets the heads it holds, and gives them to the first, which generates.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import DynamicCache

import kvcore
from kvcore.demo.messages import Begin, Generated, Part, Settings
from kvcore.demo.models import Loaded, greedy, load
from kvcore.demo.rooms import abort_pages, clear_all, context_pages, ended, limits, pool_for, succeeded, used
from kvcore.handles import Receiver
from kvcore.integrations.transformers import PagedKV
from kvcore.sides import Close, Link, ToolError


@dataclass(frozen=True, slots=True)
class Request:
    """A room and the pages it fills. Of the prompt nothing is known here but its number of tokens."""

    receiver: Receiver
    pages: list[int]


def run(settings: Settings, link: Link) -> None:
    """Take over all prompts, abort one more room half-way, clear."""
    kvcore.load_backend(settings.backend)
    loaded = load(settings.model, link.progress)
    begin = link.hear(Begin)
    topology = kvcore.Topology(tp_size=settings.decode_tp, tp_rank=link.rank)
    kv = pool_for(loaded, settings.page_size, begin.lengths, seed=2, topology=topology)  # so no page has the index here that it has there
    config = kvcore.Config(role="decode", backend=settings.backend, topology=topology, limits=limits(settings.patience_s))
    with kvcore.KVManager(config, pools=[kv.pool]) as manager:
        needed = [context_pages(length, settings.page_size) for length in begin.lengths]
        requests = [_open(manager, kv, begin.address, room, n_pages) for room, n_pages in enumerate(needed)]
        for room, request in enumerate(requests):
            succeeded(request.receiver, settings.patience_s)
            link.progress(f"decoding from received pages: {room + 1} of {len(requests)}")
            cache = kv.read(request.pages, begin.lengths[room] - 1)
            if link.rank:
                link.tell(Part(room, _arrays(cache), request.receiver.metrics.bytes))
                continue
            parts = [link.hear(Part) for _ in range(1, settings.decode_tp)]
            link.tell(_generate(room, request, _joined(cache, parts, kv), parts, loaded, settings.max_new_tokens))
        aborted = _open(manager, kv, begin.address, len(requests), abort_pages(begin.lengths, settings.page_size))
        if link.rank:
            aborted.receiver.wait(settings.patience_s)  # the first rank aborts it for all
        else:
            _abort_half_way(aborted.receiver, settings.patience_s)
        link.tell(ended(aborted.receiver))
        rooms = [(request.receiver, request.pages) for request in (*requests, aborted)]
        link.tell(clear_all(manager, kv, rooms, settings.patience_s))
        link.tell(used(settings.backend))
        link.hear(Close)


def _open(manager: kvcore.KVManager, kv: PagedKV, prefill: str, room: int, n_pages: int) -> Request:
    """Join a room and publish the pages it is to fill."""
    pages = kv.allocate(n_pages)
    receiver = manager.receiver(room, prefill=prefill)
    receiver.receive(pages)
    return Request(receiver, pages)


def _arrays(cache: DynamicCache) -> tuple[tuple[object, object], ...]:
    return tuple((keys.numpy(), values.numpy()) for keys, values, *_ in cache) if cache.get_seq_length() else ()


def _joined(cache: DynamicCache, parts: Sequence[Part], kv: PagedKV) -> DynamicCache:
    """The heads of all ranks, in their order."""
    if not parts or not cache.get_seq_length():
        return cache
    whole = DynamicCache(config=kv.config)
    for layer, own in enumerate(_arrays(cache)):
        keys, values = (
            torch.from_numpy(np.concatenate(some, axis=1)) for some in zip(own, *(part.layers[layer] for part in parts), strict=True)
        )
        whole.update(keys, values, layer)
    return whole


def _generate(room: int, request: Request, cache: DynamicCache, parts: Sequence[Part], loaded: Loaded, max_new_tokens: int) -> Generated:
    """Go on from the pages of this side's pools, its own page table and the prompt's last token alone."""
    receiver = request.receiver
    last = int.from_bytes(receiver.record or b"", "little")
    tokens = greedy(loaded, cache, [last], max_new_tokens)
    metrics = receiver.metrics
    nbytes = metrics.bytes + sum(part.nbytes for part in parts)
    return Generated(room, tuple(tokens), loaded.tokenizer.decode(tokens), metrics.pages, nbytes, metrics.total_s)


def _abort_half_way(receiver: Receiver, patience_s: float) -> None:
    """Wait until prefill has begun to fill the pages, then turn the room down."""
    deadline = time.monotonic() + patience_s
    while receiver.wait(0.01) is not kvcore.KVPoll.TRANSFERRING:
        receiver.raise_for_failure()
        if time.monotonic() > deadline:
            raise ToolError(
                f"room {receiver.room} is {receiver.poll().name} and not TRANSFERRING after {patience_s:g} s; see what prefill is doing"
            )
    receiver.abort("the demo wants no more of this room")
