"""Carrying many rooms as the scheduler of an engine does: one thread begins them and looks at all of them, again and again.

It was measured against asyncio, with a task for each room in flight: that takes a tenth to a fifth more CPU time a room on decode, which is
not kvcore's to answer for, and is no quicker.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, MutableSequence

import kvcore
from kvcore.bench.setup import Setup
from kvcore.sides import ToolError

STEP_S = 0.001
"""Between two looks at many rooms; an engine's step takes longer."""
LAG_S = 0.0001
"""Between two looks whether other ranks have come as far."""

Ended = MutableSequence[int]
"""Of each rank of a side how many rooms it has seen the end of."""


def all_ended(ranks: int) -> Ended:
    """In memory that the processes share which are given it as they start."""
    return multiprocessing.get_context("spawn").RawArray("q", ranks) if ranks > 1 else [0]


class Pace:
    """How far one rank is, which must not run ahead: an engine opens a room on all ranks of a side, and it is over when it is on all."""

    def __init__(self, ended: Ended, rank: int) -> None:
        self._begun, self._ended, self._rank = 0, ended, rank

    @property
    def under_way(self) -> int:
        """Rooms that have begun here and have not ended everywhere."""
        return self._begun - min(self._ended)

    def begin(self) -> None:
        """A room begins here."""
        self._begun += 1

    def end(self) -> None:
        """A room has ended here."""
        self._ended[self._rank] += 1


def carry(
    mine: kvcore.KVManager,
    setup: Setup,
    numbers: Iterable[int],
    at_once: int,
    begin: Callable[[int], kvcore.Handle],
    pace: Pace | None = None,
) -> tuple[list[float], list[float]]:
    """Carry rooms to SUCCESS and clear them, so many at a time, the next as soon as one has ended. Returns the seconds that each took,
    from its ``begin`` until this thread saw its end, and when it began on the clock that all processes of the machine share. Raises the
    failure of one that fails, and ``ToolError`` if none ends for long. ``pace``: of this rank of several.

    One at a time is waited for; where there are several all are polled every millisecond, and their times are that much coarser.
    """
    left, pace, seen = deque(numbers), pace or Pace([0], 0), time.monotonic()
    took, began = list[float](), list[float]()
    live: dict[kvcore.Handle, int] = {}
    pause = threading.Event()
    while left or live:
        while left and pace.under_way < at_once:
            pace.begin()
            began.append(time.monotonic())
            live[begin(left.popleft())] = len(took)
            took.append(0.0)
        if live and at_once == 1:
            next(iter(live)).wait(setup.patience_s)
        else:
            pause.wait(STEP_S if live else LAG_S)
        handles = list(live)
        states, now = mine.poll_all(handles), time.monotonic()
        for handle, state in zip(handles, states, strict=True):
            if state.terminal:
                seen, number = now, live.pop(handle)
                took[number] = now - began[number]
                pace.end()
                handle.raise_for_failure()
                handle.clear()
        if live and now - seen > setup.patience_s:
            first = handles[0]
            raise ToolError(
                f"room {first.room} is still {first.poll().name} after {setup.patience_s:g} s; try: kvcore doctor {setup.backend}"
            )
    return took, began
