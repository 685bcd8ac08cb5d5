"""R4, R5, R7: what is known of a peer that is dead, silent, or stands still in the middle of a write."""

from __future__ import annotations

import pytest

from kvcore import Capabilities
from kvcore_conformance.marks import full, rule
from kvcore_conformance.stage.arena import LIMITS, Pair, Room, number, paired
from kvcore_conformance.stage.driver import SOON_S, Crew, stays
from kvcore_conformance.stage.frozen import check_any_engine
from kvcore_conformance.stage.oracle import FILL
from kvcore_conformance.stage.safety import become_safe, fenced
from kvcore_conformance.subject import Subject

# --- R4: evidence


@rule("R4")
def test_r4_a_killed_writer_s_destination_is_released_by_evidence_only(crew: Crew, able: Capabilities) -> None:
    with paired(crew) as pair:
        room = pair.at("in flight")
        pair.prefill.kill()
        assert room.receiver.wait(LIMITS["liveness_s"] + SOON_S) == "FAILED"
        if fenced(able, gone=True):
            become_safe(room, "decode")
        else:
            stays(lambda: not room.receiver.safe_now(), "nothing proves that the dead peer's bytes are all in, and the pages are not safe")
        pair.accept(room)
        pair.intact()


@rule("R4")
@full
def test_r4_silence_of_a_writer_is_no_evidence(crew: Crew, able: Capabilities) -> None:
    with paired(crew) as pair:
        room = pair.at("in flight")
        pair.prefill.freeze()
        assert room.receiver.wait(LIMITS["liveness_s"] + SOON_S) == "FAILED"
        if fenced(able, gone=False):
            become_safe(room, "decode")
        else:
            stays(lambda: not room.receiver.safe_now(), "the writer only stands still, and the pages are not safe", 1.0)
        pair.prefill.thaw()
        pair.release(room)
        if room.receiver.safe():
            assert not room.receiver.unproven
            pair.accept(room)
            pair.transfer()


@rule("R4")
@full
def test_r4_a_write_to_a_killed_reader_is_over_by_evidence_or_by_limit(crew: Crew, able: Capabilities) -> None:
    with paired(crew) as pair:
        room = pair.at("in flight")
        pair.decode.kill()
        assert room.sender.wait(LIMITS["liveness_s"] + SOON_S) == "FAILED"
        assert room.sender.safe(LIMITS["quarantine_s"] + SOON_S), "the source's pages are kept for ever"
        assert not (able.fences_on_disconnect and room.sender.unproven), "the backend declares that disconnect is proof"


# --- R4 and R5: a side that stands still in the middle of a write


@rule("R4")
@full
def test_r4_nothing_comes_late_from_a_writer_that_stood_still(kvcore_subject: Subject, able: Capabilities) -> None:
    check_any_engine(kvcore_subject, "prefill", fences=fenced(able, gone=False))


@rule("R5")
@full
def test_r5_nothing_comes_late_to_a_reader_that_stood_still(kvcore_subject: Subject) -> None:
    check_any_engine(kvcore_subject, "decode", fences=False)


# --- R7


LIES = {
    "orphan_s": ({"orphan_s": 0.75}, ("orphan_s", "0.4", "0.75")),
    "quarantine_s": ({"quarantine_s": 4.5, "liveness_s": 2.0, "ticket_s": 2.0}, ("quarantine_s", "4.5", "6")),
    "ticket_s": ({"quarantine_s": 30.0, "ticket_s": 9.0}, ("quarantine_s", "7", "12")),
}


@rule("R7")
@pytest.mark.parametrize("limit", ["quarantine_s", *(pytest.param(name, marks=full) for name in ("orphan_s", "ticket_s"))])
def test_r7_limits_that_do_not_go_together_are_refused_at_pairing(pair: Pair, crew: Crew, limit: str) -> None:
    changes, words = LIES[limit]
    with crew.lend(1) as (odd,):
        odd.start("decode", pair.target.specs, limits={**LIMITS, **changes})
        chosen = number()
        room = Room(pair.prefill.sender(chosen), odd.receiver(chosen, pair.prefill))
        room.receive()
        assert room.receiver.wait() == "FAILED", "instances whose limits do not go together have paired"
        text = room.receiver.failure.text
        assert room.receiver.failure.code == "incompatible" and all(word in text for word in words), f"it was refused with: {text}"
        room.clear()
    pair.intact()


@rule("R7")
@full
def test_r7_no_write_starts_to_a_peer_not_heard_of_for_liveness_s(crew: Crew) -> None:
    patient = {**LIMITS, "liveness_s": 12.0, "quarantine_s": 20.0}
    with paired(crew, limits={**LIMITS, "quarantine_s": 20.0}, meet=False) as pair, crew.lend(1) as (decode,):
        decode.start("decode", pair.target.specs, limits=patient)
        pair = Pair(pair.prefill, decode, pair.source, pair.target)
        pair.transfer()
        pair.fresh()
        room = pair.at("published")
        pair.expect(room)
        room.send(gate="gate")
        for message in ("Ping", "Join", "Destination", "Abort", "Ack"):
            pair.prefill.tap("drop", message, outgoing=False)
        pair.prefill.freeze()  # what a process misses while it stands still is not held against its peers; but it has heard nothing
        stays(lambda: True, "prefill stands still", LIMITS["liveness_s"] + 0.3)
        pair.prefill.thaw()
        pair.prefill.open_gate("gate")
        stays(lambda: pair.prefill.work("stats")["tickets"] == 1 and not arrived(pair, room), "no write has started", 0.5)
        pair.prefill.heal()
        room.ends("SUCCESS", SOON_S)
        pair.intact()
        room.clear()


def arrived(pair: Pair, room: Room) -> bool:
    """Whether any byte of a room has arrived."""
    return bool((pair.target.pages("kv")[:, list(room.theirs["kv"])] != FILL).any())
