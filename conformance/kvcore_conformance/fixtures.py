"""The fixtures of the suite. Override ``kvcore_subject`` where a backend needs code to be set up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvcore import Capabilities
from kvcore_conformance.arena import Pair, paired
from kvcore_conformance.driver import Crew
from kvcore_conformance.plugin import CREW, FAILED, chosen
from kvcore_conformance.subject import Subject

__all__ = ["able", "crew", "kvcore_subject", "pair", "standing"]


@pytest.fixture(scope="session")
def kvcore_subject(request: pytest.FixtureRequest) -> Subject:
    """What is tested: by default what the command line names."""
    return chosen(request.config)


@pytest.fixture(scope="session")
def crew(kvcore_subject: Subject, request: pytest.FixtureRequest) -> Iterator[Crew]:
    """Processes over the subject, for tests that need their own."""
    crew = Crew(kvcore_subject.env, kvcore_subject.backend, kvcore_subject.options)
    request.config.stash[CREW] = crew
    yield crew
    crew.end()


@pytest.fixture(scope="session")
def able(kvcore_subject: Subject) -> Capabilities:
    """What the subject says that it can do."""
    return kvcore_subject.capabilities


class Standing:
    """A pair that is kept from test to test, as long as it is well."""

    def __init__(self, crew: Crew) -> None:
        self._crew, self._stack = crew, ExitStack()
        self._pair: Pair | None = None

    def take(self) -> Pair:
        """The pair with new memory; another if the last test has spoilt it."""
        if self._pair is not None and not self._pair.well:
            self.drop()
        if self._pair is None:
            self._pair = self._stack.enter_context(paired(self._crew))
        self._pair.fresh()
        return self._pair

    def drop(self) -> None:
        """End it."""
        self._pair = None
        self._stack.close()


@pytest.fixture(scope="session")
def standing(crew: Crew) -> Iterator[Standing]:
    """Keeps the pair of ``pair``."""
    standing = Standing(crew)
    yield standing
    standing.drop()


@pytest.fixture
def pair(standing: Standing, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A prefill and a decode process that know each other. A test that fails is the last to use them."""
    yield standing.take()
    if request.node.stash.get(FAILED, False):
        standing.drop()
