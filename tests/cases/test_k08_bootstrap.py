"""Kind K8: whatever the bootstrap service does or leaves undone, no call of a decode side waits for it, and no other group does.

The service itself and its clients are in ``test_bootstrap``, groups of ranks in ``test_ranks``.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import pytest
from aiohttp import web
from kvcore_conformance.stage.driver import free_port

from kvcore import FailureCode, KVPoll, Receiver, Topology
from kvcore.http import HttpThread
from tests.cases.network import Relay
from tests.cases.ports import ask
from tests.helpers import Duo, Pace, ended, manager, memory, number, stays, stores_empty, wait_until


@pytest.fixture
def pair() -> Iterator[Duo]:
    """A prefill group and a decode side that have not met."""
    source, target = memory(32, seed=7), memory(32)
    with manager("prefill", source) as prefill, manager("decode", target, limits={"bootstrap_s": 3.0}) as decode:
        yield Duo(prefill, decode, source, target)


@contextmanager
def silent() -> Iterator[str]:
    """A service that accepts and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield "127.0.0.1:{}".format(*server.getsockname()[1:])


@contextmanager
def answering(body: bytes, after_s: float = 0.0) -> Iterator[str]:
    """A service that gives one answer to every question, after a while."""

    async def answer(_request: web.Request) -> web.Response:
        await asyncio.sleep(after_s)
        return web.Response(body=body)

    app, thread = web.Application(), HttpThread("kvcore-http-odd")
    app.router.add_route("*", "/{path:.*}", answer)
    thread.start()
    try:
        yield f"127.0.0.1:{thread.serve(app, '127.0.0.1', 0, 'odd')}"
    finally:
        thread.stop()


@contextmanager
def nobody() -> Iterator[str]:
    """A port that nothing listens on."""
    yield f"127.0.0.1:{free_port()}"


SERVICES: dict[str, Callable[[], AbstractContextManager[str]]] = {
    "down": nobody,
    "silent": silent,
    "slow": lambda: answering(b"{}", after_s=1.0),
    "nonsense": lambda: answering(b"<html>hello</html>"),
}


def use(receiver: Receiver, call: str, pace: Pace) -> None:
    if call == "receive":
        pace(receiver.receive, [1])
    elif call == "abort":
        pace(receiver.abort, "not wanted")
    else:
        pace(getattr(receiver, call))


@pytest.mark.parametrize("service", SERVICES)
def test_c74_no_call_waits_or_raises_whatever_the_service_does(pair: Duo, service: str) -> None:
    """Receivers are made, given their destination, polled, aborted and cleared in every order: once one has failed it stays so. Those that
    are left alone fail by their limit, or at once where the answer is definite, and name the address."""
    with SERVICES[service]() as address:
        pace = Pace()
        for order in itertools.permutations(["receive", "poll", "abort", "clear"]):
            receiver = pace(pair.decode.receiver, number(), address)
            for call in order:
                use(receiver, call, pace)
                if {"abort", "clear"} & set(order[: order.index(call) + 1]):
                    assert pace(receiver.poll) is KVPoll.FAILED and receiver.failure is not None
        left = [pace(pair.decode.receiver, number(), address) for _ in range(3)]
        pace(left[0].receive, [2])
        for receiver in left:
            ended(receiver, KVPoll.FAILED)
            assert receiver.failure is not None and address in receiver.failure.reason
            assert receiver.failure.code is (FailureCode.TIMEOUT if service in ("down", "silent") else FailureCode.PEER_LOST)
            pace(receiver.clear)
        pace.check()
        pair.transfer([1], [2])
        stores_empty(pair.decode)


def test_c76_a_thousand_rooms_ask_over_one_connection_and_seldom() -> None:
    """A group of which a rank is missing is asked about for a thousand rooms, which are polled all the time."""
    topology = Topology(tp_size=2, tp_rank=0)
    with ExitStack() as stack:
        prefill = stack.enter_context(manager("prefill", memory(4), topology=topology))
        decode = stack.enter_context(manager("decode", memory(4)))
        relay = stack.enter_context(Relay(("127.0.0.3", 0), ("127.0.0.1", int(prefill.address.rpartition(":")[2]))))
        pace = Pace()
        receivers = [pace(decode.receiver, number(), relay.address) for _ in range(1000)]
        wait_until(lambda: decode.stats().stores["directory_lookups"] == 1000)
        stays(lambda: {KVPoll.BOOTSTRAPPING} == set(pace(decode.poll_all, receivers)), 1.5)
        assert 1 <= relay.met <= 2 and decode.stats().stores["directory_questions"] == 1
        for receiver in receivers:
            pace(receiver.clear)
        pace.check()
        stores_empty(decode)


@pytest.mark.parametrize("service", ["silent", "slow", "down"])
def test_several_groups_of_which_many_do_not_answer_delay_no_other(pair: Duo, service: str) -> None:
    """Thirty services that do not answer, or late: a room with another group does not wait for any of them."""
    with ExitStack() as stack:
        waiting = [pair.decode.receiver(number(), stack.enter_context(SERVICES[service]())) for _ in range(30)]
        wait_until(lambda: pair.decode.stats().stores["directory_questions"] >= 1)
        begun = time.monotonic()
        pair.transfer([1], [2])
        assert time.monotonic() - begun < 2.5, "one answer that never comes takes longer"
        for receiver in waiting:
            receiver.clear()


def test_a_service_that_is_slow_costs_its_own_rooms_that_time_and_no_more(pair: Duo) -> None:
    status, group = ask(pair.prefill.address, "GET", "/v1/group")
    assert status == 200
    with answering(json.dumps(group).encode(), after_s=1.0) as slow:
        sender = pair.prefill.sender(number())
        pace = Pace()
        receiver = pace(pair.decode.receiver, sender.room, slow)
        pace(receiver.receive, [5])
        sender.send([6], last=True)
        pair.transfer([1], [2])
        assert not pace(receiver.poll).terminal
        ended(receiver, KVPoll.SUCCESS)
        assert pair.equal([6], [5])
        pace.check()
        for handle in (sender, receiver):
            handle.clear()
