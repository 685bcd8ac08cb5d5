"""R: pages of a room that has ended are not used again before nothing can read or write them any more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kvcore import Capabilities
from kvcore_conformance.fixtures import Standing
from kvcore_conformance.marks import full, rule
from kvcore_conformance.stage.arena import BRIEF, MINE, MOMENTS, POOLS, SIDES, Pair, Room, paired
from kvcore_conformance.stage.bare import bearable, in_one
from kvcore_conformance.stage.crew import Crew
from kvcore_conformance.stage.driver import Child, PoolSpec
from kvcore_conformance.stage.oracle import FILL
from kvcore_conformance.stage.safety import become_safe, safe_sides
from kvcore_conformance.stage.waits import SOON_S, stays, until

BIG = (PoolSpec("kv", pages=48, page_bytes=1 << 18, layers=1), PoolSpec("aux", pages=8, page_bytes=64, layers=1))
"""A room of all its pages is long enough in flight to be struck there."""
KV = POOLS[0]
ALL = {"kv": range(BIG[0].pages)}
OLD, CLEAN, NEW = 0x11, 0xC1, 0xEE
"""Every byte of a source; of a destination, and of a source, that is used anew."""
STRIKES, MOST_STRIKES = 2, 30
"""So many rooms must be struck before they end, and so many are tried at most."""
HELD_S = 0.15
BLOCKS_S = 2.5
"""No call that takes less can be told to wait for something, on a busy machine."""


@pytest.fixture(scope="module")
def big_standing(crew: Crew, able: Capabilities) -> Iterator[Standing]:
    """Keeps the pair of ``big``."""
    standing = Standing(crew, pools=bearable(BIG, able), meet=False)
    yield standing
    standing.drop()


@pytest.fixture
def big(big_standing: Standing, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A pair like ``pair``, with big pools. It has met over a small one, so that what is wrong with big writes shows in the test."""
    for pair in big_standing.lent(request):
        behind(pair)
        yield pair


# --- R1


@rule("R1")
@pytest.mark.parametrize("moment", MOMENTS)
def test_r1_pages_are_safe_when_nobody_can_touch_them(pair: Pair, moment: str) -> None:
    room = pair.at(moment)
    found = safe_sides(room)
    if moment == "failed":
        become_safe(room)
    else:
        expected = (moment != "in flight", moment not in ("published", "in flight"))
        assert found == expected, f"{moment}: the sender's and the receiver's pages are safe: {found}, not {expected}"
    assert room.sender.child.took_s < BLOCKS_S and room.receiver.child.took_s < BLOCKS_S, "is_release_safe has blocked"
    room.sender.abort("enough of it")
    pair.over(room)
    pair.accept(room)
    pair.intact()


@rule("R1")
def test_r1_a_live_sender_s_pages_are_not_safe_between_two_chunks(pair: Pair) -> None:
    room = pair.at("published")
    pair.expect(room)
    room.send(last=False)
    until(lambda: not pair.target.wrong("kv"), "the first chunk has arrived")
    until(lambda: pair.prefill.work("stats")["tickets"] == 0, "the first chunk's ticket has ended")
    assert safe_sides(room) == (False, False), "pages of a live room are called safe"
    room.sender.send([], last=True)
    room.ends("SUCCESS")
    become_safe(room)
    pair.intact()
    room.clear()


# --- R2 and R5: what is in flight


def hold_back(pair: Pair, side: str, how: str) -> Room:
    """A room that a side ends while its write is held back in the engine."""
    room = pair.at("in flight")
    if how == "abort":
        room.side(side).abort("enough of it")
    else:
        room.side(side).clear()
    assert (room.sender.wait(), room.receiver.wait()) == ("FAILED", "FAILED"), "one side has not heard of the other's end"
    if how == "clear":
        room.clear()
    return room


ENDS = pytest.mark.parametrize(
    ("side", "how"),
    [("decode", "abort"), ("prefill", "clear"), pytest.param("prefill", "abort", marks=full), pytest.param("decode", "clear", marks=full)],
)


@rule("R2")
@ENDS
def test_r2_a_destination_waits_for_the_write_in_flight(pair: Pair, side: str, how: str) -> None:
    room = hold_back(pair, side, how)
    stays(lambda: not room.receiver.safe_now(), "a write is in flight, and the receiver's pages are not safe", HELD_S)
    pair.release(room)
    become_safe(room, "decode")
    pair.accept(room)
    pair.intact()
    pair.over(room)


@rule("R5")
@ENDS
def test_r5_a_source_waits_for_the_write_in_flight(pair: Pair, side: str, how: str) -> None:
    room = hold_back(pair, side, how)
    stays(lambda: not room.sender.safe_now(), "a write is in flight, and the sender's pages are not safe", HELD_S)
    pair.release(room)
    become_safe(room, "prefill")
    pair.over(room)


@rule("R2")
@full
def test_r2_a_destination_waits_also_for_a_chunk_beside_one_that_failed(pair: Pair) -> None:
    room = pair.at("published")
    pair.prefill.fault("hold", "held", room=room.number, chunk=1)
    pair.prefill.fault("fail", room=room.number, chunk=2)
    room.sender.send({"kv": list(MINE[:2])})
    room.sender.send({"kv": list(MINE[2:])}, last=True)
    room.ends("FAILED")
    stays(lambda: not room.receiver.safe_now(), "the first chunk is in flight, and the receiver's pages are not safe")
    pair.prefill.call("held", "release")
    become_safe(room)
    pair.over(room)


def strike(pair: Pair, side: str, anew: str, value: int) -> Room:
    """A big room that a side aborts when its first bytes arrive, if it has not ended by then. The pages of the side ``anew`` are filled
    with a value the instant they are safe."""
    target = pair.target.pages("kv")
    pair.source.pages("kv")[:], target[:] = OLD, FILL
    room = pair.open()
    room.mine = room.theirs = ALL
    room.receive()
    assert room.sender.until("WAITING_FOR_INPUT") == "WAITING_FOR_INPUT"
    gate = f"gate {room.number}"
    room.send(gate=gate)
    handle = room.side(anew)
    handle.child.work("reuse", handle.name, "kv", value, 0)
    pair.prefill.open_gate(gate)
    until(lambda: bool((target[0, :, 0] != FILL).any()), "the first bytes have arrived", step_s=0.0005)
    room.side(side).abort("enough of it")
    until(lambda: handle.child.work("reused", handle.name) is not None, f"the {anew} side's pages are used anew")
    return room


def behind(pair: Pair) -> None:
    """Another room has come and gone, behind whatever was to be written before."""
    other = pair.open()
    other.mine, other.theirs = {"aux": [1]}, {"aux": [2]}
    other.receive()
    other.send()
    other.ends("SUCCESS")
    other.clear()


def struck(pair: Pair, side: str, anew: str, value: int) -> Iterator[Room]:
    """Rooms of ``strike`` that a side ended in the middle, so many as must be; others have succeeded before, as R6 has it."""
    found = 0
    for _ in range(MOST_STRIKES):
        room = strike(pair, side, anew, value)
        behind(pair)
        if room.side(anew).poll() == "FAILED":
            found += 1
            yield room
        room.clear()
        if found == STRIKES:
            return
    raise AssertionError(f"of {MOST_STRIKES} rooms that {side} aborted when the first bytes had arrived {found} had not ended by then")


STRUCK = pytest.mark.parametrize("side", ["decode", pytest.param("prefill", marks=full)])


@rule("R2")
@STRUCK
def test_r2_nothing_is_written_after_the_receiver_s_pages_are_safe(big: Pair, side: str) -> None:
    for _ in struck(big, side, "decode", CLEAN):
        stays(lambda: bool((big.target.pages("kv") == CLEAN).all()), "the pages hold what their next owner has put there", 0.05)


@rule("R5")
@STRUCK
def test_r5_nothing_is_read_after_the_sender_s_pages_are_safe(big: Pair, side: str) -> None:
    for _ in struck(big, side, "prefill", NEW):
        late = int(np.count_nonzero(big.target.pages("kv") == NEW))
        assert late == 0, f"{late} bytes arrived that the source's next owner has put there"


# --- R3: quarantine


def fails(pair: Pair, fault: str, **where: object) -> Room:
    """A room whose write fails so that more of it may come."""
    room = pair.at("published")
    pair.prefill.fault(fault, fault, room=room.number, **where)
    room.send()
    room.ends("FAILED")
    return room


@rule("R3")
def test_r3_pages_of_a_write_that_may_go_on_are_quarantined_and_counted(crew: Crew, able: Capabilities) -> None:
    with paired(crew) as pair:
        rooms = [fails(pair, "fail", quiescent=False), fails(pair, "partial")]
        counts = pair.prefill.call("plan", "counts")
        counted = pair.prefill.work("stats")["quarantined_pages"]
        assert counted == 2 * len(MINE), f"{counted} pages of prefill are counted as quarantined, not {2 * len(MINE)}"
        for room in rooms:
            assert room.sender.failure.code == "backend"
            room.sender.clear()
        stays(lambda: not any(any(safe_sides(room)) for room in rooms), "nothing proves that the writes are over, and no page is safe")
        after = pair.prefill.call("plan", "counts")
        once = {"fail": 1, "partial": 1} if in_one(able, len(MINE) * KV.layers, len(MINE) * KV.layers * KV.page_bytes) else counts
        assert after == once, f"a write that may go on was submitted again: {after}"
        for room in rooms:
            pair.accept(room)
        pair.intact()
        pair.prefill.call("manager", "close", waits_s=SOON_S)
        for room in rooms:
            become_safe(room, "prefill")


@rule("R3")
@full
def test_r3_a_release_by_limit_is_said_counted_and_logged(crew: Crew) -> None:
    with paired(crew, limits=BRIEF) as pair:
        rooms = [fails(pair, "fail", quiescent=False), fails(pair, "partial"), fails(pair, "drop_done")]
        for room in rooms:
            for side in SIDES:
                assert room.side(side).safe(BRIEF["quarantine_s"] + SOON_S), f"quarantine_s does not end the wait of {side}'s pages"
                assert room.side(side).unproven, f"{side}'s pages were released by limit, and the handle does not say so"
        for child in (pair.prefill, pair.decode):
            said(child, rooms)


def said(child: Child, rooms: Sequence[Room]) -> None:
    """A release by limit is counted, logged as an error with the number of pages, and an event."""
    found = child.work("stats")
    assert found["released_unproven"] == len(rooms) * len(MINE), f"{child.role} counts {found['released_unproven']} pages"
    assert found["quarantined_pages"] == 0
    for room in rooms:
        lines = [line for line in child.logged("without proof") if f"room {room.number}" in line]
        assert lines and all(line.startswith("ERROR") and f"{len(MINE)} pages" in line for line in lines), f"{child.role} logged {lines}"
    events = [line for line in child.events(500) if " released_unproven " in line]
    assert len(events) == len(rooms), f"{child.role} has these events: {events}"


@rule("R3")
@full
def test_r3_without_quarantine_s_only_proof_ends_the_wait(crew: Crew) -> None:
    with paired(crew, limits={"quarantine_s": None}) as pair:
        rooms = [fails(pair, "fail", quiescent=False), fails(pair, "partial")]
        stays(lambda: not any(any(safe_sides(room)) for room in rooms), "no limit ends the wait, and no page is safe", 1.0)
        for child in (pair.prefill, pair.decode):
            assert child.work("stats")["quarantined_pages"] > 0, f"pages are in quarantine, and {child.role} counts none"
        pair.prefill.call("manager", "close", waits_s=SOON_S)
        for room in rooms:
            become_safe(room, "prefill")


@rule("R3")
@full
def test_r3_an_end_reported_after_all_is_proof(crew: Crew) -> None:
    with paired(crew) as pair:
        room = fails(pair, "drop_done")
        assert room.sender.failure.code == "timeout" and "ticket_s" in room.sender.failure.text
        stays(lambda: safe_sides(room) == (False, False), "the ticket's end is not known, and no page is safe")
        pair.prefill.heal()
        become_safe(room)
        pair.accept(room)
        pair.intact()
        room.clear()
        pair.empties()


# --- R6


@rule("R6")
@pytest.mark.parametrize("times", [2, pytest.param(20, marks=full)])
def test_r6_all_bytes_are_there_when_the_receiver_sees_success(big: Pair, times: int) -> None:
    for _ in range(times):
        big.fresh()
        room = big.open()
        room.mine = room.theirs = ALL
        big.expect(room)
        room.receive()
        big.decode.work("sight", room.receiver.name, "kv", list(ALL["kv"]), FILL, "sight")
        room.send()
        room.ends("SUCCESS")
        until(lambda: big.decode.call("sight", "blanks") is not None, "the memory was looked at")
        blanks = big.decode.call("sight", "blanks")
        assert blanks == 0, f"of the bytes looked at when the receiver saw SUCCESS {blanks} had not arrived"
        big.intact()
        room.clear()
