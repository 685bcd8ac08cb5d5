"""C2 and C4: a number that was cleared is used again at once, and nothing that comes late of the old use touches the new one."""

from __future__ import annotations

import pytest

from kvcore import Capabilities
from kvcore_conformance.marks import full, rule
from kvcore_conformance.stage.arena import LIMITS, LIVE, SIDES, Pair, Room, number, paired
from kvcore_conformance.stage.bare import bearable
from kvcore_conformance.stage.clearing import LONG, quickly, result
from kvcore_conformance.stage.crew import Crew
from kvcore_conformance.stage.driver import PoolSpec
from kvcore_conformance.stage.waits import stays, until

HERE, THERE = (1, 16, 17, 45), (13, 14, 28, 46)
"""Pages of the new use: something may still be at work on those of the old one."""
LARGE = (PoolSpec("kv", pages=16, page_bytes=512 * 1024, layers=1),)
HALVES = tuple(range(8)), tuple(range(8, 16))
TURNS = 4
JOINED_S = 0.15


def opened(pair: Pair, room: int, attempt: int, first: str = "prefill") -> Room:
    """A room with pages of its own, of which this side is opened first."""
    if first == "prefill":
        found = pair.open(room, attempt)
    else:
        receiver = pair.decode.receiver(room, pair.prefill, attempt)
        found = Room(pair.prefill.sender(room, attempt), receiver)
    found.mine, found.theirs = {"kv": HERE}, {"kv": THERE}
    return found


def completes(pair: Pair, room: Room, what: str, moment: str = "opened") -> None:
    """A room goes on from where it is, which nobody has disturbed, to its success, and every byte is right."""
    pair.expect(room)
    if moment in ("opened", "joined"):
        room.receive()
    if moment == "in flight":
        pair.release(room)
    else:
        room.send()
    found = room.receiver.wait(), room.sender.wait()
    assert found == ("SUCCESS", "SUCCESS"), f"{what}: receiver and sender of the new use ended as {found}: {room.reasons()}"
    pair.intact()
    room.clear()


def gone(old: Room) -> None:
    """Nothing is at work on the pages of the old use any more."""
    for handle in (old.receiver, old.sender):
        assert handle.safe(), f"nothing holds the old use up, and {handle.child.role} does not call its pages safe"


@rule("C2")
@pytest.mark.parametrize("side", SIDES)
def test_c2_an_old_handle_touches_no_newer_use(pair: Pair, side: str) -> None:
    old = pair.at("cleared")
    new = opened(pair, old.number, 0)
    old.side(side).clear()
    found = pair.side(side).status(new.number)
    assert found not in (None, "FAILED"), f"an old handle was cleared once more, and the new use of its number is {found}"
    completes(pair, new, "after an old handle was cleared once more")


@rule("C4")
@pytest.mark.parametrize("first", SIDES)
@pytest.mark.parametrize("moment", quickly("joined", "in flight", of=(*LIVE, "succeeded", "failed")))
def test_c4_another_attempt_at_once(pair: Pair, moment: str, first: str) -> None:
    old = pair.at(moment)
    old.side(first).clear()
    old.other(first).clear()
    new = opened(pair, old.number, 1, first)
    before = [state for state, _, _ in result(old)]
    pair.prefill.heal()
    gone(old)
    pair.accept(old)
    completes(pair, new, f"after a use that was {moment}")
    after = [state for state, _, _ in result(old)]
    assert after == before, f"the handles of the old use said {before}, and since the new one {after}"


@rule("C4")
@pytest.mark.parametrize("first", SIDES)
@pytest.mark.parametrize("moment", quickly("succeeded", of=("in flight", "succeeded", "failed")))
def test_c4_the_same_attempt_once_both_sides_have_ended(pair: Pair, moment: str, first: str) -> None:
    old = pair.at(moment)
    if moment == "in flight":
        old.side(first).abort("not wanted")
        old.ends("FAILED")
    assert not (old.sender.unpaired or old.receiver.unpaired), "the two have met, and a handle says that it ended unpaired"
    old.clear()
    new = opened(pair, old.number, 0, first)
    pair.prefill.heal()
    gone(old)
    pair.accept(old)
    completes(pair, new, f"the same attempt, after a use that was {moment}")


@rule("C4")
@pytest.mark.parametrize("side", SIDES)
def test_c4_the_same_attempt_after_one_side_ended_alone(pair: Pair, side: str) -> None:
    room = number()
    alone = pair.prefill.sender(room) if side == "prefill" else pair.decode.receiver(room, pair.prefill)
    alone.abort("nobody came")
    assert alone.unpaired, "the other side was never opened, and the handle says that it has met it"
    alone.clear()
    completes(pair, opened(pair, room, 0, side), f"after {side} had ended alone")


@full
@rule("C4")
def test_c4_the_same_attempt_after_both_ended_unpaired(crew: Crew) -> None:
    """The sender first, and within ``orphan_s``, which is long here."""
    with paired(crew, limits=LONG) as pair:
        room = number()
        alone = pair.decode.receiver(room, pair.prefill)
        alone.abort("nobody came")
        alone.clear()
        pair.prefill.sender(room, 1).clear()  # of another attempt: it changes nothing
        completes(pair, opened(pair, room, 0), "after both had ended unpaired")


@full
@rule("C4")
@pytest.mark.parametrize("first", SIDES)
def test_c4_the_same_attempt_long_after_both_ended_unpaired(pair: Pair, first: str) -> None:
    """Whichever side is the first, once 2 x ``orphan_s`` have passed."""
    room = number()
    for alone in (pair.prefill.sender(room), pair.decode.receiver(room, "127.0.0.1:1")):
        alone.abort("nobody came")
        assert alone.unpaired, "the other side was never met, and the handle says that it was"
        alone.clear()
    stays(lambda: True, "both have ended", 2 * LIMITS["orphan_s"] + 0.1)
    early = pair.decode.receiver(room, pair.prefill)
    refused = early.until("FAILED", timeout=JOINED_S) == "FAILED" and early.failure.code != "no_such_room"
    assert not refused, f"long after both had ended unpaired a receiver was refused with {early.failure}"
    early.clear()
    stays(lambda: True, "that receiver has ended", 2 * LIMITS["orphan_s"] + 0.1)
    completes(pair, opened(pair, room, 0, first), f"opened on {first} first, long after both had ended unpaired")


@rule("C4")
@pytest.mark.parametrize("hook", ["kvcore_transfer", pytest.param("kvcore_poll", marks=full)])
@pytest.mark.parametrize("attempt", [1, 0])
def test_c4_a_late_completion_touches_no_newer_use(pair: Pair, attempt: int, hook: str) -> None:
    """The write itself lands late, or the news of its end comes late: in the middle of the new use's transfer."""
    old = pair.at("published")
    pair.prefill.fault("hold", "late", room=old.number, hook=hook, times=1)
    old.send()
    until(lambda: pair.prefill.call("late", "held") == 1, "the old use's write is under way")
    old.sender.abort("not wanted")
    old.ends("FAILED")
    old.clear()
    new = opened(pair, old.number, attempt)
    pair.expect(new)
    new.receive()
    new.sender.send(HERE[:1])
    found = new.receiver.until("TRANSFERRING", "FAILED")
    assert found == "TRANSFERRING", f"while the old use's write is under way the new one is {found}: {new.reasons()}"
    pair.prefill.heal()
    gone(old)
    pair.accept(old)
    found = f"{new.sender.poll()}, {new.receiver.poll()}"
    assert found == "TRANSFERRING, TRANSFERRING", f"a late completion of the old use made the new one {found}: {new.reasons()}"
    new.sender.send(HERE[1:], last=True)
    new.ends("SUCCESS")
    pair.intact()
    new.clear()


@rule("C4")
@pytest.mark.parametrize("late", [pytest.param(False, id="cancelled", marks=full), pytest.param(True, id="late")])
def test_c4_the_end_of_a_large_write_touches_no_newer_use(crew: Crew, able: Capabilities, late: bool) -> None:
    """The engine itself is at work: on the old use when that is aborted; or on the new one when the news of the old one's end comes."""
    with paired(crew, bearable(LARGE, able), meet=False) as pair:
        pair.transfer({"kv": HALVES[0]}, {"kv": HALVES[1]})
        for turn in range(TURNS):
            old = pair.open()
            old.mine = old.theirs = {"kv": HALVES[turn % 2]}
            old.receive()
            if late:
                pair.prefill.fault("hold", "late", room=old.number, hook="kvcore_poll", times=1)
            old.send()
            if late:
                until(lambda: pair.prefill.call("late", "held") == 1, "the old use's write is under way")
            old.side(SIDES[turn % 2]).abort("not wanted")
            old.clear()
            new = pair.open(old.number, 1)
            new.mine = new.theirs = {"kv": HALVES[1 - turn % 2]}
            pair.expect(new)
            new.receive()
            new.send()
            if late:
                pair.prefill.call("late", "release")
            found = new.receiver.wait(), new.sender.wait()
            assert found == ("SUCCESS", "SUCCESS"), f"receiver and sender of the new use ended as {found}: {new.reasons()}"
            gone(old)
            pair.accept(old)
            pair.intact()
            new.clear()


ENDS = ("succeeded", "aborted by prefill", "aborted by decode")


@rule("C4")
@pytest.mark.parametrize("moment", quickly("joined", "in flight", of=LIVE))
@pytest.mark.parametrize("attempt", [0, pytest.param(1, marks=full)])
@pytest.mark.parametrize("end", quickly("succeeded", "aborted by decode", of=ENDS))
def test_c4_late_messages_touch_no_newer_use(pair: Pair, end: str, attempt: int, moment: str) -> None:
    """Every letter of the old use comes once more, on both sides, in the middle of the new one."""
    children = (pair.prefill, pair.decode)
    for child in children:
        child.work("aid", "echo:Echo", "tap")
    old = pair.at("succeeded" if end == "succeeded" else "published")
    if end != "succeeded":
        old.side(end.rpartition(" ")[2]).abort("not wanted")
        old.ends("FAILED")
    gone(old)
    pair.accept(old)
    old.clear()
    kept = {kind for child in children for kind in child.call("tap", "keep", old.number)}
    assert {"Join", "Here", "Destination"} <= kept, f"of the old use only these letters were seen: {sorted(kept)}"
    new = pair.at(moment, old.number, attempt)
    for child in children:
        child.call("tap", "again")
    completes(pair, new, f"after all letters came again of a use that was {end}", moment)
