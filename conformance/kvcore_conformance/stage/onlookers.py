"""Many threads of a child at once on one room, as a test asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvcore_conformance.child.crowd import JOIN_S
from kvcore_conformance.stage.driver import Child, Handle

AT_ONCE_S = 2.5
"""For a call that waits for nothing: more than a busy machine makes of it, and less than what is stuck takes."""


@dataclass
class Seen:
    """What the threads saw of a handle's room, filled in when they are called off."""

    handle: Handle
    polled: list[list[str]] = field(default_factory=list)
    """Per thread, each state once as long as it stayed."""
    stored: list[list[str]] = field(default_factory=list)
    """The same of the shared store."""
    unexplained: int = 0
    """How often it was FAILED without a reason."""


@contextmanager
def watched(*handles: Handle) -> Iterator[list[Seen]]:
    """Threads look at the rooms of handles until the block ends."""
    for handle in handles:
        handle.child.work("watch", handle.name, f"watch {handle.name}")
    seen = [Seen(handle) for handle in handles]
    yield seen
    for one in seen:
        found = one.handle.child.call(f"watch {one.handle.name}", "ended", waits_s=JOIN_S)
        one.polled, one.stored, one.unexplained = found["polled"], found["stored"], found["unexplained"]


def together(child: Child, *calls: tuple[Handle, str, str]) -> float:
    """Calls of handles' methods with one argument, at one moment from as many threads. None may raise; the seconds of the slowest."""
    found = child.work("together", [(handle.name, do, [argument]) for handle, do, argument in calls], waits_s=JOIN_S)
    assert not found["errors"], f"calls from {len(calls)} threads at once raised {found['errors']}"
    return float(found["slowest_s"])
