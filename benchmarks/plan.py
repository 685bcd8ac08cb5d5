"""Median times of the planner: ``python benchmarks/plan.py``. Exits with 1 if one is above its target."""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np

from kvcore.memory import Indices, PoolGeometry, Region
from kvcore.planner import Layout, plan, split

PAGE_BYTES = 32 * 1024
REPEATS = 30


def layout(regions: int, num_pages: int) -> Layout:
    """One pool of ``regions`` regions somewhere high in the address space; nothing is allocated."""
    nbytes = num_pages * PAGE_BYTES
    listed = [Region(0x7000_0000_0000 + number * nbytes, nbytes, layer=number) for number in range(regions)]
    layers = tuple(range(regions))
    return Layout.of([PoolGeometry("kv", num_pages, 16, "float16", (PAGE_BYTES,) * regions, layers, ("",) * regions)], listed)


def scattered(pages: int, num_pages: int) -> tuple[Indices, Indices]:
    """Pages without a run worth merging, in random order on both sides."""
    random = np.random.default_rng(0)
    return random.permutation(num_pages)[:pages], random.permutation(num_pages)[:pages]


def median_ms(pages: tuple[Indices, Indices], side: Layout, cut: int | None = None) -> float:
    """Median milliseconds of planning one chunk and cutting it into batches of ``cut`` descriptors."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _batch in split(plan(side, side, {"kv": pages}), cut, None):
            pass
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1000


def main() -> int:
    """Measure every case, print a line each, and say whether all met their targets."""
    side = layout(128, 65536)
    run = np.arange(8192, dtype=np.int64)
    cases = [
        ("2048 scattered pages x 128 regions", scattered(2048, 65536), None, 10.0),
        ("8192 scattered pages x 128 regions", scattered(8192, 65536), None, 40.0),
        ("8192 scattered pages x 128 regions, batches of 4096", scattered(8192, 65536), 4096, 40.0),
        ("one run of 8192 pages x 128 regions", (run, run + 7), None, 0.5),
        ("one page x 128 regions", (run[:1], run[:1]), None, 0.5),
    ]
    missed = 0
    for name, pages, cut, target in cases:
        took = median_ms(pages, side, cut)
        missed += took > target
        print(f"{took:9.3f} ms  (target {target:4g} ms)  {name}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
