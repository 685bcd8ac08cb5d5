"""The support table: what it says of a report, and that the README's is one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from kvcore_conformance.report.model import About, Outcome, Report, RuleResult
from kvcore_conformance.report.write import write
from kvcore_conformance.requirements import CONTRACT, rules
from kvcore_conformance.support import HEAD, main, renewed, support

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def rule(name: str, outcome: Outcome = "passed", group: str = "abort") -> RuleResult:
    return RuleResult(name, "MUST", group, name.lower(), "Its text.", outcome)


def report(*found: RuleResult, levels: tuple[str, ...] = (), engine: str = "nixl 1.5.1", profile: str = "quick") -> Report:
    holds = all(one.outcome not in ("failed", "not run") for one in found)
    about = About("mine", "kvcore-mine", "0.3.0", engine, "1.0", "0.1.0", "0.1.0", "3.12.1", "Linux")
    return Report(about, profile, 4711, "2026-01-31T12:00:00+00:00", 3.25, holds, list(levels), [], list(found))


def test_the_support_table_has_a_row_a_report_and_a_column_a_group() -> None:
    good = report(rule("S1", group="states"), rule("A2"), rule("B7", "not applicable", "backends"), levels=("Core", "Abort and Clear"))
    bad = report(
        rule("S1", group="states"),
        rule("A2", "failed"),
        rule("A3", "not run"),
        rule("A4", "waived"),
        rule("B7", "not applicable", "backends"),
    )
    lines = list(support([("mine, TCP", good), ("mine", bad)]))
    assert lines[0] == "| backend | plugin | engine | contract | states | abort | backends | levels |"
    row = "| mine, TCP | kvcore-mine 0.3.0 | nixl 1.5.1 | 1.0 | holds | holds | holds, without B7 | Core, Abort and Clear (quick) |"
    assert lines[2] == row
    assert lines[3].endswith("| holds | A2 failed, A3 not run, A4 waived | holds, without B7 | none |")


def test_the_support_command_prints_it_and_refuses_what_is_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(report(rule("A2"), engine=""), tmp_path)
    file = str(tmp_path / "report.json")
    command = [sys.executable, "-m", "kvcore_conformance.support", f"mine, TCP={file}", file]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.splitlines()[2:] == [
        "| mine, TCP | kvcore-mine 0.3.0 | its own | 1.0 | holds | none |",
        "| mine | kvcore-mine 0.3.0 | its own | 1.0 | holds | none |",
    ]
    (tmp_path / "deep.json").write_text("[" * 100_000, encoding="utf-8")
    for arguments in ([], [str(tmp_path / "none.json")], [str(tmp_path / "deep.json")]):
        assert main(arguments) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_the_support_command_renews_the_table_of_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(report(rule("A2"), levels=("Core",)), tmp_path)
    page, file = tmp_path / "page.md", str(tmp_path / "report.json")
    page.write_text(f"Before.\n\n{HEAD}old | levels |\n|---|\n| mine |\n\n| other | table |\n", encoding="utf-8")
    assert main(["--into", str(page), file]) == 0 and capsys.readouterr().out == ""
    table = "".join(f"{line}\n" for line in support([("mine", report(rule("A2"), levels=("Core",)))]))
    assert page.read_text(encoding="utf-8") == f"Before.\n\n{table}\n| other | table |\n"
    page.write_text("No table.\n", encoding="utf-8")
    for where in (page, tmp_path / "none.md"):
        assert main(["--into", str(where), file]) == 2
        assert capsys.readouterr().err.count("\n") == 1


# --- that of the README


def told(row: str) -> tuple[str, Report]:
    """A report that says what a row of the table says."""
    name, plugin, engine, contract, *cells, standing = (cell.strip() for cell in row.strip("|").split("|"))
    levels, profile = re.fullmatch(r"(.*) \((\w+)\)", standing).groups()  # type: ignore[union-attr]
    known = rules().values()
    outcomes: dict[str, Outcome] = {}
    for cell in cells:
        lifted = re.fullmatch("holds(?:, without (.*))?", cell)
        assert lifted, f"{name} does not hold: {cell}"
        outcomes.update(dict.fromkeys(lifted[1].split(", ") if lifted[1] else (), "not applicable"))
    found = report(
        *(rule(one.id, outcomes.get(one.id, "passed"), one.group) for one in known), levels=tuple(levels.split(", ")), profile=profile
    )
    found.about.distribution, found.about.version = plugin.split()
    found.about.engine, found.about.contract = engine, contract
    return name, found


def test_the_table_of_the_readme_is_one_of_reports() -> None:
    start = README.index(HEAD)
    table = README[start : README.index("\n\n", start)]
    reports = [told(row) for row in table.splitlines()[2:]]
    assert renewed(README, list(support(reports))) == README
    assert [name for name, found in reports if found.about.contract != CONTRACT] == []


def test_the_table_of_the_readme_has_the_rows_that_make_support_writes_and_the_versions_of_today() -> None:
    rows = re.findall(rf"^\| ([^|]+) \| (kvcore[\w-]*) (\S+) \| .* \| {CONTRACT} \|", README, re.MULTILINE)
    command = re.search(r"^support:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert command is not None
    assert [name for name, _, _ in rows] == ["local", *re.findall(r'"([^"=]+)=', command[1])]
    for _, distribution, version in rows:
        project = ROOT / ("" if distribution == "kvcore" else f"plugins/{distribution}") / "pyproject.toml"
        assert f'version = "{version}"' in project.read_text(encoding="utf-8"), distribution
