"""Kind K13: figures, logs and idle threads cost no room anything.

C106 is in ``test_ranks``, C108 in ``test_idle``; C107 of the HTTP thread in ``test_breaker``.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

import pytest
import zmq

from kvcore import KVPoll, hookimpl
from kvcore.hookspecs import Event
from kvcore.metrics import Meter, Metrics
from kvcore.states import FailureCode
from tests.cases.ports import ping, zmq_client
from tests.helpers import BACKENDS, Duo, cpu_s, duo, ended, stays, wait_until

ODD = [-1, -(2**70), 2**70, math.nan, math.inf, -math.inf]


# --- C105: figures that are absurd, observers that raise


@pytest.mark.parametrize("value", ODD)
def test_c105_no_figure_makes_a_counter_fall_or_raises(value: float) -> None:
    metrics = Metrics()
    metrics.count("kvcore_failures_total", 3, code="aborted")
    metrics.observe("kvcore_transfer_seconds", 1.0)
    metrics.count("kvcore_failures_total", value, code="aborted")  # type: ignore[arg-type]
    metrics.set_count("kvcore_failures_total", value, code="aborted")  # type: ignore[arg-type]
    metrics.observe("kvcore_transfer_seconds", value)
    meter = Meter(value)
    meter.state("decode", KVPoll.TRANSFERRING, value)
    meter.state("decode", KVPoll.FAILED, -value)
    metrics.ended("decode", KVPoll.FAILED, FailureCode.TIMEOUT, meter.read(value))
    counted = metrics.counters()["kvcore_failures_total"]
    assert isinstance(counted, int) and counted >= 4
    text = metrics.text({"kvcore_quarantined_pages": [((), value)]})
    found = {line.rpartition(" ")[0]: line.rpartition(" ")[2] for line in text.splitlines() if not line.startswith("#")}
    assert all(float(found[name]) >= 0 for name in found if name != "kvcore_quarantined_pages")
    assert math.isfinite(float(found["kvcore_transfer_seconds_sum"])) and float(found["kvcore_transfer_seconds_sum"]) >= 1.0


class Raising:
    """An observer that raises at every event."""

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self.met = 0

    @hookimpl
    def kvcore_on_event(self, event: Event) -> None:
        self.met += 1
        raise self._error


@pytest.mark.parametrize("error", [ValueError("negative"), SystemExit("below zero"), MemoryError()], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("backend", BACKENDS)
def test_c105_an_observer_that_raises_every_time_harms_no_room(
    backend: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """Rooms succeed and fail as without it, and what it raises is logged a few times."""
    with duo(backend) as pair, caplog.at_level(logging.ERROR, "kvcore.observers"):
        pair.pair()
        observers = [Raising(error) for _ in (pair.prefill, pair.decode)]
        for owner, observer in zip((pair.prefill, pair.decode), observers, strict=True):
            owner.add_observer(observer)
        for _ in range(20):
            pair.transfer([1], [2])
        pair.plan.fail(times=1)
        sender, receiver = pair.open()
        receiver.receive([1])
        sender.send([1], last=True)
        for handle in (sender, receiver):
            ended(handle, KVPoll.FAILED)
            handle.clear()
        wait_until(lambda: all(observer.met > 20 for observer in observers))
        assert len(caplog.records) <= 2 * 11
        pair.stores_empty()


def test_c105_a_figure_that_cannot_be_booked_ends_its_room_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the metrics do when a room ends: its end is told, and the next room is served."""
    with duo() as pair:
        pair.pair()

        def broken(*_: object) -> None:
            raise ValueError("counters can only go up")

        monkeypatch.setattr(Metrics, "observe", broken)
        sender, receiver = pair.open()
        receiver.receive([1])
        sender.send([2], last=True)
        ended(sender, KVPoll.SUCCESS)
        ended(receiver, KVPoll.SUCCESS)
        sender.clear()
        receiver.clear()
        pair.transfer([3], [4])
        assert pair.prefill.healthy and pair.decode.healthy


# --- C107: what is broken for good


def broken_turns(pair: Duo, patch: pytest.MonkeyPatch) -> None:
    def turn(_now: float) -> float:
        raise MemoryError

    patch.setattr(pair.decode.control, "_on_tick", turn)


def broken_socket(pair: Duo, patch: pytest.MonkeyPatch) -> None:
    """What has come cannot be read, and stays there."""

    def receive(_socket: zmq.Socket[bytes]) -> None:
        raise zmq.ZMQError(zmq.ENOTSOCK)

    patch.setattr(pair.decode.control, "_receive", receive)


def broken_tickets(pair: Duo, patch: pytest.MonkeyPatch) -> None:
    def turn() -> bool:
        raise MemoryError

    patch.setattr(pair.decode._core._ledger, "turn", turn)
    patch.setattr(pair.decode._core._ledger, "_at_rest", lambda: False)
    pair.decode._core._ledger._bell.ring()


@pytest.mark.parametrize("broken", [broken_turns, broken_socket, broken_tickets])
def test_c107_what_is_broken_for_good_neither_spins_nor_fills_the_log(
    broken: Callable[[Duo, pytest.MonkeyPatch], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A socket that cannot be read, an allocation that fails each time: its thread rests between two attempts, and goes on afterwards."""
    with duo(liveness_s=8.0) as pair, caplog.at_level(logging.ERROR, "kvcore"):
        pair.pair()
        with pytest.MonkeyPatch.context() as patch, zmq_client(f"127.0.0.1:{pair.decode.control.port}") as client:
            broken(pair, patch)
            client.send(ping())
            wait_until(lambda: caplog.records)
            begun, busy = time.monotonic(), cpu_s()
            stays(lambda: pair.decode.healthy, 2.0)
            assert cpu_s() - busy < 0.15 * (time.monotonic() - begun)
            assert len(caplog.records) <= 12
        pair.transfer([1], [2])


def test_c107_one_socket_that_cannot_be_read_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are read at every turn, and rooms go on, if more slowly."""
    with duo() as pair:
        pair.pair()
        control = pair.prefill.control
        wait, receive = control._readiness.wait, control._receive
        bad = control._context.socket(zmq.DEALER)

        def waited(timeout_s: float) -> list[zmq.Socket[bytes]]:
            return [bad, *wait(min(timeout_s, 0.01))]

        def received(socket: zmq.Socket[bytes]) -> None:
            if socket is bad:
                raise zmq.ZMQError(zmq.ENOTSOCK)
            receive(socket)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(control._readiness, "wait", waited)
            patch.setattr(control, "_receive", received)
            pair.transfer([1, 2], [3, 4])
        bad.close(0)
        pair.transfer([1], [2])
