"""Every known fault is found by exploration, and named by a rule: a crash of the mutant is no find."""

from __future__ import annotations

import pytest

from tests.protocol.explore import Explorer
from tests.protocol.mutants import MISTAKES, MUTANTS, TRACES
from tests.protocol.mutation import Mutant, mutated
from tests.protocol.world import Scope, Violation


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_caught(mutant: Mutant) -> None:
    with pytest.raises(Violation) as caught:
        Explorer(mutant.scope, mutated(mutant)).run(max_states=200_000)
    assert caught.value.rule in mutant.rules, str(caught.value)


@pytest.mark.parametrize(
    "scope", sorted({mutant.scope for mutant in MUTANTS if mutant.scope.check_addressee}, key=str), ids=lambda scope: scope.name
)
def test_the_shipped_modules_pass_where_mutants_fail(scope: Scope) -> None:
    Explorer(scope).run(max_states=5_000)


def test_each_known_trace_has_its_mutant() -> None:
    assert len(TRACES) == 15
    assert len({mutant.name for mutant in TRACES + MISTAKES}) == len(MUTANTS)
