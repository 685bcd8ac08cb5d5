"""Cases of kind K3: how long memory is in use, and that what came in part is never taken for the whole."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from kvcore_conformance.stage.crew import Crew

from kvcore import FailureCode, Handle, KVManager, KVPoll, NothingPosted, Pool, Receiver, Sender
from kvcore.faults import ControlTap, FaultPlan, Hold
from kvcore.hookspecs import Transfer, hookimpl
from kvcore.protocol.messages import Abort, Drained, Here, Status, Which
from kvcore.wire import Letter
from tests.cases.engines import ENGINES, Shared, shared
from tests.fake_backends import MemoryBackend, install, running
from tests.helpers import (
    BACKENDS,
    MOMENTS,
    SOON_S,
    Array,
    Duo,
    Flag,
    at,
    config,
    duo,
    ended,
    meet,
    memory,
    number,
    stays,
    stores_empty,
    wait_until,
)

PAGES = [3, 8, 1]
A_MOMENT_S = 0.03
"""How long it is watched that something does not happen."""


@pytest.fixture(scope="module", params=ENGINES)
def lasting(request: pytest.FixtureRequest) -> Iterator[Shared]:
    with shared(request.param, orphan_s=0.5) as pair:
        yield pair


@pytest.fixture
def pair(lasting: Shared) -> Iterator[Shared]:
    """A pair over each engine; its rooms must have left nothing behind."""
    lasting.wipe()
    yield lasting
    lasting.tidy()
    lasting.stores_empty()
    assert lasting.prefill.stats().released_unproven == lasting.decode.stats().released_unproven == 0


@pytest.fixture(scope="module", params=ENGINES)
def lasting_rough(request: pytest.FixtureRequest) -> Iterator[Shared]:
    with shared(request.param, orphan_s=0.5, ticket_s=0.3, quarantine_s=60.0) as pair:
        yield pair


@pytest.fixture
def rough(lasting_rough: Shared) -> Iterator[Shared]:
    """A pair over each engine for tests after which pages wait for proof."""
    yield lasting_rough
    lasting_rough.tidy()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def side(who: str, sender: Handle, receiver: Handle) -> Handle:
    return sender if who == "prefill" else receiver


def why(handle: Handle) -> str:
    """The reason of a room that fails."""
    ended(handle, KVPoll.FAILED)
    assert handle.failure is not None
    return handle.failure.reason


def unsafe(*handles: Handle) -> Callable[[], bool]:
    return lambda: not any(handle.is_release_safe() for handle in handles)


def proved(*handles: Handle) -> None:
    """Pages are safe soon, long before ``quarantine_s``, and by evidence."""
    for handle in handles:
        assert handle.wait_release_safe(SOON_S), handle
        assert not handle.release_unproven


def drained(tap: ControlTap) -> list[bool]:
    """What was said of pairs: drained, or expired."""
    return [not seen.letter.body.expired for seen in tap.seen if isinstance(seen.letter.body, Drained)]


# --- C22, C24, C25: when pages may be used again


@pytest.mark.parametrize("held", ["the write", "its news"])
@pytest.mark.parametrize("end", ["abort", "clear"])
@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_c22_r2_r5_pages_wait_for_the_write_under_way(pair: Shared, who: str, end: str, held: str) -> None:
    """However a room ends while its pages are written: they are safe, on both sides, when the write is over, and no other begins."""
    hold = pair.plan.hold(hook="kvcore_transfer" if held == "the write" else "kvcore_poll", chunk=1)
    sender, receiver = pair.published(PAGES)
    late = Flag()
    sender.send(PAGES[:1])
    sender.send(PAGES[1:2], ready=late)
    wait_until(lambda: hold.held == 1 and (held == "the write" or pair.equal(PAGES[:1], PAGES[:1])))
    with ControlTap(pair.decode) as tap:
        getattr(side(who, sender, receiver), end)()
        ended(sender, KVPoll.FAILED)
        ended(receiver, KVPoll.FAILED)
        late.set()
        sender.send(PAGES[2:], last=True)
        stays(lambda: unsafe(sender, receiver)() and not drained(tap), A_MOMENT_S)
        tap.drop(lambda letter, outgoing: isinstance(letter.body, Abort))  # it has been asked, and is told without being asked again
        hold.release()
        proved(receiver, sender)
        assert drained(tap)[-1]
    assert pair.equal(PAGES[:1], PAGES[:1]), "it landed before drained was said"
    pair.wipe()  # another request's by now
    stays(pair.untouched, A_MOMENT_S)
    assert pair.read(sender.room) == {1}


def come(pair: Shared, moment: str) -> tuple[Sender, Receiver]:
    """A room that has come so far, see ``at``; or whose pages are not ready, or refused by the engine again and again."""
    if moment in MOMENTS:
        return at(pair, moment, pages=PAGES)
    if moment == "tried again":
        pair.plan.retry()
    sender, receiver = at(pair, "published", pages=PAGES)
    sender.send(PAGES, last=True, ready=Flag() if moment == "not ready" else None)
    wait_until(lambda: receiver.poll() is KVPoll.TRANSFERRING)
    wait_until(lambda: moment != "tried again" or pair.plan.counts.get("retry", 0) > 1)
    return sender, receiver


@pytest.mark.parametrize("moment", [*MOMENTS, "not ready", "tried again"])
@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_c24_pages_are_safe_at_once_when_idle_and_after_the_drain_when_busy(pair: Shared, who: str, moment: str) -> None:
    """Over every engine the drained notice comes by itself: no pages ever wait for a limit."""
    sender, receiver = come(pair, moment)
    side(who, sender, receiver).abort()
    ended(sender, KVPoll.FAILED)
    ended(receiver, KVPoll.FAILED)
    if moment == "in flight":
        stays(unsafe(sender, receiver), A_MOMENT_S)
        pair.plan.heal()
    proved(sender, receiver)
    assert moment == "in flight" or pair.untouched()


class Boastful(MemoryBackend):
    """``disconnect`` says that it proves something."""

    @hookimpl
    def kvcore_disconnect(self, peer: str) -> bool:
        super().kvcore_disconnect(peer)
        return True


LACKS = ["backend fake cannot cancel: pages of aborted rooms", "backend fake cannot fence: pages that a lost peer may still write"]


@pytest.mark.parametrize("end", ["lost", "closed"])
@pytest.mark.parametrize("able", [True, False], ids=["able", "not able"])
def test_c24_what_an_engine_lacks_is_said_at_the_start_and_holds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, able: bool, end: str
) -> None:
    """R4: a disconnect is believed from a backend that declares it as proof; each lack of a backend is one line when it starts."""
    fake = install(monkeypatch, Boastful, cancel=able, fences_on_disconnect=able, needs_process_to_write=False)
    with caplog.at_level(logging.INFO, "kvcore.backend"), running(fake, liveness_s=0.6) as (pair,):
        said = [record.getMessage() for record in caplog.records if record.name == "kvcore.backend"]
        assert len(said) == (0 if able else 4) and all(line.startswith(lack) for line, lack in zip(said, LACKS * 2, strict=False))
        _, receiver = at(pair.pair(), "published", pages=PAGES)
        with ControlTap(pair.decode) as tap:
            tap.drop()
            if end == "closed":
                receiver.abort("not wanted")
                pair.decode.close()
                assert receiver.is_release_safe() is able and not receiver.release_unproven
                return
            ended(receiver, KVPoll.FAILED)
            wait_until(lambda: "disconnect" in fake.made[1].calls)
            if not able:
                stays(unsafe(receiver), 0.3)
        if not able:
            pair.transfer([4], [5])  # has them pair again, so that prefill can say that it is drained
        proved(receiver)


def test_c25_drained_waits_for_what_was_posted_before_posting_failed(pair: Shared) -> None:
    """A room that fails since a later chunk cannot be posted is drained when its earlier ones have ended."""
    room = number()
    holds = [pair.plan.hold(room=room, chunk=chunk) for chunk in (1, 2)]
    pair.plan.raise_(NothingPosted("no queue pair"), room=room, chunk=3)
    sender, receiver = pair.published(PAGES, room)
    for page in PAGES:
        sender.send([page])
    assert "no queue pair" in why(sender) and "no queue pair" in why(receiver)
    for hold in holds:
        assert hold.held == 1
        stays(unsafe(sender, receiver), A_MOMENT_S)
        hold.release()
    proved(sender, receiver)
    assert pair.equal(PAGES[:2], PAGES[:2]) and pair.untouched(PAGES[2:])


def test_c25_an_error_for_one_part_of_a_chunk_leaves_unknown_what_was_posted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of a chunk's parts raises: the first is waited for, which proves nothing of the second, and the third never starts. (For
    a part that was surely not posted: C20.)"""
    fake = install(monkeypatch, MemoryBackend, max_descriptors=1, cancel=False)
    with running(fake) as (pair,):
        engine, room, calls = fake.made[0], number(), itertools.count(1)

        def second_fails(transfer: Transfer) -> object:
            if next(calls) == 2:
                raise RuntimeError("no queue pair")
            return engine.post(transfer)

        engine.answers[room] = second_fails
        engine.held.set()
        sender, receiver = pair.open(room)
        receiver.receive([1, 5, 9])
        sender.send([1, 5, 9], last=True)
        assert "no queue pair" in why(sender) and "no queue pair" in why(receiver)
        wait_until(lambda: [(key.number, len(tickets)) for key, tickets in engine.aborted] == [(room, 1)])
        engine.held.clear()
        wait_until(lambda: not engine.jobs)
        stays(unsafe(sender, receiver), A_MOMENT_S)
        assert len(engine.transfers) == 2


@pytest.mark.parametrize("fault", [lambda plan: plan.raise_(chunk=2), lambda plan: plan.partial(chunk=2)], ids=["raises", "partial"])
def test_c25_what_an_error_leaves_unknown_is_never_called_drained(backend: str, fault: Callable[[FaultPlan], object]) -> None:
    """An exception is no word about what was posted: the pages wait for proof or the limit, also when all that is known has ended."""
    with duo(backend, ticket_s=0.2, liveness_s=0.8, quarantine_s=1.1) as pair:
        pair.pair()
        fault(pair.plan)
        hold = pair.plan.hold(chunk=1)
        sender, receiver = pair.open()
        with ControlTap(pair.decode) as tap:
            receiver.receive(PAGES)
            sender.send(PAGES[:1])
            sender.send(PAGES[1:])
            assert "injected" in why(sender) or "RuntimeError" in why(sender)
            ended(receiver, KVPoll.FAILED)
            hold.release()
            stays(unsafe(sender, receiver), 0.3)
            for handle in (sender, receiver):
                assert handle.wait_release_safe(SOON_S) and handle.release_unproven
            assert not any(drained(tap))


# --- C26, C27: what came in part or too late is no success


PASSES: dict[str, tuple[str, str]] = {
    "opens": ("bootstrap_s", "opened"),
    "publishes": ("bootstrap_s", "joined"),
    "waits": ("input_s", "published"),
    "waits for an event": ("transfer_s", "not ready"),
    "has all bytes": ("transfer_s", "written"),
    "has all bytes of a ticket": ("ticket_s", "written"),
}
"""What decode does when prefill's hold is over: the limit that passed, and how far the room had come."""


@pytest.mark.parametrize("late", PASSES)
def test_c26_a_room_whose_hold_has_expired_never_succeeds_at_decode(backend: str, late: str) -> None:
    """Prefill's limit passes, decode does not hear of it and comes later: it fails, whatever bytes it has and prefill still knows."""
    limit, moment = PASSES[late]
    changes = {"orphan_s": 1.0, "quarantine_s": 30.0, "own": {"prefill": {limit: 0.5}}}
    with duo(backend, **changes) as pair, ControlTap(pair.decode) as tap:  # type: ignore[arg-type]
        meet(pair)
        hold = pair.plan.hold(hook="kvcore_poll")
        stored, cleared, forgotten = (Late(pair, tap, moment, pages) for pages in ([1, 2], [11, 12], [21, 22]))
        for each in (stored, cleared, forgotten):
            assert limit in why(each.sender)
        cleared.sender.clear()
        hold.release()
        assert limit in stored.comes() and limit in cleared.comes()
        for each in (stored, cleared, forgotten):
            each.sender.clear()
        stores_empty(pair.prefill)
        forgotten.comes()


class Late:
    """A room of which decode does not hear that prefill's limit has passed."""

    def __init__(self, pair: Duo, tap: ControlTap, moment: str, pages: list[int]) -> None:
        self.pair, self.moment, self.pages = pair, moment, pages
        self.room = number()
        self.cut = tap.drop(
            lambda letter, outgoing: (
                isinstance(letter.body, Status) and letter.body.room == self.room and letter.body.state is KVPoll.FAILED
            )
        )
        self.sender = pair.prefill.sender(self.room)
        self.receiver: Receiver | None = None
        if moment == "opened":
            return
        self.receiver = receiver = pair.decode.receiver(self.room, pair.prefill.address)
        wait_until(lambda: receiver.poll() is KVPoll.WAITING_FOR_INPUT)
        if moment != "joined":
            receiver.receive(pages)
        if moment in ("not ready", "written"):
            self.sender.send(pages, last=True, ready=Flag() if moment == "not ready" else None)
        wait_until(lambda: moment != "written" or pair.equal(pages, pages))

    def comes(self) -> str:
        """Decode comes, after all: why it fails."""
        assert self.receiver is None or not self.receiver.poll().terminal
        self.cut.stop()
        receiver = self.receiver or self.pair.decode.receiver(self.room, self.pair.prefill.address)
        if self.moment in ("opened", "joined"):
            receiver.receive(self.pages)
        reason = why(receiver)
        assert receiver.failure is not None and receiver.failure.code in (FailureCode.TIMEOUT, FailureCode.NO_SUCH_ROOM)
        proved(self.sender, receiver)
        assert receiver.record is None and (self.moment == "written" or self.pair.untouched(self.pages))
        return reason


def test_c26_a_process_that_was_frozen_past_the_hold_fails_when_it_goes_on(crew: Crew) -> None:
    """Decode is stopped while prefill's limit passes; going on it hears that its rooms are over, and their pages are safe by evidence."""
    with crew.lend(2) as (one, other):
        prefill, decode = one.start("prefill", limits={"transfer_s": 0.5}), other.start("decode")
        rooms = [(prefill.sender(room), decode.receiver(room, prefill)) for room in (1, 2)]
        for page, (sender, receiver) in enumerate(rooms):
            receiver.receive([page])
            assert sender.until("WAITING_FOR_INPUT") == "WAITING_FOR_INPUT"
        decode.freeze()
        for sender, _ in rooms:
            sender.send([3], last=True, gate="never")
        for sender, _ in rooms:
            assert sender.wait() == "FAILED"
        rooms[0][0].clear()
        decode.thaw()
        for sender, receiver in rooms:
            assert receiver.wait() == "FAILED"
            assert receiver.failure == sender.failure and "transfer_s" in receiver.failure.text
            assert receiver.safe() and not receiver.unproven
        assert decode.touched() == []


@pytest.fixture(scope="module", params=BACKENDS)
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    crew = Crew(backend=request.param)
    try:
        yield crew
    finally:
        crew.end()


PART_FAULTS: dict[str, Callable[..., object]] = {
    "failed": lambda plan, **where: plan.fail("injected", **where),
    "failed, perhaps still running": lambda plan, **where: plan.fail("injected", quiescent=False, **where),
    "not posted": lambda plan, **where: plan.raise_(NothingPosted("injected"), **where),
    "raised": lambda plan, **where: plan.raise_(RuntimeError("injected"), **where),
    "partly posted": lambda plan, **where: plan.partial(**where),
    "end never told": lambda plan, **where: plan.drop_done(**where),
}


@pytest.mark.parametrize("others", ["end before", "end after"])
@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("fault", PART_FAULTS)
def test_c27_a_room_of_which_a_part_failed_never_succeeds(rough: Shared, fault: str, chunk: int, others: str) -> None:
    """Whichever part fails, however, and in whichever order the parts end: FAILED on both sides, for good."""
    room = number()
    news = rough.plan.hold(hook="kvcore_poll", room=room, chunk=4 - chunk) if others == "end after" else Hold()
    PART_FAULTS[fault](rough.plan, room=room, chunk=chunk)
    sender, receiver = rough.open(room)
    receiver.receive(PAGES)
    for number_of, page in enumerate(PAGES, start=1):
        sender.send([page], last=number_of == 3, record=b"first token" if number_of == 3 else b"")
    reason = why(sender)
    assert reason == why(receiver)
    assert f"chunk {chunk} " in reason or fault == "end never told"  # of two ends that never come either is the first to be missed
    news.release()
    rough.plan.heal()
    if fault in ("failed", "not posted", "end never told"):
        proved(sender, receiver)
    stays(lambda: sender.poll() is receiver.poll() is KVPoll.FAILED and receiver.record is None, A_MOMENT_S)
    assert why(sender) == why(receiver) == reason


def test_c27_no_message_in_any_order_turns_a_failure_into_success(backend: str) -> None:
    """All that its sender could ever have said of a failed room arrives in every order; a destination not published has no success."""
    with duo(backend) as pair:
        pair.pair()
        with ControlTap(pair.decode) as tap:
            unpublished = pair.open()
            wait_until(lambda: unpublished[1].poll() is KVPoll.WAITING_FOR_INPUT)
            say(tap, pair, *unpublished, KVPoll.TRANSFERRING, KVPoll.SUCCESS)
            sender, receiver = at(pair, "published", pages=PAGES)
            sender.abort("a part was lost")
            assert why(receiver) == "a part was lost"
            for order in itertools.permutations((Here, KVPoll.TRANSFERRING, KVPoll.SUCCESS, Which, Drained)):
                say(tap, pair, sender, receiver, *order)
            pair.transfer([1], [2])  # all before it has been taken
            assert why(receiver) == "a part was lost" and receiver.record is None
            assert unpublished[1].poll() is KVPoll.WAITING_FOR_INPUT


def say(tap: ControlTap, pair: Duo, sender: Handle, receiver: Handle, *what: Any) -> None:
    """Have decode hear this of a pair: kinds of messages, or verdicts."""
    for kind in what:
        head = (sender.room, sender.attempt, receiver.generation, sender.generation)
        body = Status(*head, kind, None, b"wrong") if isinstance(kind, KVPoll) else kind(*head)
        tap.inject(Letter(1, pair.prefill.instance, pair.decode.instance, body))


# --- C28, C29: chunks that are not ready, sends that raise


def rewrite(pair: Duo) -> None:
    """What prefill computes in the meantime."""
    for array in pair.source:
        array[:] = np.roll(array, 1, axis=0)


@pytest.mark.parametrize("late", [1, 2, 3])
def test_c28_t4_no_byte_of_a_chunk_is_read_before_its_event_has_fired(pair: Shared, late: int) -> None:
    """Over every engine: the other chunks go on, and what arrives of this one is what its pages held when the event fired."""
    event = Flag()
    sender, receiver = pair.open()
    receiver.receive(PAGES)
    for chunk, page in enumerate(PAGES, start=1):
        sender.send([page], last=chunk == 3, ready=event if chunk == late else None)
    others = [page for chunk, page in enumerate(PAGES, start=1) if chunk != late]
    wait_until(lambda: pair.equal(others, others) and receiver.poll() is KVPoll.TRANSFERRING)
    wait_until(lambda: sender.metrics.bytes == 2 * sum(array[0].nbytes for array in pair.source))
    stays(lambda: pair.untouched([PAGES[late - 1]]) and receiver.poll() is KVPoll.TRANSFERRING, A_MOMENT_S)
    assert pair.read(sender.room) == {1, 2, 3} - {late}
    rewrite(pair)
    event.set()
    ended(receiver, KVPoll.SUCCESS)
    ended(sender, KVPoll.SUCCESS)
    assert pair.equal([PAGES[late - 1]], [PAGES[late - 1]]) and not pair.equal(others, others)


@pytest.mark.parametrize("end", ["abort", "clear"])
@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_c28_t4_the_wait_for_an_event_ends_with_the_room(pair: Shared, who: str, end: str) -> None:
    """The pages are safe at once, and an event that fires later has nothing read."""
    event = Flag()
    sender, receiver = pair.published(PAGES)
    sender.send(PAGES, last=True, ready=event)
    wait_until(lambda: receiver.poll() is KVPoll.TRANSFERRING)
    getattr(side(who, sender, receiver), end)()
    proved(sender, receiver)
    event.set()
    stays(lambda: pair.untouched() and not pair.read(sender.room), A_MOMENT_S)
    assert sender.poll() is receiver.poll() is KVPoll.FAILED


def test_c28_an_event_that_never_fires_ends_by_the_rooms_limit(backend: str) -> None:
    """An event is waited for no longer than the room lives."""
    with duo(backend, transfer_s=0.5) as pair:
        sender, receiver = pair.open()
        event = Flag()
        receiver.receive(PAGES)
        sender.send(PAGES, last=True, ready=event)
        assert "transfer_s" in why(sender) and "transfer_s" in why(receiver)
        proved(sender, receiver)
        event.set()
        stays(pair.untouched, A_MOMENT_S)


class Unheard(BaseException):
    """What no ``except Exception`` catches, and what has no words."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Raises:
    """A ready event that raises."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def query(self) -> bool:
        raise self.error


ERRORS = [RuntimeError("evicted"), KeyboardInterrupt("evicted"), SystemExit("evicted"), GeneratorExit("evicted"), Unheard()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("place", ["kvcore_transfer", "kvcore_poll", "ready"])
def test_c29_c44_what_a_send_raises_fails_its_room_on_both_sides_with_its_text(rough: Shared, place: str, error: BaseException) -> None:
    """Whatever is raised in the core's threads, the worker of a blocking engine among them: that room fails, the others go on."""
    room = number()
    if place != "ready":
        rough.plan.raise_(error, hook=place, room=room)
    (bad, bad_receiver), (good, good_receiver) = rough.open(room), rough.open()
    bad_receiver.receive(PAGES)
    good_receiver.receive([20])
    bad.send(PAGES, last=True, ready=Raises(error) if place == "ready" else None)
    good.send([21], last=True)
    assert why(bad) == why(bad_receiver)
    assert type(error).__name__ in why(bad) and ("evicted" in why(bad) or isinstance(error, Unheard))
    ended(good, KVPoll.SUCCESS)
    ended(good_receiver, KVPoll.SUCCESS)
    rough.transfer([22], [23])
    assert rough.prefill.healthy


# --- C30, C31: side records


@dataclass
class Slots:
    """A pair with a second pool for side records in memory."""

    prefill: KVManager
    decode: KVManager
    source: list[Array]
    target: list[Array]
    plan: FaultPlan

    def open(self, slot: int, room: int | None = None, attempt: int = 0) -> tuple[Sender, Receiver]:
        """A room whose record goes to this slot, from the slot of the same number."""
        room = number() if room is None else room
        sender, receiver = self.prefill.sender(room, attempt), self.decode.receiver(room, self.prefill.address, attempt=attempt)
        receiver.receive({"kv": [slot], "aux": [slot]})
        return sender, receiver

    def send(self, sender: Sender, page: int) -> None:
        """Page, slot and record of one request."""
        sender.send({"kv": [page], "aux": [page]}, last=True, record=b"record %d" % page)

    def holds(self, slot: int, page: int) -> bool:
        """Whether a slot has what was sent of a page."""
        return all(np.array_equal(mine[page], theirs[slot]) for mine, theirs in zip(self.source, self.target, strict=True))


@contextmanager
def slots_over(backend: str) -> Iterator[Slots]:
    def pools(arrays: list[Array]) -> list[Pool]:
        return [Pool.from_tensors("kv", arrays[:2], page_size=16), Pool.from_tensors("aux", arrays[2:], page_size=1)]

    source, target = memory(16, 3, seed=5), memory(16, 3)
    plan = FaultPlan()
    with (
        KVManager(config("prefill", backend), pools(source)) as prefill,
        KVManager(config("decode", backend), pools(target)) as decode,
    ):
        prefill.add_observer(plan)
        try:
            yield Slots(prefill, decode, source, target, plan)
        finally:
            plan.heal()


@pytest.fixture(scope="module", params=BACKENDS)
def lasting_slots(request: pytest.FixtureRequest) -> Iterator[Slots]:
    with slots_over(request.param) as pair:
        yield pair


@pytest.fixture
def slots(lasting_slots: Slots) -> Iterator[Slots]:
    """A pair with slots for side records, all zero."""
    for array in lasting_slots.target:
        array[:] = 0
    yield lasting_slots
    lasting_slots.plan.heal()


@pytest.mark.parametrize("seed", range(4))
def test_c30_every_room_gets_the_side_record_of_its_own(slots: Slots, seed: int) -> None:
    """In any order of the rooms' ends, on the control channel and in memory alike; until then a room has none."""
    choose = random.Random(seed)
    rooms, pages = choose.sample(range(16), 8), choose.sample(range(16), 8)
    opened = [(*slots.open(slot), slot, page) for slot, page in zip(rooms, pages, strict=True)]
    holds = {sender.room: slots.plan.hold(room=sender.room) for sender, *_ in opened}
    for sender, _, _, page in opened:
        slots.send(sender, page)
    choose.shuffle(opened)
    for place, (sender, receiver, slot, page) in enumerate(opened):
        assert receiver.record is None and not slots.target[2][slot].any()
        holds[sender.room].release()
        ended(receiver, KVPoll.SUCCESS)
        assert receiver.record == b"record %d" % page and slots.holds(slot, page)
        assert all(other.record is None and not other.poll().terminal for _, other, *_ in opened[place + 1 :])


NAMES = ["attempt", "receiver's lifetime", "sender's lifetime", "both lifetimes"]


@pytest.mark.parametrize("wrong", NAMES)
def test_c30_a_side_record_that_names_another_room_is_not_used(slots: Slots, wrong: str) -> None:
    """A record told with another room's name reaches neither; each ends with its own, or with none if it fails."""
    with ControlTap(slots.decode) as tap:
        (mine, receiver), (other, other_receiver), (doomed, doomed_receiver) = slots.open(1), slots.open(2), slots.open(3)
        for handle in (mine, other, doomed):
            wait_until(lambda handle=handle: handle.poll() is KVPoll.WAITING_FOR_INPUT)
        room = other.room if wrong == "both lifetimes" else mine.room
        rg = other_receiver.generation if wrong == "receiver's lifetime" else receiver.generation
        sg = other.generation if wrong == "sender's lifetime" else mine.generation
        body = Status(room, int(wrong == "attempt"), rg, sg, KVPoll.SUCCESS, None, b"of another")
        tap.inject(Letter(1, slots.prefill.instance, slots.decode.instance, body))
        doomed.abort("no record")  # what comes after the letter
        assert why(doomed_receiver) == "no record" and doomed_receiver.record is None
    assert receiver.poll() is other_receiver.poll() is KVPoll.WAITING_FOR_INPUT
    for sender, each, page in ((mine, receiver, 5), (other, other_receiver, 6)):
        slots.send(sender, page)
        ended(each, KVPoll.SUCCESS)
        assert each.record == b"record %d" % page


@pytest.mark.parametrize("use", ["another room", "another attempt", "the same room"])
@pytest.mark.parametrize("polled", ["before its sender", "before its chunk", "before its bytes", "before their news"])
def test_c31_a_room_in_a_used_slot_waits_for_its_own_record(slots: Slots, use: str, polled: str) -> None:
    """What an earlier room left in a slot is neither success nor failure for the next one."""
    first, first_receiver = slots.open(4)
    slots.send(first, 9)
    for handle in (first, first_receiver):
        ended(handle, KVPoll.SUCCESS)
        handle.clear()
    assert slots.holds(4, 9)
    room, attempt = {"another room": (number(), 0), "another attempt": (first.room, 1), "the same room": (first.room, 0)}[use]
    hold = slots.plan.hold(hook="kvcore_poll" if polled == "before their news" else "kvcore_transfer")
    receiver = slots.decode.receiver(room, slots.prefill.address, attempt=attempt)
    receiver.receive({"kv": [4], "aux": [4]})
    sender = None if polled == "before its sender" else slots.prefill.sender(room, attempt)
    under_way = polled in ("before its bytes", "before their news")
    if sender is not None and under_way:
        slots.send(sender, 10)
        wait_until(lambda: hold.held)
    stays(lambda: not receiver.poll().terminal and receiver.record is None, A_MOMENT_S)
    assert polled == "before their news" or slots.holds(4, 9)
    hold.release()
    sender = sender or slots.prefill.sender(room, attempt)
    if not under_way:
        slots.send(sender, 10)
    ended(receiver, KVPoll.SUCCESS)
    assert receiver.record == b"record 10" and slots.holds(4, 10)
