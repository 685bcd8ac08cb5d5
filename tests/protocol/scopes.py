"""The scopes that are explored, each with the number of states that it must reach: all there are, or a bound."""

from __future__ import annotations

from dataclasses import dataclass

from tests.protocol.world import Scope


@dataclass(frozen=True)
class Plan:
    """A scope, whether it is explored to the end, and the states it has at least, or at which it is broken off."""

    scope: Scope
    states: int
    complete: bool = False

    def __str__(self) -> str:
        return self.scope.name


def plain(name: str, **more: object) -> Scope:
    """Abort and clear, but no tickets that fail and no limits, unless told otherwise."""
    return Scope(name, **{"faults": False, "limits": False, "expiry": False, "quarantine": False, **more})  # type: ignore[arg-type]


CHUNKS = ((True, False), (True, False), (False, True))

ONE = Scope("one lifetime a side, every fault and limit")
RESTART = plain("one lifetime a side, restart of either", restart=True)
LOST = Scope("one lifetime a side, a peer given up though it lives", lost=True, limits=False, expiry=False)
LAYERS = Scope("two chunks of a layer, and an empty one", chunks=CHUNKS, layered=True, limits=False, expiry=False)
TWO = plain("two lifetimes a side, clear", requests=2, abort=False)
TWO_ABORT = plain("two lifetimes a side, abort and clear", requests=2)
TWO_REJECT = plain("two lifetimes a side, abort, clear and reject", requests=2, reject=True)
TWO_ALL = Scope("two lifetimes a side, everything", requests=2, reject=True)
TWO_RESTART = plain("two lifetimes a side, restart of either", requests=2, restart=True)
SENDERS = plain("2 senders, 1 receiver, abort and clear", senders=2)
RECEIVERS = plain("1 sender, 2 receivers, abort and clear", receivers=2)
RELAYS = plain("2 senders, 2 receivers, no pages, clear", senders=2, receivers=2, chunks=((False, True),), abort=False)
LINKS_2 = Scope("one lifetime a side, links of two that lose", links=2)

COMPLETE = (
    Plan(ONE, 40_000, complete=True),
    Plan(Scope("one lifetime a side, links that lose", links=1), 90_000, complete=True),
    Plan(RESTART, 80_000, complete=True),
    Plan(LOST, 30_000, complete=True),
    Plan(TWO, 35_000, complete=True),
    Plan(plain("two lifetimes a side, clear, in any order", requests=2, abort=False, any_order=True), 40_000, complete=True),
    Plan(Scope("two chunks with pages and an empty one", chunks=CHUNKS, limits=False, expiry=False), 20_000, complete=True),
    Plan(LAYERS, 20_000, complete=True),
    Plan(plain("2 senders, 1 receiver, clear", senders=2, abort=False), 60_000, complete=True),
    Plan(plain("1 sender, 2 receivers, clear", receivers=2, abort=False), 45_000, complete=True),
    Plan(plain("no pages at all", chunks=((False, True),)), 1_000, complete=True),
    Plan(plain("a page that nobody sends", extra_pages=1), 500, complete=True),
    *(
        Plan(plain(f"two pages sent and {2 + extra} listed", chunks=CHUNKS, extra_pages=extra), 2_000, complete=True)
        for extra in (-2, -1, 1)
    ),
)

BOUNDED = (
    Plan(LINKS_2, 25_000),
    Plan(TWO_ABORT, 30_000),
    Plan(TWO_ALL, 30_000),
    Plan(TWO_RESTART, 15_000),
    Plan(plain("two lifetimes a side, links that lose", requests=2, links=1), 20_000),
    Plan(SENDERS, 25_000),
    Plan(RECEIVERS, 25_000),
    Plan(Scope("2 senders, 1 receiver, everything", senders=2, reject=True, restart=True), 15_000),
    Plan(Scope("1 sender, 2 receivers, everything", receivers=2, reject=True, restart=True), 15_000),
    Plan(plain("2 senders, 2 receivers, clear", senders=2, receivers=2, abort=False), 10_000),
    Plan(RELAYS, 30_000),
    Plan(plain("2 senders, 1 receiver, two lifetimes", senders=2, requests=2, abort=False), 10_000),
    Plan(plain("1 sender, 2 receivers, two lifetimes", receivers=2, requests=2, abort=False), 10_000),
)

SLOW = (  # the longest first
    Plan(TWO_ALL, 3_000_000),
    Plan(TWO_RESTART, 1_500_000),
    Plan(LINKS_2, 680_000, complete=True),
    Plan(RECEIVERS, 490_000, complete=True),
    Plan(TWO_REJECT, 500_000, complete=True),
    Plan(SENDERS, 460_000, complete=True),
)
