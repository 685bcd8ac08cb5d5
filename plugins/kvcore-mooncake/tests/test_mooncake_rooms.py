"""Rooms over Mooncake: many descriptors, peers that stand still, IPv6, idle processes, ends of processes."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from kvcore_conformance import Subject
from kvcore_conformance.stage.driver import PoolSpec
from kvcore_conformance.stage.footprint import idle_s
from kvcore_conformance.stage.frozen import check_late_is_seen, check_nothing_late
from kvcore_conformance.stage.waits import until
from kvcore_mooncake.backend import ABLE

from kvcore import KVPoll
from tests.engine_nodes import resources
from tests.engine_processes import check_frozen_killed_and_started_again, children, moved, new_room
from tests.helpers import ROOT, Calls, Duo, duo, ended, wait_until

MOST = ABLE.max_descriptors or 0
IDLE_S = 2.0
SCRIPT = """
import sys
from tests.helpers import duo
with duo("mooncake") as pair:
    pair.transfer([3, 1], [2, 5])
    if sys.argv[1] == "open":
        sys.exit(0)
"""


def test_r3_r5_nothing_comes_late_from_or_to_a_peer_that_stands_still() -> None:
    check_nothing_late(Subject("mooncake"))


def test_what_comes_late_without_proof_is_seen() -> None:
    check_late_is_seen(Subject("mooncake"))


def test_more_descriptors_than_the_engine_takes_at_once() -> None:
    pages = list(range(0, 2 * (2 * MOST + 500), 2))
    with duo("mooncake", pages=pages[-1] + 1, layers=1) as pair:
        pair.prefill.add_observer(calls := Calls())
        pair.transfer(pages, pages[::-1])
        sizes = [transfer.length.size for transfer in calls.transfers]
        assert max(sizes) <= MOST and sum(sizes) >= len(pages) and len(sizes) >= 3
        pair.stores_empty()


def test_peers_and_managers_come_and_go_and_leave_nothing() -> None:
    seen = []
    with duo("mooncake") as lasting:
        lasting.transfer([1], [2])
        for _ in range(3):
            with duo("mooncake") as pair:
                pair.transfer([3], [5])
                cross(lasting, pair)
            wait_until(lambda: lasting.prefill.stats().stores["peers"] == 1)
            seen.append(resources())
            lasting.transfer([1], [2])
        steady(seen)


def steady(seen: list[tuple[int, int]]) -> None:
    """Neither files nor threads become more; workers come and go, and one engine alone is more than that."""
    assert all(max(few) <= few[0] + 3 for few in zip(*seen, strict=True)), seen


def cross(one: Duo, other: Duo) -> None:
    """A room from one pair's prefill to the other's decode."""
    sender = one.prefill.sender(7)
    with sender, other.decode.receiver(7, one.prefill.address) as receiver:
        receiver.receive([9])
        sender.send([8], last=True)
        ended(sender, KVPoll.SUCCESS)
        ended(receiver, KVPoll.SUCCESS)


def test_over_ipv6_and_when_idle_a_process_takes_less_than_two_percent() -> None:
    with children("mooncake", 2) as (prefill, decode):
        prefill.start("prefill", host="::1")
        decode.start("decode", host="::1")
        moved(prefill, decode)
        for waits in (False, True):
            if waits:
                room = new_room()
                prefill.sender(room)
                decode.receiver(room, prefill).receive([1])
            used = idle_s(prefill, decode, seconds=IDLE_S)
            assert used < 0.02 * IDLE_S, f"with a room that waits: {waits}; seconds used: {used}"


def test_p2_p3_killed_frozen_and_started_again() -> None:
    """The last bytes of the dead may still wait in a socket here."""
    with children("mooncake", 3) as (prefill, decode, successor):
        check_frozen_killed_and_started_again(prefill, decode, successor, unproven=True)


@pytest.mark.parametrize("end", ["closed", "open"])
def test_a_process_ends_well(end: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, end], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "Traceback" not in done.stderr
    assert not re.search(r"^[IW]\d{4} ", done.stderr, re.MULTILINE), "the engine tells more than errors"


@pytest.mark.slow
def test_20_killed_processes_and_200_managers_leave_nothing() -> None:
    seen, sizes = [], []
    with duo("mooncake") as lasting, children("mooncake", 1) as (prefill,):
        prefill.start("prefill", [PoolSpec("kv", 32, 64, 2)], backend="mooncake")
        for _ in range(20):
            with children("mooncake", 1) as (guest,):
                guest.start("decode", [PoolSpec("kv", 32, 64, 2)], backend="mooncake")
                moved(prefill, guest)
            until(lambda: prefill.work("stats")["stores"]["peers"] == 0, "a killed peer is forgotten", 20.0)
            seen.append(resources(prefill.pid))
            until(lambda: resources(prefill.pid)[0] <= seen[0][0] + 3, "the engine has hung up, which it does by and by", 20.0)
            seen[-1] = resources(prefill.pid)
        steady(seen)
        seen.clear()
        for _ in range(100):
            with duo("mooncake") as pair:
                pair.transfer([3], [5])
                cross(lasting, pair)
            seen.append(resources())
            sizes.append(resident())
    steady(seen)
    assert sizes[-1] - sizes[10] < 8 << 20, sizes


def resident() -> int:
    """Bytes of memory that this process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
