"""Fault injection itself: each fault does to a transfer what it says, where it says, as often as it says."""

from __future__ import annotations

import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import kvcore
from kvcore import FailureCode, KVPoll, NothingPosted
from kvcore.errors import ConfigError, KVCoreError
from kvcore.faults import ControlTap, FaultPlan
from kvcore.hookspecs import RETRY, Capabilities, TicketKind, TicketState, Transfer
from kvcore.protocol.messages import Abort, Join, Status
from kvcore.states import RoomKey
from kvcore.wire import Letter, Ping
from tests.fake_backends import MemoryBackend, install
from tests.helpers import BACKENDS, Duo, duo, ended, limits, number, stays, wait_until

PAGES = [4, 5, 9]


@pytest.fixture(params=BACKENDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Duo]:
    with duo(request.param, ticket_s=0.5, quarantine_s=11.0) as both:
        yield both.pair()


def start(pair: Duo, room: int | None = None) -> tuple[kvcore.Sender, kvcore.Receiver]:
    sender, receiver = pair.open(room)
    receiver.receive(PAGES)
    sender.send(PAGES, last=True)
    return sender, receiver


def test_a_plan_without_faults_changes_nothing(pair: Duo) -> None:
    pair.transfer(PAGES, PAGES)
    assert pair.plan.counts == {}


def test_fail_quiescent_gives_the_engine_nothing(pair: Duo) -> None:
    pair.plan.fail("no more credits")
    sender, receiver = start(pair)
    for handle in (sender, receiver):
        ended(handle, KVPoll.FAILED)
        assert handle.failure is not None and handle.failure.code is FailureCode.BACKEND and "no more credits" in handle.failure.reason
        assert handle.wait_release_safe(5)
    assert pair.untouched() and pair.plan.counts == {"fail": 1}


def test_fail_not_quiescent_lets_the_engine_go_on(pair: Duo) -> None:
    pair.plan.fail(quiescent=False)
    sender, _receiver = start(pair)
    ended(sender, KVPoll.FAILED)
    wait_until(lambda: pair.equal(PAGES, PAGES), what="the write that goes on unseen")
    assert not sender.is_release_safe() and pair.prefill.stats().quarantined_pages == len(PAGES)


def test_fail_in_the_transfer_itself(pair: Duo) -> None:
    pair.plan.fail("refused", hook="kvcore_transfer")
    sender, _receiver = start(pair)
    ended(sender, KVPoll.FAILED)
    assert sender.failure is not None and "refused" in sender.failure.reason and pair.untouched()


@pytest.mark.parametrize("backend", BACKENDS)
def test_fail_can_poison_the_path(backend: str) -> None:
    with duo(backend) as pair:  # an engine may take a second to find its way again
        other, other_receiver = pair.pair().open()
        wait_until(lambda: other_receiver.poll() is KVPoll.WAITING_FOR_INPUT)
        pair.plan.fail("link down", peer_broken=True, times=1)
        sender, receiver = start(pair)
        for handle in (sender, receiver, other_receiver):
            ended(handle, KVPoll.FAILED)
        other.abort()
        pair.transfer(PAGES, PAGES)


@pytest.mark.parametrize("error", [RuntimeError, ValueError("of a kind"), SystemExit(3)])
def test_raise_reaches_the_core_and_not_the_engine(pair: Duo, error: BaseException | type[BaseException]) -> None:
    pair.plan.raise_(error)
    sender, _receiver = start(pair)
    ended(sender, KVPoll.FAILED)
    assert sender.failure is not None and "transfer raised" in sender.failure.reason
    assert pair.untouched() and pair.prefill.stats().quarantined_pages == len(PAGES)


def test_raise_nothing_posted_is_quiescent(pair: Duo) -> None:
    pair.plan.raise_(NothingPosted("queue full"))
    sender, _receiver = start(pair)
    ended(sender, KVPoll.FAILED)
    assert sender.failure is not None and "queue full" in sender.failure.reason and sender.wait_release_safe(5)


def test_raise_in_poll_of_one_room(pair: Duo) -> None:
    room = number()
    pair.plan.raise_(RuntimeError("poll lost"), hook="kvcore_poll", room=room)
    sender, _receiver = start(pair, room)
    pair.transfer([1], [2])
    ended(sender, KVPoll.FAILED)
    assert sender.failure is not None and "poll lost" in sender.failure.reason


def test_hold_makes_the_write_land_late(pair: Duo) -> None:
    hold = pair.plan.hold()
    sender, receiver = start(pair)
    wait_until(lambda: hold.held == 1 and receiver.poll() is KVPoll.TRANSFERRING)
    stays(lambda: pair.untouched() and receiver.poll() is KVPoll.TRANSFERRING, 0.1)
    hold.release()
    ended(receiver, KVPoll.SUCCESS)
    ended(sender, KVPoll.SUCCESS)
    assert hold.held == 0 and pair.equal(PAGES, PAGES)
    pair.transfer([1], [2])  # a released hold holds nothing more


def test_hold_of_poll_holds_only_the_news(pair: Duo) -> None:
    hold = pair.plan.hold(hook="kvcore_poll")
    sender, receiver = start(pair)
    wait_until(lambda: pair.equal(PAGES, PAGES))
    stays(lambda: sender.poll() is KVPoll.TRANSFERRING and hold.held == 1, 0.1)
    hold.release()
    ended(receiver, KVPoll.SUCCESS)


def test_an_abort_does_not_reach_what_is_held(pair: Duo) -> None:
    hold = pair.plan.hold()
    sender, receiver = start(pair)
    wait_until(lambda: hold.held == 1)
    receiver.abort()
    ended(sender, KVPoll.FAILED)
    stays(lambda: not receiver.is_release_safe() and not sender.is_release_safe(), 0.1)
    hold.release()
    assert receiver.wait_release_safe(5) and sender.wait_release_safe(5)
    assert pair.equal(PAGES, PAGES), "it was in flight, so it lands"


@pytest.mark.parametrize("hook", ["kvcore_transfer", "kvcore_poll"])
def test_hold_counts_as_a_room_that_the_backend_holds(pair: Duo, hook: str) -> None:
    hold = pair.plan.hold(hook=hook)
    sender, _receiver = start(pair)
    wait_until(lambda: hold.held == 1)
    key = RoomKey("prefill", sender.room, 0, sender.generation)
    assert key in pair.plan.hooks.kvcore_held_rooms()
    pair.plan.hooks.kvcore_clear(room=key)
    assert hold.held == 0 and key not in pair.plan.hooks.kvcore_held_rooms()
    hold.release()


def test_hold_of_a_slow_hook_blocks_that_hook_only(pair: Duo) -> None:
    hold = pair.plan.hold(hook="kvcore_endpoint")
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(pair.plan.hooks.kvcore_endpoint()), daemon=True)
    thread.start()
    wait_until(lambda: hold.held == 1)
    pair.transfer(PAGES, PAGES)
    assert not answers
    hold.release()
    thread.join(5)
    assert isinstance(answers[0], kvcore.Endpoint) and hold.held == 0


def test_delay_lands_after_its_time(pair: Duo) -> None:
    pair.plan.delay(0.2)
    begun = time.monotonic()
    sender, receiver = start(pair)
    ended(receiver, KVPoll.SUCCESS)
    ended(sender, KVPoll.SUCCESS)
    assert time.monotonic() - begun >= 0.2 and pair.equal(PAGES, PAGES)


def test_retry_is_submitted_again(pair: Duo) -> None:
    pair.plan.retry(times=2).retry(hook="kvcore_poll", times=1)
    pair.transfer(PAGES, PAGES)
    assert pair.plan.counts == {"retry": 3}


def test_drop_done_moves_the_data_and_never_ends(pair: Duo) -> None:
    pair.plan.drop_done()
    sender, _receiver = start(pair)
    wait_until(lambda: pair.equal(PAGES, PAGES))
    ended(sender, KVPoll.FAILED)
    assert sender.failure is not None and "ticket_s" in sender.failure.reason and not sender.is_release_safe()
    pair.plan.heal()
    assert sender.wait_release_safe(5), "it ended quiescent after all (R3)"


@pytest.mark.parametrize("pages", [PAGES, [6]])
def test_partial_posts_some_and_raises(pair: Duo, pages: list[int]) -> None:
    pair.plan.partial()
    sender, receiver = pair.open()
    receiver.receive(pages)
    sender.send(pages, last=True)
    ended(sender, KVPoll.FAILED)
    wait_until(lambda: not pair.untouched(), what="the part that was posted")
    assert not pair.equal(pages, pages) and pair.prefill.stats().quarantined_pages == len(pages)


def test_partial_of_a_single_descriptor_posts_some_of_its_bytes() -> None:
    with duo(layers=1, ticket_s=0.5) as pair:
        pair.plan.partial()
        sender, receiver = pair.open()
        receiver.receive([3])
        sender.send([3], last=True)
        ended(sender, KVPoll.FAILED)
        wait_until(lambda: pair.target[0][3, :32].all())
        assert not pair.target[0][3, 32:].any()


class Paged(MemoryBackend):
    """An engine that copies whole pages where a transfer names them."""

    able = Capabilities(descriptors="pages")


def test_partial_names_no_pages_since_they_would_be_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, Paged)
    with duo("fake") as pair:
        pair.pair().plan.partial()
        sender, _receiver = start(pair)
        ended(sender, KVPoll.FAILED)
    whole, part = fake.made[0].transfers
    assert whole.pool == "kv" and whole.local_pages is not None
    assert (part.pool, part.local_pages, part.remote_pages) == ("", None, None) and 0 < part.nbytes < 2 * 64 * len(PAGES)


def test_room_and_chunk_narrow(pair: Duo) -> None:
    room = number()
    pair.plan.fail(room=room, chunk=2)
    sender, receiver = pair.open(room)
    receiver.receive(PAGES)
    sender.send(PAGES[:1])
    sender.send([])  # an empty chunk has no transfer and no number
    wait_until(lambda: pair.equal(PAGES[:1], PAGES[:1]))
    sender.send(PAGES[1:], last=True)
    ended(sender, KVPoll.FAILED)
    assert sender.failure is not None and "chunk 2" in sender.failure.reason
    pair.transfer([1], [2])


def test_nth_times_and_rate_narrow(pair: Duo) -> None:
    pair.plan.retry(nth=2).retry(times=1).retry(rate=0.0)
    for _ in range(4):
        pair.transfer([1], [2])
    assert pair.plan.counts == {"retry": 2}


def test_rate_is_drawn_from_the_seed() -> None:
    def draws(seed: int) -> list[bool]:
        plan = FaultPlan(seed).raise_(rate=0.5, hook="kvcore_clear")
        found = []
        for _ in range(64):
            clear = plan.kvcore_clear(RoomKey("prefill", 1, 0, 1))
            try:
                next(clear)
            except RuntimeError:
                found.append(True)
            else:
                found.append(False)
        return found

    assert draws(1) == draws(1) != draws(2)
    assert 16 < sum(draws(1)) < 48


def test_of_several_faults_the_first_acts(pair: Duo) -> None:
    pair.plan.fail("the first").fail("the second")
    sender, _receiver = start(pair)
    ended(sender, KVPoll.FAILED)
    assert sender.failure is not None and "the first" in sender.failure.reason and pair.plan.counts == {"fail": 1}


def test_two_plans_stand_behind_each_other(pair: Duo) -> None:
    outer = FaultPlan()
    pair.prefill.add_observer(outer)
    first, second = outer.hold(), pair.plan.hold()
    sender, receiver = start(pair)
    wait_until(lambda: first.held == 1)
    first.release()
    wait_until(lambda: second.held == 1)
    assert pair.untouched()
    second.release()
    ended(receiver, KVPoll.SUCCESS)
    assert pair.equal(PAGES, PAGES) and sender.wait(5) is KVPoll.SUCCESS


def test_heal_ends_all_faults(pair: Duo) -> None:
    pair.plan.delay(60).fail()
    sender, receiver = start(pair)
    wait_until(lambda: pair.plan.counts == {"delay": 1})
    pair.plan.heal()
    ended(receiver, KVPoll.SUCCESS)
    ended(sender, KVPoll.SUCCESS)
    pair.transfer([1], [2])


@pytest.mark.parametrize("make", [lambda plan: plan.hold(hook="kvcore_clear"), lambda plan: plan.delay(1, hook="kvcore_abort")])
def test_a_hook_that_must_not_block_cannot_be_held(make: object) -> None:
    with pytest.raises(ConfigError, match="choose one of kvcore_transfer"):
        make(FaultPlan())  # type: ignore[operator]


@pytest.mark.parametrize("make", [FaultPlan.drop_done, FaultPlan.partial], ids=["drop_done", "partial"])
def test_a_fault_of_transfers_may_name_that_hook_and_no_other(make: Callable[..., FaultPlan]) -> None:
    plan = FaultPlan()
    assert make(plan, hook="kvcore_transfer", room=1) is plan
    with pytest.raises(ConfigError, match="hook 'kvcore_poll' cannot have this fault; choose one of kvcore_transfer"):
        make(plan, hook="kvcore_poll")


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"nth": 0}, "nth of a fault is 0"),
        ({"chunk": 0}, "chunk of a fault is 0"),
        ({"times": -1}, "times of a fault is -1"),
        ({"times": True}, "times of a fault is True"),
        ({"room": "7"}, "room of a fault is '7'"),
        ({"rate": math.nan}, "rate of a fault is nan"),
        ({"rate": 5}, "rate of a fault is 5"),
        ({"rate": None}, "rate of a fault is None"),
        ({"error": RuntimeError}, "cannot be narrowed by 'error'"),
    ],
)
@pytest.mark.parametrize("kind", ["fail", "hold", "retry", "drop_done", "partial"])
def test_a_fault_that_could_never_act_as_meant_is_refused(kind: str, where: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        getattr(FaultPlan(), kind)(**where)


@pytest.mark.parametrize(
    ("kind", "value"),
    [("delay", seconds) for seconds in (-1, math.nan, math.inf, "5", True)]
    + [("partial", share) for share in (-0.5, math.nan, 2, None)]
    + [("raise_", "boom"), ("raise_", None), ("raise_", 5)],
)
def test_what_a_fault_is_made_with_is_checked(kind: str, value: object) -> None:
    with pytest.raises(ConfigError, match="of a fault is"):
        getattr(FaultPlan(), kind)(value)


def test_what_a_tap_is_told_is_checked() -> None:
    with duo() as pair, ControlTap(pair.decode) as tap:
        for make in (lambda: tap.drop(times=-1), lambda: tap.duplicate(copies=-1), lambda: tap.delay(math.nan), lambda: tap.delay(-1)):
            with pytest.raises(ConfigError, match="of a fault is"):
                make()
        pair.transfer([1], [2])


def test_an_unknown_hook_is_refused() -> None:
    with pytest.raises(ConfigError, match="kvcore_frobnicate"):
        FaultPlan().raise_(hook="kvcore_frobnicate")


def test_a_plan_serves_one_manager(pair: Duo) -> None:
    with pytest.raises(KVCoreError, match="another for each manager"):
        pair.decode.add_observer(pair.plan)
    with pytest.raises(KVCoreError, match="add_observer first"):
        _ = FaultPlan().hooks


def test_a_room_is_cleared_while_workers_begin_transfers_of_others() -> None:
    """A backend that blocks is called by several threads."""
    plan, none, interval = FaultPlan(), np.empty(0, np.uint64), sys.getswitchinterval()
    plan.hold()

    def begin() -> None:
        for room in range(2000):
            regions = none.astype(np.int32)
            plan.kvcore_transfer(Transfer(RoomKey("prefill", room, 0, 1), "peer", regions, regions, none, none, none, none, none))

    sys.setswitchinterval(1e-5)
    try:
        worker = threading.Thread(target=begin)
        worker.start()
        while worker.is_alive():
            for wrapper in (plan.kvcore_clear(RoomKey("prefill", 1, 0, 1)), plan.kvcore_held_rooms()):
                next(wrapper)
                with pytest.raises(StopIteration):
                    wrapper.send([])  # type: ignore[arg-type]
        worker.join()
    finally:
        sys.setswitchinterval(interval)


def test_raising_housekeeping_hooks_disturb_no_room(pair: Duo) -> None:
    for hook in ("kvcore_clear", "kvcore_abort", "kvcore_held_rooms"):
        pair.plan.raise_(SystemExit(1), hook=hook)
    pair.transfer(PAGES, PAGES)
    hold = pair.plan.hold()
    sender, receiver = start(pair)
    wait_until(lambda: hold.held == 1)
    sender.abort()
    hold.release()
    assert sender.wait_release_safe(5) and receiver.wait_release_safe(5)
    pair.transfer([1], [2])
    assert pair.plan.counts["raise_"] >= 2 and pair.prefill.healthy


# --- control tap


def of(kind: type) -> object:
    return lambda letter, outgoing: isinstance(letter.body, kind)


def test_the_tap_sees_both_directions_and_leaves_no_trace(pair: Duo) -> None:
    with ControlTap(pair.decode) as tap:
        pair.transfer([1], [2])
        wait_until(lambda: any(isinstance(seen.letter.body, Join) and seen.outgoing for seen in tap.seen))
        assert any(isinstance(seen.letter.body, Status) and not seen.outgoing for seen in tap.seen)
        with pytest.raises(KVCoreError, match="tapped already"):
            ControlTap(pair.decode)
    before = len(tap.seen)
    pair.transfer([1], [2])
    assert len(tap.seen) == before
    tap.close()
    ControlTap(pair.decode).close()


def test_the_tap_drops_as_often_as_it_should(pair: Duo) -> None:
    with ControlTap(pair.decode) as tap:
        lost = tap.drop(of(Join), times=2)  # type: ignore[arg-type]
        pair.transfer([1], [2])
        assert lost.count == 2
        forever = tap.drop(of(Join))  # type: ignore[arg-type]
        sender, receiver = pair.open()
        receiver.receive([3])
        sender.send([3], last=True)
        stays(lambda: receiver.poll() is KVPoll.BOOTSTRAPPING, 0.2)
        forever.stop()
        ended(receiver, KVPoll.SUCCESS)


def test_the_tap_duplicates_and_delays(pair: Duo) -> None:
    with ControlTap(pair.decode) as tap:
        twice = tap.duplicate(copies=3)
        pair.transfer([1], [2])
        twice.stop()
        assert twice.count >= 4
        late = tap.delay(0.1, lambda letter, outgoing: not outgoing and isinstance(letter.body, Status))
        begun = time.monotonic()
        pair.transfer([1], [2])
        assert time.monotonic() - begun >= 0.1 and late.count >= 1
    assert not any(thread.name == "kvcore-tap" for thread in threading.enumerate())


def test_the_tap_injects_letters_and_bytes(pair: Duo) -> None:
    with ControlTap(pair.prefill) as tap:
        with pytest.raises(KVCoreError, match="passed the tap"):
            tap.inject(b"x", peer="decode-nobody")
        pair.transfer([1], [2])
        bad = pair.prefill.stats().counters["kvcore_bad_messages_total"]
        tap.inject(b"\xc1 garbage")
        wait_until(lambda: pair.prefill.stats().counters["kvcore_bad_messages_total"] == bad + 1)
        source = pair.decode.instance
        sender, receiver = pair.open()
        wait_until(lambda: receiver.poll() is KVPoll.WAITING_FOR_INPUT)
        tap.inject(Letter(1, source, pair.prefill.instance, Abort(sender.room, 0, receiver.generation, sender.generation)))
        ended(sender, KVPoll.FAILED)
        ended(receiver, KVPoll.FAILED)
        tap.inject(Letter(1, pair.prefill.instance, source, Ping()), outgoing=True)
        pair.transfer([1], [2])


def test_what_the_limits_of_these_tests_assume() -> None:
    assert limits().orphan_s < 5 and limits(ticket_s=0.5).ticket_s == 0.5
    assert RETRY.kind is TicketKind.RETRY and isinstance(RETRY, TicketState)
