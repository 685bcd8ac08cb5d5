"""The level "Soak": a mixed load with faults for as many minutes as ``--soak`` says, judged at its end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvcore_conformance.marks import rule, soak
from kvcore_conformance.plugin import seed
from kvcore_conformance.stage.arena import Pair, paired
from kvcore_conformance.stage.crew import Crew
from kvcore_conformance.stage.footprint import Footprint
from kvcore_conformance.stage.load import Load, letters

ROOMS = 50
"""Rooms between two looks at the clock."""
WARM = 200
"""Rooms until everything is made that is made once."""
MARGIN = {"threads": 3, "descriptors": 5, "resident": 16 * 1024}
LEVEL = "Soak"
endless = pytest.mark.timeout(0)


@dataclass
class Soaked:
    """A pair after its load."""

    pair: Pair
    load: Load
    rooms: int
    before: dict[str, Footprint]

    def holds(self, rule: str) -> None:
        """The load, which ends with what is first seen to be wrong, has not seen this rule broken."""
        found = self.load.yard.found
        assert rule not in found, f"after {self.rooms} rooms: {found[rule]}"


@pytest.fixture(scope="session")
def soaked(crew: Crew, request: pytest.FixtureRequest) -> Iterator[Soaked]:
    """A pair that has carried the load for the time that was asked for."""
    with paired(crew) as pair:
        load = Load(pair, seed(request.config))
        load.run(WARM)
        before = {child.role: Footprint.of(child.pid) for child in (pair.prefill, pair.decode)}
        rooms, until = 0, time.monotonic() + 60.0 * request.config.getoption("--kvcore-soak")
        while time.monotonic() < until and not load.yard.found:
            disturb(pair)
            load.run(ROOMS)
            rooms += ROOMS
        for child in (pair.prefill, pair.decode):
            child.heal()
        yield Soaked(pair, load, rooms, before)


def disturb(pair: Pair) -> None:
    """Other faults of the backend, all quiescent, and letters that come twice or late."""
    for child in (pair.prefill, pair.decode):
        child.heal()
    pair.prefill.fault("fail", rate=0.02)
    pair.prefill.fault("retry", rate=0.1)
    pair.prefill.fault("delay", seconds=0.02, rate=0.1)
    pair.prefill.fault("delay", seconds=0.02, rate=0.1, hook="kvcore_poll")
    letters(pair.prefill, pair.decode)


@soak
@endless
@rule("R6", LEVEL)
def test_r6_soak_success_meant_all_bytes(soaked: Soaked) -> None:
    soaked.holds("R6")


@soak
@endless
@rule("R2", LEVEL)
def test_r2_soak_pages_called_safe_were_written_no_more(soaked: Soaked) -> None:
    soaked.holds("R2")


@soak
@endless
@rule("T2", LEVEL)
def test_t2_soak_nothing_else_was_written(soaked: Soaked) -> None:
    soaked.holds("T2")


@soak
@endless
@rule("S8", LEVEL)
def test_s8_soak_every_room_has_ended(soaked: Soaked) -> None:
    soaked.holds("S8")


@soak
@endless
@rule("C7", LEVEL)
def test_c7_soak_nothing_is_kept(soaked: Soaked) -> None:
    soaked.pair.empties()


@soak
@endless
@rule("B4", LEVEL)
def test_b4_soak_the_processes_hold_no_more_than_before(soaked: Soaked) -> None:
    for child in (soaked.pair.prefill, soaked.pair.decode):
        most = soaked.before[child.role].plus(**MARGIN)
        above = Footprint.of(child.pid).exceeds(most)
        assert not above, f"{child.role}, after {soaked.rooms} rooms (resident in KiB): {above}"
