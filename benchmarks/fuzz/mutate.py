"""One field of a plain value made wrong: of another type, huge, negative, empty, nested, missing, unknown, repeated."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

DESCEND = 0.85
"""How often a part of a value is looked into rather than changed as a whole."""


def _nest(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


ODD: Sequence[Any] = (
    None, True, False, 0, 1, -1, 3, 255, 65_536, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63),
    0.0, -0.5, 1e300, float("inf"), float("nan"), "", "0", "kv", "join", "hello", "x" * 65, "x" * 2000, "a\nb", "\x1b[31m", "\u202e",
    "é" * 600, b"", b"\0", b"\xff" * 3, b"\xff" * 4, b"\0" * 4096, [], {}, [[]], [None], {"a": 1}, {"": {}}, [0] * 2000,
    _nest(60), _nest(400), msgspec.msgpack.Ext(5, b"\x80\x04."), msgspec.msgpack.Ext(-1, b"\0" * 4),
)  # fmt: skip
"""What may stand anywhere."""

MISSING = object()


def mutated(dice: random.Random, value: Any) -> Any:
    """A copy of a dict or list with one thing in it changed; what is not changed is shared."""
    if not isinstance(value, dict | list) or not value:
        return _changed(dice, value)
    found: Any = value.copy()
    if isinstance(value, dict):
        if dice.random() < 0.05:
            return found | {dice.choice(("novelty", "", "type", "__class__", "x" * 300)): dice.choice(ODD)}
        at: Any = dice.choice(list(value))
    else:
        at = dice.randrange(len(value))
        if dice.random() < 0.2:
            return found + [found[at]] * dice.choice((1, 2, 500))
    part = found[at]
    change = mutated if isinstance(part, dict | list) and dice.random() < DESCEND else _changed
    new = change(dice, part)
    if new is MISSING:
        del found[at]
    else:
        found[at] = new
    return found


def _changed(dice: random.Random, part: Any) -> Any:
    choice = dice.random()
    if choice < 0.1:
        return MISSING
    near = next((make for kind, make in _NEAR.items() if type(part) is kind), None)
    return near(dice, part) if near is not None and choice < 0.6 else dice.choice(ODD)


def _pages(dice: random.Random, part: bytes) -> bytes:
    """Bytes as a list of pages has them, and then not."""
    pages = [int.from_bytes(part[at : at + 4], "little", signed=True) for at in range(0, len(part) // 4 * 4, 4)] or [0]
    changes: Sequence[Callable[[], bytes]] = (
        lambda: part[:-1],
        lambda: part + b"\1",
        lambda: _listed([*pages, pages[0]]),
        lambda: _listed([*pages[1:], dice.choice((-1, -(2**31), 32, 33, 2**31 - 1))]),
        lambda: _listed(pages * 100),
        lambda: dice.randbytes(len(part)),
    )
    return dice.choice(changes)()


def _listed(pages: Sequence[int]) -> bytes:
    return b"".join(page.to_bytes(4, "little", signed=True) for page in pages)


_NEAR: dict[type, Callable[[random.Random, Any], Any]] = {
    int: lambda dice, part: dice.choice((part + 1, part - 1, -part, part + 2**32, part * 2)) % 2**64,
    str: lambda dice, part: dice.choice((part + "x", part[:-1], part.upper(), part + "\n", part * 50)),
    bytes: _pages,
    bool: lambda dice, part: not part,
    float: lambda dice, part: dice.choice((-part, part * 1e9, part + 1)),
}
"""Changes that stay close to what was there: these get furthest in."""
