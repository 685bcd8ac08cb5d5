"""Timers that cost nothing to cancel: one ordered queue per delay, since what is armed later with the same delay is due later."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from heapq import merge
from itertools import islice, takewhile
from operator import itemgetter
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Timers(Generic[Key]):
    """Keys with a time at which they are due. Not thread-safe: its owner's lock guards it. A signal handler may raise in the middle of any
    call: whatever is queued has a delay then, and what has a delay need not be queued."""

    def __init__(self) -> None:
        self._queues: dict[float, OrderedDict[Key, float]] = {}
        self._delay_of: dict[Key, float] = {}

    def __len__(self) -> int:
        return len(self._delay_of)

    def arm(self, key: Key, delay: float, now: float) -> None:
        """Have ``key`` due ``delay`` seconds from ``now``; one that is armed already starts anew."""
        self.cancel(key)
        queue = self._queues.setdefault(delay, OrderedDict())
        self._delay_of[key] = delay
        queue[key] = now + delay

    def cancel(self, key: Key) -> None:
        """Forget ``key``; harmless if it is not armed."""
        delay = self._delay_of.get(key)
        if delay is not None:
            queue = self._queues.setdefault(delay, OrderedDict())
            queue.pop(key, None)
            if not queue:
                del self._queues[delay]
            self._delay_of.pop(key, None)

    def next_due(self) -> float | None:
        """When the first key is due; None if none is armed."""
        return min((at for queue in self._queues.values() for at in islice(queue.values(), 1)), default=None)

    def take_due(self, now: float, most: int | None = None) -> list[Key]:
        """Remove and return keys that are due, up to so many (None: all): those first that are for the longest time."""
        in_order = merge(*(queue.items() for queue in self._queues.values()), key=itemgetter(1))
        due = [key for key, _ in islice(takewhile(lambda item: item[1] <= now, in_order), most)]
        for key in due:
            self.cancel(key)
        return due
