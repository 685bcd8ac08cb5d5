"""Every known fault of table, ledger and handles is found, and named by a rule: a crash of the mutant is no find."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.model.ghosts import Modules, Violation
from tests.model.mutants import MUTANTS, Mutant
from tests.model.staging import SCENARIOS, Scenario

SHIPPED = Modules()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What goes wrong here goes wrong on purpose."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("script", SCENARIOS, ids=lambda script: script.__name__)
def test_the_shipped_modules_keep_every_rule(script: Scenario) -> None:
    script(SHIPPED)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_caught(mutant: Mutant) -> None:
    with pytest.raises(Violation) as caught:
        mutant.script(mutant.modules)
    assert caught.value.rule in mutant.rules, str(caught.value)


def test_every_fault_has_its_own_name_and_every_script_is_run() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert {mutant.script for mutant in MUTANTS} <= set(SCENARIOS)
