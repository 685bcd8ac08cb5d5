"""C7 and B4: after many rooms that ended in every way neither the core, nor the backend, nor the process holds more than before."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvcore_conformance.marks import full, rule
from kvcore_conformance.stage.arena import Pair, paired
from kvcore_conformance.stage.crew import Crew
from kvcore_conformance.stage.footprint import Footprint, lastly
from kvcore_conformance.stage.load import Load

MARGIN = {"threads": 3, "descriptors": 5, "resident": 6 * 1024}
"""What an engine may take for itself, and a room may not: a thread, a descriptor or 200 KiB a room are seen after 30 of them."""


@dataclass
class Worn:
    """A pair that many rooms have passed through, and what its processes held when as many had before."""

    pair: Pair
    before: dict[str, Footprint]


def rooms_pass(pair: Pair, rooms: int) -> Worn:
    """Twice as many rooms: the first half is for what is made once."""
    load = Load(pair, seed=rooms)
    load.run(rooms)
    before = {child.role: Footprint.of(child.pid) for child in (pair.prefill, pair.decode)}
    load.run(rooms)
    assert not load.yard.found, f"the load was not carried: {load.yard.found}"
    return Worn(pair, before)


@rule("C7")
@pytest.mark.parametrize("rooms", [4, pytest.param(300, marks=full)])
def test_c7_many_rooms_leave_nothing_in_the_stores(crew: Crew, rooms: int) -> None:
    with paired(crew) as pair:
        rooms_pass(pair, rooms)
        pair.empties()
        stats = [child.work("stats") for child in (pair.prefill, pair.decode)]
        kept = [(one["tickets"], one["quarantined_pages"], one["pending_clears"], one["peers"]) for one in stats]
        assert kept == [(0, 0, 0, 1)] * 2, f"tickets, quarantined pages, pending clears and peers of both sides after all: {kept}"


@rule("B4")
@pytest.mark.parametrize("rooms", [12, pytest.param(300, marks=full)])
def test_b4_many_rooms_leave_nothing_in_the_backend(crew: Crew, rooms: int) -> None:
    with paired(crew) as pair:
        worn = rooms_pass(pair, rooms)
        for child in (pair.prefill, pair.decode):
            kept = lastly(lambda child=child: child.work("held").get("backend_rooms", 0))  # type: ignore[misc]
            assert not kept, f"all rooms are cleared, and the backend of {child.role} still holds something for {kept}"
            most = worn.before[child.role].plus(**MARGIN)
            above = lastly(lambda child=child, most=most: Footprint.of(child.pid).exceeds(most))  # type: ignore[misc]
            assert not above, f"{child.role} holds more since {rooms} more rooms (resident in KiB): {above}"
