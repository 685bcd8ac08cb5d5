"""The rules of the contract, one file a version of it: ids, levels, groups, texts, and what lifts them."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, field
from importlib import resources
from typing import Literal

from kvcore import Capabilities

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONTRACT = "1.0"

Level = Literal["MUST", "SHOULD"]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule. ``lifted_by``: values of declared capabilities of which each alone makes it not applicable."""

    id: str
    level: Level
    group: str
    anchor: str
    text: str
    lifted_by: dict[str, bool] = field(default_factory=dict)

    def lifted(self, able: Capabilities) -> str:
        """By what it is lifted for a backend; "" if it holds."""
        return ", ".join(f"{name}={value}" for name, value in self.lifted_by.items() if getattr(able, name) is value)


@functools.cache
def rules() -> dict[str, Rule]:
    """All of them by id, in the contract's order."""
    text = resources.files(__name__).joinpath(f"{CONTRACT}.toml").read_text(encoding="utf-8")
    return {name: Rule(name, **found) for name, found in tomllib.loads(text)["rules"].items()}
