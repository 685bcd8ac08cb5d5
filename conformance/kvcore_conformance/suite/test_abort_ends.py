"""A7 and A8: every abort ends both sides, whatever it crosses and whoever is there; and a request that decode turns down."""

from __future__ import annotations

import time

import pytest

from kvcore_conformance.marks import full, rule
from kvcore_conformance.stage.aborting import BUSY, NOTICE, OTHER, brought, cases, heard, opened
from kvcore_conformance.stage.arena import ENDED, LIMITS, LIVE, SIDES, Pair, Room, number, paired
from kvcore_conformance.stage.crew import Crew
from kvcore_conformance.stage.driver import ChildError
from kvcore_conformance.stage.onlookers import together
from kvcore_conformance.stage.waits import SOON_S, stays, until

ENDS = ("SUCCESS", "FAILED")
HEARD_S = 0.6
"""In this time a notice that is not answered is sent again and again."""


# --- A7


@rule("A7")
def test_a7_before_the_peer_is_known(crew: Crew) -> None:
    with paired(crew, meet=False, limits={"orphan_s": 2 * SOON_S}) as pair:
        early, late = number(), number()
        sender = pair.prefill.sender(early)
        sender.abort("prefill knows nobody")
        receiver = pair.decode.receiver(late, pair.prefill)
        receiver.abort("decode knows nobody")
        heard(pair.prefill.sender(late), "decode", "decode knows nobody")
        heard(pair.decode.receiver(early, pair.prefill), "prefill", "prefill knows nobody")


@rule("A7")
@pytest.mark.parametrize(
    ("side", "moment", "way"),
    cases(
        (
            ("prefill", "opened", "crossing"), ("decode", "opened", "once"), ("prefill", "joined", "repeated"),
            ("decode", "published", "crossing"), ("prefill", "in flight", "crossing"), ("decode", "told late", "repeated"),
            ("prefill", "completing", "once"), ("decode", "completing", "crossing"), ("prefill", "failing", "crossing"),
            ("decode", "ticket failed", "repeated"),
        ),
        SIDES, (*LIVE, *BUSY, *ENDED), ("once", "repeated", "crossing"),
    ),
)  # fmt: skip
def test_a7_every_abort_ends_both_sides(patient: Pair, side: str, moment: str, way: str) -> None:
    room = brought(patient, moment)
    if way == "crossing":  # the notice is under way while the other side aborts too
        patient.side(side).tap("delay", NOTICE[side], True, seconds=0.05, times=1)
    if moment == "completing":
        patient.release(room)
    if moment == "failing":
        patient.prefill.open_gate(f"gate of {room.number}")
    for one in (side, OTHER[side]) if way == "crossing" else (side,):
        together(patient.side(one), *((room.side(one), "abort", f"{one} {thread}") for thread in range(4 if way == "repeated" else 1)))
    for handle in (room.sender, room.receiver):
        found = handle.wait()
        assert found in ENDS, f"{handle.child.role} is {found} after an abort on {side}, room {moment}"
        if moment not in ("completing", "succeeded", "cleared"):
            assert found == "FAILED", f"{handle.child.role} has succeeded after an abort on {side}, room {moment}"
    patient.side(side).heal()
    patient.over(room)


@rule("A7")
@pytest.mark.parametrize(("side", "then"), cases((("prefill", "is cleared"), ("decode", "stays")), SIDES, ("stays", "is cleared")))
def test_a7_before_the_other_side_has_opened(patient: Pair, side: str, then: str) -> None:
    room = number()
    first = opened(patient, side, room)
    first.abort("nobody will come")
    if then == "is cleared":
        first.clear()
    second = opened(patient, OTHER[side], room)
    heard(second, side, "nobody will come")
    first.clear()
    second.clear()


@rule("A7")
def test_a7_opening_again_ends_the_refusal(patient: Pair) -> None:
    room = number()
    sender = patient.prefill.sender(room)
    sender.abort("not yet")
    assert sender.unpaired, "no receiver was ever there, and the room did not end unpaired"
    sender.clear()
    again = patient.open(room)
    patient.expect(again)
    again.receive()
    again.send()
    again.ends("SUCCESS")
    again.clear()


@rule("A7")
def test_a7_a_room_that_nobody_opens_is_told_so(pair: Pair) -> None:
    began = time.monotonic()
    receiver = pair.decode.receiver(number(), pair.prefill)
    found, after = receiver.wait(), time.monotonic() - began
    assert found == "FAILED" and receiver.failure.code == "no_such_room", f"a receiver of a room that nobody opened is {found}"
    assert after >= LIMITS["orphan_s"], f"it was told so after {after:.3f} s, and the sender's side has {LIMITS['orphan_s']:g} s to open"
    receiver.clear()


@rule("A7")
@full
def test_a7_an_abort_that_does_not_name_the_sender_is_asked_back(patient: Pair) -> None:
    patient.decode.tap("drop", "Here", outgoing=False)
    patient.decode.tap("drop", "Which", outgoing=False)
    room = patient.open()
    room.receiver.abort("who are you")
    stays(lambda: room.sender.poll() == "BOOTSTRAPPING", "an abort that cannot name the sender fails nothing by itself", HEARD_S)
    patient.decode.heal()
    heard(room.sender, "decode", "who are you")
    patient.over(room)


@rule("A7")
@full
def test_a7_an_abort_that_does_not_name_the_sender_is_credited_to_the_older_lifetime(patient: Pair) -> None:
    """The room has ended unpaired on both sides; prefill opens it anew, and then hears of the old receiver's end."""
    for message in ("Here", "Which"):
        patient.decode.tap("drop", message, outgoing=False)
    patient.prefill.tap("drop", "Abort", outgoing=False)
    old = patient.open()
    old.receiver.abort("the old one")
    old.sender.abort("not yet")
    old.sender.clear()
    until(lambda: not patient.prefill.work("held").get("last_words"), "the old receiver has heard of the sender's end")
    again = patient.prefill.sender(old.number)
    patient.prefill.heal()
    patient.decode.heal()
    stays(lambda: again.poll() == "BOOTSTRAPPING", "the old receiver's abort is not for the new sender", HEARD_S)
    until(lambda: not patient.decode.work("held").get("drain_records"), "the old receiver is answered that nothing is under way")
    old.receiver.clear()
    new = Room(again, patient.decode.receiver(old.number, patient.prefill))
    patient.expect(new)
    new.receive()
    new.send()
    new.ends("SUCCESS")
    patient.intact()
    new.clear()


# --- A8


@rule("A8")
@pytest.mark.parametrize("when", ["after", pytest.param("before", marks=full)])
def test_a8_a_rejection_fails_the_room_at_prefill(patient: Pair, when: str) -> None:
    room = number()
    sender = patient.prefill.sender(room) if when == "after" else None
    patient.decode.call("manager", "reject", room, "no pages left today", patient.prefill.address)
    sender = sender or patient.prefill.sender(room)
    found = sender.wait()
    assert found == "FAILED", f"prefill's room is {found} after decode has rejected it"
    failure = sender.failure
    told = failure.code, failure.side, "no pages left today" in failure.text
    assert told == ("rejected", "decode", True), f"decode rejected with 'no pages left today', heard: {failure}"
    sender.clear()


@rule("A8")
def test_a8_a_room_with_a_live_receiver_is_not_rejected(pair: Pair) -> None:
    room = pair.at("published")
    with pytest.raises(ChildError) as refused:
        pair.decode.call("manager", "reject", room.number, "too late", pair.prefill.address)
    assert refused.value.kind == "RoomError" and str(room.number) in refused.value.text, f"it was refused by {refused.value}"
    pair.expect(room)
    room.send()
    room.ends("SUCCESS")
    room.clear()
