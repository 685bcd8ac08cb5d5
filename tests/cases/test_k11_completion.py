"""Kind K11: a room ends by the ends of its own transfers, whether these are lost, put off, or told late."""

from __future__ import annotations

import itertools
import time
from collections import deque
from typing import Any

import pytest

from kvcore import FailureCode, KVPoll, Receiver, Sender, ledger
from kvcore.hookspecs import PENDING, RETRY, Ticket, Transfer
from tests.fake_backends import BlockingBackend, MemoryBackend, install, running, start
from tests.helpers import BACKENDS, SOON_S, Duo, cpu_s, duo, ended, number, wait_until

PAGES = [3, 8, 1]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# --- C93: the data arrives, the word of it does not


@pytest.mark.parametrize("lost", [1, 3], ids=["first chunk", "last chunk"])
@pytest.mark.parametrize("limit", ["ticket_s", "transfer_s"])
def test_c93_a_lost_end_fails_the_room_and_no_other(backend: str, limit: str, lost: int) -> None:
    """All pages arrive and the end of one transfer is never told: both sides fail at the limit, and the next room succeeds."""
    with duo(backend, **{"ticket_s": 1.0, limit: 0.3}) as pair:
        pair.pair()
        pair.plan.drop_done(chunk=lost, times=1)
        sender, receiver = pair.open()
        receiver.receive(PAGES)
        for turn, page in enumerate(PAGES):
            sender.send([page], last=turn == len(PAGES) - 1)
        wait_until(lambda: pair.equal(PAGES, PAGES), what="the data moved")
        began = time.monotonic()
        for handle in (sender, receiver):
            ended(handle, KVPoll.FAILED)
            assert handle.failure is not None and handle.failure.code is FailureCode.TIMEOUT and limit in handle.failure.reason
        assert time.monotonic() - began < 3
        assert not sender.is_release_safe() and not receiver.is_release_safe(), "nothing proves that it is over"
        pair.transfer([5], [6])
        pair.plan.heal()  # the word comes after all: it is proof, and no success
        assert sender.wait_release_safe(SOON_S) and receiver.wait_release_safe(SOON_S)
        assert sender.poll() is receiver.poll() is KVPoll.FAILED
        assert not (sender.release_unproven or receiver.release_unproven)
        sender.clear()
        receiver.clear()
        pair.stores_empty()


# --- C94: "try again" is no failure


@pytest.mark.parametrize("hook", ["kvcore_transfer", "kvcore_poll"])
def test_c94_try_again_twenty_times_is_no_failure(backend: str, hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that says "try again" twenty times, when asked to begin or when polled, and then accepts: success, all bytes right."""
    monkeypatch.setattr(ledger, "LAST_RETRY_S", 0.02)
    with duo(backend) as pair:
        pair.pair()
        pair.plan.retry(hook=hook, times=20)
        pair.transfer(PAGES, PAGES)
        assert pair.plan.counts == {"retry": 20}
        pair.stores_empty()


@pytest.mark.parametrize("base", [MemoryBackend, BlockingBackend])
def test_c94_try_again_of_one_room_holds_up_no_other(monkeypatch: pytest.MonkeyPatch, base: type[MemoryBackend]) -> None:
    """The same with backends that block, or not: while one room is put off the others go on."""
    monkeypatch.setattr(ledger, "LAST_RETRY_S", 0.02)
    fake = install(monkeypatch, base)
    with running(fake) as (pair,):
        engine, room, tries = fake.made[0], number(), itertools.count(1)
        engine.answers[room] = lambda transfer: RETRY if next(tries) <= 20 else engine.post(transfer)
        sender, _ = start(pair, 5, room)
        pair.transfer([6], [7])
        assert sender.poll() is KVPoll.TRANSFERRING
        ended(sender, KVPoll.SUCCESS)
        assert next(tries) == 22
        assert pair.equal([5], [5])


def put_off_for_ever(pair: Duo, room: int) -> None:
    busy, began = cpu_s(), time.monotonic()
    sender, receiver = start(pair, 5, room)
    for handle in (sender, receiver):
        ended(handle, KVPoll.FAILED)
        assert handle.failure is not None and handle.failure.code is FailureCode.TIMEOUT and "transfer_s" in handle.failure.reason
    took = time.monotonic() - began
    assert took < SOON_S and cpu_s() - busy < 0.2 + 0.3 * took, "nothing spins"
    assert sender.wait_release_safe(SOON_S) and receiver.wait_release_safe(SOON_S)
    sender.clear()
    receiver.clear()
    pair.stores_empty()


@pytest.mark.parametrize("hook", ["kvcore_transfer", "kvcore_poll"])
def test_c94_t6_try_again_for_ever_ends_at_the_limit(backend: str, hook: str) -> None:
    """A backend that says so for ever: the room fails on both sides at its limit, after a handful of tries; the next one succeeds."""
    with duo(backend, transfer_s=1.0, ticket_s=0.3) as pair:
        pair.pair()
        room = number()
        pair.plan.retry(hook=hook, room=room)
        put_off_for_ever(pair, room)
        assert 5 < pair.plan.counts["retry"] < 30
        pair.transfer([1], [2])


@pytest.mark.parametrize("base", [MemoryBackend, BlockingBackend])
def test_c94_try_again_for_ever_spins_in_no_worker(monkeypatch: pytest.MonkeyPatch, base: type[MemoryBackend]) -> None:
    """The same with backends that block, or not."""
    fake = install(monkeypatch, base)
    with running(fake, transfer_s=1.0, ticket_s=0.3) as (pair,):
        pair.pair()
        engine, room = fake.made[0], number()
        engine.answers[room] = lambda transfer: RETRY
        put_off_for_ever(pair, room)
        assert 5 < sum(transfer.room.number == room for transfer in engine.transfers) < 30


# --- C95: an old word about another transfer


class TaggedBackend(MemoryBackend):
    """Its tickets are tags derived from room and chunk. Word of a tag in ``late`` is on its way and has not come."""

    def __init__(self) -> None:
        super().__init__()
        self.late: set[Ticket] = set()
        self.used: set[Ticket] = set()
        self.keep: set[int] = set()
        """Rooms whose words are to be late."""

    def post(self, transfer: Transfer) -> Any:
        tag = (transfer.room, transfer.chunk)
        assert tag not in self.used, "a tag came twice"
        self.used.add(tag)
        if transfer.room.number in self.keep:
            self.late.add(tag)
        with self.lock:
            self.jobs[tag] = transfer
        return tag

    def state(self, ticket: Ticket) -> Any:
        return PENDING if ticket in self.late else super().state(ticket)


def many(pair: Duo, transfers: int, rooms: list[int], chunks: int = 32) -> None:
    """So many transfers, in rooms whose numbers are used again and again."""
    under_way: deque[tuple[Sender, Receiver]] = deque()
    for turn in range(-(-transfers // chunks)):
        if len(under_way) == len(rooms):
            done(under_way.popleft())
        sender, receiver = pair.open(rooms[turn % len(rooms)], attempt=turn)
        receiver.receive(range(chunks))
        for chunk in range(chunks):
            sender.send([chunk], last=chunk == chunks - 1)
        under_way.append((sender, receiver))
    while under_way:
        done(under_way.popleft())


def done(handles: tuple[Sender, Receiver]) -> None:
    for handle in handles:
        ended(handle, KVPoll.SUCCESS)
        handle.clear()


def old_word_after(monkeypatch: pytest.MonkeyPatch, transfers: int) -> None:
    fake = install(monkeypatch, TaggedBackend, cancel=False)
    with running(fake, ticket_s=600.0, transfer_s=600.0, quarantine_s=1000.0, input_s=600.0) as (pair,):
        pair.pair()
        engine, room = fake.made[0], number()
        engine.keep.add(room)
        first = start(pair, 1, room)
        wait_until(lambda: engine.late)
        (old,) = engine.late
        first[0].abort("not wanted")
        for handle in first:
            ended(handle, KVPoll.FAILED)
            handle.clear()
        many(pair, transfers, [number() for _ in range(4)])
        assert len(engine.used) >= transfers, "each had a tag of its own"
        for array in pair.target:
            array[:] = 0
        second, beside = start(pair, 2, room), start(pair, 3, room + 1_000_000)
        ended(beside[0], KVPoll.SUCCESS)
        wait_until(lambda: len(engine.late) == 2 and second[1].poll() is KVPoll.TRANSFERRING)
        before = pair.prefill.stats().tickets
        engine.late.discard(old)
        wait_until(lambda: pair.prefill.stats().tickets == before - 1, what="the old word was heard")
        assert {handle.poll() for handle in second} == {KVPoll.TRANSFERRING}, "and has completed nothing"
        assert not pair.equal([2], [2])
        assert first[0].wait_release_safe(SOON_S) and first[1].wait_release_safe(SOON_S), "but is the proof that was waited for"
        assert {handle.poll() for handle in first} == {KVPoll.FAILED}
        engine.late.clear()
        for handle in second:
            ended(handle, KVPoll.SUCCESS)
        assert pair.equal([2], [2])


def test_c95_an_old_word_completes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """After more transfers than 12 bits can number, word of the first comes, whose room is in use again: it completes nothing."""
    old_word_after(monkeypatch, 5_000)


@pytest.mark.slow
def test_c95_an_old_word_completes_nothing_after_70_000(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same after more transfers than 16 bits can number."""
    old_word_after(monkeypatch, 70_000)


@pytest.mark.parametrize("bits", [12, 16, 31, 32, 48])
def test_c95_rooms_whose_numbers_share_their_low_bits_keep_apart(backend: str, bits: int) -> None:
    """Two rooms in flight whose numbers differ above some bits only, with one chunk each: the end of one ends that one."""
    with duo(backend) as pair:
        pair.pair()
        rooms = [room := number(), room + (1 << bits)]
        holds = [pair.plan.hold(room=room) for room in rooms]
        both = [start(pair, page, room) for page, room in zip((1, 2), rooms, strict=True)]
        wait_until(lambda: all(hold.held == 1 for hold in holds))
        holds[1].release()
        for handle in both[1]:
            ended(handle, KVPoll.SUCCESS)
        wait_until(lambda: {handle.poll() for handle in both[0]} == {KVPoll.TRANSFERRING})  # which is said late
        assert pair.equal([2], [2]) and pair.untouched([1])
        holds[0].release()
        for handle in both[0]:
            ended(handle, KVPoll.SUCCESS)
