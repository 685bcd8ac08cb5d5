"""``bench plan``: median times of the planner, which needs neither a backend nor memory, beside their targets."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from kvcore import mapping
from kvcore.bench.fields import told
from kvcore.layouts import Heads, Place
from kvcore.memory import Indices, PoolGeometry, Region
from kvcore.planner import Layout, plan, split

PAGE_BYTES = 32 * 1024
NUM_PAGES = 65536


@dataclass(frozen=True, slots=True)
class Parameters:
    """How the planner is measured."""

    repeats: Annotated[int, told("How often each case is planned.")] = 30


@dataclass(frozen=True, slots=True)
class Case:
    """One chunk. Towards several decode ranks, each of which gets its heads of every page, it is planned in strided form and not
    written out."""

    pages: Annotated[int, told("Pages of the chunk.")]
    regions: Annotated[int, told("Regions that each of them lies in.")]
    scattered: Annotated[bool, told("Whether the pages lie scattered, or in one run.")]
    cut: Annotated[int | None, told("Descriptors of one batch; null where the chunk is not cut into batches.")]
    target_ms: Annotated[float, told("Milliseconds that the median must not exceed.")]
    ranks: Annotated[int, told("Decode ranks that the chunk goes to.")] = 1

    def __str__(self) -> str:
        kind = "scattered pages" if self.scattered else "pages in one run"
        cut = f", batches of {self.cut}" if self.cut is not None else ""
        ranks = f" x {self.ranks} ranks, a slice of heads each" if self.ranks > 1 else ""
        return f"{self.pages} {kind} x {self.regions} regions{cut}{ranks}"


@dataclass(frozen=True, slots=True)
class Result:
    """One case's times."""

    case: Annotated[Case, told("The chunk that was planned.")]
    median_ms: Annotated[float, told("Milliseconds from page indices to descriptors: the median.")]
    median_ms_each: tuple[float, ...] = ()

    @property
    def missed(self) -> bool:
        """Whether it took longer than its target."""
        return self.median_ms > self.case.target_ms


CASES = (
    Case(2048, 128, True, None, 5.0),
    Case(8192, 128, True, None, 20.0),
    Case(8192, 128, True, 4096, 20.0),
    Case(8192, 128, False, None, 0.5),
    Case(1, 128, False, None, 0.5),
    Case(2048, 61, True, None, 60.0, ranks=8),
)


def measure(parameters: Parameters, cases: Sequence[Case] = CASES) -> list[Result]:
    """Plan every case."""
    times = [(case, _times_ms(case, parameters.repeats)) for case in cases]
    return [Result(case, statistics.median(each), each) for case, each in times]


def table(results: Sequence[Result]) -> Iterator[str]:
    """The results for people."""
    yield "median ms   target ms   chunk"
    for one in results:
        yield f"{one.median_ms:>9.3f} {one.case.target_ms:>11g}   {one.case}{'  MISSED' if one.missed else ''}"


def _times_ms(case: Case, repeats: int) -> tuple[float, ...]:
    """Milliseconds of planning a chunk and cutting it into batches."""
    here, there, pages, times = _layout(case.regions), _layout(case.regions, case.ranks), _pages(case), []
    geometries = [here.pools["kv"].geometry], [there.pools["kv"].geometry]
    decode = [Place(tp_size=case.ranks, tp_rank=rank) for rank in range(case.ranks)]
    each = [mapping.shares(*geometries, Place(), place, turn=0) for place in decode]
    for _ in range(repeats):
        began = time.perf_counter()
        for shares in each:
            planned = plan(here, there, {"kv": pages}, shares)
            if case.ranks == 1:
                for batch in split(planned, case.cut, None):
                    batch.descriptors()
        times.append(1e3 * (time.perf_counter() - began))
    return tuple(times)


def _layout(regions: int, ranks: int = 1) -> Layout:
    """One pool of ``regions`` regions somewhere high in the address space, of one of so many ranks; nothing is allocated."""
    page_bytes = PAGE_BYTES // ranks
    nbytes = NUM_PAGES * page_bytes
    listed = [Region(0x7000_0000_0000 + number * nbytes, nbytes, layer=number) for number in range(regions)]
    layers, parts = tuple(range(regions)), ("",) * regions
    geometry = PoolGeometry("kv", NUM_PAGES, 16, "float16", (page_bytes,) * regions, layers, parts, Heads(8, 128))
    return Layout.of([geometry], listed)


def _pages(case: Case) -> tuple[Indices, Indices]:
    """The chunk's pages on both sides; scattered ones have no run worth merging."""
    if case.scattered:
        random = np.random.default_rng(0)
        return random.permutation(NUM_PAGES)[: case.pages], random.permutation(NUM_PAGES)[: case.pages]
    run = np.arange(case.pages, dtype=np.int64)
    return run, run + 7
