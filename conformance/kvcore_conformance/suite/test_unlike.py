"""T3: sides that are not set up alike are told so when they pair, or when a room of theirs is matched."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from kvcore_conformance.marks import full, rule
from kvcore_conformance.stage.arena import LIMITS, POOLS, Pair, number
from kvcore_conformance.stage.crew import Crew
from kvcore_conformance.stage.driver import PoolSpec

KV, AUX = POOLS
UNLIKE = {
    "page_bytes": replace(KV, page_bytes=2048),
    "page_size": replace(KV, page_size=32),
    "dtype": replace(KV, dtype="int8"),
    "layers": replace(KV, layers=3),
    "name": replace(KV, name="other"),
}


@rule("T3")
@pytest.mark.parametrize("what", ["page_bytes", *(pytest.param(what, marks=full) for what in UNLIKE if what != "page_bytes")])
def test_t3_unlike_pools_are_refused_with_both_values(pair: Pair, crew: Crew, what: str) -> None:
    with crew.lend(1) as (odd,):
        odd.start("decode", [UNLIKE[what], AUX], limits=LIMITS)
        receiver = odd.receiver(number(), pair.prefill)
        assert receiver.wait() == "FAILED", "a receiver whose pools are unlike the sender's was not refused"
        failure = receiver.failure
        assert failure.code == "incompatible", f"it was refused as {failure.code}: {failure.text}"
        for spec in (KV, UNLIKE[what]):
            assert value(spec, what) in failure.text, f"{what} is {value(spec, what)} on one side, and the reason is {failure.text!r}"
            said = pair.prefill.logged(odd.instance)
            assert any(value(spec, what) in line for line in said), f"{what} is {value(spec, what)} on one side, and prefill logged {said}"
        receiver.clear()
        pair.transfer()


@rule("T3")
@full
def test_t3_another_number_of_destination_ranks_is_refused_with_both_values(pair: Pair, crew: Crew) -> None:
    """A rank of three, whose destination is for one."""
    with crew.lend(1) as (odd,):
        odd.work("pretend", tp_size=3)
        odd.start("decode", POOLS, limits=LIMITS)
        room = number()
        sender, receiver = pair.prefill.sender(room), odd.receiver(room, pair.prefill)
        receiver.receive({"kv": [0]})
        sender.send({"kv": [0]}, last=True)
        assert receiver.wait() == "FAILED", "a receiver whose group is not that of its destination was not refused"
        failure = receiver.failure
        named = set(re.findall(r"\b\d+\b", failure.text))
        assert failure.code == "incompatible" and {"1", "3"} <= named, f"a group of 3 named 1 rank, and was refused with {failure}"
        assert sender.poll() != "SUCCESS", "the sender has succeeded all the same"
        for handle in (sender, receiver):
            handle.clear()
        pair.transfer()


def value(spec: PoolSpec, what: str) -> str:
    """What a reason must name of a pool."""
    if what == "layers":
        return str(tuple(range(spec.layers)))
    return repr(spec.name) if what == "name" else str(getattr(spec, what))
