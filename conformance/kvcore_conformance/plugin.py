"""The pytest plugin: options, and which tests a profile has. Idle, and cheap to import, in runs without the suite's tests.

In a run with them ``record.Recorder`` notes what becomes of each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvcore.errors import KVCoreError
from kvcore_conformance.minutes import minutes
from kvcore_conformance.subject import Subject, options_from

if TYPE_CHECKING:
    from kvcore_conformance.stage.crew import Crew

CREW: pytest.StashKey[Crew] = pytest.StashKey()
FAILED = pytest.StashKey[bool]()

pytest.register_assert_rewrite(*(f"kvcore_conformance.{name}" for name in ("suite", "stage")))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvcore-conformance", "the transfer contract of kvcore")
    group.addoption("--kvcore-backend", default="local", metavar="NAME", help="the backend that is tested")
    group.addoption("--kvcore-options", type=Path, metavar="FILE", help="its options, TOML or JSON")
    group.addoption("--kvcore-profile", choices=("quick", "full"), default="quick", help="quick: every rule once")
    group.addoption("--kvcore-report", type=Path, metavar="DIR", help="where the report is written")
    group.addoption("--kvcore-waivers", type=Path, metavar="FILE", help="rules that may fail, each with reason and date of expiry")
    group.addoption("--kvcore-soak", type=minutes, default=0.0, metavar="MINUTES", help="a mixed load for so long")
    group.addoption("--kvcore-seed", type=int, default=None, metavar="N", help="of what is drawn at random")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kvcore_rule(id, level): the rule of the transfer contract that the test checks")
    config.addinivalue_line("markers", "kvcore_full: not in the quick profile")
    config.addinivalue_line("markers", "kvcore_soak: only with --kvcore-soak")


class Refusal:
    """Fails the suite's tests in a process of several."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if item.get_closest_marker("kvcore_rule"):
            pytest.fail("the contract's tests run in one process, which judges them all; leave out -n for them", pytrace=False)


@pytest.fixture(scope="session")
def kvcore_subject(request: pytest.FixtureRequest) -> Subject:
    """What is tested: by default what the command line names. Override it where a backend needs code to be set up."""
    return chosen(request.config)


def chosen(config: pytest.Config) -> Subject:
    """The subject that the command line names; raises ``UsageError`` for bad options."""
    file = config.getoption("--kvcore-options")
    try:
        return Subject(config.getoption("--kvcore-backend"), options_from(file) if file is not None else {})
    except KVCoreError as error:
        raise pytest.UsageError(str(error)) from error


def seed(config: pytest.Config) -> int:
    """The run's seed: given, or drawn once."""
    if config.option.kvcore_seed is None:
        config.option.kvcore_seed = time.time_ns() % 2**31
    found: int = config.option.kvcore_seed
    return found


def in_profile(config: pytest.Config, marked: Callable[[str], object]) -> bool:
    """Whether the run's profile has a test with these marks."""
    quick, soaks = config.getoption("--kvcore-profile") == "quick", config.getoption("--kvcore-soak") > 0
    return not (quick and marked("kvcore_full")) and not (not soaks and marked("kvcore_soak"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    """Leave out what the profile does not have. What ``-k`` and its like leave out is noted before that: it is not run."""
    checks = [item for item in items if item.get_closest_marker("kvcore_rule")]
    yield
    if left_out := [item for item in items if not in_profile(config, item.get_closest_marker)]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    if config.option.collectonly or not set(checks) & set(items):
        return
    if hasattr(config, "workerinput"):  # a process of pytest-xdist
        config.pluginmanager.register(Refusal(), "kvcore-conformance-refusal")
        return
    from kvcore_conformance.record import Recorder

    try:
        config.pluginmanager.register(Recorder(config, checks), "kvcore-conformance-recorder")
    except KVCoreError as error:
        raise pytest.UsageError(str(error)) from error
