"""THE store: one slot per room and side, one lock, one place where a status changes.

``RoomTable.apply`` takes an event, steps the protocol and carries out what follows: the state is replaced, timers that the new state
wants are armed and others cancelled, effects are handed to the control plane and the ledger, watchers are woken. A slot goes when
its protocol state is empty. A ``Room`` is what a handle keeps of its own lifetime, also after ``clear`` (C5).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakValueDictionary

from kvcore.alarms import Alarm, Alarms, Armed
from kvcore.aloud import Aloud
from kvcore.errors import RoomError
from kvcore.flight import Entry, FlightRecord, kept, news
from kvcore.logs import SparingLog
from kvcore.metrics import Meter
from kvcore.protocol import events as ev, receiver, receiver_state, sender, sender_state
from kvcore.protocol.messages import Join
from kvcore.room import NOWHERE, Outside, PrefillGroup, Room
from kvcore.states import FailureCode, KVPoll, Reason, RoomId, RoomKey, Side

log = logging.getLogger("kvcore.rooms")

MAX_ORPHANS = 65_536
"""Rooms nobody here has opened that are remembered for their joins; further ones are dropped and join again (P5)."""
FIRST_RESEND_S, SPREAD = 0.25, 16
"""Rooms repeat themselves at last every ``orphan_s`` or up to half as long, by their number: thousands opened at once drift apart."""
TOGETHER_S = 0.05
"""Repeats due within so long go out in one turn of the control thread, and cost the other side one; not one each."""
AT_ONCE, OTHERS_S, HISTORY = 64, 50e-6, 32
"""So many rooms are told something before others have the table, which without such a pause would be taken again before they wake up."""

State = sender_state.Sender | receiver_state.Receiver


@dataclass(eq=False, slots=True)
class _Slot:
    side: Side
    id: RoomId
    state: State
    room: Room | None = None
    limits: Armed[_Slot] = ()
    resend: Alarm[_Slot] | None = None
    watchers: list[Callable[[], None]] = field(default_factory=list)


_STEP: dict[Side, Callable[..., tuple[State, tuple[ev.Effect, ...]]]] = {"prefill": sender.step, "decode": receiver.step}
_FRESH: dict[Side, Callable[..., State]] = {"prefill": sender_state.Sender, "decode": receiver_state.Receiver}
_SAFE: dict[Side, Callable[..., bool]] = {"prefill": sender_state.release_safe, "decode": receiver_state.release_safe}
_TIMERS: dict[Side, Callable[..., tuple[ev.Timer, ...]]] = {"prefill": sender_state.timers, "decode": receiver_state.timers}
_RESEND: dict[Side, Callable[..., tuple[ev.Send, ...]]] = {"prefill": sender_state.resend, "decode": receiver_state.resend}
_RESENDS: dict[Side, Callable[..., bool]] = {"prefill": sender_state.resends, "decode": receiver_state.resends}


class RoomTable:
    """All rooms of one manager, on both sides. ``clock`` is monotonic seconds, the same that ``tick`` is given."""

    def __init__(
        self, limits: Mapping[str, float | None], rank: int, outside: Outside, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.lock = threading.RLock()
        self.aloud = Aloud(self.lock, outside.settle)
        self._clock = clock
        self._outside = outside
        self._rank = rank
        self._slots: dict[tuple[Side, RoomId], _Slot] = {}
        self._alarms: Alarms[_Slot] = Alarms(limits, outside.wake_by)
        self._records: WeakValueDictionary[RoomKey, Room] = WeakValueDictionary()
        self._orphans, self._stepping = 0, False
        self._effects: tuple[ev.Effect, ...] = ()  # of the latest step
        self._torn: list[tuple[Side, RoomId, tuple[ev.Effect, ...]]] = []  # steps that did not come to their end; see ``_mend``
        self._events: deque[tuple[Side, RoomId, ev.Event, PrefillGroup]] = deque()
        self.flight = FlightRecord(clock)
        self._dropped = SparingLog(log, 1)
        self.receiving = self.arriving = 0
        """Decode-side slots, and those of them to which data may be on its way: an engine whose target must work is driven."""
        self.generation = 0
        """The highest generation given out."""
        self._last_resend_s = limits["orphan_s"] or 0.0
        self._first_resend_s = min(FIRST_RESEND_S, self._last_resend_s / 8)

    # --- rooms

    def open(self, side: Side, room: RoomId, group: PrefillGroup = NOWHERE) -> Room | None:
        """A new lifetime; None if a live one is stored (C6). A terminal one is replaced, as by ``clear``. ``RoomError`` within a step."""
        with self.aloud, self.lock:
            if (slot := self._slots.get((side, room))) is not None and (life := slot.state.life) is not None and not life.state.terminal:
                return None
            if self._stepping:
                raise RoomError(f"room {room} is opened by a finalizer or signal handler in the middle of another call; open it elsewhere")
            self.generation += 1
            self.apply(side, room, ev.Open(self.generation), group)
            opened = self._slots[side, room].room
            assert opened is not None and opened.key.generation == self.generation
            return opened

    def apply(self, side: Side, room: RoomId, event: ev.Event, group: PrefillGroup = NOWHERE) -> None:
        """Step a room's protocol with an event, and carry out what follows. The only place where states change (S2).

        Called in the middle of a step, as a finalizer or a signal handler may, it leaves the event to be taken right after that step.
        """
        with self.aloud, self.lock:
            self._events.append((side, room, event, group))
            if self._stepping:
                return
            self._stepping = True
            watchers: list[Callable[[], None]] = []
            try:
                while self._events:
                    (side, room, event, group), self._effects = self._events.popleft(), ()
                    watchers += self._step(side, room, event, group)
            except BaseException:
                self._torn.append((side, room, self._effects))
                raise
            finally:
                self._stepping, self._effects = False, ()
        for watcher in watchers:
            watcher()

    def _step(self, side: Side, room: RoomId, event: ev.Event, group: PrefillGroup) -> list[Callable[[], None]]:
        """Returns who watches a room that has changed."""
        slot = self._slots.get((side, room)) or _Slot(side, room, _FRESH[side](room, rank=self._rank))
        if self._orphans >= MAX_ORPHANS and isinstance(event, ev.Got) and isinstance(event.message, Join) and slot.state.empty:
            self._dropped.say(logging.WARNING, f"join of room {room} dropped: {MAX_ORPHANS} unknown rooms wait already; it joins again")
            return []
        before = slot.state
        after, self._effects = _STEP[side](before, event)
        effects = self._effects
        if after is before and not effects:
            return []
        entry = None
        if not (before.empty and after.empty):  # what strangers send of rooms that are none is not worth remembering
            entry = self.flight.note(side, room, event, effects, news(before.life, after.life))
        slot.state, now = after, self._clock()
        if after.life is not before.life:
            self._bring_up_to_date(slot, entry, group, now)
        self._store(slot, before, now)
        for effect in effects:
            if isinstance(effect, ev.Send):
                self._outside.send(effect)
                self.aloud.said = True
            else:
                self._carry_out(slot, effect)
        return slot.watchers if after is not before else []

    def _mend(self, side: Side, room: RoomId, effects: tuple[ev.Effect, ...]) -> None:
        """End a room in which a step stopped at an unknown place, as where a signal handler raises, and count anew what is counted."""
        slot, now = self._slots.get((side, room)) or _Slot(side, room, _FRESH[side](room, rank=self._rank)), self._clock()
        known = slot.room is not None
        self._bring_up_to_date(slot, None, NOWHERE, now)
        self._store(slot, slot.state, now)
        if (life := slot.state.life) is not None:
            text = f"room {room}: a step was cut short, by a signal handler that raised or a fault that the log has; open another attempt"
            self.apply(side, room, ev.Fail(life.generation, Reason.of(FailureCode.INTERNAL, text, side, self._rank)))
        for effect in effects:  # once more; tickets that start now are only ended
            if isinstance(effect, ev.Cancel | ev.Forget) or (isinstance(effect, ev.Start) and slot.room is not None):
                self._carry_out(slot, effect)
        if slot.room is not None:
            self._outside.cancel(slot.room.key)
        if life is not None and not known:  # it was being opened, and nobody has it
            self.apply(side, room, ev.Clear(life.generation))
        for watcher in slot.watchers:
            watcher()
        states = [slot.state for slot in self._slots.values()]
        self._orphans, self.arriving = sum(state.orphan for state in states), sum(state.arriving for state in states)
        self.receiving = sum(this == "decode" for this, _ in self._slots)

    def clear(self, record: Room) -> None:
        """Drop one lifetime; a live one is aborted first (C3), so that its record shows how it ended."""
        with self.aloud, self.lock:
            if record.cleared:
                return
            side, generation = record.key.side, record.key.generation
            if not record.status.terminal:
                self.apply(side, record.id, ev.Fail(generation, ev.cleared(record.id, side, self._rank)))
            self.apply(side, record.id, ev.Clear(generation))

    def apply_all(self, event: ev.Lost | ev.Fenced, side: Side | None = None) -> None:
        """Tell every room (of one side) of something that happened to a peer, which no later one can have to do with."""
        with self.lock:
            rooms = [key for key in self._slots if side in (None, key[0])]
        for first in range(0, len(rooms), AT_ONCE):
            if first > 0:
                time.sleep(OTHERS_S)
            with self.aloud, self.lock:
                for this_side, room in rooms[first : first + AT_ONCE]:
                    try:
                        self.apply(this_side, room, event)
                    except Exception:  # the next tick ends that room; the others, and who asked, go on
                        log.exception("room %s: a step was cut short by a fault of kvcore's own", room)

    def _bring_up_to_date(self, slot: _Slot, entry: Entry | None, group: PrefillGroup, now: float) -> None:
        """Make the room record show the new state of its lifetime, or the last one of a lifetime that is gone."""
        life, record = slot.state.life, slot.room
        if record is not None and (life is None or life.generation != record.key.generation):
            record.cleared = True
            record.chunks.clear()
            slot.room = record = None
        if life is None:
            return
        if record is None:
            key = RoomKey(slot.side, slot.id.number, slot.id.attempt, life.generation)
            record = slot.room = self._records[key] = Room(slot.id, key, life, Meter(now), group)
            self._note_change(record, None, entry, now)
            return
        before, record.life = record.life.state, life
        if before is not life.state:
            self._note_change(record, before, entry, now)

    def _note_change(self, record: Room, old: KVPoll | None, entry: Entry | None, now: float) -> None:
        if entry is not None and len(record.history) < HISTORY:
            record.history.append(entry)
        record.meter.state(record.key.side, record.life.state, now)
        self._outside.changed(record, old)

    def _store(self, slot: _Slot, before: State, now: float) -> None:
        """Keep or drop the slot, and run exactly the timers that its state wants."""
        side, state = slot.side, slot.state
        wanted = _TIMERS[side](state)
        if wanted or slot.limits:
            slot.limits = self._alarms.run(slot, slot.limits, wanted, now)
        self._orphans += state.orphan - before.orphan
        self.arriving += state.arriving - before.arriving
        if state.empty:
            if self._slots.pop((side, slot.id), None) is not None:
                self.receiving -= side == "decode"
            return self._stop_resends(slot)
        if before.empty:
            self._slots[side, slot.id] = slot
            self.receiving += side == "decode"
        if side == "decode" and (before.empty or state.arriving > before.arriving):
            self._outside.listen()
        if _RESENDS[side](state):
            slot.resend = slot.resend or Alarm(slot, None)
            self._alarms.arm(slot.resend, self._first_resend_s, now)
        else:
            self._stop_resends(slot)

    def _stop_resends(self, slot: _Slot) -> None:
        if slot.resend is not None:
            self._alarms.timers.cancel(slot.resend)
            slot.resend = None

    def _carry_out(self, slot: _Slot, effect: ev.Start | ev.Seek | ev.Cancel | ev.Forget | ev.Unproven) -> None:
        if isinstance(effect, ev.Start):
            assert slot.room is not None
            self._outside.start(slot.room, effect)
        elif isinstance(effect, ev.Seek):
            assert slot.room is not None
            self._outside.seek(slot.room)
        else:
            key = RoomKey(slot.side, slot.id.number, slot.id.attempt, effect.generation)
            if isinstance(effect, ev.Cancel):
                self._outside.cancel(key)
            elif isinstance(effect, ev.Forget):
                self._outside.forget(key)
            else:
                if (record := self._records.get(key)) is not None:
                    record.unproven = True
                self._outside.unproven(key, effect)

    # --- time

    def tick(self, now: float) -> float | None:
        """Fire what is due, but no more than others can wait for; returns when the next timer is. Called by the control thread."""
        with self.aloud, self.lock:
            turns: list[Callable[[], None]] = [partial(self._mend, *torn) for torn in self._torn]
            turns.append(self._torn.clear)  # what cannot be mended is not tried for ever
            turns += [partial(self._go_off, alarm, now) for alarm in self._alarms.timers.take_due(now, AT_ONCE)]
            failed: Exception | None = None
            for turn in turns:
                try:
                    turn()
                except Exception as error:
                    failed = error  # the others have their turn before
            if failed is not None:
                raise failed
            return self._alarms.timers.next_due()

    def _go_off(self, alarm: Alarm[_Slot], now: float) -> None:
        slot = alarm.owner
        if alarm.timer is None:
            self._resend(slot, alarm, now)
        elif alarm in slot.limits:  # which what was due before it may have changed
            slot.limits = tuple(other for other in slot.limits if other is not alarm)
            why = self._outside.why_not_reached(slot.room) if slot.room is not None else ""
            self.apply(slot.side, slot.id, ev.Timeout(alarm.timer, why))

    def _resend(self, slot: _Slot, alarm: Alarm[_Slot], now: float) -> None:
        sends = _RESEND[slot.side](slot.state)
        if not sends or slot.resend is not alarm:
            return
        self.flight.note(slot.side, slot.id, "said again", sends)
        for send in sends:
            self._outside.send(send)
        self.aloud.said = True
        delay = min(2 * alarm.delay_s, self._last_resend_s * (1 - slot.id.number % SPREAD / (2 * SPREAD)))
        self._alarms.arm(alarm, delay, now + -(now + delay) % TOGETHER_S)

    # --- questions

    def get(self, side: Side, room: RoomId) -> Room | None:
        """The stored lifetime's record."""
        with self.lock:
            return slot.room if (slot := self._slots.get((side, room))) is not None else None

    def release_safe(self, key: RoomKey) -> bool:
        """R1 for one lifetime, stored or not."""
        with self.lock:
            slot = self._slots.get((key.side, RoomId(key.number, key.attempt)))
            return slot is None or _SAFE[key.side](slot.state, key.generation)

    def seeks_route(self, record: Room) -> bool:
        """Whether a receiver's lifetime still needs to know its sender ranks: to join them, or to tell them that it failed."""
        with self.lock:
            slot = self._slots.get((record.key.side, record.id))
            if slot is None or not isinstance(state := slot.state, receiver_state.Receiver):
                return False
            generation, life = record.key.generation, state.life
            joining = life is not None and life.generation == generation and not life.state.terminal and not life.sources
            return joining or any(item.rg == generation for item in state.unrouted)

    def explain(self, side: Side, room: RoomId) -> str:
        """What the flight record has of a room, and what is kept for it, a fact a line."""
        with self.lock:
            slot = self._slots.get((side, room))
            history = slot.room.history if slot is not None and slot.room is not None else []
            entries = {id(entry): entry for entry in (*history, *self.flight.of(side, room))}
        left = [f"  kept: {text}" for text in kept(slot.state)] if slot is not None else ["  nothing is stored"]
        return "\n".join([f"room {room} ({side})", *self.flight.lines(entries.values()), *left]) + "\n"

    def met(self, room: RoomId) -> set[str]:
        """The other instances that took part in a room, as far as is known."""
        with self.lock:
            return {peer for side in _STEP for entry in self.flight.of(side, room) for peer in entry.peers}

    def watch(self, record: Room, watcher: Callable[[], None]) -> Callable[[], None]:
        """Have ``watcher`` called after every change of a lifetime's room; returns how to stop."""
        with self.lock:
            watchers = slot.watchers if (slot := self._slots.get((record.key.side, record.id))) is not None else []
            watchers.append(watcher)  # on a room that is gone nothing changes any more
        return lambda: watchers.remove(watcher)

    def states(self) -> Iterator[tuple[Side, RoomId, State, Room | None]]:
        """A snapshot of all slots."""
        with self.lock:
            return iter([(side, room, slot.state, slot.room) for (side, room), slot in self._slots.items()])

    def waiting(self) -> list[RoomId]:
        """Senders here that no destination has met yet."""
        return [room for side, room, _, record in self.states() if side == "prefill" and record and record.status is KVPoll.BOOTSTRAPPING]

    def tickets_towards(self) -> set[str]:
        """The instances that tickets here are, or may still be, in flight to."""
        return {flight.pair.peer for _, _, state, _ in self.states() if isinstance(state, sender_state.Sender) for flight in state.flights}

    def draining_pages(self) -> int:
        """Pages here that a failed room's senders may still write."""
        return sum(drain.pages for _, _, state, _ in self.states() if isinstance(state, receiver_state.Receiver) for drain in state.drains)

    def spoken_to(self) -> dict[str, int]:
        """Per prefill instance the highest generation here that still waits for its Drained (R2)."""
        highest: dict[str, int] = {}
        for _, _, state, _ in self.states():
            if isinstance(state, receiver_state.Receiver):
                for drain in state.drains:
                    if drain.published:
                        highest[drain.party.instance] = max(drain.rg, highest.get(drain.party.instance, 0))
        return highest

    @property
    def records(self) -> int:
        """Lifetimes that anything still holds, such as a handle kept after ``clear``."""
        return len(self._records)

    def sizes(self) -> dict[str, int]:
        """Entries of every per-room store (C7)."""
        counts = dict.fromkeys(("rooms", "tickets", "last_words", "marks", "waiting_joins", "drain_records", "unrouted_aborts"), 0)
        with self.lock:
            counts["slots"], counts["timers"] = len(self._slots), len(self._alarms.timers)
            counts["watchers"] = sum(len(slot.watchers) for slot in self._slots.values())
        for _, _, state, _ in self.states():
            counts["rooms"] += state.life is not None
            if isinstance(state, sender_state.Sender):
                counts["tickets"] += sum(len(flight.running) + len(flight.stuck) for flight in state.flights)
                counts["last_words"] += len(state.words)
                counts["marks"] += len(state.marks)
                counts["waiting_joins"] += len(state.waiting)
            else:
                counts["drain_records"] += len(state.drains)
                counts["unrouted_aborts"] += len(state.unrouted)
        return counts
