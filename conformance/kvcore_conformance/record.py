"""Notes what becomes of each of the suite's tests in a run of pytest, has it judged, and reports it."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import pytest

from kvcore.errors import KVCoreError, cause, one_line
from kvcore_conformance import suite
from kvcore_conformance.plugin import CREW, FAILED, chosen, in_profile, seed
from kvcore_conformance.report.model import Check, Report, Story
from kvcore_conformance.report.table import table
from kvcore_conformance.report.write import prepare, write
from kvcore_conformance.stage.arena import Pair
from kvcore_conformance.stage.bare import Bare
from kvcore_conformance.stage.driver import Child
from kvcore_conformance.subject import Subject
from kvcore_conformance.verdicts import Run, judge
from kvcore_conformance.waivers import Waivers


class Recorder:
    """The plugin of a run with tests of the suite. Raises ``ConfigError`` for a waivers file that cannot be read, or a report's folder that
    cannot be written."""

    def __init__(self, config: pytest.Config, items: Sequence[pytest.Item]) -> None:
        self._config, self._started = config, time.monotonic()
        self._waivers = Waivers.read(config.getoption("--kvcore-waivers"))
        self._folder: Path | None = config.getoption("--kvcore-report")
        if self._folder is not None:
            prepare(self._folder)
        self._checks = {item.nodeid: _check(item) for item in items if in_profile(config, item.get_closest_marker)}
        self._checks.update(_not_collected(config, items))
        self._others_fail = items[0].session.testsfailed > 0
        self._subject: Subject | None = None
        self._report: Report | None = None
        self._unwritten: list[str] = []
        self._refused = False

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
        """Learn of a subject that code has set up. One that no manager would take ends the run, as it does on the command line."""
        __tracebackhide__ = True
        found = yield
        if fixturedef.argname == "kvcore_subject" and isinstance(found, Subject):
            try:
                found.check()
            except KVCoreError as error:
                self._refused = True
                pytest.exit(one_line(error), pytest.ExitCode.USAGE_ERROR)
            self._subject = found
        return found

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """A test is a check that holds when its set-up, its call and its end all pass; one that is skipped has checked nothing."""
        report = yield
        check = self._checks.get(item.nodeid)
        if check is None:
            self._others_fail |= report.failed
            return report
        check.seconds += report.duration
        if report.outcome != "passed" and not item.stash.get(FAILED, False):
            item.stash[FAILED] = check.ran = True
            check.problem = report.longreprtext or f"{report.outcome}, where it should pass"
            check.stories = self._stories(item)
        if call.when == "teardown":
            check.ran, check.passed = True, not item.stash.get(FAILED, False)
            self._forget()
        return report

    def _stories(self, item: pytest.Item) -> list[Story]:
        """What the processes of the test have seen last: those of its pair and those it borrowed for itself, or all there are."""
        crew = self._config.stash.get(CREW, None)
        if crew is None:
            return []
        mine = [child for value in getattr(item, "funcargs", {}).values() for child in _children(value)]
        told = {story.pid: story for story in crew.told}
        asked = mine or ([] if told else crew.lent)
        return [*(child.last_words() for child in asked if child.pid not in told), *told.values()]

    def _forget(self) -> None:
        """What a test that has passed left told is not the next one's."""
        crew = self._config.stash.get(CREW, None)
        if crew is not None:
            crew.told = []

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        """Judge what was run; a rule that does not hold fails the run, and so does a file that cannot be written, pytest's own too."""
        try:
            yield
        except OSError as error:
            self._unwritten.append(f"a file about the run could not be written ({cause(error)}); make room, and run it again")
        if not self._refused:
            self._judge(session)

    def _judge(self, session: pytest.Session) -> None:
        config = self._config
        self._report = report = judge(Run(
            self._subject or chosen(config), list(self._checks.values()), config.getoption("--kvcore-profile"), seed(config),
            time.monotonic() - self._started, self._waivers,
        ))  # fmt: skip
        if self._folder is not None:
            try:
                write(report, self._folder)
            except KVCoreError as error:
                self._unwritten.append(one_line(error))
        if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            well = report.holds and not self._others_fail and not self._unwritten
            session.exitstatus = pytest.ExitCode.OK if well else pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The report for the terminal, after pytest's own."""
        if self._report is None:
            return
        terminalreporter.section("the transfer contract")
        for line in (*table(self._report), *self._unwritten):
            terminalreporter.line(line)


def _children(value: object) -> list[Child]:
    """The processes of what a fixture gave to a test."""
    if isinstance(value, Pair):
        return [value.prefill, value.decode]
    return [value.prefill.child, value.decode.child] if isinstance(value, Bare) else []


def _not_collected(config: pytest.Config, items: Sequence[pytest.Item]) -> Iterator[tuple[str, Check]]:
    """Tests that the suite has for the profile and the run has not even collected, such as when a file or a test is named."""
    collected = {getattr(item, "originalname", item.name) for item in items}
    for name in suite.__all__:
        function = getattr(suite, name)
        marks = {mark.name: mark for mark in getattr(function, "pytestmark", ())}
        if name not in collected and "kvcore_rule" in marks and in_profile(config, marks.get):
            file = f"{function.__module__.rpartition('.')[2]}.py::{name}"
            yield file, Check(file, *marks["kvcore_rule"].args)


def _check(item: pytest.Item) -> Check:
    """The check that a test is. JUnit XML names its rule too."""
    marker = item.get_closest_marker("kvcore_rule")
    assert marker is not None
    name, level = marker.args
    item.user_properties.append(("rule", name))
    return Check(item.nodeid.rpartition("/")[2], name, level)
