"""The processes that a run borrows: which are lent again, and whose last words are kept."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kvcore_conformance.stage.crew import Crew


@pytest.fixture
def crew() -> Iterator[Crew]:
    crew = Crew()
    yield crew
    crew.end()


@pytest.mark.parametrize("reopens", [True, False])
def test_a_process_whose_backend_does_not_reopen_is_lent_once(crew: Crew, reopens: bool) -> None:
    crew.reopens = reopens
    with crew.lend(1) as (child,):
        child.start("prefill")
    assert child.running is reopens


def test_the_last_words_of_all_are_kept_if_borrowers_within_borrowers_fail(crew: Crew) -> None:
    with pytest.raises(ArithmeticError), crew.lend(2) as outer, crew.lend(1) as inner:
        raise ArithmeticError
    assert [story.pid for story in crew.told] == [inner[0].pid, outer[0].pid, outer[1].pid]
