"""Nothing hidden: every store that grows with rooms or peers is in ``stats``, and empty again when they are gone (C1, C7, B4)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import queue
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvcore import Handle, KVManager, KVPoll, core, hookimpl
from kvcore.backends.local import LocalBackend
from kvcore.faults import FaultPlan
from kvcore.peers import Peers
from tests.helpers import SOON_S, Duo, Flag, duo, manager, memory, number, wait_until
from tests.hidden import containers, module_stores

LIMITS = {"bootstrap_s": 60.0, "input_s": 60.0, "transfer_s": 60.0, "ticket_s": 30.0, "quarantine_s": 60.0}
PEERS = 3
KINDS = 14
"""Rooms that ``open_rooms`` opens at a time."""
CORE, TABLE = "manager._core", "manager._core.table"
STATE = f"{TABLE}._slots[].state"

COVERED = {
    "slots": [f"{TABLE}._slots"],
    "watchers": [f"{TABLE}._slots[].watchers"],
    "records": [f"{TABLE}._records"],
    "timers": [f"{TABLE}._alarms.timers._delay_of"],
    "tickets": [f"{STATE}.flights[].running", f"{STATE}.flights[].stuck"],
    "last_words": [f"{STATE}.words"],
    "marks": [f"{STATE}.marks"],
    "waiting_joins": [f"{STATE}.waiting"],
    "drain_records": [f"{STATE}.drains"],
    "unrouted_aborts": [f"{STATE}.unrouted"],
    "ledger_tickets": [f"{CORE}._ledger._entries"],
    "orders": [f"{CORE}._ledger._commands"],
    "late_words": [f"{CORE}._late._waiting"],
    "collected": [f"{CORE}._collected"],
    "control_calls": [f"{CORE}.channel._calls", f"{CORE}.channel._letters"],
    "slow_calls": [f"{CORE}._slow._calls"],
    "http_calls": [f"{CORE}._http._running"],
    "flight_record": [f"{TABLE}.flight._ring"],
    "questions": [f"{CORE}.stories._asked"],
    "searches": [f"{CORE}.routes._searches"],
    "groups": [f"{CORE}.routes._ways"],
    "directory_lookups": [f"{CORE}._directory._waiting"],
    "directory_questions": [f"{CORE}._directory._questions"],
    "directory_groups": [f"{CORE}._directory._groups"],
    "peers": [f"{CORE}._peers.pairings"],
    "links": [f"{CORE}._peers._links"],
    "link_waiters": [f"{CORE}._peers._links[].waiters"],
    "pairings": [f"{CORE}._peers._pairing_now"],
    "departed_peers": [f"{CORE}._peers._departed"],
}
"""The paths that each store of ``stats`` is the size of, summed up."""

SAME_AS = {
    f"{TABLE}._alarms.timers._queues[]": "timers",
    f"{CORE}.channel._routes": "links",
    f"{CORE}.channel._readiness._sockets": "links",
    "backend._links": "peers",
    "backend._connections": "peers",
}
"""Paths that grow exactly as a store does that is listed for another."""

PARTS = {
    f"{TABLE}._slots[]": "a slot's protocol state, which holds what is listed above, and its timers",
    f"{TABLE}._records[]": "a lifetime's chunks, state and history, which has 32 entries at most",
    f"{CORE}._ledger._entries[]": "a ticket's parts",
    f"{CORE}._peers.pairings[]": "what a peer said of its pools",
    f"{CORE}.routes._searches[]": "the ranks that a search expects, and those that are paired",
    f"{CORE}._directory._groups[]": "the ranks of a group",
    f"{CORE}.routes._ways[]": "the same of a group that peers were found through, and these, by turn",
    f"{CORE}._directory._questions[]": "who waits for an answer, each a lookup as well",
}
"""Records of stores that are covered. What stands in one is no store, unless it grows beyond ``MOST_PARTS`` on average."""
MOST_PARTS = 16

BOUNDED = {
    f"{TABLE}._alarms.timers._queues": 32,  # one for each delay: limits, and steps of repetition
    f"{TABLE}.flight._ring": 32_768,
    f"{TABLE}.flight._rooms": 32_768,
    f"{TABLE}.flight._rooms[]": 32_768,
    f"{TABLE}.flight._ring[].effects": 32_768,
    f"{TABLE}.flight._ring[].what.parties": 32_768,
    f"{CORE}._metrics._counts": 40,  # by code and port
    f"{CORE}._metrics._sums": 4,  # by side
    "kvcore.addresses._parse": 1024,
    "kvcore.mapping._pairs": 1024,  # by layouts, sizes and turn
    "kvcore.mapping._writers": 1024,
    "kvcore.planner._rows": 1024,  # by pools of two peers and what of them is written
    "backend._fences": 1024,  # the newest of the peers that were fenced
}
"""The most entries of what is bounded by a constant; only this may last."""


@dataclass
class Watched:
    """A manager whose containers are counted, and how it was before its first room."""

    manager: KVManager
    before: Counter[str] = field(init=False)
    stores: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.before, self.stores = self.count(), dict(self.manager.stats().stores)

    def count(self) -> Counter[str]:
        """The size of every container, by path."""
        backend = self.manager._core._backend.plugins.get_plugin("backend")
        return containers({"manager": self.manager, "backend": backend, **module_stores()})

    def grown(self) -> Counter[str]:
        """By how much each container is larger than at first."""
        return self.count() - self.before

    def lasting(self) -> list[str]:
        """Containers that are larger than at first and not bounded."""
        return [f"{path} has {size} entries more" for path, size in self.grown().items() if size > BOUNDED.get(path, 0)]

    def hidden(self) -> list[str]:
        """Containers that have grown and that no store of ``stats`` is the size of."""
        with self.manager._core.table.lock:  # rooms stand still between the two counts
            grown, stores = self.grown(), Counter(self.manager.stats().stores)
        stores.subtract(self.stores)
        covered = {path: name for name, paths in COVERED.items() for path in paths} | SAME_AS
        free = [path for path in grown if path not in covered and not _is_small(path, grown)]
        wrong = [f"{path} is in no store, and has {grown[path]} entries" for path in free]
        for name, paths in COVERED.items():
            if (found := sum(grown[path] for path in paths)) != stores[name]:
                wrong.append(f"store {name} is {stores[name]}, and its containers have {found} entries")
        for path, name in SAME_AS.items():
            if grown[path] not in (0, stores[name]):
                wrong.append(f"{path} has {grown[path]} entries, and store {name} is {stores[name]}")
        return wrong


def _is_small(path: str, grown: Counter[str]) -> bool:
    if path in BOUNDED:
        return grown[path] <= BOUNDED[path]
    record = next((record for record in PARTS if path.startswith(record + ".")), None)
    return record is not None and grown[path] <= MOST_PARTS * grown[record.removesuffix("[]")]


def settled(look: Callable[[], list[str]], patience_s: float = 3.0) -> list[str]:
    """What is still wrong when everything stands still."""
    wrong: list[str] = []

    def nothing() -> bool:
        wrong[:] = look()
        return not wrong

    with contextlib.suppress(AssertionError):
        wait_until(nothing, patience_s)
    return wrong


@dataclass
class Crowd:
    """A manager under test, and peers of the other side; the last of these does not fit."""

    watched: Watched
    duos: list[Duo]
    misfit: Duo
    handles: list[Handle] = field(default_factory=list)

    def open(self, times: int) -> None:
        """Rooms with every peer, at every stage."""
        for pair in self.duos * times:
            self.handles += open_rooms(pair)
        for pair in [self.misfit] * times:
            self.handles += pair.open()

    def wait(self) -> None:
        """Wait for every room in every way, and give up."""
        for handle in self.handles:
            handle.wait(0)
            handle.wait_release_safe(0)
        asyncio.run(give_up_awaiting(self.handles))

    def clear(self) -> None:
        """Clear all rooms, and wait until nothing is kept of them."""
        for pair in self.duos:
            pair.plan.heal()
        for handle in self.handles:
            handle.clear()
        self.handles.clear()
        gc.collect()
        for pair in [*self.duos, self.misfit]:
            pair.stores_empty()

    def end(self) -> None:
        """Close all the peers, and wait until they are known to be gone."""
        for pair in [*self.duos, self.misfit]:
            (pair.prefill if pair.decode is self.watched.manager else pair.decode).close()
        wait_until(lambda: self.watched.manager.stats().peers == 0)


@contextmanager
def crowd(side: str, peers: int = PEERS, orphan_s: float = 1.0) -> Iterator[Crowd]:
    source, target, limits = memory(4, seed=3), memory(4), {**LIMITS, "orphan_s": orphan_s}
    with ExitStack() as closing:
        hub = closing.enter_context(manager(side, source if side == "prefill" else target, limits=limits))
        watched = Watched(hub)

        def pair_with(page_bytes: int) -> Duo:
            other = "decode" if side == "prefill" else "prefill"
            made = closing.enter_context(manager(other, memory(4, page_bytes=page_bytes), limits=limits))
            return Duo(hub, made, source, target) if side == "prefill" else Duo(made, hub, source, target)

        plan = FaultPlan()
        if side == "prefill":
            hub.add_observer(plan)
        duos = [pair_with(64) for _ in range(peers)]
        for pair in duos:
            pair.plan = plan if side == "prefill" else pair.plan
            if side == "decode":
                pair.prefill.add_observer(pair.plan)
        yield Crowd(watched, duos, pair_with(32))
        for pair in duos:
            pair.plan.heal()


def open_rooms(duo: Duo) -> list[Handle]:
    """Rooms that have come to each stage and wait there, cleared ones not among the handles."""
    handles: list[Handle] = [duo.prefill.sender(number()), duo.decode.receiver(number(), duo.prefill.address)]
    joined, published, waiting, held, late, done, failed, drained = (duo.open() for _ in range(8))
    for room in (joined, published, waiting, held, late, done, failed, drained):
        handles += room
    for _, receiver in (published, waiting, held, late, done, drained):
        receiver.receive([1])
    waiting[0].send([1], ready=Flag())
    duo.plan.hold(room=held[0].room)
    duo.plan.hold(room=late[0].room, hook="kvcore_poll")
    duo.plan.hold(room=drained[0].room)
    for sender, _ in (held, late, done, drained):
        sender.send([1], last=True)
    failed[0].abort()
    wait_until(lambda: drained[1].poll() is KVPoll.TRANSFERRING)
    drained[1].abort()
    unpaired, refused = duo.open()
    unpaired.clear()
    duo.prefill.sender(number()).clear()
    duo.decode.reject(number(), "busy", duo.prefill.address)
    return [*handles, refused, duo.decode.receiver(number(), "127.0.0.1:9")]


async def give_up_awaiting(handles: Sequence[Handle]) -> None:
    async def terminal(handle: Handle) -> None:
        await handle

    tasks = [asyncio.create_task(terminal(handle)) for handle in handles]
    await asyncio.wait(tasks, timeout=0.05)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_no_store_is_hidden_from_stats_and_none_lasts(side: str) -> None:
    with crowd(side) as those:
        hub = those.watched.manager
        those.open(200 // (PEERS * KINDS) + 1)
        assert hub.stats().peers == PEERS and hub.stats().stores["rooms"] > 100
        assert not settled(those.watched.hidden)
        those.wait()
        assert hub.stats().stores["watchers"] == 0, "who waits no more leaves nothing with a room that lives on"
        those.clear()
        assert not settled(those.watched.hidden)
        those.end()
        assert not settled(those.watched.lasting)
        assert not settled(those.watched.hidden)


def test_rooms_that_wait_for_a_peer_to_pair_are_in_stats() -> None:
    with duo() as pair:
        watched, plan = Watched(pair.decode), FaultPlan()
        pair.decode.add_observer(plan)
        hold = plan.hold(hook="kvcore_endpoint")
        handles = [handle for _ in range(5) for handle in pair.open()]
        wait_until(lambda: pair.decode.stats().stores["link_waiters"] == 5)
        assert not settled(watched.hidden)
        hold.release()
        wait_until(lambda: handles[-1].poll() is KVPoll.WAITING_FOR_INPUT)
        assert pair.decode.stats().stores["link_waiters"] == 0 and not settled(watched.hidden)


def test_who_waits_is_in_stats() -> None:
    with duo() as pair:
        watched, (sender, receiver) = Watched(pair.decode), pair.open()
        waits = [threading.Thread(target=wait, args=(30.0,), daemon=True) for wait in (receiver.wait, receiver.wait) * 3]
        for thread in waits:
            thread.start()
        wait_until(lambda: pair.decode.stats().stores["watchers"] == len(waits))
        assert not settled(watched.hidden)
        receiver.abort()
        for thread in waits:
            thread.join(SOON_S)
        assert pair.decode.stats().stores["watchers"] == 0 and not any(thread.is_alive() for thread in waits)
        sender.clear()


# --- the check finds what is hidden


def in_the_backend(monkeypatch: pytest.MonkeyPatch) -> str:
    transfer = LocalBackend.kvcore_transfer

    @hookimpl
    def kvcore_transfer(self: Any, transfer: Any, _go_on: Any = transfer) -> Any:
        self.__dict__.setdefault("_batches", {})[transfer.room] = transfer.chunk
        return _go_on(self, transfer)

    monkeypatch.setattr(LocalBackend, "kvcore_transfer", kvcore_transfer)
    return "backend._batches"


def in_the_manager(monkeypatch: pytest.MonkeyPatch) -> str:
    return _note_changes(monkeypatch, lambda owner, room: owner.__dict__.setdefault("_noted", set()).add(room.key))("manager._core._noted")


def in_a_module(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(core, "_noted", [], raising=False)
    return _note_changes(monkeypatch, lambda _owner, room: core.__dict__["_noted"].append(room.id))("kvcore.core._noted")


def in_each_room(monkeypatch: pytest.MonkeyPatch) -> str:
    grown = "layer_sources"
    return _note_changes(monkeypatch, lambda _owner, room: setattr(room, grown, [0] * 50))(f"manager._core.table._records[].{grown}")


def for_each_peer(monkeypatch: pytest.MonkeyPatch) -> str:
    pair = Peers._pair

    def noted(self: Any, peer: Any) -> None:
        self.__dict__.setdefault("_ever", deque()).append(peer.instance)
        pair(self, peer)

    monkeypatch.setattr(Peers, "_pair", noted)
    return "manager._core._peers._ever"


def _note_changes(monkeypatch: pytest.MonkeyPatch, note: Callable[[Any, Any], object]) -> Callable[[str], str]:
    changed = core.Core.changed

    def noted(self: Any, room: Any, old: Any) -> None:
        note(self, room)
        changed(self, room, old)

    monkeypatch.setattr(core.Core, "changed", noted)
    return str


HIDDEN = [in_the_backend, in_the_manager, in_a_module, in_each_room, for_each_peer]


@pytest.mark.parametrize("hide", HIDDEN, ids=lambda hide: hide.__name__)
def test_a_store_that_is_hidden_is_found(hide: Callable[[pytest.MonkeyPatch], str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = hide(monkeypatch)
    with crowd("prefill", peers=1, orphan_s=0.3) as those:
        those.open(1)
        found = settled(those.watched.hidden, 0.5)
        assert len(found) == 1 and found[0].startswith(f"{path} is in no store"), found
        those.clear()
        those.end()
        lasts = settled(those.watched.lasting, 0.5)
        assert lasts == [] if hide is in_each_room else len(lasts) == 1 and lasts[0].startswith(f"{path} has "), lasts


class Thing:
    """Somebody who keeps something; with slots, as a dataclass may have them."""

    __slots__ = ("__weakref__", "kept")

    def __init__(self, kept: object) -> None:
        self.kept = kept


def filled(number: int) -> Iterator[tuple[str, object]]:
    """Every way to keep something that grows."""
    things = [Thing(number) for number in range(number)]
    hidden = list(things)
    waiting: queue.SimpleQueue[object] = queue.SimpleQueue()
    ordered: queue.Queue[object] = queue.Queue()
    for thing in things:
        waiting.put(thing)
        ordered.put(thing)

    @functools.cache
    def cached(thing: object) -> object:
        return thing

    for thing in things:
        cached(thing)
    yield ".kept", dict.fromkeys(things)
    yield ".kept", set(things)
    yield ".kept", tuple(things)
    yield ".kept", frozenset(things)
    yield ".kept", deque(things)
    yield ".kept", OrderedDict.fromkeys(things)
    yield ".kept", weakref.WeakValueDictionary(enumerate(things))
    yield ".kept", weakref.WeakSet(things)
    yield ".kept", waiting
    yield ".kept", ordered
    yield ".kept", cached
    yield ".kept[]", [[], {}, hidden]
    yield ".kept.kept", Thing(hidden)
    yield ".kept().hidden", lambda: hidden
    yield ".kept()[]", functools.partial(print, hidden)
    yield ".kept", hidden.append.__self__
    yield ".kept.kept", weakref.ref(keep(Thing(hidden)))
    yield ".kept[].kept", {Thing(hidden): 1}


_keep: list[object] = []


def keep(thing: Thing) -> Thing:
    """Hold what would otherwise be gone."""
    _keep.append(thing)
    return thing


def test_every_kind_of_container_is_seen_to_grow() -> None:
    for (path, few), (_, many) in zip(filled(1), filled(40), strict=True):
        before, after = (containers({"it": Thing(kept)}) for kept in (few, many))
        assert (after - before)[f"it{path}"] >= 39, f"{type(many).__name__} at it{path}: {dict(after)}"
    _keep.clear()
