"""What a peer gives as its engine's endpoint, changed on its way: for ``kvcore_connect`` of any backend."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from benchmarks.fuzz.letters import dice_for


def spoiled(seed: int, index: int, data: bytes) -> bytes:
    """The i-th bytes that are not ``data``."""
    dice = dice_for(seed, index)
    while (found := dice.choice(_CHANGES)(dice, data)) == data:
        pass
    return found


def _flip(dice: random.Random, data: bytes) -> bytes:
    found = bytearray(data)
    for _ in range(dice.randrange(1, 5)):
        found[dice.randrange(len(found))] ^= 1 << dice.randrange(8)
    return bytes(found)


def _exchange(dice: random.Random, data: bytes) -> bytes:
    at, to = sorted((dice.randrange(len(data)), dice.randrange(len(data))))
    return data[:at] + data[at:to] * dice.randrange(3) + data[to:]


_CHANGES: Sequence[Callable[[random.Random, bytes], bytes]] = (
    _flip,
    _exchange,
    lambda dice, data: data[: dice.randrange(len(data))],
    lambda dice, data: data[dice.randrange(1, len(data)) :],
    lambda dice, data: data + dice.randbytes(dice.randrange(1, 64)),
    lambda dice, data: dice.randbytes(dice.randrange(len(data) + 1)),
)
