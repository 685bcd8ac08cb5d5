"""Faults put into the table, the ledger and the handles one at a time, each with the script that must show it and the rules that may name it."""

# ruff: noqa: E501 - the texts are the modules' own lines
from __future__ import annotations

from dataclasses import dataclass

from kvcore import alarms, handles, ledger, rooms
from tests.model import scenarios as script, ticket_scenarios as tickets
from tests.model.ghosts import Modules
from tests.model.staging import Scenario
from tests.protocol.mutation import Patch, patched

SHIPPED = {"alarms": alarms, "rooms": rooms, "ledger": ledger, "handles": handles}


@dataclass(frozen=True)
class Mutant:
    """A fault: what it is, how it is made, where it shows, and which rules may name it."""

    name: str
    patches: tuple[Patch, ...]
    script: Scenario
    rules: frozenset[str]

    @property
    def modules(self) -> Modules:
        return Modules(**patched(self.name, self.patches, SHIPPED))


def _mutant(name: str, script: Scenario, rules: str, *patches: tuple[str, str, str]) -> Mutant:
    return Mutant(name, tuple(Patch(*patch) for patch in patches), script, frozenset(rules.split()))


ROOMS = (
    _mutant(
        "a record that does not follow its slot",
        script.aborts,
        "A2 S4",
        ("rooms", "before, record.life = record.life.state, life", "before = record.life.state"),
    ),
    _mutant(
        "an end that removes the record",
        script.aborts,
        "S3 A2",
        ("rooms", "            self._note_change(record, before, entry, now)\n\n", "            self._note_change(record, before, entry, now)\n            slot.room = None if life.state.terminal else record\n\n"),
    ),
    _mutant(
        "a clear that forgets the chunks",
        tickets.clear_with_a_ticket_in_flight,
        "C1",
        ("rooms", "            record.chunks.clear()\n", ""),
    ),
    _mutant(
        "a clear that does not mark the record",
        tickets.clear_with_a_ticket_in_flight,
        "C1",
        ("rooms", "            record.cleared = True\n", ""),
    ),
    _mutant(
        "a clear that keeps the empty slot",
        script.rooms_end_well,
        "C7",
        ("rooms", "            if self._slots.pop((side, slot.id), None) is not None:\n                self.receiving -= side == \"decode\"\n", "            self._slots[side, slot.id] = slot\n"),
    ),
    _mutant(
        "a slot that goes and still counts as receiving",
        script.nobody_is_there,
        "C7",
        ("rooms", '                self.receiving -= side == "decode"\n', "                pass\n"),
    ),
    _mutant(
        "a clear that forgets the timer of its resends",
        script.nobody_is_there,
        "C7",
        ("rooms", "            return self._stop_resends(slot)", "            return"),
    ),
    _mutant(
        "a timer that is not cancelled",
        script.rooms_end_well,
        "C7",
        ("alarms", "                self.timers.cancel(alarm)\n", "                pass\n"),
    ),
    _mutant(
        "the limit of the first state alone",
        script.limits_pass,
        "S8",
        ("alarms", "        for timer in wanted:\n", "        for timer in wanted if not armed else ():\n"),
    ),
    _mutant(
        "a limit that nobody is woken for",
        script.limits_pass,
        "S8",
        ("alarms", "        self._wake_by(now + delay)\n", ""),
    ),
    _mutant(
        "a limit that runs anew with every event",
        script.other_events_restart_no_limit,
        "S8",
        ("alarms", "            if alarm.timer in expected:\n", "            if False:\n"),
    ),
    _mutant(
        "a limit taken from another state",
        script.limits_pass,
        "S8",
        ("alarms", "delay = self._limits[timer.limit]", 'delay = self._limits[timer.limit.replace("input_s", "transfer_s")]'),
    ),
    _mutant(
        "a clear that does not tell the peer",
        script.a_clear_is_told,
        "C3",
        ("rooms", "            if isinstance(effect, ev.Send):\n", "            if isinstance(effect, ev.Send) and slot.room is not None and slot.room.status is KVPoll.FAILED:\n                continue\n            if isinstance(effect, ev.Send):\n"),
        ("rooms", "        for send in sends:\n            self._outside", "        for send in sends if slot.room is not None else ():\n            self._outside"),
    ),
    _mutant(
        "a clear that leaves the handle without an end",
        script.aborts,
        "C3 C5 S7",
        ("rooms", "                self.apply(side, record.id, ev.Fail(generation, ev.cleared(record.id, side, self._rank)))\n", "                pass\n"),
    ),
    _mutant(
        "an old handle that clears the newer lifetime",
        script.old_handles,
        "C2",
        ("rooms", "            if record.cleared:\n                return\n", "            record = self.get(record.key.side, record.id) or record\n"),
    ),
    _mutant(
        "release safety of whichever lifetime is stored",
        script.old_handles,
        "R1 R5",
        ("rooms", "_SAFE[key.side](slot.state, key.generation)", "_SAFE[key.side](slot.state, (slot.state.life or key).generation)"),
    ),
    _mutant(
        "pages of a room that is cleared are safe",
        tickets.clear_with_a_ticket_in_flight,
        "R1 R5",
        ("rooms", "return slot is None or _SAFE", "return slot is None or slot.room is None or _SAFE"),
    ),
    _mutant(
        "an abort that cancels nothing",
        script.aborts,
        "A5",
        ("rooms", "                self._outside.cancel(key)\n", "                pass\n"),
    ),
    _mutant(
        "the backend is cleared when the room fails",
        tickets.clear_with_a_ticket_in_flight,
        "C1",
        ("rooms", "                self._outside.cancel(key)\n", "                self._outside.cancel(key)\n                self._outside.forget(key)\n"),
    ),
    _mutant(
        "the backend is never cleared",
        tickets.clear_with_a_ticket_in_flight,
        "C1 C7",
        ("rooms", "                self._outside.forget(key)\n", "                pass\n"),
    ),
    _mutant(
        "a release by limit that the handle does not tell",
        tickets.no_proof,
        "R3",
        ("rooms", "                    record.unproven = True\n", "                    pass\n"),
    ),
    _mutant(
        "a resend that comes once",
        script.letters_are_lost,
        "P6 S8",
        ("rooms", "        self._alarms.arm(alarm, delay, now + -(now + delay) % TOGETHER_S)\n", ""),
    ),
    _mutant(
        "a resend that says nothing",
        script.letters_are_lost,
        "P6",
        ("rooms", "            self._outside.send(send)\n", "            pass\n"),
    ),
    _mutant(
        "a lost peer that only its newest room hears of",
        tickets.one_peer_of_two_dies,
        "P2",
        ("rooms", "rooms = [key for key in self._slots if", "rooms = [key for key in list(self._slots)[-1:] if"),
    ),
    _mutant(
        "a terminal room that cannot be replaced",
        script.old_handles,
        "C6",
        ("rooms", "is not None and (life := slot.state.life) is not None and not life.state.terminal:", "is not None and slot.state.life is not None:"),
    ),
)  # fmt: skip

LEDGER = (
    _mutant(
        "a retry without back-off",
        tickets.retries,
        "T6",
        ("ledger", "part.ticket, part.not_before = None, now + part.retry_s", "part.ticket, part.not_before = None, now"),
    ),
    _mutant(
        "a retry after a cancel",
        tickets.retries,
        "A5",
        ("ledger", "if state.kind is TicketKind.RETRY and not (entry.cancelled or entry.failed):", "if state.kind is TicketKind.RETRY:"),
        ("ledger", "if entry.cancelled or entry.failed or entry.room.status.terminal:", "if entry.failed:"),
    ),
    _mutant(
        "a retry after a cancel that waits for ever",
        tickets.retries,
        "R1",
        ("ledger", "if state.kind is TicketKind.RETRY and not (entry.cancelled or entry.failed):", "if state.kind is TicketKind.RETRY:"),
    ),
    _mutant(
        "a start after the end, before the cancel is taken",
        tickets.the_cancel_is_late,
        "A5",
        ("ledger", "if entry.cancelled or entry.failed or entry.room.status.terminal:", "if entry.cancelled or entry.failed:"),
    ),
    _mutant(
        "a ticket that ends while a part of it runs",
        tickets.parts_end_one_by_one,
        "T5 R1 R5",
        (
            "ledger",
            "        if entry.running or entry.waiting or entry.coming is not None or entry.unproven:",
            "        if entry.waiting or entry.coming is not None or entry.unproven:",
        ),
    ),
    _mutant(
        "a failed part that ends the others",
        tickets.a_part_fails,
        "A5 R1 R2 R5",
        ("ledger", "quiescent = not (entry.running or entry.unproven)", "quiescent = not entry.unproven"),
    ),
    _mutant(
        "no evidence taken for proof",
        tickets.no_proof,
        "R1 R2 R5",
        ("ledger", "            entry.unproven |= state.quiescent is not True\n", ""),
    ),
    _mutant(
        "a ticket without a limit",
        tickets.a_ticket_takes_too_long,
        "S8",
        ("ledger", "if now - part.since > self._ticket_s]", "if False]"),
    ),
    _mutant(
        "a ticket that has taken too long counts as over",
        tickets.a_ticket_takes_too_long,
        "R1 R2 R5",
        ("ledger", "            self._abort(entry.room.key, entry.running)\n", "            self._abort(entry.room.key, entry.running)\n            entry.running.clear()\n            self._settle(entry)\n"),
    ),
    _mutant(
        "a write-off that counts no pages",
        tickets.no_proof,
        "R3",
        ("ledger", "return entry.pages if entry is not None else 0", "return 0"),
    ),
    _mutant(
        "a write-off that keeps the ticket",
        tickets.no_proof,
        "C7",
        ("ledger", "        self._order(lambda: self._drop(lambda other: other is entry))\n", ""),
    ),
    _mutant(
        "a fence that drops another peer's tickets",
        tickets.one_peer_of_two_dies,
        "P2",
        ("ledger", "self._drop(lambda entry: entry.pair.peer == instance)", "self._drop(lambda entry: True)"),
    ),
    _mutant(
        "a fence that drops nothing",
        tickets.one_peer_of_two_dies,
        "P2",
        ("ledger", "self._drop(lambda entry: entry.pair.peer == instance)", "self._drop(lambda entry: False)"),
    ),
    _mutant(
        "pages read before they are filled",
        script.rooms_end_well,
        "T4 R6",
        ("ledger", "if peer is None or (entry.chunk.ready is not None and not entry.chunk.ready.query()):", "if peer is None or (entry.chunk.ready is not None and entry.chunk.ready.query() is None):"),
    ),
    _mutant(
        "a cancel of every room's tickets",
        tickets.the_cancel_is_late,
        "P2 T7",
        ("ledger", "for entry in [entry for entry in self._entries.values() if entry.room.key == key]:", "for entry in list(self._entries.values()):"),
    ),
    _mutant(
        "a cancel that the engine does not hear of",
        script.aborts,
        "A5",
        ("ledger", "        self._abort(key, running)\n", ""),
    ),
    _mutant(
        "a start towards a silent peer",
        tickets.a_peer_is_silent,
        "R7",
        ("ledger", "return peer is not None and peer.heard_lately(now)", "return peer is not None"),
    ),
)  # fmt: skip

HANDLES = (
    _mutant(
        "an abort that does not reach the store",
        script.aborts,
        "A2 S4",
        ("handles", "self._owner.table.apply(key.side, self._room.id, ev.Fail(key.generation, why))", "self._room.life = type(self._room.life)(key.generation, KVPoll.FAILED, why)"),
    ),
    _mutant(
        "an abort that overwrites the reason",
        script.aborts,
        "S5",
        ("handles", "        self._owner.table.apply(key.side, self._room.id, ev.Fail(key.generation, why))\n", "        self._owner.table.apply(key.side, self._room.id, ev.Fail(key.generation, why))\n        __import__('msgspec').structs.force_setattr(self._room.life, 'reason', why)\n"),
    ),
    _mutant(
        "an abort that fails a room that succeeded",
        script.success_is_final,
        "A3 S4",
        ("handles", "        self._owner.table.apply(key.side, self._room.id, ev.Fail(key.generation, why))\n", "        self._owner.table.apply(key.side, self._room.id, ev.Fail(key.generation, why))\n        __import__('msgspec').structs.force_setattr(self._room.life, 'state', KVPoll.FAILED)\n"),
    ),
    _mutant(
        "a poll with a status of its own",
        script.aborts,
        "A2 S4",
        ("handles", "        return self._room.life.state\n", "        self._seen = max(self._room.life.state, self.__dict__.get('_seen', 0))\n        return self._seen\n"),
    ),
    _mutant(
        "a late success after a failure, computed from tickets",
        script.the_last_ticket_ends_after_an_abort,
        "S1 S4",
        ("handles", "        return self._room.life.state\n", "        done = self._room.pages and self._room.meter.bytes == 8 * sum(map(sum, self._room.pages.values()))\n        return KVPoll.SUCCESS if done else self._room.life.state\n"),
    ),
    _mutant(
        "a poll that asks the store for whichever lifetime is there",
        script.old_handles,
        "S1 S4 C2 C5",
        ("handles", "        return self._room.life.state\n", "        stored = self._owner.table.get(self._room.key.side, self._room.id)\n        return (stored or self._room).life.state\n"),
    ),
    _mutant(
        "a result that goes with clear",
        script.success_is_final,
        "C5 S1",
        ("handles", "        self._owner.table.clear(self._room)\n", "        self._owner.table.clear(self._room)\n        self._room.life = type(self._room.life)(self.generation)\n"),
    ),
    _mutant(
        "indices that are not copied",
        script.rooms_end_well,
        "T1 T2 R6",
        ("handles", "checked = {name: pools[name].indices(pages[name])", "checked = {name: np.asarray(pages[name])"),
    ),
    _mutant(
        "each chunk at the beginning of the destination",
        script.rooms_end_well,
        "T1 R6",
        ("handles", "offset = {name: self._stand(name, layers) for name in chosen}", "offset = {name: 0 for name in chosen}"),
    ),
    _mutant(
        "a chunk after the last",
        script.arguments_are_checked_once,
        "T1",
        ("handles", "            if life.last:\n", "            if life.last and chosen:\n"),
    ),
    _mutant(
        "a second destination",
        script.arguments_are_checked_once,
        "T1",
        ("handles", "            if life.pages is not None:\n", "            if life.pages is None and room.meter.pages:\n"),
    ),
    _mutant(
        "a ready event that is dropped",
        script.rooms_end_well,
        "T4 R6",
        ("handles", "room.chunks.append(Chunk(chosen, offset, ready, layers))", "room.chunks.append(Chunk(chosen, offset, None, layers))"),
    ),
    _mutant(
        "a chunk after the end is kept",
        script.a_chunk_after_the_end,
        "S3 A5",
        ("handles", "            if life.state.terminal:\n                return\n            if life.last:", "            if life.last:"),
    ),
)  # fmt: skip

MUTANTS = ROOMS + LEDGER + HANDLES
