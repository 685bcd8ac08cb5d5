"""S: states only move forward, in one place, and every wait has a limit."""

from __future__ import annotations

import pytest

from kvcore_conformance.arena import MOMENTS, Pair
from kvcore_conformance.driver import Child, Crew
from kvcore_conformance.marks import full, rule

SIDES = ("prefill", "decode")
ORDER = ("BOOTSTRAPPING", "WAITING_FOR_INPUT", "TRANSFERRING", "SUCCESS")


def states(child: Child, room: int) -> list[str]:
    """The states that a room has passed through, by the events of a process."""
    lines = [line.split() for line in child.events(500) if f" room {room}." in line and " status " in line]
    return [word.removeprefix("state=") for line in lines for word in line if word.startswith("state=")]


@rule("S1")
def test_s1_states_only_move_forward(pair: Pair) -> None:
    room = pair.at("succeeded")
    for child in (pair.prefill, pair.decode):
        seen = states(child, room.number)
        assert seen == sorted(seen, key=ORDER.index) and seen[-1] == "SUCCESS", f"{child.role} passed through {seen}"
    room.sender.abort("too late")
    room.receiver.abort("too late")
    room.ends("SUCCESS")
    room.clear()


@rule("S4")
@pytest.mark.parametrize("moment", [MOMENTS[1], pytest.param(MOMENTS[3], marks=full), MOMENTS[4]])
def test_s4_poll_and_the_store_are_one_fact(pair: Pair, moment: str) -> None:
    room = pair.at(moment)
    for side in SIDES:
        assert room.side(side).poll() == pair.side(side).status(room.number)
    room.clear()
    assert [pair.side(side).status(room.number) for side in SIDES] == [None, None]
    pair.accept(room)


@rule("S8")
@pytest.mark.parametrize("side", SIDES)
def test_s8_a_room_that_nobody_polls_ends_by_its_limit(crew: Crew, side: str) -> None:
    del crew, side
