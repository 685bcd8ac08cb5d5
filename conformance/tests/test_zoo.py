"""The proof that the kit sees: each broken backend of the zoo fails exactly the rules that it breaks, and the healthy ones none."""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ZOO = Path(__file__).resolve().parents[1] / "zoo"
"""A distribution as if it were installed there."""
PAGE = ZOO.parents[1] / "docs" / "conformance.md"
LIMIT_S = 600.0

CAUGHT = {
    "zoo-healthy": ("", ""),
    "zoo-frugal": ("", ""),
    "zoo-literal": ("", ""),
    "zoo-sloppy": ("transfer", "T2"),
    "zoo-edgy": ("transfer", "R6 T1 T2"),
    "zoo-narrow": ("transfer", "T1"),
    "zoo-wrapping": ("transfer", "T2"),
    "zoo-bytewise": ("transfer", "T1"),
    "zoo-stubby": ("transfer", "T1"),
    "zoo-touchy": ("clear", "C2"),
    "zoo-strict": ("clear", "C2"),
    "zoo-hoarder": ("abort", "B4"),
    "zoo-sticky": ("abort", "B6"),
    "zoo-clinging": ("abort", "B6"),
    "zoo-quitter": ("abort", "A5 T7"),
    "zoo-sweeping": ("abort", "T7"),
    "zoo-namesake": ("clear", "C4"),
    "zoo-kinsman": ("clear", "C4"),
    "zoo-grudging": ("abort", "C4"),
    "zoo-deaf": ("abort", "A5"),
    "zoo-ghost": ("clear", "C4"),
    "zoo-revenant": ("clear", "B4"),
    "zoo-squirrel": ("clear", "B4"),
    "zoo-hasty": ("transfer", "A5 C4 R2 R3 R5 R6"),  # what is over before its bytes are there, nothing can wait for
    "zoo-inline": ("transfer", "R6"),
    "zoo-impatient": ("peer", "R3"),
    "zoo-dropper": ("transfer", "R6 T1"),
    "zoo-calm": ("abort", "R2 R3 R5"),
    "zoo-unposted": ("transfer", "R3"),
    "zoo-shuffled": ("transfer", "R6"),
    "zoo-forgetful": ("abort", "A5 B4 C4 C7 R2 R5"),  # nothing of an aborted room ever ends: its pages and its number are never free
    "zoo-miscast": ("abort", "A5"),
    "zoo-slow": ("transfer", "B6"),
    "zoo-sluggish": ("transfer", "B6"),
    "zoo-synchronous": ("transfer", "B6"),
    "zoo-lazy": ("start", "B3"),
    "zoo-greedy": ("transfer", "T1"),
    "zoo-once": ("start", "B7"),
    "zoo-halfway": ("start", "B7"),  # though what it declares lifts the rule
    "zoo-bursting": ("start", "B7"),
    "zoo-undead": ("start", "R3"),
    "zoo-eager": ("start", "B1"),
    "zoo-leaky": ("transfer", "B4 B7"),  # what a transfer leaves is still there after the close
    "zoo-loyal": ("peer", "P3 R4"),
    "zoo-boastful": ("peer", "R4"),
    "zoo-returning": ("peer", "R4"),
    "zoo-modest": ("peer", "R4"),
    "zoo-trusting": ("peer", "T7"),
    "zoo-patient": ("peer", "B5"),
    "zoo-locked": ("peer", "B5"),
    "zoo-queuing": ("peer", "B5"),
    "zoo-puzzled": ("peer", "B5"),
    "zoo-careless": ("peer", "T7"),
    "zoo-counting": ("transfer", "R6"),
    "zoo-littering": ("start", "B7"),
    "zoo-halfhearted": ("start", "B3"),
    "zoo-sharing": ("start", "T7"),
}
"""By backend: in what it differs from a healthy one, and the rules that it breaks. More than one where its fault breaks more than one."""

LATE = ("abort", "clear", "peer")
"""Faults that no transfer shows: only rooms that are aborted or cleared, and peers that are lost or come back."""
LATE_ONES = 15

IN_FULL = {
    "zoo-wrapping": "above_4_gib", "zoo-stubby": "as_many_bytes_as_declared", "zoo-impatient": "while_the_reader_stands_still",
    "zoo-locked": "peer_that_cannot_be_reached",
}  # fmt: skip
"""Those that the profile ``full`` alone sees, with the test that does."""

ALWAYS = ("zoo-quitter",)
"""That of every test run; the others are slow in sum."""


def backends() -> set[str]:
    """All that the zoo offers."""
    entries = configparser.ConfigParser()
    entries.read(ZOO / "kvcore_zoo-0.1.0.dist-info" / "entry_points.txt")
    return set(entries["kvcore.backends"])


def test_every_animal_is_expected_to_be_caught() -> None:
    assert backends() == set(CAUGHT)


def test_most_faults_show_in_no_transfer() -> None:
    assert sum(kind in LATE for kind, _ in CAUGHT.values()) >= LATE_ONES


def test_the_zoo_s_page_says_the_same() -> None:
    rows = re.findall(r"^\| `(zoo-\w+)` \| [^|]+ \| (\w+) \| ([A-Z0-9, ]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    page = {name: (kind, rules.replace(",", "")) for name, kind, rules in rows}
    assert page == {name: (kind, rules) for name, (kind, rules) in CAUGHT.items() if rules}
    whole = re.findall(r"^\| `(zoo-\w+)` \| [^|]+ \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(whole) == {name for name, (_, rules) in CAUGHT.items() if not rules}


def run_over(name: str, *command: str) -> subprocess.CompletedProcess[str]:
    """A command of this Python's in which the zoo is installed, about one of its backends."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ZOO), *sys.path]))}
    return subprocess.run([sys.executable, "-m", *command, name], capture_output=True, text=True, timeout=LIMIT_S, check=False, env=env)


ANIMALS = pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.slow) for name in CAUGHT])


@ANIMALS
def test_each_passes_a_plain_transfer(name: str) -> None:
    """Whatever is logged when its room is cleared."""
    ended = run_over(name, "kvcore.cli", "doctor")
    assert re.search(r"moved a page between|the page was moved, but", ended.stdout), ended.stdout + ended.stderr


@ANIMALS
def test_the_kit_names_what_it_breaks_and_nothing_else(name: str, tmp_path: Path) -> None:
    part = ("--profile", "full", "-k", IN_FULL[name]) if name in IN_FULL else ("--profile", "quick")
    ended = run_over(name, "kvcore_conformance.command", *part, "--report", str(tmp_path), "--backend")
    _, rules = CAUGHT[name]
    assert ended.returncode == (1 if rules else 0), ended.stdout[-2000:] + ended.stderr[-2000:]
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    failed = {rule["id"]: [check["name"] for check in rule["checks"] if check["ran"] and not check["passed"]] for rule in report["rules"]}
    assert {rule for rule, checks in failed.items() if checks} == set(rules.split()), {rule: all_ for rule, all_ in failed.items() if all_}
