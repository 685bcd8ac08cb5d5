"""What the core makes of a backend that fails half-way, raises, or answers oddly (T6, T7, C20, C25, C94)."""

from __future__ import annotations

import pytest

from kvcore import KVPoll
from kvcore.hookspecs import PENDING, RETRY, TicketKind, TicketState
from kvcore.states import FailureCode
from tests.fake_backends import (
    MemoryBackend,
    OddBackend,
    install,
    running,
    start,
)
from tests.helpers import SOON_S, ended, number, stays, wait_until


class OddError(BaseException):
    """What no ``except Exception`` catches."""


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "returned no ticket"),
        (PENDING, "returned PENDING"),
        (TicketState("done"), "no state of a ticket"),  # type: ignore[arg-type]
        (TicketState(None), "no state of a ticket"),  # type: ignore[arg-type]
    ],
)
def test_t7_an_odd_answer_of_transfer_is_a_failure_without_proof(monkeypatch: pytest.MonkeyPatch, answer: object, says: str) -> None:
    fake = install(monkeypatch, OddBackend)
    with running(fake) as (duo,):
        room = number()
        plain = MemoryBackend.post
        monkeypatch.setattr(fake, "post", lambda self, transfer: answer if transfer.room.number == room else plain(self, transfer))
        sender, _ = start(duo, 1, room)
        ended(sender, KVPoll.FAILED)
        assert sender.failure is not None and says in sender.failure.reason
        assert not sender.is_release_safe()
        other, _ = start(duo, 2)
        ended(other, KVPoll.SUCCESS)


@pytest.mark.parametrize("said", [None, True, "done", TicketState("done"), OddError("odd"), SystemExit(1)])  # type: ignore[arg-type]
def test_t7_an_odd_answer_of_poll_is_a_failure_without_proof_of_that_ticket_only(monkeypatch: pytest.MonkeyPatch, said: object) -> None:
    fake = install(monkeypatch, OddBackend)
    with running(fake) as (duo,):
        backend, room = fake.made[0], number()
        backend.said[room] = said
        backend.held.set()
        other, receiver = start(duo, 2)
        wait_until(lambda: backend.transfers)
        sender, _ = start(duo, 1, room)
        ended(sender, KVPoll.FAILED)
        assert not sender.is_release_safe()
        assert other.poll() is KVPoll.TRANSFERRING
        backend.held.clear()
        ended(other, KVPoll.SUCCESS)
        ended(receiver, KVPoll.SUCCESS)
        assert duo.equal([2], [2])


def test_t7_hooks_that_raise_end_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, OddBackend, needs_progress=True)
    with running(fake) as (duo,):
        for backend in fake.made:
            backend.raises = {hook: OddError(hook) for hook in ("progress", "abort", "clear", "held_rooms")}
        for page in range(2):
            aborted, _ = start(duo, page)
            aborted.abort()
            sender, receiver = start(duo, page)
            ended(sender, KVPoll.SUCCESS)
            ended(receiver, KVPoll.SUCCESS)
            for handle in (aborted, sender, receiver):
                handle.clear()
        wait_until(lambda: duo.prefill.stats().pending_clears == 0)
        assert duo.prefill.healthy and duo.decode.healthy


def test_errors_that_come_thousandfold_are_logged_tenfold(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fake = install(monkeypatch, OddBackend, needs_progress=True)
    with running(fake) as (duo,):
        fake.made[0].held.set()
        fake.made[0].raises["progress"] = RuntimeError("again")
        sender, _ = start(duo)
        wait_until(lambda: fake.made[0].progressed > 20)
        fake.made[0].held.clear()
        ended(sender, KVPoll.SUCCESS)
    assert 1 <= caplog.text.count("kvcore_progress failed") <= 12


def test_an_engine_whose_target_must_work_is_driven_while_a_room_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, OddBackend, needs_progress=True)
    with running(fake) as (duo,):
        target = fake.made[1]
        stays(lambda: target.progressed == 0, 0.05)
        sender, receiver = duo.open()
        receiver.receive([1])
        wait_until(lambda: target.progressed > 10)
        assert fake.made[0].progressed == 0
        sender.abort()
        ended(receiver, KVPoll.FAILED)
        sender.clear()
        receiver.clear()
        duo.stores_empty()
        seen = target.progressed
        stays(lambda: target.progressed <= seen + 1, 0.1)


def test_a_room_aborted_between_two_tries_is_quiescent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore.ledger.LAST_RETRY_S", 0.02)
    fake = install(monkeypatch, MemoryBackend)
    with running(fake) as (duo,):
        backend, room = fake.made[0], number()
        backend.answers[room] = lambda transfer: RETRY
        sender, receiver = start(duo, 1, room)
        wait_until(lambda: len(backend.transfers) > 3)
        sender.abort()
        assert sender.wait_release_safe(SOON_S)
        seen = len(backend.transfers)
        stays(lambda: len(backend.transfers) == seen, 0.1)
        assert receiver.wait_release_safe(SOON_S)


def test_try_again_with_a_poisoned_path_pairs_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, MemoryBackend)
    with running(fake) as (duo,):
        backend, room = fake.made[0], number()
        backend.answers[room] = lambda transfer: TicketState(TicketKind.RETRY, "queue pair in error", peer_broken=True)
        sender, receiver = start(duo, 1, room)
        for handle in (sender, receiver):
            ended(handle, KVPoll.FAILED)
            assert handle.failure is not None and handle.failure.code is FailureCode.PEER_LOST
        wait_until(lambda: "disconnect" in backend.calls)
        sender, _ = start(duo, 2)
        ended(sender, KVPoll.SUCCESS)
