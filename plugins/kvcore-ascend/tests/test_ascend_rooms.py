"""Rooms between processes over memfabric: peers that are killed, stand still and start again, idle processes, what is submitted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ascend_pair import LIBRARY, PROTOCOL
from kvcore_conformance import Subject
from kvcore_conformance.stage.driver import SOON_S, Child, free_port, until
from kvcore_conformance.stage.footprint import idle_s
from kvcore_conformance.stage.frozen import check_any_engine, check_late_is_seen, check_nothing_late

from tests.engine_nodes import resources

OPTIONS = {"protocol": PROTOCOL}
BRIEF = {"liveness_s": 1.5, "ticket_s": 2.5, "quarantine_s": 4.5}
IDLE, IDLE_S = 0.04, 2.0  # the engine's own threads wake up twice a second; those of host_rdma never rest
_rooms = itertools.count(1)


@contextmanager
def children(number: int) -> Iterator[list[Child]]:
    found = [Child(backend="ascend", options=OPTIONS) for _ in range(number)]
    try:
        yield found
    finally:
        for child in found:
            child.end()


def moved(prefill: Child, decode: Child) -> bool:
    """Whether a room works: a chunk, an empty one and the last, which is empty too."""
    room = next(_rooms)
    sender, receiver = prefill.sender(room), decode.receiver(room, prefill)
    receiver.receive([5, 1, 7])
    for pages in ([2, 9], [], [3]):
        sender.send(pages)
    sender.send(last=True)
    well = (receiver.wait(20.0), sender.wait(20.0)) == ("SUCCESS", "SUCCESS")
    well = well and decode.digest([5, 1, 7]) == prefill.digest([2, 9, 3])
    sender.clear()
    receiver.clear()
    return well


def test_what_comes_late_without_proof_is_seen() -> None:
    check_late_is_seen(Subject("ascend", OPTIONS), ["prefill"])


if PROTOCOL == "sdma":  # with host_rdma the network gives such a call up, in doubt, and its pages wait for quarantine_s

    def test_r3_r5_nothing_comes_late_from_a_writer_that_stands_still() -> None:
        check_nothing_late(Subject("ascend", OPTIONS), ["prefill"])

    def test_r3_r5_nothing_comes_late_to_a_peer_that_stands_still() -> None:
        check_any_engine(Subject("ascend", OPTIONS), "decode", fences=False)


def test_the_vendors_library_moves_the_pages_and_idle_a_process_takes_little() -> None:
    with children(2) as (prefill, decode):
        prefill.start("prefill")
        decode.start("decode")
        assert moved(prefill, decode)
        for child in (prefill, decode):
            assert LIBRARY in Path(f"/proc/{child.pid}/maps").read_text()
        for waits in (False, True):
            if waits:
                room = next(_rooms)
                prefill.sender(room)
                decode.receiver(room, prefill).receive([1])
            used = idle_s(prefill, decode, seconds=IDLE_S)
            assert used < IDLE * IDLE_S or PROTOCOL == "host_rdma", f"with a room that waits: {waits}; seconds used: {used}"


def test_p2_p3_killed_frozen_and_started_again() -> None:
    port = {"bootstrap_port": free_port()}
    with children(3) as (prefill, decode, successor):
        prefill.start("prefill", limits=BRIEF, **port)
        decode.start("decode", limits=BRIEF)
        assert moved(prefill, decode)
        for side, other in ((prefill, decode), (decode, prefill)):
            side.freeze()
            until(lambda other=other: other.work("stats")["peers"] == 0, "it is lost", BRIEF["liveness_s"] + SOON_S)  # type: ignore[misc]
            side.thaw()
            until(lambda: moved(prefill, decode), "rooms work again", 20.0)
        prefill.kill()
        until(lambda: decode.work("stats")["peers"] == 0, "it is lost: until then a new room may still ask for the dead")
        successor.start("prefill", limits=BRIEF, **port)
        assert moved(successor, decode)
        room = next(_rooms)
        sender, waiting = successor.sender(room), decode.receiver(room, successor)
        waiting.receive([1])
        assert sender.until("WAITING_FOR_INPUT") == "WAITING_FOR_INPUT"
        successor.kill()
        assert waiting.wait(BRIEF["liveness_s"] + SOON_S) == "FAILED"
        assert waiting.failure.code == "peer_lost"
        assert waiting.safe(BRIEF["quarantine_s"] + SOON_S)
        assert waiting.unproven  # nobody has shown that an NPU stops when its process is killed
        waiting.clear()
        until(lambda: decode.work("held") == {}, "no room is held")


def test_killed_peers_leave_what_memfabric_keeps_of_each_and_no_more() -> None:
    with children(1) as (prefill,):
        prefill.start("prefill", limits=BRIEF)
        seen = []
        for _ in range(3):
            with children(1) as (doomed,):
                assert moved(prefill, doomed.start("decode", limits=BRIEF))
                doomed.kill()
            until(lambda: prefill.work("stats")["peers"] == 0, "it is lost", BRIEF["liveness_s"] + SOON_S)
            seen.append(resources(prefill.pid))
        files, threads = (last - first for first, last in zip(seen[0], seen[-1], strict=True))
        assert files <= 2 * 8 and threads <= 2 * 16, seen
        assert prefill.work("stats")["counters"].get("released_unproven", 0) == 0
