"""``bench abort``: how long it takes until the other side of a room knows of an abort, while many rooms are live."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

import kvcore
from kvcore.bench.fields import percentiles, told
from kvcore.bench.setup import Go, Ready, Setup, buffer_for, manager, started
from kvcore.bench.waiting import PAGE_BYTES, Opener, Waiting
from kvcore.progress import Watch
from kvcore.sides import SIDES, Close, Link, ToolError
from kvcore.states import KVPoll, Side


@dataclass(frozen=True, slots=True)
class Parameters:
    """What is measured: all rooms are aborted by one side, and in another turn by the other."""

    rooms: Annotated[int, told("Rooms that are live at first.")] = 1000
    gap_s: Annotated[float, told("Seconds from one abort to the next.")] = 0.002
    repeats: Annotated[int, told("How often either side aborts all of them.")] = 3


@dataclass(frozen=True, slots=True)
class Result:
    """Aborts by one side: from the call of ``abort`` until a thread of the other side that waits has seen FAILED, of all repeats
    together. Of several ranks the first aborts, and the last of the other side's counts."""

    aborted_by: Annotated[Side, told("The side that aborts.")]
    rooms: Annotated[int, told("Rooms that are live at first.")]
    median_ms: Annotated[float, told("Milliseconds until the other side knows: the median of all rooms.")]
    median_ms_each: tuple[float, ...]
    p99_ms: Annotated[float, told("Milliseconds until the other side knows, which 99 % of all rooms do not exceed.")]
    p99_ms_each: tuple[float, ...]
    max_ms: Annotated[float, told("Milliseconds until the other side knows: the most of all rooms.")]
    ms_percentiles: Annotated[tuple[float, ...], told("Milliseconds until the other side knows: percentiles 0 to 100 of all rooms.")]


@dataclass(frozen=True, slots=True)
class Times:
    """From a side: when it aborted each room, or saw that it was. The clock is the machine's, the same for all processes."""

    seconds: tuple[float, ...]


def measure(setup: Setup, parameters: Parameters, watch: Watch) -> list[Result]:
    """Measure aborts by either side; of the repeats all count together. Raises ``ToolError`` if a room fails for another reason."""
    results = []
    with started(work, setup, (setup, parameters), watch) as sides:
        for aborting, other in (SIDES, SIDES[::-1]):
            took = list[list[float]]()
            for repeat in range(1, parameters.repeats + 1):
                sides.begin("measuring", f"aborts by {aborting}, {repeat} of {parameters.repeats}")
                sides.tell_both(Go(aborting))
                sides.hear_all(Ready)
                sides.tell_both(Go())
                aborted, seen = ([each.seconds for each in sides.hear_side(side, Times)] for side in (aborting, other))
                took.append(list(1e3 * (np.max(seen, axis=0) - np.array(aborted[0]))))
            results.append(result(aborting, took))
        sides.close()
    return results


def result(aborted_by: Side, took_ms: Sequence[Sequence[float]]) -> Result:
    """What the repeats come to."""
    spread, each = percentiles(np.concatenate(took_ms)), [percentiles(one) for one in took_ms]
    medians, tails = (tuple(one[percent] for one in each) for percent in (50, 99))
    return Result(aborted_by, len(took_ms[0]), spread[50], medians, spread[99], tails, spread[100], spread)


def table(results: Sequence[Result]) -> Iterator[str]:
    """The results for people."""
    yield "aborted by   live rooms   ms until the other side knows: median     p99     max"
    for one in results:
        yield f"{one.aborted_by:<10} {one.rooms:>12} {one.median_ms:>39.2f} {one.p99_ms:>7.2f} {one.max_ms:>7.2f}"


def work(side: Side, settings: tuple[Setup, Parameters], link: Link) -> None:
    """One of the processes. Of a side that aborts the first rank does, and the others see it too."""
    setup, parameters = settings
    with manager(side, setup, buffer_for(side, setup, 1, PAGE_BYTES * setup.ranks.heads), link) as mine:
        opener = Opener(mine, side, link)
        opener.meet(setup)
        attempt = 1
        while not isinstance(order := link.hear(object), Close):
            assert isinstance(order, Go)
            waiting = Waiting(opener, setup, attempt)
            waiting.grow(parameters.rooms)
            link.tell(Ready())
            link.hear(Go)
            aborts = order.way == side and not link.rank
            times = _abort(waiting.handles, parameters.gap_s) if aborts else _see(waiting.handles, setup)
            link.tell(Times(tuple(times)))
            waiting.clear()
            attempt += 1


def _abort(handles: Sequence[kvcore.Handle], gap_s: float) -> Iterator[float]:
    for handle in handles:
        yield time.monotonic()
        handle.abort("measured")
        threading.Event().wait(gap_s)


def _see(handles: Sequence[kvcore.Handle], setup: Setup) -> Iterator[float]:
    for handle in handles:
        state = handle.wait(setup.patience_s)
        seen = time.monotonic()
        failure = handle.failure
        if state is not KVPoll.FAILED or failure is None or failure.code is not kvcore.FailureCode.ABORTED:
            raise ToolError(f"room {handle.room} is {state.name} ({failure}) where it was aborted; try: kvcore doctor {setup.backend}")
        yield seen
