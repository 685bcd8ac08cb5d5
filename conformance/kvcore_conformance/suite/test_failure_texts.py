"""S5 and S6: a failure has a reason from its first instant on, the first one stays, and both sides tell the same."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore_conformance.marks import full, rule
from kvcore_conformance.stage.arena import SIDES, Pair, Room, paired
from kvcore_conformance.stage.crew import Crew
from kvcore_conformance.stage.driver import Failure, Handle
from kvcore_conformance.stage.impatient import impatient
from kvcore_conformance.stage.onlookers import together, watched

WORDS = "cable 7 is cut"
QUIET: dict[str, tuple[str, dict[str, Any], str]] = {
    "fails": ("fail", {"reason": WORDS}, WORDS),
    "fails at once": ("fail", {"reason": WORDS, "hook": "kvcore_transfer"}, WORDS),
}
"""How an engine fails: the fault, and what is told of it."""
NOT_QUIET: dict[str, tuple[str, dict[str, Any], str]] = {
    "fails and may go on": ("fail", {"reason": WORDS, "quiescent": False}, WORDS),
    "raises": ("raise_", {"error": "ZeroDivisionError"}, "ZeroDivisionError"),
    "stops half-way": ("partial", {}, "injected error after a partial post"),
}
"""The same, and its pages are then in quarantine."""


def told(room: Room) -> Failure:
    """The failure of a room that has failed, in the same words on both sides."""
    room.ends("FAILED")
    here, there = room.sender.failure, room.receiver.failure
    assert here == there, f"prefill tells {here}, and decode {there}"
    return here


def reasons(handle: Handle, times: int) -> set[str]:
    """What a handle says of its failure, asked so often."""
    return {str(handle.failure) for _ in range(times)}


@rule("S5")
@pytest.mark.parametrize("side", SIDES)
def test_s5_both_sides_tell_of_an_abort_in_the_same_words(pair: Pair, side: str) -> None:
    room = pair.at("in flight")
    room.side(side).abort("the user went away, zu früh")
    failure = told(room)
    assert failure == Failure("the user went away, zu früh", "aborted", side, 0), f"{side} aborted, and both sides tell {failure}"
    pair.over(room)


def fails_in_its_words(pair: Pair, how: str, kind: str, where: dict[str, Any], words: str) -> Room:
    """A room whose transfer fails so, which both sides tell in the engine's words."""
    room = pair.at("published")
    pair.prefill.fault(kind, room=room.number, **where)
    room.send()
    failure = told(room)
    origin = failure.code, failure.side, failure.rank
    assert origin == ("backend", "prefill", 0), f"an engine on prefill {how}, and both sides name {origin} as the origin: {failure.text}"
    assert words in failure.text, f"an engine {how} with {words!r}, and both sides tell: {failure.text}"
    return room


@rule("S5")
@pytest.mark.parametrize("how", QUIET)
def test_s5_both_sides_tell_of_an_engine_in_its_words(pair: Pair, how: str) -> None:
    pair.over(fails_in_its_words(pair, how, *QUIET[how]))


@rule("S5")
@full
@pytest.mark.parametrize("how", NOT_QUIET)
def test_s5_both_sides_tell_of_an_engine_that_leaves_pages_in_doubt(crew: Crew, how: str) -> None:
    with paired(crew) as pair:
        fails_in_its_words(pair, how, *NOT_QUIET[how])


@rule("S5")
@full
@pytest.mark.parametrize(
    ("side", "limit", "moment"),
    [
        ("prefill", "bootstrap_s", "joined"), ("prefill", "input_s", "published"), ("prefill", "transfer_s", "in flight"),
        ("prefill", "ticket_s", "in flight"), ("decode", "input_s", "joined"), ("decode", "transfer_s", "in flight"),
    ],
)  # fmt: skip
def test_s5_a_limit_is_named_on_both_sides(pair: Pair, crew: Crew, side: str, limit: str, moment: str) -> None:
    with impatient(pair, crew, side, {limit: 0.5}) as both:
        room = both.at(moment)
        failure = told(room)
        found = failure.code, failure.side, limit in failure.text
        assert found == ("timeout", side, True), f"{limit} of {side} has passed, and both sides tell {failure}"
        both.over(room)


@rule("S5")
@pytest.mark.parametrize("first", ["engine", pytest.param("prefill", marks=full), pytest.param("decode", marks=full)])
def test_s5_the_first_reason_stays_until_clear(pair: Pair, first: str) -> None:
    room = pair.at("published")
    if first == "engine":
        pair.prefill.fault("fail", room=room.number, reason="the first")
        room.send()
    else:
        room.side(first).abort("the first")
    room.ends("FAILED")
    before = [reasons(handle, 3) for handle in (room.sender, room.receiver)]
    for side in SIDES:
        together(pair.side(side), *((room.side(side), "abort", f"a later one {thread}") for thread in range(3)))
    pair.transfer()  # behind whatever that has sent
    after = [reasons(handle, 3) for handle in (room.sender, room.receiver)]
    assert after == before, f"prefill and decode told {before}, and after later aborts {after}"
    for role, found in zip(SIDES, after, strict=True):
        assert len(found) == 1 and "the first" in next(iter(found)), f"{role}, asked three times, tells {found}"
    pair.over(room)


@rule("S6")
@pytest.mark.parametrize("cause", ["aborts", "engine"])
def test_s6_a_failure_and_its_reason_are_seen_together(pair: Pair, cause: str) -> None:
    for _ in range(2):
        room = pair.at("published")
        with watched(room.sender, room.receiver) as seen:
            if cause == "engine":
                pair.prefill.fault("fail", room=room.number, times=1)
                room.send()
            else:
                together(pair.prefill, *((room.sender, "abort", f"thread {thread}") for thread in range(4)))
            room.ends("FAILED")
        for one in seen:
            assert not one.unexplained, f"{one.handle.child.role} was {one.unexplained} times seen to be FAILED without a reason"
        pair.over(room)


@rule("S6")
@pytest.mark.parametrize("cause", ["engine", pytest.param("abort", marks=full)])
def test_s6_a_verdict_is_not_computed_anew_when_tickets_end(pair: Pair, cause: str) -> None:
    room = pair.open()
    room.receiver.receive([20, 21, 22, 23])
    pair.prefill.fault("hold", "the first chunk", room=room.number, chunk=1)
    if cause == "engine":
        pair.prefill.fault("fail", room=room.number, chunk=2, reason="the second chunk")
    room.sender.send([1, 2])
    room.sender.send([3, 4], last=True)
    if cause == "abort":
        room.sender.abort("the second chunk")
    room.ends("FAILED")
    before = [reasons(handle, 1) for handle in (room.sender, room.receiver)]
    pair.prefill.call("the first chunk", "release")  # which ends well
    for handle in (room.sender, room.receiver):
        handle.safe()
    after = [reasons(handle, 1) for handle in (room.sender, room.receiver) if handle.poll() == "FAILED"]
    assert after == before, f"prefill and decode failed with {before}; when the last ticket had ended they told {after}"
    pair.over(room)
