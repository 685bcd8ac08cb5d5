"""The prefill side: compute the prompts chunk by chunk, write each chunk into pages, hand over the pages it completed.

With several ranks each computes all, and holds the heads of its own only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import DynamicCache

import kvcore
from kvcore.demo.messages import Begin, Expected, Ready, Settings
from kvcore.demo.models import Loaded, fill, greedy, load
from kvcore.demo.prompts import Prompt, default_prompts, prompts_from
from kvcore.demo.rooms import abort_pages, clear_all, context_pages, ended, limits, pool_for, succeeded, used
from kvcore.handles import Sender
from kvcore.integrations.transformers import PagedKV
from kvcore.sides import Close, Link, ToolError


@dataclass(slots=True)
class Job:
    """A prompt on its way: of its context (all tokens but the last) ``computed`` tokens are done and ``sent`` pages handed over."""

    prompt: Prompt
    sender: Sender
    pages: list[int]
    cache: DynamicCache
    computed: int = 0
    sent: int = 0

    @property
    def context(self) -> tuple[int, ...]:
        return self.prompt.tokens[:-1]


def run(settings: Settings, link: Link) -> None:
    """Serve all prompts, compute what is expected of decode (the first rank), be aborted once, clear."""
    kvcore.load_backend(settings.backend)  # one that cannot be used should not wait for the model
    loaded = load(settings.model, link.progress)
    prompts = _prompts(settings, loaded)
    lengths = tuple(len(prompt.tokens) for prompt in prompts)
    topology = kvcore.Topology(tp_size=settings.prefill_tp, tp_rank=link.rank)
    kv = pool_for(loaded, settings.page_size, lengths, seed=1, topology=topology)
    group = link.hear(Begin).address if link.rank else None
    config = kvcore.Config(role="prefill", backend=settings.backend, bootstrap=group, topology=topology, limits=limits(settings.patience_s))
    with kvcore.KVManager(config, pools=[kv.pool]) as manager:
        if not link.rank:
            link.tell(Ready(manager.address, tuple(prompt.text for prompt in prompts), lengths))
        jobs = [_open(manager, kv, loaded, room, prompt) for room, prompt in enumerate(prompts)]
        spoiled = _spoiled(jobs) if settings.corrupt else None
        _prefill(jobs, kv, loaded, spoiled, link)
        aborted = _half_way(manager, kv, jobs)
        for room, job in enumerate(jobs):
            succeeded(job.sender, settings.patience_s)
            link.progress(f"generating in one process: {room + 1} of {len(jobs)}")
            if not link.rank:
                link.tell(_expected(room, job, loaded, settings.max_new_tokens))
        aborted.sender.wait(settings.patience_s)
        link.tell(ended(aborted.sender))
        link.tell(clear_all(manager, kv, [(job.sender, job.pages) for job in (*jobs, aborted)], settings.patience_s))
        link.tell(used(settings.backend))
        link.hear(Close)


def _open(manager: kvcore.KVManager, kv: PagedKV, loaded: Loaded, room: int, prompt: Prompt) -> Job:
    pages = kv.allocate(context_pages(len(prompt.tokens), kv.pool.page_size))
    return Job(prompt, manager.sender(room), pages, DynamicCache(config=loaded.model.config))


def _prefill(jobs: Sequence[Job], kv: PagedKV, loaded: Loaded, spoiled: Job | None, link: Link) -> None:
    """One chunk of each prompt in turn, until all are computed and handed over."""
    waiting = list(jobs)
    while waiting:
        waiting = [job for job in waiting if not _advance(job, kv, loaded, spoils=job is spoiled)]
        link.progress(f"prefill: {len(jobs) - len(waiting)} of {len(jobs)} prompts done")


def _advance(job: Job, kv: PagedKV, loaded: Loaded, spoils: bool) -> bool:
    """Compute the next chunk, write it, hand over the pages that are complete now; True if it was the last chunk."""
    start = job.computed
    chunk = job.context[start : start + chunk_size(kv.pool.page_size)]
    if chunk:
        fill(loaded, job.cache, chunk)
        kv.write(job.cache, job.pages, start, len(chunk))
    job.computed += len(chunk)
    last = job.computed == len(job.context)
    # The chunk may end in the middle of a page: that page is handed over by the chunk that completes it, or by the last one.
    complete = len(job.pages) if last else job.computed // kv.pool.page_size
    if spoils and job.sent <= len(job.pages) // 2 < complete:
        _zero(kv, job.pages[len(job.pages) // 2])
    job.sender.send(job.pages[job.sent : complete], last=last, record=_record(job) if last else b"")
    job.sent = complete
    return last


def _record(job: Job) -> bytes:
    """The one token that decode needs beside the pages: the prompt's last, which it computes itself."""
    return job.prompt.tokens[-1].to_bytes(4, "little")


def chunk_size(page_size: int) -> int:
    """About 100 tokens, and no multiple of the page size, so that chunks end in the middle of pages (unless those hold one token)."""
    return 100 if 100 % page_size else 101


def _expected(room: int, job: Job, loaded: Loaded, max_new_tokens: int) -> Expected:
    """What one process alone generates from the whole prompt, computed at once: neither chunks nor pages nor kvcore have a part in it."""
    tokens = greedy(loaded, DynamicCache(config=loaded.model.config), job.prompt.tokens, max_new_tokens)
    return Expected(room, tuple(tokens), loaded.tokenizer.decode(tokens), job.sender.metrics.active_s)


def _half_way(manager: kvcore.KVManager, kv: PagedKV, jobs: Sequence[Job]) -> Job:
    """One room more, with the longest prompt: the first half of its pages is handed over, the rest never is."""
    longest = max(jobs, key=lambda job: len(job.context))
    size = kv.pool.page_size
    pages = kv.allocate(abort_pages([len(longest.prompt.tokens)], size))
    job = Job(longest.prompt, manager.sender(len(jobs)), pages, longest.cache)
    half = len(pages) // 2
    kv.write(job.cache, pages, 0, min(half * size, len(job.context)))
    job.sender.send(pages[:half])
    return job


def _spoiled(jobs: Sequence[Job]) -> Job:
    """The shortest prompt of eight pages or more, or else the longest: in a very long one a single page may go unnoticed."""
    job = min(jobs, key=lambda job: (len(job.pages) < 8, abs(len(job.pages) - 8)))
    if not job.pages:
        raise ToolError("no prompt has a page that could be corrupted; give a prompt of at least two tokens")
    return job


def _zero(kv: PagedKV, page: int) -> None:
    for tensor in (*kv.keys, *kv.values):
        tensor[page] = 0


def _prompts(settings: Settings, loaded: Loaded) -> list[Prompt]:
    tokenizer = loaded.tokenizer
    prompts = prompts_from(Path(settings.prompts), tokenizer) if settings.prompts else default_prompts(tokenizer)
    longest = max(len(prompt.tokens) for prompt in prompts) + settings.max_new_tokens
    if longest > loaded.max_tokens:
        raise ToolError(
            f"model {loaded.name!r} takes {loaded.max_tokens} tokens, {longest} needed; shorten the prompts or --max-new-tokens"
        )
    return prompts
