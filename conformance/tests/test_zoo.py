"""The proof that the kit sees: each broken backend of the zoo fails exactly the rules that it breaks, and the healthy one none."""

from __future__ import annotations

import configparser
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ZOO = Path(__file__).resolve().parents[1] / "zoo"
"""A distribution as if it were installed there."""
LIMIT_S = 600.0

CAUGHT = {
    "zoo-healthy": "",
    "zoo-sloppy": "T2",
    "zoo-edgy": "R6 T1 T2",
    "zoo-narrow": "T1",
    "zoo-touchy": "C2",
    "zoo-strict": "C2",
    "zoo-hoarder": "B4",
    "zoo-sticky": "B6",
    "zoo-quitter": "A5 T7",
    "zoo-sweeping": "T7",
    "zoo-namesake": "C4",
    "zoo-deaf": "A5",
    "zoo-squirrel": "B4",
    "zoo-hasty": "R6",
    "zoo-dropper": "R6 T1",
    "zoo-calm": "R3",
    "zoo-unposted": "R3",
    "zoo-shuffled": "R6",
    "zoo-forgetful": "A5 C4 C7 R2 R5",  # nothing of an aborted room ever ends: its pages and its number are never free
    "zoo-miscast": "A5",
    "zoo-slow": "B6",
    "zoo-greedy": "T1",
    "zoo-once": "B7",
    "zoo-halfway": "B7",  # though what it declares lifts the rule
    "zoo-bursting": "B7",
    "zoo-eager": "B1",
    "zoo-leaky": "B4",
    "zoo-loyal": "P3 R4",
    "zoo-boastful": "R4",
    "zoo-trusting": "T7",
    "zoo-patient": "B5",
    "zoo-careless": "T7",
}
"""By backend: the rules that it breaks. More than one where its fault breaks more than one."""

ALSO = {"zoo-calm": "R2 R5"}
"""What may fail as well: it does where the write is still under way when the test looks."""

ALWAYS = ("zoo-touchy", "zoo-quitter")
"""Those of every test run; the others are slow in sum."""


def test_every_animal_is_expected_to_be_caught() -> None:
    entries = configparser.ConfigParser()
    entries.read(ZOO / "kvcore_zoo-0.1.0.dist-info" / "entry_points.txt")
    assert set(entries["kvcore.backends"]) == set(CAUGHT)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.slow) for name in CAUGHT])
def test_the_kit_names_what_it_breaks_and_nothing_else(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvcore_conformance.command", "--backend", name, "--profile", "quick", "--report", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ZOO), *sys.path]))}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=env)
    assert ended.returncode == (1 if CAUGHT[name] else 0), ended.stdout[-2000:] + ended.stderr[-2000:]
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    failed = {rule["id"]: [check["name"] for check in rule["checks"] if not check["passed"]] for rule in report["rules"]}
    found = {rule for rule, checks in failed.items() if checks} - set(ALSO.get(name, "").split())
    assert found == set(CAUGHT[name].split()), {rule: checks for rule, checks in failed.items() if checks}
