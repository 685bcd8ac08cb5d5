"""When a room's limits run out, and when it repeats itself: what is armed for each slot of the table.

What must be armed follows from the protocol's state and nothing else (S8). An ``Alarm`` is a key of its own, found by identity, since
comparing rooms and timers by value costs more than all the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvcore.protocol.events import Timer
from kvcore.timers import Timers

Owner = TypeVar("Owner")

FEW = 8
"""Up to so many are looked for one by one, which costs less than hashing them. A room has thousands where as many chunks are stuck."""


@dataclass(eq=False, slots=True)
class Alarm(Generic[Owner]):
    """Something armed for its ``owner``: a limit, or with None the next time that it repeats itself, ``delay_s`` after the last."""

    owner: Owner
    timer: Timer | None
    delay_s: float = 0.0


Armed = tuple[Alarm[Owner], ...]


class Alarms(Generic[Owner]):
    """All alarms of one table, whose lock guards them. ``limits``: seconds by name, or None; ``wake_by(when)`` is told of each alarm."""

    def __init__(self, limits: Mapping[str, float | None], wake_by: Callable[[float], None]) -> None:
        self._limits, self._wake_by = limits, wake_by
        self.timers: Timers[Alarm[Owner]] = Timers()

    def run(self, owner: Owner, armed: Armed[Owner], wanted: tuple[Timer, ...], now: float) -> Armed[Owner]:
        """Run exactly the ``wanted`` limits of an owner, of which some may be ``armed`` since before; returns what is armed now."""
        kept = []
        few = len(armed) + len(wanted) <= FEW
        expected: Collection[Timer | None] = wanted if few else frozenset(wanted)
        for alarm in armed:
            if alarm.timer in expected:
                kept.append(alarm)
            else:
                self.timers.cancel(alarm)
        known: Collection[Timer | None] = [alarm.timer for alarm in kept] if few else {alarm.timer for alarm in kept}
        for timer in wanted:
            delay = self._limits[timer.limit]
            if timer not in known:
                kept.append(Alarm(owner, timer))
                if delay is not None:
                    self.arm(kept[-1], delay, now)
        return tuple(kept)

    def arm(self, alarm: Alarm[Owner], delay: float, now: float) -> None:
        """Have it go off so many seconds from ``now``; one that is armed starts anew."""
        alarm.delay_s = delay
        self.timers.arm(alarm, delay, now)
        self._wake_by(now + delay)
