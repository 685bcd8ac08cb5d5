"""What a fault is narrowed to, what it holds something back by, and the check of both."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict

from kvcore.errors import ConfigError, shown

MOST_HELD_S = 60.0
MOST_DELAY_S = 86_400.0
_LEAST = {"room": 0, "chunk": 1, "nth": 1, "times": 0}


class Where(TypedDict, total=False):
    """What a fault is narrowed to. ``nth`` and ``times`` count, per fault, the calls that fit room and chunk."""

    room: int  # its number
    chunk: int  # of the room, from 1
    nth: int  # only the n-th call that fits, from 1
    times: int  # at most so often
    rate: float  # only this share of the calls, drawn at random


def narrowed(where: Where) -> Where:
    """``where``, if it can mean a call; raises ``ConfigError`` naming what cannot."""
    for name, value in where.items():
        if name == "rate":
            number(name, value, 1.0)
        elif name in _LEAST:
            whole(name, value, _LEAST[name])
        else:
            raise ConfigError(f"a fault cannot be narrowed by {shown(name)}; choose from {', '.join((*_LEAST, 'rate'))}")
    return where


def whole(what: str, value: object, least: int) -> None:
    """Raise ``ConfigError`` unless ``value`` is an integer of at least ``least``, or None for any."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ConfigError(f"{what} of a fault is {shown(value)}; pass an integer of at least {least}")


def number(what: str, value: object, most: float) -> float:
    """``value``, if it is a number from 0 to ``most``; else raises ``ConfigError``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        raise ConfigError(f"{what} of a fault is {shown(value)}; pass a number from 0 to {most:g}")
    return value


def raisable(error: object) -> None:
    """Raise ``ConfigError`` unless that can be raised."""
    if not isinstance(error, BaseException) and not (isinstance(error, type) and issubclass(error, BaseException)):
        raise ConfigError(f"error of a fault is {shown(error)}; pass an exception")


def allowed_hook(hook: str, allowed: Sequence[str]) -> str:
    """``hook``, if it is among those; else raises ``ConfigError``."""
    if hook not in allowed:
        raise ConfigError(f"hook {shown(hook)} cannot have this fault; choose one of {', '.join(allowed)}")
    return hook


class Gate(Protocol):
    """What holds something back: whether what came at a monotonic time may go on, or blocking until it may."""

    def opened(self, since: float) -> bool: ...
    def wait(self) -> None: ...


class Hold:
    """Holds transfers or calls back until ``release``."""

    def __init__(self) -> None:
        self._released = threading.Event()
        self._held: set[object] = set()

    @property
    def held(self) -> int:
        """How many are held now."""
        return len(self._held)

    def release(self) -> None:
        """Let go what is held, and whatever comes later."""
        self._released.set()
        self._held.clear()

    def opened(self, since: float) -> bool:
        """Whether it was released."""
        return self._released.is_set()

    def wait(self) -> None:
        """Block until released; at most a minute."""
        me = object()
        self.note(me)
        self._released.wait(MOST_HELD_S)
        self.drop(me)

    def note(self, what: object) -> None:
        """Count one that is held."""
        if not self._released.is_set():
            self._held.add(what)

    def drop(self, what: object) -> None:
        """Count it no more."""
        self._held.discard(what)


@dataclass(frozen=True, slots=True)
class Delay:
    """Holds back for so many seconds."""

    seconds: float

    def opened(self, since: float) -> bool:
        """Whether they have passed."""
        return time.monotonic() >= since + self.seconds

    def wait(self) -> None:
        """Block for them; at most a minute."""
        threading.Event().wait(min(self.seconds, MOST_HELD_S))
