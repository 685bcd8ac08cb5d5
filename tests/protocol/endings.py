"""How a world ends in peace: all traffic is dropped, then everything asked is answered, all is cleared, and every limit passes."""

from __future__ import annotations

from kvcore.protocol import events as ev
from kvcore.states import FailureCode, Reason, Side
from tests.protocol import rules
from tests.protocol.network import Procs
from tests.protocol.steps import Interner, Move, Steps
from tests.protocol.world import Action, Engine, Proc, Violation, Write

Node = tuple[Procs, int]


class Endings:
    """Ends worlds, each way once: many meet on the way."""

    def __init__(self, steps: Steps, engines: Interner) -> None:
        self.steps, self.engines = steps, engines
        self._still: tuple[dict[Node, Node], dict[Node, Node]] = ({}, {})
        self._checked: set[tuple[Node, bool]] = set()

    def check(self, procs: Procs, engine: int) -> None:
        """A4, A7, C1, C7 and T5 from here on; raises ``Violation``."""
        node = self.mourned((procs, engine))
        for tickets in (False, True):  # the other side learns of an end also while a ticket goes on and on
            node = self.settled(node, tickets)
            if (node, tickets) in self._checked:
                return
            self._checked.add((node, tickets))
            values = self.values(node)
            if not any(proc.gave_up or proc.run or proc.lost for proc in values) and not self.steps.scope.any_order:
                rules.check_told(values)
        node = self.settled(self.cleared(node))
        rules.check_cleared(self.values(node), disturbed=any(proc.run or proc.lost for proc in values))
        for _ in range(3):
            node = self.settled(self.expired(node))
        rules.check_gone(self.values(node))

    def values(self, node: Node) -> list[Proc]:
        return [self.steps.procs.values[number] for number in node[0]]

    # --- the stages

    def mourned(self, node: Node) -> Node:
        """Everybody learns of the dead, and that they read and write no more."""
        for index, proc in enumerate(self.values(node)):
            for other in self.values(node):
                if other.side != proc.side and other.dead:
                    node = self.moved(node, index, lost(other.dead))
                    node = (node[0], self.engines(self.fenced(self.engines.values[node[1]], proc, other.dead)))
                    node = self.moved(node, index, fence(other.dead))
        return node

    def settled(self, node: Node, tickets: bool = True) -> Node:
        """Route, resend and deliver in order, and let every ticket end, until nothing changes any more."""
        way, still = list[Node](), self._still[tickets]
        while node not in still:
            way.append(node)
            after = self.round(node, tickets)
            if after == node:
                still[node] = node
            if len(way) > 40:
                raise Violation("A4", "the two sides never fall silent")
            node = after
        for passed in way:
            still[passed] = still[node]
        return still[node]

    def round(self, node: Node, tickets: bool) -> Node:
        for index in range(len(node[0])):
            proc = self.values(node)[index]
            for action in list(self.steps.model.routes(tuple(self.values(node)), proc)) if proc.side == "R" else ():
                node = self.moved(node, index, action)
            for packet in self.steps.resends(node[0][index]):
                node = self.answered(node, [packet])
        for write in sorted(self.engines.values[node[1]].writes) if tickets else ():
            engine = self.engines.values[node[1]]
            node = (node[0], self.engines(Engine(engine.writes - {write}, engine.landed | {write})))
            for index, proc in enumerate(self.values(node)):
                if proc.instance == write.sender:
                    node = self.moved(node, index, ended(write, ok=True, quiescent=True))
        return node

    def cleared(self, node: Node) -> Node:
        for index, proc in enumerate(self.values(node)):
            if proc.state.life is not None:
                node = self.moved(node, index, Action("", (ev.Clear(proc.state.life.generation),)))
        return node

    def expired(self, node: Node) -> Node:
        for index, proc in enumerate(self.values(node)):
            for timer in self.steps.modules.facts(proc.side).timers(proc.state):
                node = self.moved(node, index, Action("", (ev.Timeout(timer),)))
        return node

    # --- one move

    def moved(self, node: Node, index: int, action: Action) -> Node:
        return self.placed(node, index, self.steps.act(node[0][index], action))

    def placed(self, node: Node, index: int, move: Move) -> Node:
        """A process moved; what it sent is delivered, and what that makes others send."""
        procs, engine = (*node[0][:index], move.after, *node[0][index + 1 :]), node[1]
        for start in move.starts:
            engine = self.started(procs, engine, index, start)
        return self.answered((procs, engine), list(move.sends))

    def answered(self, node: Node, queue: list[int]) -> Node:
        budget = 200
        while queue:
            packet = queue.pop(0)
            to = self.steps.packets.values[packet].to
            for index, number in enumerate(node[0]):
                if self.steps.instances[number] == to:
                    move = self.steps.deliver(number, packet)
                    procs, engine = (*node[0][:index], move.after, *node[0][index + 1 :]), node[1]
                    for start in move.starts:
                        engine = self.started(procs, engine, index, start)
                    node = (procs, engine)
                    queue += move.sends
            budget -= 1
            if not budget:
                raise Violation("A4", "the two sides never stop answering each other")
        return node

    def started(self, procs: Procs, engine: int, index: int, start: ev.Start) -> int:
        """The engine with one more write."""
        values, old = [self.steps.procs.values[number] for number in procs], self.engines.values[engine]
        rules.check_start(values, values[index], start, old)
        write = Write(values[index].instance, start.pair, start.chunk)
        return self.engines(Engine(old.writes | {write}, old.landed))

    def fenced(self, engine: Engine, proc: Proc, dead: str) -> Engine:
        """The engine without writes between a process and a dead instance."""
        between = {(proc.instance, dead), (dead, proc.instance)}
        return Engine(frozenset(write for write in engine.writes if (write.sender, write.pair.peer) not in between), engine.landed)


def ended(write: Write, *, ok: bool, quiescent: bool) -> Action:
    """A ticket's end, as the sender hears of it."""
    rank = int(write.sender[1:].partition(".")[0])
    why = None if ok else Reason(FailureCode.BACKEND, f"ticket of lifetime {write.pair.sg} failed", "prefill", rank)
    return Action("", (ev.Ended(write.pair, write.chunk, ok, quiescent, why),))


def lost(instance: str, generation: int = 0, *, replaced: bool = False) -> Action:
    """A peer is given up, or replaced; one that lives has its generations so far marked as expired (C1)."""
    side: Side = "prefill" if instance[0] == "S" else "decode"
    why = Reason(FailureCode.PEER_LOST, f"{instance} was lost", side, int(instance[1:].partition(".")[0]))
    return Action("", (ev.Lost(instance, why, replaced),), expired=generation)


def fence(instance: str) -> Action:
    """A dead peer is proved to write and read no more."""
    return Action("", (ev.Fenced(instance),))
