"""Timers, the figures of a room, and the counters of a manager."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, strategies as st

from kvcore.alarms import Alarms, Armed
from kvcore.metrics import COUNTERS, GAUGES, SUMMARIES, Meter, Metrics, TransferMetrics
from kvcore.protocol.events import Timer
from kvcore.states import FailureCode, KVPoll
from kvcore.timers import Timers
from tests.interrupts import everywhere

# --- timers


def test_what_is_due_comes_once_and_in_time() -> None:
    timers: Timers[str] = Timers()
    timers.arm("late", 5.0, 100.0)
    timers.arm("early", 1.0, 100.0)
    assert timers.next_due() == 101.0 and len(timers) == 2
    assert timers.take_due(100.9) == []
    assert timers.take_due(101.0) == ["early"]
    assert timers.take_due(101.0) == [] and timers.next_due() == 105.0
    assert timers.take_due(200.0) == ["late"]
    assert len(timers) == 0 and timers.next_due() is None


def test_what_is_due_for_the_longest_time_comes_first_however_many_are_taken() -> None:
    """So that what is always due again after a short time passes over nothing."""
    timers: Timers[str] = Timers()
    for key, delay, now in (("c", 1.0, 4.0), ("a", 3.0, 0.0), ("d", 1.0, 5.0), ("b", 3.0, 1.0)):
        timers.arm(key, delay, now)
    assert timers.take_due(9.0, 1) == ["a"] and len(timers) == 3 and timers.next_due() == 4.0
    timers.cancel("b")
    assert timers.take_due(5.0, 3) == ["c"] and timers.take_due(9.0) == ["d"]


@pytest.mark.parametrize("delay", [1.0, 2.0])
def test_whatever_a_signal_handler_raises_timers_go_on(delay: float) -> None:
    """In the middle of arming and of cancelling one, alone with its delay or not."""
    timers: Timers[str] = Timers()

    def both() -> None:
        timers.arm("a", 1.0, 0.0)
        timers.arm("a", delay, 0.0)
        timers.cancel("a")

    for _ in everywhere(both, ("call", "line"), ("kvcore/timers.py",)):
        timers.arm("b", 1.0, 0.0)
        assert timers.next_due() in (0.0 + 1.0, 0.0 + 2.0)
        due = timers.take_due(2.0)
        assert "b" in due and timers.take_due(9.0) == [] and timers.next_due() is None
        timers.cancel("a")
        assert len(timers) == 0


def test_arming_again_starts_anew() -> None:
    timers: Timers[str] = Timers()
    timers.arm("a", 1.0, 0.0)
    timers.arm("a", 1.0, 0.8)
    assert timers.take_due(1.5) == [] and timers.take_due(1.8) == ["a"]
    timers.arm("a", 5.0, 2.0)
    timers.arm("a", 1.0, 2.0)  # another delay: the old one is gone
    assert len(timers) == 1 and timers.take_due(3.0) == ["a"] and timers.take_due(100.0) == []


def test_cancel_forgets_and_is_harmless() -> None:
    timers: Timers[str] = Timers()
    timers.cancel("never armed")
    timers.arm("a", 1.0, 0.0)
    timers.cancel("a")
    timers.cancel("a")
    assert timers.take_due(10.0) == [] and len(timers) == 0 and timers.next_due() is None


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from([None, 1.0, 2.0, 7.0])), max_size=40), st.integers(1, 5))
def test_timers_behave_like_a_plain_dictionary(steps: list[tuple[str, float | None]], stride: int) -> None:
    timers: Timers[str] = Timers()
    plain: dict[str, float] = {}
    for now, (key, delay) in enumerate(steps):
        if delay is None:
            timers.cancel(key)
            plain.pop(key, None)
        else:
            timers.arm(key, delay, float(now))
            plain[key] = now + delay
        assert timers.next_due() == min(plain.values(), default=None) and len(timers) == len(plain)
        if now % stride == 0:
            due = {key for key, at in plain.items() if at <= now}
            assert set(timers.take_due(float(now))) == due
            for key in due:
                del plain[key]


# --- one room's figures


def test_active_time_is_the_union_of_what_was_in_flight() -> None:
    meter = Meter(10.0)
    for at, event in ((12.0, meter.began), (13.0, meter.began), (14.0, meter.done), (16.0, meter.done), (20.0, meter.began)):
        event(at)
    assert meter.read(21.0) == TransferMetrics(pages=0, bytes=0, chunks=0, wait_s=2.0, active_s=5.0, total_s=11.0)
    meter.done(22.0)
    meter.bytes = 12
    meter.state("prefill", KVPoll.SUCCESS, 25.0)
    figures = meter.read(99.0)
    assert (figures.active_s, figures.total_s, figures.bytes_per_s) == (6.0, 15.0, 2.0)


def test_before_anything_was_in_flight_all_of_it_is_waiting() -> None:
    meter = Meter(10.0)
    assert meter.read(13.0) == TransferMetrics(0, 0, 0, wait_s=3.0, active_s=0.0, total_s=3.0) and meter.read(13.0).bytes_per_s == 0
    meter.state("prefill", KVPoll.FAILED, 14.0)
    assert meter.read(99.0).wait_s == meter.read(99.0).total_s == 4.0


def test_a_receiver_is_active_from_transferring_to_its_end() -> None:
    meter = Meter(0.0)
    meter.state("decode", KVPoll.WAITING_FOR_INPUT, 1.0)
    meter.state("decode", KVPoll.TRANSFERRING, 3.0)
    assert meter.read(5.0).active_s == 2.0
    meter.state("decode", KVPoll.SUCCESS, 7.0)
    assert meter.read(99.0) == TransferMetrics(0, 0, 0, wait_s=3.0, active_s=4.0, total_s=7.0)


# --- counters


def test_counters_start_at_zero_and_sum_up_their_labels() -> None:
    metrics = Metrics()
    assert metrics.counters() == dict.fromkeys(COUNTERS, 0)
    metrics.count("kvcore_failures_total", code="aborted")
    metrics.count("kvcore_failures_total", 2, code="timeout")
    metrics.count("kvcore_bytes_total", 0)
    metrics.count("kvcore_bytes_total", -5)
    metrics.set_count("kvcore_bad_messages_total", 7, port="control")
    metrics.set_count("kvcore_bad_messages_total", 3, port="control")  # a counter never falls
    counted = metrics.counters()
    assert (counted["kvcore_failures_total"], counted["kvcore_bytes_total"], counted["kvcore_bad_messages_total"]) == (3, 0, 7)


def test_a_rooms_end_is_booked_by_side_and_code() -> None:
    metrics = Metrics()
    figures = TransferMetrics(1, 64, 1, wait_s=0.5, active_s=1.5, total_s=2.0)
    metrics.ended("prefill", KVPoll.SUCCESS, None, figures)
    metrics.ended("decode", KVPoll.SUCCESS, None, figures)
    metrics.ended("decode", KVPoll.FAILED, FailureCode.PEER_LOST, figures)
    lines = metrics.text({}).splitlines()
    for line in (
        'kvcore_room_seconds_count{side="decode"} 2',
        'kvcore_room_seconds_sum{side="decode"} 4.000000',
        'kvcore_room_seconds_count{side="prefill"} 1',
        "kvcore_transfer_seconds_count 1",
        "kvcore_transfer_seconds_sum 1.500000",
        'kvcore_failures_total{code="peer_lost"} 1',
    ):
        assert line in lines


def test_the_text_is_prometheus_and_names_every_metric() -> None:
    metrics = Metrics()
    gauges = {
        "kvcore_rooms": [((("side", "prefill"), ("state", "SUCCESS")), 2.0)],
        **{name: [((), 1.0)] for name in GAUGES if name != "kvcore_rooms"},
    }
    text = metrics.text(gauges)
    assert text.endswith("\n")
    for name in (*COUNTERS, *SUMMARIES, *GAUGES):
        kind = "counter" if name in COUNTERS else "summary" if name in SUMMARIES else "gauge"
        assert text.count(f"# TYPE {name} {kind}\n") == text.count(f"# HELP {name} ") == 1
    for line in text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            assert name and float(value) >= 0
    assert 'kvcore_rooms{side="prefill",state="SUCCESS"} 2' in text and "kvcore_bytes_total 0" in text


def test_counting_from_many_threads_loses_nothing() -> None:
    metrics = Metrics()

    def work() -> None:
        for _ in range(2000):
            metrics.count("kvcore_bytes_total", 3)
            metrics.observe("kvcore_room_seconds", 0.5, side="decode")

    threads = [threading.Thread(target=work, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert metrics.counters()["kvcore_bytes_total"] == 6 * 2000 * 3
    assert 'kvcore_room_seconds_count{side="decode"} 12000' in metrics.text({})


def test_the_published_names_are_those_of_the_documentation() -> None:
    assert {*COUNTERS, *SUMMARIES, *GAUGES} >= {
        "kvcore_rooms", "kvcore_room_seconds", "kvcore_transfer_seconds", "kvcore_bytes_total", "kvcore_failures_total",
        "kvcore_quarantined_pages", "kvcore_released_unproven_total", "kvcore_bad_messages_total",
    }  # fmt: skip
    with pytest.raises(AttributeError):
        TransferMetrics(0, 0, 0, 0.0, 0.0, 0.0).pages = 1  # type: ignore[misc]


def test_s8_thousands_of_alarms_of_one_room_are_not_compared_each_with_each() -> None:
    """A room of many layers whose tickets are all stuck: one alarm more or less with every step."""
    alarms: Alarms[str] = Alarms({"quarantine_s": 5.0}, lambda when: None)
    armed: Armed[str] = ()
    wanted = tuple(Timer("quarantine_s", ("ticket", chunk)) for chunk in range(2000))
    began = time.thread_time()
    for count in range(0, 2001, 50):
        armed = alarms.run("room", armed, wanted[:count], 1.0)
        assert len(armed) == len(alarms.timers) == count
    for count in range(2000, -1, -50):
        armed = alarms.run("room", armed, wanted[:count], 1.0)
        assert len(armed) == len(alarms.timers) == count
    assert time.thread_time() - began < 4.0, "each with each takes 20 s and more"
