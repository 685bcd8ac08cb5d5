"""Idle costs nothing: CPU time of processes without rooms, and of those whose many rooms wait (C108)."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice
from unittest.mock import Mock

import pytest
from kvcore_conformance.stage.driver import Child
from kvcore_conformance.stage.waits import until

from kvcore import KVPoll, Limits
from kvcore.protocol import events as ev
from kvcore.rooms import RoomTable
from kvcore.states import RoomId
from tests.helpers import SOON_S, cpu_s, manager, memory, number, stays, wait_until

ROLES, ROOMS = ("prefill", "decode"), 5000
STEP_S, STEPS = 0.5, 5
"""CPU time is measured over so many steps, 2.5 s."""
SETTLED_S = 40.0
"""How long it may take until receivers that wait have nearly fallen silent: they repeat that they are there after 0.25 s, 0.5 s, 1 s and
so on, at last every ``orphan_s``, 30 s, or up to half as long."""


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


def steps_of(children: list[Child]) -> Iterator[list[float]]:
    """Again and again, the share of a CPU that each process took in the last step."""
    while True:
        before = [(child.work("cpu_s"), time.monotonic()) for child in children]
        stays(lambda: all(child.running for child in children), STEP_S)
        yield [(child.work("cpu_s") - cpu) / (time.monotonic() - at) for child, (cpu, at) in zip(children, before, strict=True)]


def shares(children: list[Child]) -> list[float]:
    """The share of a CPU that each process takes."""
    steps = list(islice(steps_of(children), STEPS))
    return [sum(series) / STEPS for series in zip(*steps, strict=True)]


def settled(children: list[Child], most: float) -> bool:
    """Wait for a stretch of time in which no process takes more than that share."""
    latest: deque[list[float]] = deque(maxlen=STEPS)
    deadline = time.monotonic() + SETTLED_S
    for step in steps_of(children):
        latest.append(step)
        if len(latest) == STEPS and all(sum(series) / STEPS < most for series in zip(*latest, strict=True)):
            return True
        if time.monotonic() > deadline:
            return False
    return False


def test_without_rooms_a_process_takes_less_than_one_percent(two: list[Child]) -> None:
    next(steps_of(two))  # what pairing and clearing still had to do
    found = shares(two)
    print([f"{share:.2%}" for share in found])
    assert max(found) < 0.01


def test_c108_5000_waiting_rooms_take_less_than_three_percent_and_are_polled_within_50_ms(two: list[Child]) -> None:
    """First those that wait alone: senders nobody joins, receivers whose prefill is not there. Then receivers join the senders, and
    half of them publish their destination, so that both sides of a room wait for input."""
    prefill, decode = two
    prefill.work("open_many", "sender", 1, ROOMS)
    decode.work("open_many", "receiver", ROOMS + 1, ROOMS, "127.0.0.1:9")
    next(steps_of(two))
    found = shares(two)
    print([f"{share:.2%}" for share in found])
    assert max(found) < 0.03
    assert all(count(child) == {"BOOTSTRAPPING": ROOMS} for child in two)
    decode.work("open_many", "receiver", 1, ROOMS, prefill.address)
    until(lambda: count(decode) == {"WAITING_FOR_INPUT": ROOMS}, "all receivers have joined", 60.0)
    half = {"WAITING_FOR_INPUT": ROOMS // 2, "BOOTSTRAPPING": ROOMS // 2}
    until(lambda: count(prefill) == half, "all destinations have come", 60.0)
    assert settled(two, 0.03)
    assert count(decode) == {"WAITING_FOR_INPUT": ROOMS} and count(prefill) == half
    for child in two:
        assert min(_poll_s(child) for _ in range(3)) < 0.05


def count(child: Child) -> Counter[str]:
    """How many of a process's rooms are in each state."""
    return Counter(KVPoll(state).name for state in child.work("poll_many"))


def _poll_s(child: Child) -> float:
    child.work("poll_many")
    return child.took_s


def test_c108_thousands_of_rooms_that_wait_for_a_peer_do_not_slow_the_control_thread() -> None:
    """What it does at each turn does not grow with the rooms that still look for their prefill."""
    with manager("decode", memory(4), limits={"bootstrap_s": 60.0}) as decode:
        handles = [decode.receiver(number(), "127.0.0.1:9") for _ in range(3000)]
        wait_until(lambda: decode.stats().stores["searches"] == len(handles))
        before = cpu_s()
        for _ in range(200):
            turned = threading.Event()
            decode.control.call(turned.set)
            assert turned.wait(SOON_S)
        assert cpu_s() - before < 0.5
        for handle in handles:
            handle.clear()


@pytest.mark.parametrize(("room", "rounds"), [(RoomId(16), 9), (RoomId(31), 17)])
def test_a_waiting_receiver_repeats_ever_more_rarely_and_at_last_every_orphan_s(room: RoomId, rounds: int) -> None:
    """What 5000 of them cost while they wait is so many letters in 30 s, or half of that, and no more; and they do not keep step."""
    now, outside = 0.0, Mock()
    outside.why_not_reached.return_value = ""
    table = RoomTable({**Limits(bootstrap_s=1000.0).model_dump(), "mark_s": 60.0}, 0, outside, lambda: now)
    opened = table.open("decode", room)
    assert opened is not None
    table.apply("decode", room, ev.Route(opened.key.generation, (ev.Party("prefill"),)))
    while now < 300.0:
        due = table.tick(now)
        assert due is not None
        now = due
    assert outside.send.call_count == 1 + 6 + rounds, "at once; after 0.25 s, 0.5 s and so on up to 8 s more; from then on regularly"
