"""The ledger: every ticket from its start to its proven end, and the one thread that drives the backend's fast hooks.

A ticket is one chunk towards one destination; the engine may have it as several parts, since the core splits what a backend cannot
take whole. Tickets are kept by pair, apart from the room, so that ``clear`` can be immediate and *drained* still true. What has
failed without being quiescent stays here until it ends after all, the peer is fenced, or the protocol writes it off.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable

from kvcore.bell import Bell
from kvcore.errors import KVCoreError, cause
from kvcore.fast_hooks import FastHooks
from kvcore.hookspecs import RETRY, Capabilities, Hooks, Ticket, TicketKind, TicketState
from kvcore.logs import Failures, about
from kvcore.metrics import Metrics
from kvcore.pace import LONGEST_WAIT_S, over, pause_s
from kvcore.planner import Layout
from kvcore.protocol import events as ev
from kvcore.pulse import Pulse
from kvcore.room import Chunk, Room
from kvcore.states import FailureCode, Reason, RoomKey
from kvcore.tickets import Entry, Incoming, Part, PeerView, transfers
from kvcore.workers import STUCK_PER_WORKER, Job, Workers

LAST_RETRY_S = 0.1
LANE_PARTS, QUICK_PARTS = 2, 8  # of a ticket: in a lane at once, so that it never waits for the next; posted here before others' turn


class Ledger:
    """Owns all tickets of one manager. Commands come from any thread and are taken in order by the progress thread, which calls
    ``after_turn(now)`` at the end of each turn; that says when it is due again at the latest."""

    def __init__(
        self, hooks: Hooks, capabilities: Capabilities, local: Layout, ticket_s: float, metrics: Metrics,
        peer: Callable[[str], PeerView | None], ended: Callable[[Room, ev.Ended], None], broken: Callable[[str, str], None],
        incoming: Incoming, clock: Callable[[], float] = time.monotonic, rank: int = 0,
        after_turn: Callable[[float], float] = lambda _now: math.inf,
    ) -> None:  # fmt: skip
        self._hooks, self._capabilities, self._local = FastHooks(hooks), capabilities, local
        self._ticket_s, self._metrics, self._clock, self._rank = ticket_s, metrics, clock, rank
        self._peer, self._ended, self._broken, self._incoming = peer, ended, broken, incoming
        self._commands: deque[Callable[[], object]] = deque()
        self._after_turn, self._due = after_turn, math.inf
        self._entries: dict[tuple[ev.Pair, RoomKey, int], Entry] = {}
        self._to_forget: set[RoomKey] = set()
        parallel = 1 if capabilities.exclusive else capabilities.parallel
        self.workers = Workers(parallel, 1 if capabilities.exclusive else STUCK_PER_WORKER * parallel)
        self._bell, self._stopping, self._resting = Bell(), False, False
        self._failures = Failures(logging.getLogger("kvcore.ledger"))
        self.backend_rooms = 0
        """Lifetimes that the backend held something for when the ledger last had nothing to do (B4)."""
        self._thread = threading.Thread(target=self._run, name="kvcore-progress", daemon=True)
        self.pulse = Pulse(self._thread)

    # --- from any thread

    def open(self) -> None:
        """Start the progress thread."""
        self._thread.start()

    def start(self, room: Room, effect: ev.Start, chunk: Chunk) -> None:
        """Take a ticket on, unless it was. Never blocks."""
        entry = Entry(room, effect.pair, effect.chunk, chunk)
        self._order(lambda: self._entries.setdefault((effect.pair, room.key, effect.chunk), entry))

    def cancel(self, key: RoomKey) -> None:
        """End what has not been posted, and cancel the rest where the engine can (A5)."""
        self._order(lambda: self._cancel(key))

    def forget(self, key: RoomKey) -> None:
        """Have the backend drop what it holds for a lifetime (C1)."""
        if self._hooks.clears:
            self._to_forget.add(key)
            self._order(lambda: self._forget(key))

    def fence(self, instance: str) -> None:
        """Nothing towards that peer can be read or written any more: drop its tickets."""
        self._order(lambda: self._drop(lambda entry: entry.pair.peer == instance))

    def write_off(self, key: RoomKey, pair: ev.Pair, number: int) -> int:
        """A ticket was released by limit: nobody waits for it any more (R3). Returns its pages."""
        entry = self._entries.get((pair, key, number))
        self._order(lambda: self._drop(lambda other: other is entry))
        return entry.pages if entry is not None else 0

    def turn_soon(self) -> None:
        """Have the progress thread take a turn."""
        self._bell.ring()

    def wake(self) -> None:
        """A room here may be written to from now on: drive an engine whose target must work, and at once where its sender says so."""
        if self._capabilities.needs_progress and (self._resting or self._incoming.arriving):
            self._order(lambda: None)

    def stop(self, timeout_s: float) -> bool:
        """End the thread and begin no more transfers; True if it ended and no transfer is under way in a worker. Idempotent."""
        deadline = time.monotonic() + timeout_s
        self._stopping = True
        self._bell.ring()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return self.workers.stop(max(0.0, deadline - time.monotonic())) and not self._thread.is_alive()

    def running(self) -> list[threading.Thread]:
        """The threads that call the backend and have not ended."""
        return [thread for thread in (self._thread, *self.workers.running()) if thread.is_alive()]

    def sizes(self) -> dict[str, int]:
        """Orders not taken yet; workers, lanes and stuck workers of a ``blocking`` backend."""
        return {"orders": len(self._commands)} | self.workers.sizes()

    @property
    def tickets(self) -> int:
        """Tickets that are not over."""
        return len(self._entries)

    @property
    def pending_clears(self) -> int:
        """Lifetimes cleared whose backend state has not been dropped yet."""
        return 0 if self._stopping else len(self._to_forget) + self._hooks.owed  # a closed engine holds nothing

    @property
    def quarantined_pages(self) -> int:
        """Pages of tickets that failed without being known to be quiescent."""
        return sum(entry.pages for entry in list(self._entries.values()) if entry.failed)

    def _order(self, command: Callable[[], object]) -> None:
        self._commands.append(command)
        self._bell.ring()

    # --- the progress thread

    def _run(self) -> None:
        idle_since = self._clock()
        while not self._stopping:
            self.pulse.began()
            try:
                busy, failed = self.turn(), False
            except BaseException:
                self._failures.note("turn", "the progress thread goes on after an error")
                busy, failed, idle_since, self._due = False, True, -math.inf, math.inf  # what is broken for good must not keep it busy
            now = self._clock()
            idle_since = now if busy and self._flowing else idle_since
            self._rest(now - idle_since, failed)

    def _rest(self, quiet_s: float, failed: bool) -> None:
        """Sleep before the next turn; where nothing changes here by itself, until something comes."""
        if quiet_s <= 0:
            return self.pulse.rests()
        paced = pause_s(quiet_s, self._entries.values(), self._flowing, self._capabilities.needs_progress and self._incoming.arriving > 0)
        pause: float | None = min(max(0.0, self._due - self._clock()), paced)
        self._resting = True  # before the look: whoever makes it untrue rings
        if self._at_rest():
            held = self._hooks.held_rooms()
            self.backend_rooms = self.backend_rooms if held is None else held
            pause = LONGEST_WAIT_S if held is None else None
        else:
            self._resting = False
        if not failed:
            self.pulse.rests()
        self._bell.sleep(pause)
        self._resting = False

    def _at_rest(self) -> bool:
        busy = self._commands or self._due < math.inf or self._hooks.owed or self._must_progress()
        return not busy and over(self._entries.values())

    @property
    def _flowing(self) -> bool:
        return bool(self._entries or self._incoming.arriving)

    def _must_progress(self) -> bool:
        return self._capabilities.needs_progress and bool(self._entries or self._incoming.receiving)

    def turn(self) -> bool:
        """One round, on the progress thread; True if anything moved."""
        now, moved = self._clock(), bool(self._commands)
        self._hooks.catch_up()
        for _ in range(len(self._commands)):
            self._guarded(self._commands.popleft())
        for entry in list(self._entries.values()):
            if entry.waiting or entry.coming is not None:
                moved |= self._post(entry, now)
        if self._must_progress():
            moved |= self._hooks.progress() and self._flowing
        moved |= self._poll()
        for entry in list(self._entries.values()):
            if entry.running:
                self._limit(entry, now)
        self._due = self._after_turn(self._clock())
        return moved

    def _post(self, entry: Entry, now: float) -> bool:
        """Hand the engine what may be read now, of one that blocks a little at a time; True if something was."""
        posted, most = 0, QUICK_PARTS if self._capabilities.blocking else math.inf
        while posted < most and (part := self._next_part(entry, now)) is not None:
            self._submit(entry, part)
            posted += 1
        return posted > 0

    def _next_part(self, entry: Entry, now: float) -> Part | None:
        """What can be posted next, of a chunk whose pages are filled (T4). In a lane one part waits while one runs."""
        if (self._capabilities.blocking and len(entry.running) >= LANE_PARTS) or not self._may_start(entry, now):
            return None
        if entry.waiting:
            return entry.waiting.popleft() if entry.waiting[0].not_before <= now else None
        if entry.coming is None:
            return None
        try:
            if not entry.planned:
                peer = self._peer(entry.pair.peer)
                if peer is None or (entry.chunk.ready is not None and not entry.chunk.ready.query()):
                    return None
                entry.coming, entry.planned = transfers(entry, self._local, peer, self._capabilities), True
            transfer = next(entry.coming, None)
        except KVCoreError as error:
            self._fail(entry, FailureCode.BAD_PAGES, str(error))
            return None
        except BaseException as error:
            self._failures.note("plan", f"room {entry.room.id}: chunk {entry.number} cannot be planned", about(entry.room.key))
            self._fail(entry, FailureCode.INTERNAL, f"chunk {entry.number}: {cause(error)}")
            return None
        if transfer is not None:
            return Part(transfer, transfer.nbytes)
        entry.coming = None
        self._settle(entry)
        return None

    def _may_start(self, entry: Entry, now: float) -> bool:
        """A5, also when the order to cancel has not been taken yet, and R7. From any thread."""
        if entry.cancelled or entry.failed or entry.room.status.terminal:
            return False
        peer = self._peer(entry.pair.peer)
        return peer is not None and peer.heard_lately(now)

    def _submit(self, entry: Entry, part: Part) -> None:
        entry.running.append(part)
        if self._capabilities.blocking and not (part.quick(self._capabilities.quick_bytes) and self.workers.idle):
            part.job = Job(entry.pair.peer, lambda: self._work(entry, part))
            return self.workers.put(part.job)
        self._begin(entry, part, self._clock())
        self._returned(entry, part, self._call(entry, part, may_wait=False))

    def _work(self, entry: Entry, part: Part) -> None:
        """On a worker: make the call, unless the room has failed or the peer fallen silent while the part waited."""
        now = self._clock()
        result: Ticket | TicketState = RETRY
        if self._may_start(entry, now):
            self._order(lambda: self._begin(entry, part, now))
            result = self._call(entry, part, may_wait=True)
        self._order(lambda: self._returned(entry, part, result))

    def _call(self, entry: Entry, part: Part, may_wait: bool) -> Ticket | TicketState:
        part.peer = self._peer(entry.pair.peer)
        return self._hooks.transfer(part.transfer, may_wait)

    def _begin(self, entry: Entry, part: Part, now: float) -> None:
        if part in entry.running:
            part.since = now
            entry.room.meter.began(now)

    def _returned(self, entry: Entry, part: Part, result: Ticket | TicketState) -> None:
        """A call of ``kvcore_transfer`` has returned."""
        part.job = None
        if part not in entry.running:
            return self._come_too_late(entry.room, result)
        if isinstance(result, TicketState):
            return self._take(entry, part, result)
        part.ticket = result
        if entry.cancelled or entry.failed:
            self._abort(entry.room.key, [part])

    def _come_too_late(self, room: Room, result: Ticket | TicketState) -> None:
        """A worker came back after its ticket was written off or fenced; nobody will ask for the engine's ticket."""
        if isinstance(result, TicketState):
            return
        self._hooks.abort(room.key, [result])
        if room.cleared and not any(entry.room.key == room.key for entry in self._entries.values()):
            self._hooks.clear(room.key)

    def _poll(self) -> bool:
        running = [(entry, part) for entry in self._entries.values() for part in entry.running if part.job is None]
        if not running:
            return False
        told = zip(running, self._hooks.poll([part.ticket for _, part in running]), strict=True)
        ended = [(entry, part, state) for (entry, part), state in told if state.kind is not TicketKind.PENDING]
        for entry, part, state in ended:
            self._take(entry, part, state)
        return bool(ended)

    def _take(self, entry: Entry, part: Part, state: TicketState) -> None:
        """A part of a ticket has ended."""
        now = self._clock()
        broken = state.peer_broken and part.peer is self._peer(entry.pair.peer)  # a new pairing is not to blame
        if broken and part.peer is not None:
            part.peer.poisoned = True  # before anybody can see the failure, and open a room that would fail with it
        entry.running.remove(part)
        self._stop_clock(entry, part, now)
        if state.kind is TicketKind.RETRY and not (entry.cancelled or entry.failed):
            part.ticket, part.not_before = None, now + part.retry_s
            part.retry_s = min(2 * part.retry_s, LAST_RETRY_S)
            entry.waiting.appendleft(part)
        elif state.kind is TicketKind.DONE:
            entry.room.meter.bytes += part.nbytes
            self._metrics.count("kvcore_bytes_total", part.nbytes)
        elif state.kind is TicketKind.FAILED:
            entry.unproven |= state.quiescent is not True
            code = FailureCode.PEER_LOST if state.peer_broken else FailureCode.BACKEND
            self._fail(entry, code, state.reason or "the backend gave no reason")
        self._settle(entry)
        if broken:
            self._broken(entry.pair.peer, state.reason)

    def _stop_clock(self, entry: Entry, part: Part, now: float) -> None:
        if part.since < math.inf:
            part.since = math.inf
            entry.room.meter.done(now)

    def _settle(self, entry: Entry) -> None:
        """Book the end of a ticket of which nothing runs or waits any more."""
        if entry.running or entry.waiting or entry.coming is not None or entry.unproven:
            return
        if self._entries.pop((entry.pair, entry.room.key, entry.number), None) is not None:
            self._tell(entry, not (entry.failed or entry.cancelled), True, FailureCode.ABORTED, "cancelled")

    def _fail(self, entry: Entry, code: FailureCode, text: str) -> None:
        """The ticket has failed; whether it is quiescent shows when the rest of it ended."""
        if entry.failed:
            return
        entry.failed = True
        self._withdraw(entry)
        quiescent = not (entry.running or entry.unproven)
        if quiescent:
            self._entries.pop((entry.pair, entry.room.key, entry.number), None)
        self._tell(entry, False, quiescent, code, f"room {entry.room.id}, chunk {entry.number} to {entry.pair.peer}: {text}")

    def _tell(self, entry: Entry, ok: bool, quiescent: bool, code: FailureCode, text: str) -> None:
        reason = None if ok else Reason.of(code, text, "prefill", self._rank)
        self._guarded(lambda: self._ended(entry.room, ev.Ended(entry.pair, entry.number, ok, quiescent, reason)))

    def _withdraw(self, entry: Entry) -> None:
        """Post no more of a ticket: what waits, in a lane too, is taken out."""
        entry.waiting.clear()
        entry.coming = None
        entry.running = [part for part in entry.running if part.job is None or not self.workers.take_out(part.job)]

    def _limit(self, entry: Entry, now: float) -> None:
        late = [part for part in entry.running if now - part.since > self._ticket_s]
        if late and not entry.failed:
            self._fail(entry, FailureCode.TIMEOUT, f"ticket_s ({self._ticket_s:g} s) passed before the backend reported an end")
            self._abort(entry.room.key, entry.running)
        self._write_off(late)

    def _write_off(self, parts: list[Part]) -> None:
        """Replace the workers that these parts block; only after what must not start any more was withdrawn."""
        for part in parts:
            if part.job is not None:
                self.workers.write_off(part.job)

    def _cancel(self, key: RoomKey) -> None:
        running: list[Part] = []
        for entry in [entry for entry in self._entries.values() if entry.room.key == key]:
            entry.cancelled = True
            self._withdraw(entry)
            running += entry.running
            self._settle(entry)
        self._abort(key, running)

    def _abort(self, key: RoomKey, parts: list[Part]) -> None:
        """Cancel parts; those still in ``kvcore_transfer`` have no ticket yet, and are meant by the room alone."""
        if parts:
            self._hooks.abort(key, [part.ticket for part in parts if part.job is None])

    def _forget(self, key: RoomKey) -> None:
        self._hooks.clear(key)
        self._to_forget.discard(key)

    def _drop(self, chosen: Callable[[Entry], bool]) -> None:
        running: list[Part] = []
        for name, entry in [item for item in self._entries.items() if chosen(item[1])]:
            del self._entries[name]
            self._withdraw(entry)
            for part in entry.running:
                self._stop_clock(entry, part, self._clock())
            running += entry.running
            entry.running = []
        self._write_off(running)

    def _guarded(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException:
            self._failures.note("order", "an order or the news of a ticket's end failed; the core goes on")
