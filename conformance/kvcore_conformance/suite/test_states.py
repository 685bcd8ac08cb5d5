"""S: states only move forward, in one place, and every wait has a limit."""

from __future__ import annotations

import time

import pytest

from kvcore_conformance.marks import full, rule
from kvcore_conformance.stage.arena import MOMENTS, SIDES, Pair, Room, number
from kvcore_conformance.stage.crew import Crew
from kvcore_conformance.stage.driver import Child
from kvcore_conformance.stage.impatient import TRIES, impatient
from kvcore_conformance.stage.onlookers import AT_ONCE_S, together, watched
from kvcore_conformance.stage.waits import SOON_S, stays, until

ORDER = ("BOOTSTRAPPING", "WAITING_FOR_INPUT", "TRANSFERRING", "SUCCESS", "FAILED")
ENDS = ORDER[3:]
LIMIT_OF = dict(zip(ORDER, ("bootstrap_s", "input_s", "transfer_s"), strict=False))
SHORT_S, LONGER_S = 0.25, 0.6
CLOCK_S = 0.02
"""An event is told a little after it has happened."""


def changes(child: Child, room: int) -> list[tuple[float, str]]:
    """When a room has come to which state so far, by the events of a process."""
    lines = [line.split() for line in child.events(500) if f" room {room}." in line and " status " in line]
    return [(float(line[0]), word.removeprefix("state=")) for line in lines for word in line if word.startswith("state=")]


def states(child: Child, room: int) -> list[str]:
    """The states that it has passed through."""
    return [state for _, state in changes(child, room)]


def history(child: Child, room: int) -> list[str]:
    """The states that an ended room has passed through."""
    until(lambda: states(child, room)[-1:] in (["SUCCESS"], ["FAILED"]), f"{child.role} tells observers of the end of room {room}")
    return states(child, room)


def forward(seen: list[str]) -> bool:
    """Whether these states follow each other: no step back, none twice, and one end at most."""
    return seen == sorted(set(seen), key=ORDER.index) and len(set(seen) & set(ENDS)) < 2


@rule("S1")
def test_s1_states_only_move_forward(pair: Pair) -> None:
    room = pair.at("succeeded")
    for child in (pair.prefill, pair.decode):
        seen = history(child, room.number)
        assert forward(seen) and seen[-1] == "SUCCESS", f"{child.role} passed through {seen}"
    room.clear()


@rule("S1")
@pytest.mark.parametrize("side", [SIDES[0], pytest.param(SIDES[1], marks=full)])
def test_s1_a_late_end_replaces_no_end(pair: Pair, side: str) -> None:
    good, bad = pair.at("succeeded"), pair.at("in flight")
    good.side(side).abort("too late")
    assert good.side(side).poll() == "SUCCESS", "an abort has replaced a success"
    good.ends("SUCCESS")
    bad.side(side).abort("enough")
    bad.ends("FAILED")
    pair.release(bad)  # now the engine reports success
    for handle in (bad.sender, bad.receiver):
        handle.safe()
        assert handle.poll() == "FAILED", f"{handle.child.role}: a late success has replaced a failure"
        seen = history(handle.child, bad.number)
        assert forward(seen), f"{handle.child.role} passed through {seen}"
    pair.over(bad)
    good.clear()


@rule("S2")
@pytest.mark.parametrize("rooms", [3, pytest.param(30, marks=full)])
def test_s2_every_thread_sees_one_history(pair: Pair, rooms: int) -> None:
    for _ in range(rooms):
        room = pair.at("in flight")
        with watched(room.sender, room.receiver) as seen:
            pair.release(room)
            for side in SIDES:  # the aborts cross the last completion, and each other
                together(pair.side(side), *((room.side(side), "abort", f"{side} {thread}") for thread in range(4)))
            for handle in (room.sender, room.receiver):
                assert handle.wait() in ENDS, f"{handle.child.role} is {handle.poll()} after an abort"
        for one in seen:
            role, end = one.handle.child.role, one.handle.poll()
            for found in (*one.polled, *one.stored, history(one.handle.child, room.number)):
                assert forward(found), f"{role} was seen to be {found}"
            last = {state for thread in (*one.polled, *one.stored) for state in thread[-1:] if state in ENDS}
            assert last <= {end}, f"{role} ended as {end}, and threads saw {last}"
        pair.over(room)


@rule("S3")
def test_s3_an_end_removes_nothing_and_clear_does(pair: Pair) -> None:
    good, bad = pair.at("published"), pair.at("in flight")
    before = [child.work("stats")["stores"]["rooms"] for child in (pair.prefill, pair.decode)]
    pair.expect(good)
    good.send(record="first token")
    good.ends("SUCCESS")
    for side in SIDES:
        together(pair.side(side), *((room.side(side), "abort", f"{side} {thread}") for room in (good, bad) for thread in range(3)))
    bad.ends("FAILED")
    pair.release(bad)
    for handle in (bad.sender, bad.receiver):
        handle.safe()
    after = [child.work("stats")["stores"]["rooms"] for child in (pair.prefill, pair.decode)]
    assert after == before, f"prefill and decode stored {before} rooms, and {after} when two of them had ended"
    for side in SIDES:
        found = [pair.side(side).status(room.number) for room in (good, bad)]
        assert found == ["SUCCESS", "FAILED"], f"{side} stores {found} of an ended room and of a failed one"
    assert good.receiver.record == "first token", "a record is gone before clear"
    for room in (good, bad):
        pair.over(room)
        gone = [pair.side(side).status(room.number) for side in SIDES]
        assert gone == [None, None], f"prefill and decode still store {gone} after clear"


@rule("S4")
@pytest.mark.parametrize("moment", [MOMENTS[1], pytest.param(MOMENTS[3], marks=full), MOMENTS[4]])
def test_s4_poll_and_the_store_are_one_fact(pair: Pair, moment: str) -> None:
    room = pair.at(moment)
    for side in SIDES:
        polled, stored = room.side(side).poll(), pair.side(side).status(room.number)
        assert polled == stored, f"on {side} the handle polls {polled}, and the store says {stored}"
    for side in SIDES:
        room.side(side).abort("no more")
    pair.over(room)
    left = [pair.side(side).status(room.number) for side in SIDES]
    assert left == [None, None], f"prefill and decode still store {left} after clear"


@rule("S7")
def test_s7_poll_waits_neither_for_the_engine_nor_for_the_peer(pair: Pair) -> None:
    room = pair.at("published")
    pair.prefill.work("stall", room.number)
    room.send()
    until(lambda: pair.prefill.call("stall", "stuck"), "the engine is at work")
    room.sender.poll()
    assert pair.prefill.took_s < AT_ONCE_S, f"poll took {pair.prefill.took_s:.1f} s while the engine was stuck"
    room.sender.abort("no more")
    room.ends("FAILED")
    pair.over(room)
    for side, other in (SIDES, SIDES[::-1]):
        room = pair.at("joined")
        pair.side(other).freeze()
        try:
            room.side(side).poll()
            assert pair.side(side).took_s < AT_ONCE_S, f"poll of {side} took {pair.side(side).took_s:.1f} s while {other} stood still"
        finally:
            pair.side(other).thaw()
        room.sender.abort("no more")
        pair.over(room)


@rule("S7")
def test_s7_a_room_that_others_removed_polls_as_it_ended(pair: Pair) -> None:
    good, live = pair.at("succeeded"), pair.at("published")
    with watched(live.sender, live.receiver) as seen:
        live.clear()
    for one in seen:
        assert one.handle.poll() == "FAILED", f"{one.handle.child.role} polls {one.handle.poll()}, cleared before it ended"
        assert all(set(thread) <= set(ORDER) for thread in one.polled), f"threads polled {one.polled}"
    newer = pair.open(good.number)  # which replaces the room that has ended
    found = [good.side(side).poll() for side in SIDES]
    assert found == ["SUCCESS", "SUCCESS"], f"sender and receiver poll {found} when their room was replaced"
    newer.sender.abort("no more")
    pair.over(newer)


def waiting(both: Pair, side: str, state: str) -> Room:
    """A room that will wait in a state, on one side at least."""
    if state == "BOOTSTRAPPING":
        alone = both.prefill.sender(number()) if side == "prefill" else both.decode.receiver(number(), both.prefill)
        return Room(alone, alone, {}, {})
    room = both.open()
    if side == "prefill" or state == "TRANSFERRING":
        room.receiver.receive({})
    if state == "TRANSFERRING":
        room.sender.send({})
    return room


@rule("S8")
@pytest.mark.parametrize("side", ["prefill", pytest.param("decode", marks=full)])
def test_s8_a_room_that_nobody_polls_ends_by_its_limit(pair: Pair, crew: Crew, side: str) -> None:
    with impatient(pair, crew, side, dict.fromkeys(LIMIT_OF.values(), SHORT_S)) as both:
        child = both.side(side)
        rooms = {state: waiting(both, side, state) for state in LIMIT_OF}
        for state, room in rooms.items():
            for _ in range(TRIES):  # a machine that stands still has a room end by the limit of the state before
                until(lambda room=room: "FAILED" in states(child, room.number), f"{LIMIT_OF[state]} ends a room in {state} on {side}")  # type: ignore[misc]
                (*_, since, ended), failure = changes(child, room.number), room.side(side).failure
                seen = states(child, room.number)
                room.clear()
                if seen[-2:] == [state, "FAILED"]:
                    break
                room = waiting(both, side, state)
            assert seen[-2:] == [state, "FAILED"], f"no room of {side} waits in {state}: {seen}"
            found = failure.code, failure.side, LIMIT_OF[state] in failure.text
            assert found == ("timeout", side, True), f"a room of {side} waited in {state}, and failed with {failure}"
            lasted = ended[0] - since[0]
            assert lasted > SHORT_S - CLOCK_S, f"{LIMIT_OF[state]} is {SHORT_S:g} s, and {side} waited {lasted:.3f} s in {state}"


@rule("S8")
@full
def test_s8_receive_restarts_input_s(pair: Pair, crew: Crew) -> None:
    with impatient(pair, crew, "decode", {"input_s": LONGER_S}) as both:
        for _ in range(TRIES):  # a machine that stands still has the room end before
            room = both.open()
            room.receiver.until("WAITING_FOR_INPUT", "FAILED")
            stays(lambda: True, "nobody calls receive", LONGER_S / 2)
            called = time.monotonic()
            room.receiver.receive({})
            in_time = room.receiver.poll() == "WAITING_FOR_INPUT"
            assert room.receiver.wait() == "FAILED", f"{SOON_S:g} s after receive input_s has not passed: it is {LONGER_S:g} s"
            lasted = changes(both.decode, room.number)[-1][0] - called
            room.clear()
            if in_time:
                assert lasted > LONGER_S - CLOCK_S, f"input_s is {LONGER_S:g} s, and the room failed {lasted:.3f} s after receive"
                return
        raise AssertionError(f"of {TRIES} rooms none was still there when receive was called, {LONGER_S / 2:g} s after the two had met")
