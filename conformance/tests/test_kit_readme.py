"""The README of the kit tells the truth: its code and its commands run, and its tables name what there is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from kvcore_conformance import command
from kvcore_conformance.marks import LEVELS
from kvcore_conformance.report.model import About, Outcome, Report
from kvcore_conformance.report.write import write
from kvcore_conformance.waivers import Waivers

FOLDER = Path(__file__).parents[1]
README = (FOLDER / "README.md").read_text(encoding="utf-8")


def code(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_options_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.run(["--help"])
    known = set(re.findall(r"^  (--\w+)", capsys.readouterr().out, re.MULTILINE)) - {"--version"}
    told = set(re.findall(r"(?<![\w-])--[a-z]+", README))
    assert told - {"--kvcore"} == known


def test_the_outcomes_levels_and_files_are_those_of_a_report(tmp_path: Path) -> None:
    assert set(get_args(Outcome)) <= set(re.findall(r"^\| ([a-z ]+?) \|", README, re.MULTILINE))
    assert f"*Levels* sum it up: {', '.join(LEVELS)}." in README
    about = About("mine", "kvcore-mine", "0.1.0", "", "1.0", "0.1.0", "0.1.0", "3.12", "Linux")
    write(Report(about, "quick", 1, "2026-01-31", 1.0, True, [], [], []), tmp_path)
    assert all(f"`{file.name}`" in README for file in tmp_path.iterdir())


def test_the_waivers_are_read(tmp_path: Path) -> None:
    file = tmp_path / "waivers.toml"
    file.write_text(code("toml")[0], encoding="utf-8")
    assert list(Waivers.read(file).by_rule) == ["R4"]


def test_the_test_file_collects_the_suite(tmp_path: Path) -> None:
    tmp_path.joinpath("test_contract.py").write_text(code("python")[0], encoding="utf-8")
    arguments = ["-p", "kvcore_conformance.plugin", "-p", "no:cacheprovider", "--collect-only", "-q", f"--rootdir={tmp_path}"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0 and "test_contract.py::test_s1_" in ran.stdout, ran.stdout + ran.stderr


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", README):
        assert (FOLDER / target).exists(), target
