"""What a run came to. ``report.json`` is this, and ``schema`` its JSON schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from kvcore.errors import ConfigError, one_line

SCHEMA_VERSION = "1.0"

BUDGET_S = {"quick": 20.0, "full": 360.0}
"""What a profile may take over ``local``, on a machine that does nothing else."""

Outcome = Literal["passed", "failed", "not applicable", "waived", "not run"]


class Story(msgspec.Struct):
    """The last events of a process when a check failed."""

    role: str
    pid: int
    events: list[str]


class Check(msgspec.Struct):
    """One test. ``ran``: to its end; ``problem``: how it failed, as pytest shows it."""

    name: str
    rule: str
    level: str
    passed: bool = False
    ran: bool = False
    seconds: float = 0.0
    problem: str = ""
    stories: list[Story] = []

    @property
    def headline(self) -> str:
        """The problem in a line."""
        lines = self.problem.splitlines() or [""]
        return next((line[1:].strip() for line in lines if line.startswith("E  ")), lines[-1].strip())


class RuleResult(msgspec.Struct):
    """A rule, and what became of it. ``why``: the capability that lifts it, or the waiver's reason."""

    id: str
    requirement: Literal["MUST", "SHOULD"]
    group: str
    anchor: str
    text: str
    outcome: Outcome
    why: str = ""
    checks: list[Check] = []

    @property
    def seconds(self) -> float:
        """What its checks took."""
        return sum(check.seconds for check in self.checks)

    @property
    def failed(self) -> list[Check]:
        """Its checks that do not hold."""
        return [check for check in self.checks if check.ran and not check.passed]


class About(msgspec.Struct):
    """What was tested, with what, where."""

    backend: str
    distribution: str
    version: str
    engine: str
    contract: str
    core: str
    kit: str
    python: str
    platform: str


class Report(msgspec.Struct):
    """All of it. ``levels`` are those of which every rule holds; ``faults`` what is wrong with the run itself, such as a bad waiver;
    ``untested`` kinds of memory that are declared, and that no test has moved."""

    about: About
    profile: str
    seed: int
    started: str
    seconds: float
    holds: bool
    levels: list[str]
    faults: list[str]
    rules: list[RuleResult]
    untested: list[str] = []
    schema_version: str = SCHEMA_VERSION

    def counts(self) -> dict[Outcome, int]:
        """Rules by outcome."""
        outcomes = [rule.outcome for rule in self.rules]
        return {outcome: outcomes.count(outcome) for outcome in get_args(Outcome) if outcome in outcomes}

    def groups(self) -> dict[str, list[RuleResult]]:
        """The rules of each group, in the contract's order."""
        found: dict[str, list[RuleResult]] = {}
        for rule in self.rules:
            found.setdefault(rule.group, []).append(rule)
        return found

    @property
    def standing(self) -> str:
        """The levels, with the profile that shows them: the quick one asks for less."""
        return f"{', '.join(self.levels)} ({self.profile})" if self.levels else "none"

    @property
    def verdict(self) -> str:
        """All of it in a few words, as the badge has it."""
        return (self.standing if self.levels else f"holds, with waivers ({self.profile})") if self.holds else "fails"

    @property
    def spent(self) -> float:
        """Seconds of the run without its soak, of which the caller says how long it is."""
        return self.seconds - sum(check.seconds for rule in self.rules for check in rule.checks if check.level == "Soak")

    @property
    def took(self) -> str:
        """Its time, and that of the profile against what it may take over an engine that adds nothing, such as ``local``."""
        budget = BUDGET_S.get(self.profile)
        return f"{self.seconds:.1f} s" + (f" ({self.profile}: {self.spent:.1f} s; local may take {budget:g} s)" if budget else "")


def read(file: Path) -> Report:
    """The report of a ``report.json``; raises ``ConfigError`` for what is none, or one of a schema that is not known here."""
    try:
        report = msgspec.json.decode(file.read_bytes(), type=Report)
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{str(file)!r} is no report of a run ({one_line(error)}); name the report.json of one") from error
    if report.schema_version.partition(".")[0] != SCHEMA_VERSION.partition(".")[0]:
        found = f"{str(file)!r} has schema version {report.schema_version}, and this kit knows {SCHEMA_VERSION}"
        raise ConfigError(f"{found}; use the kit that wrote it")
    return report


def schema() -> dict[str, Any]:
    """The JSON schema of ``report.json``, which ``report-1.0.schema.json`` is."""
    title = f"Report of kvcore-conformance, schema version {SCHEMA_VERSION}"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **msgspec.json.schema(Report)}


def schema_text() -> str:
    """The file of it: ``python -c "from kvcore_conformance.report.model import *; print(schema_text())"``."""
    return json.dumps(schema(), indent=2)
