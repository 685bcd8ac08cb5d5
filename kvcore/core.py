"""The core: wires the parts of one instance together, owns their threads, and carries word between them.

It is the ``Outside`` of the room table and the ``Home`` of the peers; none of its parts knows another but through it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from kvcore import addresses, closing, gathering, interfaces
from kvcore.access import Access
from kvcore.admin import admin_app
from kvcore.backend import Backend
from kvcore.bootstrap import RankInfo
from kvcore.bootstrap_client import Directory, Registrar
from kvcore.bootstrap_service import BootstrapService
from kvcore.channel import Channel
from kvcore.config import Config
from kvcore.hookspecs import Event
from kvcore.http import HttpThread
from kvcore.introduction import introduction
from kvcore.late_words import LateWords
from kvcore.ledger import Ledger
from kvcore.logs import LimitsLog, about
from kvcore.memory import Pool, Region, by_name
from kvcore.metrics import Metrics
from kvcore.observers import Observers
from kvcore.overview import Overview
from kvcore.pairing import Peer
from kvcore.peers import Peers
from kvcore.planner import Layout
from kvcore.process import instance_id
from kvcore.protocol import events as ev
from kvcore.protocol.messages import Destination, Status
from kvcore.room import Room, room_id
from kvcore.rooms import RoomTable
from kvcore.routes import Routes, Search
from kvcore.slow import SlowThread
from kvcore.states import FailureCode, KVPoll, Reason, RoomId, RoomKey, Side
from kvcore.stories import Stories
from kvcore.whereabouts import Announcer, Whereabouts
from kvcore.wire import Explain, Introduction, RoomBody

log = logging.getLogger("kvcore.core")

STOP_S = 5.0
ENGINE_S = 20.0
"""How long ``close`` waits for an engine to stop: some take ten seconds and more."""
PRUNE_S = 1.0
LAST_WORDS_S = 1.0
"""How long ``close`` waits for its last words to be acknowledged."""
SIDES: tuple[Side, ...] = ("prefill", "decode")


class Core:
    """The running parts of one manager. Raises what ``KVManager`` raises if it cannot start, with nothing left running."""

    def __init__(self, config: Config, pools: Sequence[Pool]) -> None:
        self.config = config = config.model_copy(update=interfaces.placed(config.host, config.bind))
        self.pools: Mapping[str, Pool] = by_name(pools)
        self.rank = config.topology.place.number
        self.instance = instance_id(config.role)
        self._closed = self._in_close = False
        self._close_lock = threading.RLock()
        self._changed = threading.Event()
        self._collected: list[Room] = []
        self._prune_at = 0.0
        self._undo: list[Callable[[], object]] = []
        self._threads: list[Callable[[], list[threading.Thread]]] = []  # those that may be held up in what is not ours
        self._at_work = False
        self._metrics = Metrics()
        self._limits_log = LimitsLog(log)
        self._announcer: Announcer | None = None
        try:
            self._start()
        except BaseException:
            self._stop_all()
            raise

    def _start(self) -> None:
        config, limits, access = self.config, self.config.limits, Access.of(self.config)
        self.table = RoomTable(limits.model_dump() | {"mark_s": 2 * limits.orphan_s}, self.rank, self)
        self._late = LateWords(self.table.get, self._post, self.settle)
        backend = self._backend = Backend(config.backend, config.backend_options)
        me = introduction(config, self.instance, self.pools, backend.info)
        regions = [region for pool in self.pools.values() for region in pool.regions]
        self.observers = Observers(backend.plugins)
        self._undo.append(lambda: self.observers.stop(STOP_S))
        self._slow = SlowThread("kvcore-slow")
        self._threads += [self.observers.running, self._slow.running]
        self._undo.append(lambda: self._slow.stop(STOP_S))
        self._slow.run(lambda: backend.open(config, self.instance, me.pools, regions)).result()
        self._undo.append(lambda: self._close_backend(regions))
        self._peers = Peers(me, limits.send_s, backend.hooks, backend.info.capabilities, self)
        self._ledger = Ledger(
            backend.hooks, backend.info.capabilities, Layout.of(me.pools, regions), limits.ticket_s, self._metrics,
            lambda instance: self._peers.peer("prefill", instance), self._ticket_ended, self._path_broken, self.table,
            rank=self.rank, after_turn=self._late.tell,
        )  # fmt: skip
        bind = addresses.Address(addresses.parse_host(config.bind or config.host, "bind"), config.port)
        self.channel = self._peers.channel = Channel(bind, "port", limits.liveness_s / 3, self._peers.on_frame, self._tick, access.keys)
        self.channel.on_refused = self._peers.on_refused
        self._undo.append(lambda: self.channel.stop(STOP_S))
        self._undo.append(lambda: self._ledger.stop(STOP_S))
        self._threads.append(self._ledger.running)
        self._http = HttpThread(guard=access.guard)
        self._undo.append(self._http.stop)
        self._directory = Directory(self._http)
        self.stories = Stories(self)
        self.routes = Routes(self._directory, Whereabouts(self._http), self._peers, self.channel.call)
        self.overview = Overview(
            list(self.pools.values()), self._metrics, self.table, self._ledger, self._peers, self.routes, self.channel, self._slow,
            self._http, self.observers, self.stories, self._late, self._collected,
        )  # fmt: skip
        self.channel.start()
        self._ledger.open()
        self._http.start()
        self._serve(me, bind.host)

    def _serve(self, me: Introduction, host: str) -> None:
        """The ports for people and for decode instances: admin, and the group's bootstrap service."""
        config = self.config
        published = addresses.parse_host(config.host, "host")
        self.admin_address = ""
        if config.admin is not None:
            admin = addresses.parse(config.admin, "admin", any_port=True)
            self.admin_address = str(
                addresses.Address(admin.host, self._http.serve(admin_app(self.overview), admin.host, admin.port, "admin"))
            )
        self.address = str(addresses.Address(published, self.channel.port))
        if config.role == "decode":
            return
        info = RankInfo(self.rank, me.place.total, self.address, self.instance, me.order, me.backend, me.place, self.channel.public)
        if config.bootstrap is None:
            self.overview.service = BootstrapService(me.place.total)
            port = self._http.serve(self.overview.service.app(), host, config.bootstrap_port, "bootstrap_port")
        leader = addresses.Address(published, port) if config.bootstrap is None else addresses.parse(config.bootstrap, "bootstrap")
        self.address = str(leader)
        tellers: list[Registrar | Announcer] = [Registrar(self._http, leader, info)]
        if me.place.dp_size > 1 and me.place.rank == 0:
            self._announcer = Announcer(self._http, leader, me.place.dp_rank, self.table.waiting)
            tellers.append(self._announcer)
        for teller in tellers:
            self._undo.append(teller.stop)
            teller.start()

    # --- for people

    def story(self, room: int, attempt: int) -> str:
        """What is known here of a room, on every side that this instance has."""
        name = room_id(room, attempt)
        return "".join(self.table.explain(side, name) for side in SIDES if self.config.role in (side, "both"))

    @property
    def closed(self) -> bool:
        """Whether there is nobody left to ask."""
        return self._closed

    def met(self, room: RoomId) -> set[str]:
        """The other instances that took part in a room."""
        return self.table.met(room) - {self.instance}

    def ask(self, instance: str, question: Explain) -> bool:
        """Ask a paired instance about a room; False if it is not paired."""
        return self._peers.ask(instance, question)

    def on_control(self, call: Callable[[], object]) -> None:
        """Have something done on the control thread."""
        self.channel.call(call)

    # --- what the table reaches (``room.Outside``); called under its lock

    def send(self, effect: ev.Send) -> None:
        """Send a room message, with ``settle``; that a sender is TRANSFERRING only where its first tickets do not end as they start."""
        if isinstance(effect.message, Status) and effect.message.state is KVPoll.TRANSFERRING:
            self._late.add(effect)
            return self._ledger.turn_soon()
        self._post(effect)

    def _post(self, effect: ev.Send) -> None:
        self.channel.post(lambda: self._peers.send(effect.to, effect.message))

    def settle(self) -> None:
        """Carry out what may be done without the table's lock."""
        self.channel.settle()

    def start(self, room: Room, effect: ev.Start) -> None:
        """Start a ticket."""
        self._ledger.start(room, effect, room.chunks[effect.chunk - 1])

    def seek(self, room: Room) -> None:
        """Find a receiver's sender ranks."""
        group = room.group
        if (peers := self.routes.known(group.address, room.id, group.dp_rank)) is not None:
            return self._found(room, peers)
        search = Search(
            group.address, room.id, group.dp_rank,
            lambda group, dp_rank: gathering.expected(self._peers.me, group, dp_rank, room.id.number),
            lambda: self.table.seeks_route(room), lambda peers: self._found(room, peers), lambda code, text: self._fail(room, code, text),
        )  # fmt: skip
        self.channel.call(lambda: self.routes.find(search))

    def _found(self, room: Room, peers: list[Peer]) -> None:
        """A receiver's sender ranks are known and paired."""
        found = gathering.gathered(self._peers.me, peers, room.id.number)
        room.layer_sources = found.writers
        self.table.apply("decode", room.id, ev.Route(room.key.generation, tuple(peer.party(room.id.number) for peer in peers)))
        if found.wrong is not None:
            self._fail(room, FailureCode.INCOMPATIBLE, found.wrong)

    def _fail(self, room: Room, code: FailureCode, text: str) -> None:
        self.table.apply(room.key.side, room.id, ev.Fail(room.key.generation, Reason.of(code, text, room.key.side, self.rank)))

    def why_not_reached(self, room: Room) -> str:
        """What a time-out's reason should add: why the other side was not reached."""
        address = room.group.address
        return self.routes.why(address) if address else self.overview.why_not_ready() or self.channel.why_refused(room.opened)

    def cancel(self, key: RoomKey) -> None:
        """Cancel a lifetime's tickets."""
        self._ledger.cancel(key)

    def forget(self, key: RoomKey) -> None:
        """Clear a lifetime at the backend."""
        self._ledger.forget(key)

    def unproven(self, key: RoomKey, effect: ev.Unproven) -> None:
        """Pages were released by limit: count them and say so (R3)."""
        pages = effect.pages
        if key.side == "prefill":
            pages = self._ledger.write_off(key, effect.pair, effect.chunk)
            peer = self._peers.peer("prefill", effect.pair.peer)
            if peer is not None:
                peer.expired = max(peer.expired, effect.pair.rg)
        self._metrics.count("kvcore_released_unproven_total", pages)
        name = RoomId(key.number, key.attempt)
        text = "room %s: %d pages released after quarantine_s without proof that %s left them"
        log.error(text, name, pages, effect.pair.peer, extra=about(key, effect.pair.peer))
        self.event("released_unproven", key, pages=pages)

    def changed(self, room: Room, old: KVPoll | None) -> None:
        """A room came to be, or changed its state."""
        state, reason = room.status, room.life.reason
        if state.terminal and old is not None:
            self._metrics.ended(room.key.side, state, reason.code if reason is not None else None, room.meter.read(time.monotonic()))
            if self._in_close:
                self._changed.set()
            self._limits_log.ended(room.key, reason)
        if room.key.side == "prefill" and self._announcer is not None:
            self._announcer.announce(room.id, state is KVPoll.BOOTSTRAPPING)
        if self.observers.watched:
            self.event("status", room.key, state=state.name, reason=str(reason or ""))

    def listen(self) -> None:
        """A room here may be written to from now on."""
        self._ledger.wake()

    def wake_by(self, when: float) -> None:
        """A timer is due then."""
        self.channel.wake_by(when)

    # --- what the peers reach (``peers.Home``); called on the control thread

    def got(self, side: Side, message: RoomBody, party: ev.Party) -> bool:
        """A room message from a paired instance; False if it cannot be meant."""
        mine = message.sg if side == "prefill" else message.rg
        theirs = message.rg if side == "prefill" else message.sg
        if mine > self.table.generation or (side == "prefill" and theirs == 0):
            return False
        if isinstance(message, Destination) and any(len(item.pages) % 4 for item in message.pages):
            return False
        self.table.apply(side, RoomId(message.room, message.attempt), ev.Got(message, party))
        return True

    def lost(self, instance: str, text: str, replaced: bool) -> None:
        """A peer was lost, or replaced by one that does not know this instance."""
        self.routes.lost(instance)
        for side in SIDES:
            self.table.apply_all(ev.Lost(instance, Reason.of(FailureCode.PEER_LOST, text, side, self.rank), replaced), side)

    def fenced(self, instance: str, side: Side) -> None:
        """It is proved that a lost peer touches nothing of this side any more."""
        if side == "prefill":
            self._ledger.fence(instance)
        self.table.apply_all(ev.Fenced(instance), side)

    def slowly(self, call: Callable[[], object], then: Callable[[object, BaseException | None], None]) -> None:
        """Make a slow call; what it gives comes back on the control thread."""
        self._slow.run(call).add_done_callback(
            lambda done: self.channel.call(lambda: then(None, e) if (e := done.exception()) is not None else then(done.result(), None))
        )

    def holds(self, instance: str) -> bool:
        """Whether pages here wait for proof about an instance."""
        return instance in self.table.tickets_towards() or instance in self.table.spoken_to()

    def spoken_to(self) -> dict[str, int]:
        """What a hello says of earlier meetings."""
        return self.table.spoken_to()

    def event(self, name: str, room: RoomKey | None = None, **details: str | int | float) -> None:
        """Tell observers."""
        self.observers.tell(Event(name, room, details))

    # --- threads

    def _tick(self, now: float) -> float | None:
        while self._collected:
            self._clear_collected(self._collected.pop())
        if now >= self._prune_at:  # not at each turn: there may be thousands
            self._prune_at = now + PRUNE_S
            self.routes.prune(now)
        late = self._late.tell(now)  # what a progress thread that is held up in a hook has not
        due = [self.table.tick(now), self._peers.tick(now), late]
        return min((when for when in due if when is not None), default=None)

    def collect(self, room: Room) -> None:
        """A handle was garbage-collected without ``clear`` (C8). May run anywhere, so it only notes it."""
        self._collected.append(room)
        self.channel.tick_soon()

    def _clear_collected(self, room: Room) -> None:
        if room.cleared:
            return
        self._metrics.count("kvcore_handles_collected_total")
        text, done = "room %s: its %s handle was dropped in state %s; %s", "cleared" if room.status.terminal else "aborted and cleared"
        log.warning(text, room.id, room.key.side, room.status.name, done, extra=about(room.key))
        self.table.clear(room)

    def _ticket_ended(self, room: Room, event: ev.Ended) -> None:
        self.table.apply("prefill", room.id, event)

    def _path_broken(self, instance: str, text: str) -> None:
        self.channel.call(lambda: self._peers.broken(instance, text))

    # --- the end

    def close(self, drain_s: float) -> None:
        """Take no new rooms, let transfers end for ``drain_s``, abort the rest, tell the peers, stop everything. Idempotent."""
        with self._close_lock:
            if self._in_close:  # on this very thread: a signal handler, or a hook
                return log.warning("%s is being closed; this call from within leaves it to that", self.instance)
            self._in_close = True
            try:
                if not self._closed:
                    self._close(drain_s)
            finally:
                self._in_close = False

    def _close(self, drain_s: float) -> None:
        self.overview.closing = True
        if KVPoll.TRANSFERRING in self._statuses():
            log.info("closing: rooms in transfer have up to drain_s (%g s) to end", drain_s)
        self._wait_until(lambda: KVPoll.TRANSFERRING not in self._statuses(), drain_s)
        for side, room, _, record in self.table.states():
            if record is not None and not record.status.terminal:
                reason = Reason.of(FailureCode.SHUTDOWN, f"{self.instance} is shutting down", side, self.rank)
                self.table.apply(side, room, ev.Fail(record.key.generation, reason))
        self._wait_until(lambda: not self._has_last_words(), min(LAST_WORDS_S, drain_s))
        self.channel.call(self._peers.farewell)
        self._stop_all()
        self._closed = True

    def _statuses(self) -> set[KVPoll]:
        return {record.status for _, _, _, record in self.table.states() if record is not None}

    def _has_last_words(self) -> bool:
        sizes = self.table.sizes()
        return bool(sizes["last_words"] or sizes["drain_records"] or sizes["unrouted_aborts"])

    def _wait_until(self, reached: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not reached() and (left := deadline - time.monotonic()) > 0:
            self._changed.wait(min(left, 0.02))
            self._changed.clear()

    def _stop_all(self) -> None:
        while self._undo:
            try:
                self._undo.pop()()
            except Exception:
                log.exception("a part of %s did not stop cleanly; going on", self.instance)
        if left := closing.left([thread for threads in self._threads for thread in threads()], self._at_work):
            log.error("%s is closed, and %s; keep the memory of its pools until its process ends", self.instance, left)

    def _close_backend(self, regions: Sequence[Region]) -> None:
        """Stop the engine; if it and all threads in it have ended, that proves that no ticket of it runs any more (R3).

        Destinations that still wait for Drained are fenced one by one before, where the engine can (R4).
        """
        peers = self.table.spoken_to() if self._backend.info.capabilities.fences_on_disconnect else ()
        for instance in closing.fenced(self._slow, self._backend, peers, STOP_S):
            self.fenced(instance, "decode")
        stopped = closing.stopped(self._slow, self._backend, regions, ENGINE_S)
        self._at_work = not (stopped and closing.joined(self._ledger.running(), STOP_S))
        for instance in () if self._at_work else self.table.tickets_towards():
            self.fenced(instance, "prefill")
