"""Any steps in any order, drawn from the run's seed (``--seed``); one run is judged under each rule that it looks at."""

from __future__ import annotations

import pytest

from kvcore_conformance.fixtures import Standing
from kvcore_conformance.marks import rule
from kvcore_conformance.plugin import seed
from kvcore_conformance.stage.any_order import run

EXAMPLES = {"quick": (6, 16), "full": (60, 40)}
"""Examples, and steps of each."""


@pytest.fixture(scope="session")
def any_order(standing: Standing, request: pytest.FixtureRequest) -> dict[str, str]:
    """What a run has found first, by its rule."""
    chosen = seed(request.config)
    found = run(standing.take(), chosen, *EXAMPLES[request.config.getoption("--kvcore-profile")])
    if found:
        standing.drop()
    return {name: f"with seed {chosen}: {text}" for name, text in found.items()}


@rule("S1")
def test_s1_an_end_is_final_in_any_order(any_order: dict[str, str]) -> None:
    assert "S1" not in any_order, any_order["S1"]


@rule("R2")
def test_r2_pages_called_safe_are_written_no_more_in_any_order(any_order: dict[str, str]) -> None:
    assert "R2" not in any_order, any_order["R2"]


@rule("R6")
def test_r6_success_means_all_bytes_in_any_order(any_order: dict[str, str]) -> None:
    assert "R6" not in any_order, any_order["R6"]


@rule("T7")
def test_t7_a_room_fails_only_if_it_was_ended_in_any_order(any_order: dict[str, str]) -> None:
    assert "T7" not in any_order, any_order["T7"]


@rule("T2")
def test_t2_nothing_else_is_written_in_any_order(any_order: dict[str, str]) -> None:
    assert "T2" not in any_order, any_order["T2"]
