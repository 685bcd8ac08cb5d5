"""R4, R5, R7: what is known of a peer that is dead, silent, or stands still in the middle of a write."""

from __future__ import annotations

import pytest

from kvcore import Capabilities
from kvcore_conformance.marks import full, rule
from kvcore_conformance.stage.arena import LIMITS, Pair, Room, number, paired
from kvcore_conformance.stage.crew import Crew
from kvcore_conformance.stage.frozen import check_any_engine
from kvcore_conformance.stage.safety import become_safe, fenced
from kvcore_conformance.stage.waits import SOON_S, stays
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
        assert room.receiver.safe(LIMITS["quarantine_s"] + SOON_S), "the writer goes on and its write has ended, and the pages are not safe"
        if not room.receiver.unproven:  # by evidence, and not by limit: R3
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


@rule("R4")
@full
def test_r4_only_the_instance_that_was_given_the_destination_can_call_it_drained(pair: Pair, crew: Crew) -> None:
    with crew.lend(1) as (other,):
        other.start("prefill", pair.source.specs, limits=LIMITS)
        pair.decode.work("aid", "impostor:Impostor", "tap")
        Pair(other, pair.decode, pair.source, pair.target).transfer()
        room = pair.at("in flight")
        room.receiver.abort("enough of it")
        room.ends("FAILED")
        pair.decode.call("tap", "drained", room.number, other.instance)
        stays(lambda: not room.receiver.safe_now(), "another instance than the destination's calls it drained, and the pages are not safe")
        pair.decode.call("tap", "drained", room.number, pair.prefill.instance)
        assert room.receiver.safe(), "the destination's instance calls it drained, and the pages are not safe"
        pair.release(room)
        pair.accept(room)
        room.sender.safe()
        room.clear()


# --- R4 and R5: a side that stands still in the middle of a write


@rule("R4")
@full
def test_r4_nothing_comes_late_from_a_writer_that_stood_still(kvcore_subject: Subject, crew: Crew, able: Capabilities) -> None:
    check_any_engine(kvcore_subject, "prefill", fenced(able, gone=False), crew)


@rule("R5")
@full
def test_r5_nothing_comes_late_to_a_reader_that_stood_still(kvcore_subject: Subject, crew: Crew) -> None:
    check_any_engine(kvcore_subject, "decode", False, crew)


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
