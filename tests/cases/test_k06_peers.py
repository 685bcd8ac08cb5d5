"""Kind K6: a peer that dies, stands still, is cut off, is replaced or comes back costs its own rooms, and nobody waits for it.

C51 is in ``test_processes``, C61 in ``test_bootstrap``.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from kvcore_conformance.stage.crew import Crew
from kvcore_conformance.stage.driver import Child, Handle as ChildHandle, PoolSpec, free_port

from kvcore import FailureCode, Handle, KVManager, KVPoll, Limits, Receiver, RoomError, Sender, hookimpl
from kvcore.bootstrap import REFRESH_S
from kvcore.core import Core
from kvcore.faults import ControlTap
from tests.cases.network import ESTABLISHED, Cable, Relay, cable, connections
from tests.helpers import (
    BACKENDS,
    SOON_S,
    Duo,
    Pace,
    at,
    duo,
    ended,
    fences,
    limits,
    manager,
    memory,
    number,
    own_threads,
    stays,
    stores_empty,
    wait_until,
)

BRIEF = limits(liveness_s=1.5, send_s=1.0, ticket_s=2.5, quarantine_s=4.5)
"""Silence for longer than this is the end of a peer."""
LAYERS, PAGES, PAGE_BYTES = 3, 32, 256
"""The pool of a child."""


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=BACKENDS)
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    crew = Crew(backend=request.param)
    try:
        yield crew
    finally:
        crew.end()


@contextmanager
def decoding(backend: str, times: Limits = BRIEF) -> Iterator[KVManager]:
    """A decode manager in this process, whose calls can be timed, for prefill children."""
    with manager("decode", memory(PAGES, LAYERS, PAGE_BYTES), backend=backend, limits=times) as decode:
        yield decode


def prefilling(child: Child, times: Limits = BRIEF, **settings: Any) -> Child:
    return child.start("prefill", [PoolSpec(pages=PAGES, page_bytes=PAGE_BYTES, layers=LAYERS)], limits=times.model_dump(), **settings)


def opened(prefill: Child, decode: KVManager, pages: list[int]) -> tuple[ChildHandle, Receiver]:
    """A room whose destination is published."""
    sender = prefill.sender(number())
    receiver = decode.receiver(sender.room, prefill.address)
    receiver.receive(pages)
    return sender, receiver


def works(prefill: Child, decode: KVManager) -> None:
    """A room with a child succeeds, and is cleared."""
    sender, receiver = opened(prefill, decode, [5, 6])
    sender.send([7, 8], last=True)
    ended(receiver, KVPoll.SUCCESS)
    assert sender.wait() == "SUCCESS"
    sender.clear()
    receiver.clear()


def lost(handle: Handle, timeout_s: float = SOON_S) -> str:
    """Why a room has failed, which must be the peer."""
    ended(handle, KVPoll.FAILED, timeout_s)
    assert handle.failure is not None and handle.failure.code is FailureCode.PEER_LOST, handle.failure
    return handle.failure.reason


def polled_until_ended(pace: Pace, handles: list[Receiver]) -> None:
    """Poll all, round after round, as a scheduler does."""
    pause, deadline = threading.Event(), time.monotonic() + SOON_S
    while not {KVPoll.FAILED, KVPoll.SUCCESS} >= {pace(handle.poll) for handle in handles}:
        assert time.monotonic() < deadline, handles
        pause.wait(0.001)


# --- C53: another process behind an address that never stops answering


class Service:
    """An address that stays, whoever is behind it: a bootstrap port and a control port that lead to an instance's own."""

    HOST = "127.0.0.3"

    def __init__(self, stack: ExitStack) -> None:
        self.ports = {"port": free_port(), "bootstrap_port": free_port()}
        self.relays = [stack.enter_context(Relay((self.HOST, port), (self.HOST, 1))) for port in self.ports.values()]
        self._hosts = itertools.count(4)
        self._stack = stack

    def lead_to(self, host: str) -> None:
        """New connections lead there; those that there are end."""
        for relay in self.relays:
            relay.to = host, relay.to[1]
            relay.cut()

    def start(self, **settings: Any) -> KVManager:
        """A prefill instance that is reached through this address, and to which it leads from now on."""
        host = f"127.0.0.{next(self._hosts)}"
        for relay, port in zip(self.relays, self.ports.values(), strict=True):
            relay.to = host, port
        self.lead_to(host)
        source = memory(PAGES, LAYERS, PAGE_BYTES, seed=7)
        return self._stack.enter_context(manager("prefill", source, host=self.HOST, bind=host, limits=BRIEF, **self.ports, **settings))


def moved(prefill: KVManager, decode: KVManager, address: str = "") -> None:
    """A room between two managers succeeds, and is cleared."""
    sender, receiver = prefill.sender(number()), None
    receiver = decode.receiver(sender.room, address or prefill.address)
    with sender, receiver:
        receiver.receive([3, 4])
        sender.send([1, 2], last=True)
        ended(receiver, KVPoll.SUCCESS)
        ended(sender, KVPoll.SUCCESS)


@pytest.mark.parametrize("told", [True, False], ids=["old one ends", "old one lives on"])
def test_c53_another_process_behind_the_address_is_noticed(told: bool) -> None:
    """Both ports lead to another instance from one moment to the next, and answer all the time. What ran with the old one fails, and the
    next room runs with the new one."""
    with ExitStack() as stack:
        service, decode = Service(stack), stack.enter_context(decoding("local"))
        old = service.start()
        moved(old, decode)
        sender = old.sender(number())
        running = decode.receiver(sender.room, old.address)
        running.receive([1])
        wait_until(lambda: sender.poll() is KVPoll.WAITING_FOR_INPUT)
        new = service.start()
        if told:
            old.close()
        assert new.address == old.address
        ended(running, KVPoll.FAILED)
        moved(new, decode)
        wait_until(lambda: decode.stats().peers == 1 and decode.stats().stores["links"] == 1, what="the old one is dropped")
        sender.clear()
        running.clear()
        stores_empty(decode)


def test_c53_an_address_that_leads_to_another_group_is_found_out_while_the_old_one_lives(backend: str) -> None:
    """Only the bootstrap service's address is stable, as in a rolling change: the ranks of the old group still answer at their own."""
    with ExitStack() as stack:
        old, new = (
            stack.enter_context(manager("prefill", memory(PAGES, LAYERS, PAGE_BYTES, seed=7), backend=backend, limits=BRIEF))
            for _ in range(2)
        )
        decode = stack.enter_context(decoding(backend))
        port = int(old.address.rpartition(":")[2])
        relay = stack.enter_context(Relay(("127.0.0.3", 0), ("127.0.0.1", port)))
        moved(old, decode, relay.address)
        sender = old.sender(number())
        running = decode.receiver(sender.room, relay.address)
        running.receive([1])
        wait_until(lambda: sender.poll() is KVPoll.WAITING_FOR_INPUT)
        relay.to = "127.0.0.1", int(new.address.rpartition(":")[2])
        relay.cut()
        stays(lambda: running.poll() is KVPoll.WAITING_FOR_INPUT, REFRESH_S)
        first = decode.receiver(number(), relay.address)  # which has the address asked about again, if nothing else has
        ended(first, KVPoll.FAILED)
        moved(new, decode, relay.address)
        first.clear()
        sender.send([2], last=True)
        ended(running, KVPoll.SUCCESS)  # the old one was left alone
        running.clear()
        sender.clear()


# --- C55: a peer that reads nothing any more


def fill(decode: KVManager, control: str) -> None:
    """Send so much to a peer that reads nothing that nothing more can be sent to it."""
    done = threading.Event()

    def send() -> None:
        (route,) = (route for route in decode.control._routes.values() if route.address == control)
        while decode.control.pass_on(route, bytes(1 << 11), time.monotonic()):
            pass
        done.set()

    decode.control.call(send)
    assert done.wait(SOON_S)


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "stopped and killed"])
def test_c55_a_prefill_that_reads_nothing_blocks_no_call_and_is_dropped(crew: Crew, killed: bool) -> None:
    """Its queue is full when decode opens 50 rooms to it and one to another: no call waits, the 50 fail, the one succeeds."""
    with crew.lend(2) as (stopped, healthy), decoding(crew.backend) as decode:
        port = free_port()
        prefilling(stopped, port=port)
        prefilling(healthy)
        for prefill in (stopped, healthy):
            works(prefill, decode)
        stopped.freeze()
        fill(decode, f"127.0.0.1:{port}")
        if killed:
            stopped.kill()
        pace = Pace()
        rooms = [pace(decode.receiver, number(), stopped.address) for _ in range(50)]
        sender = healthy.sender(number())
        good = pace(decode.receiver, sender.room, healthy.address)
        for receiver in (*rooms, good):
            pace(receiver.receive, [5])
        sender.send([6], last=True)
        polled_until_ended(pace, [good])
        assert good.poll() is KVPoll.SUCCESS
        if killed:  # a room that has met no sender waits for who comes after
            wait_until(lambda: decode.stats().peers == 1)
            for receiver in rooms:
                pace(receiver.abort, "enough")
        polled_until_ended(pace, rooms)
        pace.check()
        assert killed or all("peer" in lost(receiver) for receiver in rooms)
        wait_until(lambda: (decode.stats().peers, decode.stats().stores["links"]) == (1, 1), what="the endpoint is dropped")
        works(healthy, decode)
        for receiver in (*rooms, good):
            pace(receiver.clear)
        assert decode.healthy


# --- C56: a peer that dies in the middle


def test_c56_no_poll_waits_while_a_prefill_with_20_transfers_dies(crew: Crew) -> None:
    with crew.lend(1) as (doomed,), decoding(crew.backend) as decode:
        works(prefilling(doomed), decode)
        doomed.fault("hold", "hold")
        rooms = [opened(doomed, decode, [page]) for page in range(20)]
        for sender, _ in rooms:
            sender.send([1], last=True)
        receivers = [receiver for _, receiver in rooms]
        wait_until(lambda: all(receiver.poll() is KVPoll.TRANSFERRING for receiver in receivers))
        pace = Pace()
        killer = threading.Timer(0.2, doomed.kill)
        killer.start()
        polled_until_ended(pace, receivers)
        killer.join(SOON_S)
        pace.check()
        assert len(pace.seconds["poll"]) > 20 * 10 and decode.healthy
        for receiver in receivers:
            assert "its process is gone" in lost(receiver) or "path" in lost(receiver)
            pace(receiver.clear)
        wait_until(lambda: decode.stats().peers == 0)
        if fences(crew.backend, gone=True):
            stores_empty(decode)
        pace.check()


# --- C57: nothing is remembered as bad


@pytest.mark.parametrize("broken", ["", "at once", "late"], ids=["a write fails", "a write breaks the path", "told late"])
def test_c57_after_a_failed_write_the_next_room_is_tried(backend: str, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "late":  # the progress thread gets no turn between the room's failure and the news that the path is broken
        tell = Core._path_broken
        monkeypatch.setattr(Core, "_path_broken", lambda *news: (threading.Event().wait(0.5), tell(*news)))
    with duo(backend, liveness_s=2.0, ticket_s=3.0, quarantine_s=6.0) as pair:
        pair.pair().plan.fail("remote error", times=1, peer_broken=bool(broken))
        sender, receiver = pair.open()
        receiver.receive([1])
        sender.send([2], last=True)
        for handle in (sender, receiver):
            ended(handle, KVPoll.FAILED)
            assert handle.failure is not None and "remote error" in handle.failure.reason
        pair.transfer([3], [4])
        for handle in (sender, receiver):
            handle.clear()
        pair.stores_empty()
        for side in (pair.prefill, pair.decode):
            wait_until(lambda side=side: side.stats().peers == 1)  # type: ignore[misc]
            assert side.stats().stores["departed_peers"] == 0, "the mark is gone"


def test_c57_a_peer_that_was_only_busy_for_long_is_tried_again(crew: Crew) -> None:
    """Decode is stopped for longer than silence may last; the first room after that succeeds."""
    with crew.lend(2) as (prefill, decode):
        pools = [PoolSpec()]
        prefill.start("prefill", pools, limits=BRIEF.model_dump())
        decode.start("decode", pools, limits=BRIEF.model_dump())
        for turn in range(2):
            sender, receiver = prefill.sender(number()), None
            receiver = decode.receiver(sender.room, prefill)
            receiver.receive([1])
            sender.send([2], last=True)
            assert (receiver.wait(SOON_S), sender.wait(SOON_S)) == ("SUCCESS", "SUCCESS")
            if not turn:
                decode.freeze()
                wait_until(lambda: prefill.work("stats")["peers"] == 0)
                decode.thaw()
        assert prefill.work("stats")["stores"]["departed_peers"] == 0


# --- C58: peers that come and go


class Knocks:
    """Ports that somebody once listened on: whether anybody still comes."""

    def __init__(self) -> None:
        self._listeners: list[socket.socket] = []

    def listen(self, port: int) -> None:
        listener = socket.create_server(("127.0.0.1", port))
        listener.setblocking(False)
        self._listeners.append(listener)

    def count(self) -> int:
        """Who has come since this was asked last."""
        met = 0
        for listener in self._listeners:
            try:
                while True:
                    listener.accept()[0].close()
                    met += 1
            except BlockingIOError:
                pass
        return met

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()


def held(one: KVManager) -> dict[str, int]:
    """What is kept for peers, sockets and threads with it."""
    stats = one.stats()
    stores = {name: stats.stores[name] for name in ("peers", "links", "departed_peers", "groups", "directory_groups")}
    return stores | {"sockets": stats.sockets, "threads": len(own_threads())}


@pytest.mark.parametrize(
    ("told", "role"),
    [
        pytest.param(True, "decode", id="decode closed"),
        pytest.param(False, "prefill", id="prefill vanished"),
        pytest.param(True, "prefill", id="prefill closed", marks=pytest.mark.slow),
        pytest.param(False, "decode", id="decode vanished", marks=pytest.mark.slow),
    ],
)
def test_c58_fifty_restarts_leave_no_more_than_the_first(told: bool, role: str) -> None:
    """A peer starts again and again with new ports, after a farewell or without a word; at its old ports nobody is looked for."""
    times = limits(liveness_s=1.0, send_s=0.5, orphan_s=0.3, drain_s=0.05)
    arrays = {"prefill": memory(8, seed=3), "decode": memory(8)}
    other = "decode" if role == "prefill" else "prefill"
    with ExitStack() as stack:
        knocks = Knocks()
        stack.callback(knocks.close)
        lasting = stack.enter_context(manager(other, arrays[other], limits=times))
        bootstrap = {"bootstrap_port": free_port()} if role == "prefill" else {}
        first: dict[str, int] = {}
        for turn in range(51):
            ports = free_port(), free_port()
            with (
                manager(role, arrays[role], limits=times, port=ports[0], backend_options={"port": ports[1]}, **bootstrap) as passing,
                ControlTap(passing) as tap,
            ):
                prefill, decode = (passing, lasting) if role == "prefill" else (lasting, passing)
                room = number()
                with prefill.sender(room) as sender, decode.receiver(room, prefill.address) as receiver:
                    receiver.receive([1])
                    sender.send([2], last=True)
                    ended(receiver, KVPoll.SUCCESS, 2 * SOON_S)
                    ended(sender, KVPoll.SUCCESS)
                stores_empty(prefill)
                stores_empty(decode)
                if not turn:
                    first = held(lasting) | {"threads": len(own_threads())}
                if turn == 50:
                    wait_until(lambda: lasting.stats().peers == 1)
                    assert {name: size for name, size in held(lasting).items() if size > first[name]} == {}
                    knocks.count()  # of the time until they were missed
                    stays(lambda: knocks.count() == 0, 2.5)  # libzmq tries again every second
                    break
                if not told:
                    tap.drop()
            for port in ports:
                knocks.listen(port)


# --- C59: an engine that tells of a death by raising


@pytest.mark.parametrize("hook", ["kvcore_poll", "kvcore_transfer", "kvcore_connect", "kvcore_endpoint"])
def test_c59_what_an_engine_raises_of_a_peer_costs_its_rooms_only(backend: str, hook: str) -> None:
    """Its status call says that the remote has gone, or the handshake fails: the rooms with that peer fail, and no poll raises."""
    error = ConnectionError("remote disconnected")
    with duo(backend) as pair, decoding_like(pair) as other:
        pair.pair()
        pace, rooms = Pace(), [number() for _ in range(5)]
        senders = [pair.prefill.sender(room) for room in rooms]
        if hook in ("kvcore_connect", "kvcore_endpoint"):
            pair.plan.raise_(error, hook=hook)
        for room in rooms:
            if hook not in ("kvcore_connect", "kvcore_endpoint"):
                pair.plan.raise_(error, hook=hook, room=room)
        bad_decode, good_decode = (other, pair.decode) if hook in ("kvcore_connect", "kvcore_endpoint") else (pair.decode, other)
        if good_decode is other:
            moved(pair.prefill, other)
        receivers = [bad_decode.receiver(room, pair.prefill.address) for room in rooms]
        for page, (sender, receiver) in enumerate(zip(senders, receivers, strict=True)):
            receiver.receive([page])
            sender.send([page], last=True)
        moved(pair.prefill, good_decode)
        polled_until_ended(pace, receivers)
        for receiver in receivers:
            assert receiver.failure is not None and "remote disconnected" in receiver.failure.reason, receiver.failure
        pace.check()
        assert pair.prefill.healthy and bad_decode.healthy
        pair.plan.heal()
        moved(pair.prefill, bad_decode)
        for handle in (*senders, *receivers):
            handle.clear()


@contextmanager
def decoding_like(pair: Duo) -> Iterator[KVManager]:
    """Another decode manager for the same prefill."""
    with manager("decode", memory(32), backend=pair.backend) as other:
        yield other


# --- C60: what is kept for a peer goes with it


class Forgotten:
    """An observer that counts how often the engine was told to forget a peer, and what it was asked to send after that."""

    def __init__(self) -> None:
        self.peers: list[str] = []
        self.transfers = 0

    @hookimpl(tryfirst=True)
    def kvcore_disconnect(self, peer: str) -> None:
        self.peers.append(peer)

    @hookimpl(tryfirst=True)
    def kvcore_transfer(self) -> None:
        self.transfers += bool(self.peers)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_c60_a_dead_peer_is_forgotten_once_without_another_coming(backend: str, side: str) -> None:
    """The engine is told so while nothing else happens; what was opened with the peer starts nothing any more."""
    with duo(backend, liveness_s=1.0, ticket_s=2.0, quarantine_s=4.0) as pair:
        pair.pair()
        here, there = (pair.prefill, pair.decode) if side == "prefill" else (pair.decode, pair.prefill)
        forgotten = Forgotten()
        here.add_observer(forgotten)
        rooms = [at(pair, moment) for moment in ("joined", "published")]
        with ControlTap(there) as tap:
            tap.drop()
            for handles in rooms:
                lost(handles[side == "decode"])
            wait_until(lambda: forgotten.peers == [there.instance])
            for (sender, receiver), pages in zip(rooms, ([1], [2]), strict=True):
                sender.send(pages, last=True) if side == "prefill" else receiver.receive(pages)
            wait_until(lambda: here.stats().peers == here.stats().stores["links"] == 0)
            stays(lambda: forgotten.peers == [there.instance], 1.2)  # a few beats
            assert not forgotten.transfers and all(handles[side == "decode"].poll() is KVPoll.FAILED for handles in rooms)
        for handle in itertools.chain(*rooms):
            handle.clear()
        pair.transfer([1], [2])  # what comes back is a new peer
        pair.stores_empty()


# --- C62: connections that are cut without a word


@contextmanager
def relayed(**changes: float) -> Iterator[tuple[Duo, Relay]]:
    """A pair whose control messages pass a relay."""
    times = limits(**{"liveness_s": 1.0, "orphan_s": 0.5, "ticket_s": 2.0, "quarantine_s": 4.0, **changes})
    ports = {"port": free_port(), "bootstrap_port": free_port()}
    host, bind = "127.0.0.3", "127.0.0.4"
    source, target = memory(32, seed=7), memory(32)
    with (
        Relay((host, ports["bootstrap_port"]), (bind, ports["bootstrap_port"])),
        Relay((host, ports["port"]), (bind, ports["port"])) as control,
        manager("prefill", source, host=host, bind=bind, limits=times, **ports) as prefill,
        manager("decode", target, limits=times) as decode,
    ):
        yield Duo(prefill, decode, source, target).pair(), control


def test_c62_the_first_room_after_connections_were_cut_while_idle_succeeds() -> None:
    """The relay passes nothing on over the connections that there are, and tells nobody; by the next room both sides have missed each
    other."""
    with relayed() as (pair, control):
        for _ in range(2):
            control.silence()
            wait_until(lambda: pair.prefill.stats().peers == pair.decode.stats().peers == 0)
            pair.transfer([1, 2], [3, 4])
        assert control.met == 3


@pytest.mark.parametrize("after_s", [0.0, 0.4])
def test_c62_a_room_right_after_the_cut_succeeds_or_fails_fast_and_the_next_succeeds(after_s: float) -> None:
    with relayed() as (pair, control):
        control.silence()
        stays(lambda: True, after_s)
        sender, receiver = pair.open()
        begun = time.monotonic()
        receiver.receive([5])
        sender.send([6], last=True)
        while not receiver.wait(SOON_S).terminal:
            pass
        assert time.monotonic() - begun < 1.0 + 4.0, "long before any waiting limit"
        if receiver.poll() is KVPoll.FAILED:
            lost(receiver)
        sender.clear()
        receiver.clear()
        pair.transfer([1, 2], [3, 4])
        pair.stores_empty()


def test_c62_a_connection_that_is_refused_once_costs_no_room() -> None:
    with relayed(liveness_s=4.0, ticket_s=5.0, quarantine_s=10.0) as (pair, control):
        rooms = [at(pair, moment) for moment in ("opened", "joined", "published")]
        control.refuses = 1
        control.cut()
        wait_until(lambda: control.met == 3 and not control.refuses, what="dialled again, and once more")
        for sender, receiver in rooms:
            receiver.receive([3, 8, 1]) if sender is not rooms[2][0] else None
            sender.send([3, 8, 1], last=True)
            ended(receiver, KVPoll.SUCCESS)
            ended(sender, KVPoll.SUCCESS)
            sender.clear()
            receiver.clear()


# --- C63: a side that is stopped in order


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("in_time", [True, False], ids=["they end in time", "drain_s passes"])
def test_c63_close_lets_five_transfers_end_or_says_so(backend: str, in_time: bool, side: str) -> None:
    """No new room is accepted meanwhile; then threads, sockets and ports are gone, and close may be called again."""
    before = own_threads()
    with duo(backend, drain_s=SOON_S if in_time else 0.4) as pair:
        hold = pair.pair().plan.hold()
        rooms = [pair.open() for _ in range(5)]
        for page, (sender, receiver) in enumerate(rooms):
            receiver.receive([page])
            sender.send([page], last=True)
        wait_until(lambda: all(handle.poll() is KVPoll.TRANSFERRING for handle in itertools.chain(*rooms)))
        closing = pair.prefill if side == "prefill" else pair.decode
        ports = [closing.control.port] + ([int(closing.address.rpartition(":")[2])] if side == "prefill" else [])
        closer = threading.Thread(target=closing.close)
        closer.start()
        wait_until(lambda: not closing.healthy)
        with pytest.raises(RoomError, match="closing"):
            opens(closing, pair)
        if in_time:
            hold.release()
        closer.join(2 * SOON_S)
        assert not closer.is_alive()
        for handle in itertools.chain(*rooms):
            ended(handle, KVPoll.SUCCESS if in_time else KVPoll.FAILED)
            if not in_time:
                assert handle.failure is not None
                assert (handle.failure.code, handle.failure.side) == (FailureCode.SHUTDOWN, side), handle.failure
        closing.close()
        assert closing.stats().sockets == 0
        for port in ports:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), SOON_S)
        hold.release()
    wait_until(lambda: own_threads() <= before, what="no thread is left")


def opens(owner: KVManager, pair: Duo) -> Sender | Receiver:
    """A room on the side that closes."""
    return owner.sender(number()) if owner is pair.prefill else owner.receiver(number(), pair.prefill.address)


# --- cut off: the network is gone, and no connection is told

CUT = {"liveness_s": 2.0, "send_s": 2.0, "ticket_s": 3.0, "quarantine_s": 6.0, "orphan_s": 0.5}


@contextmanager
def apart(**changes: float) -> Iterator[tuple[Cable, Child, Child]]:
    """A prefill and a decode process on two hosts."""
    times = limits(**{**CUT, **changes}).model_dump()
    with cable() as found, ExitStack() as stack:
        sides = []
        for end, role in zip(found.ends, ("prefill", "decode"), strict=True):
            child = Child(namespace=end.namespace)
            stack.callback(child.end)
            sides.append(child.start(role, limits=times, host=end.address))
        yield found, sides[0], sides[1]


def across(prefill: Child, decode: Child, timeout_s: float = SOON_S) -> None:
    """A room between two hosts succeeds."""
    sender, receiver = prefill.sender(number()), None
    receiver = decode.receiver(sender.room, prefill)
    receiver.receive([3, 4])
    sender.send([1, 2], last=True)
    assert (receiver.wait(timeout_s), sender.wait(timeout_s)) == ("SUCCESS", "SUCCESS"), receiver.failure
    assert decode.digest([3, 4]) == prefill.digest([1, 2])
    sender.clear()
    receiver.clear()


def in_flight(prefill: Child, decode: Child) -> list[tuple[ChildHandle, ChildHandle]]:
    """Three rooms, each as far as another: joined, published, written to while a chunk is held back."""
    rooms = []
    for moment in ("joined", "published", "transferring"):
        sender = prefill.sender(number())
        receiver = decode.receiver(sender.room, prefill)
        assert receiver.until("WAITING_FOR_INPUT") == "WAITING_FOR_INPUT"
        if moment != "joined":
            receiver.receive([5, 6])
            assert sender.until("WAITING_FOR_INPUT") == "WAITING_FOR_INPUT"
        if moment == "transferring":
            sender.send([5])
            assert receiver.until("TRANSFERRING") == "TRANSFERRING"
        rooms.append((sender, receiver))
    return rooms


@pytest.mark.parametrize("end", [0, 1], ids=["at prefill", "at decode"])
def test_p2_both_sides_of_a_cut_cable_miss_each_other_and_meet_again(end: int) -> None:
    """No FIN and no RST is seen: each connection is as it was until its side gives it up. Rooms fail on both sides; when the cable is
    there again a new one succeeds, and nothing was started again."""
    with apart() as (between, prefill, decode):
        across(prefill, decode)
        rooms = in_flight(prefill, decode)
        before = {child: connections(child.pid) for child in (prefill, decode)}
        assert all(before.values()) and {one.state for one in before[decode]} == {ESTABLISHED}
        between.pull(between.ends[end])
        cut = time.monotonic()
        while time.monotonic() - cut < CUT["liveness_s"] / 2:
            assert all(before[child] <= connections(child.pid) for child in before), "nobody was told"
            threading.Event().wait(0.1)
        for handle in itertools.chain(*rooms):
            assert handle.wait(CUT["liveness_s"] + SOON_S) == "FAILED"
            assert (handle.failure.code, "silent for liveness_s" in handle.failure.text) == ("peer_lost", True)
        assert time.monotonic() - cut < CUT["liveness_s"] + 4.0
        for child in (prefill, decode):
            assert child.work("stats")["peers"] == 0
        between.plug(between.ends[end])
        across(prefill, decode, 2 * SOON_S)
        for handle in itertools.chain(*rooms):
            assert handle.safe(CUT["quarantine_s"] + SOON_S)
            handle.clear()
        for child in (prefill, decode):
            wait_until(lambda child=child: child.work("held") == {})  # type: ignore[misc]


def test_p2_a_cable_that_is_out_for_less_than_liveness_s_costs_nothing() -> None:
    with apart(liveness_s=8.0, send_s=8.0, ticket_s=8.0, quarantine_s=20.0) as (between, prefill, decode):
        across(prefill, decode)
        rooms = in_flight(prefill, decode)
        between.pull(between.ends[0])
        rooms[1][0].send([5])  # into the void
        stays(lambda: all(handle.poll() != "FAILED" for handle in itertools.chain(*rooms)), 1.5)
        between.plug(between.ends[0])
        rooms[0][1].receive([7])
        for (sender, receiver), pages in zip(rooms, ([7], [6], [6]), strict=True):
            sender.send(pages, last=True)
            assert (receiver.wait(SOON_S), sender.wait(SOON_S)) == ("SUCCESS", "SUCCESS"), receiver.failure
        assert decode.digest([5, 6, 7]) == prefill.digest([5, 6, 7])
