"""The events of all processes of a failed check as one sequence. They count time on the host's one monotonic clock."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvcore_conformance.report.model import Story


@dataclass(frozen=True)
class Line:
    """An event: seconds before the last one of all, or None where it names no time, who saw it, and what it was."""

    before: float | None
    role: str
    text: str

    @property
    def clock(self) -> str:
        """The time as it is shown."""
        return "" if self.before is None else f"{-self.before:.3f}"


def interleaved(stories: Sequence[Story]) -> list[Line]:
    """All events in the order in which they happened; one that names no time stays behind the one before it."""
    found = [event for story in stories for event in _timed(story)]
    last = max((at for _, at, _, _ in found if at is not None), default=0.0)
    return [Line(None if at is None else last - at, role, text) for _, at, role, text in sorted(found, key=lambda event: event[0])]


def _timed(story: Story) -> Iterator[tuple[float, float | None, str, str]]:
    """Of each event: where it belongs, its time, who saw it, and its text."""
    place = math.inf
    for event in story.events:
        head, _, rest = event.partition(" ")
        try:
            place = at = float(head)
            yield place, at, story.role, rest.removesuffix(" reason=")
        except ValueError:
            yield place, None, story.role, event
