"""P: peers that do not fit, die, stand still, come back, or send what no peer would send."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest

from kvcore_conformance.marks import full, rule
from kvcore_conformance.stage.arena import LIMITS, Pair, Room, number, paired
from kvcore_conformance.stage.crew import Crew
from kvcore_conformance.stage.driver import Child, Handle, free_port
from kvcore_conformance.stage.waits import SOON_S, stays, until

LETTERS = ("Join", "Here", "Destination", "Status", "Ack", "Abort", "Which", "Drained")
LOST_S = LIMITS["liveness_s"] + SOON_S
SLOW_S = 0.25
PATIENT = {"liveness_s": 9.0, "quarantine_s": 14.0}
LATE_S = 0.15
NONSENSE = 200
JOINS = 70_000
"""More rooms that are not there than anybody should remember."""


def meeting(prefill: Child, decode: Child, room: int | None = None) -> Room:
    """Both handles of a room of any two processes."""
    room = number() if room is None else room
    return Room(prefill.sender(room), decode.receiver(room, prefill))


def works(pair: Pair, prefill: Child, decode: Child) -> None:
    """A room between processes over the pair's memory, from beginning to end."""
    Pair(prefill, decode, pair.source, pair.target).transfer()


def lost(handle: Handle) -> None:
    """A room fails since its peer is lost, and says so."""
    assert handle.wait(LOST_S) == "FAILED", f"{LOST_S:g} s after its peer was lost the room is {handle.poll()}"
    assert handle.failure.code == "peer_lost", f"it failed with {handle.failure}"


# --- P1


CLAIMS: dict[str, tuple[dict[str, Any], str]] = {
    "wire_version": ({"wire_version": "another"}, r"wire version \S+ here and another there"),
    "protocol": ({"major": 9}, r"control protocol 1\.\d+ here and 9\.\d+ there"),
    "backend": ({"backend": "another"}, r"backend '\S+' here and 'another' there"),
}


@rule("P1")
@pytest.mark.parametrize("what", ["wire_version", pytest.param("protocol", marks=full), pytest.param("backend", marks=full)])
def test_p1_a_peer_that_does_not_fit_is_refused_on_both_sides(pair: Pair, crew: Crew, what: str) -> None:
    claim, text = CLAIMS[what]
    with crew.lend(1) as (odd,):
        odd.pretend(**claim)
        odd.start("decode", pair.target.specs, limits=LIMITS)
        room = meeting(pair.prefill, odd)
        room.receive()
        room.send()
        assert room.receiver.wait() == "FAILED", "it has paired"
        failure = room.receiver.failure
        assert failure.code == "incompatible" and re.search(text, failure.text), f"the decode side was told: {failure}"
        said = pair.prefill.logged(odd.instance)
        assert any(re.search(text, line) for line in said), f"the prefill side logged: {said}"
        assert room.receiver.safe_now() and room.sender.poll() == "BOOTSTRAPPING", "pages are held for a peer that was refused"
        room.clear()
    pair.intact()


@rule("P1")
def test_p1_a_peer_of_another_minor_version_is_taken(pair: Pair, crew: Crew) -> None:
    """Also one whose letters have fields that nobody here knows."""
    with crew.lend(1) as (newer,):
        newer.pretend(minor=99)
        works(pair, pair.prefill, newer.start("decode", pair.target.specs, limits=LIMITS))


# --- P2


@rule("P2")
def test_p2_a_killed_peer_s_rooms_fail_and_no_others(pair: Pair, crew: Crew) -> None:
    with crew.lend(1) as (doomed,):
        doomed.start("decode", pair.target.specs, limits=LIMITS)
        other = pair.at("in flight")
        pair.expect(other)
        rooms = [meeting(pair.prefill, doomed), meeting(pair.prefill, doomed)]
        rooms[0].receive()
        assert rooms[0].sender.until("WAITING_FOR_INPUT") == "WAITING_FOR_INPUT"
        unborn = pair.prefill.sender(number())
        doomed.kill()
    lost(rooms[0].sender)
    assert (other.sender.poll(), other.receiver.poll()) == ("TRANSFERRING", "TRANSFERRING"), "a room of another peer has changed"
    assert unborn.poll() == "BOOTSTRAPPING", "a room that knows no peer has changed"
    pair.release(other)
    other.ends("SUCCESS")
    pair.intact()
    until(lambda: pair.prefill.work("stats")["peers"] == 1, "nothing is kept for the dead peer")
    for handle in (*(room.sender for room in rooms), unborn):
        handle.clear()
    other.clear()


@rule("P2")
@full
def test_p2_a_killed_prefill_s_rooms_fail_and_no_others(crew: Crew) -> None:
    with paired(crew) as pair, crew.lend(1) as (doomed,):
        doomed.start("prefill", pair.source.specs, limits=LIMITS)
        other = pair.at("in flight")
        pair.expect(other)
        room = meeting(doomed, pair.decode)
        room.theirs = {"kv": [0, 1]}
        room.receive()
        assert room.sender.until("WAITING_FOR_INPUT") == "WAITING_FOR_INPUT"
        doomed.kill()
        lost(room.receiver)
        pair.release(other)
        other.ends("SUCCESS")
        pair.intact()
        until(lambda: pair.decode.work("stats")["peers"] == 1, "nothing is kept for the dead peer")


@rule("P2")
@full
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_p2_a_peer_that_stands_still_is_lost_in_time_and_stalls_no_call(crew: Crew, side: str) -> None:
    with paired(crew) as pair:
        room = pair.at("published")
        frozen, living = pair.side(side), room.other(side)
        frozen.freeze()
        for _ in range(5):
            lone = living.child.sender(number()) if side == "decode" else living.child.receiver(number(), pair.prefill)
            for call in (lone.poll, living.poll, lambda lone=lone: lone.abort("enough"), lone.clear):
                call()
                assert living.child.took_s < LIMITS["liveness_s"], "a call waits for the peer"
        lost(living)
        frozen.thaw()
        assert room.side(side).wait(LOST_S) == "FAILED"
        pair.accept(room)
        pair.transfer()
        pair.transfer()


@rule("P2")
@pytest.mark.parametrize("side", ["decode", pytest.param("prefill", marks=full)])
def test_p2_a_peer_that_stands_still_for_less_than_the_limit_loses_nothing(pair: Pair, side: str) -> None:
    room = pair.at("in flight")
    pair.expect(room)
    pair.side(side).freeze()
    threading.Event().wait(SLOW_S)
    pair.side(side).thaw()
    pair.release(room)
    room.ends("SUCCESS")
    pair.intact()
    room.clear()


@rule("P2")
@full
def test_p2_a_peer_that_stands_still_for_half_the_limit_loses_nothing(crew: Crew) -> None:
    with paired(crew, limits=PATIENT) as pair:
        room = pair.at("published")
        pair.expect(room)
        pair.decode.freeze()
        stays(lambda: True, "decode stands still", 5.6)
        pair.decode.thaw()
        room.send()
        room.ends("SUCCESS")
        pair.intact()


@rule("P2")
@full
def test_p2_a_peer_that_is_cut_off_is_lost_on_both_sides(crew: Crew) -> None:
    with paired(crew) as pair:
        room = pair.at("published")
        for child in (pair.prefill, pair.decode):
            for message in ("Ping", "Stranger", *LETTERS):
                child.tap("drop", message, outgoing=False)
        lost(room.sender)
        lost(room.receiver)
        for child in (pair.prefill, pair.decode):
            child.heal()
        pair.transfer()


# --- P3


@rule("P3")
@pytest.mark.parametrize("end", ["killed", pytest.param("closed", marks=full)])
def test_p3_a_peer_that_comes_back_at_its_address_is_another(crew: Crew, end: str) -> None:
    port = free_port()
    with paired(crew, bootstrap_port=port) as pair, crew.lend(1) as (latter,):
        old = pair.at("published")
        if end == "killed":
            pair.prefill.kill()
        else:
            pair.prefill.stopped()
        latter.start("prefill", pair.source.specs, limits=LIMITS, bootstrap_port=port)
        assert latter.address == pair.prefill.address
        same = latter.sender(old.number)
        same.send({"kv": list(old.mine["kv"])}, last=True)
        assert old.receiver.wait(LOST_S) == "FAILED", "a room of the old peer goes on with the new one"
        works(pair, latter, pair.decode)
        assert same.poll() == "BOOTSTRAPPING", "the new peer serves a room of the old one"
        pair.intact()


@rule("P3")
@full
def test_p3_a_decode_side_that_comes_back_is_another(crew: Crew) -> None:
    with paired(crew) as pair, crew.lend(1) as (latter,):
        old = pair.at("in flight")
        pair.decode.kill()
        latter.start("decode", pair.target.specs, limits=LIMITS)
        works(pair, pair.prefill, latter)
        lost(old.sender)
        new = latter.receiver(old.number, pair.prefill)
        new.receive({"kv": list(old.theirs["kv"])})
        stays(lambda: new.poll() in ("BOOTSTRAPPING", "FAILED"), "the old room's sender does not serve the new peer")
        pair.release(old)
        works(pair, pair.prefill, latter)


@rule("P3")
@full
@pytest.mark.parametrize(("source", "to"), [("another-instance", ""), ("", "another-instance")], ids=["of", "to"])
def test_p3_a_message_of_or_to_another_instance_is_answered_and_changes_nothing(pair: Pair, source: str, to: str) -> None:
    pair.prefill.work("aid", "impostor:Impostor", "tap")
    pair.prefill.tap("drop", "Stranger", outgoing=True)  # the other side has not said it, and would pair anew
    room = pair.at("published")
    pair.prefill.call("tap", "aborted", room.number, source, to)
    until(lambda: pair.prefill.call("tap", "said", "Stranger") == 1, "it is answered")
    stays(lambda: room.sender.poll() == "WAITING_FOR_INPUT", "the abort is not between these two instances")
    pair.prefill.call("tap", "aborted", room.number, "", "")
    assert room.sender.wait() == "FAILED", "the same abort counts for nothing between these two instances either"
    pair.prefill.heal()
    pair.over(room)


# --- P4


@rule("P4")
@pytest.mark.parametrize(
    ("side", "hook"),
    [
        ("prefill", "kvcore_connect"),
        pytest.param("decode", "kvcore_connect", marks=full),
        pytest.param("prefill", "kvcore_endpoint", marks=full),
        pytest.param("decode", "kvcore_endpoint", marks=full),
    ],
)
def test_p4_a_peer_that_could_not_be_reached_once_is_tried_again(pair: Pair, crew: Crew, side: str, hook: str) -> None:
    with crew.lend(1) as (late,):
        late.start("decode", pair.target.specs, limits=LIMITS)
        (pair.prefill if side == "prefill" else late).fault("raise_", hook=hook, error="ConnectionError", times=1)
        room = meeting(pair.prefill, late)
        assert room.receiver.wait() == "FAILED", "it has paired with an engine that cannot reach it"
        failure = room.receiver.failure
        assert failure.code == "backend" and "ConnectionError" in failure.text, f"it failed with {failure}"
        room.clear()
        works(pair, pair.prefill, late)


@rule("P4")
@full
def test_p4_a_path_that_was_broken_is_made_anew(crew: Crew) -> None:
    with paired(crew) as pair:
        room = pair.at("published")
        pair.prefill.fault("fail", room=room.number, reason="a made up failure", peer_broken=True)
        room.send()
        room.ends("FAILED")
        assert "a made up failure" in room.sender.failure.text, f"the sender has failed with: {room.sender.failure}"
        room.clear()
        pair.accept(room)
        pair.transfer()


# --- P5


@rule("P5")
def test_p5_bad_messages_are_logged_at_a_limited_rate_and_the_next_good_one_is_served(pair: Pair) -> None:
    counted, said = pair.prefill.bad_messages("control"), len(pair.prefill.logged(""))
    pair.prefill.work("aid", "impostor:Impostor", "tap")
    room = pair.at("published")
    pair.expect(room)
    pair.prefill.call("tap", "nonsense", NONSENSE)
    until(lambda: pair.prefill.bad_messages("control") >= counted + NONSENSE, f"{NONSENSE} bad messages are counted")
    room.send()
    room.ends("SUCCESS")
    said = len(pair.prefill.logged("")) - said
    assert said < NONSENSE / 2, f"{NONSENSE} bad messages were logged in {said} lines"
    pair.intact()
    room.clear()


@rule("P5")
@full
def test_p5_rooms_that_nobody_opens_are_remembered_in_a_bounded_table(crew: Crew) -> None:
    """Here they would be for a minute, were there room for so many."""
    with paired(crew, meet=False, limits={"orphan_s": 60.0}) as pair:
        pair.prefill.work("aid", "impostor:Impostor", "tap")
        pair.transfer()
        pair.prefill.call("tap", "joins", 10**9, JOINS, waits_s=60.0)
        pair.transfer()
        kept = max(pair.prefill.work("held").values(), default=0)
        assert 0 < kept < JOINS, f"a peer has joined {JOINS} rooms that nobody has opened, and {kept} are remembered"


# --- P6


def disturb(pair: Pair, how: str) -> None:
    """Have control messages of every kind, both ways, come twice, or come late the first time, or be lost the first time."""
    for message in LETTERS:
        if how == "repeated":
            pair.prefill.tap("duplicate", message, outgoing=True, copies=3)
            pair.prefill.tap("duplicate", message, outgoing=False, copies=3)
        elif how == "lost":
            pair.prefill.tap("drop", message, outgoing=True, times=1)
            pair.prefill.tap("drop", message, outgoing=False, times=1)
        else:
            pair.prefill.tap("delay", message, outgoing=True, seconds=LATE_S, copies=int(how == "late and early"))
            pair.prefill.tap("delay", message, outgoing=False, seconds=LATE_S / 2, copies=int(how == "late and early"))


def ends_cleanly(pair: Pair, room: Room) -> None:
    """A room has ended so that both sides may have meant it, and what arrived is right."""
    found = room.receiver.wait(), room.sender.wait()
    assert found in (("SUCCESS", "SUCCESS"), ("FAILED", "FAILED"), ("FAILED", "SUCCESS")), f"receiver and sender ended as {found}"
    for handle in (room.receiver, room.sender):
        assert handle.safe(), f"{handle.child.role}'s pages are not safe"
    if found[0] == "SUCCESS":
        pair.intact()


@rule("P6")
@pytest.mark.parametrize(
    "how", [pytest.param("repeated", marks=full), pytest.param("late and early", marks=full), "lost", pytest.param("late", marks=full)]
)
def test_p6_control_messages_may_be_lost_repeated_or_late(pair: Pair, how: str) -> None:
    disturb(pair, how)
    room = pair.open()
    pair.expect(room)
    room.receive()
    room.send()
    ends_cleanly(pair, room)
    if how != "lost":
        assert room.receiver.poll() == "SUCCESS", f"nothing was lost, and it failed: {room.reasons()}"
    pair.accept(room)
    if how == "lost":
        pair.prefill.heal()
        disturb(pair, how)
    struck = pair.open()
    struck.receive()
    struck.receiver.abort("enough of it")
    assert struck.sender.wait() == "FAILED" and struck.sender.failure.side == "decode", "the abort did not arrive, or not as it was meant"
    ends_cleanly(pair, struck)
    room.clear()
    struck.clear()
    pair.prefill.heal()
    pair.accept(struck)
    pair.transfer()
    pair.empties()


@rule("P6")
@pytest.mark.parametrize("message", ["Destination", pytest.param("Join", marks=full), pytest.param("Abort", marks=full)])
def test_p6_messages_of_an_old_lifetime_change_nothing_in_a_new_one(pair: Pair, message: str) -> None:
    pair.prefill.tap("delay", message, outgoing=False, seconds=SLOW_S, copies=1)
    old = pair.open()
    old.receive()
    assert old.sender.until("WAITING_FOR_INPUT") == "WAITING_FOR_INPUT"
    old.receiver.abort("enough of it")
    old.ends("FAILED")
    old.clear()
    new = pair.open(old.number)
    new.theirs = {"kv": [11, 12, 13, 14, 15]}
    new.receive()
    stays(lambda: new.sender.poll() in ("BOOTSTRAPPING", "WAITING_FOR_INPUT"), "the new room waits for its pages", SLOW_S + 0.1)
    pair.expect(new)
    new.send()
    new.ends("SUCCESS")
    pair.intact()
    new.clear()
