"""Kind K1: an abort or a failure of one side is told to the other, whatever it was, wherever the room stood, over every backend."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from kvcore import FailureCode, Handle, KVManager, KVPoll, NothingPosted
from kvcore.faults import ControlTap, FaultPlan
from kvcore.hookspecs import REQUIRED, KVCoreSpec
from kvcore.protocol.messages import Abort, Status
from kvcore.states import MAX_REASON_BYTES
from kvcore.wire import Letter, Stranger
from tests.fake_backends import BlockingBackend, MemoryBackend, install, running
from tests.helpers import (
    BACKENDS,
    MOMENTS,
    SOON_S,
    Calls,
    Duo,
    Events,
    at,
    duo,
    ended,
    fences,
    full_stores,
    meet,
    number,
    stays,
    stores_empty,
    wait_until,
)

PAGES = [3, 8, 1]
SIDES = ["prefill", "decode"]
LONG_BEFORE_S = 5.0
"""A quarter of the limits that the side that waits has."""


@pytest.fixture(params=BACKENDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Duo]:
    with duo(request.param, orphan_s=2.0) as both:  # a notice to a side not met is kept as long, also on a busy machine
        yield both.pair()


def told(handle: Handle, text: str, code: FailureCode, side: str) -> None:
    """The room ends FAILED, long before its own limits, with this reason from that side."""
    ended(handle, KVPoll.FAILED, LONG_BEFORE_S)
    failure = handle.failure
    assert failure is not None and text in failure.reason and (failure.code, failure.side) == (code, side), failure


def sides(pair: Duo, side: str, handles: Sequence[Any]) -> tuple[Any, Any, KVManager, KVManager]:
    """This side's handle and the other's, this side's manager and the other's."""
    mine, theirs = (0, 1) if side == "prefill" else (1, 0)
    managers = pair.prefill, pair.decode
    return handles[mine], handles[theirs], managers[mine], managers[theirs]


# --- C01: one side ends while the other waits

SHORT_S = 0.6
WAYS = {
    "abort": ("not wanted", FailureCode.ABORTED),
    "clear": ("cleared before it ended", FailureCode.ABORTED),
    "dropped": ("cleared before it ended", FailureCode.ABORTED),
    "limit": ("_s passed for room", FailureCode.TIMEOUT),
    "close": ("is shutting down", FailureCode.SHUTDOWN),
}


def runs(side: str, moment: str) -> str:
    """The limit that runs on a side from then on; decode joins by itself as soon as both are opened."""
    if moment == "in flight":
        return "transfer_s"
    return "input_s" if side == "decode" or moment == "published" else "bootstrap_s"


def end(way: str, handles: list[Any], which: int, manager: KVManager) -> None:
    """End a room on one side; the handle is gone then."""
    handle = handles[which]
    handles[which] = None
    if way == "abort":
        handle.abort("not wanted")
    elif way == "clear":
        handle.clear()
    elif way == "limit":
        ended(handle, KVPoll.FAILED)
    elif way == "close":
        manager.close()
    del handle
    gc.collect()


@pytest.mark.parametrize(("moment", "way"), [(moment, way) for moment in MOMENTS for way in WAYS if (moment, way) != ("opened", "close")])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_c01_the_side_that_waits_hears_long_before_its_limit(backend: str, side: str, moment: str, way: str) -> None:
    """However and whenever one side ends a room, the other fails at once with that reason, and its pages can be released. (Who has not
    met a side that is closed waits for one that starts at its address.)"""
    with duo(backend, own={side: {runs(side, moment): SHORT_S}} if way == "limit" else {}, orphan_s=2.0) as pair:
        meet(pair)
        handles: list[Any] = list(at(pair, moment))
        which = SIDES.index(side)
        there, (mine, theirs) = handles[1 - which], sides(pair, side, handles)[2:]
        begun = time.monotonic()
        end(way, handles, which, mine)
        told(there, *WAYS[way], side)
        assert time.monotonic() - begun < LONG_BEFORE_S and theirs.status(there.room) is KVPoll.FAILED
        if (side, moment, way) == ("prefill", "in flight", "close") and not fences(backend):
            assert not there.is_release_safe()  # until quarantine_s: whoever could say that the write is over, is gone
            return
        pair.plan.heal()
        assert there.wait_release_safe(SOON_S) and not there.release_unproven
        there.clear()
        stores_empty(theirs)


# --- C02: the engine reports an error

ERROR = "link flap, code -5"
FAULTS: dict[str, Callable[[FaultPlan, int], object]] = {
    "transfer says failed": lambda plan, room: plan.fail(ERROR, hook="kvcore_transfer", room=room, chunk=2),
    "transfer raises": lambda plan, room: plan.raise_(RuntimeError(ERROR), room=room, chunk=2),
    "nothing posted": lambda plan, room: plan.raise_(NothingPosted(ERROR), room=room, chunk=2),
    "poll says failed": lambda plan, room: plan.fail(ERROR, room=room, chunk=2),
    "poll says failed without proof": lambda plan, room: plan.fail(ERROR, quiescent=False, room=room, chunk=2),
    "poll raises": lambda plan, room: plan.raise_(RuntimeError(ERROR), hook="kvcore_poll", room=room, chunk=2),
    "path broken": lambda plan, room: plan.fail(ERROR, peer_broken=True, room=room, chunk=2),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_c02_an_error_of_the_engine_reaches_both_sides_in_its_words(pair: Duo, fault: str) -> None:
    """An error for one page of three, however the engine reports it, fails both sides with the same reason; later rooms work."""
    room = number()
    FAULTS[fault](pair.plan, room)
    sender, receiver = at(pair, "published", room)
    for page in PAGES:
        sender.send([page], last=page == PAGES[-1])
    code = FailureCode.PEER_LOST if fault == "path broken" else FailureCode.BACKEND
    for handle in (sender, receiver):
        told(handle, ERROR, code, "prefill")
    assert sender.failure is not None and receiver.failure is not None and str(sender.failure) == str(receiver.failure)
    pair.transfer([4], [5])


# --- C03: prefill turns a request down that decode has made room for

TOO_LONG = '{"error": {"code": 400, "message": "This model\'s maximum context length is 32768 tokens; 70000 were given."}}'


@pytest.mark.parametrize(
    ("moment", "text"),
    [
        *((moment, TOO_LONG) for moment in ("not opened", *MOMENTS, "partly sent")),
        ("published", "one line\nand another"),
        ("published", "ü" * (MAX_REASON_BYTES // 2)),
    ],
    ids=lambda value: value[:12],
)
def test_c03_what_prefill_rejects_is_no_success_and_keeps_its_words(pair: Duo, moment: str, text: str) -> None:
    """The receiver never succeeds, not even when pages are handed over afterwards, and its reason is the rejection, word for word."""
    events = Events()
    pair.decode.add_observer(events)
    room = number()
    sender, receiver = (pair.prefill.sender(room), None) if moment == "not opened" else at(pair, moment.replace("partly sent", "published"))
    if moment == "partly sent":
        sender.send(PAGES[:1])
        wait_until(lambda: pair.equal(PAGES[:1], PAGES[:1]))
    sender.abort(text, FailureCode.REJECTED)
    sender.send(PAGES, last=True)
    if receiver is None:
        receiver = pair.decode.receiver(room, pair.prefill.address)
        receiver.receive(PAGES)
    told(receiver, text, FailureCode.REJECTED, "prefill")
    pair.plan.heal()
    assert receiver.failure is not None and receiver.failure.reason == text and receiver.record is None
    assert receiver.wait_release_safe(SOON_S) and sender.wait_release_safe(SOON_S)
    events.reached(receiver, "FAILED")
    stays(lambda: receiver.poll() is KVPoll.FAILED and "SUCCESS" not in events.states(receiver), 0.05)


# --- C04: a backend that has no hook for it


def bare(base: type[MemoryBackend]) -> type[MemoryBackend]:
    """A backend with the required hooks alone."""
    optional = [name for name in vars(KVCoreSpec) if name.startswith("kvcore_") and name not in REQUIRED]
    return type(f"Bare{base.__name__}", (base,), dict.fromkeys(optional))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("base", [MemoryBackend, BlockingBackend])
def test_c04_the_notice_needs_no_hook_of_the_backend(
    monkeypatch: pytest.MonkeyPatch, base: type[MemoryBackend], moment: str, side: str
) -> None:
    """With a backend that implements no abort (nor any other optional hook) the peer is told, and what runs is waited for."""
    fake = install(monkeypatch, bare(base), cancel=False)
    with running(fake) as [pair]:
        pair.pair()
        engine, room = fake.made[0], number()
        engine.held.set()
        gate = engine.gate(room)
        handles = sender, receiver = at(pair, moment.replace("in flight", "published"), room)
        if moment == "in flight":
            sender.send(PAGES)
            wait_until(lambda: (engine.jobs or gate.met) and receiver.poll() is KVPoll.TRANSFERRING)
        here, there, *_ = sides(pair, side, handles)
        here.abort("not wanted")
        told(there, "not wanted", FailureCode.ABORTED, side)
        if moment == "in flight":
            stays(lambda: not sender.is_release_safe() and not receiver.is_release_safe(), 0.05)
        engine.held.clear()
        engine.open_gates()
        assert sender.wait_release_safe(SOON_S) and receiver.wait_release_safe(SOON_S)
        sender.clear()
        receiver.clear()
        pair.stores_empty()


# --- C05: one of several parts cannot be posted


@pytest.mark.parametrize("bad", [1, 2, 3])
@pytest.mark.parametrize("error", [NothingPosted("no send slot"), RuntimeError("no send slot")], ids=["nothing posted", "raises"])
def test_c05_a_part_that_cannot_be_posted_fails_the_room(pair: Duo, error: Exception, bad: int) -> None:
    """Two of three parts arrive, one cannot be posted: both sides fail with its error, and the receiver never succeeds."""
    events, later = Events(), FaultPlan()
    pair.decode.add_observer(events)
    pair.prefill.add_observer(later)
    room = number()
    late = later.hold(room=room, chunk=bad)
    pair.plan.raise_(error, room=room, chunk=bad)  # met when the other plan lets it go
    sender, receiver = at(pair, "published", room)
    for page in PAGES:
        sender.send([page], last=page == PAGES[-1])
    arrive = [page for page in PAGES if page != PAGES[bad - 1]]
    wait_until(lambda: late.held == 1 and pair.equal(arrive, arrive) and receiver.poll() is KVPoll.TRANSFERRING)
    stays(lambda: receiver.poll() is KVPoll.TRANSFERRING, 0.05)
    late.release()
    for handle in (sender, receiver):
        told(handle, "no send slot", FailureCode.BACKEND, "prefill")
    events.reached(receiver, "FAILED")
    assert "SUCCESS" not in events.states(receiver) and pair.untouched([PAGES[bad - 1]])


# --- C06: an error that says little, and a room with nothing in it

ANSWERS: dict[str, Callable[[Handle, Handle], Any]] = {
    "failed": lambda sender, receiver: Status(receiver.room, 0, receiver.generation, sender.generation, KVPoll.FAILED),
    "stranger": lambda sender, receiver: Stranger(),
    "closing": lambda sender, receiver: Stranger(closing=True),
}


@pytest.mark.parametrize("moment", MOMENTS[1:])
@pytest.mark.parametrize("answer", ANSWERS)
def test_c06_an_error_without_a_reason_or_a_room_ends_the_rooms_it_means(pair: Duo, answer: str, moment: str) -> None:
    """An error from prefill that gives no reason, or names no room at all, fails the receiver, whose pages are released in time."""
    with ControlTap(pair.decode) as tap:
        sender, receiver = at(pair, moment)
        tap.inject(Letter(1, pair.prefill.instance, pair.decode.instance, ANSWERS[answer](sender, receiver)))
        ended(receiver, KVPoll.FAILED, LONG_BEFORE_S)
        assert receiver.failure is not None and receiver.failure.reason
        pair.plan.heal()
        sender.abort()
        pair.transfer([4], [5])  # has them pair again
        assert receiver.wait_release_safe(SOON_S) and not receiver.release_unproven


@pytest.mark.parametrize("backend", BACKENDS)
def test_c06_no_such_room_without_a_reason_ends_a_receiver_that_waits(backend: str) -> None:
    """Also a refusal of a join that gives no reason."""
    with duo(backend, orphan_s=9.0) as pair, ControlTap(pair.pair().decode) as tap:
        receiver = pair.decode.receiver(number(), pair.prefill.address)
        receiver.receive(PAGES)
        wait_until(lambda: full_stores(pair.prefill).get("waiting_joins") == 1)
        refusal = Status(receiver.room, 0, receiver.generation, 0, KVPoll.FAILED)
        tap.inject(Letter(1, pair.prefill.instance, pair.decode.instance, refusal))
        told(receiver, f"no such room {receiver.room} at the prefill side", FailureCode.NO_SUCH_ROOM, "prefill")
        assert receiver.is_release_safe()


@pytest.mark.parametrize("prefix", [0, 4])
@pytest.mark.parametrize("first", ["receive", "send"])
@pytest.mark.parametrize("nothing", [[], {}, {"kv": []}, np.array([], np.int64)], ids=["list", "no pools", "empty pool", "array"])
def test_c06_c83_a_room_without_pages_is_a_normal_success(pair: Duo, nothing: Any, first: str, prefix: int) -> None:
    """Empty page lists of every form, as when decode holds everything already, end the room well, whichever side names them first: with
    the last chunk, and not before; the engine is given nothing."""
    calls = Calls()
    pair.prefill.add_observer(calls)
    sender, receiver = pair.open()
    if first == "receive":
        receiver.receive(nothing, prefix_pages=prefix)
        wait_until(lambda: sender.poll() is KVPoll.WAITING_FOR_INPUT)
    sender.send(nothing)
    if first == "send":
        receiver.receive(nothing, prefix_pages=prefix)
    wait_until(lambda: receiver.poll() is KVPoll.TRANSFERRING)
    stays(lambda: not sender.poll().terminal and not receiver.poll().terminal, 0.02)
    sender.send(nothing, last=True, record=b"token")
    for handle in (sender, receiver):
        ended(handle, KVPoll.SUCCESS)
    assert receiver.record == b"token" and dict(sender.prefix_pages) == {"kv": prefix}
    assert calls.transfers == [] and pair.untouched()


# --- C07: the notice is lost


@pytest.mark.parametrize("cleared", [False, True], ids=["kept", "cleared"])
@pytest.mark.parametrize("moment", MOMENTS[1:])
@pytest.mark.parametrize("side", SIDES)
def test_c07_a_lost_notice_is_repeated_until_it_is_heard(pair: Duo, side: str, moment: str, cleared: bool) -> None:
    """A side aborts (and clears) while no letter passes; when letters pass again, the other learns of it and sends nothing more."""
    calls = Calls()
    pair.prefill.add_observer(calls)
    with ControlTap(pair.decode) as tap:
        sender, receiver = at(pair, moment)
        here, there, *_ = sides(pair, side, (sender, receiver))
        down = tap.drop()
        here.abort("not wanted")
        if cleared:
            here.clear()
        wait_until(lambda: down.count)
        stays(lambda: not there.poll().terminal, 0.1)
        down.stop()
        told(there, "not wanted", FailureCode.ABORTED, side)
        pair.plan.heal()
        assert sender.wait_release_safe(SOON_S) and receiver.wait_release_safe(SOON_S)
        started = len(calls.transfers)
        sender.send([5], last=True)
        sender.clear()
        receiver.clear()
        pair.stores_empty()
        assert len(calls.transfers) == started and pair.untouched([5])


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_c07_where_the_notice_never_comes_the_limit_ends_the_room(backend: str, side: str) -> None:
    """With every notice lost, the other side ends by its own limit; nothing is sent after that, and the pages are released."""
    other = SIDES[1 - SIDES.index(side)]
    calls = Calls()
    with duo(backend, own={other: {"input_s": SHORT_S}}) as pair, ControlTap(pair.decode) as tap:
        meet(pair)
        pair.prefill.add_observer(calls)
        lost = tap.drop(lambda letter, outgoing: isinstance(letter.body, Abort | Status))
        sender, receiver = at(pair, "published")
        here, there, *_ = sides(pair, side, (sender, receiver))
        here.abort("not wanted")
        told(there, "input_s passed", FailureCode.TIMEOUT, other)
        sender.send(PAGES, last=True)
        stays(lambda: all(transfer.room.number != sender.room for transfer in calls.transfers), 0.05)
        assert sender.is_release_safe() and lost.count > 1
        lost.stop()
        assert receiver.wait_release_safe(SOON_S) and not receiver.release_unproven


# --- C08: decode declines before it has a receiver


@pytest.mark.parametrize("lost", [0, 2], ids=["", "notices lost"])
@pytest.mark.parametrize("met", [True, False], ids=["met", "not met"])
@pytest.mark.parametrize("when", ["opened", "pages handed over", "before"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_c08_a_request_that_decode_declines_fails_at_prefill(backend: str, when: str, met: bool, lost: int) -> None:
    """One call says so, before or after prefill opened the room, also to a prefill side never met: it fails, its pages are free."""
    with duo(backend, orphan_s=2.0) as pair, ControlTap(pair.decode) as tap:
        if met:
            pair.pair()
        tap.drop(lambda letter, outgoing: isinstance(letter.body, Abort), times=lost)
        room = number()
        sender = pair.prefill.sender(room) if when != "before" else None
        if sender is not None and when == "pages handed over":
            sender.send(PAGES, last=True)
            assert not sender.is_release_safe()
        pair.decode.reject(room, "unknown model 'gtp'", pair.prefill.address)
        assert pair.decode.status(room) is None and pair.decode.rooms() == {}
        sender = sender or pair.prefill.sender(room)
        told(sender, "unknown model 'gtp'", FailureCode.REJECTED, "decode")
        assert sender.wait_release_safe(SOON_S) and not sender.release_unproven
        sender.clear()
        pair.stores_empty()


# --- C09: one side never arrives

LEAVING = {
    "limit": ("bootstrap_s passed", FailureCode.TIMEOUT),
    "abort": ("not wanted", FailureCode.ABORTED),
    "clear": ("cleared before it ended", FailureCode.ABORTED),
}


def leave(pair: Duo, side: str, way: str, cleared: bool) -> Handle:
    """A room known to one side only, which has ended there."""
    room = number()
    handle: Handle = pair.prefill.sender(room) if side == "prefill" else pair.decode.receiver(room, pair.prefill.address)
    if way == "abort":
        handle.abort("not wanted")
    elif way == "clear":
        handle.clear()
    told(handle, *LEAVING[way], side)
    assert handle.unpaired and handle.is_release_safe()
    if cleared:
        handle.clear()
    return handle


@pytest.mark.parametrize("way", LEAVING)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_c09_a_side_left_alone_ends_and_leaves_nothing(backend: str, side: str, way: str) -> None:
    """A room that the other side never opens ends by its limit or by a cancel; after clear and the limits of C1 nothing is stored, and
    a receiver that comes even later is told that there is no such room."""
    with duo(backend, orphan_s=0.5, own={side: {"bootstrap_s": 0.3}} if way == "limit" else {}) as pair:
        alone = leave(pair, side, way, cleared=True)
        pair.stores_empty()
        if side == "prefill":
            receiver = pair.decode.receiver(alone.room, pair.prefill.address)
            told(receiver, f"no such room {alone.room}", FailureCode.NO_SUCH_ROOM, "prefill")


@pytest.mark.parametrize(
    ("way", "cleared"), [("limit", False), ("limit", True), ("abort", False), ("abort", True), ("clear", True)], ids=str
)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_c09_who_comes_after_the_end_is_told_at_once(backend: str, side: str, way: str, cleared: bool) -> None:
    """The other side arrives after all, within ``orphan_s``: it fails at once with the reason of the side that has ended. The two
    instances have not met before."""
    with duo(backend, orphan_s=2.0, own={side: {"bootstrap_s": 0.3}} if way == "limit" else {}) as pair:
        alone = leave(pair, side, way, cleared)
        begun = time.monotonic()
        late: Handle
        if side == "prefill":
            late = pair.decode.receiver(alone.room, pair.prefill.address)
            late.receive(PAGES)
        else:
            late = pair.prefill.sender(alone.room)
            late.send(PAGES, last=True)
        told(late, *LEAVING[way], side)
        assert time.monotonic() - begun < 1.9, "not by orphan_s"
        assert late.wait_release_safe(SOON_S)
        alone.clear()
        late.clear()
        pair.stores_empty()
