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
from kvcore_conformance.marks import LEVELS
from kvcore_conformance.report.model import About, Check, Outcome, Report, RuleResult
from kvcore_conformance.requirements import CONTRACT, Rule, rules
from kvcore_conformance.stage.driver import Child, ChildError
from kvcore_conformance.subject import Subject
from kvcore_conformance.waivers import Waivers

FINE: tuple[Outcome, ...] = ("passed", "not applicable")
"""What a rule must come to for a level, and when it needs no waiver."""

MEMORY = "cpu"
"""The kind that the suite's pools lie in."""


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
    needless = [result.id for result in results if result.outcome in FINE]
    today = datetime.datetime.now(datetime.timezone.utc)
    faults = run.waivers.faults(rules(), needless, today.date())
    faults += [
        f"{check.name} names rule {check.rule}, which the contract does not have" for check in run.checks if check.rule not in rules()
    ]
    holds = not faults and all(_holds(result) for result in results)
    began = (today - datetime.timedelta(seconds=run.seconds)).isoformat(timespec="seconds")
    untested = sorted(able.memory - {MEMORY})
    return Report(_about(run.subject), run.profile, run.seed, began, run.seconds, holds, _levels(results), faults, results, untested)


def _result(rule: Rule, lifted: str, run: Run) -> RuleResult:
    checks = [check for check in run.checks if check.rule == rule.id]
    waiver = run.waivers.by_rule.get(rule.id)
    outcome: Outcome
    outcome, why = "passed", ""
    if any(check.ran and not check.passed for check in checks):
        outcome, why = ("waived", f"{waiver.reason} (until {waiver.expires})") if waiver else ("failed", "")
    elif not all(check.ran for check in checks):
        outcome, why = "not run", "not all tests of it were run"
    elif lifted:
        outcome, why = "not applicable", f"declared {lifted}"
    elif not checks:
        outcome, why = "not run", "no test of this run checks it"
    return RuleResult(rule.id, rule.level, rule.group, rule.anchor, rule.text, outcome, why, checks)


def _holds(result: RuleResult) -> bool:
    return result.outcome not in ("failed", "not run") or result.requirement == "SHOULD"


def _levels(results: Sequence[RuleResult]) -> list[str]:
    """The levels that have checks, and of which every rule with a check in them holds as a whole; none if anything was left out."""
    if any(result.outcome == "not run" or not all(check.ran for check in result.checks) for result in results):
        return []
    found = {level: [result.outcome in FINE for result in results if level in _in(result)] for level in LEVELS}
    return [level for level, fine in found.items() if fine and all(fine)]


def _in(result: RuleResult) -> set[str]:
    """The levels in which a rule has checks."""
    return {check.level for check in result.checks}


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
