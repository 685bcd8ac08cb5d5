"""A side whose rooms end soon by their limits, while the other waits on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from kvcore_conformance.stage.arena import LIMITS, POOLS, Pair
from kvcore_conformance.stage.crew import Crew

TRIES = 8
"""How often something is tried that a machine that stands still makes fail by a limit of its own."""


@contextmanager
def impatient(pair: Pair, crew: Crew, side: str, limits: Mapping[str, float]) -> Iterator[Pair]:
    """The pair with another process on one side, which has other limits. Its memory there is not under the oracle's eyes."""
    with crew.lend(1) as (child,):
        child.start(side, POOLS, limits={**LIMITS, **limits})
        both = replace(pair, prefill=child) if side == "prefill" else replace(pair, decode=child)
        for _ in range(TRIES):  # the first room has the two meet, which may take longer than the limits
            room = both.open()
            met = room.receiver.until("WAITING_FOR_INPUT", "FAILED") == "WAITING_FOR_INPUT"
            room.clear()
            if met:
                break
        yield both
