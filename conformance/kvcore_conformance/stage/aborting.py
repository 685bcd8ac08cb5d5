"""What the tests of section A share: the combinations that they try, and how far a room or a ticket has come."""

from __future__ import annotations

from itertools import product

import pytest

from kvcore_conformance.marks import full
from kvcore_conformance.stage.arena import MOMENTS, Pair, Room
from kvcore_conformance.stage.driver import Handle
from kvcore_conformance.stage.waits import until

OTHER = {"prefill": "decode", "decode": "prefill"}
NOTICE = {"prefill": "Status", "decode": "Abort"}
BUSY = ("told late", "completing", "failing", "ticket failed")
"""What a ticket may be at, besides held back as it is in flight: see ``brought``."""


def cases(quick: tuple[tuple[str, ...], ...], *axes: tuple[str, ...]) -> list[object]:
    """All combinations, of which some are in the quick profile."""
    unknown = set(quick) - set(product(*axes))
    assert not unknown, f"not among the combinations: {unknown}"
    return [pytest.param(*case, marks=() if case in quick else full) for case in product(*axes)]


def brought(pair: Pair, moment: str) -> Room:
    """A room at a moment; or with a ticket that is over and not told so, or held back, or that fails when its gate opens, or has failed."""
    if moment in MOMENTS:
        return pair.at(moment)
    if moment == "completing":
        return pair.at("in flight")
    room = pair.at("published")
    if moment == "told late":
        pair.prefill.fault("hold", f"hold {room.number}", hook="kvcore_poll", room=room.number)
        room.send()
        until(lambda: pair.prefill.held_writes(room.number) > 0, "the news of a write is held back")
        return room
    pair.prefill.fault("fail", room=room.number)
    room.send(gate=f"gate of {room.number}")
    if moment == "ticket failed":
        pair.prefill.open_gate(f"gate of {room.number}")
        room.ends("FAILED")
    return room


def opened(pair: Pair, side: str, room: int) -> Handle:
    """One side of a room."""
    return pair.prefill.sender(room) if side == "prefill" else pair.decode.receiver(room, pair.prefill)


def heard(handle: Handle, side: str, reason: str) -> None:
    """This side has learnt that the room was aborted, where and why."""
    found = handle.wait()
    assert found == "FAILED", f"{handle.child.role} is {found} after {side} has aborted"
    failure = handle.failure
    assert reason in failure.text and (failure.code, failure.side) == ("aborted", side), f"{side} aborted with {reason!r}, heard: {failure}"
