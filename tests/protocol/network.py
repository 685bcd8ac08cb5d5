"""Two networks: one in which whatever was ever sent may arrive, and in-order links that lose."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import or_
from typing import Any, NamedTuple, Protocol

from tests.protocol.steps import Move, Steps, bits

Procs = tuple[int, ...]


class Arrival(NamedTuple):
    """A message that arrives at the process of that place, or is lost (place -1); ``net`` is what is left on its way."""

    packet: int
    place: int
    move: Move | None
    net: Any


class Network(Protocol):
    """What is on its way in one world, as a hashable value."""

    empty: Any

    def sent(self, procs: Procs, net: Any, sends: tuple[int, ...], mask: int) -> Any:
        """The network after these packets were sent; ``procs`` are the processes as they are then."""

    def arrivals(self, procs: Procs, net: Any) -> Iterator[Arrival]:
        """Every message that may arrive or be lost now."""

    def resends(self, procs: Procs, net: Any) -> Iterator[tuple[int, Any]]:
        """Every network after one packet was sent again, with the packet."""

    def holds(self, net: Any, packet: int) -> bool:
        """Whether a packet is on its way."""

    def visit(self, node: int, net: Any) -> bool:
        """Note a world; whether it must be explored."""

    def superseded(self, node: int, net: Any) -> bool:
        """Whether a world that was noted need not be explored any more."""


class _Seen:
    """What is known of the packets for one process: looked at, changing it, answered without changing it, and dropped for good."""

    __slots__ = ("address", "answers", "asked", "dropped", "known", "moves", "replies", "resends")

    def __init__(self, address: str, resends: int) -> None:
        self.address, self.resends = address, resends
        self.known = self.moves = self.asked = self.dropped = 0
        self.answers: dict[int, int] = {}
        self.replies: dict[int, int] = {}

    def reply(self, net: int) -> int:
        """Everything that it answers to a network."""
        asked = net & self.asked
        reply = self.replies.get(asked)
        if reply is None:
            reply = self.replies[asked] = reduce(or_, (answer for packet, answer in self.answers.items() if asked & packet), 0)
        return reply


class SetNetwork:
    """Any message ever sent may arrive at any time, any number of times, or never. A network is the set of messages, as a bit mask.

    Three reductions. Two are sound because more messages only allow more: what a process may send without changing (resends, and
    answers to what has been sent) is sent at once, for a message may also never arrive; and of two worlds that differ only in the
    network, one whose messages are among the other's needs no exploring. The rules speak of processes and engine, or forbid a message.
    With restarts, messages to the dead, and those of the dead to who knows that they are gone (P3), do nothing for ever: they are
    forgotten, but for those that a rule forbids.
    """

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.empty = 0
        self._seen: dict[int, _Seen] = {}
        self._visited: dict[int, list[int]] = {}

    def sent(self, procs: Procs, net: int, sends: tuple[int, ...], mask: int) -> int:
        net |= mask
        addressed = self.steps.addressed
        while True:
            before = net
            for number in procs:
                seen = self._seen.get(number) or self._first(number)
                net |= seen.resends
                new = net & addressed.get(seen.address, 0) & ~seen.known
                if new:
                    self._look(number, seen, new)
                net |= seen.reply(net)
            if net == before:
                return net & self._heard(procs) if self.steps.scope.restart else net

    def _heard(self, procs: Procs) -> int:
        """Packets that may do something yet, or are forbidden."""
        heard = self.steps.forbidden
        for number in procs:
            seen = self._seen[number]
            heard |= self.steps.addressed.get(seen.address, 0) & ~seen.dropped
        return heard

    def _first(self, number: int) -> _Seen:
        mask = 0
        for packet in self.steps.resends(number):
            mask |= 1 << packet
        seen = self._seen[number] = _Seen(self.steps.address(self.steps.procs.values[number].instance), mask)
        return seen

    def _look(self, number: int, seen: _Seen, new: int) -> None:
        """Sort packets that are new to a process into those that change it and those that it only answers."""
        for packet in bits(new):
            move = self.steps.deliver(number, packet)
            if move.after != number or move.starts:
                seen.moves |= 1 << packet
            elif move.mask:
                seen.answers[1 << packet] = move.mask
                seen.asked |= 1 << packet
            elif self.steps.deaf(number, packet):
                seen.dropped |= 1 << packet
        seen.known |= new

    def arrivals(self, procs: Procs, net: int) -> Iterator[Arrival]:
        for index, number in enumerate(procs):
            for packet in bits(net & self._seen[number].moves):
                yield Arrival(packet, index, self.steps.deliver(number, packet), net)

    def resends(self, procs: Procs, net: int) -> Iterator[tuple[int, Any]]:
        return iter(())

    def holds(self, net: int, packet: int) -> bool:
        return bool(net >> packet & 1)

    def visit(self, node: int, net: int) -> bool:
        known = self._visited.setdefault(node, [])
        if any(net & ~other == 0 for other in known):
            return False
        known[:] = [other for other in known if other & ~net]
        known.append(net)
        return True

    def superseded(self, node: int, net: int) -> bool:
        return net not in self._visited[node]


class Links:
    """A queue from each process to each other one: it keeps order, may lose its head, and loses what does not fit in."""

    def __init__(self, steps: Steps) -> None:
        self.steps, self.size = steps, steps.scope.links
        self.count = steps.scope.senders + steps.scope.receivers
        self.empty: tuple[tuple[int, ...], ...] = ((),) * self.count**2
        self._visited: set[tuple[int, Any]] = set()

    def sent(self, procs: Procs, net: Any, sends: tuple[int, ...], mask: int) -> Any:
        for packet in sends:
            link = self._link(packet)
            if len(net[link]) < self.size:
                net = (*net[:link], (*net[link], packet), *net[link + 1 :])
        return net

    def _link(self, packet: int) -> int:
        what = self.steps.packets.values[packet]
        return self._place(what.source) * self.count + self._place(what.to)

    def _place(self, instance: str) -> int:
        rank = int(instance[1:].partition(".")[0])
        return rank if instance[0] == "S" else self.steps.scope.senders + rank

    def arrivals(self, procs: Procs, net: Any) -> Iterator[Arrival]:
        for link, queue in enumerate(net):
            if not queue:
                continue
            rest = (*net[:link], queue[1:], *net[link + 1 :])
            yield Arrival(queue[0], -1, None, rest)
            index = link % self.count
            if self.steps.procs.values[procs[index]].instance == self.steps.packets.values[queue[0]].to:
                yield Arrival(queue[0], index, self.steps.deliver(procs[index], queue[0]), rest)

    def resends(self, procs: Procs, net: Any) -> Iterator[tuple[int, Any]]:
        for number in procs:
            for packet in self.steps.resends(number):
                after = self.sent(procs, net, (packet,), 0)
                if after != net:
                    yield packet, after

    def holds(self, net: Any, packet: int) -> bool:
        return any(packet in queue for queue in net)

    def visit(self, node: int, net: Any) -> bool:
        known = len(self._visited)
        self._visited.add((node, net))
        return len(self._visited) > known

    def superseded(self, node: int, net: Any) -> bool:
        return False
