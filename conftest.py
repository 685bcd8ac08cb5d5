"""Rules for all tests, of the core and of the plugins.

In CI (``CI=true``) a test that is skipped or expected to fail fails the run: it has checked nothing. A test of a backend whose engine is
missing is skipped, and says what to install.
"""

from __future__ import annotations

import functools
import os

import pytest

import kvcore
from tests.helpers import BACKENDS, manager, memory

_not_run: list[str] = []


@functools.cache
def missing(backend: str) -> str:
    """Why managers cannot be made over a backend that is not installed, or whose engine is not; "" if they can."""
    try:
        manager("decode", memory(1), backend=backend).close()
    except (kvcore.BackendNotFoundError, kvcore.BackendLoadError) as error:
        return str(error)
    return ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    drawn = getattr(item, "callspec", None)  # only a test with parameters has it
    for value in drawn.params.values() if drawn else ():
        if isinstance(value, str) and value in BACKENDS and missing(value):
            pytest.skip(missing(value))


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped or "wasxfail" in report.__dict__:
        _not_run.append(f"{report.nodeid}: {_why(report)}")


def _why(report: pytest.TestReport | pytest.CollectReport) -> str:
    if "wasxfail" in report.__dict__:
        return f"expected to fail: {report.__dict__['wasxfail']}"
    return str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note(report)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if _not_run and _in_ci() and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _not_run or not _in_ci():
        return
    terminalreporter.section("skipped or expected to fail, which CI does not allow", red=True)
    for line in _not_run:
        terminalreporter.line(line)


def _in_ci() -> bool:
    return os.environ.get("CI", "").lower() == "true"
