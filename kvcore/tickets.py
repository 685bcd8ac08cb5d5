"""What the ledger keeps of a ticket: one chunk towards one destination, as the parts that the engine is given."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvcore.hookspecs import Capabilities, Ticket, Transfer
from kvcore.mapping import Share
from kvcore.memory import Indices
from kvcore.planner import Layout, PoolPlace, alike, check, check_listed, plan, split
from kvcore.protocol import events as ev
from kvcore.protocol.sender_state import Life
from kvcore.room import Chunk, Room
from kvcore.workers import Job

FIRST_RETRY_S = 0.001
QUICK_DESCRIPTORS = 64


class PeerView(Protocol):
    """What the ledger asks of a paired peer, and tells of the path to it."""

    poisoned: bool

    @property
    def layout(self) -> Layout: ...
    def shares(self, room: int) -> Mapping[str, Share]: ...
    def heard_lately(self, now: float) -> bool: ...


class Incoming(Protocol):
    """Rooms in which this side is written to: all, and those to which data may be on its way."""

    receiving: int
    arriving: int


@dataclass(eq=False, slots=True)
class Part:
    """A transfer as the engine has it: its ticket once posted, and when it may be posted again.

    With a ``blocking`` backend it has a ``job`` from when it is put in its peer's lane until the call has returned.
    """

    transfer: Transfer
    nbytes: int
    ticket: Ticket | None = None
    job: Job | None = None
    peer: PeerView | None = None
    """The pairing it was posted in."""
    since: float = math.inf
    """When the call of the backend began; infinite while the engine does not have it."""
    not_before: float = 0.0
    retry_s: float = FIRST_RETRY_S

    def quick(self, quick_bytes: int | None) -> bool:
        """Whether it needs no worker of an engine that blocks (B6): it is small, and did not have to wait before."""
        small = self.nbytes <= (quick_bytes or 0) and self.transfer.length.size <= QUICK_DESCRIPTORS
        return small and not self.not_before


@dataclass(eq=False, slots=True)
class Entry:
    """One ticket of the protocol: what is still to be made into parts (None: nothing), parts to be posted again, parts running (or in a
    lane), and whether its failure was already told."""

    room: Room
    pair: ev.Pair
    number: int
    chunk: Chunk
    coming: Iterator[Transfer] | None = field(default_factory=lambda: iter(()))
    waiting: deque[Part] = field(default_factory=deque)
    running: list[Part] = field(default_factory=list)
    planned: bool = False
    cancelled: bool = False
    failed: bool = False
    unproven: bool = False
    """A part ended of which the backend does not know that it is quiescent: only a fence proves it."""

    @property
    def pages(self) -> int:
        """Pages this ticket keeps."""
        return sum(indices.size for indices in self.chunk.pages.values())


def transfers(entry: Entry, local: Layout, peer: PeerView, capabilities: Capabilities) -> Iterator[Transfer]:
    """The chunk as transfers that the backend can take: its pages and, place for place, those the destination listed (T1).

    Raises the planner's errors for pages or pools that do not fit (T2), all of them before the first transfer; each of these is made when
    it is asked for, since pages that go in slices make very many descriptors.
    """
    life = entry.room.life
    assert isinstance(life, Life)
    dest = next(dest for dest in life.dests if life.pair(dest) == entry.pair)
    listed = {item.into or item.pool: (item.pool, np.frombuffer(item.pages, "<i4").astype(np.int64)) for item in dest.pages}
    check_listed(peer.layout, listed)
    pages, fit = {}, True
    for pool, (source, theirs) in listed.items():
        if (mine := entry.chunk.pages.get(source)) is not None:
            first = entry.chunk.offset[source]
            pages[pool] = mine, (theirs := theirs[first : first + mine.size])
            fit &= mine.size == theirs.size
    if not fit:  # ours were checked when they were handed over, theirs just now
        check(local, peer.layout, pages)
    return _transfers(entry, local, peer, capabilities, pages)


Pages = Mapping[str, tuple[Indices, Indices]]


def _transfers(entry: Entry, local: Layout, peer: PeerView, capabilities: Capabilities, pages: Pages) -> Iterator[Transfer]:
    shares, there, layers = peer.shares(entry.room.id.number), peer.layout, entry.chunk.layers
    if layers is not None:
        some = {pool: share.of_layers(_source(local, there, pool).geometry.layers, layers) for pool, share in shares.items()}
        shares = {pool: share for pool, share in some.items() if len(share)}
    for batch in _batches(shares, pages, capabilities):
        planned = plan(local, there, batch, shares)
        named: tuple[str, Indices, Indices] | tuple[()] = ()
        if capabilities.descriptors == "pages":
            ((pool, (mine, theirs)),) = batch.items()
            if alike(_source(local, there, pool), there.pools[pool], shares[pool]):
                named = pool, mine, theirs
        for part in split(planned, capabilities.max_descriptors, capabilities.max_bytes):
            each = part.descriptors()
            yield Transfer(
                entry.room.key, entry.pair.peer, each.local_region, each.remote_region, each.local_offset, each.remote_offset, each.length,
                local.base, there.base, entry.number, *(named if part is planned else ()),
            )  # fmt: skip


def _source(local: Layout, there: Layout, pool: str) -> PoolPlace:
    """Our pool whose pages one of theirs takes."""
    return local.pools[there.pools[pool].geometry.source]


def _batches(shares: Mapping[str, Share], pages: Pages, capabilities: Capabilities) -> Iterator[Pages]:
    """What is planned at once: all of it, or for a backend that takes pages as many of one pool as one transfer may have."""
    pages = {pool: both for pool, both in pages.items() if pool in shares}
    if capabilities.descriptors != "pages":
        if pages:
            yield pages
        return
    for pool, (mine, theirs) in pages.items():
        if (most := mine.size) == 1:
            yield {pool: (mine, theirs)}
            continue
        if capabilities.max_descriptors is not None:
            most = min(most, capabilities.max_descriptors // len(shares[pool]))
        if capabilities.max_bytes is not None:
            most = min(most, capabilities.max_bytes // shares[pool].page_bytes)
        order = np.argsort(theirs)  # memory that is written from its beginning to its end takes it faster
        mine, theirs = mine[order], theirs[order]
        for start in range(0, mine.size, max(1, most)):
            cut = slice(start, start + max(1, most))
            yield {pool: (mine[cut], theirs[cut])}
