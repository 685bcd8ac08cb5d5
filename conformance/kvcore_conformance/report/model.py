"""What a run came to. ``report.json`` is this, and ``schema`` its JSON schema."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

SCHEMA_VERSION = "1.0"

Outcome = Literal["passed", "failed", "not applicable", "waived", "not run"]


class Story(msgspec.Struct):
    """The last events of a process when a check failed."""

    role: str
    pid: int
    events: list[str]


class Check(msgspec.Struct):
    """One test. ``problem`` is how it failed, as pytest shows it."""

    name: str
    rule: str
    level: str
    passed: bool = True
    seconds: float = 0.0
    problem: str = ""
    stories: list[Story] = []


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
    """All of it. ``levels`` are those of which every check holds; ``faults`` what is wrong with the run itself, such as a bad waiver."""

    about: About
    profile: str
    seed: int
    started: str
    seconds: float
    holds: bool
    levels: list[str]
    faults: list[str]
    rules: list[RuleResult]
    schema_version: str = SCHEMA_VERSION

    def counts(self) -> dict[Outcome, int]:
        """Rules by outcome."""
        found: dict[Outcome, int] = {}
        for rule in self.rules:
            found[rule.outcome] = found.get(rule.outcome, 0) + 1
        return found


def schema() -> dict[str, Any]:
    """The JSON schema of ``report.json``."""
    return msgspec.json.schema(Report)
