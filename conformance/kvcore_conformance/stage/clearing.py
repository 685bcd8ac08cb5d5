"""What the tests of section C share."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore_conformance.marks import full
from kvcore_conformance.stage.arena import Room
from kvcore_conformance.stage.driver import Failure

LONG = {"orphan_s": 30.0}
"""What is kept only until it is acknowledged goes long before this limit."""


def quickly(*chosen: str, of: tuple[str, ...]) -> list[Any]:
    """All of these as parameters; those that are not chosen are for the full profile."""
    return [one if one in chosen else pytest.param(one, marks=full) for one in of]


def result(room: Room) -> list[tuple[str, Failure | None, bool]]:
    """What both handles say of how the room ended."""
    handles = (room.sender, room.receiver)
    return [(handle.poll(), handle.failure if handle.poll() == "FAILED" else None, handle.safe_now()) for handle in handles]
