"""The pytest plugin: options, which tests a profile has, what became of each, and the report. Idle in runs without the suite's tests."""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path

import pytest

from kvcore.errors import KVCoreError
from kvcore_conformance.driver import Crew
from kvcore_conformance.report.model import Check, Report, Story
from kvcore_conformance.report.write import write
from kvcore_conformance.subject import Subject, options_from
from kvcore_conformance.verdicts import Run, judge
from kvcore_conformance.waivers import Waivers

CREW = pytest.StashKey[Crew]()
FAILED = pytest.StashKey[bool]()
SUBJECT = pytest.StashKey[Subject]()
CHECKS = pytest.StashKey["dict[str, Check]"]()
REPORT = pytest.StashKey[Report]()
STARTED = pytest.StashKey[float]()
MOST_EVENTS = 50

pytest.register_assert_rewrite(*(f"kvcore_conformance.{name}" for name in ("suite", "arena", "oracle", "driver", "frozen")))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvcore-conformance", "the transfer contract of kvcore")
    group.addoption("--kvcore-backend", default="local", metavar="NAME", help="the backend that is tested")
    group.addoption("--kvcore-options", type=Path, metavar="FILE", help="its options, TOML or JSON")
    group.addoption("--kvcore-profile", choices=("quick", "full"), default="quick", help="quick: every rule once")
    group.addoption("--kvcore-report", type=Path, metavar="DIR", help="where the report is written")
    group.addoption("--kvcore-waivers", type=Path, metavar="FILE", help="rules that may fail, each with reason and date of expiry")
    group.addoption("--kvcore-soak", type=float, default=0.0, metavar="MINUTES", help="a mixed load for so long")
    group.addoption("--kvcore-seed", type=int, default=None, metavar="N", help="of what is drawn at random")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kvcore_rule(id, level): the rule of the transfer contract that the test checks")
    config.addinivalue_line("markers", "kvcore_full: not in the quick profile")
    config.addinivalue_line("markers", "kvcore_soak: only with --kvcore-soak")
    config.stash[CHECKS] = {}
    config.stash[STARTED] = time.monotonic()


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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    quick, soaks = config.getoption("--kvcore-profile") == "quick", config.getoption("--kvcore-soak") > 0
    left_out = [
        item for item in items
        if (quick and item.get_closest_marker("kvcore_full")) or (not soaks and item.get_closest_marker("kvcore_soak"))
    ]  # fmt: skip
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> Generator[None, object, object]:
    found = yield
    if fixturedef.argname == "kvcore_subject" and isinstance(found, Subject):
        request.config.stash[SUBJECT] = found
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    marker = item.get_closest_marker("kvcore_rule")
    if marker is None:
        return report
    name, level = marker.args
    check = item.config.stash[CHECKS].setdefault(item.nodeid, Check(_plain(item.nodeid), name, level))
    check.seconds += report.duration
    if report.outcome != "passed":  # a test that is skipped has checked nothing
        item.stash[FAILED] = True
        check.passed = False
        check.problem = check.problem or str(report.longrepr)
        check.stories = check.stories or _stories(item.config)
    return report


def _plain(nodeid: str) -> str:
    return nodeid.rpartition("/")[2]


def _stories(config: pytest.Config) -> list[Story]:
    """What the processes lent now have seen last."""
    crew = config.stash.get(CREW, None)
    found = []
    for child in crew.lent if crew is not None else ():
        try:
            found.append(Story(child.role, child.pid, child.events(MOST_EVENTS)))
        except (AssertionError, OSError) as error:
            found.append(Story(child.role, child.pid, [f"it says nothing any more: {error}"]))
    return found


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    checks = list(config.stash[CHECKS].values())
    if not checks or config.option.collectonly:
        return
    subject = config.stash.get(SUBJECT, None) or chosen(config)
    run = Run(
        subject, checks, config.getoption("--kvcore-profile"), seed(config), time.monotonic() - config.stash[STARTED],
        Waivers.read(config.getoption("--kvcore-waivers")),
    )  # fmt: skip
    report = config.stash[REPORT] = judge(run)
    if folder := config.getoption("--kvcore-report"):
        write(report, folder)
    if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        session.exitstatus = pytest.ExitCode.OK if report.holds else pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    report = config.stash.get(REPORT, None)
    if report is None:
        return
    from kvcore_conformance.report.table import table

    terminalreporter.section("the transfer contract")
    for line in table(report):
        terminalreporter.line(line)
