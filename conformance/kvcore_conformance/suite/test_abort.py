"""A1 to A6: an abort is made at once, is heard by the other side, and starts nothing new."""

from __future__ import annotations

import pytest

from kvcore_conformance.marks import full, rule
from kvcore_conformance.stage.aborting import NOTICE, OTHER, brought, cases, heard
from kvcore_conformance.stage.arena import ENDED, LIMITS, LIVE, MOMENTS, SIDES, Pair
from kvcore_conformance.stage.onlookers import AT_ONCE_S, together
from kvcore_conformance.stage.waits import stays, until

# --- A1


@rule("A1")
@pytest.mark.parametrize(
    ("side", "moment"),
    cases((("prefill", "opened"), ("decode", "published"), ("prefill", "in flight"), ("decode", "cleared")), SIDES, MOMENTS),
)
def test_a1_abort_is_for_any_time_and_any_thread(pair: Pair, side: str, moment: str) -> None:
    room = pair.at(moment)
    reasons = ["no more", "", "x" * 100_000, "line\nline \x00 \ud800"]
    took = together(pair.side(side), *((room.side(side), "abort", reason) for reason in reasons))
    assert took < AT_ONCE_S, f"abort on {side}, room {moment}, took {took:.1f} s"
    room.side(side).abort("once more")
    pair.over(room)


@rule("A1")
@pytest.mark.parametrize("side", [SIDES[0], pytest.param(SIDES[1], marks=full)])
def test_a1_abort_does_not_wait_for_the_engine(pair: Pair, side: str) -> None:
    room = pair.at("published")
    pair.prefill.work("stall", room.number)
    room.send()
    until(lambda: pair.prefill.call("stall", "stuck"), "the engine is at work")
    room.side(side).abort("no more")
    assert pair.side(side).took_s < AT_ONCE_S, f"abort on {side} took {pair.side(side).took_s:.1f} s while the engine was stuck"
    pair.over(room)


@rule("A1")
@pytest.mark.parametrize("side", [pytest.param(SIDES[0], marks=full), SIDES[1]])
def test_a1_abort_does_not_wait_for_the_peer(pair: Pair, side: str) -> None:
    room = pair.at("in flight")
    other = pair.side(OTHER[side])
    other.freeze()
    try:
        room.side(side).abort("no more")
        assert pair.side(side).took_s < AT_ONCE_S, f"abort on {side} took {pair.side(side).took_s:.1f} s while the peer stood still"
    finally:
        other.thaw()
    pair.over(room)


# --- A2, A3


@rule("A2")
@pytest.mark.parametrize(
    ("side", "moment"),
    cases((("prefill", "opened"), ("decode", "joined"), ("prefill", "in flight"), ("decode", "in flight")), SIDES, LIVE),
)
def test_a2_when_abort_returns_the_room_is_failed_here(pair: Pair, side: str, moment: str) -> None:
    room = pair.at(moment)
    found = pair.side(side).work("aborted", room.side(side).name, "no more")
    assert found == ["FAILED", "FAILED"], f"as abort returned on {side}, room {moment}, handle and store said {found}"
    pair.over(room)


@rule("A3")
@pytest.mark.parametrize(("side", "moment"), cases((("prefill", "succeeded"), ("decode", "succeeded"), ("decode", "failed")), SIDES, ENDED))
def test_a3_abort_of_an_ended_room_changes_nothing(pair: Pair, side: str, moment: str) -> None:
    room = pair.at(moment)
    before = [room.sender.poll(), room.receiver.poll(), *room.reasons()]
    found = pair.side(side).work("aborted", room.side(side).name, "too late")
    stored = "gone" if moment == "cleared" else before[0]
    assert found == [before[0], stored], f"as abort returned on {side}, room {moment}, handle and store said {found}"
    pair.transfer()  # behind whatever the abort has sent
    after = [room.sender.poll(), room.receiver.poll(), *room.reasons()]
    assert after == before, f"states and reasons were {before}, and are {after} after an abort on {side}"
    pair.over(room)


# --- A4


@rule("A4")
@pytest.mark.parametrize(
    ("side", "moment", "then"),
    cases(
        (
            ("prefill", "opened", "stays"), ("decode", "joined", "stays"), ("prefill", "published", "is cleared"),
            ("decode", "in flight", "is cleared"), ("prefill", "in flight", "stays"),
        ),
        SIDES, LIVE, ("stays", "is cleared"),
    ),
)  # fmt: skip
def test_a4_the_other_side_learns_of_it(patient: Pair, side: str, moment: str, then: str) -> None:
    room = patient.at(moment)
    room.side(side).abort(f"{side} had enough")
    if then == "is cleared":
        room.side(side).clear()
    heard(room.other(side), side, f"{side} had enough")
    patient.over(room)


@rule("A4")
@pytest.mark.parametrize("side", SIDES)
def test_a4_a_lost_notice_is_sent_again(pair: Pair, side: str) -> None:
    room = pair.at("published")
    pair.side(side).tap("drop", NOTICE[side], True, times=1)
    room.side(side).abort("say it again")
    room.side(side).clear()
    heard(room.other(side), side, "say it again")
    pair.side(side).heal()
    pair.over(room)


@rule("A4")
def test_a4_a_peer_that_has_ended_is_left_alone(pair: Pair) -> None:
    room = pair.at("published")
    pair.prefill.tap("drop", "Status", True)  # so that decode does not hear of the success
    room.send()
    assert room.sender.wait() == "SUCCESS"
    room.receiver.abort("too late")
    room.receiver.safe()  # prefill has answered
    assert room.sender.poll() == "SUCCESS", f"an abort has made a success of prefill {room.sender.poll()}: {room.reasons()}"
    pair.over(room)


@rule("A4")
@full
def test_a4_a_notice_about_a_published_destination_outlives_orphan_s_and_stops_once_answered(pair: Pair) -> None:
    pair.decode.work("aid", "impostor:Impostor", "tap")
    room = pair.at("published")
    pair.prefill.tap("drop", "Abort", outgoing=False)
    room.receiver.abort("say it for long")
    room.receiver.clear()
    stays(lambda: not room.receiver.safe_now(), "the sender has not heard of the abort, and the pages are not safe", 3 * LIMITS["orphan_s"])
    assert room.sender.poll() == "WAITING_FOR_INPUT", f"no notice has arrived, and the sender is {room.sender.poll()}"
    pair.prefill.heal()
    heard(room.sender, "decode", "say it for long")
    assert room.receiver.safe(), "the sender has heard of the abort, and the pages are not safe"
    said = pair.decode.call("tap", "said", "Abort", room.number)
    stays(lambda: pair.decode.call("tap", "said", "Abort", room.number) == said, "it is said no more", 2 * LIMITS["orphan_s"])
    pair.over(room)


@rule("A4")
@full
def test_a4_a_notice_that_nobody_answers_ends_with_orphan_s(pair: Pair) -> None:
    pair.decode.work("aid", "impostor:Impostor", "tap")
    room = pair.at("joined")
    pair.prefill.tap("drop", "Abort", outgoing=False)
    room.receiver.abort("nobody hears it")
    room.receiver.clear()
    until(lambda: not pair.decode.work("held").get("drain_records"), "a notice that nobody answers is kept no more")
    said = pair.decode.call("tap", "said", "Abort", room.number)
    assert said > 1, f"a notice that nobody answered was sent {said} times"
    stays(lambda: pair.decode.call("tap", "said", "Abort", room.number) == said, "it is said no more", 2 * LIMITS["orphan_s"])
    pair.over(room)


# --- A5


@rule("A5")
@pytest.mark.parametrize("side", [SIDES[0], pytest.param(SIDES[1], marks=full)])
def test_a5_a_chunk_that_waits_is_not_started(pair: Pair, side: str) -> None:
    room = pair.open()
    room.theirs = {"kv": (10, 11, 12, 13)}
    room.receive()
    pair.prefill.hold(room.number)
    gate = f"gate of {room.number}"
    room.sender.send([1, 2])
    room.sender.send([3, 4], last=True, gate=gate)
    until(lambda: pair.prefill.held_writes(room.number) == 1, "the first chunk is under way")
    room.side(side).abort("no more")
    assert room.sender.wait() == "FAILED"
    pair.prefill.open_gate(gate)
    pair.release(room)
    pair.over(room)
    pair.target.accept("kv", [10, 11])
    pair.transfer()  # by then the second chunk would have been written


@rule("A5")
def test_a5_what_is_to_be_tried_again_is_tried_no_more(pair: Pair) -> None:
    def tries() -> int:
        return int(pair.prefill.call("plan", "counts").get("retry", 0))

    room = pair.at("published")
    pair.prefill.fault("retry", room=room.number)
    before = tries()
    room.send()
    until(lambda: tries() > before + 2, "a transfer is tried again and again")
    room.sender.abort("no more")
    assert room.sender.safe(), "a transfer of which nothing is in flight keeps its pages after an abort"
    after = tries()
    pair.transfer()
    assert tries() == after, f"after an abort a transfer was tried {tries() - after} times more"
    pair.over(room)


@rule("A5")
@pytest.mark.parametrize(
    ("side", "moment"),
    cases((("prefill", "in flight"), ("decode", "in flight"), ("prefill", "told late")), SIDES, ("in flight", "told late")),
)
def test_a5_what_is_in_flight_is_waited_for_and_ends(pair: Pair, side: str, moment: str) -> None:
    room = brought(pair, moment)
    room.side(side).abort("no more")
    room.ends("FAILED")
    safe = [handle.child.role for handle in (room.sender, room.receiver) if handle.safe_now()]
    assert not safe, f"pages count as safe on {safe} while a ticket is in flight"
    pair.release(room)
    for handle in (room.sender, room.receiver):
        assert handle.safe(), f"{handle.child.role}: a ticket that was in flight has not ended after an abort"
    pair.over(room)


@rule("A5")
@pytest.mark.parametrize("rooms", [4, pytest.param(40, marks=full)])
def test_a5_an_abort_crosses_the_engine_at_work(pair: Pair, rooms: int) -> None:
    for count in range(rooms):
        room = pair.at("published")
        room.send()
        room.side(SIDES[count % 2]).abort("no more")
        for handle in (room.sender, room.receiver):
            assert handle.safe(), f"{handle.child.role}: a ticket that was in flight has not ended after an abort: {handle.poll()}"
        pair.fresh()  # what is written from now on is late
        room.clear()
    pair.transfer(mine={"kv": (1,)}, theirs={"kv": (1,)})


@rule("A5")
def test_a5_the_tickets_of_other_rooms_go_on(pair: Pair) -> None:
    bad, good = pair.at("in flight"), pair.at("in flight")
    bad.sender.abort("no more")
    bad.ends("FAILED")
    pair.release(good)
    good.ends("SUCCESS")
    for room in (bad, good):
        pair.over(room)


# --- A6


@rule("A6")
@pytest.mark.parametrize(("side", "moment"), cases((("prefill", "joined"), ("decode", "in flight")), SIDES, LIVE))
def test_a6_an_aborted_room_stays_until_clear(patient: Pair, side: str, moment: str) -> None:
    room = patient.at(moment)
    room.side(side).abort("no more")
    room.ends("FAILED")
    patient.prefill.heal()
    for handle in (room.sender, room.receiver):
        handle.safe()
        found, told = handle.child.status(room.number), handle.child.call("manager", "explain", room.number)
        assert found == "FAILED", f"{handle.child.role} stores {found} of a room that {side} has aborted"
        assert "no more" in told, f"{handle.child.role} tells nothing of the abort: {told}"
    patient.over(room)
    left = [child.status(room.number) for child in (patient.prefill, patient.decode)]
    assert left == [None, None], f"prefill and decode store {left} after clear"
