"""Real processes over mori: what is killed, frozen, started again; and how a process ends that has used it."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from kvcore_conformance import Subject
from kvcore_conformance.stage.driver import SOON_S, Child, Crew, PoolSpec, free_port, until
from kvcore_conformance.stage.frozen import check_any_engine, check_late_is_seen, check_nothing_late

from tests.engine_nodes import resources
from tests.helpers import ROOT, Calls, duo, wait_until

PATIENT = {"KV_SOFTVERBS_ACK_TIMEOUT_MS": "60000"}
"""A card that goes on retrying, so that a write to a process that stands still stays in flight."""
BIG = PoolSpec(pages=24, page_bytes=1 << 20, layers=2)
BRIEF = {"liveness_s": 1.5, "ticket_s": 2.5, "quarantine_s": 4.5}
_rooms = itertools.count(1)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    crew = Crew(PATIENT, "mori")
    try:
        yield crew
    finally:
        crew.end()


def moved(prefill: Child, decode: Child) -> None:
    """A room works, and is cleared."""
    room = next(_rooms)
    sender, receiver = prefill.sender(room), decode.receiver(room, prefill)
    receiver.receive([5, 1, 7])
    sender.send([2, 9, 3], last=True)
    assert (receiver.wait(), sender.wait()) == ("SUCCESS", "SUCCESS"), decode.call(receiver.name, "failure")
    assert decode.digest([5, 1, 7]) == prefill.digest([2, 9, 3])
    sender.clear()
    receiver.clear()


def holds_nothing(child: Child, peers: int) -> None:
    """Every store of rooms is empty, and of peers only those that live are known."""
    until(lambda: child.work("held") == {}, f"no room is held: {child.work('held')}")
    until(lambda: child.work("stats")["peers"] == peers, f"{peers} peers live")


def test_r3_r5_nothing_comes_late_to_a_process_that_stood_still() -> None:
    check_nothing_late(Subject("mori", env=PATIENT), sides=["decode"])


def test_r3_nothing_comes_late_from_a_process_that_stood_still() -> None:
    """Its writes go on without it, as with a card, so none is caught in the middle."""
    check_any_engine(Subject("mori", env=PATIENT), "prefill", fences=False)


def test_what_comes_late_without_proof_is_seen() -> None:
    check_late_is_seen(Subject("mori", env=PATIENT), sides=["decode"])


@pytest.mark.parametrize("role", ["prefill", "both"])
def test_r4_a_write_to_a_killed_process_is_proved_to_be_over(crew: Crew, role: str) -> None:
    with crew.lend(2) as (prefill, doomed):
        prefill.start(role, [BIG], limits=BRIEF)
        doomed.start("decode", [BIG], limits=BRIEF)
        moved(prefill, doomed)
        sender = prefill.sender(next(_rooms))
        doomed.receiver(sender.room, prefill).receive(range(24))
        assert sender.until("WAITING_FOR_INPUT") == "WAITING_FOR_INPUT"
        doomed.freeze()
        sender.send(range(24), last=True)
        until(lambda: prefill.work("held").get("ledger_tickets") == 1, "a ticket is in flight")
        assert not sender.safe(0.2)
        doomed.kill()
        assert sender.wait(BRIEF["liveness_s"] + SOON_S) == "FAILED"
        assert sender.failure.code in ("peer_lost", "backend")
        assert sender.safe(BRIEF["quarantine_s"] + SOON_S)
        assert sender.unproven == (role == "both")  # a side that is written to as well proves nothing by a disconnect
        sender.clear()
        holds_nothing(prefill, peers=0)


def test_p2_p3_killed_frozen_and_started_again(crew: Crew) -> None:
    ports = {"bootstrap_port": free_port()}
    with crew.lend(3) as (prefill, decode, successor):
        prefill.start("prefill", limits=BRIEF, **ports)
        decode.start("decode", limits=BRIEF)
        moved(prefill, decode)
        for side in (prefill, decode):
            side.freeze()
            other = decode if side is prefill else prefill
            until(lambda other=other: other.work("stats")["peers"] == 0, "it is lost", BRIEF["liveness_s"] + SOON_S)  # type: ignore[misc]
            side.thaw()
            moved(prefill, decode)
        prefill.kill()
        until(lambda: decode.work("stats")["peers"] == 0, "it is lost: until then a new room may still ask for the dead")
        successor.start("prefill", limits=BRIEF, **ports)
        moved(successor, decode)
        room = next(_rooms)
        sender, waiting = successor.sender(room), decode.receiver(room, successor)
        waiting.receive([1])
        assert sender.until("WAITING_FOR_INPUT") == "WAITING_FOR_INPUT"
        successor.kill()
        assert waiting.wait(BRIEF["liveness_s"] + SOON_S) == "FAILED"
        assert waiting.failure.code == "peer_lost"
        assert waiting.safe(BRIEF["quarantine_s"] + SOON_S)
        assert not waiting.unproven  # the queue pairs of the dead ended with it
        waiting.clear()
        holds_nothing(decode, peers=0)


def test_many_descriptors_go_in_parts_that_a_queue_pair_holds() -> None:
    pages = list(range(0, 2 * 5000, 2))
    with duo("mori", pages=pages[-1] + 1, layers=2) as pair:
        pair.prefill.add_observer(calls := Calls())
        pair.transfer(pages, pages[::-1])
        sizes = [transfer.length.size for transfer in calls.transfers]
        assert max(sizes) <= 2048 and sum(sizes) >= 2 * len(pages)
        pair.stores_empty()


def test_managers_opened_and_closed_leave_nothing() -> None:
    seen = []
    for _ in range(5):
        with duo("mori") as pair:
            pair.transfer([1, 2, 5], [3, 4, 9])
        seen.append(resources())
    wait_until(lambda: all(now <= then for now, then in zip(resources(), seen[1], strict=True)), what=f"files and threads: {seen}")


ENDS = """
import sys
from tests.helpers import duo
with duo("mori") as pair:
    pair.transfer([3, 1], [2, 5])
    print("libmori_io.so" in open("/proc/self/maps").read())
    if sys.argv[1] == "open":
        sys.exit(0)
"""


@pytest.mark.parametrize("end", ["closed", "open"])
def test_a_process_ends_well_and_says_nothing(end: str) -> None:
    done = subprocess.run([sys.executable, "-c", ENDS, end], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert not re.search(r"Traceback|\[io\]", done.stderr), done.stderr
