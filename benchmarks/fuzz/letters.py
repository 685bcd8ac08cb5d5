"""The i-th frame for a control port: half are valid letters with one field made wrong, the others valid, cut, random or of another kind."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import msgspec

from benchmarks.fuzz.build import build, described
from benchmarks.fuzz.mutate import mutated
from kvcore.wire import Body, Hello, Introduction, Letter, Refuse, Stranger, Welcome

BODIES: tuple[type, ...] = get_args(Body)
ENDERS = (Hello, Welcome, Refuse, Stranger)
"""Letters that end a pairing when they are good: fewer of these, or nothing else is looked at."""
NUMBERS = 1 << 40
"""Rooms from here on are never opened."""


@dataclass(frozen=True)
class Life:
    """A room that lives where the letters go, with both generations."""

    room: int
    attempt: int
    rg: int
    sg: int


@dataclass
class Scene:
    """What letters are about: who writes to whom, what the writer truly is, and which rooms live there."""

    source: str
    to: str
    intro: dict[str, Any]
    data: bytes
    pairing: int = 0
    lives: list[Life] = field(default_factory=list)
    spells: Sequence[bytes] = ()

    @classmethod
    def of(cls, me: Introduction, data: bytes, to: str, spells: Sequence[bytes]) -> Scene:
        """For a writer that introduces itself so."""
        return cls(me.instance, to, msgspec.msgpack.decode(msgspec.msgpack.encode(me)), data, spells=spells)


def dice_for(seed: int, index: int) -> random.Random:
    """The dice that make one message."""
    return random.Random(seed << 40 | index)


def letter(dice: random.Random, scene: Scene) -> dict[str, Any]:
    """A valid letter, of any type."""
    kind = dice.choice(BODIES)
    if kind in ENDERS and dice.random() < 0.97:
        kind = dice.choice([body for body in BODIES if body not in ENDERS])
    body = build(dice, described(kind))
    if "room" in body:
        body |= _room(dice, scene, body)
    if "me" in body:
        body |= {"me": scene.intro, "data": scene.data, "pairing": scene.pairing + dice.randrange(2)}
    if "pages" in body:
        body |= {"n_dest": 1, "pages": [{"pool": "kv", "pages": _some_pages(dice)}]} if dice.random() < 0.7 else {}
    return {"v": 1, "source": scene.source, "to": scene.to, "body": body}


def _room(dice: random.Random, scene: Scene, body: dict[str, Any]) -> dict[str, int]:
    """A life that is there; or an old or unknown one of its room; or a room nobody opens."""
    if not scene.lives or dice.random() < 0.15:
        return {"room": NUMBERS + dice.randrange(10**6), "attempt": 0, "rg": dice.randrange(9), "sg": dice.randrange(9)}
    life = dice.choice(scene.lives)
    found = {"room": life.room, "attempt": life.attempt, "rg": life.rg, "sg": life.sg}
    if dice.random() < 0.3:
        which = dice.choice(("rg", "sg"))
        found[which] = dice.choice((0, max(found[which] - 1, 0), found[which] + 1, dice.randrange(1 << 62)))
    return found


def _some_pages(dice: random.Random) -> bytes:
    return b"".join(page.to_bytes(4, "little") for page in dice.sample(range(32), dice.randrange(5)))


def _cut(dice: random.Random, scene: Scene) -> bytes:
    good = _encoded(letter(dice, scene))
    return good[: dice.randrange(len(good))]


def _flipped(dice: random.Random, scene: Scene) -> bytes:
    found = bytearray(_encoded(letter(dice, scene)))
    for _ in range(dice.randrange(1, 4)):
        found[dice.randrange(len(found))] ^= 1 << dice.randrange(8)
    return bytes(found)


def _random(dice: random.Random, _scene: Scene) -> bytes:
    return dice.randbytes(dice.choice((0, 1, dice.randrange(2, 64), dice.randrange(64, 2000))))


def _of_another_version(dice: random.Random, scene: Scene) -> bytes:
    return _encoded(letter(dice, scene) | {"v": dice.choice((0, 2, 99, 2**31, -1))})


def _lying_counts(dice: random.Random, scene: Scene) -> bytes:
    """Headers that promise more items or bytes than come, or ever could."""
    good = _encoded(letter(dice, scene))
    head = dice.choice((b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9")) + dice.choice((b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\1\0\0"))
    at = dice.randrange(len(good))
    return good[:at] + head + good[at:]


def _spell(dice: random.Random, scene: Scene) -> bytes:
    spell = dice.choice(scene.spells) if scene.spells else b"cos\nsystem\n."
    return dice.choice((spell, msgspec.msgpack.encode(spell), msgspec.msgpack.encode(msgspec.msgpack.Ext(5, spell))))


def _encoded(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


_KINDS: Sequence[tuple[str, float, Callable[[random.Random, Scene], bytes]]] = (
    ("one field wrong", 0.5, lambda dice, scene: _encoded(mutated(dice, letter(dice, scene)))),
    ("valid", 0.12, lambda dice, scene: _encoded(letter(dice, scene))),
    ("cut", 0.08, _cut),
    ("bits flipped", 0.08, _flipped),
    ("random", 0.08, _random),
    ("another version", 0.04, _of_another_version),
    ("counts that lie", 0.06, _lying_counts),
    ("pickles and code", 0.04, _spell),
)


def frame(seed: int, index: int, scene: Scene) -> tuple[str, bytes]:
    """The i-th frame and its kind."""
    dice = dice_for(seed, index)
    (name, _, make), *_ = dice.choices(_KINDS, [weight for _, weight, _ in _KINDS])
    return name, make(dice, scene)


def readable(data: bytes) -> bool:
    """Whether a frame reads as a letter."""
    try:
        msgspec.msgpack.decode(data, type=Letter)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError):
        return False
    return True
