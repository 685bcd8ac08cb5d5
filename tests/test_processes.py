"""Rooms between real processes over each backend: abort, clear, death, stops, restarts, lies, misfits and garbage."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from kvcore_conformance.stage.crew import Crew
from kvcore_conformance.stage.driver import LIMITS, Child, ChildError, Handle, PoolSpec, free_port
from kvcore_conformance.stage.noise import Noise
from kvcore_conformance.stage.waits import SOON_S, until

from tests.helpers import BACKENDS, able, fences

KV = PoolSpec()
AUX = PoolSpec("aux", pages=16, page_bytes=64, layers=1)
_rooms = itertools.count(1)


def new_room() -> int:
    return next(_rooms)


@pytest.fixture(scope="module", params=BACKENDS)
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    crew = Crew(backend=request.param)
    try:
        yield crew
    finally:
        crew.end()


@pytest.fixture(scope="module")
def lasting(crew: Crew) -> Iterator[tuple[Child, Child]]:
    """A prefill and a decode process that many tests share; each test leaves them as it found them, see ``pair``."""
    with crew.lend(2) as (prefill, decode):
        moved(prefill.start("prefill", [KV, AUX]), decode.start("decode", [KV, AUX]))  # the first pairing takes longer than limits here
        yield prefill, decode


@pytest.fixture
def pair(lasting: tuple[Child, Child]) -> tuple[Child, Child]:
    """The lasting pair, its decode memory zeroed."""
    lasting[1].work("wipe")
    return lasting


@pytest.fixture
def two(crew: Crew) -> Iterator[list[Child]]:
    """Two children of this test alone, to be started and killed at will."""
    with crew.lend(2) as lent:
        yield lent


@pytest.fixture
def three(crew: Crew) -> Iterator[list[Child]]:
    with crew.lend(3) as lent:
        yield lent


def drained(*sides: Child) -> None:
    """C7: with all rooms cleared, the stores of rooms become empty within the limits."""
    for child in sides:
        until(lambda child=child: child.work("held") == {}, f"{child.instance} holds no room: {child.work('held')}")  # type: ignore[misc]


def opened(prefill: Child, decode: Child, room: int | None = None, attempt: int = 0) -> tuple[Handle, Handle]:
    room = new_room() if room is None else room
    return prefill.sender(room, attempt), decode.receiver(room, prefill, attempt)


def moved(prefill: Child, decode: Child, room: int | None = None, attempt: int = 0, pages: Sequence[int] = (3, 4, 9)) -> None:
    """A room works: the bytes are equal, and it is cleared again."""
    sender, receiver = opened(prefill, decode, room, attempt)
    to = [page + 1 for page in reversed(pages)]
    receiver.receive(to)
    sender.send(pages, last=True)
    assert (receiver.wait(), sender.wait()) == ("SUCCESS", "SUCCESS"), receiver.child.call(receiver.name, "failure")
    assert decode.digest(to) == prefill.digest(pages)
    sender.clear()
    receiver.clear()


def in_state(moment: str, prefill: Child, decode: Child, gate: str = "never") -> tuple[Handle, Handle]:
    """A room on both sides, brought to a moment of its life."""
    sender, receiver = opened(prefill, decode)
    if moment == "joined":
        assert receiver.until("WAITING_FOR_INPUT") == "WAITING_FOR_INPUT"
        return sender, receiver
    receiver.receive([0, 1])
    if moment == "published":
        assert sender.until("WAITING_FOR_INPUT") == "WAITING_FOR_INPUT"
        return sender, receiver
    sender.send([0, 1], last=True, gate=gate if moment == "transferring" else None)
    state = "TRANSFERRING" if moment == "transferring" else "SUCCESS"
    assert (sender.until(state), receiver.until(state)) == (state, state)
    return sender, receiver


# --- transfer


def test_t1_chunks_of_two_pools_land_page_by_page(pair: tuple[Child, Child]) -> None:
    prefill, decode = pair
    sender, receiver = opened(prefill, decode)
    receiver.receive({"kv": [30, 2, 17, 5, 6], "aux": [9]})
    sender.send([8, 7])
    sender.send([])
    sender.send({"kv": [31, 0], "aux": [4]})
    sender.send([15])
    sender.send([], last=True, record="first token")
    assert (receiver.wait(), sender.wait()) == ("SUCCESS", "SUCCESS")
    assert decode.digest([30, 2, 17, 5, 6]) == prefill.digest([8, 7, 31, 0, 15])
    assert decode.digest([9], "aux") == prefill.digest([4], "aux")
    assert (decode.touched(), decode.touched("aux")) == ([2, 5, 6, 17, 30], [9])
    assert receiver.record == "first token"
    sender.clear()
    receiver.clear()
    drained(*pair)


def test_t1_many_rooms_in_flight_keep_apart(pair: tuple[Child, Child]) -> None:
    prefill, decode = pair
    choose = random.Random(5)
    to, source = choose.sample(range(32), 32), choose.sample(range(32), 32)
    rooms = [(*opened(prefill, decode), source[at : at + 4], to[at : at + 4]) for at in range(0, 32, 4)]
    for number, (sender, receiver, mine, theirs) in enumerate(rooms):
        if number % 2:
            receiver.receive(theirs)
        sender.send(mine[:1])
        sender.send(mine[1:], last=True)
        if not number % 2:
            receiver.receive(theirs)
    for sender, receiver, mine, theirs in rooms:
        assert (receiver.wait(), sender.wait()) == ("SUCCESS", "SUCCESS")
        assert decode.digest(theirs) == prefill.digest(mine)
        sender.clear()
        receiver.clear()
    drained(*pair)


def test_t1_a_room_without_pages_succeeds_on_both_sides(pair: tuple[Child, Child]) -> None:
    sender, receiver = opened(*pair)
    sender.send([], last=True)
    receiver.receive([])
    assert (receiver.wait(), sender.wait()) == ("SUCCESS", "SUCCESS")
    sender.clear()
    receiver.clear()
    drained(*pair)


# --- abort


def ended_by_abort(aborter: Handle, other: Handle, side: str) -> None:
    """A2, A4, R1, C7: both ends of an abort, and what is left of it."""
    assert (aborter.poll(), aborter.child.status(aborter.room)) == ("FAILED", "FAILED")
    assert (other.wait(), other.child.status(other.room)) == ("FAILED", "FAILED")
    for handle in (aborter, other):
        failure = handle.failure
        assert (failure.text, failure.code, failure.side) == (f"{side} gave up", "aborted", side)
        assert handle.safe()
        assert not handle.unproven
        handle.clear()


@pytest.mark.parametrize("moment", ["joined", "published", "transferring"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a4_an_abort_reaches_the_other_side_with_its_reason(pair: tuple[Child, Child], side: str, moment: str) -> None:
    sender, receiver = in_state(moment, *pair)
    aborter, other = (sender, receiver) if side == "prefill" else (receiver, sender)
    aborter.abort(f"{side} gave up")
    ended_by_abort(aborter, other, side)
    moved(*pair, room=sender.room, attempt=1)  # C4: at once
    drained(*pair)


def test_a7_prefill_aborts_before_decode_opened(pair: tuple[Child, Child]) -> None:
    prefill, decode = pair
    sender = prefill.sender(new_room())
    sender.abort("prefill gave up")
    receiver = decode.receiver(sender.room, prefill)
    receiver.receive([1])
    ended_by_abort(sender, receiver, "prefill")
    drained(*pair)


def test_a7_prefill_aborts_and_clears_before_decode_opened(pair: tuple[Child, Child]) -> None:
    prefill, decode = pair
    sender = prefill.sender(new_room())
    sender.abort("prefill gave up")
    sender.clear()
    receiver = decode.receiver(sender.room, prefill)
    assert receiver.wait() == "FAILED"
    assert (receiver.failure.text, receiver.failure.side) == ("prefill gave up", "prefill")
    receiver.clear()
    drained(*pair)


@pytest.mark.parametrize("cleared", [False, True])
def test_a7_decode_aborts_before_prefill_opened(pair: tuple[Child, Child], cleared: bool) -> None:
    prefill, decode = pair
    receiver = decode.receiver(new_room(), prefill)
    receiver.receive([1])
    receiver.abort("decode gave up")
    if cleared:
        receiver.clear()
    sender = prefill.sender(receiver.room)
    assert sender.wait() == "FAILED"
    assert (sender.failure.text, sender.failure.side) == ("decode gave up", "decode")
    assert (sender.safe(), receiver.safe()) == (True, True)
    sender.clear()
    receiver.clear()
    drained(*pair)


def test_a8_a_rejection_fails_the_room_at_prefill(pair: tuple[Child, Child]) -> None:
    prefill, decode = pair
    sender = prefill.sender(new_room())
    decode.call("manager", "reject", sender.room, "no such model", prefill.address)
    assert sender.wait() == "FAILED"
    assert (sender.failure.text, sender.failure.code, sender.failure.side) == ("no such model", "rejected", "decode")
    sender.clear()
    drained(*pair)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a5_pages_wait_for_a_write_in_flight_whichever_side_aborts(pair: tuple[Child, Child], side: str) -> None:
    prefill, decode = pair
    sender, receiver = opened(prefill, decode)
    prefill.hold(sender.room)
    receiver.receive([1, 2])
    sender.send([3, 4], last=True)
    until(lambda: prefill.held_writes(sender.room) == 1, "a write is held back")
    aborter, other = (sender, receiver) if side == "prefill" else (receiver, sender)
    aborter.abort(f"{side} gave up")
    assert (aborter.poll(), other.wait()) == ("FAILED", "FAILED")
    assert not (receiver.safe(0.3) or sender.safe_now())
    receiver.clear()
    moved(*pair, room=sender.room, attempt=1)  # C4: the two uses do not meet
    assert not (receiver.safe_now() or sender.safe_now())  # R1 holds for a cleared room too
    prefill.release(sender.room)
    assert (receiver.safe(), sender.safe()) == (True, True)
    assert not (receiver.unproven or sender.unproven)
    assert (sender.failure.side, receiver.failure.side) == (side, side)
    sender.clear()
    drained(*pair)
    moved(*pair)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a3_an_abort_after_success_changes_nothing(pair: tuple[Child, Child], side: str) -> None:
    handles = in_state("succeeded", *pair)
    handles[side == "decode"].abort("too late")
    for handle in handles:
        assert (handle.poll(), handle.child.status(handle.room)) == ("SUCCESS", "SUCCESS")
        assert handle.safe_now()
        handle.clear()
    drained(*pair)


def test_a7_crossing_aborts_end_both_sides(pair: tuple[Child, Child]) -> None:
    for _ in range(5):
        sender, receiver = in_state("published", *pair)
        sender.abort("prefill gave up")
        receiver.abort("decode gave up")
        assert (sender.failure.side, receiver.failure.side) in {("prefill", "decode"), ("prefill", "prefill")}
        assert (sender.safe(), receiver.safe()) == (True, True)
        sender.clear()
        receiver.clear()
    drained(*pair)


def test_a7_a_receiver_of_a_room_that_nobody_opens_is_told(pair: tuple[Child, Child]) -> None:
    prefill, decode = pair
    receiver = decode.receiver(new_room(), prefill)
    receiver.receive([1])
    assert receiver.wait(LIMITS["orphan_s"] + SOON_S) == "FAILED"
    assert receiver.failure.code == "no_such_room"
    assert str(receiver.room) in receiver.failure.text
    receiver.clear()
    drained(*pair)


# --- clear and reuse


@pytest.mark.parametrize("moment", ["joined", "published", "transferring"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_c3_clear_of_a_live_room_tells_the_peer(pair: tuple[Child, Child], side: str, moment: str) -> None:
    handles = in_state(moment, *pair)
    leaver, other = handles if side == "prefill" else handles[::-1]
    leaver.clear()
    assert leaver.child.status(leaver.room) is None
    assert (other.wait(), leaver.poll()) == ("FAILED", "FAILED")
    assert "cleared" in other.failure.text
    assert (other.failure.side, leaver.failure.side) == (side, side)
    assert (other.safe(), leaver.safe()) == (True, True)
    other.clear()
    other.clear()  # C2
    leaver.clear()
    drained(*pair)


def test_c4_the_same_attempt_works_again_when_both_lifetimes_are_cleared(pair: tuple[Child, Child]) -> None:
    room = new_room()
    for pages in ([1, 2, 3], [7, 6], [0, 30]):
        moved(*pair, room=room, pages=pages)
    drained(*pair)


@pytest.mark.parametrize("moment", ["published", "transferring"])
def test_c4_the_same_attempt_works_again_after_a_paired_abort(pair: tuple[Child, Child], moment: str) -> None:
    sender, receiver = in_state(moment, *pair)
    receiver.abort("decode gave up")
    assert sender.wait() == "FAILED"
    assert not sender.unpaired
    sender.clear()
    receiver.clear()
    moved(*pair, room=sender.room)
    drained(*pair)


def test_c4_after_an_unpaired_end_the_side_it_ended_on_opens_first(pair: tuple[Child, Child]) -> None:
    prefill, decode = pair
    sender = prefill.sender(new_room())
    sender.abort("prefill gave up")
    assert sender.unpaired
    sender.clear()
    moved(prefill, decode, room=sender.room)  # opens the sender first

    lone = decode.receiver(new_room(), prefill)
    lone.abort("decode gave up")
    assert lone.unpaired
    lone.clear()
    receiver, sender = decode.receiver(lone.room, prefill), prefill.sender(lone.room)
    receiver.receive([4])
    sender.send([5], last=True)
    assert (receiver.wait(), sender.wait()) == ("SUCCESS", "SUCCESS")
    sender.clear()
    receiver.clear()
    drained(*pair)


# --- death


MOMENTS = ("joined", "published", "transferring", "succeeded")


def lost_by_death(handles: Sequence[Handle], timeout: float) -> None:
    """P2, R4: rooms with a dead peer end within the limit, by evidence, and leave nothing."""
    *live, done = handles
    for handle in live:
        assert handle.wait(timeout) == "FAILED"
        assert handle.failure.code == "peer_lost"
        assert "process is gone" in handle.failure.text or "path to it is broken" in handle.failure.text
    assert done.poll() == "SUCCESS"
    for handle in handles:
        let_go(handle, fences(handle.child.backend, gone=True))
        handle.clear()


def let_go(handle: Handle, proved: bool) -> None:
    """Its pages become safe: by evidence, or by the limit where the backend has none."""
    proved = proved or "prefill" in handle.child.instance
    assert handle.safe(SOON_S if proved else LIMITS["quarantine_s"] + SOON_S)
    assert not (proved and handle.unproven)


def bounded(child: Child, **expected: int) -> None:
    """C7: what is kept for peers is kept for live ones."""
    names = ("peers", "links", "pairings", "departed_peers", "groups", "directory_groups", "directory_questions")

    def sizes() -> dict[str, int]:
        stores = child.work("stats")["stores"]
        return {name: stores[name] for name in names if stores[name]}

    until(lambda: sizes() == expected, f"{child.instance} keeps {expected} for its peers: {sizes()}")


def test_p2_a_killed_decode_process_fails_only_its_rooms(crew: Crew, three: list[Child]) -> None:
    prefill, doomed, living = three[0].start("prefill"), three[1].start("decode"), three[2].start("decode")
    lone = prefill.sender(new_room())
    other, receiver = in_state("transferring", prefill, living, gate="mine")
    senders = [in_state(moment, prefill, doomed)[0] for moment in MOMENTS]
    doomed.kill()
    lost_by_death(senders, LIMITS["liveness_s"])
    assert (lone.poll(), other.poll(), receiver.poll()) == ("BOOTSTRAPPING", "TRANSFERRING", "TRANSFERRING")
    prefill.open_gate("mine")
    assert (receiver.wait(), other.wait()) == ("SUCCESS", "SUCCESS")
    for handle in (lone, other, receiver):
        handle.clear()
    with crew.lend(1) as (successor,):
        moved(prefill, successor.start("decode"))
        drained(prefill, living, successor)
        bounded(prefill, peers=2)
    assert prefill.work("stats")["released_unproven"] == 0


def test_p2_a_killed_prefill_process_fails_only_its_rooms(crew: Crew, three: list[Child]) -> None:
    decode, doomed, living = three[0].start("decode"), three[1].start("prefill"), three[2].start("prefill")
    other, receiver = in_state("transferring", living, decode, gate="mine")
    receivers = [in_state(moment, doomed, decode)[1] for moment in MOMENTS]
    waiting = decode.receiver(new_room(), doomed)
    until(lambda: doomed.work("stats")["stores"]["waiting_joins"] == 1, "the join has arrived; else it would wait for a successor")
    doomed.kill()
    lost_by_death([waiting, *receivers], LIMITS["liveness_s"])
    assert (other.poll(), receiver.poll()) == ("TRANSFERRING", "TRANSFERRING")
    living.open_gate("mine")
    assert (receiver.wait(), other.wait()) == ("SUCCESS", "SUCCESS")
    other.clear()
    receiver.clear()
    with crew.lend(1) as (successor,):
        moved(successor.start("prefill"), decode)
        drained(decode, living, successor)
        bounded(decode, peers=2, links=2, groups=2, directory_groups=2)
    assert not fences(decode.backend, gone=True) or decode.work("stats")["released_unproven"] == 0


BIG = PoolSpec(pages=24, page_bytes=1 << 20, layers=2)
"""More than what the sockets between two processes take up, so that a transfer to a stopped process stays in flight."""


def written_all_the_same(sender: Handle) -> bool:
    """Whether a write to a stopped process has ended: over shared memory nobody is needed at the other end."""
    return sender.until("SUCCESS", timeout=0.5) == "SUCCESS"


@pytest.mark.parametrize("aborted", [False, True])
def test_r4_a_write_in_flight_to_a_killed_process_is_proved_to_be_over(two: list[Child], aborted: bool) -> None:
    prefill, doomed = two[0].start("prefill", [BIG]), two[1].start("decode", [BIG])
    sender, receiver = opened(prefill, doomed)
    receiver.receive(range(24))
    assert sender.until("WAITING_FOR_INPUT") == "WAITING_FOR_INPUT"
    doomed.freeze()
    sender.send(range(24), last=True)
    if written_all_the_same(sender):
        return
    until(lambda: prefill.work("held").get("ledger_tickets") == 1, "a ticket is in flight")
    if aborted:
        sender.abort("prefill gave up")
    assert not sender.safe(0.3)
    doomed.kill()
    assert sender.wait(LIMITS["liveness_s"]) == "FAILED"
    assert sender.failure.code == ("aborted" if aborted else "peer_lost")
    assert sender.safe(LIMITS["liveness_s"])
    assert not sender.unproven
    sender.clear()
    drained(prefill)


# --- stops


def test_p2_a_stop_within_the_limit_costs_nothing_and_a_write_aborted_in_it_is_cancelled(two: list[Child]) -> None:
    prefill, decode = two[0].start("prefill", [BIG]), two[1].start("decode", [BIG])
    patient, kept = in_state("transferring", prefill, decode, gate="mine")
    sender, receiver = opened(prefill, decode)
    receiver.receive(range(2, 24))
    assert sender.until("WAITING_FOR_INPUT") == "WAITING_FOR_INPUT"
    decode.freeze()
    sender.send(range(2, 24), last=True)
    if written_all_the_same(sender):
        decode.thaw()
        assert receiver.wait() == "SUCCESS"
        sender.clear()
        receiver.clear()
    else:
        until(lambda: prefill.work("held").get("ledger_tickets") == 2, "a ticket is in flight")
        sender.abort("prefill gave up")
        assert not sender.safe(0.3)
        decode.thaw()
        ended_by_abort(sender, receiver, "prefill")
        cut_short = decode.digest(range(2, 24)) != prefill.digest(range(2, 24))
        assert cut_short or not able(prefill.backend).cancel
    prefill.open_gate("mine")
    assert (kept.wait(), patient.wait()) == ("SUCCESS", "SUCCESS")
    assert decode.digest([0, 1]) == prefill.digest([0, 1])
    patient.clear()
    kept.clear()
    drained(prefill, decode)


BRIEF = {"liveness_s": 1.5, "ticket_s": 2.5, "quarantine_s": 4.5}
"""For tests that wait until each of these has passed."""


def test_p2_a_frozen_decode_process_blocks_nothing_and_is_lost_in_time(two: list[Child]) -> None:
    prefill, decode = two[0].start("prefill", [BIG], limits=BRIEF), two[1].start("decode", [BIG], limits=BRIEF)
    senders = [in_state(moment, prefill, decode)[0] for moment in ("joined", "published", "transferring")]
    flying, target = opened(prefill, decode)
    target.receive(range(24))
    assert flying.until("WAITING_FOR_INPUT") == "WAITING_FOR_INPUT"
    decode.freeze()
    times = []
    flying.send(range(24), last=True)
    times.append(prefill.took_s)
    for room in (new_room() for _ in range(10)):
        lone = prefill.sender(room)
        for call in (lone.poll, lambda: lone.send([0]), senders[1].poll, lambda: lone.abort("enough"), lone.clear):  # noqa: B023
            call()
            times.append(prefill.took_s)
    senders[0].abort("enough")
    times.append(prefill.took_s)
    assert sorted(times)[-2] < BRIEF["liveness_s"] / 3, "no call waits for a peer"  # one may meet a busy machine
    written = written_all_the_same(flying)
    for handle in senders[1:] if written else [*senders[1:], flying]:
        assert handle.wait(BRIEF["liveness_s"] + SOON_S) == "FAILED"
        assert handle.failure.code == "peer_lost"
    until(lambda: all(handle.safe_now() for handle in senders), "nothing of theirs is in flight")
    decode.thaw()
    assert target.wait() == ("SUCCESS" if written else "FAILED")
    moved(prefill, decode)
    assert target.safe()
    assert not target.unproven  # decode has cut the connection that was written to, or prefill's write has ended now
    cut = able(prefill.backend).cancel and not written
    assert not (cut and flying.safe_now())  # nothing proves to prefill that decode is gone: it is not
    assert flying.safe(BRIEF["quarantine_s"] + SOON_S)
    assert (flying.unproven, prefill.work("stats")["released_unproven"]) == (cut, 24 * cut)
    for sender in (*senders, flying):
        assert sender.safe_now()
        sender.clear()
    drained(prefill)


def test_p2_a_frozen_prefill_process_blocks_nothing_and_is_lost_in_time(two: list[Child]) -> None:
    prefill, decode = two[0].start("prefill", limits=BRIEF), two[1].start("decode", limits=BRIEF)
    receivers = [in_state(moment, prefill, decode)[1] for moment in ("joined", "published", "transferring")]
    prefill.freeze()
    times = []
    for room in (new_room() for _ in range(10)):
        late = decode.receiver(room, prefill)
        for call in (late.poll, lambda: late.receive([9]), receivers[1].poll, lambda: late.abort("enough"), late.clear):  # noqa: B023
            call()
            times.append(decode.took_s)
    assert sorted(times)[-2] < BRIEF["liveness_s"] / 3, "no call waits for a peer"
    for receiver in receivers:
        assert receiver.wait(BRIEF["liveness_s"] + SOON_S) == "FAILED"
        assert receiver.failure.code == "peer_lost"
        let_go(receiver, fences(decode.backend))
        receiver.clear()
    prefill.thaw()
    moved(prefill, decode)
    drained(decode)


# --- restart


@pytest.mark.parametrize("same_control_port", [False, True])
def test_c51_decode_goes_on_with_a_prefill_restarted_at_its_address(three: list[Child], same_control_port: bool) -> None:
    ports: dict[str, Any] = {"bootstrap_port": free_port(), "port": free_port() if same_control_port else 0}
    decode, prefill = three[0].start("decode"), three[1].start("prefill", **ports)
    moved(prefill, decode)
    _, receiver = in_state("transferring", prefill, decode)
    prefill.kill()
    early = decode.receiver(new_room(), prefill)
    successor = three[2].start("prefill", **ports)
    assert receiver.wait(LIMITS["liveness_s"]) == "FAILED"
    assert receiver.failure.code == "peer_lost"
    let_go(receiver, fences(decode.backend, gone=True))
    moved(successor, decode)
    moved(successor, decode)
    early.clear()
    receiver.clear()
    drained(decode, successor)


# --- lies and misfits


def test_t3_unequal_numbers_of_pages_fail_both_sides(pair: tuple[Child, Child]) -> None:
    sender, receiver = opened(*pair)
    receiver.receive([1, 2, 3])
    sender.send([0, 1], last=True)
    assert (sender.wait(), receiver.wait()) == ("FAILED", "FAILED")
    assert sender.failure == receiver.failure
    assert "handed over 2 pages" in sender.failure.text
    assert "listed 3" in sender.failure.text
    assert pair[1].touched() == []
    sender.clear()
    receiver.clear()
    drained(*pair)


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "page_size": ({"pools": [PoolSpec(page_size=32), AUX]}, "page_size is 16 here and 32 there"),
    "dtype": ({"pools": [PoolSpec(dtype="uint16"), AUX]}, "dtype is 'uint8' here and 'uint16' there"),
    "layers": ({"pools": [PoolSpec(layers=4), AUX]}, r"layers is \(0, 1, 2\) here and \(0, 1, 2, 3\) there"),
    "page_bytes": ({"pools": [PoolSpec(page_bytes=512), AUX]}, r"page_bytes of layer 0 is 256 here and 512 there"),
    "pools": ({"pools": [KV]}, r"pools \['aux', 'kv'\] here and \['kv'\] there"),
    "wire_version": ({"pretend": {"wire_version": "7"}}, "wire version 1 here and 7 there"),
    "protocol": ({"pretend": {"major": 2}}, r"control protocol 1\.0 here and 2\.0 there"),
    "orphan_s": ({"limits": {"orphan_s": 0.75}}, r"orphan_s is 0\.4 here and 0\.75 there"),
    "quarantine_s": (
        {"limits": {"quarantine_s": 4.0, "liveness_s": 1.0, "ticket_s": 1.0}},
        r"quarantine_s is 4 there, and liveness_s \+ ticket_s is 6 here",
    ),
    "ticket_s": (
        {"limits": {"quarantine_s": 30.0, "ticket_s": 7.0}},
        r"quarantine_s is 7 here, and liveness_s \+ ticket_s is 10 there",
    ),
}


@pytest.mark.parametrize("what", MISFITS)
def test_p1_a_decode_process_that_does_not_fit_is_refused_on_both_sides(pair: tuple[Child, Child], crew: Crew, what: str) -> None:
    prefill, decode = pair
    settings, text = MISFITS[what]
    with crew.lend(1) as (odd,):
        if "pretend" in settings:
            odd.pretend(**settings["pretend"])
        odd.start("decode", settings.get("pools", [KV, AUX]), limits=settings.get("limits", {}))
        sender, receiver = opened(prefill, odd)
        receiver.receive([1])
        sender.send([1], last=True)
        assert receiver.wait() == "FAILED"
        assert receiver.failure.code == "incompatible"
        assert re.search(text, receiver.failure.text), receiver.failure.text
        assert [line for line in prefill.logged(odd.instance) if re.search(text, line)]
        assert (sender.poll(), odd.touched(), receiver.safe()) == ("BOOTSTRAPPING", [], True)
        sender.clear()
        receiver.clear()
        drained(odd)
        moved(prefill, decode)
        drained(prefill, decode)


# --- addresses


def test_s8_a_room_waits_for_a_prefill_process_that_starts_later(two: list[Child]) -> None:
    decode, port = two[0].start("decode", limits={"bootstrap_s": 60.0}), free_port()  # an engine may take long to import
    receiver = decode.receiver(new_room(), f"127.0.0.1:{port}")
    receiver.receive([5, 6])
    until(lambda: decode.logged("no group yet") != [], "decode has asked once")
    assert receiver.poll() == "BOOTSTRAPPING"
    prefill = two[1].start("prefill", bootstrap_port=port)
    sender = prefill.sender(receiver.room)
    sender.send([1, 2], last=True)
    assert (receiver.wait(), sender.wait()) == ("SUCCESS", "SUCCESS")
    assert decode.digest([5, 6]) == prefill.digest([1, 2])


def test_s8_a_prefill_process_that_never_starts_is_named_in_the_reason(two: list[Child]) -> None:
    decode, port = two[0].start("decode", limits={"bootstrap_s": 1.0}), free_port()
    receiver = decode.receiver(new_room(), f"127.0.0.1:{port}")
    assert receiver.wait() == "FAILED"
    assert receiver.failure.code == "timeout"
    for part in ("bootstrap_s", f"room {receiver.room}", f"127.0.0.1:{port}", "Connection refused"):
        assert part in receiver.failure.text
    receiver.clear()
    drained(decode)


def test_p4_an_address_that_is_no_prefill_groups_is_said_so(two: list[Child]) -> None:
    prefill, decode = two[0].start("prefill", admin="127.0.0.1:0"), two[1].start("decode", limits={"bootstrap_s": 1.0})
    other_service, not_http = decode.receiver(new_room(), prefill.admin), decode.receiver(new_room(), decode.address)
    assert other_service.wait() == "FAILED"
    assert (other_service.failure.code, prefill.admin in other_service.failure.text) == ("peer_lost", True)
    assert "answered 404" in other_service.failure.text
    assert not_http.wait() == "FAILED"
    assert (not_http.failure.code, decode.address in not_http.failure.text) == ("timeout", True)
    with pytest.raises(ChildError, match="prefill must be host:port"):
        decode.receiver(new_room(), "somewhere")
    for receiver in (other_service, not_http):
        receiver.clear()
    moved(prefill, decode)
    drained(prefill, decode)


# --- garbage


def test_p5_garbage_on_every_port_disturbs_no_room(two: list[Child], tmp_path: Path) -> None:
    control, bootstrap = [free_port(), free_port()], free_port()
    data = [free_port(), free_port()] if two[0].backend == "local" else []  # the ports of other engines are theirs to guard
    options = [{"port": port} for port in data] or [{}, {}]
    prefill = two[0].start("prefill", port=control[0], bootstrap_port=bootstrap, backend_options=options[0], admin="127.0.0.1:0")
    decode = two[1].start("decode", port=control[1], backend_options=options[1], admin="127.0.0.1:0")
    sender, receiver = in_state("transferring", prefill, decode, gate="mine")
    others = [f"127.0.0.1:{port}" for port in (bootstrap, *data)] + [prefill.admin, decode.admin]
    with Noise([f"127.0.0.1:{port}" for port in control], others, tmp_path / "evaluated") as noise:
        while noise.sent < 2000:
            moved(prefill, decode)
    prefill.open_gate("mine")
    assert (receiver.wait(), sender.wait()) == ("SUCCESS", "SUCCESS")
    assert decode.digest([0, 1]) == prefill.digest([0, 1])
    sender.clear()
    receiver.clear()
    moved(prefill, decode)
    drained(prefill, decode)
    assert not (tmp_path / "evaluated").exists()
    for child, ports in ((prefill, ("control", "bootstrap_port", "admin")), (decode, ("control", "admin"))):
        for port in ports:
            assert child.bad_messages(port) > 10, port
        assert child.work("stats")["peers"] == 1
        assert not child.logged("Traceback")
