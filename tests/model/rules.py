"""The contract's rules over the whole model: some looked at when something happens, the others after every action.

What breaks inside a callback of the core is noted here and raised after the action, since the core takes whatever its callbacks raise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcore.hookspecs import PENDING, Transfer
from kvcore.protocol import events as ev, receiver_state, sender_state
from kvcore.protocol.messages import Drained
from kvcore.room import Room
from kvcore.states import FailureCode, KVPoll, Reason, RoomKey
from tests.model.engine import Started, Write
from tests.model.ghosts import Lifetime, Violation

if TYPE_CHECKING:
    from tests.model.node import Node
    from tests.model.world import World

Fact = tuple[KVPoll, tuple[Any, ...] | None]
GRID_S = 0.5
"""While tickets run, the ledgers look at least so often: the progress thread never rests for long."""


class Rules:
    """Watches one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.noted: list[Violation] = []
        self._drained: set[tuple[str, ev.Pair]] = set()
        self._landed: dict[tuple[str, int], int] = {}

    def note(self, rule: str, text: str) -> None:
        self.noted.append(Violation(rule, text))

    def raise_noted(self) -> None:
        if self.noted:
            raise self.noted[0]

    # --- after every action

    def check(self, timely: bool = False) -> None:
        """All that must hold at any moment; ``timely``: all that is due has fired."""
        self.raise_noted()
        lives = [life for life in self.world.lives if not life.node.dead]
        for life in lives:
            self._check_life(life)
            if timely and not life.state.terminal and self.world.clock.now - life.limit_from >= life.node.limits.of(life.state):
                raise Violation("S8", f"{life} is still {life.state.name} after its limit")
        for node in self.world.nodes.values():
            self._check_table(node)
            for write in node.engine.writes:
                self._check_write(node, write, timely)
            node.engine.forget_ended()
        for life in lives:
            self._release(life)

    def _check_life(self, life: Lifetime) -> None:
        state, reason = life.handle.poll(), life.room.life.reason
        if life.state.terminal and state is not life.state:
            raise Violation("S1", f"{life} left {life.state.name} for {state.name}")
        if state is not KVPoll.FAILED and state < life.state:
            raise Violation("S1", f"{life} went back from {life.state.name} to {state.name}")
        if reason is not life.reason and (life.reason is not None or fact(life)[1] != fact_of(reason)):
            raise Violation("S5", f"{life} had the reason {life.reason}, now {reason}, and its handle says {fact(life)[1]}")
        if (state is KVPoll.FAILED) != (reason is not None):
            raise Violation("S6", f"{life} is {state.name} with reason {reason}")
        if not life.stored and not state.terminal:
            raise Violation("S7", f"{life} was removed and polls {state.name}")
        if life.stored:
            stored = life.node.table.get(life.key.side, life.use.id)
            if stored is not life.room:
                raise Violation("S3", f"{life} is no longer stored, and nobody cleared it")
            if stored.status is not state:
                raise Violation("S4", f"{life} polls {state.name} and is stored as {stored.status.name}")
        life.state, life.reason = state, reason

    def _check_table(self, node: Node) -> None:
        """S4: a record says what its slot says; S8, C7: the timers are those that the stored states want, and no others."""
        wanted = slots = arriving = 0
        for _, room, state, record in node.table.states():
            slots += 1
            if (record.life if record is not None else None) is not state.life:
                raise Violation("S4", f"room {room} at {node.name}: the record has {record and record.life}, the slot {state.life}")
            if state.empty:
                raise Violation("C7", f"room {room} at {node.name}: an empty slot is kept")
            if isinstance(state, receiver_state.Receiver):
                arriving += bool(state.drains) or (state.life is not None and state.life.state is KVPoll.TRANSFERRING)
            facts = sender_state if isinstance(state, sender_state.Sender) else receiver_state
            wanted += sum(node.limits.table[timer.limit] is not None for timer in facts.timers(state)) + bool(facts.resend(state))  # type: ignore[arg-type]
        timers = node.table.sizes()["timers"]
        if timers != wanted:
            raise Violation("S8" if timers < wanted else "C7", f"{node.name} has {timers} timers where its rooms want {wanted}")
        if node.table.receiving != (slots if node.side == "decode" else 0):
            raise Violation("C7", f"{node.name} counts {node.table.receiving} receiving slots of {slots}")
        if node.table.arriving != arriving:
            raise Violation("C7", f"{node.name} counts {node.table.arriving} slots with data on its way, of {arriving}")

    def _check_write(self, node: Node, write: Write, timely: bool) -> None:
        """R1, R5: while a write may touch pages, nobody calls them safe by evidence; S8: a ticket past its limit fails its room."""
        sender = self.world.life(node.name, write.key.generation)
        receiver = self.world.life(write.pair.peer, write.pair.rg)
        if write.reads and not write.source_given_up and sender is not None and sender.handle.is_release_safe():
            raise Violation("R5", f"{sender}: its pages are called safe while chunk {write.chunk} may still be read")
        watched = receiver is not None and not receiver.node.dead
        if watched and write.writes and not write.target_given_up and receiver.handle.is_release_safe():  # type: ignore[union-attr]
            raise Violation("R1", f"{receiver}: its pages are called safe while chunk {write.chunk} may still be written")
        late = write.state is PENDING and self.world.clock.now - write.began > node.limits.ticket_s + GRID_S
        if timely and late and sender is not None and not sender.state.terminal:
            raise Violation("S8", f"{sender} is {sender.state.name}, and a ticket of it has run for longer than ticket_s")

    def _release(self, life: Lifetime) -> None:
        """Give the pages of a lifetime that are called safe to others, as an engine would."""
        if not life.state.terminal:
            return
        safe = life.handle.is_release_safe()
        if life.released and not safe:
            raise Violation("R1", f"{life}: its pages were safe and are no longer")
        if safe and not life.released:
            life.released = True
            life.node.free += life.pages
            life.pages = []

    # --- when handles are called

    def others(self, life: Lifetime) -> list[tuple[Lifetime, Fact]]:
        return [(other, fact(other)) for other in self.world.lives if other.node is life.node and other is not life]

    def check_untouched(self, life: Lifetime, others: list[tuple[Lifetime, Fact]]) -> None:
        for other, before in others:
            if fact(other) != before or (other.stored and other.node.table.get(other.key.side, other.use.id) is not other.room):
                raise Violation("C2", f"a call on {life} changed {other}")

    def check_aborted(self, life: Lifetime, before: KVPoll) -> None:
        if before.terminal:
            if life.handle.poll() is not before:
                raise Violation("A3", f"an abort of {life}, which was {before.name}, made it {life.handle.poll().name}")
            return
        stored = life.node.table.get(life.key.side, life.use.id)
        if life.handle.poll() is not KVPoll.FAILED or stored is None or stored.life.state is not KVPoll.FAILED:
            raise Violation("A2", f"after abort {life} polls {life.handle.poll().name} and is stored as {stored and stored.status}")
        if any(state.life is not stored.life for _, room, state, _ in life.node.table.states() if room == life.use.id):
            raise Violation("A2", f"after abort {life} has a record that says more than the store")

    def check_cleared(self, life: Lifetime, live: bool) -> None:
        if live and life.handle.poll() is not KVPoll.FAILED:
            raise Violation("C3", f"{life} was cleared while it lived and polls {life.handle.poll().name}")
        if life.node.table.get(life.key.side, life.use.id) is life.room:
            raise Violation("C1", f"{life} was cleared and is still stored")
        if life.room.chunks or not life.room.cleared:
            raise Violation("C1", f"{life} was cleared and keeps {len(life.room.chunks)} chunks (cleared: {life.room.cleared})")

    # --- when the table changes, sends or gives up

    def changed(self, node: Node, room: Room, old: KVPoll | None) -> None:
        life = self.world.life(node.name, room.key.generation)
        if old is None or life is None:
            return
        new = room.status
        if old.terminal or (new is not KVPoll.FAILED and new < old):
            self.note("S1", f"{life} went from {old.name} to {new.name}")
        if new is KVPoll.FAILED:
            self._check_reason(life, old)
        elif new is KVPoll.SUCCESS:
            (self._check_sent if life is life.use.sender else self._check_received)(life)
        if new.terminal:
            life.ended_at = self.world.clock.now
        life.limit_from = self.world.clock.now

    def _check_reason(self, life: Lifetime, old: KVPoll) -> None:
        """C4: an abort or a rejection of another use fails nobody; S8: no limit passes early, or one of another state."""
        reason = life.room.life.reason
        assert reason is not None
        words = reason.text.split()
        if reason.text == "cancelled":
            self.note("T7", f"{life} failed because tickets were cancelled, and nobody ended it before")
        if words[:2] in (["abort", "of"], ["turned", "down:"]) and words[2] != f"{life.use.number}.":
            self.note("C4", f"{life} failed by {reason}")
        if reason.code is not FailureCode.TIMEOUT or reason.side != life.key.side or words[1] != "passed":
            return
        limits, waited = life.node.limits, self.world.clock.now - life.limit_from
        if words[0] != ev.LIMIT_OF[old] or waited < limits.of(old):
            self.note("S8", f"{life}, {old.name} for {waited:g} s, failed by {reason}")

    def _check_sent(self, life: Lifetime) -> None:
        landed = self._landed.get((life.node.name, life.key.generation), 0)
        if landed != life.handed:
            self.note("T5", f"{life} succeeded with {landed} of {life.handed} pages in place")

    def _check_received(self, life: Lifetime) -> None:
        """R6: all bytes are there; P6: with one destination the sender has succeeded as well."""
        sender = life.use.sender
        if sender is None or (not sender.node.dead and sender.room.status is not KVPoll.SUCCESS):
            return self.note("P6", f"{life} succeeded, and its sender is {sender and sender.room.status.name}")
        if len(life.pages) != sender.handed:
            self.note("T3", f"{life} succeeded with {len(life.pages)} pages listed and {sender.handed} handed over")
        found = [int(life.node.memory[page, 0]) for page in life.pages]
        if found != [life.use.stamp(position) for position in range(len(life.pages))]:
            self.note("R6", f"{life} succeeded with {found} in its pages")
        if life.handle.record != b"%d" % life.use.number:  # type: ignore[union-attr]
            self.note("R6", f"{life} succeeded with the record {life.handle.record!r}")  # type: ignore[union-attr]

    def said(self, node: Node, effect: ev.Send) -> None:
        """R2: drained is said of a pair of which nothing is in flight, and nothing starts later.

        Of a ticket that was given up here it may be said when the receiver has stopped waiting as well: a late question of an
        instance that was dropped and came back then finds no "expired" mark, and the answer is of no use to anybody.
        """
        message = effect.message
        if not isinstance(message, Drained) or message.expired:
            return
        pair = ev.Pair(effect.to, message.rg, message.sg)
        self._drained.add((node.name, pair))
        if any(write.pair == pair and write.live and not (write.source_given_up and write.harmless) for write in node.engine.writes):
            self.note("R2", f"{node.name} said drained of {pair} with a ticket in flight")

    def released_by_limit(self, node: Node, key: RoomKey, effect: ev.Unproven, pages: int) -> None:
        """R3: a release without proof is told by the handle, and all pages are counted."""
        life = self.world.life(node.name, key.generation)
        if key.side == "prefill":
            expected = node.started[key, effect.chunk].pages
            for write in node.engine.writes:
                write.source_given_up |= (write.key, write.pair, write.chunk) == (key, effect.pair, effect.chunk)
        else:
            expected = len(life.pages) if life is not None else pages
            for write in self.world.writes_to(node):
                write.target_given_up |= write.pair.rg == key.generation
        if pages != expected:
            self.note("R3", f"{node.name} counts {pages} pages released without proof for {key}, of {expected}")
        if life is not None and not life.handle.release_unproven:
            self.note("R3", f"{life}: pages were released by limit, and its handle does not say so")

    # --- when the ledger calls the engine

    def check_begins(self, node: Node, transfer: Transfer, started: Started, pages: tuple[tuple[int, int], ...]) -> None:
        now, pair = self.world.clock.now, started.pair
        sender, receiver = self.world.life(node.name, transfer.room.generation), self.world.life(pair.peer, pair.rg)
        if sender is None or sender.room.status.terminal:
            return self.note("A5", f"{node.name} started chunk {transfer.chunk} of {transfer.room}, which has ended")
        if (node.name, pair) in self._drained:
            self.note("R2", f"{sender} started chunk {transfer.chunk} after drained was said")
        if any(flag.life is sender and mine in flag.pages for flag in self.world.flags for mine, _ in pages):
            self.note("T4", f"{sender}: chunk {transfer.chunk} is read before its pages are filled")
        if now <= node.engine.retried.get((transfer.room, transfer.chunk, pages), -1.0):
            self.note("T6", f"{sender}: chunk {transfer.chunk} is submitted again without back-off")
        peer = node.peers.get(pair.peer)
        if peer is None or now - peer.heard > node.limits.liveness_s:
            self.note("R7", f"{sender}: chunk {transfer.chunk} starts towards {pair.peer}, silent for liveness_s")
        if receiver is not None and receiver.use is not sender.use:
            self.note("C4", f"{sender} writes to the pages of {receiver}")
        if not set(sender.pages) >= {mine for mine, _ in pages}:
            self.note("T2", f"{sender}: pages {pages} are read, and {sender.pages} were handed over")

    def check_landing(self, node: Node, target: Node, write: Write) -> None:
        """C4: bytes arrive in the pages of their own request's receiver; T1: each in its place."""
        self._landed[node.name, write.key.generation] = self._landed.get((node.name, write.key.generation), 0) + len(write.pages)
        sender, receiver = self.world.life(node.name, write.key.generation), self.world.life(target.name, write.pair.rg)
        if target.dead or write.target_given_up or sender is None or receiver is None:
            return
        for mine, theirs in write.pages:
            if receiver.use is not sender.use or theirs not in receiver.pages:
                return self.note("C4", f"{sender} wrote page {theirs} of {target.name}, which is none of {receiver}")
            if not write.source_given_up and sender.pages.index(mine) != receiver.pages.index(theirs):
                return self.note("T1", f"{sender}: its page {sender.pages.index(mine)} went to page {receiver.pages.index(theirs)}")

    def check_forgotten(self, node: Node, key: RoomKey) -> None:
        """C1: the backend clears a lifetime that was cleared here, after its last ticket."""
        life = self.world.life(node.name, key.generation)
        if life is not None and life.stored and life.node.table.get(key.side, life.use.id) is life.room:
            self.note("C1", f"the backend was told to drop {life}, which is stored")
        if any(write.key == key and write.live and not write.source_given_up for write in node.engine.writes):
            self.note("C1", f"the backend was told to drop {key} with a ticket in flight")

    def check_cancelled(self, node: Node) -> None:
        """A5: the engine was told to cancel the tickets of a room that has failed."""
        for ticket in node.engine.pending:
            life = self.world.life(node.name, node.engine.tickets[ticket].key.generation)
            if life is not None and life.room.status is KVPoll.FAILED and ticket not in node.engine.aborted:
                self.note("A5", f"{life} has failed, and ticket {ticket} of it was not cancelled")

    def check_lost(self, node: Node, instance: str) -> None:
        """P2: all rooms that have met a lost peer fail."""
        for life in self.world.lives:
            if life.node is node and not life.room.status.terminal and instance in met(life):
                self.note("P2", f"{life} lives, and {instance} was lost")

    # --- at the end

    def check_told(self, began: float) -> None:
        """A4, A7: a receiver does not wait for a sender that ended before all could be told."""
        for use in {life.use for life in self.world.lives}:
            sender, receiver = use.sender, use.receiver
            if sender is None or receiver is None or receiver.node.dead or receiver.handle.poll().terminal:
                continue
            if sender.node.dead or (sender.handle.poll().terminal and sender.ended_at <= began):
                raise Violation("A4", f"{receiver} is still {receiver.handle.poll().name}, and {sender} is {sender.handle.poll().name}")

    def check_ended(self) -> None:
        for life in self.world.lives:
            if not life.node.dead and not life.handle.poll().terminal:
                raise Violation("S8", f"{life} is {life.handle.poll().name} after every limit")

    def check_nothing_left(self) -> None:
        """C7: all was cleared and every limit has passed."""
        for node in self.world.nodes.values():
            kept = {name: size for name, size in node.table.sizes().items() if size}
            if kept or node.ledger.tickets or node.ledger.pending_clears or node.engine.held:
                tickets = f"{node.ledger.tickets} tickets, {node.ledger.pending_clears} clears owed"
                raise Violation("C7", f"{node.name} keeps {kept}, {tickets}, at the backend {node.engine.held}")
        for life in self.world.lives:
            if not life.node.dead and not life.handle.is_release_safe():
                raise Violation("R1", f"{life}: its pages are never safe")


def fact(life: Lifetime) -> Fact:
    """What a handle says of its lifetime."""
    failure = life.handle.failure
    return life.handle.poll(), failure and (failure.code, failure.reason, failure.side, failure.rank)


def fact_of(reason: Reason | None) -> tuple[Any, ...] | None:
    return reason and (reason.code, reason.text, reason.side, reason.rank)


def met(life: Lifetime) -> set[str]:
    """The instances of the other side that this lifetime knows the lifetime of."""
    state = life.room.life
    if isinstance(state, sender_state.Life):
        return {dest.party.instance for dest in state.dests}
    return {source.party.instance for source in state.sources if source.sg}
