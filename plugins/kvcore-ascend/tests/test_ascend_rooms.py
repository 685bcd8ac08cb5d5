"""Rooms between processes over memfabric: peers that are killed, stand still and start again, idle processes, what is submitted."""

from __future__ import annotations

from pathlib import Path

from ascend_pair import LIBRARY, PROTOCOL
from kvcore_conformance import Subject
from kvcore_conformance.stage.footprint import idle_s
from kvcore_conformance.stage.frozen import check_any_engine, check_late_is_seen, check_nothing_late

from tests.engine_nodes import resources
from tests.engine_processes import BRIEF, check_frozen_killed_and_started_again, children, lost, moved, new_room

OPTIONS = {"protocol": PROTOCOL}
IDLE, IDLE_S = 0.04, 2.0  # the engine's own threads wake up twice a second; those of host_rdma never rest


def test_what_comes_late_without_proof_is_seen() -> None:
    check_late_is_seen(Subject("ascend", OPTIONS), ["prefill"])


if PROTOCOL == "sdma":  # with host_rdma the network gives such a call up, in doubt, and its pages wait for quarantine_s

    def test_r3_r5_nothing_comes_late_from_a_writer_that_stands_still() -> None:
        check_nothing_late(Subject("ascend", OPTIONS), ["prefill"])

    def test_r3_r5_nothing_comes_late_to_a_peer_that_stands_still() -> None:
        check_any_engine(Subject("ascend", OPTIONS), "decode", fences=False)


def test_the_vendors_library_moves_the_pages_and_idle_a_process_takes_little() -> None:
    with children("ascend", 2, **OPTIONS) as (prefill, decode):
        prefill.start("prefill")
        decode.start("decode")
        moved(prefill, decode)
        for child in (prefill, decode):
            assert LIBRARY in Path(f"/proc/{child.pid}/maps").read_text()
        for waits in (False, True):
            if waits:
                room = new_room()
                prefill.sender(room)
                decode.receiver(room, prefill).receive([1])
            used = idle_s(prefill, decode, seconds=IDLE_S)
            assert used < IDLE * IDLE_S or PROTOCOL == "host_rdma", f"with a room that waits: {waits}; seconds used: {used}"


def test_p2_p3_killed_frozen_and_started_again() -> None:
    """Nobody has shown that an NPU stops when its process is killed."""
    with children("ascend", 3, **OPTIONS) as (prefill, decode, successor):
        check_frozen_killed_and_started_again(prefill, decode, successor, unproven=True)


def test_killed_peers_leave_what_memfabric_keeps_of_each_and_no_more() -> None:
    with children("ascend", 1, **OPTIONS) as (prefill,):
        prefill.start("prefill", limits=BRIEF)
        seen = []
        for _ in range(3):
            with children("ascend", 1, **OPTIONS) as (doomed,):
                moved(prefill, doomed.start("decode", limits=BRIEF))
                doomed.kill()
            lost(prefill)
            seen.append(resources(prefill.pid))
        files, threads = (last - first for first, last in zip(seen[0], seen[-1], strict=True))
        assert files <= 2 * 8 and threads <= 2 * 16, seen
        assert prefill.work("stats")["counters"].get("released_unproven", 0) == 0
