"""C: clear removes a room at once and for good, whoever calls it however often, and its handle keeps its result."""

from __future__ import annotations

import itertools

import pytest

from kvcore import KVPoll
from kvcore_conformance.marks import full, rule
from kvcore_conformance.stage.arena import LIVE, MOMENTS, SIDES, Pair, number, paired
from kvcore_conformance.stage.clearing import LONG, quickly, result
from kvcore_conformance.stage.crew import Crew
from kvcore_conformance.stage.driver import ChildError
from kvcore_conformance.stage.waits import until

MOST = 2**63 - 1, 2**31 - 1


@rule("C1")
@pytest.mark.parametrize("moment", quickly("joined", "in flight", "succeeded", of=MOMENTS[:-1]))
def test_c1_a_cleared_room_is_gone_at_once(pair: Pair, moment: str) -> None:
    room = pair.at(moment)
    for side in SIDES:
        room.side(side).clear()
        found = pair.side(side).status(room.number)
        assert found is None, f"{side} has cleared a room that was {moment}, and the store still says {found}"
    pair.over(room)


@rule("C1")
def test_c1_the_backend_drops_a_room_after_its_last_ticket(pair: Pair) -> None:
    pair.prefill.work("aid", "echo:Clears", "clears")
    room = pair.at("in flight")
    room.clear()
    assert room.receiver.safe(0.1) is False, "the write is still under way, and the destination is called safe"
    kept = pair.prefill.work("held")
    assert kept.get("tickets") and kept.get("ledger_tickets"), f"a ticket of a cleared room is in flight, and stats lists only {kept}"
    assert room.number not in pair.prefill.call("clears", "rooms"), "the backend was told to drop a room whose ticket had not ended"
    pair.release(room)
    until(lambda: room.number in pair.prefill.call("clears", "rooms"), "the backend is told to drop a room whose last ticket has ended")
    pair.over(room)


@full
@rule("C1")
@pytest.mark.parametrize("kept", ["last_words", "marks"])
def test_c1_what_is_kept_removes_itself(crew: Crew, kept: str) -> None:
    with paired(crew) as pair:
        if kept == "last_words":
            pair.prefill.tap("drop", "Ack", outgoing=False)
            pair.at("succeeded").clear()
        else:
            pair.prefill.sender(number()).clear()
        assert pair.prefill.work("held").get(kept), f"stats lists no {kept}: {pair.prefill.work('held')}"
        pair.empties()


@rule("C2")
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("moment", quickly("opened", "in flight", "succeeded", of=MOMENTS))
def test_c2_any_number_of_clears(pair: Pair, moment: str, side: str) -> None:
    room = pair.at(moment)
    for handle in (room.side(side), room.side(side), room.other(side), room.side(side), room.other(side)):
        handle.clear()
    pair.over(room)


@rule("C2")
@pytest.mark.parametrize("side", ["prefill", pytest.param("decode", marks=full)])
def test_c2_clear_after_close(crew: Crew, side: str) -> None:
    with paired(crew, meet=False) as pair:
        rooms = [pair.at("joined"), pair.at("succeeded")]
        pair.side(side).call("manager", "close", waits_s=10.0)
        for room, _ in itertools.product(rooms, range(2)):
            room.clear()
        found = [pair.side(side).status(room.number) for room in rooms]
        assert found == [None, None], f"cleared after close, and still stored as {found}"


@rule("C3")
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("moment", quickly("joined", "in flight", of=LIVE))
def test_c3_the_peer_is_told_when_a_live_room_is_cleared(pair: Pair, moment: str, side: str) -> None:
    room = pair.at(moment)
    room.side(side).clear()
    for handle in (room.side(side), room.other(side)):
        found = handle.wait()
        assert found == "FAILED", f"{side} has cleared a room that was {moment}, and on {handle.child.role} it is {found}"
        why = handle.failure
        assert (why.code, why.side) == ("aborted", side), f"{side} has cleared the room, and {handle.child.role} says {why}"
    pair.over(room)


@rule("C5")
@pytest.mark.parametrize("moment", ["failed", "succeeded"])
def test_c5_a_handle_keeps_its_result(pair: Pair, moment: str) -> None:
    room = pair.at(moment)
    assert room.sender.safe() and room.receiver.safe(), f"the room has {moment}, and its pages are not safe"
    before = result(room)
    room.clear()
    assert result(room) == before, f"before clear the handles said {before}, and after it {result(room)}"
    again = pair.open(room.number)
    again.sender.abort("another end")
    assert result(room) == before, f"the handles said {before}, and since the number is used again {result(room)}"
    again.clear()


@rule("C5")
def test_c5_a_cleared_handle_still_tells_when_its_pages_are_safe(pair: Pair) -> None:
    room = pair.at("in flight")
    room.clear()
    assert not room.sender.safe_now(), "a write is under way, the room was cleared, and its source is called safe"
    pair.release(room)
    assert room.sender.safe() and room.receiver.safe(), "the write has ended, and the cleared handles do not call their pages safe"


@rule("C6")
@pytest.mark.parametrize("side", SIDES)
def test_c6_odd_numbers_are_refused(pair: Pair, side: str) -> None:
    odd: list[tuple[object, object, str]] = [(room, 0, "2**63-1") for room in (None, True, 1.0, -1, 2**63, "1")]
    odd += [(number(), attempt, "2**31-1") for attempt in (None, False, 1.0, -1, 2**31)]
    child, more = pair.side(side), [] if side == "prefill" else [pair.prefill.address]
    before = child.work("stats")["stores"]["rooms"]
    for room, attempt, names in odd:
        with pytest.raises(ChildError) as refused:
            child.call("manager", "sender" if side == "prefill" else "receiver", room, *more, attempt=attempt)
        error = refused.value
        assert error.kind == "RoomError" and names in error.text, f"room {room!r}, attempt {attempt!r} was refused with {error}"
    assert child.work("stats")["stores"]["rooms"] == before, "a room was refused and is stored all the same"


@rule("C6")
@pytest.mark.parametrize(("room", "attempt"), [(0, 0), MOST])
def test_c6_the_ends_of_the_range_are_rooms(pair: Pair, room: int, attempt: int) -> None:
    opened = pair.open(room, attempt)
    pair.expect(opened)
    opened.receive()
    opened.send()
    opened.ends("SUCCESS")
    pair.intact()
    opened.clear()


@rule("C6")
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("moment", quickly("published", of=LIVE))
def test_c6_a_live_room_goes_on_undisturbed(pair: Pair, moment: str, side: str) -> None:
    room = pair.at(moment)
    before = room.side(side).poll()
    with pytest.raises(ChildError) as refused:
        pair.prefill.sender(room.number) if side == "prefill" else pair.decode.receiver(room.number, pair.prefill)
    error = refused.value
    assert error.kind == "RoomError" and str(room.number) in error.text, f"a room that is live was refused with {error}"
    after = room.side(side).poll()
    undisturbed = KVPoll[before] <= KVPoll[after] < KVPoll.SUCCESS  # it may be on its way
    assert undisturbed, f"opening it again was refused, and made the live room {after} of {before}"
    room.clear()
    pair.over(room)


@rule("C6")
def test_c6_two_attempts_live_at_once(pair: Pair) -> None:
    one = pair.at("published")
    two = pair.open(one.number, 1)
    two.mine, two.theirs = {"kv": (1, 16)}, {"kv": (13, 46)}
    for room in (two, one):
        pair.expect(room)
    two.receive()
    for room in (two, one):
        room.send()
        room.ends("SUCCESS")
        room.clear()
    pair.intact()


@rule("C6")
@pytest.mark.parametrize("moment", ["succeeded", pytest.param("failed", marks=full)])
def test_c6_a_room_that_has_ended_is_replaced(pair: Pair, moment: str) -> None:
    old = pair.at(moment)
    assert old.sender.safe() and old.receiver.safe(), f"the room has {moment}, and its pages are not safe"
    pair.accept(old)
    new = pair.open(old.number)
    pair.expect(new)
    new.receive()
    new.send()
    new.ends("SUCCESS")
    pair.intact()
    new.clear()


@rule("C7")
def test_c7_rooms_that_have_met_leave_nothing_once_cleared(crew: Crew) -> None:
    """At once, which is long before the limits: ``orphan_s`` is half a minute here."""
    with paired(crew, limits=LONG) as pair:
        rooms = [pair.at(moment) for moment in MOMENTS if moment not in ("opened", "joined")]
        for count, room in enumerate(rooms):
            for handle in (room.sender, room.receiver)[:: (1, -1)[count % 2]]:
                handle.clear()
        pair.prefill.heal()
        pair.empties()
        found = [child.work("stats")["peers"] for child in (pair.prefill, pair.decode)]
        assert found == [1, 1], f"each side has one peer, and keeps something for {found}"


@rule("C7")
@full
def test_c7_rooms_that_never_met_leave_nothing_after_the_limits(crew: Crew) -> None:
    with paired(crew, meet=False) as pair:
        pair.transfer()
        for side, how in itertools.product(SIDES, ("clear", "abort")):
            handle = pair.prefill.sender(number()) if side == "prefill" else pair.decode.receiver(number(), pair.prefill)
            if how == "abort":
                handle.abort("nobody came")
            handle.clear()
        pair.empties()


@rule("C8")
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("moment", quickly("published", of=(*LIVE, "succeeded")))
def test_c8_a_handle_that_is_dropped(pair: Pair, moment: str, side: str) -> None:
    child, room = pair.side(side), pair.at(moment)
    before = child.work("stats")["counters"]["kvcore_handles_collected_total"]
    child.work("drop", room.side(side).name)
    until(lambda: child.status(room.number) is None, f"{side} has dropped the handle of a room that was {moment}, and it is cleared")
    counted = child.work("stats")["counters"]["kvcore_handles_collected_total"] - before
    assert counted == 1, f"one handle was dropped, and {counted} were counted"
    assert child.logged(f"room {room.number}"), "the log does not name the room whose handle was dropped"
    found = room.other(side).wait()
    expected = "SUCCESS" if moment == "succeeded" else "FAILED"
    assert found == expected, f"{side} has dropped the handle of a room that was {moment}, and the other side is {found}"
    pair.prefill.heal()
    room.other(side).safe()
    room.other(side).clear()
