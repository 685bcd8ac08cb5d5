"""The proof that the kit sees: each broken backend of the zoo fails exactly the rules that it breaks, and the healthy one none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

ZOO = Path(__file__).resolve().parents[1] / "zoo"
LIMIT_S = 600.0

CAUGHT: dict[str, str] = {}
"""By backend: the rules that it breaks. More than one where its fault breaks more than one."""

ALWAYS = ()
"""Those of every test run; the others are slow in sum."""


def test_every_animal_is_expected_to_be_caught() -> None:
    entries = tomllib.loads((ZOO / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]["kvcore.backends"]
    assert set(entries) == set(CAUGHT)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.slow) for name in CAUGHT])
def test_the_kit_names_what_it_breaks_and_nothing_else(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvcore_conformance.command", "--backend", name, "--profile", "quick", "--report", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == (1 if CAUGHT[name] else 0), ended.stdout[-2000:] + ended.stderr[-2000:]
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    failed = {rule["id"]: [check["name"] for check in rule["checks"] if not check["passed"]] for rule in report["rules"]}
    assert {rule for rule, checks in failed.items() if checks} == set(CAUGHT[name].split()), {k: v for k, v in failed.items() if v}
