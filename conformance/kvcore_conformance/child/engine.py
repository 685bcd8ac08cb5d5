"""A backend without a manager, in a child process: its hooks as the core calls them, one after the other from a thread for slow ones and
one for the others (B5). Results are plain, bytes are hex.

A *batch* is what ``post`` gave the engine under a name: one or more transfers of a room.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError as FutureTimeout
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
import numpy as np
import pluggy

import kvcore
from kvcore import mapping
from kvcore.hookspecs import PENDING, Endpoint, Hooks, NothingPosted, OpenContext, Peer, TicketKind, TicketState, Transfer
from kvcore.memory import PoolGeometry, Region
from kvcore.planner import Descriptors, Layout, plan, split
from kvcore.registry import plugin_manager, validated_options
from kvcore.slow import SlowThread
from kvcore.states import RoomKey

if TYPE_CHECKING:
    from kvcore_conformance.child.worker import Worker

log = logging.getLogger("kvcore.engine")

T = TypeVar("T")

TURN_S, RETRY_S = 0.001, 0.01
HOOK_S = 15.0
"""The longest that a hook may take before it is said to hang."""
OFTEN = ("kvcore_poll", "kvcore_progress", "kvcore_held_rooms")
"""Hooks that are called all the time, and not worth an event."""
MOST_PARTS = 2
"""So many transfers a time at most, on the whole: very many wear down what drives them, and not the engine."""
NEVER_POSTED = TicketState(TicketKind.FAILED, "never posted", quiescent=True)


@dataclass(eq=False, slots=True)
class Part:
    """One transfer, and what has become of it. ``due``: when it is to be posted, if it is not with the engine; ``took_s``: seconds that
    ``kvcore_transfer`` took last."""

    transfer: Transfer
    ticket: Any = None
    state: TicketState = PENDING
    due: float | None = 0.0
    took_s: float = 0.0


@dataclass(eq=False, slots=True)
class Batch:
    """The transfers of a room that were posted under one name."""

    room: RoomKey
    parts: list[Part]
    cancelled: bool = False
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def tickets(self) -> list[Any]:
        return [part.ticket for part in self.parts if part.ticket is not None and part.state is PENDING]


class Engine:
    """An instance of a backend, not opened yet."""

    def __init__(
        self, worker: Worker, backend: str, options: dict[str, Any], side: str, instance: str, pools: list[dict[str, Any]]
    ) -> None:
        manager, _, info = plugin_manager(kvcore.load_backend(backend))
        self._hooks, self._able = cast(Hooks, manager.hook), info.capabilities
        self._note = worker.note
        manager.add_hookcall_monitoring(lambda *_: None, self._called)
        self._options = validated_options(info, options)
        made = [worker.pool(**pool, seed=0) for pool in pools]
        self._regions = tuple(region for pool in made for region in pool.regions)
        self._pools = tuple(pool.geometry for pool in made)
        self._made = made  # the memory itself, which another engine's of this process may take the place of
        self._layout = Layout.of(self._pools, self._regions)
        logger = logging.getLogger(f"kvcore.backends.{backend}")
        self._context = OpenContext(instance, side, 0, "127.0.0.1", "127.0.0.1", logger, self._pools)
        self._peers: dict[str, Layout] = {}
        self._batches: dict[str, Batch] = {}
        self._turn = threading.Lock() if self._able.exclusive else contextlib.nullcontext()
        self._slow = SlowThread("kvcore-slow")
        self._workers = ThreadPoolExecutor(1 if self._able.exclusive else self._able.parallel, "kvcore-worker")
        self._connecting: Future[None] = Future()
        self._orders: deque[Callable[[], None]] = deque()
        self._bell = threading.Event()
        self._over = self._stuck = False
        self.abort_s = 0.0
        """Seconds that ``kvcore_abort`` took last."""
        self.twins = 0
        """How many tickets at once equalled another one that had not ended either, at the most."""
        self._thread = threading.Thread(target=self._run, name="kvcore-progress", daemon=True)

    # --- slow hooks

    def open(self) -> None:
        """Start the engine."""
        self._slowly(lambda: self._hooks.kvcore_open(options=self._options, context=self._context))
        if self._thread.ident is None:
            self._thread.start()

    def register(self, second: list[Any] | None = None) -> None:
        """Register all memory; ``second``: address, bytes and device of what is given in the place of the second region."""
        regions = [self._regions[0], Region(*second), *self._regions[2:]] if second else self._regions
        self._slowly(lambda: self._hooks.kvcore_register(regions=regions))

    def unregister(self) -> None:
        """Undo it."""
        self._slowly(lambda: self._hooks.kvcore_unregister(regions=self._regions))

    def peer(self) -> dict[str, Any]:
        """How others reach this engine now."""
        found = self._slowly(self._hooks.kvcore_endpoint)
        return {
            "id": self._context.instance, "data": found.data.hex(), "keys": [key.hex() for key in found.keys],
            "regions": [asdict(region) for region in self._regions], "pools": msgspec.to_builtins(self._pools),
        }  # fmt: skip

    def connect(self, peer: dict[str, Any], within: float = HOOK_S) -> None:
        """Make a peer reachable, as its ``peer`` described it; ``TimeoutError`` if that does not end."""
        self.begin_connect(peer)
        self.end_connect(within)

    def begin_connect(self, peer: dict[str, Any]) -> None:
        """The same, without waiting for it."""
        regions = tuple(Region(**region) for region in peer["regions"])
        pools = msgspec.convert(peer["pools"], tuple[PoolGeometry, ...])
        endpoint = Endpoint(bytes.fromhex(peer["data"]), [bytes.fromhex(key) for key in peer["keys"]])
        self._peers[peer["id"]] = Layout.of(pools, regions)
        self._connecting = self._started(lambda: self._hooks.kvcore_connect(peer=Peer(peer["id"], endpoint, regions, pools)))

    def connects(self) -> bool:
        """Whether that which was begun last still goes on."""
        return not self._connecting.done()

    def end_connect(self, within: float = HOOK_S) -> None:
        """Wait for it."""
        self._result(self._connecting, within)

    def disconnect(self, peer: str) -> bool:
        """Whether it is proved that nothing of that peer is written here or read from here any more."""
        return self._slowly(lambda: self._hooks.kvcore_disconnect(peer=peer))

    def close(self) -> None:
        """Stop the engine; batches are forgotten."""
        self._in_turn(self._forget)
        self._slowly(self._hooks.kvcore_close)

    def end(self) -> None:
        """Unregister, close, and end the threads."""
        if self._thread.ident is not None:
            self.unregister()
            self.close()
            self._over = True
            self._thread.join(HOOK_S)
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._slow.stop(HOOK_S)

    # --- the others

    def post(
        self, name: str, room: int, to: str, pages: dict[str, list[list[int]]], times: int = 1, named: bool = True, generation: int = 1
    ) -> int:
        """Give the engine a batch; the number of its transfers. ``pages``: mine and theirs of each pool. Not ``named``: without their
        page lists, also if the backend takes these. ``generation``: of the room's lifetime. All of it ``times`` times, or less often where
        limits make many transfers of it."""
        key = RoomKey("prefill", room, 0, generation)
        once = list(self._transfers(key, to, pages, named))
        parts = [Part(transfer) for _ in range(max(1, min(times, MOST_PARTS * times // max(1, len(once))))) for transfer in once]
        self._batches[name] = batch = Batch(key, parts)
        if not parts:
            batch.over.set()
        self._bell.set()
        return len(parts)

    def wait(self, name: str, timeout: float) -> bool:
        """Whether all transfers of a batch end in time."""
        return self._batches[name].over.wait(timeout)

    def states(self, name: str) -> list[list[Any]]:
        """Of each transfer: its state's kind, whether it is called quiescent, and the reason."""
        return [[part.state.kind.value, part.state.quiescent, part.state.reason] for part in self._batches[name].parts]

    def took(self, name: str) -> list[float]:
        """Seconds that ``kvcore_transfer`` took for each of them."""
        return [part.took_s for part in self._batches[name].parts]

    def abort(self, name: str) -> None:
        """Cancel a batch, also one that has ended."""
        self._in_turn(lambda: self._cancel(self._batches[name]))

    def abort_tickets(self, name: str) -> None:
        """``kvcore_abort`` with the tickets of a batch that have ended."""
        batch = self._batches[name]
        tickets = [part.ticket for part in batch.parts if part.ticket is not None]
        self._in_turn(lambda: self._hooks.kvcore_abort(room=batch.room, tickets=tickets))

    def clear(self, room: int, generation: int = 1) -> None:
        """Have the backend drop a room's lifetime; what still runs of it is asked for no more."""
        self._in_turn(lambda: self._clear(RoomKey("prefill", room, 0, generation)))

    def held(self) -> list[int]:
        """Rooms that the backend says it holds something for."""
        return sorted({key.number for key in self._in_turn(self._hooks.kvcore_held_rooms)})

    # --- threads

    def _slowly(self, call: Callable[[], T]) -> T:
        return self._result(self._started(call), HOOK_S)

    def _started(self, call: Callable[[], T]) -> Future[T]:
        def work() -> T:
            with self._turn:
                return call()

        if self._stuck:
            raise TimeoutError("an earlier hook has not returned")
        return self._slow.run(work)

    def _result(self, future: Future[T], within: float) -> T:
        try:
            return future.result(within)
        except FutureTimeout:
            self._stuck = True
            raise TimeoutError(f"the hook has not returned after {within:g} s") from None

    def _in_turn(self, call: Callable[[], T]) -> T:
        """Have a call made by the progress thread."""
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        self._orders.append(work)
        self._bell.set()
        return future.result(HOOK_S)

    def _run(self) -> None:
        while not self._over:
            self._bell.wait(TURN_S)
            self._bell.clear()
            try:
                self._take_turn()
            except Exception:
                log.exception("the progress thread goes on")

    def _take_turn(self) -> None:
        with self._turn:
            while self._orders:
                self._orders.popleft()()
            if self._able.needs_progress and self._peers:
                self._hooks.kvcore_progress()
            batches = list(self._batches.values())
            self._poll([part for batch in batches for part in batch.parts if part.ticket is not None and part.state is PENDING])
        for batch in batches:
            self._post_due(batch)
            if not batch.over.is_set() and all(part.state is not PENDING for part in batch.parts):
                batch.over.set()
                self._note(f"ended {_about(batch.room)} {dict(Counter(part.state.kind.value for part in batch.parts))}")

    def _post_due(self, batch: Batch) -> None:
        now = time.monotonic()
        for part in batch.parts:
            if part.due is not None and part.due <= now:
                part.due = None
                if self._able.blocking:
                    self._workers.submit(self._begin, batch, part)
                else:
                    self._begin(batch, part)

    def _begin(self, batch: Batch, part: Part) -> None:
        if batch.cancelled:
            part.state = NEVER_POSTED
            return
        with self._turn:
            began = time.monotonic()
            try:
                result = self._hooks.kvcore_transfer(transfer=part.transfer, may_wait=True)
            except NothingPosted as error:
                result = TicketState(TicketKind.FAILED, str(error), quiescent=True)
            except Exception as error:
                result = TicketState(TicketKind.FAILED, f"kvcore_transfer raised {error!r}")
            part.took_s = time.monotonic() - began
        if isinstance(result, TicketState):
            self._take(part, result)
            return
        part.ticket = result
        if batch.cancelled and self._able.blocking:  # it was cancelled while the call ran
            self._orders.append(lambda: self._come_too_late(batch))
        self._bell.set()

    def _poll(self, parts: list[Part]) -> None:
        if parts:
            tickets = [part.ticket for part in parts]
            self.twins = max(self.twins, len(tickets) - len(set(tickets)))
            try:
                states = self._hooks.kvcore_poll(tickets=tickets)
            except Exception as error:
                states = [TicketState(TicketKind.FAILED, f"kvcore_poll raised {error!r}")] * len(parts)
            for part, state in zip(parts, states, strict=True):
                self._take(part, state)

    def _take(self, part: Part, state: TicketState) -> None:
        if state.kind is TicketKind.RETRY:
            part.ticket, part.due = None, time.monotonic() + RETRY_S
        elif state.kind is not TicketKind.PENDING:
            part.state = state

    def _called(self, outcome: pluggy.Result[object], hook: str, _: object, given: Mapping[str, Any]) -> None:
        """A hook has returned: an event of this process."""
        if hook not in OFTEN:
            room = given.get("room") or getattr(given.get("transfer"), "room", None)
            self._note(f"{hook} {_about(room)}{f' raised {outcome.exception!r}' if outcome.exception else ''}")

    # --- on the progress thread

    def _cancel(self, batch: Batch) -> None:
        batch.cancelled = True
        for part in batch.parts:
            if part.due is not None:
                part.due, part.state = None, NEVER_POSTED
        tickets, began = batch.tickets, time.monotonic()
        try:
            self._hooks.kvcore_abort(room=batch.room, tickets=tickets)
        finally:
            self.abort_s = time.monotonic() - began

    def _come_too_late(self, batch: Batch) -> None:
        """As the core does: what a call left behind that was under way when its room was cleared is cleared too."""
        self._cancel(batch)
        if all(other.room != batch.room for other in self._batches.values()):
            self._hooks.kvcore_clear(room=batch.room)

    def _clear(self, key: RoomKey) -> None:
        for name in [name for name, batch in self._batches.items() if batch.room == key]:
            self._write_off(name)
        self._hooks.kvcore_clear(room=key)

    def _forget(self) -> None:
        self._peers.clear()
        for name in list(self._batches):
            self._write_off(name)

    def _write_off(self, name: str) -> None:
        batch = self._batches.pop(name)
        batch.cancelled = True
        batch.over.set()

    # --- transfers, as the core would make them

    def _transfers(self, key: RoomKey, to: str, pages: dict[str, list[list[int]]], named: bool) -> Iterator[Transfer]:
        there, able = self._peers[to], self._able
        lists = {pool: (np.array(mine, np.int64), np.array(theirs, np.int64)) for pool, (mine, theirs) in pages.items()}
        by_pool = [{pool: both} for pool, both in lists.items()] if able.descriptors == "pages" else [lists]
        for some in by_pool:
            whole = mapping.whole([there.pools[pool].geometry for pool in some])
            parts = list(split(plan(self._layout, there, some, whole), able.max_descriptors, able.max_bytes))
            for part in parts:
                transfer = self._transfer(key, to, there, part.descriptors())
                if able.descriptors == "pages" and named and len(parts) == 1:
                    ((pool, (mine, theirs)),) = some.items()
                    transfer = replace(transfer, pool=pool, local_pages=mine, remote_pages=theirs)
                yield transfer

    def _transfer(self, key: RoomKey, to: str, there: Layout, part: Descriptors) -> Transfer:
        arrays = (part.local_region, part.remote_region, part.local_offset, part.remote_offset, part.length)
        return Transfer(key, to, *arrays, self._layout.base, there.base, 1)


def _about(room: RoomKey | None) -> str:
    """A room as events name it."""
    return f"{room.side} room {room.number}.{room.attempt}" if room else "-"
