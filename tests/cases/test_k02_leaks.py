"""Kind K2: whatever ends a room, however often and in whatever order, everything of it is given back once, and nothing stays behind."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from kvcore_conformance.stage.crew import Crew
from kvcore_conformance.stage.driver import Child, free_port
from kvcore_conformance.stage.waits import until

from kvcore import FailureCode, Handle, KVManager, KVPoll, NothingPosted, Receiver, Sender, hookimpl
from kvcore.faults import ControlTap, FaultPlan, Hold
from kvcore.hookspecs import Transfer
from kvcore.protocol.messages import Abort, Ack, Status
from kvcore.states import RoomKey
from kvcore.wire import Letter
from tests.fake_backends import BlockingBackend, MemoryBackend, failed, install, running
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
    manager,
    meet,
    memory,
    number,
    stays,
    stores_empty,
    wait_until,
)

PAGES = [3, 8, 1]
SIDES = ["prefill", "decode"]
BRIEF: dict[str, float | None] = {"ticket_s": 0.35, "liveness_s": 1.0, "quarantine_s": 1.4, "orphan_s": 0.4}
"""For tests that wait until pages are released by limit."""


@pytest.fixture(params=BACKENDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Duo]:
    with duo(request.param, orphan_s=0.5) as both:
        yield both.pair()


def key(handle: Handle, side: str) -> RoomKey:
    return RoomKey("prefill" if side == "prefill" else "decode", handle.room, handle.attempt, handle.generation)


def succeeded(pair: Duo) -> tuple[Sender, Receiver]:
    sender, receiver = pair.open()
    receiver.receive(PAGES)
    sender.send(PAGES, last=True, record=b"token")
    ended(sender, KVPoll.SUCCESS)
    ended(receiver, KVPoll.SUCCESS)
    return sender, receiver


def watched(pair: Duo) -> tuple[Calls, Calls]:
    """What both sides' backends are asked to do from now on."""
    both = Calls(), Calls()
    pair.prefill.add_observer(both[0])
    pair.decode.add_observer(both[1])
    return both


def observed(pair: Duo) -> tuple[Events, Events]:
    """The events of both sides from now on."""
    events = Events(), Events()
    pair.prefill.add_observer(events[0])
    pair.decode.add_observer(events[1])
    return events


@contextmanager
def turns(*handles: Handle) -> Iterator[list[list[bool]]]:
    """What ``is_release_safe`` says of each handle meanwhile, without repetitions."""
    said: list[list[bool]] = [[handle.is_release_safe()] for handle in handles]
    over = threading.Event()

    def look() -> None:
        for handle, seen in zip(handles, said, strict=True):
            if (now := handle.is_release_safe()) is not seen[-1]:
                seen.append(now)

    def go_on_looking() -> None:
        while not over.wait(0.001):
            look()

    thread = threading.Thread(target=go_on_looking, daemon=True)
    thread.start()
    try:
        yield said
    finally:
        over.set()
        thread.join(SOON_S)
        look()


def nothing_left(pair: Duo) -> None:
    """C7, and the figures that operators look at."""
    pair.stores_empty()
    for owner in (pair.prefill, pair.decode):
        stats = owner.stats()
        assert (stats.tickets, stats.quarantined_pages, stats.released_unproven, stats.pending_clears) == (0, 0, 0, 0)
        assert owner.rooms() == {}


# --- C11: many rooms, all stages

STAGES = ("prefill only", "decode only", *MOMENTS, "first chunk arrived", "succeeded", "failed")


def staged(pair: Duo, stage: str) -> list[Handle]:
    """The handles of a room at a stage."""
    if stage == "prefill only":
        return [pair.prefill.sender(number())]
    if stage == "decode only":
        return [pair.decode.receiver(number(), pair.prefill.address)]
    if stage == "succeeded":
        return list(succeeded(pair))
    sender, receiver = at(pair, "published" if stage in ("first chunk arrived", "failed") else stage)
    if stage == "first chunk arrived":
        sender.send(PAGES[:1])
        wait_until(lambda: receiver.poll() is KVPoll.TRANSFERRING)
    elif stage == "failed":
        sender.abort("not wanted")
        ended(receiver, KVPoll.FAILED)
    return [sender, receiver]


def test_c11_rooms_dropped_at_every_stage_leave_nothing(pair: Duo) -> None:
    """200 rooms over every stage, aborted and cleared by either side: no room, page, ticket, reason or clear is left, and a new room
    works."""
    rooms = [staged(pair, STAGES[count % len(STAGES)]) for count in range(200)]
    assert full_stores(pair.prefill)["rooms"] > 170 and full_stores(pair.decode)["rooms"] > 170 and pair.prefill.stats().tickets >= 22
    for count, handles in enumerate(rooms):
        for handle in handles if count % 2 else reversed(handles):
            if count % 3:
                handle.abort("the client went away")
            handle.clear()
    assert pair.prefill.rooms() == pair.decode.rooms() == {}
    pair.plan.heal()
    nothing_left(pair)
    assert all(handle.is_release_safe() for handles in rooms for handle in handles)
    pair.transfer([4], [5])


# --- C12, C13: abort and clear after the end

ORDERS = {
    "abort, clear": ("abort", "clear"),
    "clear, abort": ("clear", "abort"),
    "clear twice": ("clear", "clear"),
    "all twice": ("abort", "abort", "clear", "abort", "clear"),
}


@pytest.mark.parametrize("acknowledged", [True, False], ids=["", "success not acknowledged"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("side", SIDES)
def test_c12_a_room_whose_pages_have_arrived_is_given_back_once(pair: Duo, side: str, order: str, acknowledged: bool) -> None:
    """Success, then abort and clear in any order: the backend drops each lifetime once, and nothing stays behind on either side."""
    calls, events = watched(pair), Events()
    (pair.prefill if side == "prefill" else pair.decode).add_observer(events)
    with ControlTap(pair.decode) as tap:
        tap.drop(lambda letter, outgoing: isinstance(letter.body, Ack), times=0 if acknowledged else 2)
        handles = succeeded(pair)
        mine, other = handles if side == "prefill" else handles[::-1]
        for step in ORDERS[order]:
            getattr(mine, step)()
        assert mine.poll() is other.poll() is KVPoll.SUCCESS and mine.failure is None
        assert all(handle.wait_release_safe(SOON_S) for handle in handles)
        other.clear()
        nothing_left(pair)
    for seen, handle, of in zip(calls, handles, SIDES, strict=True):
        assert seen.clears == [key(handle, of)] and seen.aborts == []
    events.reached(mine, "SUCCESS")
    assert events.states(mine).count("SUCCESS") == 1 and "FAILED" not in events.states(mine)


@pytest.mark.parametrize("when", ["before clear", "after clear"])
@pytest.mark.parametrize("side", SIDES)
def test_c13_an_abort_after_success_changes_nothing(pair: Duo, side: str, when: str) -> None:
    """Abort of a room that has succeeded: still SUCCESS while stored, unknown after clear, and the result is kept; nobody hears of it."""
    handles = succeeded(pair)
    mine, other = handles if side == "prefill" else handles[::-1]
    owner, there = (pair.prefill, pair.decode) if side == "prefill" else (pair.decode, pair.prefill)
    if when == "after clear":
        mine.clear()
    with ControlTap(pair.decode) as tap:
        mine.abort("too late", FailureCode.INTERNAL)
        assert owner.status(mine.room) is (KVPoll.SUCCESS if when == "before clear" else None)
        stays(lambda: mine.poll() is there.status(other.room) is KVPoll.SUCCESS, 0.05)
        assert not any(isinstance(seen.letter.body, Abort) for seen in tap.seen)
    assert mine.failure is other.failure is None and handles[1].record == b"token"
    mine.clear()
    other.clear()
    nothing_left(pair)


@pytest.mark.parametrize("way", ["abort", "clear"])
@pytest.mark.parametrize("side", SIDES)
def test_c13_an_abort_that_races_the_last_completion_ends_well_or_badly_but_cleanly(
    pair: Duo, side: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Abort or clear just as the last page lands, a moment that is looked for: both sides end, once, the receiver succeeds only if the
    sender did, nothing is logged as an error, and nothing is left."""
    events, handles, ends = observed(pair), [], []
    moment_s, pause = 0.001, threading.Event()
    with caplog.at_level(logging.WARNING, "kvcore"):
        for _ in range(40):
            sender, receiver = at(pair, "published")
            sender.send(PAGES, last=True)
            if moment_s > 0.0001:
                pause.wait(moment_s)
            mine = sender if side == "prefill" else receiver
            getattr(mine, way)()
            ends.append(mine.poll())
            moment_s *= 1.3 if ends[-1] is KVPoll.FAILED else 0.7
            for handle in (sender, receiver):
                assert handle.wait(SOON_S).terminal
            assert (sender.poll(), receiver.poll()) != (KVPoll.FAILED, KVPoll.SUCCESS)
            assert sender.wait_release_safe(SOON_S) and receiver.wait_release_safe(SOON_S)
            handles += [sender, receiver]
            sender.clear()
            receiver.clear()
    assert set(ends) == {KVPoll.SUCCESS, KVPoll.FAILED}, "the race was one"
    nothing_left(pair)
    for handle in handles:
        seen = events[isinstance(handle, Receiver)]
        seen.reached(handle, handle.poll().name)
        assert [state for state in seen.states(handle) if state in ("SUCCESS", "FAILED")] == [handle.poll().name]
    assert caplog.text == "" and pair.prefill.healthy and pair.decode.healthy


ENDS: dict[str, Callable[[FaultPlan, int], object]] = {
    "well": lambda plan, room: None,
    "badly": lambda plan, room: plan.fail("too late", hook="kvcore_transfer", room=room),
    "with nothing posted": lambda plan, room: plan.raise_(NothingPosted("too late"), room=room),
}
UNPROVEN: dict[str, Callable[[FaultPlan, int], object]] = {
    "without proof": lambda plan, room: plan.fail("too late", quiescent=False, hook="kvcore_transfer", room=room),
    "by an exception": lambda plan, room: plan.raise_(RuntimeError("too late"), room=room),
}


def late(pair: Duo, room: int, how: str, chunk: int | None = None) -> Hold:
    """Hold back the writes of a room (or of one chunk); when they are let go, they end as ``how`` says."""
    plan = FaultPlan()
    pair.prefill.add_observer(plan)
    (ENDS | UNPROVEN)[how](pair.plan, room)
    return plan.hold(room=room) if chunk is None else plan.hold(room=room, chunk=chunk)


@pytest.mark.parametrize("reused", ["", "prefill first", "decode first", "another attempt"])
@pytest.mark.parametrize("how", ENDS)
def test_c13_a_completion_after_clear_is_ignored(pair: Duo, how: str, reused: str, caplog: pytest.LogCaptureFixture) -> None:
    """A ticket of a cleared room ends, well or badly, and its old verdict arrives again: nobody minds, least of all a later use of the
    number."""
    room = number()
    hold = late(pair, room, how)
    with ControlTap(pair.decode) as tap, caplog.at_level(logging.WARNING, "kvcore"):
        sender, receiver = at(pair, "published", room)
        sender.send(PAGES, last=True)
        wait_until(lambda: hold.held == 1)
        receiver.clear()
        ended(sender, KVPoll.FAILED)
        sender.clear()
        attempt = int(reused == "another attempt")
        opened: dict[str, Any] = {
            "prefill": lambda: pair.prefill.sender(room, attempt),
            "decode": lambda: pair.decode.receiver(room, pair.prefill.address, attempt=attempt),
        }
        early = {"prefill first": ["prefill"], "decode first": ["decode"], "another attempt": SIDES}.get(reused, [])
        again = {side: opened[side]() for side in early}
        hold.release()
        assert sender.wait_release_safe(SOON_S) and receiver.wait_release_safe(SOON_S)
        for state in (KVPoll.SUCCESS, KVPoll.FAILED):
            old = Status(room, 0, receiver.generation, sender.generation, state)
            tap.inject(Letter(1, pair.prefill.instance, pair.decode.instance, old))
        stays(
            lambda: sender.poll() is receiver.poll() is KVPoll.FAILED and not any(handle.poll().terminal for handle in again.values()), 0.05
        )
        pair.plan.heal()
        if reused:
            again = {side: again.get(side) or opened[side]() for side in SIDES}
            again["decode"].receive([20])
            again["prefill"].send([21], last=True)
            assert {handle.wait(SOON_S) for handle in again.values()} == {KVPoll.SUCCESS} and pair.equal([21], [20])
        for handle in again.values():
            handle.clear()
        nothing_left(pair)
    assert pair.prefill.status(room) is pair.decode.status(room) is None and caplog.text == ""


# --- C15, C16: a ticket that ends after its room


@pytest.mark.parametrize("chunk", [1, 2, 3])
@pytest.mark.parametrize("way", ["abort", "clear"])
@pytest.mark.parametrize("side", SIDES)
def test_c15_pages_wait_for_the_chunk_in_flight(pair: Duo, side: str, way: str, chunk: int) -> None:
    """One chunk of three is in flight when the room is ended: the pages of both sides become releasable when it has ended, once, and the
    backend drops the room once."""
    calls = watched(pair)
    room = number()
    hold = late(pair, room, "well", chunk)
    sender, receiver = at(pair, "published", room)
    for page in PAGES:
        sender.send([page])
    wait_until(lambda: hold.held == 1 and all(pair.equal([page], [page]) for page in PAGES if page != PAGES[chunk - 1]))
    with turns(sender, receiver) as said:
        getattr(sender if side == "prefill" else receiver, way)()
        ended(sender, KVPoll.FAILED)
        ended(receiver, KVPoll.FAILED)
        sender.clear()
        stays(lambda: said == [[False], [False]] and not calls[0].clears, 0.05)
        hold.release()
        assert sender.wait_release_safe(SOON_S) and receiver.wait_release_safe(SOON_S)
        assert pair.equal(PAGES, PAGES), "it has landed before anybody was told that the pages are free"
        receiver.clear()
        nothing_left(pair)
    assert said == [[False, True], [False, True]]
    assert calls[0].clears == [key(sender, "prefill")] and calls[1].clears == [key(receiver, "decode")]


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("side", SIDES)
def test_c16_the_end_of_a_transfer_changes_no_reason_and_releases_once(pair: Duo, side: str, how: str) -> None:
    """The caller fails a room in transfer with a reason; its transfer ends later, well or badly: the reason stays, on both sides, and the
    pages are released once."""
    room = number()
    hold = late(pair, room, how)
    sender, receiver = at(pair, "published", room)
    sender.send(PAGES, last=True)
    wait_until(lambda: hold.held == 1)
    with turns(sender, receiver) as said:
        (sender if side == "prefill" else receiver).abort("checksum of layer 3", FailureCode.INTERNAL)
        ended(sender, KVPoll.FAILED)
        ended(receiver, KVPoll.FAILED)
        hold.release()
        assert sender.wait_release_safe(SOON_S) and receiver.wait_release_safe(SOON_S)
        for handle in (sender, receiver):
            stays(lambda: handle.poll() is KVPoll.FAILED, 0.02)  # noqa: B023
            failure = handle.failure
            assert failure is not None
            assert (failure.reason, failure.code, failure.side) == ("checksum of layer 3", FailureCode.INTERNAL, side)
            handle.clear()
        nothing_left(pair)
    assert said == [[False, True], [False, True]]


@pytest.mark.parametrize("how", UNPROVEN)
@pytest.mark.parametrize("backend", BACKENDS)
def test_c16_an_end_without_proof_releases_by_limit_once(backend: str, how: str) -> None:
    """The same where the engine does not know whether it still touches the pages: they are released by limit, once, and counted."""
    with duo(backend, **BRIEF) as pair:
        handles: list[Handle] = []
        pair.pair()
        for side in range(2):
            room = number()
            hold = late(pair, room, how)
            both = at(pair, "published", room)
            both[0].send(PAGES, last=True)
            wait_until(lambda: hold.held == 1)  # noqa: B023
            both[side].abort("checksum of layer 3", FailureCode.INTERNAL)
            ended(both[1 - side], KVPoll.FAILED)
            handles += both
            hold.release()
        with turns(*handles) as said:
            for handle in handles:
                handle.clear()
            assert all(handle.wait_release_safe(SOON_S) for handle in handles)
            pair.stores_empty()
        assert said == [[False, True]] * 4 and all(handle.release_unproven for handle in handles)
        assert pair.prefill.stats().released_unproven == pair.decode.stats().released_unproven == 2 * len(PAGES)
        assert {handle.failure.reason for handle in handles if handle.failure is not None} == {"checksum of layer 3"}


# --- C17: a backend with a table of its own


class TableBackend(MemoryBackend):
    """Files everything under the room, and forgets it when it is told to clear, and not before."""

    def __init__(self) -> None:
        super().__init__()
        self.table: dict[RoomKey, list[Transfer]] = {}

    def post(self, transfer: Transfer) -> Any:
        self.table.setdefault(transfer.room, []).append(transfer)
        return super().post(transfer)

    @hookimpl
    def kvcore_clear(self, room: RoomKey) -> None:
        super().kvcore_clear(room)
        self.table.pop(room, None)

    @hookimpl
    def kvcore_held_rooms(self) -> list[RoomKey]:
        return list(self.table)


FAILURES: dict[str, Callable[[Sender, Receiver, TableBackend], object]] = {
    "abort": lambda sender, receiver, engine: sender.abort("no"),
    "abort of the peer": lambda sender, receiver, engine: receiver.abort("no"),
    "engine": lambda sender, receiver, engine: engine.answers.update({sender.room: lambda transfer: failed("no")}),
    "bad pages": lambda sender, receiver, engine: sender.send([4, 5, 6, 7]),
}


@pytest.mark.parametrize("way", FAILURES)
def test_c17_one_clear_empties_the_core_and_the_backend(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """A room fails, its error is read twice, and it is cleared: the first clear empties both tables, the second does nothing."""
    fake = install(monkeypatch, TableBackend)
    with running(fake) as [pair]:
        pair.pair()
        engines: list[TableBackend] = fake.made
        before = [len(engine.cleared) for engine in engines]
        handles = sender, receiver = at(pair, "published")
        sender.send(PAGES[:1])
        wait_until(lambda: pair.equal(PAGES[:1], PAGES[:1]))
        FAILURES[way](sender, receiver, engines[0])
        sender.send(PAGES[1:], last=True) if way == "engine" else None
        for handle in handles:
            ended(handle, KVPoll.FAILED)
            assert handle.failure is not None and str(handle.failure) == str(handle.failure)
        assert list(engines[0].table) == [key(sender, "prefill")] and full_stores(pair.prefill)["rooms"] == 1
        for _ in range(2):
            for handle, owner in zip(handles, (pair.prefill, pair.decode), strict=True):
                handle.clear()
                assert owner.status(handle.room) is None and owner.rooms() == {}
            nothing_left(pair)
            assert [engine.table for engine in engines] == [{}, {}]
        assert [engine.cleared[skip:] for engine, skip in zip(engines, before, strict=True)] == [
            [key(sender, "prefill")], [key(receiver, "decode")],
        ]  # fmt: skip
        assert all(handle.failure is not None for handle in handles)


# --- C18: a peer that has gone quiet

QUIET = {"liveness_s": 1.5, "ticket_s": 0.5, "quarantine_s": 2.2}


@pytest.fixture(scope="module", params=BACKENDS)
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    crew = Crew(backend=request.param)
    try:
        yield crew
    finally:
        crew.end()


def idle(child: Child) -> bool:
    """No work is pending, and no page waits."""
    stats = child.work("stats")
    return child.work("held") == {} and stats["tickets"] == stats["quarantined_pages"] == stats["pending_clears"] == 0


@pytest.mark.parametrize("quiet", SIDES)
def test_c18_cancels_towards_a_stopped_process_end(crew: Crew, quiet: str) -> None:
    """100 rooms in transfer with a process that is stopped, all cancelled: each is terminal at once, no work is pending after the limits,
    and rooms with another process succeed meanwhile and later."""
    role = SIDES[1 - SIDES.index(quiet)]
    with crew.lend(3) as (here, stopped, other):
        for child, its_role in ((here, role), (stopped, quiet), (other, quiet)):
            child.start(its_role, limits=QUIET)
        prefill, decode = (here, stopped) if role == "prefill" else (stopped, here)
        rooms = [(prefill.sender(room), decode.receiver(room, prefill)) for room in range(1, 101)]
        mine = [handles[SIDES.index(role)] for handles in rooms]
        for sender, receiver in rooms:
            receiver.receive([sender.room % 30, 31])
            sender.send([sender.room % 30])
        until(lambda: all(handle.poll() == "TRANSFERRING" for handle in mine), "all are in transfer")
        stopped.freeze()
        for sender, _ in rooms if role == "prefill" else ():
            sender.send([31])
        for handle in mine:
            handle.abort("the client went away")
        assert {handle.poll() for handle in mine} == {"FAILED"}
        works(*((here, other) if role == "prefill" else (other, here)), 201)
        for handle in mine:
            handle.clear()
        until(lambda: idle(here), f"nothing is pending: {here.work('held')}", QUIET["quarantine_s"] + 4)
        works(*((here, other) if role == "prefill" else (other, here)), 202)
        assert all(handle.safe_now() for handle in mine) and here.call("manager", "healthy")
        if role == "decode":
            assert not (fences(here.backend) and any(handle.unproven for handle in mine)), "nothing stopped can write here any more"


def works(prefill: Child, decode: Child, room: int) -> None:
    """A room between two processes succeeds."""
    sender, receiver = prefill.sender(room), decode.receiver(room, prefill)
    receiver.receive([5, 6])
    sender.send([7, 8], last=True)
    assert (receiver.wait(), sender.wait()) == ("SUCCESS", "SUCCESS")
    assert decode.digest([5, 6]) == prefill.digest([7, 8])
    sender.clear()
    receiver.clear()


# --- C19: nothing new happens

SHORT: dict[str, float | None] = {"bootstrap_s": 0.8, "input_s": 0.8, "transfer_s": 0.8}


def all_end_by_time_alone(pair: Duo, handles: Sequence[Handle], events: tuple[Events, Events], polled: bool) -> None:
    """Each room ends and gives its pages back, and what is kept of it goes, while nobody does anything, or polls at most."""
    for handle in handles:
        if polled:
            wait_until(lambda: handle.poll().terminal)  # noqa: B023
        else:
            events[isinstance(handle, Receiver)].reached(handle, "FAILED")
    left = {"rooms", "slots", "backend_rooms"}
    wait_until(lambda: full_stores(pair.prefill).keys() | full_stores(pair.decode).keys() <= left, what="only the rooms are left")
    assert {handle.poll() for handle in handles} == {KVPoll.FAILED} and all(handle.is_release_safe() for handle in handles)
    for owner in (pair.prefill, pair.decode):
        assert owner.stats().tickets == owner.stats().quarantined_pages == 0


@pytest.mark.parametrize(("side", "polled"), [("prefill", False), ("decode", False), ("decode", True)], ids=["prefill", "decode", "polled"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_c19_limits_fire_without_new_work(backend: str, side: str, polled: bool) -> None:
    """Rooms stuck at every stage, and no new request: all end, and what is kept of them goes, by the limits of one side alone."""
    with duo(backend, own={side: SHORT}, **BRIEF) as pair:
        meet(pair)
        events = observed(pair)
        stages = (f"{side} only", *MOMENTS[:3], "first chunk arrived")
        handles = [handle for stage in stages for handle in staged(pair, stage)]
        all_end_by_time_alone(pair, handles, events, polled)
        for handle in handles:
            handle.clear()
        pair.stores_empty()


@pytest.mark.parametrize("backend", BACKENDS)
def test_c19_a_ticket_that_never_ends_is_given_up_without_new_work(backend: str) -> None:
    """A single room whose engine reports no end, and nothing else at all: ``ticket_s`` ends it, and its pages come back."""
    with duo(backend, **BRIEF) as pair:
        meet(pair)
        events = observed(pair)
        pair.plan.drop_done()
        sender, receiver = at(pair, "published")
        sender.send(PAGES, last=True)
        all_end_by_time_alone(pair, [sender, receiver], events, polled=False)
        for handle in (sender, receiver):
            assert handle.failure is not None and "ticket_s (0.35 s) passed" in handle.failure.reason and handle.release_unproven


def test_c19_a_worker_that_never_returns_holds_pages_no_longer_than_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with a backend whose transfer call blocks for ever, one room per worker and more."""
    fake = install(monkeypatch, BlockingBackend, parallel=2)
    with running(fake, **SHORT | BRIEF) as [pair]:
        meet(pair)
        events = observed(pair)
        handles: list[Handle] = []
        for _ in range(4):
            room = number()
            fake.made[0].gate(room)
            sender, receiver = at(pair, "published", room)
            sender.send(PAGES, last=True)
            handles += [sender, receiver]
        all_end_by_time_alone(pair, handles, events, polled=False)
        pair.transfer([4], [5])


# --- C20: a start of several steps fails at one


class StepBackend(TableBackend):
    """Starts a transfer in steps, a descriptor each, and fails at number ``bad``; ``undoes`` those before, or leaves them filed."""

    bad = 0
    undoes = True

    def post(self, transfer: Transfer) -> Any:
        for step in range(1, len(transfer.length) + 1):
            if step == self.bad:
                self.bad = 0
                if not self.undoes:
                    raise RuntimeError(f"no memory for entry {step}")
                self.table.pop(transfer.room, None)
                raise NothingPosted(f"no memory for entry {step}")
            self.table.setdefault(transfer.room, []).append(transfer)
        return super().post(transfer)


@pytest.mark.parametrize(("bad", "undoes"), [(1, True), (2, True), (3, True), (2, False), (3, False)], ids=str)
def test_c20_a_start_that_fails_half_way_fails_the_room_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, bad: int, undoes: bool) -> None:
    """Step 1, 2 or 3 of a start raises: the room fails with that error and can be tried again at once; what the backend did not undo
    itself is dropped with the clear, once the pages are released."""
    fake = install(monkeypatch, StepBackend)
    with running(fake, **BRIEF) as [pair]:
        pair.pair()
        engine = fake.made[0]
        engine.bad, engine.undoes = bad, undoes
        pages = [1, 5, 9]  # not side by side: a descriptor each, in each of two layers
        sender, receiver = at(pair, "published", pages=pages)
        sender.send(pages, last=True)
        for handle in (sender, receiver):
            ended(handle, KVPoll.FAILED)
            assert handle.failure is not None and f"no memory for entry {bad}" in handle.failure.reason
        again, its_receiver = pair.open(sender.room, attempt=1)
        its_receiver.receive([20])
        again.send([21], last=True)
        ended(its_receiver, KVPoll.SUCCESS)
        if undoes:
            assert sender.wait_release_safe(SOON_S) and not sender.release_unproven
            assert key(sender, "prefill") not in engine.table
        for handle in (sender, receiver, again, its_receiver):
            handle.clear()
        pair.stores_empty()
        assert engine.table == {} and sender.release_unproven is not undoes


@pytest.mark.parametrize("cancel", [True, False], ids=["cancels", "cannot cancel"])
@pytest.mark.parametrize("bad", [1, 2, 3])
def test_c20_parts_started_before_the_one_that_fails_are_undone(monkeypatch: pytest.MonkeyPatch, bad: int, cancel: bool) -> None:
    """The core starts a chunk in three parts and one raises: those before are cancelled or waited for, those after never start."""
    fake = install(monkeypatch, MemoryBackend, max_descriptors=2, cancel=cancel)
    with running(fake) as [pair]:
        engine, room, posted = fake.made[0], number(), []

        def post(transfer: Transfer) -> object:
            posted.append(transfer)
            if len(posted) == bad:
                raise NothingPosted("no queue pair")
            return engine.post(transfer)

        engine.answers[room] = post
        engine.held.set()
        sender, receiver = at(pair, "published", room, pages=[1, 5, 9])
        sender.send([1, 5, 9], last=True)
        for handle in (sender, receiver):
            ended(handle, KVPoll.FAILED)
            assert handle.failure is not None and "no queue pair" in handle.failure.reason
        if bad > 1:
            wait_until(lambda: [(key.number, len(tickets)) for key, tickets in engine.aborted] == [(room, bad - 1)])
        if bad > 1 and not cancel:
            stays(lambda: not sender.is_release_safe() and not receiver.is_release_safe(), 0.05)
        engine.held.clear()
        assert sender.wait_release_safe(SOON_S) and receiver.wait_release_safe(SOON_S)
        sender.clear()
        receiver.clear()
        nothing_left(pair)
        assert len(posted) == bad


# --- C21: a room cancelled before anything moved, and the notice fails


def no_result(decode: KVManager, kept: Handle, cleared: Handle, events: Events, proved: bool = True) -> None:
    """Their cancels are all that is ever reported of two rooms, one of them cleared already; in the end nothing of them is left.
    ``proved``: their pages are safe by evidence."""
    assert (decode.status(kept.room), decode.status(cleared.room)) == (KVPoll.FAILED, None)
    for handle in (kept, cleared):
        assert handle.poll() is KVPoll.FAILED
        failure = handle.failure
        assert failure is not None and (failure.reason, failure.code, failure.side) == ("not wanted", FailureCode.ABORTED, "decode")
        assert handle.wait_release_safe(SOON_S) and not (proved and handle.release_unproven) and handle.metrics.bytes == 0
        handle.clear()
    stores_empty(decode)
    for handle in (kept, cleared):
        events.reached(handle, "FAILED")
        assert events.states(handle).count("FAILED") == 1 and not {"TRANSFERRING", "SUCCESS"} & set(events.states(handle))
    codes = [line for line in decode.metrics_text().splitlines() if line.startswith("kvcore_failures_total{")]
    assert codes == ['kvcore_failures_total{code="aborted"} 2'] and decode.healthy and decode.rooms() == {}


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What kvcore logged as errors; an engine has a log of its own."""
    return [one.getMessage() for one in caplog.records if one.name.startswith("kvcore") and one.levelno >= logging.ERROR]


def cancel(kept: Handle, cleared: Handle) -> None:
    for handle in (kept, cleared):
        handle.abort("not wanted")
    cleared.clear()


@pytest.mark.parametrize("moment", MOMENTS[:3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_c21_a_cancel_that_cannot_be_told_is_no_result(backend: str, moment: str, caplog: pytest.LogCaptureFixture) -> None:
    """Decode cancels, no letter passes any more, and the peer is lost: all that is reported is the cancel, and nothing raises."""
    with duo(backend, **BRIEF) as pair:
        events = observed(pair.pair())[1]
        rooms = at(pair, moment), at(pair, moment)
        with ControlTap(pair.decode) as tap, caplog.at_level(logging.ERROR, "kvcore"):
            tap.drop()
            cancel(rooms[0][1], rooms[1][1])
            wait_until(lambda: pair.decode.stats().peers == 0, what="the peer is lost")
            proved = moment != "published" or fences(backend)
            no_result(pair.decode, rooms[0][1], rooms[1][1], events, proved)
        for sender, _ in rooms if moment != "opened" else ():  # which may not have met it
            ended(sender, KVPoll.FAILED)
        assert [error for error in errors(caplog) if proved or "without proof" not in error] == []


class NoRoute:
    """An observer that has the engine fail to connect, when it is told to."""

    def __init__(self) -> None:
        self.tried, self.go_on = threading.Event(), threading.Event()

    @hookimpl(tryfirst=True)
    def kvcore_connect(self) -> None:
        self.tried.set()
        assert self.go_on.wait(SOON_S)
        raise ConnectionError("no route to host")


@pytest.mark.parametrize("where", SIDES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_c21_a_handshake_that_fails_after_a_cancel_is_no_result(backend: str, where: str, caplog: pytest.LogCaptureFixture) -> None:
    """Decode cancels while it pairs with prefill, and the pairing fails on either side: all that is reported is the cancel."""
    with duo(backend, orphan_s=0.3) as pair, caplog.at_level(logging.ERROR, "kvcore"):
        no_route, events = NoRoute(), observed(pair)[1]
        (pair.prefill if where == "prefill" else pair.decode).add_observer(no_route)
        rooms = [pair.decode.receiver(number(), pair.prefill.address) for _ in range(2)]
        rooms[0].receive(PAGES)
        assert no_route.tried.wait(SOON_S)
        cancel(*rooms)
        no_route.go_on.set()
        no_result(pair.decode, *rooms, events)
        assert errors(caplog) == []


def test_c21_a_cancel_towards_nobody_is_no_result(caplog: pytest.LogCaptureFixture) -> None:
    """The same where nobody listens at the address of prefill; and a request turned down there leaves nothing either."""
    nobody = f"127.0.0.1:{free_port()}"
    with manager("decode", memory(8), limits={"orphan_s": 0.3}) as decode, caplog.at_level(logging.ERROR, "kvcore"):
        events = Events()
        decode.add_observer(events)
        rooms = [decode.receiver(number(), nobody) for _ in range(2)]
        rooms[0].receive([1])
        cancel(*rooms)
        assert full_stores(decode)["unrouted_aborts"] == 2 and all(room.unpaired for room in rooms)
        no_result(decode, *rooms, events)
        decode.reject(number(), "unknown model", nobody)
        assert decode.rooms() == {}
        stores_empty(decode)
        assert caplog.text == ""


def test_c21_a_cancel_towards_a_process_that_dies_is_no_result(crew: Crew) -> None:
    """Decode cancels rooms of a process that is stopped and then killed: each polls as cancelled, and the log has no error."""
    with crew.lend(3) as (decode, doomed, other):
        decode.start("decode", limits=QUIET)
        doomed.start("prefill", limits=QUIET)
        other.start("prefill", limits=QUIET)
        receivers = []
        for room in range(1, 7):
            doomed.sender(room)
            receivers.append(decode.receiver(room, doomed))
            assert receivers[-1].until("WAITING_FOR_INPUT") == "WAITING_FOR_INPUT"
            if room % 2:
                receivers[-1].receive([room])
        doomed.freeze()
        for receiver in receivers:
            receiver.abort("not wanted")
            if receiver.room > 3:
                receiver.clear()
        doomed.kill()
        until(lambda: not decode.work("stats")["peers"], "the peer is lost", QUIET["liveness_s"] + 4)
        proved = fences(decode.backend, gone=True)
        for receiver in receivers:
            assert (receiver.poll(), receiver.failure.text, receiver.failure.code) == ("FAILED", "not wanted", "aborted")
            assert decode.status(receiver.room) == (None if receiver.room > 3 else "FAILED")
            assert receiver.safe()
            assert not (proved and receiver.unproven)
            receiver.clear()
        until(lambda: idle(decode), f"nothing is left: {decode.work('held')}")
        works(other, decode, 7)
        assert not (proved and decode.logged("ERROR")) and not decode.logged("Traceback")
