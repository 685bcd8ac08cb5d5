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
from kvcore_conformance.marks import LEVELS, home
from kvcore_conformance.report.model import About, Check, Outcome, Report, RuleResult
from kvcore_conformance.requirements import CONTRACT, Rule, rules
from kvcore_conformance.stage.driver import Child, ChildError
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
    return Report(_about(run.subject), run.profile, run.seed, began, run.seconds, holds, _levels(run.checks, results), faults, results)


def _result(rule: Rule, lifted: str, run: Run) -> RuleResult:
    checks = [check for check in run.checks if check.rule == rule.id]
    waiver = run.waivers.by_rule.get(rule.id)
    outcome: Outcome
    outcome, why = "passed", ""
    if lifted:
        outcome, why = "not applicable", f"declared {lifted}"
    elif not checks:
        outcome, why = "not run", "no test of this run checks it"
    elif any(check.ran and not check.passed for check in checks):
        outcome, why = ("waived", f"{waiver.reason} (until {waiver.expires})") if waiver else ("failed", "")
    elif not all(check.ran for check in checks):
        outcome, why = "not run", "the run ended before all tests of it had"
    return RuleResult(rule.id, rule.level, rule.group, rule.anchor, rule.text, outcome, why, checks)


def _holds(result: RuleResult) -> bool:
    return result.outcome not in ("failed", "not run") or result.requirement == "SHOULD"


def _levels(checks: Sequence[Check], results: Sequence[RuleResult]) -> list[str]:
    """The levels of which checks were run, every one holds, and no rule was left out."""
    found = {level: [check.passed for check in checks if check.level == level] for level in LEVELS}
    left_out = {home(result.id) for result in results if not result.checks and result.outcome == "not run"}
    return [level for level, passed in found.items() if passed and all(passed) and level not in left_out]


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
        return str(child.work("engine", subject.backend))
    except (ChildError, AssertionError, OSError):
        return ""  # it is not what is judged here
    finally:
        child.end()
