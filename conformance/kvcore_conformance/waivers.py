"""Waivers: rules that may fail for a while, each with a reason and a date after which it may no longer."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvcore.errors import ConfigError, one_line, shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Waiver:
    """One entry ``[[waiver]]`` of the file."""

    rule: str
    reason: str
    expires: datetime.date


def _waiver(entry: object) -> Waiver:
    """What was read from a file, if it has these names and types; a date with a time is none."""
    if not isinstance(entry, dict) or set(entry) != {"rule", "reason", "expires"}:
        raise ValueError(f"{shown(entry)} is no waiver of rule, reason and expires")
    found = Waiver(**entry)
    texts = all(isinstance(text, str) and text.strip() for text in (found.rule, found.reason))
    if not texts or type(found.expires) is not datetime.date:
        raise ValueError(f"the waiver for {shown(found.rule)} has no rule or no reason, or its expires is not a date")
    return found


@dataclass(frozen=True)
class Waivers:
    """What a file waives. A waiver that is not needed, not known or over is a fault of the run."""

    by_rule: Mapping[str, Waiver] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path | None) -> Waivers:
        """Those of a TOML file, none without one; raises ``ConfigError`` for one that cannot be read."""
        if file is None:
            return cls()
        try:
            found = tomllib.loads(file.read_text(encoding="utf-8"))
            entries = [_waiver(entry) for entry in found.pop("waiver", [])]
            if found:
                raise ValueError(f"it has {shown(next(iter(found)))}")
            by_rule = {one.rule: one for one in entries}
            if len(by_rule) < len(entries):
                raise ValueError("it waives a rule twice")
        except (OSError, ValueError, TypeError, RecursionError) as error:
            text = f"waivers file {str(file)!r} cannot be read ({one_line(error)})"
            raise ConfigError(f"{text}; write [[waiver]] with rule, reason and expires = 2027-01-31") from error
        return cls(by_rule)

    def faults(self, known: Iterable[str], needless: Iterable[str], today: datetime.date) -> list[str]:
        """What is wrong with them after a run in which these rules needed none."""
        known, needless, found = set(known), set(needless), []
        for one in self.by_rule.values():
            if one.rule not in known:
                found.append(f"waiver for {one.rule}: there is no such rule; remove it")
            elif one.expires < today:
                found.append(f"waiver for {one.rule} expired on {one.expires}; keep the rule, or agree on another date")
            elif one.rule in needless:
                found.append(f"waiver for {one.rule}: the rule holds, or does not apply; remove it")
        return found
