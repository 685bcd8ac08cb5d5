"""Lines that come thousandfold: bounded, counted, and one line each, whatever a peer's words in them hold."""

from __future__ import annotations

import logging

import pytest

from kvcore.faults import ControlTap
from kvcore.logs import LimitsLog, SparingLog
from kvcore.protocol.messages import Abort
from kvcore.states import FailureCode, KVPoll, Reason, RoomKey
from kvcore.wire import Letter
from tests.helpers import duo, ended, wait_until

log = logging.getLogger("kvcore.test")
FORGED = "bootstrap_s passed\nCRITICAL root: all is lost \x1b[31m"


def test_a_burst_is_logged_and_then_one_line_a_while_that_counts_those_left_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("kvcore.logs.time.monotonic", lambda: now[0])
    lines = SparingLog(log, burst=3, every_s=2.0)
    for number in range(1000):
        lines.say(logging.WARNING, f"line {number}")
    assert caplog.messages == ["line 0", "line 1", "line 2"]
    now[0] += 2.0
    for number in range(1000, 1010):
        lines.say(logging.WARNING, f"line {number}")
    assert caplog.messages[3:] == ["line 1000 (and 997 more since the last such line)"]
    now[0] += 1e6
    for number in range(10):
        lines.say(logging.WARNING, f"again {number}")
    assert caplog.messages[4:] == ["again 0 (and 9 more since the last such line)", "again 1", "again 2"], "a long silence earns no more"


def test_a_line_is_one_line_whatever_it_holds(caplog: pytest.LogCaptureFixture) -> None:
    SparingLog(log).say(logging.ERROR, FORGED + "x" * 100_000)
    LimitsLog(log).ended(RoomKey("decode", 7, 0, 1), Reason.of(FailureCode.TIMEOUT, FORGED, "decode"))
    assert len(caplog.messages) == 2
    assert all("\n" not in line and "\x1b" not in line and len(line) < 5000 for line in caplog.messages)


def test_p5_a_peer_that_blames_a_limit_of_this_side_forges_no_line_of_its_log(caplog: pytest.LogCaptureFixture) -> None:
    with duo() as pair, ControlTap(pair.prefill) as tap:
        sender, receiver = pair.open()
        receiver.receive([1])
        wait_until(lambda: sender.poll() is KVPoll.WAITING_FOR_INPUT)
        lie = Abort(sender.room, 0, receiver.generation, sender.generation, Reason(FailureCode.TIMEOUT, FORGED, "prefill"))
        tap.inject(Letter(1, pair.decode.instance, pair.prefill.instance, lie))
        ended(sender, KVPoll.FAILED)
        assert sender.failure is not None and sender.failure.reason == FORGED, "a reason travels word for word"
        told = [line for line in caplog.messages if "all is lost" in line]
        assert told and all("\n" not in line and "\x1b" not in line for line in told)
        receiver.clear()
        sender.clear()
