"""The report as Markdown, for a comment on a change or a page of documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvcore_conformance.report.events import interleaved
from kvcore_conformance.report.model import Check, Report, RuleResult


def markdown(report: Report) -> str:
    """One document."""
    return "\n".join(_lines(report)) + "\n"


def cell(text: str) -> str:
    """Text in a cell of a table."""
    return " ".join(text.replace("|", "\\|").split())


def _lines(report: Report) -> Iterator[str]:
    about = report.about
    yield f"# {cell(about.backend)} and the kvcore transfer contract {about.contract}: {'holds' if report.holds else 'does not hold'}"
    yield ""
    counts = ", ".join(f"{number} {outcome}" for outcome, number in report.counts().items())
    yield f"{counts}. Levels: {report.standing}."
    yield from ("", "| | |", "|---|---|")
    yield from (f"| {name} | {cell(value)} |" for name, value in facts(report))
    if report.faults:
        yield from ("", "## Faults of the run", "")
        yield from (f"- {fault}" for fault in report.faults)
    for group, rules in report.groups().items():
        yield from ("", f"## {group.capitalize()}", "", "| rule | outcome | checks | seconds | |", "|---|---|---|---|---|")
        yield from (_row(rule) for rule in rules)
    for rule in report.rules:
        yield from (line for check in rule.failed for line in _failure(rule, check))


def facts(report: Report) -> list[tuple[str, str]]:
    """What was tested, with what and where, as names and values."""
    about = report.about
    return [
        ("backend", about.backend),
        ("plugin", f"{about.distribution} {about.version}"),
        ("engine", about.engine or "its own"),
        ("contract", about.contract),
        ("core", f"kvcore {about.core}"),
        ("kit", f"kvcore-conformance {about.kit}"),
        ("profile", report.profile),
        ("seed", str(report.seed)),
        ("memory", f"cpu; declared and not tested: {', '.join(report.untested)}" if report.untested else "cpu"),
        ("platform", f"{about.platform}, Python {about.python}"),
        ("started", report.started),
        ("took", report.took),
    ]


def _row(rule: RuleResult) -> str:
    outcome = f"**{rule.outcome}**" if rule.outcome in ("failed", "not run") else rule.outcome
    words = f"{rule.text} *{rule.why}*" if rule.why else rule.text
    return f"| {rule.id} | {outcome} | {len(rule.checks)} | {rule.seconds:.2f} | {cell(words)} |"


def _failure(rule: RuleResult, check: Check) -> Iterator[str]:
    yield from ("", f"<details><summary>{rule.id}: <code>{check.name}</code></summary>", "")
    yield from _fenced(check.problem)
    if check.stories:
        yield from ("", "The last events, in seconds before the end:", "")
        yield from _fenced("\n".join(f"{line.clock:>9}  {line.role:<8} {line.text}" for line in interleaved(check.stories)))
    yield from ("", "</details>")


def _fenced(text: str) -> Iterator[str]:
    """Code, in a fence longer than any in it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    yield from (f"{fence}text", text.rstrip(), fence)
