"""Sender and receiver: what an engine's scheduler holds of a room. No call here blocks, ``wait`` and ``wait_release_safe`` apart."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from types import TracebackType
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvcore.bell import Bell
from kvcore.errors import MOST_SHOWN, KVTransferError, PageError, one_line, shown
from kvcore.memory import Indices, Pool, check_distinct
from kvcore.metrics import TransferMetrics
from kvcore.protocol import events as ev
from kvcore.protocol.messages import PoolPages
from kvcore.protocol.receiver_state import Life as ReceiverLife
from kvcore.protocol.sender_state import Life as SenderLife
from kvcore.room import Chunk, Ready, Room
from kvcore.rooms import RoomTable
from kvcore.states import MAX_RECORD_BYTES, FailureCode, KVPoll, Reason
from kvcore.wire import MAX_LETTER_BYTES

MAX_LISTED = (MAX_LETTER_BYTES - 2**16) // 4
"""Pages of a destination, which travels as one letter; the rest of it is left for names."""

I4 = np.dtype("<i4")

H = TypeVar("H", bound="Handle")
PageList = Iterable[int] | npt.ArrayLike
Pages = Mapping[str, PageList] | PageList


class Owner(Protocol):
    """What a handle reaches of its manager."""

    @property
    def table(self) -> RoomTable: ...
    @property
    def pools(self) -> Mapping[str, Pool]: ...
    @property
    def rank(self) -> int: ...
    def collect(self, room: Room) -> None: ...


class Handle:
    """One lifetime of a room on one side. Usable from any thread; its result outlives ``clear`` (C5)."""

    def __init__(self, owner: Owner, room: Room) -> None:
        self._owner = owner
        self._room = room

    def __del__(self) -> None:
        """Collected without ``clear`` (C8)."""
        room = getattr(self, "_room", None)  # none, if it was never made
        if room is not None and not room.cleared:
            self._owner.collect(room)

    @property
    def room(self) -> int:
        """The room's number."""
        return self._room.id.number

    @property
    def attempt(self) -> int:
        """The room's attempt."""
        return self._room.id.attempt

    @property
    def generation(self) -> int:
        """What names this lifetime within the instance."""
        return self._room.key.generation

    @property
    def unpaired(self) -> bool:
        """Whether this lifetime ended without knowing the other side's (C4)."""
        return self._room.life.unpaired

    @property
    def failure(self) -> KVTransferError | None:
        """The first failure reason; None unless FAILED. Reading it removes nothing (S5)."""
        reason = self._room.life.reason
        return KVTransferError(self._room.id, reason) if reason is not None else None

    @property
    def metrics(self) -> TransferMetrics:
        """Figures of this transfer so far."""
        return self._room.meter.read(time.monotonic())

    @property
    def release_unproven(self) -> bool:
        """Whether pages of this lifetime were released by limit, without proof (R3)."""
        return self._room.unproven

    def poll(self) -> KVPoll:
        """The current state (S7): no lock, no I/O, never raises."""
        return self._room.life.state

    def raise_for_failure(self) -> None:
        """Raise ``failure`` if there is one."""
        failure = self.failure
        if failure is not None:
            raise failure

    def abort(self, reason: str = "aborted", code: FailureCode = FailureCode.ABORTED) -> None:
        """Fail the room here, and tell the other side (A1 to A6). Does nothing to a room that has ended, and never raises."""
        key = self._room.key
        known = code if isinstance(code, FailureCode) else FailureCode.ABORTED
        why = Reason.of(known, reason, key.side, self._owner.rank)
        self._owner.table.apply(key.side, self._room.id, ev.Fail(key.generation, why))

    def clear(self) -> None:
        """Remove the room here, aborting it first if it is live (C1 to C4). Any number of times."""
        self._owner.table.clear(self._room)

    def is_release_safe(self) -> bool:
        """Whether no engine can touch the room's pages any more (R1). Ask once the room has ended: then True is for good."""
        return self._owner.table.release_safe(self._room.key)

    def wait(self, timeout: float | None = None) -> KVPoll:
        """Block until the room is terminal, or ``timeout`` seconds; returns the state."""
        self._block(lambda: self.poll().terminal, timeout)
        return self.poll()

    def wait_release_safe(self, timeout: float | None = None) -> bool:
        """Block until the pages are release-safe, or ``timeout`` seconds; whether they are. Ask once the room has ended."""
        self._block(self.is_release_safe, timeout)
        return self.is_release_safe()

    def _block(self, reached: Callable[[], bool], timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        changed = Bell()
        unwatch = self._owner.table.watch(self._room, lambda: changed.ring() if reached() else None)
        try:
            while not reached():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return
                changed.sleep(None if left is None else min(left, threading.TIMEOUT_MAX))
        finally:
            unwatch()

    def __await__(self) -> Generator[Any, None, KVPoll]:
        return self._terminal().__await__()

    async def _terminal(self) -> KVPoll:
        """The terminal state. Cancelling the await does not abort the room."""
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody awaits any more
                loop.call_soon_threadsafe(changed.set)

        unwatch = self._owner.table.watch(self._room, wake)
        try:
            while not self.poll().terminal:
                await changed.wait()
                changed.clear()
            return self.poll()
        finally:
            unwatch()

    def __enter__(self: H) -> H:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.clear()

    def __reduce__(self) -> str:
        """Refused: of two copies the first to be collected would end the room of both (C8)."""
        raise TypeError(f"{self!r} cannot be copied or pickled; share the handle itself, or its room number and attempt")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} room {self._room.id} generation {self.generation} {self.poll().name}>"

    def _indices(self, pages: Pages) -> dict[str, Indices]:
        """Checked private copies per pool, in the pools' order, without empty ones; ``PageError`` names what is wrong (T2)."""
        pools = self._owner.pools
        if not isinstance(pages, Mapping):
            if len(pools) != 1:
                raise PageError(
                    f"room {self._room.id}: plain indices need exactly one pool, and there are {shown(sorted(pools))}; pass a mapping"
                )
            pages = {next(iter(pools)): pages}
        unknown = sorted(one_line(name, MOST_SHOWN) for name in pages if name not in pools)
        if unknown:
            raise PageError(f"room {self._room.id}: unknown pools {shown(unknown)}; choose from {shown(sorted(pools))}")
        checked = {name: pools[name].indices(pages[name]) for name in pools if name in pages}
        return {name: indices for name, indices in checked.items() if indices.size}


class Sender(Handle):
    """The prefill side of a room."""

    def send(self, pages: Pages, last: bool = False, ready: Ready | None = None, record: bytes = b"", layers: range | None = None) -> None:
        """Hand over a chunk: a mapping of pool name to page indices, or the indices of the only pool; may be empty (T1).

        ``layers``: only these of the pages, by layer id; each layer has a sequence of its own then, and the room ends when every layer of
        every page is in. They must stand at the same page of it.
        ``ready``: an object whose ``query()`` says that the pages are filled (T4). ``record``: with ``last``, at most 64 KiB that
        arrive with the end of the room. Copies the indices, never blocks; does nothing on an ended room. Raises ``PageError`` for
        wrong arguments and for a chunk after the last.
        """
        if layers is not None and not isinstance(layers, range):
            raise PageError(f"room {self._room.id}: layers is {shown(layers)}; pass a range of layer ids, or None for all")
        record = self._plain(record)
        if record and not last:
            raise PageError(f"room {self._room.id}: a record goes with the last chunk; pass last=True or send it later")
        if ready is not None and not callable(getattr(ready, "query", None)):
            raise PageError(f"room {self._room.id}: ready is a {type(ready).__name__} without query(); pass an event, or None")
        chosen = self._indices(pages)
        for name in chosen:
            if self._owner.pools[name].pairs_with:
                raise PageError(
                    f"room {self._room.id}: pool {shown(name)} only receives; send from {shown(self._owner.pools[name].source)}"
                )
        room, table = self._room, self._owner.table
        with table.aloud, table.lock:
            life = room.life
            assert isinstance(life, SenderLife)
            if life.state.terminal:
                return
            if life.last:
                raise PageError(f"room {room.id}: the last chunk was handed over already; open another attempt to send more")
            if chosen:
                offset = {name: self._stand(name, layers) for name in chosen}
                for name, indices in chosen.items():
                    self._count(name, layers, indices.size)
                room.chunks.append(Chunk(chosen, offset, ready, layers))
            room.meter.pages += sum(indices.size for indices in chosen.values())
            room.meter.chunks += 1
            counts = tuple((name, min(pages), max(pages)) for name, pages in room.pages.items()) if chosen else ()
            covered: tuple[int, ...] = ()
            full: tuple[int, ...] = ()
            if layers is not None:
                covered = tuple(sorted({layer for name in chosen for layer in self._owner.pools[name].layers if layer in layers}))
            if life.layered or covered:
                full = self._full()
            table.apply("prefill", room.id, ev.Hand(self.generation, counts, bool(last), record, covered, full))

    def _pages(self, name: str) -> list[int]:
        """Pages of a pool handed over so far, per layer of it."""
        return self._room.pages.get(name) or [0] * len(self._owner.pools[name].layers)

    def _count(self, name: str, layers: range | None, pages: int) -> None:
        """Count pages of a pool that are handed over."""
        before = self._pages(name)
        if layers is None:
            self._room.pages[name] = [count + pages for count in before]
        else:
            counts = zip(self._owner.pools[name].layers, before, strict=True)
            self._room.pages[name] = [count + pages * (layer in layers) for layer, count in counts]

    def _stand(self, name: str, layers: range | None) -> int:
        """Where a chunk stands in the sequence of its layers; ``PageError`` if these differ, or the pool has none of them."""
        before = self._pages(name)
        if layers is not None:
            before = [count for layer, count in zip(self._owner.pools[name].layers, before, strict=True) if layer in layers]
        found = set(before)
        if len(found) == 1:
            return found.pop()
        what = f"room {self._room.id}: pool {shown(name)}: {'its layers' if layers is None else shown(layers)}"
        if found:
            raise PageError(f"{what} stand at different pages, {sorted(found)}; send layers apart that are at the same page")
        raise PageError(f"{what} has no layer of the pool; choose from {shown(self._owner.pools[name].layers)}")

    def _full(self) -> tuple[int, ...]:
        """Layers of which as many pages are handed over as of any."""
        behind, known = set(), set()
        for name, pages in self._room.pages.items():
            layers, most = self._owner.pools[name].layers, max(pages)
            known |= set(layers)
            behind |= {layer for layer, count in zip(layers, pages, strict=True) if count < most}
        return tuple(sorted(known - behind))

    def _plain(self, record: object) -> bytes:
        """The bytes of a record, whatever holds them; a number would make that many zeros."""
        try:
            view = memoryview(record)  # type: ignore[arg-type]
        except TypeError as error:
            raise PageError(f"room {self._room.id}: a record is bytes, got a {type(record).__name__}; encode it first") from error
        if view.nbytes > MAX_RECORD_BYTES:
            raise PageError(f"room {self._room.id}: a record of {view.nbytes} bytes exceeds {MAX_RECORD_BYTES}; put it into a pool")
        return view.tobytes()

    @property
    def prefix_pages(self) -> Mapping[str, int]:
        """Pages per pool that decode holds already, from WAITING_FOR_INPUT on; the sender's sequence starts after them."""
        life = self._room.life
        assert isinstance(life, SenderLife)
        return {item.pool: item.prefix for item in life.dests[0].pages} if life.dests else {}


class Receiver(Handle):
    """The decode side of a room."""

    def receive(self, pages: Pages, prefix_pages: int | Mapping[str, int] = 0) -> None:
        """Publish the destination: page indices as for ``send``, in the order of the sender's sequence; may be empty.

        ``prefix_pages``: how many pages decode holds already, of the first pool or per pool; they are listed nowhere. Copies the
        indices, never blocks; does nothing on an ended room. Raises ``PageError`` for wrong arguments and for a second call.
        """
        chosen = self._indices(pages)
        pools = self._owner.pools
        for name, indices in chosen.items():
            check_distinct(name, indices, pools[name].num_pages)
        prefix = self._prefix(prefix_pages)
        total = sum(int(indices.size) for indices in chosen.values())
        if total > MAX_LISTED:
            raise PageError(f"room {self._room.id}: {total} pages are more than the {MAX_LISTED} that one message lists; use larger pages")
        listed = tuple(
            self._listed(source, {name: indices for name, indices in chosen.items() if pools[name].source == source}, prefix.get(source, 0))
            for source in dict.fromkeys(pool.source for pool in pools.values())
        )
        room, table = self._room, self._owner.table
        with table.aloud, table.lock:
            life = room.life
            assert isinstance(life, ReceiverLife)
            if life.state.terminal:
                return
            if life.pages is not None:
                raise PageError(f"room {room.id}: receive was called already; open another attempt for other pages")
            room.meter.pages = total
            room.meter.listed_bytes = sum(int(indices.size) * pools[name].page_bytes for name, indices in chosen.items())
            table.apply("decode", room.id, ev.Receive(self.generation, listed))

    def _listed(self, source: str, chosen: dict[str, Indices], prefix: int) -> PoolPages:
        """What is listed for one pool of the sender, which may lie in one pool here."""
        if len(chosen) > 1:
            raise PageError(
                f"room {self._room.id}: pools {shown(sorted(chosen))} are both for the sender's {shown(source)}; list one of them"
            )
        for name, indices in chosen.items():
            pages = indices.astype(I4).tobytes()
            return PoolPages(source, pages, prefix, "" if name == source else name)
        return PoolPages(source, b"", prefix)

    def _prefix(self, prefix_pages: int | Mapping[str, int]) -> dict[str, int]:
        pools = self._owner.pools
        given = dict(prefix_pages) if isinstance(prefix_pages, Mapping) else {next(iter(pools)): prefix_pages}
        for name, count in given.items():
            if name not in pools:
                raise PageError(f"room {self._room.id}: prefix_pages names pool {shown(name)}; choose from {shown(sorted(pools))}")
            if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < 2**31:
                raise PageError(
                    f"room {self._room.id}: prefix_pages of pool {shown(name)} is {shown(count)}; pass a number of pages, 0 or more"
                )
        return {pools[name].source: int(count) for name, count in given.items()}

    def layers_ready(self) -> frozenset[int]:
        """Layers that are complete for all pages announced so far, where the sender hands layers over apart; all after SUCCESS."""
        life, writers = self._room.life, self._room.layer_sources
        assert isinstance(life, ReceiverLife)
        said = {source.party.instance: frozenset(source.layers) for source in life.sources}
        done = {source.party.instance for source in life.sources if source.state is KVPoll.SUCCESS}
        return frozenset(layer for layer, names in writers.items() if all(name in done or layer in said.get(name, ()) for name in names))

    @property
    def record(self) -> bytes | None:
        """The sender's record, after SUCCESS."""
        life = self._room.life
        assert isinstance(life, ReceiverLife)
        return life.record if life.state is KVPoll.SUCCESS else None
