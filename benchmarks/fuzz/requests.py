"""The i-th bytes for a port that speaks no ZeroMQ: HTTP of the bootstrap service and the admin port, and the data port of ``local``."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from benchmarks.fuzz.build import build, described
from benchmarks.fuzz.letters import dice_for
from benchmarks.fuzz.mutate import mutated
from kvcore.backends import local
from kvcore.whereabouts import Announcement

PATHS = (
    "/v1/ranks",
    "/v1/ranks/0",
    "/v1/ranks/1",
    "/v1/group",
    "/v1/rooms",
    "/health",
    "/metrics",
    "/rooms/1",
    "/rooms/1?attempt=2",
    "/",
    "*",
)
METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "CONNECT", "get", "", "G\0T", "X" * 300)
HEADERS = (
    "Content-Length: -1", "Content-Length: 99999999999", "Content-Length: 5\r\nContent-Length: 6", "Transfer-Encoding: chunked",
    "Transfer-Encoding: chunked\r\nContent-Length: 3", "Expect: 100-continue", "Upgrade: websocket\r\nConnection: Upgrade",
    "Content-Encoding: gzip", "X: " + "y" * 9000, ": empty", "No colon", "Host: a\r\nHost: b", "Connection: keep-alive", "Range: bytes=9-1",
)  # fmt: skip
LONG = 30


@dataclass
class Facts:
    """What is true where the bytes go: the rank that a bootstrap service has, and an endpoint of a data port."""

    rank: dict[str, Any]
    data: bytes
    spells: Sequence[bytes]


def _http(method: str, path: str, body: bytes, headers: str = "") -> bytes:
    length = "" if "Content-Length" in headers or "chunked" in headers else f"Content-Length: {len(body)}\r\n"
    head = f"{method} {path} HTTP/1.1\r\nHost: kvcore\r\n{length}{headers}{chr(13) + chr(10) if headers else ''}\r\n"
    return head.encode("utf-8", "replace") + body


def _asked(dice: random.Random, facts: Facts) -> bytes:
    """A valid request with one thing wrong: in the JSON, the path, the method or a header."""
    posted: Any = dice.choice((facts.rank, build(dice, described(Announcement))))
    path = "/v1/ranks" if posted is facts.rank else "/v1/rooms"
    choice = dice.random()
    if choice < 0.5:
        return _http("POST", path, _json(mutated(dice, posted)))
    if choice < 0.7:
        found = dice.choice(PATHS)
        at = dice.randrange(len(found) + 1)
        odd = dice.choice(("%00", "..", "//", "\u202e", "9" * dice.choice((1, 5000)), "-1", "?attempt=" + "9" * 40, "%ff", " "))
        return _http("GET", found[:at] + odd + found[at:], b"")
    if choice < 0.85:
        return _http(dice.choice(METHODS), dice.choice(PATHS), _json(posted))
    return _http("POST", path, _json(posted), dice.choice(HEADERS))


def _json(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError):  # what only msgpack can say
        return repr(value)[:5000].encode("utf-8", "replace")


def _knocked(dice: random.Random, facts: Facts) -> bytes:
    """A hello for the data port, with its true token or a wrong one, and frames that lie about where their pieces go."""
    _, _, token = msgspec.json.decode(facts.data, type=tuple[str, int, bytes])
    if dice.random() < 0.5:
        return _json(mutated(dice, [token, "fuzz"])) + b"\n" + dice.randbytes(dice.randrange(200))
    frames = b"".join(_frame(dice) for _ in range(dice.randrange(1, 4)))
    return _json([token, "fuzz"]) + b"\n" + frames


def _frame(dice: random.Random) -> bytes:
    """Rows with odd regions, offsets and lengths. Only what is outside all memory is written, so that a good room's pages stay."""
    count = dice.choice((0, 1, 2, 5))
    outside = (2**20, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
    rows = [(dice.choice((-1, 0, 2, 3, 99, 2**31 - 1)), dice.choice(outside), dice.choice((0, 1, 300, *outside))) for _ in range(count)]
    said = count if dice.random() < 0.7 else dice.choice((1, 1024, 65_535))
    return local.MAGIC + said.to_bytes(2, "little") + np.array(rows, local.ROW).tobytes() + dice.randbytes(dice.randrange(400))


def _random(dice: random.Random, _facts: Facts) -> bytes:
    return dice.randbytes(dice.choice((0, 1, 9, dice.randrange(2000))))


def _spell(dice: random.Random, facts: Facts) -> bytes:
    spell = dice.choice(facts.spells)
    return dice.choice((spell, spell + b"\n", _http("POST", dice.choice(PATHS), spell), _json([spell.decode("latin-1"), "fuzz"]) + b"\n"))


def _cut(make: Callable[[random.Random, Facts], bytes]) -> Callable[[random.Random, Facts], bytes]:
    def cut(dice: random.Random, facts: Facts) -> bytes:
        good = make(dice, facts)
        return good[: dice.randrange(len(good))]

    return cut


def _plain(dice: random.Random, _facts: Facts) -> bytes:
    return _http("GET", dice.choice(PATHS), b"", dice.choice(("", "Connection: close")))


def request(seed: int, index: int, facts: Facts, data_port: bool) -> tuple[str, bytes]:
    """The i-th bytes and their kind."""
    dice = dice_for(seed, index)
    good = _knocked if data_port else _asked
    kinds: Sequence[tuple[str, float, Callable[[random.Random, Facts], bytes]]] = (
        ("one field wrong", 0.55, good),
        ("valid", 0.05, _plain),
        ("cut", 0.15, _cut(good)),
        ("random", 0.15, _random),
        ("pickles and code", 0.10, _spell),
    )
    (name, _, make), *_ = dice.choices(kinds, [weight for _, weight, _ in kinds])
    return name, make(dice, facts)
