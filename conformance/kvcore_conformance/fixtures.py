"""The fixtures of the suite. ``kvcore_subject``, which may be overridden, is the plugin's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvcore import Capabilities
from kvcore_conformance.plugin import CREW, FAILED
from kvcore_conformance.stage.arena import Pair, paired
from kvcore_conformance.stage.bare import Bare, Kept
from kvcore_conformance.stage.crew import Crew
from kvcore_conformance.stage.waits import SOON_S
from kvcore_conformance.subject import Subject

__all__ = ["able", "bare", "crew", "kept_engines", "pair", "patient", "standing", "standing_patient"]


@pytest.fixture(scope="session")
def crew(kvcore_subject: Subject, request: pytest.FixtureRequest) -> Iterator[Crew]:
    """Processes over the subject, for tests that need their own."""
    crew = Crew(kvcore_subject.env, kvcore_subject.backend, kvcore_subject.options)
    crew.reopens = kvcore_subject.capabilities.reopens
    request.config.stash[CREW] = crew
    yield crew
    crew.end()


@pytest.fixture(scope="session")
def able(kvcore_subject: Subject) -> Capabilities:
    """What the subject says that it can do."""
    return kvcore_subject.capabilities


class Standing:
    """A pair that is kept from test to test, as long as it is well; ``config`` is what ``paired`` takes."""

    def __init__(self, crew: Crew, **config: Any) -> None:
        self._crew, self._config, self._stack = crew, config, ExitStack()
        self._pair: Pair | None = None

    def take(self) -> Pair:
        """The pair with new memory; another if the last test has spoilt it."""
        if self._pair is not None and not self._pair.well:
            self.drop()
        if self._pair is None:
            self._pair = self._stack.enter_context(paired(self._crew, **self._config))
        self._pair.fresh()
        return self._pair

    def lent(self, request: pytest.FixtureRequest) -> Iterator[Pair]:
        """The pair for one test, which is the last to use it if it fails."""
        yield self.take()
        if request.node.stash.get(FAILED, False):
            self.drop()

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


@pytest.fixture(scope="module")
def standing_patient(crew: Crew) -> Iterator[Standing]:
    """Keeps the pair of ``patient``, as long as tests that use it stand in one file: others need the processes."""
    standing = Standing(crew, limits={"orphan_s": SOON_S})
    yield standing
    standing.drop()


@pytest.fixture
def patient(standing_patient: Standing, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """As ``pair``, and what one side keeps until the other comes is kept longer than any stall of a busy machine."""
    yield from standing_patient.lent(request)


@pytest.fixture
def pair(standing: Standing, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A prefill and a decode process that know each other. A test that fails is the last to use them."""
    yield from standing.lent(request)


@pytest.fixture(scope="session")
def kept_engines(crew: Crew, able: Capabilities) -> Iterator[Kept]:
    """Keeps the engines of ``bare``."""
    kept = Kept(crew, able)
    yield kept
    kept.drop()


@pytest.fixture
def bare(kept_engines: Kept, request: pytest.FixtureRequest) -> Iterator[Bare]:
    """Two engines without managers that are connected. A test that fails is the last to use them."""
    yield kept_engines.take()
    if request.node.stash.get(FAILED, False):
        kept_engines.drop()
