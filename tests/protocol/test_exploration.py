"""The shipped protocol keeps the contract's rules in every world that can be reached.

Each scope prints how far it came: complete, or broken off at a bound. Some states stand for many: see ``network``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from kvcore.protocol import receiver, sender
from tests.protocol.explore import Explorer, Result
from tests.protocol.network import Arrival, Procs, SetNetwork
from tests.protocol.scopes import BOUNDED, COMPLETE, LAYERS, LOST, ONE, RELAYS, RESTART, SLOW, Plan, plain
from tests.protocol.steps import bits
from tests.protocol.table import EXPECTED, TABLES, Entry
from tests.protocol.world import Scope


@cache
def explored(plan: Plan) -> Result:
    return Explorer(plan.scope).run(max_states=10**9 if plan.complete else plan.states)


def check(plan: Plan, result: Result, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n  {result}")
    assert result.states >= plan.states
    assert result.complete or not plan.complete
    assert result.reached <= EXPECTED, sorted(result.reached - EXPECTED)


@pytest.mark.parametrize("plan", COMPLETE, ids=str)
def test_complete(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    check(plan, explored(plan), capsys)


@pytest.mark.parametrize("plan", BOUNDED, ids=str)
def test_bounded(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    check(plan, explored(plan), capsys)


@pytest.fixture(scope="module")
def far() -> Iterator[dict[Plan, Future[Result]]]:
    """The long explorations, begun at once, two at a time."""
    pool = ProcessPoolExecutor(min(2, os.cpu_count() or 1), mp_context=get_context("spawn"))
    yield {plan: pool.submit(explored, plan) for plan in SLOW}
    pool.shutdown(cancel_futures=True)


@pytest.mark.slow
@pytest.mark.parametrize("plan", SLOW, ids=str)
def test_far(plan: Plan, far: dict[Plan, Future[Result]], capsys: pytest.CaptureFixture[str]) -> None:
    check(plan, far[plan].result(), capsys)


def test_enough_is_explored() -> None:
    assert sum(plan.states for plan in COMPLETE + BOUNDED) >= 500_000


def test_every_handler_is_reached() -> None:
    plans = [plan for plan in COMPLETE + BOUNDED if plan.scope in (ONE, RESTART, LOST, LAYERS, RELAYS)]
    handled = set().union(*(explored(plan).handled for plan in plans))
    for side, module in (("S", sender), ("R", receiver)):
        wanted = {(side, kind.__name__) for kind in module._HANDLERS} | {(side, kind) for kind in module._TIMEOUTS}
        assert wanted <= handled, wanted - handled


def test_every_transition_is_reached_and_no_other() -> None:
    reached = frozenset[Entry]().union(*(explored(plan).reached for plan in COMPLETE + BOUNDED))
    assert sorted(EXPECTED - reached) == []
    assert sorted(reached - EXPECTED) == []


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table[2 : table.index(" |")])
def test_the_documentation_shows_the_table(table: str) -> None:
    assert table in (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()


class UnreducedNetwork(SetNetwork):
    """The set network as it is told, without its reductions."""

    def sent(self, procs: Procs, net: int, sends: tuple[int, ...], mask: int) -> int:
        return net | mask

    def arrivals(self, procs: Procs, net: int) -> Iterator[Arrival]:
        for place, number in enumerate(procs):
            address = self.steps.address(self.steps.procs.values[number].instance)
            for packet in bits(net & self.steps.addressed.get(address, 0)):
                yield Arrival(packet, place, self.steps.deliver(number, packet), net)

    def resends(self, procs: Procs, net: int) -> Iterator[tuple[int, Any]]:
        for number in procs:
            for packet in self.steps.resends(number):
                yield packet, net | 1 << packet

    def visit(self, node: int, net: int) -> bool:
        known = self._visited.setdefault(node, [])
        if net in known:
            return False
        known.append(net)
        return True


def moments(explorer: Explorer) -> set[Any]:
    assert explorer.run().complete
    procs, engines = explorer.steps.procs.values, explorer.engines.values
    return {(tuple(procs[number] for number in node), engines[engine]) for node, engine in explorer.nodes.values}


@pytest.mark.parametrize(
    "scope",
    [
        plain("abort and clear"),
        plain("limits", abort=False, reject=True, expiry=True),
        pytest.param(plain("restart", abort=False, clear=False, limits=True, restart=True), marks=pytest.mark.slow),
    ],
    ids=lambda scope: scope.name,
)
def test_the_reductions_lose_nothing(scope: Scope) -> None:
    unreduced = Explorer(scope)
    unreduced.network = UnreducedNetwork(unreduced.steps)
    assert moments(Explorer(scope)) == moments(unreduced)
