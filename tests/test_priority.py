"""The threads that wait for a processor rather than take it from who runs."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kvcore.priority import background
from tests.helpers import duo


def policies() -> dict[str, int]:
    """The scheduling policy of each thread of this process, by its number and the name that the system knows."""
    return {f"{task.name} {(task / 'comm').read_text().strip()}": os.sched_getscheduler(int(task.name)) for task in _tasks()}


def _tasks() -> list[Path]:
    return list(Path("/proc/self/task").iterdir())


def test_what_moves_rooms_stands_back_and_the_callers_thread_does_not() -> None:
    before = policies()
    with duo() as pair:
        names = [f"kvcore-{loop}" for loop in ("control", "progress")]
        ours = [thread.native_id for thread in threading.enumerate() if thread.name in names]
        assert len(ours) == 4, pair
        assert all(os.sched_getscheduler(number or 0) == os.SCHED_BATCH for number in ours)
        zmq = [policy for name, policy in policies().items() if "ZMQbg" in name and name not in before]
        assert len(zmq) == 4 and set(zmq) == {os.SCHED_BATCH}
        assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_policy_that_was_chosen_stays() -> None:
    seen = []

    def starter() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        thread = background(lambda: seen.append(os.sched_getscheduler(0)), "kvcore-test")
        thread.start()
        thread.join(10)

    thread = threading.Thread(target=starter)
    thread.start()
    thread.join(10)
    assert seen == [os.SCHED_IDLE]


@pytest.mark.parametrize("error", [PermissionError(1, "not allowed"), OSError(38, "Function not implemented"), AttributeError("none")])
def test_where_the_system_does_not_let_us_the_thread_runs_all_the_same(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    ran = threading.Event()
    background(ran.set, "kvcore-test").start()
    assert ran.wait(10)
