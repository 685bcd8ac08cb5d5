"""Several instances, the network between them and their engines: what may happen, one action at a time.

Every action ends with the rules of ``rules.Rules``; what breaks one inside a callback is noted and raised there too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcore.errors import PageError
from kvcore.hookspecs import Transfer
from kvcore.protocol import events as ev
from kvcore.states import FailureCode, KVPoll, Reason, RoomId, Side
from tests.model.engine import Started, Write
from tests.model.ghosts import BOTH, Clock, Flag, Lifetime, Limits, Modules, Use, Violation, first_to_open
from tests.model.node import Letter, Node, Stranger
from tests.model.rules import GRID_S, Rules

MAX_LETTERS = 120
SHIPPED = Modules()
PLAIN = Limits()
WATCHED = 16
"""Lifetimes that are looked at after every action; older ones only as long as they are stored or not safe."""


class World:
    """A prefill instance ``P`` and two decode instances, ``A`` and ``B``; each may die and be replaced."""

    def __init__(
        self,
        prefill: Limits = PLAIN,
        decode: Limits = PLAIN,
        modules: Modules = SHIPPED,
        *,
        fences: bool = False,
        split: bool = False,
    ) -> None:
        self.modules, self.fences = modules, fences
        """``fences``: a disconnect proves that nothing of that peer touches memory here any more."""
        self.clock = Clock()
        self.orphan_s = prefill.orphan_s
        self.letters: list[Letter] = []
        self.flags: list[Flag] = []
        self.lives: list[Lifetime] = []
        self.uses: dict[RoomId, list[Use]] = {}
        self.cut: set[str] = set()
        """Decode addresses whose link is cut: nothing passes, pings neither."""
        self.deaf = False
        """No letter arrives, though pings do."""
        self.shut: set[tuple[str, str]] = set()
        """Whose writes to whom are refused since it was fenced."""
        self.rules = Rules(self)
        self.numbers = 0
        self.nodes = {address: Node(self, address, 0, prefill if address == "P" else decode, split) for address in "PAB"}
        self.by_name = {node.name: node for node in self.nodes.values()}

    # --- rooms

    def new_use(self, number: int, place: str, pages: int = 1, next_attempt: bool = False) -> Use:
        """The next request of a room number: under the same name if C4 allows it now, else with the next attempt."""
        attempt = max((room.attempt for room in self.uses if room.number == number), default=0)
        uses = self.uses.get(RoomId(number, attempt), [])
        first = first_to_open(uses, self.clock.now, self.orphan_s)
        if next_attempt or not first or (uses and not uses[-1].lives):
            attempt, first = attempt + bool(uses), BOTH
        elif first != BOTH:  # on the same instance
            place = next((use.place for use in reversed(uses) if use.receiver is not None), place)
        self.numbers += 1
        use = Use(RoomId(number, attempt), self.numbers, pages, place, first)
        self.uses.setdefault(use.id, []).append(use)
        return use

    def open(self, use: Use, side: Side) -> Lifetime:
        """Open a lifetime for a use; a terminal one of the same name is replaced."""
        node = self.nodes["P" if side == "prefill" else use.place]
        room = node.table.open(side, use.id, "" if side == "prefill" else "P")
        if room is None:
            raise Violation("C6", f"{use} cannot be opened at {node.name}, where no lifetime of it lives")
        handle = (self.modules.handles.Sender if side == "prefill" else self.modules.handles.Receiver)(node, room)
        for old in self.lives:
            if old.node is node and old.use.id == use.id:
                old.stored = False
        life = Lifetime(node, use, room, handle, self.clock.now)
        self._forget_old()
        self.lives.append(life)
        if side == "prefill":
            use.sender = life
        else:
            use.receiver = life
        self.rules.check()
        return life

    def _forget_old(self) -> None:
        for life in self.lives[: max(0, len(self.lives) - WATCHED)]:
            if life.node.dead or (life.released and not life.stored):
                life.handle.clear()
                self.lives.remove(life)

    def open_live(self, life: Lifetime) -> None:
        """C6: a room that lives is refused, and goes on undisturbed."""
        if life.state.terminal or life.node.dead or life.node.table.open(life.key.side, life.use.id) is None:
            return self.rules.check()
        raise Violation("C6", f"{life} lives, and was opened again")

    def reject(self, use: Use) -> Lifetime:
        """A8: as ``manager.reject`` does it."""
        life = self.open(use, "decode")
        reason = Reason.of(FailureCode.REJECTED, f"turned down: {use.number}.", "decode")
        life.node.table.apply("decode", use.id, ev.Fail(life.key.generation, reason))
        self.clear(life)
        return life

    def send(self, life: Lifetime, count: int, last: bool, wait: bool = False) -> Flag | None:
        """Hand over the next ``count`` pages; with ``wait`` they are filled, and may be read, only when the flag is fired."""
        count = min(count, len(life.node.free))
        pages = [life.node.free.pop() for _ in range(count)]
        flag = Flag(life, pages, life.handed)
        array = np.array(pages, np.int64)
        terminal = life.handle.poll().terminal
        taken, refused = not (terminal or life.last), life.last and not terminal
        if taken and not wait:
            self.fill(flag)
        try:
            life.handle.send(array, last=last, ready=flag if wait else None, record=b"%d" % life.use.number if last else b"")
        except PageError as error:
            if not refused:
                raise Violation("T1", f"{life} takes no chunk: {error}") from error
        else:
            if refused:
                raise Violation("T1", f"{life} took a chunk after the last one")
        array[:] = 0  # the caller's list is its own again
        if not taken:
            life.node.free += pages
            return self.rules.check()
        life.pages += pages
        life.handed += count
        life.last = last
        self.flags += [flag] if wait else []
        self.rules.check()
        return flag

    def fill(self, flag: Flag) -> None:
        """Write what the pages should hold, and say so."""
        flag.fired = True
        for position, page in enumerate(flag.pages, flag.first):
            if not flag.life.released:
                flag.life.node.memory[page, 0] = flag.life.use.stamp(position)

    def fire(self, flag: Flag) -> None:
        self.flags.remove(flag)
        self.fill(flag)
        self.rules.check()

    def receive(self, life: Lifetime, extra: int = 0) -> None:
        """Publish the destination: as many pages as the request has, and ``extra``."""
        pages = [life.node.free.pop() for _ in range(min(life.use.pages + extra, len(life.node.free)))]
        array = np.array(pages, np.int64)
        state = life.handle.poll()
        try:
            life.handle.receive(array)
        except PageError as error:
            if not life.received or state.terminal:
                raise Violation("T1", f"{life} takes no destination: {error}") from error
        else:
            if life.received and not state.terminal:
                raise Violation("T1", f"{life} took a second destination")
        array[:] = 0
        if state.terminal or life.received:
            life.node.free += pages
            return self.rules.check()
        life.pages, life.received = pages, True
        if state is KVPoll.WAITING_FOR_INPUT:
            life.limit_from = self.clock.now
        self.rules.check()

    def abort(self, life: Lifetime) -> None:
        before, others = life.handle.poll(), self.rules.others(life)
        life.handle.abort(f"abort of {life.use.number}. by {life.key.side}")
        self.rules.check_aborted(life, before)
        self.rules.check_untouched(life, others)
        self.rules.check()

    def clear(self, life: Lifetime) -> None:
        others = self.rules.others(life)
        live = not life.handle.poll().terminal
        life.handle.clear()
        life.stored = False
        self.rules.check_cleared(life, live)
        self.rules.check_untouched(life, others)
        self.rules.check()

    # --- the network

    def post(self, letter: Letter) -> None:
        if len(self.letters) < MAX_LETTERS:
            self.letters.append(letter)

    def deliver(self, index: int) -> None:
        self._arrive(self.letters.pop(index))
        self.rules.check()

    def lose_letter(self, index: int) -> None:
        del self.letters[index]

    def double(self, index: int) -> None:
        self.post(self.letters[index])

    def _arrive(self, letter: Letter) -> None:
        source, to = (self.nodes[name.partition(".")[0]] for name in letter[:2])
        if self.deaf or source.address in self.cut or to.address in self.cut:
            return
        if to.name != letter.to:  # it died; at a prefill address another instance answers
            if to.side == "prefill":
                self.post(Letter(to.name, letter.source, Stranger(letter.to)))
            return
        if isinstance(letter.body, Stranger):
            return to.lose(letter.body.about, "it does not know this instance any more", replaced=True)
        if letter.source not in to.peers:
            return self.post(Letter(to.name, letter.source, Stranger(to.name)))
        to.peers[letter.source].heard = self.clock.now
        to.got(letter.source, letter.body)

    def route(self, node: Node) -> None:
        """The oldest search of a decode instance ends: it is paired with prefill, and the room is told its route."""
        room = node.searches.pop(0)
        if node.address in self.cut or self.deaf:
            return node.searches.append(room)
        if node.table.seeks_route(room):
            prefill = self.nodes["P"]
            if prefill.name not in node.peers:
                prefill.lose(node.name, "it pairs anew")
                prefill.pair(node, node.table.spoken_to().get(prefill.name, 0))
                node.pair(prefill, 0)
                self.shut.discard((prefill.name, node.name))
            node.table.apply("decode", room.id, ev.Route(room.key.generation, (ev.Party(prefill.name),)))
        self.rules.check()

    def unroutable(self, node: Node) -> None:
        """The oldest search fails."""
        room = node.searches.pop(0)
        if node.table.seeks_route(room):
            reason = Reason.of(FailureCode.PEER_LOST, "nobody answers", "decode")
            node.table.apply("decode", room.id, ev.Fail(room.key.generation, reason))
        self.rules.check()

    def settle(self) -> None:
        """Everything on its way arrives, in order, and whatever follows, at once."""
        for _ in range(60):
            for node in self.nodes.values():
                for _ in range(len(node.searches)):
                    self.route(node)
            letters, self.letters = self.letters, []
            for letter in letters:
                self._arrive(letter)
            for node in self.nodes.values():
                self._turn(node)
            if not self.letters:
                break
        self.rules.check()

    # --- peers

    def is_gone(self, instance: str) -> bool:
        return self.by_name[instance].dead

    def give_up(self, node: Node, instance: str) -> None:
        node.lose(instance, "given up")
        self.rules.check()

    def restart(self, address: str) -> None:
        """A process dies, and another instance comes up at its address."""
        old = self.nodes[address]
        old.dead = True
        for write in old.engine.writes:
            write.reads = write.writes = False
        self.flags = [flag for flag in self.flags if flag.life.node is not old]
        node = self.nodes[address] = Node(self, address, old.run + 1, old.limits, old.split)
        self.by_name[node.name] = node
        self.rules.check()

    def fenced(self, node: Node, instance: str) -> None:
        """Nothing of that peer touches this node's memory any more, until they pair again."""
        self.shut.add((instance, node.name))
        for owner in (node, self.by_name[instance]):
            for write in owner.engine.writes:
                if owner is node and write.pair.peer == instance:
                    write.reads = write.writes = False
                elif owner is not node and write.pair.peer == node.name:
                    write.writes = False

    # --- engines and time

    def land(self, node: Node, write: Write) -> None:
        """The bytes of a write arrive in the target's memory."""
        target = self.by_name[write.pair.peer]
        self.rules.check_landing(node, target, write)
        if write.target_given_up or target.dead:
            return
        for here, there in write.pages:
            target.memory[there] = node.memory[here]

    def work(self, node: Node) -> None:
        """The progress thread has its turn."""
        self._turn(node)
        self.rules.check()

    def advance(self, seconds: float) -> None:
        """Time passes, and everything that is due fires when it is."""
        end = self.clock.now + seconds
        while True:
            busy = any(node.ledger.tickets for node in self.nodes.values())
            silent = [peer.heard + peer.liveness_s + GRID_S for node in self.nodes.values() for peer in node.peers.values()]
            due = [node.wake for node in self.nodes.values()] + silent + [self.clock.now + GRID_S] * busy
            self.clock.now = min([end, *(at for at in due if at > self.clock.now)])
            self._catch_up(self.nodes.values())
            if self.clock.now >= end:
                return self.rules.check(timely=True)

    def jump(self, seconds: float, backwards: bool) -> None:
        """Time passes while everybody is stopped; then all that is due fires at once, in either order of instances."""
        self.clock.now += seconds
        self._catch_up(list(self.nodes.values())[:: -1 if backwards else 1])
        self.rules.check(timely=True)

    def _catch_up(self, nodes: Sequence[Node]) -> None:
        self._ping()
        for node in nodes:
            self._turn(node)
            node.tick()
            self._turn(node)

    def _turn(self, node: Node) -> None:
        """The progress thread goes round until nothing moves and no order waits."""
        while node.ledger.turn() or node.ledger.sizes()["orders"]:
            pass
        self.rules.check_cancelled(node)

    def _ping(self) -> None:
        for node in self.nodes.values():
            for peer in node.peers.values():
                if not (self.is_gone(peer.instance) or {node.address, peer.instance.partition(".")[0]} & self.cut):
                    peer.heard = self.clock.now

    # --- the end

    def calm(self) -> None:
        """All links are whole for some time: who has ended is known (A4, A7)."""
        self.cut, began = set(), self.clock.now
        for _ in range(14):
            self.settle()
            self.advance(0.375 * self.orphan_s)
        self.rules.check_told(began)

    def finish(self, *, silent: bool) -> None:
        """No letter arrives any more: every limit passes, all is cleared, and nothing is left (S8, C7). ``silent``: no pings either."""
        self.deaf = True
        if silent:
            self.cut = {"A", "B"}
        total = max(node.limits.total for node in self.nodes.values())
        self.advance(total)
        self.rules.check_ended()
        for life in self.lives:
            life.handle.clear()
            life.stored = False
        if any(node.limits.quarantine_s is None for node in self.nodes.values()):
            self.prove_all()
        self.advance(total)
        self.rules.check_nothing_left()

    def prove_all(self) -> None:
        """Whatever waits for proof gets it."""
        for node in self.nodes.values():
            for instance in {*node.table.spoken_to(), *node.table.tickets_towards()}:
                node.fence(instance)

    # --- what engines ask the world

    def begins(self, node: Node, transfer: Transfer, pages: tuple[tuple[int, int], ...]) -> Started:
        started = node.started[transfer.room, transfer.chunk]
        self.rules.check_begins(node, transfer, started, pages)
        return started

    def life(self, name: str, generation: int) -> Lifetime | None:
        """A lifetime by instance and generation; None if it is too old to be watched."""
        return next((life for life in reversed(self.lives) if life.key.generation == generation and life.node.name == name), None)

    def writes_to(self, node: Node) -> list[Write]:
        return [write for other in self.nodes.values() for write in other.engine.writes if write.pair.peer == node.name]
