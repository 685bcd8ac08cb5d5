"""The report for a terminal: a line a group, what does not hold and why, and what it all comes to."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from kvcore_conformance.report.events import interleaved
from kvcore_conformance.report.model import Check, Report, RuleResult

WIDTH = 120


def table(report: Report) -> Iterator[str]:
    """Its lines."""
    about = report.about
    engine = f", engine {about.engine}" if about.engine else ""
    yield f"{about.backend} ({about.distribution} {about.version}{engine}), contract {about.contract}, profile {report.profile}"
    for group, rules in report.groups().items():
        if ran := [rule for rule in rules if rule.outcome != "not run"]:
            yield f"  {group:<10} {sum(rule.seconds for rule in ran):6.1f} s  {' '.join(map(_short, ran))}"
    yield from _without_reproach(report)
    for rule in report.rules:
        if rule.outcome == "failed":
            yield from _failed(rule, report.seed)
    yield from (f"  not tested: {kind} memory, which is declared" for kind in report.untested)
    yield from (f"  fault: {fault}" for fault in report.faults)
    counts = ", ".join(f"{number} {outcome}" for outcome, number in report.counts().items())
    yield f"{'holds' if report.holds else 'DOES NOT HOLD'}: {counts}; levels: {report.standing}; seed {report.seed}; {report.took}"


def _short(rule: RuleResult) -> str:
    return rule.id if rule.outcome == "passed" else f"{rule.id}[{rule.outcome}]"


def _without_reproach(report: Report) -> Iterator[str]:
    """What neither passed nor failed, together where the reason is one."""
    found: dict[tuple[str, str], list[str]] = {}
    for rule in report.rules:
        if rule.outcome not in ("passed", "failed"):
            found.setdefault((rule.outcome, rule.why), []).append(rule.id)
    for (outcome, why), rules in found.items():
        yield from _wrapped(f"{outcome} ({why}): {' '.join(rules)}", "  ")


def _failed(rule: RuleResult, seed: int) -> Iterator[str]:
    yield ""
    yield from _wrapped(f"{rule.id} failed. {rule.text}", "  ")
    for check in rule.failed:
        yield f"    {check.name} ({check.seconds:.1f} s): {check.headline}"
    yield f"    seed {seed}"
    yield from _events(next((check for check in rule.failed if check.stories), None))


def _events(check: Check | None) -> Iterator[str]:
    if check is None:
        return
    yield f"    the last events of {' and '.join(f'{story.role} ({story.pid})' for story in check.stories)}, in seconds before the end:"
    for line in interleaved(check.stories):
        yield f"    {line.clock:>9}  {line.role:<8} {line.text}"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ")
