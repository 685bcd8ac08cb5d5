"""From checks to verdicts: which rules hold, which levels, and whether the run does."""

from __future__ import annotations

import datetime
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import kvcore
from kvcore.installed import find_backend
from kvcore_conformance import __version__
from kvcore_conformance.driver import Child
from kvcore_conformance.marks import LEVELS
from kvcore_conformance.report.model import About, Check, Outcome, Report, RuleResult
from kvcore_conformance.requirements import CONTRACT, Rule, rules
from kvcore_conformance.subject import Subject
from kvcore_conformance.waivers import Waivers


@dataclass(frozen=True)
class Run:
    """What was run, and what became of each check."""

    subject: Subject
    checks: Sequence[Check]
    profile: str
    seed: int
    seconds: float
    waivers: Waivers


def judge(run: Run) -> Report:
    """The report of a run."""
    able = run.subject.capabilities
    results = [_result(rule, rule.lifted(able), run) for rule in rules().values()]
    passed = [result.id for result in results if result.outcome == "passed"]
    today = datetime.datetime.now(datetime.timezone.utc)
    faults = run.waivers.faults(rules(), passed, today.date())
    faults += [
        f"{check.name} names rule {check.rule}, which the contract does not have" for check in run.checks if check.rule not in rules()
    ]
    holds = not faults and all(_holds(result) for result in results)
    began = (today - datetime.timedelta(seconds=run.seconds)).isoformat(timespec="seconds")
    return Report(_about(run.subject), run.profile, run.seed, began, run.seconds, holds, _levels(run.checks), faults, results)


def _result(rule: Rule, lifted: str, run: Run) -> RuleResult:
    checks = [check for check in run.checks if check.rule == rule.id]
    waiver = run.waivers.by_rule.get(rule.id)
    outcome: Outcome
    outcome, why = "passed", ""
    if lifted:
        outcome, why = "not applicable", f"declared {lifted}"
    elif not checks:
        outcome, why = "not run", "no test of this run checks it"
    elif not all(check.passed for check in checks):
        outcome, why = ("waived", f"{waiver.reason} (until {waiver.expires})") if waiver else ("failed", "")
    return RuleResult(rule.id, rule.level, rule.group, rule.anchor, rule.text, outcome, why, checks)


def _holds(result: RuleResult) -> bool:
    return result.outcome not in ("failed", "not run") or result.requirement == "SHOULD"


def _levels(checks: Sequence[Check]) -> list[str]:
    """The levels of which checks were run and every one holds."""
    found = {level: [check.passed for check in checks if check.level == level] for level in LEVELS}
    return [level for level, passed in found.items() if passed and all(passed)]


def _about(subject: Subject) -> About:
    installed = find_backend(subject.backend)
    return About(
        subject.backend, installed.distribution, installed.version, _engine(subject), CONTRACT, kvcore.__version__,
        __version__, sys.version.split()[0], platform.platform(),
    )  # fmt: skip


def _engine(subject: Subject) -> str:
    """The engine as the backend's facts name it, asked in a process of its own; its own version where there is no engine beside it."""
    child = Child(subject.env, subject.backend)
    try:
        found = child.work("engine", subject.backend)
    finally:
        child.end()
    return str(found)
