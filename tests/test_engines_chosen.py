"""``KVCORE_TEST_BACKENDS``: which engines the tests run over, and what becomes of them where an engine is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEST = "tests/test_seeds.py::test_abort_is_seen_in_the_shared_status_at_once_here_and_soon_there"


def pytest_over(backend: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run one test of all backends over one."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", f"{backend} and decode and joined", TEST]
    kept = {**os.environ, "KVCORE_TEST_BACKENDS": backend, **environment}
    return subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=100, check=False)


def test_the_tests_of_all_backends_run_over_those_that_are_named() -> None:
    ended = pytest_over("local", CI="true")
    assert ended.returncode == 0, ended.stdout
    assert "1 passed" in ended.stdout and "skipped" not in ended.stdout


@pytest.mark.parametrize(("ci", "code"), [("false", 0), ("true", 1)])
def test_without_its_engine_a_test_is_skipped_with_what_to_install_and_in_ci_that_is_a_failure(ci: str, code: int) -> None:
    ended = pytest_over("absent", CI=ci)
    assert ended.returncode == code, ended.stdout
    skipped = [line for line in ended.stdout.splitlines() if line.startswith("SKIPPED")]
    assert len(skipped) == 1 and "to add one: " in skipped[0], ended.stdout
    assert ("which CI does not allow" in ended.stdout) == (ci == "true")
