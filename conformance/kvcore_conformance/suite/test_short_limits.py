"""R2 and R7: what follows from a silence and from a write given up, on a prefill side whose limits for both are short."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcore_conformance.marks import rule
from kvcore_conformance.stage.arena import LIMITS, Room, number
from kvcore_conformance.stage.crew import Crew
from kvcore_conformance.stage.driver import Child
from kvcore_conformance.stage.impatient import TRIES
from kvcore_conformance.stage.waits import SOON_S, stays

SHORT = {"liveness_s": 0.3, "ticket_s": 0.15, "quarantine_s": 0.5, "orphan_s": 0.2}
LOOK_S = 0.1
PAGES = {"kv": [1, 2, 3]}


@pytest.fixture(scope="module")
def hasty(crew: Crew) -> Iterator[tuple[Child, Child]]:
    """A prefill and a decode process. What prefill tells of its limits is what decode takes, and not what they are."""
    with crew.lend(2) as (prefill, decode):
        prefill.work("pretend", quarantine_s=LIMITS["quarantine_s"])
        prefill.start("prefill", limits={**LIMITS, **SHORT})
        decode.start("decode", limits={**LIMITS, "orphan_s": SHORT["orphan_s"]})
        yield prefill, decode


def published(prefill: Child, decode: Child) -> Room:
    """A room whose destination is known, unless a stall has ended it."""
    chosen = number()
    room = Room(prefill.sender(chosen), decode.receiver(chosen, prefill))
    room.receiver.receive(PAGES)
    room.sender.until("WAITING_FOR_INPUT", "FAILED")
    return room


def partings(child: Child) -> int:
    """How often a process has lost its peer: what was known of it is gone then, and pages may be safe by other evidence (R4)."""
    return len([line for line in child.events(500) if " peer_lost " in line])


@rule("R7")
def test_r7_no_write_starts_to_a_peer_not_heard_of_for_liveness_s(hasty: tuple[Child, Child]) -> None:
    prefill, decode = hasty
    for _ in range(TRIES):  # a machine that stands still has the peer lost, and the room with it
        decode.work("wipe")
        room = published(prefill, decode)
        room.sender.send(PAGES, last=True, gate=f"gate {room.number}")
        for message in ("Ping", "Join", "Destination", "Abort", "Ack"):
            prefill.tap("drop", message, outgoing=False)
        prefill.freeze()  # what a process misses while it stands still is not held against its peers; but it has heard nothing
        stays(lambda: True, "prefill stands still", SHORT["liveness_s"] + 0.05)
        prefill.thaw()
        prefill.open_gate(f"gate {room.number}")
        stays(lambda: not decode.touched(), "prefill has heard nothing of its peer for liveness_s, and no write has started", LOOK_S)
        found = room.sender.poll()
        room.clear()
        prefill.heal()
        if found == "TRANSFERRING":
            return
    raise AssertionError(f"of {TRIES} rooms none was still there when prefill had heard nothing for liveness_s: the last was {found}")


@rule("R2")
def test_r2_a_write_given_up_without_proof_is_never_called_drained(hasty: tuple[Child, Child]) -> None:
    prefill, decode = hasty
    for _ in range(TRIES):
        before = partings(decode)
        room = published(prefill, decode)
        prefill.fault("fail", room=room.number, quiescent=False)
        room.sender.send(PAGES, last=True)
        ended = room.receiver.wait(), room.sender.wait()
        expired = room.sender.safe(SOON_S) and room.sender.unproven
        safe = room.receiver.safe(LOOK_S) and not room.receiver.unproven
        room.clear()
        if ended == ("FAILED", "FAILED") and expired and partings(decode) == before:
            assert not safe, "prefill gave a write up at its quarantine_s, and decode's pages are safe: it was told that they are drained"
            return
    raise AssertionError(f"of {TRIES} rooms none had its write given up while the two knew each other: the last ended as {ended}")
