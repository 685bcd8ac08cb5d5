"""The support table of a README, made from reports: ``python -m kvcore_conformance.support [NAME=]report.json ...`` prints it; with
``--into README.md`` before these it replaces the one in that page.

A name tells apart what one plugin was tested over, such as ``"nixl, TCP=out/tcp/report.json"``.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvcore.errors import ConfigError, one_line
from kvcore_conformance.report.markdown import cell
from kvcore_conformance.report.model import Report, RuleResult, read

Named = tuple[str, Report]
HEAD = "| backend | plugin | engine | contract | "


def support(reports: Sequence[Named]) -> Iterator[str]:
    """The lines of a Markdown table: plugin x group, with the versions of plugin and engine."""
    groups = list(dict.fromkeys(group for _, report in reports for group in report.groups()))
    yield f"{HEAD}{' | '.join(groups)} | levels |"
    yield "|---" * (len(groups) + 5) + "|"
    for name, report in reports:
        about, ruled = report.about, report.groups()
        cells = [name, f"{about.distribution} {about.version}", about.engine or "its own", about.contract]
        cells += [_group(ruled.get(group, [])) for group in groups]
        cells.append(report.standing if report.holds else "none")
        yield f"| {' | '.join(map(cell, cells))} |"


def _group(rules: Sequence[RuleResult]) -> str:
    """What a group came to: that it holds, with the rules that do not apply, or else the rules that do not hold."""
    broken = [f"{rule.id} {rule.outcome}" for rule in rules if rule.outcome in ("failed", "not run", "waived")]
    if all(rule.outcome == "not run" for rule in rules):
        return "not run"
    lifted = [rule.id for rule in rules if rule.outcome == "not applicable"]
    if broken:
        return ", ".join(broken)
    return f"holds, without {', '.join(lifted)}" if lifted else "holds"


def renewed(page: str, table: Sequence[str]) -> str:
    """A page with this table in the place of the one that it has; raises ``ConfigError`` if it has none."""
    text = "".join(f"{line}\n" for line in table)
    page, found = re.subn(rf"^{re.escape(HEAD)}.*\n(\|.*\n)*", lambda _: text, page, count=1, flags=re.MULTILINE)
    if not found:
        raise ConfigError(f"the page has no table to replace; put a line into it that begins with {HEAD!r}")
    return page


def _named(argument: str) -> Named:
    name, _, file = argument.rpartition("=")
    report = read(Path(file))
    return name or report.about.backend, report


def main(arguments: Sequence[str]) -> int:
    """Print it, or write it; 2 and one line for what is no report or no page."""
    parser = argparse.ArgumentParser(prog="python -m kvcore_conformance.support")
    parser.add_argument("--into", type=Path, metavar="PAGE")
    parser.add_argument("reports", nargs="*", metavar="[NAME=]report.json")
    chosen = parser.parse_args(arguments)
    page: Path | None = chosen.into
    try:
        reports = [_named(report) for report in chosen.reports]
        if not reports:
            raise ConfigError("no report is named; name the report.json of each run: [NAME=]report.json ...")
        lines = list(support(reports))
        if page is not None:
            page.write_text(renewed(page.read_text(encoding="utf-8"), lines), encoding="utf-8")
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"kvcore_conformance.support: {one_line(error)}\n")
        return 2
    if page is None:
        sys.stdout.writelines(f"{line}\n" for line in lines)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
