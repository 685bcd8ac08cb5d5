"""The model's engine: what it was given, what may still touch memory, and which bytes have landed. It is one instance's fast hooks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcore.hookspecs import DONE, PENDING, RETRY, NothingPosted, Ticket, TicketKind, TicketState, Transfer
from kvcore.protocol.events import Pair
from kvcore.states import RoomKey

if TYPE_CHECKING:
    from tests.model.node import Node

PAGE_BYTES = 8
ANSWERS = ("retry", "refused", "raised", "done")
"""What a transfer may answer instead of a ticket."""
ENDS = {
    "done": DONE,
    "retry": RETRY,
    "failed": TicketState(TicketKind.FAILED, "refused by the peer", quiescent=True),
    "unproven": TicketState(TicketKind.FAILED, "the link is down"),
    "broken": TicketState(TicketKind.FAILED, "the path is poisoned", peer_broken=True),
}
"""What a ticket may come to."""


@dataclass(eq=False)
class Started:
    """A ticket of the protocol, as the table started it."""

    pair: Pair
    pages: int


@dataclass(eq=False)
class Write:
    """A transfer that the engine took: page by page from where to where, and whether it may still read and write."""

    key: RoomKey
    pair: Pair
    chunk: int
    pages: tuple[tuple[int, int], ...]
    began: float
    state: TicketState = PENDING
    reads: bool = True
    writes: bool = True
    source_given_up: bool = False
    """Its pages were released by limit: what it still does there is not promised (R3)."""
    target_given_up: bool = False

    @property
    def live(self) -> bool:
        return self.reads or self.writes

    @property
    def harmless(self) -> bool:
        """Nobody waits for it at the target: it cannot write there, or its pages were given up."""
        return self.target_given_up or not self.writes


def page_list(transfer: Transfer) -> tuple[tuple[int, int], ...]:
    """Source and target page of each page of a transfer."""
    pages: list[tuple[int, int]] = []
    for here, there, length in zip(transfer.local_offset.tolist(), transfer.remote_offset.tolist(), transfer.length.tolist(), strict=True):
        pages += [((here + at) // PAGE_BYTES, (there + at) // PAGE_BYTES) for at in range(0, length, PAGE_BYTES)]
    return tuple(pages)


class Engine:
    """The hooks that the ledger calls. Whatever breaks a rule is noted with the world, since the core takes what a hook raises."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.answers: deque[str] = deque()
        self.writes: list[Write] = []
        """Those that may still touch memory or whose end was not reported yet, by age."""
        self.tickets: dict[int, Write] = {}
        self.given = 0
        self.retried: dict[tuple[RoomKey, int, tuple[tuple[int, int], ...]], float] = {}
        self.aborted: set[int] = set()
        self.held: set[RoomKey] = set()

    @property
    def pending(self) -> list[int]:
        """Tickets whose end was not decided yet."""
        return [ticket for ticket, write in self.tickets.items() if write.state is PENDING]

    def end(self, ticket: int, how: str) -> None:
        """Decide what a ticket has come to; the ledger hears of it at its next poll."""
        write = self.tickets[ticket]
        if how == "done" and not write.writes:
            how = "failed"  # fenced meanwhile
        if how == "done":
            self.node.world.land(self.node, write)
        if how not in ("unproven", "broken"):
            write.reads = write.writes = False
        write.state = ENDS[how]
        if how == "retry":
            self.retried[write.key, write.chunk, write.pages] = self.node.world.clock.now

    def forget_ended(self) -> None:
        self.writes = [write for write in self.writes if write.live or write.state is PENDING]

    # --- hooks

    def kvcore_transfer(self, *, transfer: Transfer, may_wait: bool) -> Ticket | TicketState:
        world, pages = self.node.world, page_list(transfer)
        started = world.begins(self.node, transfer, pages)
        shut = (self.node.name, started.pair.peer) in world.shut
        write = Write(transfer.room, started.pair, transfer.chunk, pages, world.clock.now, writes=not shut)
        receiver = world.life(started.pair.peer, started.pair.rg)
        write.target_given_up = receiver is not None and receiver.handle.release_unproven  # by limit, while this side was stopped
        self.given += 1
        self.held.add(transfer.room)
        self.writes.append(write)
        self.tickets[self.given] = write
        answer = self.answers.popleft() if self.answers else ""
        if not answer:
            return self.given
        ticket = self.given
        self.end(ticket, {"refused": "failed", "raised": "unproven"}.get(answer, answer))
        del self.tickets[ticket]
        if answer == "refused":
            raise NothingPosted("refused")
        if answer == "raised":
            raise RuntimeError("who knows what was posted")
        return write.state

    def kvcore_poll(self, *, tickets: Sequence[int]) -> list[TicketState]:
        states = [self.tickets[ticket].state for ticket in tickets]
        for ticket, state in zip(tickets, states, strict=True):
            if state is not PENDING:
                del self.tickets[ticket]
        return states

    def kvcore_progress(self) -> None: ...

    def kvcore_abort(self, *, room: RoomKey, tickets: Sequence[int]) -> None:
        self.aborted.update(tickets)

    def kvcore_clear(self, *, room: RoomKey) -> None:
        self.node.world.rules.check_forgotten(self.node, room)
        self.held.discard(room)

    def kvcore_held_rooms(self) -> list[RoomKey]:
        return list(self.held)
