"""The report for a terminal: one line a rule that does not hold, one a group, and what it all comes to."""

from __future__ import annotations

from collections.abc import Iterator

from kvcore_conformance.report.model import Report, RuleResult


def table(report: Report) -> Iterator[str]:
    """Its lines."""
    about = report.about
    yield f"{about.backend} ({about.distribution} {about.version}{', ' + about.engine if about.engine else ''}), contract {about.contract}"
    for group in dict.fromkeys(rule.group for rule in report.rules):
        yield f"  {group:<10} {' '.join(map(_short, (rule for rule in report.rules if rule.group == group)))}"
    for rule in report.rules:
        if rule.outcome in ("failed", "waived", "not applicable", "not run"):
            yield from _said(rule)
    yield from (f"  fault: {fault}" for fault in report.faults)
    levels = ", ".join(report.levels) or "none"
    counts = ", ".join(f"{number} {outcome}" for outcome, number in report.counts().items())
    yield f"{'holds' if report.holds else 'DOES NOT HOLD'}: {counts}; levels: {levels}; seed {report.seed}; {report.seconds:.1f} s"


def _short(rule: RuleResult) -> str:
    return rule.id if rule.outcome == "passed" else f"{rule.id}[{rule.outcome}]"


def _said(rule: RuleResult) -> Iterator[str]:
    yield f"  {rule.id} {rule.outcome}{': ' + rule.why if rule.why else ''}"
    if rule.outcome == "failed":
        yield f"     {rule.text}"
        yield from (f"     failed: {check.name}" for check in rule.checks if not check.passed)
