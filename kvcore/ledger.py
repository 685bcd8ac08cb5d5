"""The ledger: every ticket from its start to its proven end, and the one thread that drives the backend's fast hooks.

A ticket is one chunk towards one destination; the engine may have it as several parts, since the core splits what a backend cannot
take whole. Tickets are kept by pair, apart from the room, so that ``clear`` can be immediate and *drained* still true. What has
failed without being quiescent stays here until it ends after all, the peer is fenced, or the protocol writes it off.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvcore.errors import KVCoreError
from kvcore.hookspecs import Capabilities, Hooks, NothingPosted, Ticket, TicketKind, TicketState, Transfer
from kvcore.metrics import Metrics
from kvcore.planner import Layout, plan, split
from kvcore.protocol import events as ev
from kvcore.protocol.sender_state import Life
from kvcore.rooms import Chunk, Room
from kvcore.states import FailureCode, Reason, RoomKey

log = logging.getLogger("kvcore.ledger")

SPIN_S = 0.0002
SHORTEST_WAIT_S = 0.00005
LONGEST_WAIT_S = 0.02
FIRST_RETRY_S = 0.001
LAST_RETRY_S = 0.1


class PeerView(Protocol):
    """What the ledger asks of a paired peer."""

    @property
    def layout(self) -> Layout: ...
    def heard_lately(self, now: float) -> bool: ...


@dataclass(eq=False, slots=True)
class Part:
    """A transfer as the engine has it: its ticket once posted, and when it may be posted again."""

    transfer: Transfer
    ticket: Ticket | None = None
    not_before: float = 0.0
    retry_s: float = FIRST_RETRY_S


@dataclass(eq=False, slots=True)
class Entry:
    """One ticket of the protocol: parts not yet posted, parts running, and whether its end was already booked as a failure."""

    room: Room
    pair: ev.Pair
    number: int
    chunk: Chunk
    waiting: deque[Part] = field(default_factory=deque)
    running: list[Part] = field(default_factory=list)
    planned: bool = False
    started: float = 0.0
    cancelled: bool = False
    failed: bool = False
    unproven: bool = False
    """A part ended of which the backend does not know that it is quiescent: only a fence proves it."""

    @property
    def pages(self) -> int:
        """Pages this ticket keeps."""
        return sum(indices.size for indices in self.chunk.pages.values())


class Ledger:
    """Owns all tickets of one manager. Commands come from any thread and are taken in order by the progress thread."""

    def __init__(
        self,
        hooks: Hooks,
        capabilities: Capabilities,
        local: Layout,
        ticket_s: float,
        metrics: Metrics,
        peer: Callable[[str], PeerView | None],
        ended: Callable[[Room, ev.Ended], None],
        broken: Callable[[str, str], None],
        receiving: Callable[[], bool],
    ) -> None:
        self._hooks, self._capabilities, self._local = hooks, capabilities, local
        self._ticket_s, self._metrics = ticket_s, metrics
        self._peer, self._ended, self._broken, self._receiving = peer, ended, broken, receiving
        self._commands: deque[Callable[[], None]] = deque()
        self._entries: dict[tuple[ev.Pair, RoomKey, int], Entry] = {}
        self._to_forget = self._forgotten = 0
        self._bell = threading.Event()
        self._stopping = False
        self.backend_rooms = 0
        """Lifetimes that the backend held something for when the ledger last had nothing to do (B4)."""
        self._thread = threading.Thread(target=self._run, name="kvcore-progress", daemon=True)

    # --- from any thread

    def open(self) -> None:
        """Start the progress thread."""
        self._thread.start()

    def start(self, room: Room, effect: ev.Start, chunk: Chunk) -> None:
        """Take a ticket on. Never blocks."""
        entry = Entry(room, effect.pair, effect.chunk, chunk)
        self._order(lambda: self._entries.__setitem__((effect.pair, room.key, effect.chunk), entry))

    def cancel(self, key: RoomKey) -> None:
        """End what has not been posted, and cancel the rest where the engine can (A5)."""
        self._order(lambda: self._cancel(key))

    def forget(self, key: RoomKey) -> None:
        """Have the backend drop what it holds for a lifetime (C1)."""
        self._to_forget += 1
        self._order(lambda: self._forget(key))

    def fence(self, instance: str) -> None:
        """Nothing towards that peer can be read or written any more: drop its tickets."""
        self._order(lambda: self._drop(lambda entry: entry.pair.peer == instance))

    def write_off(self, key: RoomKey, pair: ev.Pair, number: int) -> int:
        """A ticket was released by limit: nobody waits for it any more (R3). Returns its pages."""
        entry = self._entries.get((pair, key, number))
        self._order(lambda: self._drop(lambda other: other is entry))
        return entry.pages if entry is not None else 0

    def stop(self, timeout_s: float) -> bool:
        """End the thread; True if it ended."""
        self._stopping = True
        self._bell.set()
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def tickets(self) -> int:
        """Tickets that are not over."""
        return len(self._entries)

    @property
    def pending_clears(self) -> int:
        """Lifetimes cleared whose backend state has not been dropped yet."""
        return self._to_forget - self._forgotten

    @property
    def quarantined_pages(self) -> int:
        """Pages of tickets that failed without being known to be quiescent."""
        return sum(entry.pages for entry in list(self._entries.values()) if entry.failed)

    def _order(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._bell.set()

    # --- the progress thread

    def _run(self) -> None:
        idle_since = time.monotonic()
        while not self._stopping:
            try:
                busy = self._turn(time.monotonic())
            except Exception:
                log.exception("the progress thread goes on after an error")
                busy = False
            now = time.monotonic()
            if busy:
                idle_since = now
            self._rest(now - idle_since)

    def _rest(self, quiet_s: float) -> None:
        """Spin briefly, then sleep ever longer while tickets run; without any, until something comes."""
        if not self._entries and not self._commands:
            self.backend_rooms = len(self._held_rooms())
            self._bell.wait(LONGEST_WAIT_S if self._must_progress() else None)
        elif quiet_s > SPIN_S:
            self._bell.wait(min(max(quiet_s / 32, SHORTEST_WAIT_S), LONGEST_WAIT_S))
        self._bell.clear()

    def _turn(self, now: float) -> bool:
        """One round; True if anything moved."""
        moved = bool(self._commands)
        for _ in range(len(self._commands)):
            self._commands.popleft()()
        if self._must_progress():
            self._guarded(self._hooks.kvcore_progress)
        for entry in list(self._entries.values()):
            moved |= self._post(entry, now)
        moved |= self._poll(now)
        for entry in list(self._entries.values()):
            self._limit(entry, now)
        return moved

    def _post(self, entry: Entry, now: float) -> bool:
        """Hand the engine what may be read now; True if something was."""
        if entry.cancelled or entry.failed or entry.room.status.terminal:
            return False  # A5: also when the order to cancel has not been taken yet
        if not entry.planned and not self._plan(entry, now):
            return False
        posted = False
        while entry.waiting and entry.waiting[0].not_before <= now and not entry.failed:
            self._submit(entry, entry.waiting.popleft(), now)
            posted = True
        return posted

    def _plan(self, entry: Entry, now: float) -> bool:
        """Turn a chunk into parts, once its pages are filled and its peer was heard of (T4, R7)."""
        peer = self._peer(entry.pair.peer)
        if peer is None or not peer.heard_lately(now):
            return False
        try:
            if entry.chunk.ready is not None and not entry.chunk.ready.query():
                return False
            transfers = list(self._transfers(entry, peer.layout))
        except KVCoreError as error:
            self._fail(entry, FailureCode.BAD_PAGES, str(error))
            return False
        except Exception as error:
            log.exception("room %s: chunk %d cannot be planned", entry.room.id, entry.number)
            self._fail(entry, FailureCode.INTERNAL, f"chunk {entry.number}: {type(error).__name__}: {error}")
            return False
        entry.planned = True
        entry.started = now
        entry.room.meter.began(now)
        entry.waiting.extend(Part(transfer) for transfer in transfers)
        return True

    def _transfers(self, entry: Entry, remote: Layout) -> Iterator[Transfer]:
        life = entry.room.life
        assert isinstance(life, Life)
        dest = next(dest for dest in life.dests if life.pair(dest) == entry.pair)
        listed = {item.pool: np.frombuffer(item.pages, "<i4").astype(np.int64) for item in dest.pages}
        pages = {}
        for pool, mine in entry.chunk.pages.items():
            first = entry.chunk.offset[pool]
            pages[pool] = mine, listed[pool][first : first + mine.size]
        whole = plan(self._local, remote, pages)
        for part in split(whole, self._capabilities.max_descriptors, self._capabilities.max_bytes):
            arrays = (part.local_region, part.remote_region, part.local_offset, part.remote_offset, part.length)
            yield Transfer(entry.room.key, entry.pair.peer, *arrays, self._local.base, remote.base)

    def _submit(self, entry: Entry, part: Part, now: float) -> None:
        try:
            result = self._hooks.kvcore_transfer(transfer=part.transfer)
        except NothingPosted as error:
            result = TicketState(TicketKind.FAILED, str(error) or "nothing posted", quiescent=True)
        except BaseException as error:
            log.exception("room %s: the backend raised in transfer", entry.room.id)
            result = TicketState(TicketKind.FAILED, f"transfer raised {type(error).__name__}: {error}")
        if result is None:
            result = TicketState(TicketKind.FAILED, "transfer returned no ticket")
        if isinstance(result, TicketState):
            self._take(entry, part, result, now)
            return
        part.ticket = result
        entry.running.append(part)

    def _poll(self, now: float) -> bool:
        running = [(entry, part) for entry in self._entries.values() for part in entry.running]
        if not running:
            return False
        moved = False
        for (entry, part), state in zip(running, self._states([part.ticket for _, part in running]), strict=True):
            if state.kind is not TicketKind.PENDING:
                entry.running.remove(part)
                self._take(entry, part, state, now)
                moved = True
        return moved

    def _states(self, tickets: list[Ticket]) -> list[TicketState]:
        """All states at once; if that raises, one by one, so that one peer's error stays there (T7)."""
        try:
            states = self._hooks.kvcore_poll(tickets=tickets)
            if isinstance(states, list) and len(states) == len(tickets) and all(isinstance(state, TicketState) for state in states):
                return states
            error: BaseException = TypeError(f"poll returned {str(states)[:100]} for {len(tickets)} tickets")
        except BaseException as raised:
            error = raised
        if len(tickets) == 1:
            log.error("the backend's poll failed for a ticket", exc_info=error)
            return [TicketState(TicketKind.FAILED, f"poll raised {type(error).__name__}: {error}")]
        return [self._states([ticket])[0] for ticket in tickets]

    def _take(self, entry: Entry, part: Part, state: TicketState, now: float) -> None:
        """What the end of a part means for its ticket."""
        if state.kind is TicketKind.RETRY and not (entry.cancelled or entry.failed):
            part.ticket, part.not_before = None, now + part.retry_s
            part.retry_s = min(2 * part.retry_s, LAST_RETRY_S)
            entry.started = now
            entry.waiting.appendleft(part)
            return
        if state.kind is TicketKind.PENDING:
            state = TicketState(TicketKind.FAILED, "transfer returned PENDING instead of a ticket")
        if state.kind is TicketKind.DONE:
            entry.room.meter.bytes += part.transfer.nbytes
            self._metrics.count("kvcore_bytes_total", part.transfer.nbytes)
        elif state.kind is TicketKind.FAILED:
            entry.unproven |= not state.quiescent
            self._fail(entry, FailureCode.BACKEND, state.reason or "the backend gave no reason")
        self._settle(entry, now)
        if state.peer_broken:
            self._broken(entry.pair.peer, state.reason)

    def _settle(self, entry: Entry, now: float) -> None:
        """Book the end of a ticket of which nothing runs or waits any more."""
        if entry.running or entry.unproven or (entry.waiting and not (entry.failed or entry.cancelled)):
            return
        if self._entries.pop((entry.pair, entry.room.key, entry.number), None) is None:
            return
        if entry.planned:
            entry.room.meter.done(now)
        ok = not (entry.failed or entry.cancelled)
        self._ended(entry.room, ev.Ended(entry.pair, entry.number, ok, True, None if ok else _reason(FailureCode.ABORTED, "cancelled")))

    def _fail(self, entry: Entry, code: FailureCode, text: str) -> None:
        """The ticket has failed; whether it is quiescent shows when the rest of it ended."""
        if entry.failed:
            return
        entry.failed = True
        quiescent = not (entry.running or entry.unproven)
        if quiescent:
            self._entries.pop((entry.pair, entry.room.key, entry.number), None)
            if entry.planned:
                entry.room.meter.done(time.monotonic())
        text = f"room {entry.room.id}, chunk {entry.number} to {entry.pair.peer}: {text}"
        self._ended(entry.room, ev.Ended(entry.pair, entry.number, False, quiescent, _reason(code, text)))

    def _limit(self, entry: Entry, now: float) -> None:
        if entry.planned and not entry.failed and now - entry.started > self._ticket_s:
            self._fail(entry, FailureCode.TIMEOUT, f"ticket_s ({self._ticket_s:g} s) passed before the backend reported an end")
            self._abort(entry.room.key, entry.running)

    def _cancel(self, key: RoomKey) -> None:
        now = time.monotonic()
        running: list[Part] = []
        for entry in [entry for entry in self._entries.values() if entry.room.key == key]:
            entry.cancelled = True
            entry.waiting.clear()
            running += entry.running
            self._settle(entry, now)
        self._abort(key, running)

    def _abort(self, key: RoomKey, parts: list[Part]) -> None:
        tickets = [part.ticket for part in parts]
        if tickets:
            self._guarded(lambda: self._hooks.kvcore_abort(room=key, tickets=tickets))

    def _forget(self, key: RoomKey) -> None:
        self._guarded(lambda: self._hooks.kvcore_clear(room=key))
        self._forgotten += 1

    def _drop(self, chosen: Callable[[Entry], bool]) -> None:
        for name, entry in list(self._entries.items()):
            if chosen(entry):
                del self._entries[name]

    def _must_progress(self) -> bool:
        return self._capabilities.needs_progress and bool(self._entries or self._receiving())

    def _held_rooms(self) -> list[RoomKey]:
        try:
            return list(self._hooks.kvcore_held_rooms())
        except Exception:
            log.exception("the backend's held_rooms failed")
            return []

    def _guarded(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException:
            log.exception("a hook of the backend failed; the core goes on")


def _reason(code: FailureCode, text: str) -> Reason:
    return Reason.of(code, text, "prefill")
