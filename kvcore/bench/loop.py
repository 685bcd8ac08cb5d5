"""Carrying many rooms as the scheduler of an engine does: one thread begins them and looks at all of them, again and again.

It was measured against asyncio, with a task for each room in flight: that takes a tenth to a fifth more CPU time a room on decode, which is
not kvcore's to answer for, and is no quicker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import kvcore
from kvcore.bench.setup import Setup
from kvcore.sides import ToolError

STEP_S = 0.001
"""Between two looks at many rooms; an engine's step takes longer."""


def carry(mine: kvcore.KVManager, setup: Setup, numbers: Iterable[int], at_once: int, begin: Callable[[int], kvcore.Handle]) -> list[float]:
    """Carry rooms to SUCCESS and clear them, so many at a time, the next as soon as one has ended. Returns the seconds that each took,
    from its ``begin`` until this thread saw its end. Raises the failure of one that fails, and ``ToolError`` if none ends for long.

    One at a time is waited for; where there are several all are polled every millisecond, and their times are that much coarser.
    """
    left, took, seen = iter(numbers), list[float](), time.perf_counter()
    live: dict[kvcore.Handle, float] = {}
    pause = threading.Event()
    while True:
        while len(live) < at_once and (number := next(left, None)) is not None:
            began = time.perf_counter()
            live[begin(number)] = began
        if not live:
            return took
        if at_once == 1:
            next(iter(live)).wait(setup.patience_s)
        else:
            pause.wait(STEP_S)
        handles = list(live)
        states, now = mine.poll_all(handles), time.perf_counter()
        for handle, state in zip(handles, states, strict=True):
            if state.terminal:
                seen = now
                took.append(now - live.pop(handle))
                handle.raise_for_failure()
                handle.clear()
        if now - seen > setup.patience_s:
            first = handles[0]
            raise ToolError(
                f"room {first.room} is still {first.poll().name} after {setup.patience_s:g} s; try: kvcore doctor {setup.backend}"
            )
