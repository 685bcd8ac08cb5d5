"""The state machine over the shipped modules."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.machine import Machine

COMMON = settings(deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=(Phase.generate,))
"""Without shrinking, which takes minutes: add ``Phase.shrink`` for a short example of a failure."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What goes wrong here goes wrong on purpose."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def test_every_rule_holds_over_many_rooms_and_orders_of_limits() -> None:
    run_state_machine_as_test(Machine, settings=settings(COMMON, max_examples=250, stateful_step_count=60))


@pytest.mark.slow
def test_every_rule_holds_in_many_more_runs() -> None:
    run_state_machine_as_test(Machine, settings=settings(COMMON, max_examples=2000, stateful_step_count=100))
