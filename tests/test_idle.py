"""Idle costs nothing: CPU time of processes without rooms, and of those whose many rooms wait (C108)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from kvcore import KVPoll, Limits
from tests.helpers import stays
from tests.processes.driver import Child, until

ROLES, ROOMS = ("prefill", "decode"), 5000
WINDOW_S, STEP_S = 7.0, 0.5
"""How long CPU time is measured, and in which steps."""
SETTLED_S = 4.25
"""From when the last room was opened until it has said four times that it is there, after 0.25 s and each time twice as long; the
fifth, 8 s after it was opened, falls into the window, and the sixth does not."""


@pytest.fixture(scope="module")
def two() -> Iterator[list[Child]]:
    """A prefill and a decode process as they are by default, paired."""
    children = [Child(), Child()]
    try:
        prefill, decode = (child.start(role, limits=Limits().model_dump()) for child, role in zip(children, ROLES, strict=True))
        sender, receiver = prefill.sender(0), decode.receiver(0, prefill)
        receiver.receive([1])
        sender.send([1], last=True)
        assert receiver.wait() == sender.wait() == "SUCCESS"
        sender.clear()
        receiver.clear()
        yield children
    finally:
        for child in children:
            child.end()


def measured(children: list[Child], steps: int) -> list[list[float]]:
    """For each process its CPU seconds in each of so many steps."""
    stamps = [[float(child.work("cpu_s")) for child in children]]
    for _ in range(steps):
        stays(lambda: all(child.running for child in children), STEP_S)
        stamps.append([float(child.work("cpu_s")) for child in children])
    series = zip(*stamps, strict=True)
    return [[later - earlier for earlier, later in pairwise(one)] for one in series]


def test_without_rooms_a_process_takes_less_than_one_percent(two: list[Child]) -> None:
    measured(two, 1)  # what pairing and clearing still had to do
    for child, steps in zip(two, measured(two, 6), strict=True):
        share = sum(steps) / (len(steps) * STEP_S)
        print(f"{child.instance}: {share:.2%}")
        assert share < 0.01


def test_5000_waiting_rooms_take_less_than_three_percent_and_are_polled_within_50_ms(two: list[Child]) -> None:
    """Senders that wait for a destination, and as many that wait for input; receivers that wait for either.

    A receiver repeats that it is there, ever more rarely and at last every ``orphan_s``. So a process's share over a long time is what it
    takes when nothing happens, and once per ``orphan_s`` what one round of these repetitions takes. Both are measured.
    """
    prefill, decode = two
    prefill.work("open_many", "sender", 1, ROOMS)
    decode.work("open_many", "receiver", 1, ROOMS, prefill.address)
    stays(lambda: prefill.running and decode.running, SETTLED_S)
    for child in two:
        until(lambda child=child: _waiting(child), f"all rooms of {child.instance} wait for input or a destination")
    for child, steps in zip(two, measured(two, int(WINDOW_S / STEP_S)), strict=True):
        still = sorted(steps)[len(steps) // 4] / STEP_S
        a_round = sum(steps) - still * WINDOW_S
        share = still + a_round / Limits().orphan_s
        print(f"{child.instance}: {still:.2%} when nothing happens, a round {a_round:.2f} s, in all {share:.2%}")
        assert share < 0.03
        assert a_round > 0.01, "the round was not within the window"
        assert min(_poll_s(child) for _ in range(3)) < 0.05
        assert _waiting(child), "nothing became of any room meanwhile"


def _waiting(child: Child) -> bool:
    states = child.work("poll_many")
    received = states.count(KVPoll.WAITING_FOR_INPUT)
    return received >= ROOMS // 2 and received + states.count(KVPoll.BOOTSTRAPPING) == ROOMS


def _poll_s(child: Child) -> float:
    child.work("poll_many")
    return child.took_s
