"""``close`` with an engine that does not return: within limits, the peer is told, and one line says what still runs."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from kvcore_conformance.stage.noise import listening

from kvcore import FailureCode, KVPoll, Receiver, Sender, core, hookimpl
from kvcore.hookspecs import Event
from tests.fake_backends import ExclusiveBackend, HangingBackend, MemoryBackend, install, running, start
from tests.helpers import SOON_S, Duo, duo, ended, full_stores, manager, memory, own_threads, stays, wait_until

STOP_S, ENGINE_S = 0.3, 0.5
IN_TRANSFER = ("transfer", "poll", "abort")
HOOKS = (*IN_TRANSFER, "disconnect", "unregister", "close")
AT_MOST_S = 5.0
"""For a close with these limits, on a busy machine; and below ``liveness_s``, after which a peer would be missed."""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short limits, and no thread left when a test is over."""
    monkeypatch.setattr(core, "STOP_S", STOP_S)
    monkeypatch.setattr(core, "ENGINE_S", ENGINE_S)
    before = own_threads()
    yield
    wait_until(lambda: own_threads() <= before, what="all threads have ended")


@dataclass
class Hung:
    """A manager whose engine hangs in a hook, or will when it is closed, and its room under way."""

    pair: Duo
    backend: HangingBackend
    sender: Sender
    receiver: Receiver

    def close(self) -> float:
        """Close the side that hangs; the seconds that took."""
        began = time.monotonic()
        (self.pair.decode if "disconnect" in self.backend.gates else self.pair.prefill).close()
        return time.monotonic() - began


@pytest.fixture
def hung(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hung]:
    fake = install(monkeypatch, HangingBackend, cancel=False, fences_on_disconnect=True)
    hook: str = request.param
    with running(fake, drain_s=0.2) as (pair,):
        sides = {"prefill": fake.made[0], "decode": fake.made[1]}
        backend = sides["decode" if hook == "disconnect" else "prefill"]
        if hook not in ("transfer", "poll"):
            fake.made[0].held.set()
        backend.gate(hook)
        sender, receiver = start(pair)
        wait_until(lambda: backend.gates[hook].met if hook in ("transfer", "poll") else fake.made[0].transfers)
        wait_until(lambda: receiver.poll() is KVPoll.TRANSFERRING)
        yield Hung(pair, backend, sender, receiver)


def told(caplog: pytest.LogCaptureFixture) -> str:
    """The one line for what is left."""
    found = [line for record in caplog.records if record.levelno >= logging.ERROR and " is closed, and " in (line := record.getMessage())]
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize("hung", HOOKS, indirect=True)
def test_close_is_bounded_says_what_still_runs_and_tells_the_peer(
    hung: Hung, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hook,) = hung.backend.gates
    assert hung.close() < AT_MOST_S
    assert f"in kvcore_{hook}" in told(caplog) and "keep the memory" in told(caplog)
    for handle in (hung.sender, hung.receiver):
        ended(handle, KVPoll.FAILED)
        assert handle.failure is not None and handle.failure.code is FailureCode.SHUTDOWN
    monkeypatch.setattr(core, "STOP_S", 60.0)
    assert hung.close() < AT_MOST_S, "a second close waits for nothing"


@pytest.mark.parametrize("hung", HOOKS, indirect=True)
def test_r3_no_page_is_safe_as_long_as_the_engine_is_in_a_hook_that_may_touch_it(hung: Hung) -> None:
    hung.close()
    mine = hung.receiver if "disconnect" in hung.backend.gates else hung.sender
    stays(lambda: not mine.is_release_safe(), 0.2)


@pytest.mark.parametrize("hung", ["transfer", "close"], indirect=True)
def test_close_from_several_threads_at_once_returns_in_each_also_when_the_engine_hangs(hung: Hung) -> None:
    threads = [threading.Thread(target=hung.close, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(AT_MOST_S)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("hung", ["transfer", "close"], indirect=True)
def test_another_manager_of_the_process_works_beside_an_engine_that_hangs(hung: Hung) -> None:
    hung.close()
    with manager("prefill", hung.pair.source, backend="fake") as second:
        Duo(second, hung.pair.decode, hung.pair.source, hung.pair.target).transfer([1, 2], [3, 4])


def test_close_is_bounded_while_a_peer_cannot_be_connected_to(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fake = install(monkeypatch, HangingBackend)
    with running(fake) as (pair,):
        gate = fake.made[0].gate("connect")
        sender, receiver = start(pair)
        wait_until(lambda: gate.met)
        began = time.monotonic()
        pair.prefill.close()
        assert time.monotonic() - began < AT_MOST_S
        assert "kvcore-slow in kvcore_connect" in told(caplog)
        ended(sender, KVPoll.FAILED)
        receiver.clear()


def test_close_of_an_exclusive_engine_that_hangs_is_bounded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fake = install(monkeypatch, ExclusiveBackend)
    with running(fake, drain_s=0.2) as (pair,):
        backend = fake.made[0]
        sender, receiver = pair.open(room := 1)
        backend.answers[room] = lambda transfer: backend.gate("transfer").wait()
        receiver.receive([1])
        sender.send([1], last=True)
        wait_until(lambda: "transfer" in backend.gates and backend.gates["transfer"].met)
        began = time.monotonic()
        pair.prefill.close()
        assert time.monotonic() - began < AT_MOST_S
        assert "kvcore-progress in kvcore_transfer" in told(caplog) and not sender.is_release_safe()
        ended(receiver, KVPoll.FAILED)


def test_an_observer_that_hangs_keeps_no_manager_open(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    go_on = threading.Event()

    class Slow:
        @hookimpl
        def kvcore_on_event(self, event: Event) -> None:
            go_on.wait(SOON_S)

    with running(install(monkeypatch, MemoryBackend)) as (pair,):
        pair.prefill.add_observer(Slow())
        pair.transfer([1], [2])
        began = time.monotonic()
        pair.prefill.close()
        assert time.monotonic() - began < AT_MOST_S
        assert "kvcore-events in kvcore_on_event" in told(caplog) and "engine" not in told(caplog)
        go_on.set()


def test_no_port_is_left_and_each_can_be_had_again() -> None:
    before = set(listening_here())
    settings = dict[str, int]()
    for _ in range(3):
        source, target = memory(8, seed=1), memory(8)
        with manager("prefill", source, admin="127.0.0.1:0", **settings) as prefill, manager("decode", target) as decode:
            Duo(prefill, decode, source, target).transfer([1], [2])
            assert {prefill.address, prefill.admin_address, decode.address} <= set(listening_here())
            settings["bootstrap_port"] = int(prefill.address.rpartition(":")[2])
        assert not full_stores(prefill) and not full_stores(decode)
        wait_until(lambda: set(listening_here()) <= before, what=f"no port of {set(listening_here()) - before} is left")


def listening_here() -> list[str]:
    return listening(os.getpid())


def test_close_from_within_close_leaves_it_to_that_and_a_later_one_closes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a signal handler that interrupts it; and after it was interrupted for good."""
    with duo(drain_s=0.5) as pair:
        core, states = pair.prefill._core, pair.prefill._core._statuses

        def within() -> set[KVPoll]:
            monkeypatch.setattr(core, "_statuses", states)
            pair.prefill.close()
            raise KeyboardInterrupt

        monkeypatch.setattr(core, "_statuses", within)
        with pytest.raises(KeyboardInterrupt):
            pair.prefill.close()
        assert "this call from within leaves it to that" in caplog.text and pair.prefill.control.sockets
        pair.prefill.close()
        assert pair.prefill.control.sockets == 0
