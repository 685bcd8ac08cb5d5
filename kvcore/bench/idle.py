"""``bench idle``: what a paired prefill and decode cost while nothing moves, without rooms and with many that wait: CPU time, memory, and
the time of looking at all of them."""

from __future__ import annotations

import gc
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from kvcore.bench.fields import by_side, told
from kvcore.bench.loop import carry
from kvcore.bench.setup import Clock, Go, Ready, Setup, buffer_for, manager, started
from kvcore.bench.waiting import PAGE_BYTES, SPARE_PAGE, Opener, Waiting
from kvcore.flight import MOST_ENTRIES
from kvcore.progress import Watch
from kvcore.sides import SIDES, Close, Link
from kvcore.states import Side

FILLING_ROOMS = MOST_ENTRIES // 12
"""After so many the flight record is full, as that of any instance that has served for a while: it is no part of what a room takes."""
FILLING_AT_ONCE = 8
LOOKS = 50
"""How often all rooms are polled for one median."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """What is measured: first without a room, then with all of them, published on decode, with nothing handed over on prefill."""

    rooms: Annotated[int, told("Rooms that wait in the second half.")] = 5000
    window_s: Annotated[float, told("Seconds between two looks at the clocks.")] = 5.0
    repeats: Annotated[int, told("How many such windows there are in each half.")] = 3


@dataclass(frozen=True, slots=True)
class Result:
    """Of so many waiting rooms; a figure is the median of the repeats. Of several ranks the sum, and the longest ``poll_all``."""

    rooms: Annotated[int, told("Rooms that wait.")]
    window_s: Annotated[float, told("Seconds between two looks at the clocks.")]
    prefill_cpu_percent: Annotated[float, told("CPU time of prefill's process, in percent of one core.")]
    prefill_cpu_percent_each: tuple[float, ...]
    decode_cpu_percent: Annotated[float, told("CPU time of decode's process, in percent of one core.")]
    decode_cpu_percent_each: tuple[float, ...]
    prefill_poll_all_ms: Annotated[float | None, told("Milliseconds of one poll_all of all rooms on prefill; null without rooms.")]
    prefill_poll_all_ms_each: tuple[float, ...]
    decode_poll_all_ms: Annotated[float | None, told("Milliseconds of one poll_all of all rooms on decode; null without rooms.")]
    decode_poll_all_ms_each: tuple[float, ...]
    prefill_bytes_per_room: Annotated[
        float | None, told("Bytes of memory that a room takes on prefill; null without rooms, and where the system does not tell.")
    ]
    decode_bytes_per_room: Annotated[
        float | None, told("Bytes of memory that a room takes on decode; null without rooms, and where the system does not tell.")
    ]


@dataclass(frozen=True, slots=True)
class Seen:
    """From a side: of each window its CPU share of a core in percent, of as many looks at all rooms their median in milliseconds, and
    bytes of memory a room."""

    cpu_percent: tuple[float, ...]
    poll_all_ms: tuple[float, ...]
    bytes_per_room: float | None


def measure(setup: Setup, parameters: Parameters, watch: Watch) -> list[Result]:
    """Measure without a room, then with all of them. Raises ``ToolError`` if a room does not wait all the time."""
    results = []
    with started(work, setup, (setup, parameters), watch) as sides:
        for rooms in (0, parameters.rooms):
            sides.begin("measuring", f"{rooms} waiting rooms")
            sides.tell_both(Go())
            sides.hear_all(Ready)
            sides.tell_both(Go())
            results.append(result(rooms, parameters, {side: of_side(sides.hear_side(side, Seen)) for side in SIDES}))
        sides.close()
    return results


def of_side(ranks: Sequence[Seen]) -> Seen:
    """What all ranks of a side come to: the sum of CPU and memory, and the longest look."""
    memory = [one.bytes_per_room for one in ranks if one.bytes_per_room is not None]
    cpu = tuple(sum(window) for window in zip(*(one.cpu_percent for one in ranks), strict=True))
    polls = tuple(max(looks) for looks in zip(*(one.poll_all_ms for one in ranks), strict=True))
    return Seen(cpu, polls, sum(memory) if memory else None)


def result(rooms: int, parameters: Parameters, seen: dict[Side, Seen]) -> Result:
    """What both sides saw of so many rooms."""
    return Result(
        rooms=rooms,
        window_s=parameters.window_s,
        **by_side("cpu_percent", {side: one.cpu_percent for side, one in seen.items()}),
        **by_side("poll_all_ms", {side: one.poll_all_ms for side, one in seen.items()}),
        prefill_bytes_per_room=seen["prefill"].bytes_per_room,
        decode_bytes_per_room=seen["decode"].bytes_per_room,
    )


def table(results: Sequence[Result]) -> Iterator[str]:
    """The results for people."""
    yield "waiting rooms   window s   % of a core: prefill  decode   poll_all ms: prefill  decode   bytes a room: prefill  decode"
    for one in results:
        cpu = f"{one.prefill_cpu_percent:>20.2f} {one.decode_cpu_percent:>7.2f}"
        polls = f"{_shown(one.prefill_poll_all_ms, '.3f'):>20} {_shown(one.decode_poll_all_ms, '.3f'):>7}"
        memory = f"{_shown(one.prefill_bytes_per_room, '.0f'):>21} {_shown(one.decode_bytes_per_room, '.0f'):>7}"
        yield f"{one.rooms:>13} {one.window_s:>10g}   {cpu}   {polls}   {memory}"


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def work(side: Side, settings: tuple[Setup, Parameters], link: Link) -> None:
    """One of the processes."""
    setup, parameters = settings
    with manager(side, setup, buffer_for(side, setup, 1, PAGE_BYTES * setup.ranks.heads), link) as mine:
        opener = Opener(mine, side, link)
        opener.meet(setup)
        filling = range(1, min(FILLING_ROOMS, 4 * parameters.rooms) + 1)  # a few rooms take nothing that could be told from chance
        carry(mine, setup, filling, FILLING_AT_ONCE * (1 + (side == "prefill")), lambda room: opener.begin(room, SPARE_PAGE))
        waiting = Waiting(opener, setup)
        for rooms in (0, parameters.rooms):
            link.hear(Go)
            link.progress(f"opening {rooms} rooms")
            before = _resident_bytes()
            waiting.grow(rooms)
            link.tell(Ready())
            link.hear(Go)
            after = _resident_bytes()
            memory = (after - before) / rooms if rooms and before is not None and after is not None else None
            cpu = tuple(_cpu_percent(number, parameters, link) for number in range(1, parameters.repeats + 1))
            polls = tuple(_median_ms(lambda: mine.poll_all(waiting.handles)) for _ in range(parameters.repeats if rooms else 0))
            waiting.check()
            link.tell(Seen(cpu, polls, memory))
        link.hear(Close)
        waiting.clear()  # this ends them on the other side too, which looks no more


def _cpu_percent(number: int, parameters: Parameters, link: Link) -> float:
    """This process's share of one core while its main thread waits."""
    link.progress(f"window {number} of {parameters.repeats}")
    clock = Clock()
    threading.Event().wait(parameters.window_s)
    measured = clock.read()
    return 100 * measured.cpu_s / measured.seconds


def _median_ms(call: Callable[[], object]) -> float:
    times = []
    for _ in range(LOOKS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def _resident_bytes() -> int | None:
    """Resident memory that no file and no other process has a part in; None where the system does not tell."""
    gc.collect()
    try:
        resident, shared = Path("/proc/self/statm").read_text(encoding="ascii").split()[1:3]
    except OSError:
        return None
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
