"""Faults, injected into the subject by ``kvcore.faults``: whatever one call does wrong stays in its room or its peer (T7)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvcore_conformance.fixtures import Standing
from kvcore_conformance.marks import full, rule
from kvcore_conformance.stage.arena import BRIEF, LIMITS, Pair, Room, number, paired
from kvcore_conformance.stage.crew import Crew
from kvcore_conformance.stage.driver import Child
from kvcore_conformance.stage.waits import SOON_S, until

ERRORS = ("SystemExit", "RuntimeError", "KeyboardInterrupt", "GeneratorExit", "MemoryError", "StopIteration", "BaseException")
"""What an engine's binding may raise. A thread that lets one of them pass ends."""
UNPROVEN: dict[str, tuple[str, dict[str, Any]]] = {
    "raises": ("raise_", {"error": "RuntimeError"}),
    "raises in poll": ("raise_", {"error": "RuntimeError", "hook": "kvcore_poll"}),
    "fails": ("fail", {"quiescent": False}),
    "fails at once": ("fail", {"quiescent": False, "hook": "kvcore_transfer"}),
    "posts half of it": ("partial", {}),
}
"""Faults after which a write may go on, so that its pages wait."""


@pytest.fixture(scope="module")
def faulty_standing(crew: Crew) -> Iterator[Standing]:
    """Keeps the pair of ``faulty``."""
    standing = Standing(crew)
    yield standing
    standing.drop()


@pytest.fixture
def faulty(faulty_standing: Standing, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A pair like ``pair``, for faults after which pages wait for ``quarantine_s``."""
    yield from faulty_standing.lent(request)


def thinned(names: tuple[str, ...], quick: int) -> list[Any]:
    """The first ones for both profiles, the others for the full one."""
    return [*names[:quick], *(pytest.param(name, marks=full) for name in names[quick:])]


@contextmanager
def beside(pair: Pair) -> Iterator[None]:
    """While something goes wrong another room is in flight. It goes well, and so does one after it."""
    other = pair.open()
    other.mine, other.theirs = {"kv": (20, 22)}, {"kv": (25, 26)}
    other.receive()
    pair.expect(other)
    pair.prefill.hold(other.number)
    other.send()
    until(lambda: pair.prefill.held_writes(other.number) == 1, "a write is in flight")
    yield
    pair.prefill.heal()
    other.ends("SUCCESS")
    pair.intact()
    other.clear()
    pair.transfer()


def struck(pair: Pair, kind: str, **where: Any) -> Room:
    """A room that has been handed over, and one fault that is about it."""
    room = pair.at("published")
    pair.expect(room)
    pair.prefill.fault(kind, "fault", room=room.number, **where)
    room.send()
    return room


def failed(pair: Pair, room: Room, *words: str) -> None:
    """Both sides of a room fail soon and say why."""
    room.ends("FAILED")
    for handle in (room.sender, room.receiver):
        failure = handle.failure
        assert failure.code == "backend" and all(word in failure.text for word in words), f"{handle.child.role} has failed with: {failure}"
    pair.accept(room)


@rule("T7", "Faults")
@pytest.mark.parametrize("hook", ["kvcore_poll", "kvcore_transfer"])
def test_t7_a_ticket_that_fails_fails_its_room_only(pair: Pair, hook: str) -> None:
    with beside(pair):
        room = struck(pair, "fail", reason="a made up failure", hook=hook)
        failed(pair, room, "a made up failure")
        for handle in (room.sender, room.receiver):
            assert handle.safe() and not handle.unproven, f"it failed quiescent, and {handle.child.role}'s pages are kept"
        room.clear()
    pair.empties()


@rule("T7", "Faults")
@pytest.mark.parametrize(
    ("kind", "how"), [("retry", {"times": 3}), ("delay", {"seconds": 0.1}), ("delay", {"seconds": 0.1, "hook": "kvcore_poll"})]
)
def test_t7_a_ticket_that_is_late_is_in_time_for_its_room(pair: Pair, kind: str, how: dict[str, Any]) -> None:
    with beside(pair):
        room = struck(pair, kind, **how)
        room.ends("SUCCESS")
        room.clear()
    pair.empties()


@rule("T7", "Faults")
@pytest.mark.parametrize("error", thinned(ERRORS, 1))
@pytest.mark.parametrize("hook", ["kvcore_transfer", pytest.param("kvcore_poll", marks=full)])
def test_t7_whatever_a_transfer_raises_ends_its_room_only(faulty: Pair, hook: str, error: str) -> None:
    with beside(faulty):
        room = struck(faulty, "raise_", error=error, hook=hook)
        failed(faulty, room, error)
        room.clear()


@rule("T7", "Faults")
@pytest.mark.parametrize("what", thinned(tuple(UNPROVEN), 0))
def test_t7_a_write_that_may_go_on_ends_its_room_only(faulty: Pair, what: str) -> None:
    kind, where = UNPROVEN[what]
    with beside(faulty):
        room = struck(faulty, kind, **where)
        failed(faulty, room)
        room.clear()


@rule("T7", "Faults")
@pytest.mark.parametrize("error", thinned(ERRORS, 1))
def test_t7_an_abort_that_raises_keeps_nothing(pair: Pair, error: str) -> None:
    room = pair.at("in flight")
    pair.prefill.fault("raise_", room=room.number, hook="kvcore_abort", error=error)
    room.receiver.abort("enough of it")
    room.ends("FAILED")
    with beside(pair):
        pair.release(room)
        assert room.sender.safe() and room.receiver.safe(), "the write has ended, and its pages are kept"
        pair.accept(room)
        room.clear()
    pair.empties()


@rule("T7", "Faults")
@pytest.mark.parametrize("hook", ["kvcore_clear", "kvcore_held_rooms"])
@pytest.mark.parametrize("error", thinned(ERRORS, 1))
def test_t7_a_clear_that_raises_keeps_nothing(pair: Pair, hook: str, error: str) -> None:
    with beside(pair):
        pair.prefill.fault("raise_", hook=hook, error=error, times=1)
        room = pair.open()
        room.mine, room.theirs = {"kv": (1,)}, {"kv": (1,)}
        pair.expect(room)
        room.receive()
        room.send()
        room.ends("SUCCESS")
        room.clear()
    pair.empties()


def joined_by(pair: Pair, late: Child) -> Room:
    """A room between the pair's prefill side and another decode process."""
    chosen = number()
    return Room(pair.prefill.sender(chosen), late.receiver(chosen, pair.prefill))


@rule("T7", "Faults")
@pytest.mark.parametrize("hook", ["kvcore_connect", pytest.param("kvcore_endpoint", marks=full)])
@pytest.mark.parametrize("error", thinned(ERRORS, 1))
def test_t7_whatever_pairing_raises_ends_rooms_of_that_peer_only(pair: Pair, crew: Crew, hook: str, error: str) -> None:
    with crew.lend(1) as (late,):
        late.start("decode", pair.target.specs, limits=LIMITS)
        with beside(pair):
            pair.prefill.fault("raise_", hook=hook, error=error, times=1)
            room = joined_by(pair, late)
            assert room.receiver.wait() == "FAILED", "it has paired"
            assert room.receiver.failure.code == "backend", f"it failed with {room.receiver.failure}"
            room.clear()
        Pair(pair.prefill, late, pair.source, pair.target).transfer()


@rule("T7", "Faults")
def test_t7_a_peer_that_cannot_be_reached_stalls_no_other(pair: Pair, crew: Crew) -> None:
    with crew.lend(1) as (late,):
        late.start("decode", pair.target.specs, limits=LIMITS)
        pair.prefill.fault("hold", "connecting", hook="kvcore_connect", times=1)
        room = joined_by(pair, late)
        until(lambda: pair.prefill.call("connecting", "held") == 1, "a peer is being connected")
        pair.transfer()
        assert room.receiver.poll() == "BOOTSTRAPPING"
        pair.prefill.call("connecting", "release")
        assert room.receiver.until("WAITING_FOR_INPUT") == "WAITING_FOR_INPUT"
        room.clear()


@rule("T7", "Faults")
@pytest.mark.parametrize("error", thinned(ERRORS, 1))
def test_t7_whatever_a_disconnect_raises_the_others_go_on(pair: Pair, crew: Crew, error: str) -> None:
    with crew.lend(1) as (late,):
        late.start("decode", pair.target.specs, limits=LIMITS)
        room = joined_by(pair, late)
        assert room.receiver.until("WAITING_FOR_INPUT") == "WAITING_FOR_INPUT"
        room.clear()
        pair.prefill.fault("raise_", hook="kvcore_disconnect", error=error)
        late.stopped()
        until(lambda: pair.prefill.work("stats")["peers"] == 1, "the peer that has left is known no more")
        with beside(pair):
            pass


@rule("T7", "Faults")
@full
def test_t7_after_all_faults_and_limits_nothing_is_kept(crew: Crew) -> None:
    with paired(crew, limits=BRIEF) as pair:
        for kind, where in (*UNPROVEN.values(), ("drop_done", {})):
            room = struck(pair, kind, **where)
            room.ends("FAILED")
            room.clear()
            pair.accept(room)
        pair.prefill.work("heal")
        pair.empties(BRIEF["quarantine_s"] + SOON_S)
        pair.transfer()
