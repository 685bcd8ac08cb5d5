"""Crowds, floods and limits reached: bounded everywhere, refused with the limit named, and the others are served."""

from __future__ import annotations

import logging
import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import pytest
import zmq
from kvcore_conformance.stage.driver import Child
from kvcore_conformance.stage.footprint import Footprint
from kvcore_conformance.stage.noise import listening
from kvcore_conformance.stage.waits import until

from benchmarks.fuzz.liars import LyingDecode
from benchmarks.fuzz.wards import UP_S, move
from kvcore import KVPoll, peers, rooms
from kvcore.backends import local
from kvcore.faults import ControlTap
from kvcore.protocol.messages import Join
from kvcore.wire import Hello, Letter, Refuse, encode
from tests.cases.ports import answer, settled, zmq_client
from tests.helpers import SOON_S, Duo, duo, manager, memory, number, own_threads, wait_until

CROWD = 300
MOST, FEW = 96, 60
"""Descriptors that a process may have, and more than it needs."""


def hello_of(tap: ControlTap) -> Hello:
    return next(seen.letter.body for seen in tap.seen if isinstance(seen.letter.body, Hello))


def usual_s(pair: Duo, count: int = 20) -> float:
    """Seconds that a room takes, of so many that pass one after the other: those of the one in the middle."""
    took = []
    for turn in range(count):
        begun = time.monotonic()
        pair.transfer([turn % 31], [turn % 29])
        took.append(time.monotonic() - begun)
    return sorted(took)[count // 2]


# --- crowds


@pytest.mark.parametrize("waiting", [500, pytest.param(5000, marks=pytest.mark.slow)])
def test_rooms_that_wait_hold_no_other_room_up(waiting: int) -> None:
    """So many wait on each side for the other side to come; 20 rooms pass about as if nobody waited."""
    with duo(bootstrap_s=300.0, input_s=300.0, orphan_s=300.0, quarantine_s=600.0) as pair:
        pair.pair()
        alone = usual_s(pair)
        senders = [pair.prefill.sender(number()) for _ in range(waiting)]
        receivers = [pair.decode.receiver(number(), pair.prefill.address) for _ in range(waiting)]
        wait_until(lambda: pair.prefill.stats().stores["waiting_joins"] >= waiting, 120.0)
        wait_until(lambda: not (pair.prefill.control.calls or pair.decode.control.calls), 60.0)
        crowded = usual_s(pair)
        assert crowded < 10 * alone + 0.5, f"{crowded:.3f} s with {waiting} rooms a side that wait, {alone:.3f} s without"
        assert {room.poll() for room in (*senders, *receivers)} == {KVPoll.BOOTSTRAPPING}
        assert pair.prefill.healthy and pair.decode.healthy
        for handle in (*senders, *receivers):
            handle.clear()
        pair.transfer([1], [2])


def test_many_peers_on_one_prefill_are_served_and_forgotten_when_they_go() -> None:
    """Raw clients pair properly, and join a room each; good rooms pass, and of those that went nothing is left."""
    with duo(liveness_s=30.0, quarantine_s=60.0) as pair, ControlTap(pair.prefill) as tap, zmq.Context() as context, ExitStack() as stack:
        pair.pair()
        threads, descriptors = len(own_threads()), len(os.listdir("/proc/self/fd"))
        crowd = []
        for _ in range(CROWD):
            one = LyingDecode(context, f"127.0.0.1:{pair.prefill.control.port}", hello_of(tap), pair.prefill.instance, ())
            stack.callback(one.close)
            one.pair()
            one.send([encode(one.scene.source, pair.prefill.instance, Join(number(), 0, 1, 0))])
            crowd.append(one)
        wait_until(lambda: pair.prefill.stats().peers == CROWD + 1)
        wait_until(lambda: all(one.alive() for one in crowd), 30.0)
        pair.transfer([1, 2], [3, 4])
        for one in crowd:
            one.leave()
        wait_until(lambda: pair.prefill.stats().peers == 1 and not pair.prefill.stats().stores["departed_peers"], 30.0)
        pair.stores_empty()
        stack.close()
        wait_until(lambda: len(own_threads()) <= threads and len(os.listdir("/proc/self/fd")) <= descriptors + 10, 30.0)
        pair.transfer([1, 2], [3, 4])


# --- few file descriptors


@contextmanager
def two_processes() -> Iterator[tuple[Child, Child]]:
    children = Child(), Child()
    try:
        prefill, decode = children
        for child in children:
            child.work("cpu_s", waits_s=UP_S)
        yield prefill.start("prefill", admin="127.0.0.1:0"), decode.start("decode")
    finally:
        for child in children:
            child.end()


def test_a_process_without_descriptors_says_so_once_and_serves_again_when_some_are_free() -> None:
    with two_processes() as (prefill, decode):
        move(prefill, decode)
        resource.prlimit(prefill.pid, resource.RLIMIT_NOFILE, (MOST, MOST))
        for address in listening(prefill.pid):
            host, _, port = address.rpartition(":")
            with ExitStack() as flood:
                for _ in range(MOST):
                    flood.enter_context(socket.create_connection((host, int(port)), SOON_S))
                until(lambda: bool(prefill.logged("no file descriptor is left")), "it says so", SOON_S)
                move(prefill, decode)
            until(lambda: Footprint.of(prefill.pid).descriptors < FEW, "they are free again", 3 * SOON_S)
            move(prefill, decode)
        said = prefill.logged("no file descriptor is left")
        assert len(said) == 1 and f"may have {MOST}" in said[0]
        assert prefill.work("log_lines") < 40


# --- every limit


def test_a_join_above_max_orphans_is_dropped_and_the_limit_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(rooms, "MAX_ORPHANS", 50)
    with duo(orphan_s=30.0, quarantine_s=60.0) as pair, ControlTap(pair.prefill) as tap:
        pair.pair()
        for room in range(1 << 40, (1 << 40) + 2000):
            tap.inject(Letter(1, pair.decode.instance, pair.prefill.instance, Join(room, 0, 1, 0)))
        settled(pair.prefill)
        assert pair.prefill.stats().stores["waiting_joins"] == 50
        said = [line for line in caplog.messages if "dropped: 50 unknown rooms wait already" in line]
        assert 1 <= len(said) <= 3
        pair.transfer([1], [2])


def hellos(pair: Duo, tap: ControlTap, count: int) -> list[object]:
    """What so many instances that nobody knows are answered."""
    found = []
    good = hello_of(tap)
    with zmq_client(f"127.0.0.1:{pair.prefill.control.port}") as client:
        for turn in range(count):
            me = msgspec.structs.replace(good.me, instance=f"decode-of-many-{turn}")
            client.send(encode(me.instance, "", msgspec.structs.replace(good, me=me, pairing=turn)))
            found.append(answer(client).body)
    return found


def test_an_instance_above_max_peers_is_refused_with_the_limit_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MAX_PEERS", 4)
    with duo(liveness_s=30.0, quarantine_s=60.0) as pair, ControlTap(pair.prefill) as tap:
        pair.pair()
        refused = [body for body in hellos(pair, tap, 6) if isinstance(body, Refuse)]
        assert len(refused) == 3 and all("is paired with 4 instances, the most it takes" in body.text for body in refused)
        assert pair.prefill.stats().peers == 4
        pair.transfer([1], [2])


def test_hellos_that_are_refused_are_answered_and_few_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvcore"), duo() as pair, ControlTap(pair.prefill) as tap:
        pair.pair()
        good = hello_of(tap)
        with zmq_client(f"127.0.0.1:{pair.prefill.control.port}") as client:
            for turn in range(3000):
                me = msgspec.structs.replace(good.me, instance=f"decode-{turn}", backend="another")
                client.send(encode(me.instance, "", msgspec.structs.replace(good, me=me, pairing=turn)))
            assert all(isinstance(answer(client).body, Refuse) for _ in range(500))
        settled(pair.prefill)
        said = [line for line in caplog.messages if "refused to pair" in line]
        assert 10 < len(said) < 200
        pair.transfer([1], [2])


def test_of_connections_that_are_not_let_in_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data port of ``local``: a crowd that says nothing holds few threads, and does not keep a peer out."""
    monkeypatch.setattr(local, "MAX_STRANGERS", 5)
    source, target = memory(32, seed=7), memory(32)
    with (
        manager("prefill", source, backend_options={"connect_s": 60.0}) as prefill,
        manager("decode", target, backend_options={"connect_s": 60.0}) as decode,
        ControlTap(decode) as tap,
    ):
        pair = Duo(prefill, decode, source, target).pair()
        _, port, _ = msgspec.json.decode(hello_of(tap).data, type=tuple[str, int, bytes])
        threads = len(own_threads())
        with ExitStack() as crowd:
            silent = [crowd.enter_context(socket.create_connection(("127.0.0.1", port), SOON_S)) for _ in range(40)]
            wait_until(lambda: sum(map(hung_up, silent)) == 35)
            assert not any(map(hung_up, silent[35:]))
            wait_until(lambda: len(own_threads()) <= threads + 5)
            with manager("prefill", source) as another:
                Duo(another, decode, source, target).transfer([1], [2])
            pair.transfer([3], [4])


def hung_up(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
