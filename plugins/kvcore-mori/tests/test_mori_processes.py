"""Real processes over mori: what is killed, frozen, started again; and how a process ends that has used it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from kvcore_conformance import Subject
from kvcore_conformance.stage.crew import Crew
from kvcore_conformance.stage.frozen import check_any_engine, check_late_is_seen, check_nothing_late

from tests.engine_nodes import resources, settles
from tests.engine_processes import check_frozen_killed_and_started_again, check_killed_in_the_middle
from tests.helpers import ROOT, Calls, duo

PATIENT = {"KV_SOFTVERBS_ACK_TIMEOUT_MS": "60000"}
"""A card that goes on retrying, so that a write to a process that stands still stays in flight."""


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    crew = Crew(PATIENT, "mori")
    try:
        yield crew
    finally:
        crew.end()


def test_r3_r5_nothing_comes_late_to_a_process_that_stood_still() -> None:
    check_nothing_late(Subject("mori", env=PATIENT), sides=["decode"])


def test_r3_nothing_comes_late_from_a_process_that_stood_still() -> None:
    """Its writes go on without it, as with a card, so none is caught in the middle."""
    check_any_engine(Subject("mori", env=PATIENT), "prefill", fences=False)


def test_what_comes_late_without_proof_is_seen() -> None:
    check_late_is_seen(Subject("mori", env=PATIENT), sides=["decode"])


@pytest.mark.parametrize("role", ["prefill", "both"])
def test_r4_a_write_to_a_killed_process_is_proved_to_be_over(crew: Crew, role: str) -> None:
    with crew.lend(2) as (prefill, doomed):
        check_killed_in_the_middle(prefill, doomed, role, ("peer_lost", "backend"))


def test_p2_p3_killed_frozen_and_started_again(crew: Crew) -> None:
    """The queue pairs of the dead end with it, which proves that nothing more comes."""
    with crew.lend(3) as (prefill, decode, successor):
        check_frozen_killed_and_started_again(prefill, decode, successor, unproven=False)


def test_many_descriptors_go_in_parts_that_a_queue_pair_holds() -> None:
    pages = list(range(0, 2 * 5000, 2))
    with duo("mori", pages=pages[-1] + 1, layers=2) as pair:
        pair.prefill.add_observer(calls := Calls())
        pair.transfer(pages, pages[::-1])
        sizes = [transfer.length.size for transfer in calls.transfers]
        assert max(sizes) <= 2048 and sum(sizes) >= 2 * len(pages)
        pair.stores_empty()


def test_managers_opened_and_closed_leave_nothing() -> None:
    seen = []
    for _ in range(5):
        with duo("mori") as pair:
            pair.transfer([1, 2, 5], [3, 4, 9])
        seen.append(resources())
    settles(seen[1])


ENDS = """
import sys
from tests.helpers import duo
with duo("mori") as pair:
    pair.transfer([3, 1], [2, 5])
    print("libmori_io.so" in open("/proc/self/maps").read())
    if sys.argv[1] == "open":
        sys.exit(0)
"""


@pytest.mark.parametrize("end", ["closed", "open"])
def test_a_process_ends_well_and_says_nothing(end: str) -> None:
    done = subprocess.run([sys.executable, "-c", ENDS, end], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert not re.search(r"Traceback|\[io\]", done.stderr), done.stderr
