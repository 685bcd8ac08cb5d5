"""The ledger by itself: what waits in a lane when the room fails, the peer falls silent, is fenced or pairs anew (A5, R4, R7)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from kvcore import KVPoll, Pool
from kvcore.closing import joined
from kvcore.hookspecs import DONE, RETRY, Capabilities, Transfer
from kvcore.ledger import Ledger
from kvcore.mapping import Share, whole
from kvcore.metrics import Meter, Metrics
from kvcore.planner import Layout
from kvcore.protocol import events as ev
from kvcore.protocol.messages import PoolPages
from kvcore.protocol.sender_state import Dest, Life
from kvcore.room import Chunk, Room
from kvcore.states import FailureCode, Reason, RoomId, RoomKey
from tests.fake_backends import (
    BlockingBackend,
    MemoryBackend,
    OddBackend,
    failed,
    install,
)
from tests.helpers import SOON_S, Incoming, stays, wait_until


class OddError(BaseException):
    """What no ``except Exception`` catches."""


class View:
    """A peer as the ledger sees it."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.silent = False

    def shares(self, room: int) -> Mapping[str, Share]:
        return whole([place.geometry for place in self.layout.pools.values()])

    def heard_lately(self, now: float) -> bool:
        return not self.silent


class Bench:
    """A ledger with one peer; ``told`` is what it says of its tickets."""

    def __init__(self, backend: MemoryBackend, **capabilities: Any) -> None:
        self.backend = backend
        self.source, self.target = (np.full((8, 16), fill, np.uint8) for fill in (1, 0))
        local, remote = (Pool.from_tensors("kv", [array], page_size=1) for array in (self.source, self.target))
        self.peer: View | None = View(Layout.of([remote.geometry], remote.regions))
        self.told: list[ev.Ended] = []
        self.broken: list[str] = []
        self.raises: BaseException | None = None
        self.ledger = Ledger(
            _Direct(backend),  # type: ignore[arg-type]
            Capabilities(**capabilities),
            Layout.of([local.geometry], local.regions),
            5.0,
            Metrics(),
            lambda name: self.peer,
            self._ended,
            lambda name, text: self.broken.append(text),
            Incoming(),
        )
        self.ledger.open()

    def _ended(self, room: Room, event: ev.Ended) -> None:
        self.told.append(event)
        if self.raises is not None:
            raise self.raises

    def start(self, room: int, *listed: int) -> Room:
        """A ticket of these pages (default: page 1) of the source to the same of the target."""
        pair = ev.Pair("peer", 1, 1)
        pages = np.array(listed or (1,), np.int64)
        dest = Dest(ev.Party("peer"), 1, (PoolPages("kv", pages.astype("<i4").tobytes()),))
        life = Life(1, KVPoll.TRANSFERRING, dests=(dest,), n_dest=1)
        record = Room(RoomId(room), RoomKey("prefill", room, 0, 1), life, Meter(0.0))
        self.ledger.start(record, ev.Start(pair, 1), Chunk({"kv": pages}, {"kv": 0}, None))
        return record

    def fail(self, room: Room) -> None:
        """The room fails, and the order to cancel it is late."""
        life = room.life
        assert isinstance(life, Life)
        room.life = Life(1, KVPoll.FAILED, Reason.of(FailureCode.ABORTED, "aborted", "prefill"), dests=life.dests)


class _Direct:
    """Hooks of one backend without a plugin manager."""

    def __init__(self, backend: MemoryBackend) -> None:
        self._backend = backend

    def kvcore_transfer(self, *, transfer: Transfer, may_wait: bool) -> object:
        return self._backend.kvcore_transfer(transfer)

    def __getattr__(self, name: str) -> Callable[..., object]:
        hook: Callable[..., object] = getattr(self._backend, name)
        return hook


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(base: type[MemoryBackend] = MemoryBackend, **capabilities: Any) -> Bench:
        made.append(Bench(install(monkeypatch, base, **capabilities)(), **capabilities))
        return made[-1]

    yield make
    for one in made:
        if isinstance(one.backend, BlockingBackend):
            one.backend.open_gates()
        assert one.ledger.stop(SOON_S)
        assert joined(one.ledger.running(), SOON_S)


def test_a5_a_room_that_failed_in_its_lane_is_not_transferred_even_before_the_order_to_cancel(bench: Callable[..., Bench]) -> None:
    one = bench(BlockingBackend, blocking=True)
    gate = one.backend.gate(1)
    one.start(1)
    wait_until(lambda: gate.met)
    room = one.start(2)
    wait_until(lambda: one.ledger.sizes()["worker_lanes"] == 1)
    one.fail(room)
    gate.opened.set()
    wait_until(lambda: len(one.told) == 1 and not one.ledger.sizes()["worker_lanes"])
    one.ledger.cancel(room.key)
    wait_until(lambda: len(one.told) == 2)
    assert not one.told[1].ok and one.told[1].quiescent
    assert [transfer.room.number for transfer in one.backend.transfers] == [1]
    assert one.ledger.tickets == 0


def test_r7_nothing_is_started_towards_a_peer_that_fell_silent_while_the_ticket_waited_in_its_lane(bench: Callable[..., Bench]) -> None:
    one = bench(BlockingBackend, blocking=True)
    gate = one.backend.gate(1)
    one.start(1)
    wait_until(lambda: gate.met)
    one.start(2)
    wait_until(lambda: one.ledger.sizes()["worker_lanes"] == 1)
    assert one.peer is not None
    one.peer.silent = True
    gate.opened.set()
    wait_until(lambda: not one.ledger.sizes()["worker_lanes"])
    stays(lambda: len(one.backend.transfers) == 1, 0.1)
    one.peer.silent = False
    wait_until(lambda: len(one.told) == 2)
    assert all(event.ok for event in one.told)


def test_r7_a_ticket_is_not_tried_again_towards_a_silent_peer(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.backend.answers[1] = lambda transfer: RETRY
    one.start(1)
    wait_until(lambda: len(one.backend.transfers) > 2)
    assert one.peer is not None
    one.peer.silent = True
    stays(lambda: True, 0.02)
    seen = len(one.backend.transfers)
    stays(lambda: len(one.backend.transfers) <= seen + 1, 0.25)


@pytest.mark.parametrize("paired_anew", [False, True])
def test_p4_a_transfer_of_an_earlier_pairing_does_not_break_the_new_one(bench: Callable[..., Bench], paired_anew: bool) -> None:
    one = bench(BlockingBackend, blocking=True)
    gate = one.backend.gate(1)
    one.backend.answers[1] = lambda transfer: gate.wait() or failed("connection reset", peer_broken=True)
    one.start(1)
    wait_until(lambda: gate.met)
    if paired_anew and one.peer is not None:
        one.peer = View(one.peer.layout)
    gate.opened.set()
    wait_until(lambda: one.told)
    assert one.told[0].reason is not None and one.told[0].reason.code is FailureCode.PEER_LOST
    one.start(2)
    wait_until(lambda: len(one.told) == 2)
    assert one.broken == ([] if paired_anew else ["connection reset"])


def test_a_fence_ends_what_waits_and_writes_off_what_blocks(bench: Callable[..., Bench]) -> None:
    one = bench(BlockingBackend, blocking=True)
    gate = one.backend.gate(1)
    stuck = one.start(1)
    wait_until(lambda: gate.met)
    one.start(2)
    wait_until(lambda: one.ledger.sizes()["worker_lanes"] == 1)
    one.ledger.fence("peer")
    wait_until(lambda: one.ledger.tickets == 0)
    assert one.ledger.sizes().items() >= {"workers": 1, "worker_lanes": 0, "workers_stuck": 1}.items()
    active = stuck.meter.read(math.inf).active_s
    assert active < SOON_S  # the clock has stopped
    one.start(3)
    wait_until(lambda: one.told and one.told[0].ok)
    gate.opened.set()
    wait_until(lambda: one.ledger.sizes()["workers_stuck"] == 0)
    assert [transfer.room.number for transfer in one.backend.transfers] == [1, 3]


def test_a5_of_a_room_that_fails_while_its_parts_are_posted_no_more_are_posted(bench: Callable[..., Bench]) -> None:
    one = bench(max_descriptors=1)
    rooms: list[Room] = []
    one.backend.answers[1] = lambda transfer: one.fail(rooms[0]) or one.backend.post(transfer)
    one.peer, peer = None, one.peer
    rooms.append(one.start(1, 1, 3, 5))
    one.peer = peer
    wait_until(lambda: one.backend.transfers)
    stays(lambda: len(one.backend.transfers) == 1, 0.1)
    one.ledger.cancel(rooms[0].key)
    wait_until(lambda: one.told)
    assert not one.told[0].ok and one.told[0].quiescent
    assert not one.target[[3, 5]].any()


def test_cancelled_before_it_was_planned_a_ticket_is_quiescent(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.peer, peer = None, one.peer
    room = one.start(1)
    one.ledger.cancel(room.key)
    wait_until(lambda: one.told)
    assert (one.told[0].ok, one.told[0].quiescent) == (False, True)
    one.peer = peer
    one.ledger.cancel(room.key)
    one.start(2)
    wait_until(lambda: len(one.told) == 2 and one.told[1].ok)
    assert [transfer.room.number for transfer in one.backend.transfers] == [2]


@pytest.mark.parametrize("error", [RuntimeError("no"), OddError("no")])
def test_t7_news_that_nobody_can_take_loses_no_other_ticket(bench: Callable[..., Bench], error: BaseException) -> None:
    one = bench()
    one.backend.held.set()
    rooms = [one.start(number, number) for number in range(1, 4)]
    wait_until(lambda: len(one.backend.transfers) == 3)
    one.raises = error
    one.backend.held.clear()
    wait_until(lambda: len(one.told) == 3)
    assert all(event.ok for event in one.told)
    assert one.ledger.tickets == 0 and one.ledger.pulse.trouble == ""
    assert len(rooms) == 3


def test_a_ticket_that_only_a_fence_can_end_costs_no_turns(bench: Callable[..., Bench]) -> None:
    one = bench(OddBackend)
    one.backend.answers[1] = lambda transfer: failed("went wrong", quiescent=False)
    held: list[float] = []
    one.backend.kvcore_held_rooms = lambda: held.append(time.monotonic()) or []  # type: ignore[method-assign]
    one.start(1)
    wait_until(lambda: one.told and held)  # nothing to do: it looks what the backend holds, and sleeps
    wait_until(lambda: one.ledger.quarantined_pages == 1)
    seen = len(held)
    stays(lambda: len(held) <= seen + 1, 0.1)
    one.ledger.fence("peer")
    wait_until(lambda: one.ledger.tickets == 0)


def test_a_late_end_counts_once(bench: Callable[..., Bench]) -> None:
    one = bench(max_descriptors=1)
    one.backend.answers[1] = lambda transfer: DONE
    one.start(1)
    wait_until(lambda: one.told)
    one.ledger.cancel(RoomKey("prefill", 1, 0, 1))
    one.ledger.fence("peer")
    one.start(2)
    wait_until(lambda: len(one.told) == 2)
    assert [event.ok for event in one.told] == [True, True]
