"""Marks of the suite's tests: the rule that a test checks, and when it is run."""

from __future__ import annotations

import pytest

LEVELS = ("Core", "Abort and Clear", "Faults", "Soak")

full = pytest.mark.kvcore_full
"""Not in the quick profile."""
soak = pytest.mark.kvcore_soak
"""Only with ``--soak``."""


def rule(name: str, level: str | None = None) -> pytest.MarkDecorator:
    """The test checks this rule. Its level is by default that of the rule's section."""
    return pytest.mark.kvcore_rule(name, level or home(name))


def home(name: str) -> str:
    """The level of the rule's section."""
    return "Abort and Clear" if name[0] in "ARC" else "Core"
