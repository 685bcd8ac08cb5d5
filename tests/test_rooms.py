"""Rules A (abort) and C (clear) of running managers, one test for each thing they promise; and the table that keeps the rooms."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from kvcore import FailureCode, Handle, KVManager, KVPoll, Pool, RoomError, Sender, hookimpl, rooms
from kvcore.aloud import Aloud
from kvcore.faults import ControlTap
from kvcore.hookspecs import Transfer
from kvcore.protocol import events as ev
from kvcore.protocol.messages import Abort, Destination, Here, Join, Status
from kvcore.room import Room
from kvcore.rooms import AT_ONCE, RoomTable
from kvcore.states import Reason, RoomId, RoomKey
from kvcore.wire import Letter
from tests.helpers import (
    BACKENDS,
    SOON_S,
    Calls,
    Duo,
    Flag,
    duo,
    ended,
    full_stores,
    manager,
    memory,
    number,
    stays,
    stores_empty,
    wait_until,
)
from tests.interrupts import everywhere

PAGES = [3, 8, 1]


@pytest.fixture(params=BACKENDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Duo]:
    with duo(request.param, orphan_s=0.6) as both:
        yield both.pair()


def failed_with(handle: Handle, text: str, code: FailureCode, side: str) -> None:
    ended(handle, KVPoll.FAILED)
    failure = handle.failure
    assert failure is not None and text in failure.reason and (failure.code, failure.side) == (code, side), failure


def published(pair: Duo) -> tuple[Handle, Handle]:
    sender, receiver = pair.open()
    receiver.receive(PAGES)
    wait_until(lambda: sender.poll() is KVPoll.WAITING_FOR_INPUT)
    return sender, receiver


# --- A: abort


def test_a1_abort_from_many_threads_on_both_sides_at_once(pair: Duo) -> None:
    opened_rooms = [pair.open() for _ in range(20)]
    for number_of, (sender, receiver) in enumerate(opened_rooms):
        if number_of % 2:
            receiver.receive(PAGES)
            sender.send(PAGES)
    errors: list[BaseException] = []
    start = threading.Barrier(8)

    def abort(which: int) -> None:
        start.wait(5)
        try:
            for handles in opened_rooms:
                for _ in range(2):
                    handles[which % 2].abort(f"thread {which}")
                    assert handles[which % 2].poll() is KVPoll.FAILED
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=abort, args=(which,), daemon=True) for which in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not errors and not any(thread.is_alive() for thread in threads)
    for sender, receiver in opened_rooms:
        for handle in (sender, receiver):
            assert handle.failure is not None and handle.failure.reason.startswith("thread ")
            handle.clear()
    pair.stores_empty()


def test_a1_abort_does_not_wait_for_an_engine_or_a_network_that_is_stuck(pair: Duo) -> None:
    stuck, entered = threading.Event(), threading.Event()

    class Stuck:
        @hookimpl(tryfirst=True)
        def kvcore_transfer(self, transfer: Transfer) -> None:
            entered.set()
            stuck.wait(SOON_S)

    pair.prefill.add_observer(Stuck())
    pair.prefill.control.call(lambda: stuck.wait(SOON_S))
    pair.decode.control.call(lambda: stuck.wait(SOON_S))
    sender, receiver = published_without_network(pair)
    assert not entered.is_set()
    longest = 0.0
    for handle in (sender, receiver):
        begun = time.monotonic()
        handle.abort()
        handle.clear()
        longest = max(longest, time.monotonic() - begun)
    assert longest < SOON_S / 5
    stuck.set()
    pair.stores_empty()


def published_without_network(pair: Duo) -> tuple[Handle, Handle]:
    sender, receiver = pair.open()
    receiver.receive(PAGES)
    sender.send(PAGES)
    return sender, receiver


def test_a4_the_code_given_to_abort_travels(pair: Duo) -> None:
    sender, receiver = published(pair)
    sender.abort("out of pages", FailureCode.RESOURCES)
    failed_with(receiver, "out of pages", FailureCode.RESOURCES, "prefill")


def test_a5_after_abort_nothing_more_is_started_and_what_runs_is_cancelled(pair: Duo) -> None:
    calls = Calls()
    pair.prefill.add_observer(calls)
    sender, receiver = published(pair)
    hold, ready = pair.plan.hold(hook="kvcore_poll"), Flag()
    sender.send(PAGES[:1])
    wait_until(lambda: hold.held == 1)
    sender.send(PAGES[1:], ready=ready)
    sender.abort()
    ready.set()
    sender.send([5], last=True)
    wait_until(lambda: bool(calls.aborts))
    hold.release()
    assert sender.wait_release_safe(5) and receiver.wait_release_safe(5)
    assert [transfer.chunk for transfer in calls.transfers if transfer.room.number == sender.room] == [1, 1]  # the plan passes it on
    assert set(calls.aborts) == {(RoomKey("prefill", sender.room, 0, sender.generation), 1)}  # here too


def test_a7_a_receiver_of_a_room_that_nobody_opens_is_told_after_orphan_s(pair: Duo) -> None:
    begun = time.monotonic()
    receiver = pair.decode.receiver(number(), pair.prefill.address)
    stays(lambda: receiver.poll() is KVPoll.BOOTSTRAPPING, 0.4)
    failed_with(receiver, "no such room", FailureCode.NO_SUCH_ROOM, "prefill")
    assert time.monotonic() - begun >= 0.6
    receiver.clear()
    pair.stores_empty()


def test_a7_a_receiver_may_come_before_its_sender(pair: Duo) -> None:
    room = number()
    receiver = pair.decode.receiver(room, pair.prefill.address)
    receiver.receive(PAGES)
    wait_until(lambda: full_stores(pair.prefill).get("waiting_joins") == 1)
    sender = pair.prefill.sender(room)
    sender.send(PAGES, last=True)
    ended(receiver, KVPoll.SUCCESS)


def test_a7_aborts_that_cross_leave_each_side_its_own_reason(pair: Duo) -> None:
    with ControlTap(pair.decode) as tap:
        sender, receiver = published(pair)
        tap.delay(0.1, lambda letter, outgoing: isinstance(letter.body, Abort | Status))
        sender.abort("from prefill")
        receiver.abort("from decode")
        assert sender.wait_release_safe(5) and receiver.wait_release_safe(5)
        failed_with(sender, "from prefill", FailureCode.ABORTED, "prefill")
        failed_with(receiver, "from decode", FailureCode.ABORTED, "decode")
        sender.clear()
        receiver.clear()
        pair.stores_empty()


def test_a7_an_abort_that_crosses_the_last_completion(pair: Duo) -> None:
    with ControlTap(pair.decode) as tap:
        tap.drop(lambda letter, outgoing: isinstance(letter.body, Status))
        sender, receiver = published(pair)
        sender.send(PAGES, last=True)
        ended(sender, KVPoll.SUCCESS)
        receiver.abort("a moment too early")
        assert receiver.wait_release_safe(5)
        assert (sender.poll(), receiver.poll()) == (KVPoll.SUCCESS, KVPoll.FAILED)
        sender.clear()
        receiver.clear()
        pair.stores_empty()


def test_a8_a_rejection_of_a_live_receivers_room_is_refused(pair: Duo) -> None:
    sender, receiver = published(pair)
    with pytest.raises(RoomError, match=f"room {sender.room} is live on the decode side"):
        pair.decode.reject(sender.room, "no", pair.prefill.address)
    sender.send(PAGES, last=True)
    ended(receiver, KVPoll.SUCCESS)


# --- C: clear


def test_c1_clear_reaches_the_backend_after_the_last_ticket(pair: Duo) -> None:
    calls = Calls()
    pair.prefill.add_observer(calls)
    hold = pair.plan.hold(hook="kvcore_poll")
    sender, receiver = published(pair)
    sender.send(PAGES)
    wait_until(lambda: hold.held == 1)
    sender.clear()
    assert pair.prefill.status(sender.room) is None
    stays(lambda: not calls.clears and not sender.is_release_safe() and not receiver.is_release_safe(), 0.1)
    hold.release()
    wait_until(lambda: calls.clears == [RoomKey("prefill", sender.room, 0, sender.generation)])
    assert receiver.wait_release_safe(5) and sender.is_release_safe()
    receiver.clear()
    pair.stores_empty()


def test_c2_a_clear_of_an_old_handle_never_touches_a_newer_lifetime(pair: Duo) -> None:
    old_sender, old_receiver = published(pair)
    old_sender.abort()
    ended(old_receiver, KVPoll.FAILED)
    sender, receiver = pair.open(old_sender.room)  # replaces the terminal ones
    for _ in range(2):
        old_sender.clear()
        old_receiver.clear()
        old_sender.abort("stale")
        old_receiver.abort("stale")
    receiver.receive(PAGES)
    sender.send(PAGES, last=True)
    ended(receiver, KVPoll.SUCCESS)
    ended(sender, KVPoll.SUCCESS)
    old_sender.clear()
    assert pair.prefill.status(sender.room) is pair.decode.status(sender.room) is KVPoll.SUCCESS


def test_c3_leaving_a_with_block_clears(pair: Duo) -> None:
    with pair.prefill.sender(number()) as sender:
        pass
    assert sender.poll() is KVPoll.FAILED and pair.prefill.status(sender.room) is None


def test_c4_another_attempt_works_at_once_beside_the_old_one(pair: Duo) -> None:
    room = number()
    hold = pair.plan.hold(room=room, times=1)
    first, first_receiver = pair.open(room)
    first_receiver.receive(PAGES)
    first.send(PAGES)
    wait_until(lambda: hold.held == 1)
    first.clear()
    first_receiver.clear()
    assert not first_receiver.is_release_safe()
    second, second_receiver = pair.open(room, attempt=1)
    second_receiver.receive([20, 21])
    second.send([10, 11], last=True)
    ended(second_receiver, KVPoll.SUCCESS)
    assert pair.equal([10, 11], [20, 21]) and pair.untouched(PAGES)
    assert not first_receiver.is_release_safe(), "what the new one does makes no old page look drained"
    hold.release()
    assert first_receiver.wait_release_safe(5)
    assert second.poll() is second_receiver.poll() is KVPoll.SUCCESS


@pytest.mark.parametrize("clear", [True, False])
def test_c4_the_same_attempt_works_again_once_both_sides_have_ended(pair: Duo, clear: bool) -> None:
    room = number()
    for turn in range(4):
        sender, receiver = pair.open(room)
        receiver.receive(PAGES)
        if turn % 2:
            wait_until(lambda: receiver.poll() is KVPoll.WAITING_FOR_INPUT)  # noqa: B023
            receiver.abort(f"turn {turn}")
            failed_with(sender, f"turn {turn}", FailureCode.ABORTED, "decode")
            assert not sender.unpaired and not receiver.unpaired
        else:
            sender.send(PAGES, last=True)
            ended(receiver, KVPoll.SUCCESS)
            ended(sender, KVPoll.SUCCESS)
        if clear:
            sender.clear()
            receiver.clear()


def test_c4_a_lifetime_that_ended_unpaired_says_so_and_its_side_opens_first(pair: Duo) -> None:
    room = number()
    receiver = pair.decode.receiver(room, pair.prefill.address)
    receiver.clear()
    assert receiver.unpaired
    receiver = pair.decode.receiver(room, pair.prefill.address)  # first on the side where it ended
    sender = pair.prefill.sender(room)
    receiver.receive(PAGES)
    sender.send(PAGES, last=True)
    ended(receiver, KVPoll.SUCCESS)
    ended(sender, KVPoll.SUCCESS)
    assert not receiver.unpaired and not sender.unpaired


def test_c4_late_messages_of_an_old_lifetime_change_nothing_in_a_new_one(pair: Duo) -> None:
    with ControlTap(pair.decode) as tap:
        room = number()
        late = tap.delay(0.3, lambda letter, outgoing: isinstance(letter.body, Join | Here | Destination | Abort | Status), copies=1)
        sender, receiver = pair.open(room)
        receiver.receive(PAGES)
        wait_until(lambda: sender.poll() is KVPoll.WAITING_FOR_INPUT)
        sender.abort("the old one")
        ended(receiver, KVPoll.FAILED)
        assert receiver.wait_release_safe(5)
        sender.clear()
        receiver.clear()
        late.stop()
        assert late.count >= 4
        sender, receiver = pair.open(room)
        stays(lambda: sender.poll() is not KVPoll.FAILED and receiver.poll() is not KVPoll.FAILED, 0.5)
        receiver.receive([9])
        sender.send([9], last=True)
        ended(receiver, KVPoll.SUCCESS)
        assert pair.equal([9], [9]) and pair.untouched(PAGES)


def test_c5_a_handle_keeps_its_result(pair: Duo) -> None:
    sender, receiver = published(pair)
    sender.abort("kept")
    ended(receiver, KVPoll.FAILED)
    for handle in (sender, receiver):
        handle.clear()
    replaced, _ = pair.open(sender.room)
    for handle in (sender, receiver):
        failed_with(handle, "kept", FailureCode.ABORTED, "prefill")
        assert handle.wait_release_safe(5) and handle.wait(0) is KVPoll.FAILED
    assert replaced.poll() is not KVPoll.FAILED


def test_c6_two_attempts_of_a_number_may_be_live_at_once(pair: Duo) -> None:
    room = number()
    handles = [pair.open(room, attempt) for attempt in (0, 7)]
    for page, (sender, receiver) in enumerate(handles):
        receiver.receive([page])
        sender.send([page + 5], last=True)
    for page, (_, receiver) in enumerate(handles):
        ended(receiver, KVPoll.SUCCESS)
        assert pair.equal([page + 5], [page])
    assert set(pair.decode.rooms()) == {(room, 0), (room, 7)}
    assert pair.decode.status(room, attempt=7) is KVPoll.SUCCESS and pair.decode.status(room, attempt=1) is None


def test_c8_a_collected_handle_is_aborted_cleared_counted_and_logged(pair: Duo, caplog: pytest.LogCaptureFixture) -> None:
    sender, receiver = published(pair)
    room = sender.room
    with caplog.at_level(logging.WARNING, "kvcore"):
        del sender
        gc.collect()
        failed_with(receiver, "cleared before it ended", FailureCode.ABORTED, "prefill")
        wait_until(lambda: pair.prefill.status(room) is None)
    assert pair.prefill.stats().counters["kvcore_handles_collected_total"] == 1
    assert f"room {room}" in caplog.text and "dropped in state WAITING_FOR_INPUT; aborted and cleared" in caplog.text
    del receiver
    gc.collect()
    pair.stores_empty()


def test_c8_a_cleared_handle_is_collected_quietly(pair: Duo) -> None:
    sender, receiver = published(pair)
    sender.clear()
    receiver.clear()
    del sender, receiver
    gc.collect()
    pair.transfer([1], [1])
    assert pair.prefill.stats().counters["kvcore_handles_collected_total"] == 0


def test_c8_a_collected_handle_of_an_ended_room_is_cleared_too(pair: Duo, caplog: pytest.LogCaptureFixture) -> None:
    sender, receiver = pair.open()
    receiver.receive(PAGES)
    sender.send(PAGES, last=True)
    ended(receiver, KVPoll.SUCCESS)
    ended(sender, KVPoll.SUCCESS)
    del sender, receiver
    gc.collect()
    pair.stores_empty()
    assert "dropped in state SUCCESS; cleared" in caplog.text


# --- the table


class Outside:
    """What a table reaches, and the owner of its handles: keeps what comes, and does ``then`` under the table's lock at a change."""

    def __init__(self) -> None:
        limits: dict[str, float | None] = dict.fromkeys(("bootstrap_s", "input_s", "transfer_s", "quarantine_s", "orphan_s", "mark_s"), 5.0)
        self.table = RoomTable(limits, 0, self)
        self.pools: dict[str, Pool] = {}
        self.rank = 0
        self.then: Callable[[], None] = lambda: None
        self.told: list[object] = []
        self.listening: list[tuple[int, int]] = []
        self.settled = 0

    def send(self, effect: object) -> None:
        self.told.append(effect)

    def start(self, room: Room, effect: object) -> None: ...
    def seek(self, room: Room) -> None: ...
    def why_not_reached(self, room: Room) -> str:
        return ""

    def cancel(self, key: RoomKey) -> None: ...
    def forget(self, key: RoomKey) -> None: ...
    def unproven(self, key: RoomKey, effect: object) -> None: ...
    def listen(self) -> None:
        self.listening.append((self.table.receiving, self.table.arriving))

    def settle(self) -> None:
        self.settled += 1

    def wake_by(self, when: float) -> None: ...
    def collect(self, room: Room) -> None: ...

    def changed(self, room: Room, old: KVPoll | None) -> None:
        self.then()


def opened(outside: Outside) -> Sender:
    room = outside.table.open("prefill", RoomId(number()))
    assert room is not None
    return Sender(outside, room)


def test_who_drives_an_engine_that_is_written_to_is_woken_when_the_room_counts() -> None:
    """Not before it: it would look, see no room, and sleep on while the writer waits for it."""
    outside, room, party = Outside(), RoomId(number()), ev.Party("prefill-1")
    record = outside.table.open("decode", room)
    assert record is not None and outside.listening == [(1, 0)]
    own = record.key.generation
    outside.table.apply("decode", room, ev.Receive(own, ()))
    outside.table.apply("decode", room, ev.Route(own, (party,)))
    outside.table.apply("decode", room, ev.Got(Here(*room, own, 1), party))
    assert outside.listening == [(1, 0)], "it was published, and nobody has said that he writes"
    outside.table.apply("decode", room, ev.Fail(own, Reason(FailureCode.ABORTED, "", "decode")))
    assert outside.listening == [(1, 0), (1, 1)], "pages may still be written to"


def met(outside: Outside, sender: Sender) -> None:
    """Its receiver joins, who would hear of its end."""
    outside.table.apply("prefill", RoomId(sender.room), ev.Got(Join(sender.room, 0, 1, 0), ev.Party("decode-1")))


def test_what_a_call_says_is_sent_before_it_returns_and_before_anybody_is_woken_by_it() -> None:
    outside = Outside()
    sender = opened(outside)
    met(outside, sender)
    settled, woken = outside.settled, list[int]()
    outside.table.watch(sender._room, lambda: woken.append(outside.settled))
    sender.abort()
    assert woken == [settled + 1] == [outside.settled]


def test_what_was_said_is_sent_also_where_a_step_does_not_come_to_its_end() -> None:
    """As where a signal handler raises in the middle of it: nobody else would, before the next letter."""
    outside = Outside()
    sender, other = opened(outside), opened(outside)
    met(outside, sender)
    settled, changes = outside.settled, iter((other.abort, lambda: 1 // 0))  # the other's comes right after that of the first
    outside.then = lambda: next(changes)()
    with pytest.raises(ZeroDivisionError):
        sender.abort()
    assert outside.settled == settled + 1


def test_a_room_that_cannot_be_mended_keeps_no_other_from_its_turn_and_is_not_tried_for_ever() -> None:
    outside = Outside()
    broken, other = opened(outside), opened(outside)
    outside.then = lambda: 1 // 0
    with pytest.raises(ZeroDivisionError):
        broken.abort()
    outside.then, outside.cancel = lambda: None, Mock(side_effect=lambda key: 1 // (key.number != broken.room))  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        outside.table.tick(time.monotonic() + 5.1)
    assert other.poll() is KVPoll.FAILED
    tried = outside.cancel.call_count
    outside.table.tick(time.monotonic() + 5.1)
    assert outside.cancel.call_count == tried


def test_thousands_that_are_due_at_once_go_off_in_turns_between_which_others_have_the_table() -> None:
    outside = Outside()
    senders = [opened(outside) for _ in range(3 * AT_ONCE + 1)]
    late, turns = time.monotonic() + 5.1, 0
    while any(sender.poll() is KVPoll.BOOTSTRAPPING for sender in senders):
        before = sum(sender.poll() is KVPoll.FAILED for sender in senders)
        due = outside.table.tick(late)
        assert 0 < sum(sender.poll() is KVPoll.FAILED for sender in senders) - before <= AT_ONCE
        turns += 1
        assert due is not None and (due <= late or turns == 4), "the next turn follows at once, while there are more"
    assert turns == 4


def test_while_thousands_hear_that_a_peer_is_lost_others_have_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    outside, had = Outside(), list[int]()
    senders = [opened(outside) for _ in range(2 * AT_ONCE + 1)]
    for sender in senders:
        met(outside, sender)

    def failed() -> int:
        return sum(sender.poll() is KVPoll.FAILED for sender in senders)

    def rest(_seconds: float) -> None:
        with ThreadPoolExecutor(1) as other:
            other.submit(outside.table.sizes).result(10)
        had.append(failed())

    monkeypatch.setattr(rooms.time, "sleep", rest)
    outside.table.apply_all(ev.Lost("decode-1", Reason(FailureCode.PEER_LOST, "", "prefill")), "prefill")
    assert had == [AT_ONCE, 2 * AT_ONCE] and failed() == len(senders)


def test_a_room_that_cannot_be_told_of_a_lost_peer_keeps_no_other_from_it_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    outside = Outside()
    senders = [opened(outside) for _ in range(3)]
    for sender in senders:
        met(outside, sender)
    changes = iter((lambda: None, lambda: 1 // 0))
    outside.then = lambda: next(changes, lambda: None)()
    outside.table.apply_all(ev.Lost("decode-1", Reason(FailureCode.PEER_LOST, "", "prefill")), "prefill")
    assert all(sender.poll() is KVPoll.FAILED for sender in (senders[0], senders[2]))
    assert f"room {senders[1].room}: a step was cut short" in caplog.text and "ZeroDivisionError" in caplog.text
    outside.table.tick(time.monotonic())
    assert senders[1].poll() is KVPoll.FAILED


def test_rooms_that_are_always_due_again_pass_over_no_limit_that_has_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    outside, party = Outside(), ev.Party("prefill-1")
    for room in (RoomId(number()) for _ in range(2 * AT_ONCE)):
        assert outside.table.open("decode", room) is not None
        outside.table.apply("decode", room, ev.Route(outside.table.generation, (party,)))
    sender, now = opened(outside), time.monotonic() + 5.1
    monkeypatch.setattr(outside.table, "_clock", lambda: now)
    for _ in range(5):  # a repeat and a limit of each, and the sender's
        outside.table.tick(now)
        now += 5.1  # when all have something to repeat again
    assert sender.poll() is KVPoll.FAILED


def test_what_is_due_after_its_room_changed_does_not_go_off() -> None:
    """It waited for its turn while others had the table."""
    outside = Outside()
    *_, cleared, aborted, timed_out = [opened(outside) for _ in range(AT_ONCE + 3)]
    late = time.monotonic() + 5.1
    assert (outside.table.tick(late) or late) < late and timed_out.poll() is KVPoll.BOOTSTRAPPING, "the last three have not had their turn"
    cleared.clear()
    aborted.abort()
    outside.table.tick(late)
    failures = [sender.failure for sender in (cleared, aborted, timed_out)]
    assert [failure and failure.code for failure in failures] == [FailureCode.ABORTED, FailureCode.ABORTED, FailureCode.TIMEOUT]


def test_a_room_that_has_spoken_since_its_repeat_was_due_does_not_repeat_itself_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would say all twice just where there is much to say, and be due once more for each time that it spoke."""
    outside, party, late = Outside(), ev.Party("prefill-1"), time.monotonic() + 1
    for room in (RoomId(number()) for _ in range(AT_ONCE + 1)):
        assert outside.table.open("decode", room) is not None
        outside.table.apply("decode", room, ev.Route(outside.table.generation, (party,)))
    own = outside.table.generation
    assert (outside.table.tick(late) or late) < late, "the last has not had its turn"
    outside.told.clear()
    monkeypatch.setattr(outside.table, "_clock", lambda: late)
    outside.table.apply("decode", room, ev.Receive(own, ()))
    outside.table.apply("decode", room, ev.Got(Here(*room, own, 1), party))
    outside.table.tick(late)
    (said,) = outside.told
    assert isinstance(said, ev.Send) and isinstance(said.message, Destination)
    outside.table.tick(late + 0.3)
    assert outside.told == [said, said], "it comes in its time"
    assert outside.table.sizes()["timers"] == 2 * (AT_ONCE + 1), "a limit and a repeat of each"


def test_what_several_steps_say_is_sent_once_the_table_is_let_go() -> None:
    """Whoever else wants the table does not wait until letters are sent; and where nothing was said, nothing is to be sent."""
    outside = Outside()
    sender, free = opened(outside), threading.Event()
    sent: list[int] = []

    def look() -> None:
        with outside.table.lock:
            free.set()

    def settle() -> None:
        sent.append(len(outside.told))
        threading.Thread(target=look, daemon=True).start()
        assert free.wait(10)

    outside.table.aloud = Aloud(outside.table.lock, settle)
    with outside.table.aloud, outside.table.lock:
        met(outside, sender)
        sender.abort()
        assert len(outside.told) == 2 and not sent
    assert sent == [2]
    assert outside.table.get("prefill", RoomId(sender.room)) is not None and sent == [2]


def test_s7_poll_waits_for_nobody_who_works_on_the_rooms() -> None:
    outside = Outside()
    sender = opened(outside)
    seen: list[object] = []

    def poll_elsewhere() -> None:
        thread = threading.Thread(target=lambda: seen.extend((sender.poll(), sender.failure)), daemon=True)
        thread.start()
        thread.join(5)
        assert not thread.is_alive()

    outside.then = poll_elsewhere
    sender.abort("now")
    assert seen[0] is KVPoll.FAILED and str(seen[1]).startswith(f"room {sender.room} failed: now")


def test_s2_whoever_watches_is_woken_by_every_change_until_it_stops() -> None:
    outside = Outside()
    room = outside.table.open("prefill", RoomId(number()))
    assert room is not None
    woken: list[KVPoll] = []
    stop = outside.table.watch(room, lambda: woken.append(room.status))
    outside.table.apply("prefill", room.id, ev.Hand(room.key.generation, (), last=False))
    outside.table.apply("prefill", room.id, ev.Fail(room.key.generation, Reason.of(FailureCode.ABORTED, "x", "prefill")))
    outside.table.apply("prefill", room.id, ev.Fail(room.key.generation, Reason.of(FailureCode.ABORTED, "y", "prefill")))
    assert woken == [KVPoll.BOOTSTRAPPING, KVPoll.FAILED]
    stop()
    outside.table.clear(room)
    assert woken == [KVPoll.BOOTSTRAPPING, KVPoll.FAILED]
    gone = outside.table.watch(room, lambda: woken.append(room.status))
    gone()


def test_s8_exactly_the_timers_that_a_state_wants_are_armed() -> None:
    outside = Outside()
    sender = opened(outside)
    assert outside.table.sizes()["timers"] == 1
    begun = time.monotonic()
    assert outside.table.tick(begun) is not None and outside.table.tick(begun + 4.9) is not None
    assert sender.poll() is KVPoll.BOOTSTRAPPING
    outside.table.tick(begun + 5.1)
    assert sender.poll() is KVPoll.FAILED and sender.failure is not None and "bootstrap_s passed" in sender.failure.reason
    assert outside.table.sizes()["timers"] == outside.table.sizes()["marks"] == 1, "the mark's own limit"
    sender.clear()
    assert outside.table.tick(time.monotonic() + 5.1) is None and not any(outside.table.sizes().values())
    opened(outside).clear()
    assert outside.table.sizes()["timers"] == outside.table.sizes()["marks"] == 1, "the limit of its state is cancelled"


def test_p5_joins_of_rooms_that_nobody_opens_are_bounded_in_number(pair: Duo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "MAX_ORPHANS", 3)
    receivers = [pair.decode.receiver(number(), pair.prefill.address) for _ in range(10)]
    wait_until(lambda: full_stores(pair.prefill).get("waiting_joins") == 3)
    stays(lambda: full_stores(pair.prefill).get("waiting_joins", 0) <= 3, 0.2)
    sender = pair.prefill.sender(receivers[-1].room)  # one that was dropped joins again
    receivers[-1].receive([1])
    sender.send([1], last=True)
    ended(receivers[-1], KVPoll.SUCCESS)


def test_p5_joins_of_rooms_that_nobody_opens_are_bounded_in_time() -> None:
    with duo(orphan_s=0.4) as pair:
        receivers = [pair.decode.receiver(number(), pair.prefill.address) for _ in range(50)]
        wait_until(lambda: full_stores(pair.prefill).get("waiting_joins") == 50)
        for receiver in receivers:
            ended(receiver, KVPoll.FAILED)
            receiver.clear()
        pair.stores_empty()


def test_p5_a_letter_of_a_generation_never_given_out_is_bad(pair: Duo) -> None:
    sender, receiver = published(pair)
    with ControlTap(pair.prefill) as tap:
        pair.transfer([1], [1])
        before = pair.prefill.stats().counters["kvcore_bad_messages_total"]
        for rg, sg in ((receiver.generation, 10**6), (0, sender.generation)):
            tap.inject(Letter(1, pair.decode.instance, pair.prefill.instance, Abort(sender.room, 0, rg, sg)))
        wait_until(lambda: pair.prefill.stats().counters["kvcore_bad_messages_total"] == before + 2)
        assert sender.poll() is KVPoll.WAITING_FOR_INPUT


def test_status_and_rooms_of_a_manager_with_both_sides_need_the_side() -> None:
    with manager("both", memory(8, seed=1)) as both:
        room = number()
        sender, receiver = both.sender(room), both.receiver(room, both.address)
        with pytest.raises(RoomError, match="say side="):
            both.status(room)
        receiver.receive([3])
        sender.send([4], last=True)
        ended(receiver, KVPoll.SUCCESS)
        ended(sender, KVPoll.SUCCESS)
        assert both.status(room, side="prefill") is both.status(room, side="decode") is KVPoll.SUCCESS
        assert set(both.rooms("prefill")) == set(both.rooms("decode")) == {(room, 0)}
        assert "(prefill)" in both.explain(room, side="prefill") and "(decode)" in both.explain(room, side="decode")
        sender.clear()
        assert both.status(room, side="prefill") is None and both.status(room, side="decode") is KVPoll.SUCCESS
        receiver.clear()
        stores_empty(both)


def test_a_room_of_the_wrong_side_is_refused(pair: Duo) -> None:
    def wrong(make: object, by: KVManager) -> None:
        with pytest.raises(RoomError, match=f"role is '{by.config.role}'"):
            make()  # type: ignore[operator]

    wrong(lambda: pair.decode.sender(1), pair.decode)
    wrong(lambda: pair.prefill.receiver(1, pair.prefill.address), pair.prefill)


# --- calls in the middle of a call: finalizers, signal handlers


class Request:
    """What a program keeps of a request: in a cycle, so that the collector ends it, in the middle of whatever runs."""

    def __init__(self, *handles: Handle) -> None:
        self._handles, self._me = handles, self

    def __del__(self) -> None:
        for handle in self._handles:
            handle.clear()


def test_c1_rooms_cleared_by_the_collector_in_the_middle_of_another_step_leave_nothing(pair: Duo) -> None:
    before = gc.get_threshold()
    gc.set_threshold(20, 2, 2)
    try:
        for _ in range(300):
            sender, receiver = pair.open()
            Request(sender, receiver)
            receiver.receive([1])
            sender.send([1])
            del sender, receiver
    finally:
        gc.set_threshold(*before)
    sides = (pair.prefill, pair.decode)  # one collection does nothing while another thread is in the middle of one
    wait_until(lambda: gc.collect() >= 0 and not any(full_stores(manager_of) for manager_of in sides))
    for manager_of in sides:
        wait_until(lambda made=manager_of: made._core.table.receiving == made._core.table.arriving == 0)
    pair.transfer([1], [2])


def test_s1_an_abort_in_the_middle_of_a_step_is_taken_right_after_it(pair: Duo) -> None:
    """As a signal handler may call it."""
    core, inside = pair.prefill._core, list[Sender]()

    class Handler:
        """Stands in the way of a step's news, on the thread that makes the step."""

        def __call__(self, room: Room, old: KVPoll | None) -> None:
            changed(room, old)
            if inside:
                inside.pop().abort("from a handler")
                with pytest.raises(RoomError, match="in the middle of another call"):
                    pair.prefill.sender(number())

    changed, core.changed = core.changed, Handler()  # type: ignore[method-assign]
    try:
        sender, receiver = pair.open()
        receiver.receive([1])
        wait_until(lambda: sender.poll() is KVPoll.WAITING_FOR_INPUT)
        inside.append(sender)
        sender.send([1], last=True)
        assert sender.poll() is KVPoll.FAILED and sender.failure is not None and "from a handler" in str(sender.failure)
        ended(receiver, KVPoll.FAILED)
    finally:
        core.changed = changed  # type: ignore[method-assign]


STEPPING = tuple(f"kvcore/{name}.py" for name in ("rooms", "aloud", "alarms", "timers", "flight", "ledger", "core", "handles", "manager"))


def test_whatever_a_signal_handler_raises_in_a_call_its_room_ends_and_nothing_of_it_is_left() -> None:
    """Within its limits, which are short."""
    with duo(bootstrap_s=3.0, input_s=3.0, transfer_s=3.0) as pair:
        interrupted_calls(pair.pair())


def interrupted_calls(pair: Duo) -> None:
    opened: list[list[Handle]] = []

    def transfer() -> None:
        opened.append(handles := [])
        room = number()
        handles.append(sender := pair.prefill.sender(room))
        handles.append(receiver := pair.decode.receiver(room, pair.prefill.address))
        receiver.receive([1])
        sender.send([1], last=True)
        receiver.abort()
        receiver.clear()

    for _ in everywhere(transfer, ("call",), STEPPING):
        pass
    for handles in opened:
        for handle in handles:
            if len(handles) == 2 and all(each.poll() is not KVPoll.BOOTSTRAPPING for each in handles):
                assert handle.wait(SOON_S / 2).terminal, handle
            handle.clear()
    del handle, handles
    opened.clear()
    gc.collect()
    pair.stores_empty()
    for table in (pair.prefill._core.table, pair.decode._core.table):
        assert not table.receiving and not table.arriving and not table._orphans
    pair.transfer([1], [2])
