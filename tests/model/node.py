"""One instance of the model: the shipped table and ledger, what the core does between them, and what it knows of its peers.

It stands in for ``core`` and ``peers``: it is the table's ``Outside`` and the handles' ``Owner``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvcore.hookspecs import Capabilities
from kvcore.mapping import Share, whole
from kvcore.memory import Pool
from kvcore.metrics import Metrics
from kvcore.planner import Layout
from kvcore.protocol import events as ev
from kvcore.protocol.messages import Abort, Ack, AnyRoomMessage, Destination, Join
from kvcore.room import Room
from kvcore.states import FailureCode, KVPoll, Reason, RoomId, RoomKey, Side
from tests.model.engine import Engine, Started
from tests.model.ghosts import Limits

if TYPE_CHECKING:
    from tests.model.world import World

PAGES = 25


class Stranger(NamedTuple):
    """Said by whoever is not, or does not know, the instance that a letter was for (P3)."""

    about: str


class Letter(NamedTuple):
    """A message on its way."""

    source: str
    to: str
    body: AnyRoomMessage | Stranger


@dataclass(eq=False)
class Peer:
    """A paired instance, as the ledger sees it."""

    instance: str
    layout: Layout
    liveness_s: float
    heard: float
    expired: int = 0

    def shares(self, room: int) -> Mapping[str, Share]:
        return whole([place.geometry for place in self.layout.pools.values()])

    def heard_lately(self, now: float) -> bool:
        return now - self.heard <= self.liveness_s


class Node:
    """A run of one manager. ``address`` stays when it dies and another takes its place; ``name`` is its instance id."""

    def __init__(self, world: World, address: str, run: int, limits: Limits, split: bool) -> None:
        self.world, self.address, self.name, self.limits = world, address, f"{address}.{run}", limits
        self.run, self.split = run, split
        self.side: Side = "prefill" if address == "P" else "decode"
        self.rank, self.dead = 0, False
        self.memory = np.full((PAGES, 1), -1, np.int64)
        pool = Pool.from_tensors("kv", [self.memory], page_size=1)
        self.pools: Mapping[str, Pool] = {"kv": pool}
        self.layout = Layout.of((pool.geometry,), pool.regions)
        step = 1 if self.side == "prefill" else 7  # so that what lies side by side there lies apart here
        self.free = [step * page % PAGES for page in range(PAGES)]
        self.engine = Engine(self)
        self.table = world.modules.rooms.RoomTable(limits.table, 0, self, world.clock)
        self.ledger = world.modules.ledger.Ledger(
            self.engine, Capabilities(max_descriptors=1 if split else None), self.layout, limits.ticket_s, Metrics(), self.peers_get,
            self._ended, self._broken, self.table, world.clock,
        )  # fmt: skip
        self.peers: dict[str, Peer] = {}
        self.departed: dict[str, bool] = {}
        """Lost peers that pages may wait for, and whether the engine has disconnected them for good."""
        self.searches: list[Room] = []
        self.started: dict[tuple[RoomKey, int], Started] = {}
        self.unproven_of: dict[int, int] = {}
        """Own generations with pages released by limit, and how many."""
        self.wake = math.inf

    def peers_get(self, instance: str) -> Peer | None:
        return self.peers.get(instance)

    # --- room.Outside

    def send(self, effect: ev.Send) -> None:
        self.world.rules.said(self, effect)
        if effect.to in self.peers:
            self.world.post(Letter(self.name, effect.to, effect.message))

    def start(self, room: Room, effect: ev.Start) -> None:
        chunk = room.chunks[effect.chunk - 1]
        if (room.key, effect.chunk) in self.started:
            self.world.rules.note("R3", f"{self.name} started chunk {effect.chunk} of {effect.pair} again")
        self.started[room.key, effect.chunk] = Started(effect.pair, chunk.pages["kv"].size)
        self.ledger.start(room, effect, chunk)

    def seek(self, room: Room) -> None:
        self.searches.append(room)

    def why_not_reached(self, room: Room) -> str:
        return ""

    def cancel(self, key: RoomKey) -> None:
        self.ledger.cancel(key)

    def forget(self, key: RoomKey) -> None:
        self.ledger.forget(key)

    def unproven(self, key: RoomKey, effect: ev.Unproven) -> None:
        pages = effect.pages
        if key.side == "prefill":
            pages = self.ledger.write_off(key, effect.pair, effect.chunk)
            peer = self.peers.get(effect.pair.peer)
            if peer is not None:
                peer.expired = max(peer.expired, effect.pair.rg)
        self.unproven_of[key.generation] = self.unproven_of.get(key.generation, 0) + pages
        self.world.rules.released_by_limit(self, key, effect, pages)

    def changed(self, room: Room, old: KVPoll | None) -> None:
        self.world.rules.changed(self, room, old)

    def listen(self) -> None:
        """Engines here need nobody to drive them."""

    def settle(self) -> None:
        """What is said is under way at once here."""

    def wake_by(self, when: float) -> None:
        self.wake = min(self.wake, when)

    def collect(self, room: Room) -> None:
        """Handles are kept and cleared here; none is dropped."""

    # --- what the ledger and the peers tell

    def _ended(self, room: Room, event: ev.Ended) -> None:
        self.table.apply("prefill", room.id, event)

    def _broken(self, instance: str, text: str) -> None:
        if instance in self.peers:
            self.world.post(Letter(self.name, instance, Stranger(self.name)))
            self.lose(instance, f"the path to it is broken: {text}")

    def got(self, source: str, body: AnyRoomMessage) -> None:
        """A room message of a paired instance, with the core's checks of what it may name."""
        if self.side != ("prefill" if isinstance(body, Join | Destination | Ack | Abort) else "decode"):
            return
        mine, theirs = (body.sg, body.rg) if self.side == "prefill" else (body.rg, body.sg)
        if mine > self.table.generation or (self.side == "prefill" and theirs == 0):
            return
        party = ev.Party(source, expired=self.peers[source].expired)
        self.table.apply(self.side, RoomId(body.room, body.attempt), ev.Got(body, party))

    def pair(self, other: Node, expired: int) -> None:
        self.departed.pop(other.name, None)
        self.peers[other.name] = Peer(other.name, other.layout, self.limits.liveness_s, self.world.clock.now, expired)

    def lose(self, instance: str, text: str, replaced: bool = False) -> None:
        """Give a peer up; where engines fence, its disconnect proves that nothing of it touches memory here (R4)."""
        if self.peers.pop(instance, None) is None:
            return
        reason = Reason.of(FailureCode.PEER_LOST, f"peer {instance} lost: {text}", self.side)
        self.departed[instance] = self.world.fences
        self.table.apply_all(ev.Lost(instance, reason, replaced), self.side)
        self.world.rules.check_lost(self, instance)
        self.seek_proof(instance)

    def seek_proof(self, instance: str) -> None:
        gone, disconnected = self.world.is_gone(instance), self.departed[instance]
        if (disconnected or gone) if self.side == "decode" else (disconnected and gone):
            self.fence(instance)
        if instance not in self.table.tickets_towards() and instance not in self.table.spoken_to():
            del self.departed[instance]

    def fence(self, instance: str) -> None:
        """From now on that peer touches nothing here, and all rooms hear of it."""
        self.world.fenced(self, instance)
        if self.side == "prefill":
            self.ledger.fence(instance)
        self.table.apply_all(ev.Fenced(instance), self.side)

    # --- time

    def tick(self) -> None:
        """What the control thread does when it is due, or woken."""
        now = self.world.clock.now
        for peer in [peer for peer in self.peers.values() if now - peer.heard > self.limits.liveness_s]:
            self.lose(peer.instance, f"silent for liveness_s ({self.limits.liveness_s:g} s)")
        for instance in list(self.departed):
            self.seek_proof(instance)
        if self.wake <= now:
            self.wake = math.inf
            due = self.table.tick(now)
            self.wake = min(self.wake, due if due is not None else math.inf)
            if self.wake <= now:
                self.world.rules.note("S8", f"{self.name} has timers that were due at {self.wake} and did not fire at {now}")
                self.wake = math.inf
