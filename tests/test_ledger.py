"""Tickets: the ledger over a scripted engine, and rules R (release safety) and B5 (threads) of running managers."""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest

from kvcore import Capabilities, FailureCode, KVPoll, NothingPosted, Transfer, hookimpl, tickets
from kvcore.faults import ControlTap
from kvcore.hookspecs import DONE, PENDING, RETRY, Ticket, TicketKind, TicketState
from kvcore.ledger import Ledger
from kvcore.mapping import Share, whole
from kvcore.memory import Pool
from kvcore.metrics import Meter, Metrics
from kvcore.planner import Layout
from kvcore.protocol import events as ev
from kvcore.protocol.messages import Drained, PoolPages
from kvcore.protocol.sender_state import Dest, Life
from kvcore.room import Chunk, Ready, Room
from kvcore.states import RoomId, RoomKey
from tests.helpers import BACKENDS, Duo, Flag, Incoming, able, duo, ended, fences, full_stores, manager, memory, number, stays, wait_until

PAGES = [3, 8, 1]
LIMITS = {"liveness_s": 1.5, "ticket_s": 0.3, "quarantine_s": 2.0, "orphan_s": 0.5}
FAILED = TicketState(TicketKind.FAILED, "link down")
FAILED_QUIESCENT = TicketState(TicketKind.FAILED, "refused", quiescent=True)


class Engine:
    """The fast hooks, scripted: what each transfer answers (a ticket by default), and what each ticket has come to."""

    def __init__(self) -> None:
        self.script: deque[object] = deque()
        self.transfers: list[Transfer] = []
        self.threads: list[str] = []
        self.large = threading.Event()
        """That transfers of more than 512 bytes wait for."""
        self.states: dict[int, object] = {}
        self.polls = 0
        self.aborted: list[Ticket] = []
        self.cleared: list[RoomKey] = []
        self.poll_answer: Callable[[Sequence[Ticket]], object] | None = None
        self.at_progress: Callable[[], object] = lambda: None

    def kvcore_transfer(self, *, transfer: Transfer, may_wait: bool) -> object:
        self.transfers.append(transfer)
        self.threads.append(threading.current_thread().name.partition("-worker")[0])
        if transfer.nbytes > 512:
            self.large.wait(5)
        answer = self.script.popleft() if self.script else len(self.transfers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def kvcore_poll(self, *, tickets: Sequence[Ticket]) -> object:
        self.polls += 1
        if self.poll_answer is not None:
            return self.poll_answer(tickets)
        return [self.states.get(ticket, PENDING) for ticket in tickets]  # type: ignore[call-overload]

    def kvcore_progress(self) -> None:
        self.at_progress()

    def kvcore_abort(self, *, room: RoomKey, tickets: Sequence[Ticket]) -> None:
        self.aborted += tickets

    def kvcore_clear(self, *, room: RoomKey) -> None:
        self.cleared.append(room)

    def kvcore_held_rooms(self) -> list[RoomKey]:
        return []


@dataclass
class PeerOf:
    layout: Layout
    heard: bool = True
    poisoned: bool = False

    def shares(self, room: int) -> Mapping[str, Share]:
        return whole([place.geometry for place in self.layout.pools.values()])

    def heard_lately(self, now: float) -> bool:
        return self.heard


@dataclass
class Bench:
    """A ledger that runs, its engine, and what it told of tickets."""

    engine: Engine
    ledger: Ledger
    peer: PeerOf
    metrics: Metrics
    incoming: Incoming
    told: list[ev.Ended] = field(default_factory=list)
    broken: list[tuple[str, str]] = field(default_factory=list)

    def start(self, pages: Sequence[int] = (0, 2), theirs: Sequence[int] | None = None, ready: Ready | None = None, chunk: int = 1) -> Room:
        key = RoomKey("prefill", 7, 0, chunk)
        listed = PoolPages("kv", np.array(pages if theirs is None else theirs, "<i4").tobytes())
        life = Life(chunk, KVPoll.TRANSFERRING, dests=(Dest(ev.Party("peer"), 1, (listed,)),), n_dest=1)
        room = Room(RoomId(7), key, life, Meter(time.monotonic()))
        indices = {"kv": np.array(pages, np.int64)}
        self.ledger.start(room, ev.Start(ev.Pair("peer", 1, chunk), chunk), Chunk(indices, {"kv": 0}, ready))
        return room

    def wait(self, count: int = 1) -> list[ev.Ended]:
        wait_until(lambda: len(self.told) >= count, what=f"{count} ends, got {self.told}")
        assert len(self.told) == count
        return self.told


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    capabilities = getattr(request, "param", Capabilities())
    pool = Pool.from_tensors("kv", memory(8), page_size=16)
    layout = Layout.of((pool.geometry,), pool.regions)
    engine, peer, metrics, incoming = Engine(), PeerOf(layout), Metrics(), Incoming()
    made: Bench
    ledger = Ledger(
        engine, capabilities, layout, 0.4, metrics, lambda instance: peer if instance == "peer" else None,  # type: ignore[arg-type]
        lambda room, event: made.told.append(event), lambda instance, text: made.broken.append((instance, text)), incoming,
    )  # fmt: skip
    made = Bench(engine, ledger, peer, metrics, incoming)
    ledger.open()
    yield made
    assert ledger.stop(5) and ledger.pulse.trouble and ledger.stop(5)


def test_a_ticket_ends_once_with_its_bytes_counted(bench: Bench) -> None:
    room = bench.start()
    wait_until(lambda: bench.engine.polls > 0)
    assert bench.ledger.tickets == 1 and bench.engine.transfers[0].chunk == 1
    bench.engine.states[1] = DONE
    [end] = bench.wait()
    assert end == ev.Ended(ev.Pair("peer", 1, 1), 1, True, True) and bench.ledger.tickets == 0
    assert bench.metrics.counters()["kvcore_bytes_total"] == 2 * 2 * 64 == room.meter.bytes


def test_a_transfer_that_has_ended_already_needs_no_poll(bench: Bench) -> None:
    bench.engine.script.append(DONE)
    bench.start()
    assert bench.wait()[0].ok and bench.engine.polls == 0


@pytest.mark.parametrize("bench", [Capabilities(blocking=True, quick_bytes=256)], indirect=True)
def test_b6_a_quick_transfer_of_an_engine_that_blocks_needs_a_worker_only_while_one_is_busy(bench: Bench) -> None:
    bench.engine.script.append(RETRY)
    bench.start([0, 2])
    wait_until(lambda: bench.ledger.tickets == 1 and len(bench.engine.transfers) == 2)
    assert bench.engine.threads == ["kvcore-progress", "kvcore"], "what has to wait is posted again, by a worker that can"
    bench.engine.states[2] = DONE
    bench.wait()
    bench.start(range(6), chunk=2)
    wait_until(lambda: len(bench.engine.transfers) == 3)
    bench.start([7], chunk=3)
    stays(lambda: len(bench.engine.transfers) == 3, 0.05)
    bench.engine.large.set()
    wait_until(lambda: len(bench.engine.transfers) == 4)
    assert bench.engine.threads[2:] == ["kvcore"] * 2
    bench.engine.states.update(dict.fromkeys((3, 4), DONE))
    assert all(end.ok for end in bench.wait(3))
    bench.start([7], chunk=4)
    wait_until(lambda: len(bench.engine.transfers) == 5)
    assert bench.engine.threads[4] == "kvcore-progress"
    bench.engine.states[5] = DONE
    bench.wait(4)


@pytest.mark.parametrize("bench", [Capabilities(blocking=True, quick_bytes=64, max_descriptors=1, needs_progress=True)], indirect=True)
def test_b6_quick_parts_of_a_chunk_are_posted_in_one_turn(bench: Bench) -> None:
    turns: list[None] = []
    bench.engine.at_progress = lambda: turns.append(None)
    bench.engine.script += [DONE] * 4
    bench.start()
    assert bench.wait()[0].ok and bench.engine.threads == ["kvcore-progress"] * 4
    assert not turns, "the engine is driven after the posts of a turn, while there are tickets"


@pytest.mark.parametrize("bench", [Capabilities(blocking=True, quick_bytes=1024)], indirect=True)
def test_b6_few_bytes_in_many_pieces_are_not_quick(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "QUICK_DESCRIPTORS", 2)
    for chunk, pages in ((1, [0]), (2, [0, 2])):  # a descriptor each in each of two layers
        bench.start(pages, chunk=chunk)
        wait_until(lambda chunk=chunk: len(bench.engine.transfers) == chunk)  # type: ignore[misc]
        bench.engine.states[chunk] = DONE
        bench.wait(chunk)
    assert bench.engine.threads == ["kvcore-progress", "kvcore"]


@pytest.mark.parametrize("bench", [Capabilities(max_descriptors=1), Capabilities(max_bytes=64)], indirect=True)
def test_a_ticket_of_several_parts_ends_with_the_last(bench: Bench) -> None:
    bench.start()
    wait_until(lambda: len(bench.engine.transfers) == 4)
    assert all(len(transfer.length) == 1 and transfer.nbytes == 64 for transfer in bench.engine.transfers)
    for ticket in (2, 4, 1):
        bench.engine.states[ticket] = DONE
    stays(lambda: not bench.told and bench.ledger.tickets == 1, 0.1)
    bench.engine.states[3] = DONE
    assert bench.wait()[0].ok


@pytest.mark.parametrize("bench", [Capabilities(max_descriptors=2)], indirect=True)
def test_r3_a_ticket_is_quiescent_when_the_rest_of_it_has_ended(bench: Bench) -> None:
    bench.start()
    bench.engine.states[1] = FAILED_QUIESCENT
    first = bench.wait()[0]
    assert not first.ok and not first.quiescent and first.reason is not None and "refused" in first.reason.text
    assert bench.ledger.quarantined_pages == 2
    bench.engine.states[2] = DONE
    second = bench.wait(2)[1]
    assert not second.ok and second.quiescent and bench.ledger.quarantined_pages == 0


def test_r3_what_failed_without_being_quiescent_stays_until_a_fence(bench: Bench) -> None:
    bench.engine.states[1] = FAILED
    bench.start()
    assert not bench.wait()[0].quiescent
    stays(lambda: bench.ledger.tickets == 1 and bench.ledger.quarantined_pages == 2, 0.1)
    bench.ledger.fence("another")
    bench.ledger.fence("peer")
    wait_until(lambda: bench.ledger.tickets == 0)
    assert len(bench.told) == 1


def test_r3_what_is_written_off_is_gone_and_its_pages_are_known(bench: Bench) -> None:
    bench.engine.states[1] = FAILED
    room = bench.start()
    bench.wait()
    pair = ev.Pair("peer", 1, 1)
    assert bench.ledger.write_off(room.key, pair, 9) == 0
    assert bench.ledger.write_off(room.key, pair, 1) == 2
    wait_until(lambda: bench.ledger.tickets == 0)
    active = room.meter.read(time.monotonic()).active_s
    stays(lambda: room.meter.read(time.monotonic()).active_s == active, 0.05)


@pytest.mark.parametrize("bench", [Capabilities(needs_progress=True)], indirect=True)
@pytest.mark.parametrize("works", [True, False], ids=["works", "has nothing to do"])
def test_an_engine_that_works_is_driven_without_a_pause_between(bench: Bench, works: bool) -> None:
    """Otherwise ever more slowly, every 20 ms in the end."""
    ends, pauses = [time.monotonic()], []

    def drive() -> None:
        pauses.append(time.monotonic() - ends[-1])
        until = time.thread_time() + (0.0005 if works else 0.0)
        while time.thread_time() < until:
            pass
        ends.append(time.monotonic())

    bench.engine.at_progress = drive
    bench.start()
    if not works:
        return wait_until(lambda: pauses[-1:] > [0.01])
    stays(lambda: True, 0.8)
    before = len(pauses)
    stays(lambda: True, 0.4)
    assert statistics.median(pauses[before:]) < 0.003


def test_a_ticket_that_begins_and_ends_in_one_turn_took_the_time_that_it_took(bench: Bench) -> None:
    bench.engine.poll_answer = lambda tickets: stays(lambda: True, 0.05) or [DONE] * len(tickets)
    room = bench.start()
    assert bench.wait()[0].ok
    assert 0.05 <= room.meter.read(time.monotonic()).active_s < 1.0


def test_r3_ticket_s_fails_the_ticket_cancels_it_and_goes_on_asking(bench: Bench) -> None:
    begun = time.monotonic()
    bench.start()
    end = bench.wait()[0]
    assert time.monotonic() - begun >= 0.4 and not end.quiescent
    assert end.reason is not None and end.reason.code is FailureCode.TIMEOUT and "ticket_s (0.4 s)" in end.reason.text
    wait_until(lambda: bench.engine.aborted == [1])
    bench.engine.states[1] = DONE
    assert bench.wait(2)[1].quiescent


def test_t6_retry_is_submitted_again_with_back_off(bench: Bench) -> None:
    bench.engine.script.extend([RETRY] * 1000)
    bench.start()
    stays(lambda: not bench.told, 0.6)  # longer than ticket_s: what is not in flight runs into no ticket limit
    assert 4 <= len(bench.engine.transfers) < 30
    bench.engine.script.clear()
    wait_until(lambda: bench.ledger.tickets == 1 and bench.engine.polls > 0)
    bench.engine.states[len(bench.engine.transfers)] = DONE
    assert bench.wait()[0].ok


def test_t6_retry_in_poll_after_a_cancel_is_the_end(bench: Bench) -> None:
    room = bench.start()
    wait_until(lambda: bench.engine.polls > 0)
    bench.ledger.cancel(room.key)
    wait_until(lambda: bench.engine.aborted == [1])
    bench.engine.states[1] = RETRY
    end = bench.wait()[0]
    assert (end.ok, end.quiescent) == (False, True) and len(bench.engine.transfers) == 1


def test_t4_a_chunk_is_not_read_before_it_is_ready(bench: Bench) -> None:
    ready = Flag()
    bench.start(ready=ready)
    bench.start(chunk=2)
    wait_until(lambda: [transfer.chunk for transfer in bench.engine.transfers] == [2], what="the later chunk, which is ready")
    ready.set()
    wait_until(lambda: len(bench.engine.transfers) == 2)


def test_a5_a_room_that_has_failed_starts_nothing_also_before_the_order_to_cancel_comes(bench: Bench) -> None:
    ready = Flag()
    room = bench.start(ready=ready)
    room.life = msgspec.structs.replace(room.life, state=KVPoll.FAILED)
    ready.set()
    stays(lambda: not bench.engine.transfers, 0.1)
    bench.ledger.cancel(room.key)
    assert bench.wait()[0].quiescent


def test_t4_cancel_ends_the_wait_for_a_ready_event(bench: Bench) -> None:
    room = bench.start(ready=Flag())
    bench.ledger.cancel(room.key)
    end = bench.wait()[0]
    assert (end.ok, end.quiescent) == (False, True) and not bench.engine.transfers


@pytest.mark.parametrize("error", [RuntimeError("event destroyed"), SystemExit(2)])
def test_t7_a_ready_event_that_raises_fails_its_chunk_only(bench: Bench, error: BaseException) -> None:
    class Broken:
        def query(self) -> bool:
            raise error

    bench.start(ready=Broken())
    bench.start(chunk=2)
    wait_until(lambda: bench.engine.polls > 0)
    bench.engine.states[1] = DONE
    ends = {end.chunk: end for end in bench.wait(2)}
    assert ends[2].ok and not ends[1].ok and ends[1].quiescent
    assert ends[1].reason is not None and type(error).__name__ in ends[1].reason.text


def test_r7_nothing_is_started_towards_a_peer_that_is_silent(bench: Bench) -> None:
    bench.peer.heard = False
    bench.start()
    stays(lambda: not bench.engine.transfers and not bench.told, 0.1)
    bench.peer.heard = True
    wait_until(lambda: bench.engine.transfers)


def test_t2_a_page_that_the_peer_names_wrongly_never_reaches_the_engine(bench: Bench) -> None:
    bench.start(theirs=[1, 8])
    end = bench.wait()[0]
    assert end.quiescent and end.reason is not None and end.reason.code is FailureCode.BAD_PAGES
    assert "page index 8 is not in 0 .. 7" in end.reason.text and not bench.engine.transfers


@pytest.mark.parametrize("answer", [None, PENDING, RuntimeError("code -5"), SystemExit(3)])
def test_t7_a_transfer_that_answers_wrongly_is_a_failure_without_proof(bench: Bench, answer: object) -> None:
    bench.engine.script.append(answer)
    bench.start()
    assert not bench.wait()[0].quiescent
    bench.start(chunk=2)
    wait_until(lambda: bench.engine.polls > 0)
    bench.engine.states[2] = DONE
    assert bench.wait(2)[1].ok


def test_t7_nothing_posted_is_a_quiescent_failure(bench: Bench) -> None:
    bench.engine.script.append(NothingPosted("queue full"))
    bench.start()
    end = bench.wait()[0]
    assert end.quiescent and end.reason is not None and "queue full" in end.reason.text and bench.ledger.tickets == 0


@pytest.mark.parametrize("answer", [None, [], [DONE, DONE, DONE], 5])
def test_t7_a_poll_that_answers_nonsense_is_asked_ticket_by_ticket(bench: Bench, answer: object) -> None:
    bench.engine.poll_answer = lambda tickets: [DONE] if tickets == [2] else answer
    bench.start()
    bench.start(chunk=2)
    ends = {end.chunk: end for end in bench.wait(2)}
    assert ends[2].ok and not ends[1].ok and not ends[1].quiescent


def test_t7_an_odd_state_fails_its_ticket_only(bench: Bench) -> None:
    bench.engine.states |= {1: "done", 2: DONE}
    bench.start()
    bench.start(chunk=2)
    ends = {end.chunk: end for end in bench.wait(2)}
    assert ends[2].ok and not ends[1].ok and not ends[1].quiescent


def test_t7_a_poll_that_raises_for_one_ticket_fails_that_one(bench: Bench) -> None:
    def poll(tickets: Sequence[Ticket]) -> object:
        if 1 in tickets:
            raise SystemExit("one peer is broken")
        return [DONE for _ in tickets]

    bench.engine.poll_answer = poll
    bench.start()
    bench.start(chunk=2)
    ends = {end.chunk: end for end in bench.wait(2)}
    assert ends[2].ok and not ends[1].ok and bench.ledger.pulse.trouble == ""


def test_t7_a_broken_path_is_reported(bench: Bench) -> None:
    bench.engine.states[1] = TicketState(TicketKind.FAILED, "QP in error", peer_broken=True)
    bench.start()
    wait_until(lambda: bench.broken == [("peer", "QP in error")])


def test_t7_housekeeping_hooks_that_raise_end_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: Any) -> None:
        raise SystemExit(1)

    for hook in ("kvcore_abort", "kvcore_clear", "kvcore_held_rooms"):
        monkeypatch.setattr(bench.engine, hook, broken)
    room = bench.start()
    wait_until(lambda: bench.engine.polls > 0)
    bench.ledger.cancel(room.key)
    bench.ledger.forget(room.key)
    wait_until(lambda: bench.ledger.pending_clears == 0)
    bench.engine.states[1] = DONE
    bench.wait()
    assert bench.ledger.pulse.trouble == ""


def test_without_tickets_nothing_is_polled(bench: Bench) -> None:
    bench.engine.states[1] = DONE
    bench.start()
    bench.wait()
    polls = bench.engine.polls
    stays(lambda: bench.engine.polls == polls, 0.1)


def test_a_ticket_in_flight_is_polled_without_spinning(bench: Bench) -> None:
    bench.start()
    wait_until(lambda: bench.engine.polls > 0)
    before, begun = bench.engine.polls, time.monotonic()
    stays(lambda: True, 0.2)
    assert bench.engine.polls - before < 2000 * (time.monotonic() - begun) + 10


@pytest.mark.parametrize("bench", [Capabilities(needs_progress=True)], indirect=True)
def test_an_engine_that_needs_it_is_driven_while_a_ticket_is_in_flight(bench: Bench) -> None:
    driven: list[float] = []
    bench.engine.kvcore_progress = lambda: driven.append(time.monotonic())  # type: ignore[attr-defined]
    bench.start()
    wait_until(lambda: len(driven) > 3)
    bench.engine.states[1] = DONE
    bench.wait()
    count = len(driven)
    stays(lambda: len(driven) <= count + 1, 0.1)


@pytest.mark.parametrize("bench", [Capabilities(needs_progress=True)], indirect=True)
def test_an_engine_whose_target_must_work_is_driven_seldom_until_a_sender_says_that_it_writes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcore.pace.LONGEST_WAIT_S", 0.001)
    driven: list[float] = []
    bench.engine.kvcore_progress = lambda: driven.append(time.monotonic())  # type: ignore[attr-defined]

    def rate() -> int:
        bench.ledger.wake()
        stays(lambda: True, 0.5)
        driven.clear()
        stays(lambda: True, 0.3)
        return len(driven)

    bench.incoming.receiving = 1
    seldom = rate()
    bench.incoming.arriving = 1
    assert 0 < seldom < rate() / 3


@pytest.mark.parametrize("bench", [Capabilities(needs_progress=True)], indirect=True)
def test_who_drives_an_engine_is_woken_by_a_room_only_where_he_rests_or_data_comes(bench: Bench) -> None:
    driven: list[float] = []
    bench.engine.at_progress = lambda: driven.append(time.monotonic())

    def woken() -> bool:
        """Whether it is driven before it would have been anyway."""
        stays(lambda: True, 0.05)
        seen = len(driven)
        bench.ledger.wake()
        stays(lambda: True, 0.05)
        return len(driven) > seen

    wait_until(lambda: bench.ledger._resting)
    bench.incoming.receiving = 1
    assert woken(), "it rests while there is none"
    stays(lambda: True, 0.2)
    for _ in range(20):
        bench.ledger.wake()
    assert bench.ledger.sizes()["orders"] == 0
    bench.incoming.arriving = 1
    assert woken()


@pytest.mark.parametrize("bench", [Capabilities(blocking=True, needs_progress=True)], indirect=True)
@pytest.mark.parametrize("arriving", [0, 1])
def test_a_progress_thread_whose_tickets_are_all_in_workers_turns_seldom_but_where_it_drives_what_arrives(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, arriving: int
) -> None:
    monkeypatch.setattr("kvcore.pace.LONGEST_WAIT_S", 0.1)
    driven: list[float] = []
    bench.engine.at_progress = lambda: driven.append(time.monotonic())
    bench.incoming.receiving = bench.incoming.arriving = arriving
    bench.start(range(6))
    wait_until(lambda: bench.engine.transfers and driven)
    driven.clear()
    stays(lambda: True, 0.25)
    assert len(driven) > 10 if arriving else len(driven) < 5, "every 0.1 s, or 32 times in what it has been quiet for"
    bench.engine.large.set()
    begun = time.monotonic()
    bench.engine.states[1] = DONE
    bench.wait()
    assert arriving or time.monotonic() - begun < 0.25, "its worker rings"


# --- R: release safety of running managers


@pytest.fixture(params=BACKENDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Duo]:
    with duo(request.param, **LIMITS) as both:
        yield both.pair()


def in_flight(pair: Duo, prepare: Callable[[], object]) -> tuple[Any, Any]:
    prepare()
    sender, receiver = pair.open()
    receiver.receive(PAGES)
    sender.send(PAGES)
    return sender, receiver


def test_r1_release_safety_follows_the_room(pair: Duo) -> None:
    sender, receiver = pair.open()
    assert sender.is_release_safe() and receiver.is_release_safe(), "nothing was handed over yet"
    receiver.receive(PAGES)
    wait_until(lambda: sender.poll() is KVPoll.WAITING_FOR_INPUT)
    assert sender.is_release_safe() and not receiver.is_release_safe()
    sender.send(PAGES)
    assert not sender.is_release_safe() and not receiver.is_release_safe()
    assert not sender.wait_release_safe(0.05)
    sender.send([], last=True)
    ended(receiver, KVPoll.SUCCESS)
    assert receiver.is_release_safe() and sender.wait_release_safe(5)


def test_r3_unproven_pages_are_quarantined_and_released_by_limit_counted_and_logged(pair: Duo, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "kvcore"):
        sender, receiver = in_flight(pair, lambda: pair.plan.fail("cable pulled", quiescent=False))
        ended(sender, KVPoll.FAILED)
        begun = time.monotonic()
        ended(receiver, KVPoll.FAILED)
        assert receiver.failure is not None and receiver.failure.code is FailureCode.BACKEND and "cable pulled" in receiver.failure.reason
        for manager_, handle in ((pair.prefill, sender), (pair.decode, receiver)):
            assert not handle.is_release_safe() and not handle.release_unproven
            assert manager_.stats().quarantined_pages == len(PAGES)
        sender.clear()
        receiver.clear()
        for manager_, handle in ((pair.prefill, sender), (pair.decode, receiver)):
            assert handle.wait_release_safe(10)
            assert time.monotonic() - begun > 1.5, "not before quarantine_s"
            wait_until(lambda: manager_.stats().released_unproven == len(PAGES))  # noqa: B023
            wait_until(lambda: manager_.stats().quarantined_pages == 0)  # noqa: B023
            assert handle.release_unproven
            assert manager_.stats().counters["kvcore_released_unproven_total"] == len(PAGES)
    assert caplog.text.count(f"{len(PAGES)} pages released after quarantine_s without proof") == 2
    pair.stores_empty()


def test_r3_expired_is_never_called_drained(pair: Duo) -> None:
    sender, receiver = in_flight(pair, lambda: pair.plan.fail(quiescent=False))
    with ControlTap(pair.decode) as tap:
        lost = tap.drop(lambda letter, outgoing: isinstance(letter.body, Drained))
        ended(receiver, KVPoll.FAILED)
        assert sender.wait_release_safe(10) and sender.release_unproven
        wait_until(lambda: lost.count > 0)
        assert all(seen.letter.body.expired for seen in tap.seen if isinstance(seen.letter.body, Drained))
    assert receiver.wait_release_safe(10) and receiver.release_unproven


def test_r3_quarantine_without_limit_lasts_until_the_engine_is_closed() -> None:
    with duo(ticket_s=0.2, quarantine_s=None) as pair:
        sender, receiver = in_flight(pair, lambda: pair.plan.fail(quiescent=False))
        ended(sender, KVPoll.FAILED)
        ended(receiver, KVPoll.FAILED)
        stays(lambda: not sender.is_release_safe() and not receiver.is_release_safe(), 0.3)
        pair.prefill.close()
        assert sender.is_release_safe() and not sender.release_unproven


def test_r3_a_ticket_that_was_given_up_too_early_is_proved_by_its_end(pair: Duo) -> None:
    hold = pair.plan.hold(hook="kvcore_poll")
    sender, receiver = in_flight(pair, lambda: None)
    ended(sender, KVPoll.FAILED)
    assert sender.failure is not None and "ticket_s" in sender.failure.reason and not sender.is_release_safe()
    hold.release()
    assert sender.wait_release_safe(1.5) and receiver.wait_release_safe(1.5)
    assert not sender.release_unproven and not receiver.release_unproven


def test_r4_the_pages_of_a_lost_peers_room_are_fenced_by_disconnect(pair: Duo) -> None:
    sender, receiver = in_flight(pair, lambda: None)
    wait_until(lambda: receiver.poll() is KVPoll.TRANSFERRING)
    with ControlTap(pair.decode) as tap:
        tap.drop(lambda letter, outgoing: True)
        ended(receiver, KVPoll.FAILED)
        assert receiver.failure is not None and receiver.failure.code is FailureCode.PEER_LOST
        assert receiver.wait_release_safe(5) and receiver.release_unproven is not fences(pair.backend)
        ended(sender, KVPoll.FAILED)
    assert sender.wait_release_safe(5)


def test_r4_a_disconnect_that_proves_nothing_fences_nothing(pair: Duo) -> None:
    class Vague:
        @hookimpl(tryfirst=True)
        def kvcore_disconnect(self, peer: str) -> bool:
            return False

    pair.decode.add_observer(Vague())
    _sender, receiver = in_flight(pair, lambda: None)
    wait_until(lambda: receiver.poll() is KVPoll.TRANSFERRING)
    with ControlTap(pair.decode) as tap:
        tap.drop(lambda letter, outgoing: True)
        ended(receiver, KVPoll.FAILED)
        stays(lambda: not receiver.is_release_safe(), 0.3)
        assert receiver.wait_release_safe(10) and receiver.release_unproven


def test_r6_success_means_that_the_bytes_are_there(pair: Duo) -> None:
    pair.plan.delay(0.01, rate=0.5)
    for page in range(20):
        sender, receiver = pair.open()
        receiver.receive([page, 31 - page])
        sender.send([page])
        sender.send([31 - page], last=True)
        ended(receiver, KVPoll.SUCCESS)
        assert pair.equal([page, 31 - page], [page, 31 - page])
        sender.clear()
        receiver.clear()
    assert 0 < pair.plan.counts["delay"] < 40


@pytest.mark.parametrize(
    ("changes", "values"),
    [({"orphan_s": 0.7}, ("0.5", "0.7")), ({"liveness_s": 1.9, "quarantine_s": 9.0}, ("2.0", "2.2")), ({"quarantine_s": 1.85}, ())],
)
def test_r7_limits_that_do_not_cover_each_other_are_refused_at_pairing(changes: dict[str, float], values: tuple[str, ...]) -> None:
    theirs = LIMITS | changes
    with manager("prefill", memory(8, seed=1), limits=LIMITS) as prefill, manager("decode", memory(8), limits=theirs) as decode:
        receiver = decode.receiver(number(), prefill.address)
        if not values:
            sender = prefill.sender(receiver.room)
            receiver.receive([1])
            sender.send([1], last=True)
            return ended(receiver, KVPoll.SUCCESS)
        ended(receiver, KVPoll.FAILED)
        failure = receiver.failure
        assert failure is not None and failure.code is FailureCode.INCOMPATIBLE
        for value in values:
            assert f"{float(value):g}" in failure.reason
        assert prefill.stats().peers == decode.stats().peers == 0
    return None


# --- B: how hooks are called


def test_b5_hooks_are_called_from_the_cores_threads_and_no_two_at_once(pair: Duo) -> None:
    seen: dict[str, set[str]] = {}
    inside: list[str] = []
    overlaps: list[list[str]] = []

    def note(hook: str) -> None:
        seen.setdefault(hook, set()).add(threading.current_thread().name)

    class Watch:
        @hookimpl(wrapper=True)
        def kvcore_transfer(self, transfer: Transfer) -> Iterator[None]:
            note("transfer")
            inside.append("transfer")
            overlaps.extend([inside] if len(inside) > 1 else [])
            result = yield
            inside.remove("transfer")
            return result

        @hookimpl(wrapper=True)
        def kvcore_poll(self, tickets: Sequence[Ticket]) -> Iterator[None]:
            note("poll")
            inside.append("poll")
            overlaps.extend([inside] if len(inside) > 1 else [])
            result = yield
            inside.remove("poll")
            return result

        @hookimpl(tryfirst=True)
        def kvcore_clear(self, room: RoomKey) -> None:
            note("clear")

        @hookimpl(tryfirst=True)
        def kvcore_connect(self, peer: object) -> None:
            note("connect")

        @hookimpl(tryfirst=True)
        def kvcore_endpoint(self) -> None:
            note("endpoint")

        @hookimpl(tryfirst=True)
        def kvcore_close(self) -> None:
            note("close")

    pair.prefill.add_observer(Watch())
    target = memory(32)
    with manager("decode", target, backend=pair.backend, limits=LIMITS) as other:
        rooms = [(pair.prefill.sender(number()), which) for which in (pair.decode, other) * 10]
        receivers = [which.receiver(sender.room, pair.prefill.address) for sender, which in rooms]
        for (sender, _), receiver in zip(rooms, receivers, strict=True):
            receiver.receive(PAGES)
            sender.send(PAGES, last=True)
        for (sender, _), receiver in zip(rooms, receivers, strict=True):
            ended(receiver, KVPoll.SUCCESS)
            ended(sender, KVPoll.SUCCESS)
            sender.clear()
            receiver.clear()
        pair.stores_empty()
    pair.prefill.close()
    if able(pair.backend).blocking:
        assert all(thread.startswith("kvcore-worker-") for thread in seen["transfer"])
    else:
        assert not overlaps and seen["transfer"] == seen["poll"] == {"kvcore-progress"}
    assert seen["clear"] == {"kvcore-progress"}
    assert seen["connect"] == seen["endpoint"] == seen["close"] == {"kvcore-slow"}


def test_b4_what_a_backend_holds_is_listed_and_cleared(pair: Duo) -> None:
    hold = pair.plan.hold(hook="kvcore_poll")
    sender, receiver = in_flight(pair, lambda: None)
    wait_until(lambda: hold.held == 1)
    sender.clear()
    receiver.clear()
    assert "ledger_tickets" in full_stores(pair.prefill)
    hold.release()
    pair.stores_empty()
    assert pair.prefill.stats().stores["backend_rooms"] == 0


def test_c107_turns_that_fail_do_not_spin_because_something_was_due(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[float] = []

    def turn() -> bool:
        turns.append(time.monotonic())
        raise MemoryError

    monkeypatch.setattr(bench.ledger, "turn", turn)
    monkeypatch.setattr(bench.ledger, "_at_rest", lambda: False)
    bench.ledger._due = 0.0
    bench.ledger.turn_soon()
    wait_until(lambda: turns)
    stays(lambda: len(turns) < 20, 0.5)
