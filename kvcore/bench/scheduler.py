"""A scheduler of ``bench trace``: one side of it, which never waits for a room and looks at all of them in turn.

Requests come in time. Either side has a prefix cache. Prefill writes the pages that are not in its, which stands for its computation, and
decode compares all; each does that on a thread beside, so that it is in no scheduler's way.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt

import kvcore
from kvcore.bench.bandwidth import listed
from kvcore.bench.fields import told
from kvcore.bench.page_content import PageContent
from kvcore.bench.prefix_cache import Lease, PrefixCache
from kvcore.bench.setup import Clock, Ready, Setup
from kvcore.bench.trace_file import BLOCK_TOKENS, Request
from kvcore.bench.waiting import Opener
from kvcore.buffers import Buffer
from kvcore.memory import Indices
from kvcore.sides import Link
from kvcore.states import Side

LOOK_S = 0.1
"""How often a side says how far it is, and counts its pages in quarantine."""

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Parameters:
    """What is played, and how."""

    trace: Annotated[Path, told("The trace's file, without its folder.")]
    requests: Annotated[int, told("At most so many requests, the first ones.")] = 1000
    speed: Annotated[float, told("How many times as fast as in the trace requests come and are decoded.")] = 10.0
    page_tokens: Annotated[int, told("Tokens of a page.")] = 64
    page_bytes: Annotated[int, told("Bytes of a page.")] = 16 << 10
    memory_bytes: Annotated[int, told("Bytes of either side's pool.")] = 256 << 20
    token_ms: Annotated[float, told("Milliseconds of the trace that decode holds a request's pages for each token of its output.")] = 20.0
    limit_ms: Annotated[float, told("Milliseconds from arrival to SUCCESS that a good request does not exceed.")] = 100.0
    step_ms: Annotated[float, told("Milliseconds between two looks of a scheduler at its rooms.")] = 0.5
    repeats: Annotated[int, told("How often all is played, after once for warming up, each time with nothing in memory.")] = 3

    @property
    def pages(self) -> int:
        """Of each side."""
        return self.memory_bytes // self.page_bytes


@dataclass(frozen=True, slots=True)
class Begin:
    """To both: the trace begins at this time of the machine's monotonic clock."""

    at_s: float


@dataclass(slots=True, eq=False)
class Played:
    """From a side that has played once, by request: when it had pages for it, and when these were complete (on prefill written, on decode
    SUCCESS), in seconds from the beginning; and the pages that moved, in order. Then the most pages in use and in quarantine, and CPU
    seconds, those of writing and comparing left out."""

    placed_s: Seconds
    complete_s: Seconds
    moved: list[Indices]
    pages_most: int = 0
    quarantined_most: int = 0
    cpu_s: float = 0.0


class Aside:
    """A thread for what is not measured."""

    def __init__(self) -> None:
        self._pool, self._cpu_s = ThreadPoolExecutor(1, "kvcore-bench-pages"), 0.0

    def do(self, what: Callable[[], None]) -> Future[float]:
        """When it is done, the result is the time of the monotonic clock; or its error is raised."""
        return self._pool.submit(self._do, what)

    def close(self) -> float:
        """CPU seconds of all that was done."""
        self._pool.shutdown()
        return self._cpu_s

    def _do(self, what: Callable[[], None]) -> float:
        began = time.thread_time()
        what()
        self._cpu_s += time.thread_time() - began
        return time.monotonic()


Settings = tuple[Setup, Parameters, Sequence[Request]]


class Scheduler(ABC):
    """One side. ``step`` is what a serving engine does between two forward passes: nothing in it blocks."""

    side: Side

    def __init__(self, opener: Opener, mine: kvcore.KVManager, buffer: Buffer, settings: Settings, attempt: int) -> None:
        self.mine, self.buffer = mine, buffer
        self.setup, self.parameters, self.requests = settings
        self._opener, self._attempt = opener, attempt
        count = len(self.requests)
        self.played = Played(np.zeros(count), np.zeros(count), [np.empty(0, np.int64)] * count)
        self.cache = PrefixCache(listed("scattered", self.side, self.parameters.pages).tolist())
        self.content = PageContent(self.parameters.page_bytes)
        self.aside = Aside()
        self._began = 0.0

    @abstractmethod
    def open(self, number: int) -> None:
        """A request has arrived."""

    @abstractmethod
    def step(self) -> None:
        """Look at everything once."""

    @property
    @abstractmethod
    def left(self) -> int:
        """Requests that have arrived and are not over."""

    @property
    @abstractmethod
    def due_s(self) -> float:
        """When there may be something to do, if nothing arrives; the past if rooms are under way."""

    def room(self, number: int) -> kvcore.Handle:
        """A request's room, open on this side."""
        return self._opener.open(number + 1, self._attempt)

    def lease(self, number: int) -> Lease | None:
        """Pages for a request, as far as they are not there already; None if too many are in use."""
        request = self.requests[number]
        lease = self.cache.lease(request.blocks, request.pages(self.parameters.page_tokens))
        if lease is not None:
            self.played.pages_most = max(self.played.pages_most, self.cache.in_use)
            self.played.placed_s[number] = self.now()
        return lease

    def now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    def serials(self, number: int) -> Indices:
        """Which content each page of a request has, by number: that of its block, and where it is in it."""
        whole = BLOCK_TOKENS // self.parameters.page_tokens
        blocks = np.array(self.requests[number].blocks, np.int64)
        all_whole: Indices = (blocks[:, None] * whole + np.arange(whole)).ravel()
        return all_whole[: sum(self.requests[number].pages(self.parameters.page_tokens))]

    def play(self, link: Link) -> None:
        """The whole trace, from the driver's word on until the last page is free."""
        link.tell(Ready())
        self._began = link.hear(Begin).at_s
        arrivals = [request.arrival_s / self.parameters.speed for request in self.requests] + [float("inf")]
        pause, arrived, look_s = threading.Event(), 0, 0.0
        pause.wait(max(0.0, -self.now()))
        clock = Clock()
        while arrived < len(self.requests) or self.left:
            while arrivals[arrived] <= self.now():
                self.open(arrived)
                arrived += 1
            self.step()
            if self.now() >= look_s:
                look_s = self.now() + LOOK_S
                self._look(link, arrived)
            idle_s = min(self.due_s, arrivals[arrived], look_s) - self.now()
            pause.wait(max(self.parameters.step_ms / 1e3, idle_s))
        self.played.cpu_s = clock.read().cpu_s - self.aside.close()

    def _look(self, link: Link, arrived: int) -> None:
        self.played.quarantined_most = max(self.played.quarantined_most, self.mine.stats().quarantined_pages)
        link.progress(f"{arrived - self.left} of {len(self.requests)} requests are over, {self.left} under way")
