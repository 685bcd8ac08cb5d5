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


ONE = Scope("one lifetime a side, every fault and limit")
RESTART = plain("one lifetime a side, restart of either", restart=True)
LOST = Scope("one lifetime a side, a peer given up though it lives", lost=True, limits=False, expiry=False)
TWO = plain("two lifetimes a side, clear", requests=2, abort=False)
TWO_ABORT = plain("two lifetimes a side, abort and clear", requests=2)
TWO_REJECT = plain("two lifetimes a side, abort, clear and reject", requests=2, reject=True)
TWO_ALL = Scope("two lifetimes a side, everything", requests=2, reject=True)
LINKS_2 = Scope("one lifetime a side, links of two that lose", links=2)

COMPLETE = (
    Plan(ONE, 40_000, complete=True),
    Plan(Scope("one lifetime a side, links that lose", links=1), 90_000, complete=True),
    Plan(RESTART, 120_000, complete=True),
    Plan(LOST, 30_000, complete=True),
    Plan(TWO, 35_000, complete=True),
    Plan(plain("two lifetimes a side, clear, in any order", requests=2, abort=False, any_order=True), 40_000, complete=True),
    Plan(
        Scope("two chunks with pages and an empty one", chunks=((True, False), (True, False), (False, True)), limits=False, expiry=False),
        20_000,
        complete=True,
    ),
    Plan(plain("2 senders, 1 receiver, clear", senders=2, abort=False), 60_000, complete=True),
    Plan(plain("1 sender, 2 receivers, clear", receivers=2, abort=False), 45_000, complete=True),
    Plan(plain("a page that nobody sends", extra_pages=1), 500, complete=True),
)

BOUNDED = (
    Plan(LINKS_2, 60_000),
    Plan(TWO_ABORT, 60_000),
    Plan(TWO_ALL, 50_000),
    Plan(plain("two lifetimes a side, restart", requests=2, restart=True), 15_000),
    Plan(plain("two lifetimes a side, links that lose", requests=2, links=1), 20_000),
    Plan(plain("2 senders, 1 receiver, abort and clear", senders=2), 25_000),
    Plan(plain("1 sender, 2 receivers, abort and clear", receivers=2), 25_000),
    Plan(plain("2 senders, 2 receivers, clear", senders=2, receivers=2, abort=False), 10_000),
    Plan(plain("2 senders, 1 receiver, two lifetimes", senders=2, requests=2, abort=False), 10_000),
    Plan(plain("1 sender, 2 receivers, two lifetimes", receivers=2, requests=2, abort=False), 10_000),
)

SLOW = (
    Plan(TWO_ABORT, 470_000, complete=True),
    Plan(Scope(LINKS_2.name, links=2), 680_000, complete=True),
    Plan(TWO_REJECT, 500_000, complete=True),
    Plan(TWO_ALL, 2_000_000),
)
