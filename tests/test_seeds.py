"""Both seeds of the project, as tests of their own, over every backend: the shared status sees an abort, one clear removes all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcore import FailureCode, Handle, KVManager, KVPoll
from tests.helpers import BACKENDS, MOMENTS, Duo, Flag, at, duo, ended, full_stores, number, wait_until

PAGES = [3, 8, 1]


@pytest.fixture(params=BACKENDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Duo]:
    with duo(request.param, orphan_s=0.5) as both:
        yield both.pair()


def agree(manager: KVManager, handle: Handle, state: KVPoll) -> None:
    """S4: the handle and the shared status are one fact."""
    assert handle.poll() is state and manager.status(handle.room) is state and manager.rooms()[handle.room, handle.attempt] is state


# --- seed one: abort is seen in the shared status


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_abort_is_seen_in_the_shared_status_at_once_here_and_soon_there(pair: Duo, who: str, moment: str) -> None:
    sender, receiver = at(pair, moment)
    here, there = (sender, receiver) if who == "prefill" else (receiver, sender)
    mine, theirs = (pair.prefill, pair.decode) if who == "prefill" else (pair.decode, pair.prefill)
    here.abort("the client went away")
    agree(mine, here, KVPoll.FAILED)
    ended(there, KVPoll.FAILED)
    agree(theirs, there, KVPoll.FAILED)
    for handle in (here, there):
        failure = handle.failure
        assert failure is not None
        assert (failure.reason, failure.code, failure.side) == ("the client went away", FailureCode.ABORTED, who)
        with pytest.raises(type(failure), match="the client went away"):
            handle.raise_for_failure()
    pair.plan.heal()
    here.clear()
    there.clear()
    pair.stores_empty()


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_abort_of_an_ended_room_changes_nothing(pair: Duo, who: str) -> None:
    sender, receiver = pair.open()
    receiver.receive(PAGES)
    sender.send(PAGES, last=True)
    ended(receiver, KVPoll.SUCCESS)
    ended(sender, KVPoll.SUCCESS)
    handle, manager = (sender, pair.prefill) if who == "prefill" else (receiver, pair.decode)
    handle.abort("too late")
    agree(manager, handle, KVPoll.SUCCESS)
    assert handle.failure is None
    other, _ = pair.open()
    other.abort("first")
    other.abort("second")
    assert other.failure is not None and other.failure.reason == "first"


# --- seed two: one clear removes everything of the room


def test_the_stores_of_a_room_are_full_before_clear(pair: Duo) -> None:
    """What the other tests find empty is not empty by itself."""
    sender, receiver = at(pair, "in flight")
    assert pair.prefill.stats().stores["rooms"] == pair.decode.stats().stores["rooms"] == 1
    assert pair.prefill.stats().stores["ledger_tickets"] == 1 and pair.prefill.stats().stores["tickets"] == 1
    receiver.abort("x")
    assert pair.decode.stats().stores["drain_records"] == 1
    sender.clear()
    receiver.clear()
    assert full_stores(pair.decode)["drain_records"] == 1 and full_stores(pair.prefill)["tickets"] == 1


@pytest.mark.parametrize("ending", ["success", "abort", "clear of a live room"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_one_clear_removes_everything_of_the_room_and_is_harmless_twice(pair: Duo, moment: str, ending: str) -> None:
    sender, receiver = at(pair, moment)
    if ending == "success":
        pair.plan.heal()
        finish(sender, receiver, moment)
    elif ending == "abort":
        receiver.abort("x")
    states = sender.poll(), receiver.poll()
    for handle, manager in ((sender, pair.prefill), (receiver, pair.decode)):
        handle.clear()
        assert manager.status(handle.room) is None and (handle.room, 0) not in manager.rooms()
        handle.clear()
    pair.plan.heal()
    pair.stores_empty()
    for handle, manager, state in ((sender, pair.prefill, states[0]), (receiver, pair.decode, states[1])):
        assert "nothing is stored" in manager.explain(handle.room)
        assert handle.poll() is (state if state.terminal else KVPoll.FAILED), "C5: the handle keeps its result"
        assert handle.is_release_safe()
        handle.clear()
        handle.abort()
    assert full_stores(pair.prefill) == full_stores(pair.decode) == {}


def finish(sender: Handle, receiver: Handle, moment: str) -> None:
    if moment in ("opened", "joined"):
        receiver.receive(PAGES)
    if moment == "in flight":
        sender.send([], last=True)
    else:
        sender.send(PAGES, last=True)
    ended(receiver, KVPoll.SUCCESS)
    ended(sender, KVPoll.SUCCESS)


def test_a_change_of_status_removes_nothing(pair: Duo) -> None:
    sender, receiver = pair.open()
    receiver.receive(PAGES, prefix_pages=2)
    ready = Flag()
    sender.send(PAGES, last=True, ready=ready, record=b"first token")
    wait_until(lambda: receiver.poll() is KVPoll.TRANSFERRING)
    assert sender.prefix_pages == {"kv": 2}
    sender.abort("no longer wanted")
    ended(receiver, KVPoll.FAILED)
    for _ in range(2):
        assert sender.prefix_pages == {"kv": 2}
        assert sender.failure is not None and receiver.failure is not None
        assert sender.metrics.pages == receiver.metrics.pages == len(PAGES)
        assert pair.prefill.status(sender.room) is pair.decode.status(sender.room) is KVPoll.FAILED
        assert pair.prefill.stats().stores["rooms"] == pair.decode.stats().stores["rooms"] == 1
        for manager in (pair.prefill, pair.decode):
            story = manager.explain(sender.room)
            assert "TRANSFERRING" in story and "FAILED" in story and "no longer wanted" in story


def test_a_send_that_ends_well_leaves_nothing_behind_after_clear(pair: Duo) -> None:
    for _ in range(3):
        sender, receiver = pair.open()
        receiver.receive(PAGES)
        sender.send(PAGES[:1])
        sender.send(PAGES[1:], last=True, record=b"token")
        ended(receiver, KVPoll.SUCCESS)
        ended(sender, KVPoll.SUCCESS)
        assert receiver.record == b"token" and pair.equal(PAGES, PAGES)
        sender.clear()
        receiver.clear()
        assert receiver.record == b"token"
    pair.stores_empty()
    assert pair.prefill.stats().released_unproven == pair.decode.stats().released_unproven == 0


def test_clear_of_a_room_never_started_and_of_one_never_heard_of(pair: Duo) -> None:
    alone = pair.prefill.sender(number())
    alone.clear()
    alone.clear()
    assert alone.poll() is KVPoll.FAILED and alone.unpaired
    lonely = pair.decode.receiver(number(), pair.prefill.address)
    lonely.clear()
    pair.stores_empty()
