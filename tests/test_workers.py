"""Blocking, parallel and exclusive backends, and the workers that serve them (B5, C44, C45)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from kvcore import KVPoll, core, workers
from kvcore.closing import joined
from kvcore.exclusive import HookBusy, OneAtATime
from kvcore.workers import Job, Workers
from tests.fake_backends import (
    BlockingBackend,
    ExclusiveBackend,
    Gate,
    MemoryBackend,
    OddBackend,
    install,
    running,
    start,
)
from tests.helpers import SOON_S, ended, number, own_threads, stays, stores_empty, wait_until


class OddError(BaseException):
    """What no ``except Exception`` catches."""


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No thread of a manager outlives its test."""
    before = own_threads()
    yield
    wait_until(lambda: not own_threads() - before, what="threads to end")


def worker_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvcore-worker-")]


# --- workers by themselves


@pytest.fixture
def pool_of_workers() -> Iterator[Callable[..., Workers]]:
    made: list[Workers] = []

    def make(parallel: int = 1, most_stuck: int = 100) -> Workers:
        made.append(Workers(parallel, most_stuck))
        return made[-1]

    yield make
    for gate in Task.gates:
        gate.opened.set()
    Task.gates.clear()
    for one in made:
        one.stop(SOON_S)
        assert joined(one.running(), SOON_S)


class Task:
    """A job that notes its name when it begins, and then waits at a gate of its own, at most until the test ends."""

    gates: ClassVar[list[Gate]] = []

    def __init__(self, peer: str, name: str, begun: list[str], open_gate: bool = False) -> None:
        self.gate = Gate()
        self.gates.append(self.gate)
        if open_gate:
            self.gate.opened.set()
        self.name, self.begun = name, begun
        self.job = Job(peer, self.work)

    def work(self) -> None:
        self.begun.append(self.name)
        self.gate.wait()


def test_lanes_are_served_in_turn_by_one_worker(pool_of_workers: Callable[..., Workers]) -> None:
    pool, begun = pool_of_workers(1), list[str]()
    first = Task("a", "a1", begun)
    pool.put(first.job)
    wait_until(lambda: begun)
    for peer, name in [("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1")]:
        pool.put(Task(peer, name, begun, open_gate=True).job)
    assert pool.sizes() == {"workers": 1, "worker_lanes": 3, "workers_stuck": 0}
    first.gate.opened.set()
    wait_until(lambda: len(begun) == 5)
    assert begun == ["a1", "a2", "b1", "c1", "a3"]
    wait_until(lambda: pool.sizes()["worker_lanes"] == 0)


def test_b5_the_last_free_worker_is_kept_for_a_peer_that_has_none(pool_of_workers: Callable[..., Workers]) -> None:
    pool, begun = pool_of_workers(3), list[str]()
    stuck = [Task("a", f"a{n}", begun) for n in range(4)]
    for task in stuck:
        pool.put(task.job)
    wait_until(lambda: len(begun) == 2)
    stays(lambda: len(begun) == 2, 0.05)
    other = Task("b", "b", begun)
    pool.put(other.job)
    wait_until(lambda: begun[2:] == ["b"])
    for task in [*stuck, other]:
        task.gate.opened.set()
    wait_until(lambda: len(begun) == 5)


def test_a_job_is_taken_out_of_its_lane_but_not_out_of_a_worker(pool_of_workers: Callable[..., Workers]) -> None:
    pool, begun = pool_of_workers(1), list[str]()
    first, second = Task("a", "first", begun), Task("a", "second", begun)
    pool.put(first.job)
    pool.put(second.job)
    wait_until(lambda: begun)
    assert not pool.take_out(first.job)
    assert pool.take_out(second.job)
    assert not pool.take_out(second.job)
    first.gate.opened.set()
    wait_until(lambda: not pool.sizes()["worker_lanes"] and first.gate.met)
    assert pool.stop(SOON_S)
    assert begun == ["first"]


def test_what_is_written_off_is_replaced_up_to_a_bound_and_first_to_the_bound_of_its_peer(
    pool_of_workers: Callable[..., Workers],
) -> None:
    pool, begun = pool_of_workers(1, 4), list[str]()
    tasks = {name: Task(name[0], name, begun) for name in ("a1", "a2", "a3", "b1", "b2", "b3", "c1")}
    for name in ("a1", "a2"):
        pool.put(tasks[name].job)
        wait_until(lambda name=name: name in begun)
        assert pool.healthy
        pool.write_off(tasks[name].job)
    assert not pool.healthy
    pool.put(tasks["a3"].job)  # its peer has had its share
    for name in ("b1", "b2"):
        pool.put(tasks[name].job)
        wait_until(lambda name=name: name in begun)
        pool.write_off(tasks[name].job)
    pool.put(tasks["c1"].job)  # and now everybody has
    stays(lambda: begun == ["a1", "a2", "b1", "b2"], 0.05)
    assert pool.sizes()["workers_stuck"] == 4
    tasks["b1"].gate.opened.set()
    wait_until(lambda: begun[4:] == ["c1"])
    tasks["c1"].gate.opened.set()
    stays(lambda: not pool.healthy, 0.05)
    tasks["a1"].gate.opened.set()
    wait_until(lambda: begun[5:] == ["a3"])
    assert pool.healthy
    for task in tasks.values():
        task.gate.opened.set()
    wait_until(lambda: pool.sizes()["workers_stuck"] == 0)


def test_a_worker_ends_when_it_has_idled_and_another_comes(
    pool_of_workers: Callable[..., Workers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "IDLE_S", 0.02)
    pool, begun = pool_of_workers(1), list[str]()
    for name in ("first", "second"):
        pool.put(Task("a", name, begun, open_gate=True).job)
        wait_until(lambda name=name: begun[-1:] == [name])
        wait_until(lambda: pool.sizes()["workers"] == 0)


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3), OddError("odd")])
def test_c44_a_job_that_raises_does_not_end_its_worker(
    pool_of_workers: Callable[..., Workers], error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    pool, begun = pool_of_workers(1), list[str]()

    def bad() -> None:
        raise error

    with caplog.at_level(logging.CRITICAL, "kvcore.workers"):
        pool.put(Job("a", bad))
        pool.put(Task("a", threading.current_thread().name, begun, open_gate=True).job)
        wait_until(lambda: begun)
    assert pool.sizes()["workers"] == 1


def test_no_thread_to_be_had_is_no_error_and_the_next_job_tries_again(
    pool_of_workers: Callable[..., Workers], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool, begun = pool_of_workers(2), list[str]()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        pool.put(Task("a", "first", begun, open_gate=True).job)
    assert "can't start new thread" in caplog.text
    assert pool.sizes() == {"workers": 0, "worker_lanes": 1, "workers_stuck": 0}
    pool.put(Task("b", "second", begun, open_gate=True).job)
    wait_until(lambda: sorted(begun) == ["first", "second"])


def test_stop_drops_what_waits_and_is_bounded_by_what_runs() -> None:
    pool, begun = Workers(1, 100), list[str]()
    stuck, waiting = Task("a", "stuck", begun), Task("a", "waiting", begun)
    pool.put(stuck.job)
    pool.put(waiting.job)
    wait_until(lambda: begun)
    assert not pool.stop(0.05)
    pool.write_off(stuck.job)
    before = time.monotonic()
    assert not pool.stop(SOON_S)  # written off: not waited for, and not over
    assert time.monotonic() - before < SOON_S / 2
    assert not joined(pool.running(), 0.05)
    stuck.gate.opened.set()
    assert joined(pool.running(), SOON_S)
    assert pool.stop(SOON_S)
    pool.put(waiting.job)
    assert pool.sizes() == {"workers": 0, "worker_lanes": 0, "workers_stuck": 0}
    assert begun == ["stuck"]


# --- blocking backends under a manager


def test_a_blocking_transfer_runs_on_a_worker_that_ends_with_the_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, BlockingBackend)
    with running(fake) as (duo,):
        names: list[str] = []
        fake.made[0].answers[1_000_001] = lambda transfer: names.append(threading.current_thread().name) or fake.made[0].post(transfer)
        sender, receiver = start(duo, 3, room=1_000_001)
        ended(sender, KVPoll.SUCCESS)
        ended(receiver, KVPoll.SUCCESS)
        assert duo.equal([3], [3])
        assert names == worker_threads()
        assert duo.prefill.stats().stores["workers"] == 1
        assert 0 < sender.metrics.active_s < sender.metrics.total_s
        sender.clear()
        receiver.clear()
        duo.stores_empty()
    assert not worker_threads()


def test_a_blocking_transfer_may_return_a_ticket_to_be_polled(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, BlockingBackend)
    with running(fake) as (duo,):
        backend = fake.made[0]
        room = number()
        backend.answers[room] = lambda transfer: MemoryBackend.post(backend, transfer)
        sender, _ = start(duo, 4, room)
        ended(sender, KVPoll.SUCCESS)
        assert duo.equal([4], [4])


def test_health_is_false_while_too_many_workers_are_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore.ledger.STUCK_PER_WORKER", 2)
    fake = install(monkeypatch, BlockingBackend)
    with running(fake, ticket_s=0.3, transfer_s=1.0) as (duo,):
        fake.made[0].gate(room := number())
        sender, _ = start(duo, 1, room)
        ended(sender, KVPoll.FAILED)
        wait_until(lambda: not duo.prefill.healthy)
        waiting, _ = start(duo, 2)
        ended(waiting, KVPoll.FAILED)  # by the room's own limit: it never got a worker
        assert waiting.wait_release_safe(SOON_S)
        assert [transfer.room.number for transfer in fake.made[0].transfers] == [room]
        fake.made[0].open_gates()
        wait_until(lambda: duo.prefill.healthy)
        sender, _ = start(duo, 3)
        ended(sender, KVPoll.SUCCESS)


def test_b5_an_unreachable_peer_stalls_no_other_nor_their_pairing(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, BlockingBackend, parallel=2)
    with running(fake, decodes=3) as (first, second, third):
        fake.made[0].gate(first.decode.instance)
        stuck = [start(first, page) for page in range(4)]
        wait_until(lambda: fake.made[0].gates[first.decode.instance].met == 1)
        for duo in (second, third, second):
            sender, _ = start(duo, 7)
            ended(sender, KVPoll.SUCCESS)
        assert [sender.poll() for sender, _ in stuck] == [KVPoll.TRANSFERRING] * 4
        assert first.prefill.stats().stores["worker_lanes"] == 1
        fake.made[0].open_gates()
        for sender, _ in stuck:
            ended(sender, KVPoll.SUCCESS)
        assert fake.made[0].most_at_once == 2


@pytest.mark.parametrize("parallel", [1, 3])
def test_no_more_transfers_run_at_once_than_declared(monkeypatch: pytest.MonkeyPatch, parallel: int) -> None:
    fake = install(monkeypatch, BlockingBackend, parallel=parallel)
    with running(fake, decodes=4) as duos:
        for duo in duos:
            fake.made[0].gate(duo.decode.instance)
        senders = [start(duo, page)[0] for page in range(3) for duo in duos]
        wait_until(lambda: fake.made[0].at_once == parallel)
        fake.made[0].open_gates()
        for sender in senders:
            ended(sender, KVPoll.SUCCESS)
        assert fake.made[0].most_at_once == parallel


def test_a5_a_room_aborted_in_its_lane_is_never_transferred_and_is_safe_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, BlockingBackend)
    with running(fake) as (duo,):
        backend = fake.made[0]
        backend.gate(room := number())
        blocked, _ = start(duo, 1, room)
        wait_until(lambda: backend.gates[room].met)
        waiting, receiver = start(duo, 2)
        wait_until(lambda: duo.prefill.stats().stores["worker_lanes"] == 1)
        waiting.abort("no longer wanted")
        assert waiting.wait_release_safe(SOON_S)
        ended(receiver, KVPoll.FAILED)
        assert receiver.wait_release_safe(SOON_S)
        assert not blocked.is_release_safe()
        backend.open_gates()
        ended(blocked, KVPoll.SUCCESS)
        assert [transfer.room.number for transfer in backend.transfers] == [room]
        assert duo.untouched([2])


def test_an_abort_reaches_a_transfer_that_still_blocks_by_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, BlockingBackend, cancel=True)
    with running(fake) as (duo,):
        backend = fake.made[0]
        backend.gate(room := number())
        sender, _ = start(duo, 1, room)
        wait_until(lambda: backend.gates[room].met)
        sender.abort()
        wait_until(lambda: [(key.number, tickets) for key, tickets in backend.aborted] == [(room, [])])
        assert not sender.is_release_safe()
        backend.open_gates()
        assert sender.wait_release_safe(SOON_S)


def test_a_ticket_that_comes_after_an_abort_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, BlockingBackend, cancel=True)
    with running(fake, ticket_s=60.0, quarantine_s=90.0) as (duo,):
        backend = fake.made[0]
        backend.held.set()
        gate = backend.gate(room := number())
        backend.answers[room] = lambda transfer: gate.wait() or MemoryBackend.post(backend, transfer)
        sender, _ = start(duo, 1, room)
        wait_until(lambda: gate.met)
        sender.abort()
        wait_until(lambda: len(backend.aborted) == 1)
        gate.opened.set()
        assert sender.wait_release_safe(SOON_S)
        assert backend.aborted[1] == (backend.transfers[0].room, [1])
        assert duo.untouched()


def test_ticket_s_does_not_run_in_a_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, BlockingBackend)
    with running(fake, ticket_s=1.0) as (duo,):
        backend = fake.made[0]
        rooms = [number() for _ in range(3)]
        for room in rooms:
            backend.gate(room)
        senders = [start(duo, page, room)[0] for page, room in enumerate(rooms)]
        for room in rooms:
            wait_until(lambda room=room: backend.gates[room].met)
            stays(lambda: True, 0.5)
            backend.gates[room].opened.set()
        for sender in senders:
            ended(sender, KVPoll.SUCCESS)
        assert senders[-1].metrics.wait_s > 0.9 and senders[-1].metrics.active_s < 0.9


def test_a_ticket_that_comes_after_the_pages_were_given_up_is_cancelled_and_cleared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, BlockingBackend, cancel=True)
    with running(fake, liveness_s=1.0, ticket_s=0.1, quarantine_s=1.2) as (duo,):
        backend = fake.made[0]
        room = number()
        gate = backend.gate(room)
        backend.answers[room] = lambda transfer: gate.wait() or MemoryBackend.post(backend, transfer)
        sender, receiver = start(duo, 1, room)
        ended(sender, KVPoll.FAILED)
        sender.clear()
        receiver.clear()
        wait_until(lambda: [key.number for key in backend.cleared] == [room], what="the limit of the quarantine")
        assert duo.prefill.stats().released_unproven == 1
        backend.open_gates()
        wait_until(lambda: len(backend.cleared) == 2)
        assert backend.aborted[-1][1]
        assert not backend.kvcore_held_rooms()
        stores_empty(duo.prefill)


# --- closing


def test_close_with_a_stuck_worker_is_bounded_and_proves_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(core, "STOP_S", 0.2)
    fake = install(monkeypatch, BlockingBackend)
    with running(fake, drain_s=0.2) as (duo,):
        fake.made[0].gate(room := number())
        sender, receiver = start(duo, 1, room)
        wait_until(lambda: fake.made[0].gates[room].met)
        before = time.monotonic()
        duo.prefill.close()
        assert time.monotonic() - before < 5.0
        ended(sender, KVPoll.FAILED)
        ended(receiver, KVPoll.FAILED)
        assert "close" in fake.made[0].calls
        assert not sender.is_release_safe()
        assert "may still be at work" in caplog.text
        assert len(worker_threads()) == 1
        fake.made[0].open_gates()
        wait_until(lambda: not worker_threads())


def test_r3_close_is_the_proof_where_it_makes_the_transfer_return(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "STOP_S", 1.0)
    fake = install(monkeypatch, BlockingBackend)
    fake.opened_by_close = True
    with running(fake, drain_s=0.2) as (duo,):
        fake.made[0].gate(room := number())
        sender, _ = start(duo, 1, room)
        wait_until(lambda: fake.made[0].gates[room].met)
        duo.prefill.close()
        assert sender.poll() is KVPoll.FAILED
        assert sender.is_release_safe()
        assert not worker_threads()


def test_r3_an_engine_that_does_not_close_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, OddBackend, cancel=False)
    with running(fake, drain_s=0.1) as (duo,):
        backend = fake.made[0]
        backend.held.set()
        backend.raises["close"] = RuntimeError("a thread has not ended")
        sender, _ = start(duo)
        wait_until(lambda: backend.transfers)
        duo.prefill.close()
        assert sender.poll() is KVPoll.FAILED
        assert not sender.is_release_safe()


# --- exclusive backends


def test_exclusive_no_hook_runs_beside_another(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, ExclusiveBackend)
    with running(fake, decodes=3) as duos:
        for _ in range(2):
            for page, duo in enumerate(duos):
                sender, receiver = start(duo, page)
                aborted, rejected = start(duo, page + 10)
                aborted.abort()
                ended(sender, KVPoll.SUCCESS)
                assert duo.equal([page], [page])
                for handle in (sender, receiver, aborted, rejected):
                    handle.clear()
        for duo in duos:
            duo.stores_empty()
    for backend in fake.made:
        assert backend.overlaps == []
    assert fake.made[0].ran >= {"open", "register", "endpoint", "connect", "transfer", "poll", "clear", "held_rooms", "close"}


def test_exclusive_transfers_and_polls_wait_until_a_slow_hook_has_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, ExclusiveBackend)
    with running(fake, decodes=2) as (duo, unpaired):
        backend = fake.made[0]
        duo.transfer([0], [0])
        backend.held.set()
        posted, _ = start(duo, 1)
        wait_until(lambda: len(backend.transfers) == 2)
        backend.connecting.opened.clear()
        met = backend.connecting.met
        start(unpaired, 2)
        wait_until(lambda: backend.connecting.met > met)
        waiting, _ = start(duo, 3)
        wait_until(lambda: waiting.poll() is KVPoll.TRANSFERRING)
        stays(lambda: posted.poll() is waiting.poll() is KVPoll.TRANSFERRING, 0.1)
        assert len(backend.transfers) == 2
        backend.connecting.opened.set()
        backend.held.clear()
        ended(posted, KVPoll.SUCCESS)
        ended(waiting, KVPoll.SUCCESS)
        assert backend.overlaps == []


def test_exclusive_and_blocking_a_stuck_transfer_leaves_the_limits_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, BlockingBackend, exclusive=True, parallel=4)
    with running(fake, ticket_s=0.2, transfer_s=1.5) as (duo,):
        backend = fake.made[0]
        backend.gate(room := number())
        sender, receiver = start(duo, 1, room)
        wait_until(lambda: backend.gates[room].met)
        other, _ = start(duo, 2)
        stays(lambda: len(worker_threads()) == 1, 0.05)
        ended(sender, KVPoll.FAILED)
        assert sender.failure is not None and "ticket_s" in sender.failure.reason
        wait_until(lambda: not duo.prefill.healthy)
        other.abort()
        assert other.wait_release_safe(SOON_S)
        other.clear()
        assert duo.prefill.stats().pending_clears > 0  # the backend cannot be told yet
        stays(lambda: not backend.cleared, 0.1)
        backend.open_gates()
        assert sender.wait_release_safe(SOON_S)
        wait_until(lambda: duo.prefill.healthy)
        sender.clear()
        receiver.clear()
        stores_empty(duo.prefill)
        assert {key.number for key in backend.cleared} == {other.room, sender.room}
        sender, _ = start(duo, 3)
        ended(sender, KVPoll.SUCCESS)
        assert backend.most_at_once == 1


def test_only_an_exclusive_backends_slow_hooks_wait_for_their_turn() -> None:
    gate, order = Gate(), list[str]()

    class Hooks:
        def kvcore_transfer(self, transfer: object) -> None:
            order.append("transfer")
            gate.wait()

        def kvcore_connect(self, peer: object) -> None:
            order.append("connect")

        def kvcore_poll(self, tickets: object) -> str:
            return "polled"

    hooks: Any = OneAtATime(Hooks())  # type: ignore[arg-type]
    threads = [
        threading.Thread(target=lambda: hooks.kvcore_transfer(transfer=None)),
        threading.Thread(target=lambda: hooks.kvcore_connect(peer=None)),
    ]
    threads[0].start()
    wait_until(lambda: gate.met)
    threads[1].start()
    with pytest.raises(HookBusy, match="kvcore_poll"):
        hooks.kvcore_poll(tickets=[])
    gate.opened.set()
    for thread in threads:
        thread.join(SOON_S)
    assert order == ["transfer", "connect"]
    assert hooks.kvcore_poll(tickets=[]) == "polled"
