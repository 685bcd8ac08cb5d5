"""Real processes over an engine, for the tests of plugins: a room between them, and what becomes of it when one is killed, frozen or
started again."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from kvcore_conformance.stage.driver import Child, PoolSpec, free_port
from kvcore_conformance.stage.waits import SOON_S, until

BIG = PoolSpec(pages=24, page_bytes=1 << 20, layers=2)
"""More than what the sockets between two processes take up, so that a transfer to a stopped process stays in flight."""
BRIEF = {"liveness_s": 1.5, "ticket_s": 2.5, "quarantine_s": 4.5}
MOVED_S = 20.0
"""An engine's first transfer to a peer may take seconds."""
_rooms = itertools.count(1)


def new_room() -> int:
    """A number that no room of these tests has had."""
    return next(_rooms)


@contextmanager
def children(backend: str, number: int, **options: Any) -> Iterator[list[Child]]:
    """Processes for managers over a backend with these options, ended with the context."""
    found = [Child(backend=backend, options=options) for _ in range(number)]
    try:
        yield found
    finally:
        for child in found:
            child.end()


def moved(prefill: Child, decode: Child) -> None:
    """A room works, with a chunk, an empty one and the last, which is empty too; and is cleared."""
    room = new_room()
    sender, receiver = prefill.sender(room), decode.receiver(room, prefill)
    receiver.receive([5, 1, 7])
    for pages in ([2, 9], [], [3]):
        sender.send(pages)
    sender.send(last=True)
    ends = receiver.wait(MOVED_S), sender.wait(MOVED_S)
    assert ends == ("SUCCESS", "SUCCESS"), decode.call(receiver.name, "failure")
    assert decode.digest([5, 1, 7]) == prefill.digest([2, 9, 3])
    sender.clear()
    receiver.clear()


def holds_nothing(child: Child, peers: int) -> None:
    """Every store of rooms is empty, and of peers only those that live are known."""
    until(lambda: child.work("held") == {}, f"no room is held: {child.work('held')}")
    lost(child, peers)


def lost(child: Child, peers: int = 0) -> None:
    """It knows that its peer is gone."""
    until(lambda: child.work("stats")["peers"] == peers, f"{peers} peers are known", BRIEF["liveness_s"] + SOON_S)


def check_killed_in_the_middle(prefill: Child, doomed: Child, role: str, codes: Collection[str] = ("peer_lost",)) -> None:
    """R4: a process is killed in the middle of a write to it. The room fails with one of these codes, and its source is safe; by proof, if
    nothing writes to that side, since by a disconnect it proves nothing about that."""
    prefill.start(role, [BIG], limits=BRIEF)
    doomed.start("decode", [BIG], limits=BRIEF)
    moved(prefill, doomed)
    sender = prefill.sender(new_room())
    doomed.receiver(sender.room, prefill).receive(range(24))
    assert sender.until("WAITING_FOR_INPUT") == "WAITING_FOR_INPUT"
    doomed.freeze()
    sender.send(range(24), last=True)
    until(lambda: prefill.work("held").get("ledger_tickets") == 1, "a ticket is in flight")
    assert not sender.safe(0.2)
    doomed.kill()
    assert sender.wait(BRIEF["liveness_s"] + SOON_S) == "FAILED"
    assert sender.failure.code in codes
    assert sender.safe(BRIEF["quarantine_s"] + SOON_S)
    assert sender.unproven == (role == "both")
    sender.clear()
    holds_nothing(prefill, peers=0)


def check_frozen_killed_and_started_again(prefill: Child, decode: Child, successor: Child, unproven: bool) -> None:
    """P2, P3: each side stands still for longer than the limit, prefill is killed when idle, its successor at the same address in a room.
    ``unproven``: whether decode's pages are then released by limit."""
    address = {"bootstrap_port": free_port()}
    prefill.start("prefill", limits=BRIEF, **address)
    decode.start("decode", limits=BRIEF)
    moved(prefill, decode)
    for side, other in ((prefill, decode), (decode, prefill)):
        side.freeze()
        lost(other)
        side.thaw()
        moved(prefill, decode)
    prefill.kill()
    lost(decode)  # until then a new room may still ask for the dead
    successor.start("prefill", limits=BRIEF, **address)
    moved(successor, decode)
    room = new_room()
    sender, waiting = successor.sender(room), decode.receiver(room, successor)
    waiting.receive([1])
    assert sender.until("WAITING_FOR_INPUT") == "WAITING_FOR_INPUT"
    successor.kill()
    assert waiting.wait(BRIEF["liveness_s"] + SOON_S) == "FAILED"
    assert waiting.failure.code == "peer_lost"
    assert waiting.safe(BRIEF["quarantine_s"] + SOON_S)
    assert waiting.unproven == unproven
    waiting.clear()
    holds_nothing(decode, peers=0)
