"""The bootstrap service and its clients, over real HTTP on loopback."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import logging
import pickle
import queue
import random
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from aiohttp import web
from kvcore_conformance.stage.driver import free_port

from kvcore.addresses import Address
from kvcore.bootstrap import MAX_BODY_BYTES, Group, LookupFailure, RankInfo
from kvcore.bootstrap_client import Directory, Registrar
from kvcore.bootstrap_service import BootstrapService, RankTable
from kvcore.errors import ConfigError
from kvcore.http import HttpThread, Refusal
from kvcore.layouts import Place

LIMIT_S = 20.0


def rank_info(rank: int = 0, size: int = 1, *, instance: str = "", order: int = 1, control: str = "127.0.0.1:7000") -> RankInfo:
    place = Place(tp_size=size, tp_rank=rank)
    return RankInfo(rank, size, control, instance or f"instance-{rank}", order, "local", place)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_S:g} s: {what}"
        pause.wait(0.01)


def ask(
    address: Address, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, object]]:
    """One request by another client than ours; status and JSON."""
    connection = http.client.HTTPConnection(address.host, address.port, timeout=LIMIT_S)
    try:
        connection.request(method, path, body=body, headers=headers or {})
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text.startswith(b"{") else {"text": text}
    finally:
        connection.close()


def register(address: Address, info: RankInfo) -> int:
    body = msgspec.json.encode(info)
    return ask(address, "POST", "/v1/ranks", body)[0]


class Results:
    """Collects what a lookup delivers."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Group | LookupFailure] = queue.Queue()

    def __call__(self, outcome: Group | LookupFailure) -> None:
        self._queue.put(outcome)

    def next(self) -> Group | LookupFailure:
        return self._queue.get(timeout=LIMIT_S)

    def count(self) -> int:
        return self._queue.qsize()


@pytest.fixture
def thread() -> Iterator[HttpThread]:
    thread = HttpThread()
    thread.start()
    yield thread
    thread.stop()


@pytest.fixture
def other() -> Iterator[HttpThread]:
    thread = HttpThread("kvcore-http-other")
    thread.start()
    yield thread
    thread.stop()


def serve(thread: HttpThread, size: int, host: str = "127.0.0.1", port: int = 0) -> Address:
    return Address(host, thread.serve(BootstrapService(size).app(), host, port, "bootstrap_port"))


# --- the group becomes ready


def test_c71_a_group_is_not_ready_until_its_last_rank_is_there(thread: HttpThread, other: HttpThread) -> None:
    address = serve(other, 4)
    for rank in range(3):
        assert register(address, rank_info(rank, 4)) == 200
    status, answer = ask(address, "GET", "/v1/group")
    assert (status, answer["registered"], answer["missing"]) == (503, [0, 1, 2], [3])
    assert "not ready" in str(answer["error"])
    status, answer = ask(address, "GET", "/v1/ranks/3")
    assert (status, answer["error"]) == (503, "rank 3 is not registered yet")

    directory, results = Directory(thread), Results()
    before = time.monotonic()
    directory.lookup(str(address), results)
    assert time.monotonic() - before < 2
    until(lambda: "missing: 3" in (directory.last_error(str(address)) or ""), "the directory heard what is missing")
    assert results.count() == 0

    assert register(address, rank_info(3, 4)) == 200
    group = results.next()
    assert group == Group(4, tuple(rank_info(rank, 4) for rank in range(4)))
    assert directory.last_error(str(address)) is None
    assert ask(address, "GET", "/v1/ranks/3")[1]["instance"] == "instance-3"
    assert ask(address, "GET", "/health") == (200, {"status": "ok", "size": 4, "registered": 4})


def test_c72_ranks_register_when_the_service_starts_after_them(thread: HttpThread, other: HttpThread) -> None:
    address = Address("127.0.0.1", free_port())
    registrars = [Registrar(thread, address, rank_info(rank, 4), limit_s=LIMIT_S) for rank in range(4)]
    with ThreadPoolExecutor(4) as pool:
        starts = [pool.submit(registrar.start) for registrar in registrars]
        until(lambda: all(registrar.last_error == "Connection refused" for registrar in registrars), "each rank was refused once")
        serve(other, 4, port=address.port)
        for start in starts:
            start.result(LIMIT_S)
    assert ask(address, "GET", "/v1/group")[0] == 200
    assert all(registrar.last_error is None for registrar in registrars)


def test_c72_start_ends_with_an_error_if_the_service_never_starts(thread: HttpThread) -> None:
    address = Address("127.0.0.1", free_port())
    before = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        Registrar(thread, address, rank_info(), limit_s=0.5).start()
    assert 0.4 < time.monotonic() - before < 5
    assert str(address) in str(caught.value)
    assert "Connection refused" in str(caught.value)


def test_c72_a_service_that_accepts_but_never_answers_ends_the_start_too(thread: HttpThread) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address("127.0.0.1", silent.getsockname()[1])
        with pytest.raises(ConfigError, match=str(address)):
            Registrar(thread, address, rank_info(), limit_s=0.3).start()


def test_c73_a_wrong_port_is_a_loud_error_on_both_sides(thread: HttpThread, other: HttpThread) -> None:
    wrong = Address("127.0.0.1", other.serve(web.Application(), "127.0.0.1", 0, "something else"))
    before = time.monotonic()
    with pytest.raises(ConfigError, match=f"{wrong} .answered 404: POST /v1/ranks: Not Found") as caught:
        Registrar(thread, wrong, rank_info(), limit_s=LIMIT_S).start()
    assert time.monotonic() - before < 5, "a definite answer is not waited for"
    assert "correct the setting bootstrap" in str(caught.value)

    results = Results()
    Directory(thread).lookup(str(wrong), results)
    failure = results.next()
    assert isinstance(failure, LookupFailure)
    assert str(wrong) in str(failure)
    assert "404" in failure.reason

    right = serve(other, 2)
    register(right, rank_info(0, 2))
    directory = Directory(thread)
    directory.lookup(str(right), results)
    until(lambda: "missing: 1" in (directory.last_error(str(right)) or ""), "the rank that went elsewhere is named")


@pytest.mark.parametrize("body", [b"", b"<html>hello</html>", b"{}", b'{"rank":0}', b"[1]"])
def test_c73_an_answer_of_something_else_is_no_registration_and_no_group(thread: HttpThread, other: HttpThread, body: bytes) -> None:
    async def always(_request: web.Request) -> web.Response:
        return await answer(body)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", always)
    address = Address("127.0.0.1", other.serve(app, "127.0.0.1", 0, "something else"))
    with pytest.raises(ConfigError, match=str(address)):
        Registrar(thread, address, rank_info(), limit_s=LIMIT_S).start()
    results = Results()
    Directory(thread).lookup(str(address), results)
    assert "not a group" in str(results.next())


async def answer(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status)


def test_a_rank_of_another_topology_is_refused_at_its_start(thread: HttpThread, other: HttpThread) -> None:
    address = serve(other, 2)
    with pytest.raises(ConfigError, match="says its group has 4 ranks, not 2"):
        Registrar(thread, address, rank_info(0, 4), limit_s=LIMIT_S).start()


def test_c61_ranks_come_back_when_the_service_restarts_empty(thread: HttpThread, other: HttpThread) -> None:
    address = serve(other, 3)
    registrars = [Registrar(thread, address, rank_info(rank, 3), period_s=0.1) for rank in range(3)]
    for registrar in registrars:
        registrar.start()
    assert ask(address, "GET", "/v1/group")[0] == 200
    other.stop()
    until(lambda: all(registrar.last_error for registrar in registrars), "the ranks noticed that the service is gone")

    second = HttpThread("kvcore-http-second")
    second.start()
    try:
        serve(second, 3, port=address.port)
        results = Results()
        Directory(thread).lookup(str(address), results)
        assert isinstance(results.next(), Group)
        until(lambda: not any(registrar.last_error for registrar in registrars), "the ranks know that they are registered again")
        for registrar in registrars:
            registrar.stop()
            registrar.stop()
    finally:
        second.stop()


def test_c61_a_superseded_rank_says_so_and_goes_on(thread: HttpThread, other: HttpThread, caplog: pytest.LogCaptureFixture) -> None:
    address = serve(other, 1)
    registrar = Registrar(thread, address, rank_info(order=1), period_s=0.05)
    registrar.start()
    assert register(address, rank_info(instance="newer", order=2)) == 200
    until(lambda: "no longer registered" in caplog.text, "the older instance was refused")
    assert "held by instance newer" in str(registrar.last_error)
    asked = other.bad_requests["bootstrap_port"]
    until(lambda: other.bad_requests["bootstrap_port"] > asked + 2, "it goes on asking")
    assert [record.levelname for record in caplog.records if "no longer registered" in record.message] == ["ERROR"]
    registrar.stop()


def test_c61_a_rank_restarted_with_a_slow_clock_waits_until_its_old_instance_has_expired(thread: HttpThread, other: HttpThread) -> None:
    service = BootstrapService(1, expiry_s=0.5)
    address = Address("127.0.0.1", other.serve(service.app(), "127.0.0.1", 0, "bootstrap_port"))
    assert register(address, rank_info(instance="old", order=2)) == 200
    Registrar(thread, address, rank_info(instance="new", order=1), limit_s=LIMIT_S).start()
    assert ask(address, "GET", "/v1/ranks/0")[1]["instance"] == "new"
    assert service.sizes() == {"bootstrap_ranks": 1, "bootstrap_rooms": 0}


# --- who holds a rank


def test_c111_the_rule_of_second_registrations() -> None:
    now = [0.0]
    table = RankTable(2, expiry_s=10, clock=lambda: now[0])
    first = rank_info(0, 2, instance="first", order=5)
    table.register(first)
    table.register(first)
    for other_info, reason in [
        (rank_info(0, 2, instance="older", order=4), "held by instance first"),
        (rank_info(0, 2, instance="equal", order=5), "held by instance first"),
        (rank_info(0, 2, instance="first", order=5, control="127.0.0.1:9"), "other facts"),
        (rank_info(0, 2, instance="first", order=6), "other facts"),
    ]:
        with pytest.raises(Refusal, match=reason) as caught:
            table.register(other_info)
        assert caught.value.status == 409
        assert table.get(0) == first
    newer = rank_info(0, 2, instance="newer", order=6)
    table.register(newer)
    assert table.get(0) == newer
    assert len(table) == 1


def test_c61_a_rank_that_registers_no_more_is_dropped_and_may_be_replaced_by_any() -> None:
    now = [0.0]
    table = RankTable(1, expiry_s=10, clock=lambda: now[0])
    table.register(rank_info(order=5))
    now[0] = 9.0
    table.register(rank_info(order=5))
    now[0] = 18.9
    assert table.group().size == 1
    now[0] = 19.0
    with pytest.raises(Refusal, match="0 of 1 ranks registered; missing: 0"):
        table.group()
    assert len(table) == 0
    table.register(rank_info(instance="restarted with a slow clock", order=1))
    assert len(table) == 1


@pytest.mark.parametrize("size", [0, -1, 1025])
def test_a_group_has_a_bounded_number_of_ranks(size: int) -> None:
    with pytest.raises(ConfigError, match="1 .. 1024 ranks"):
        RankTable(size)


@pytest.mark.parametrize("control", ["0.0.0.0:1", "[::]:1", "node", "::1:7000"])
def test_c78_no_rank_publishes_an_address_that_peers_cannot_use(control: str) -> None:
    with pytest.raises(ConfigError, match="control"):
        rank_info(control=control)


# --- bytes of any kind


def good(rank: int = 1, size: int = 2) -> dict[str, object]:
    place = {"tp_size": size, "tp_rank": rank}
    return {"rank": rank, "size": size, "control": "127.0.0.1:7001", "instance": "second", "order": 1, "backend": "local", "place": place}


GOOD = good()

WRONG_VALUES: list[object] = [None, True, -1, 1.5, [], {}, "", "a\nb", 2**64, "x" * 400]
BAD_BODIES = [
    b"",
    b"null",
    b"[]",
    b"{}",
    b"{",
    b'"text"',
    b"\xff\xfe\x00",
    b"[" * 60_000,
    b'{"x":' * 10_000,
    pickle.dumps(GOOD),
    json.dumps(GOOD).encode("utf-16"),
    json.dumps([GOOD]).encode(),
    *(json.dumps({name: value for name, value in GOOD.items() if name != left_out}).encode() for left_out in GOOD),
    *(json.dumps({**GOOD, name: value}).encode() for name in GOOD for value in WRONG_VALUES),
    json.dumps({**GOOD, "rank": 2}).encode(),
    json.dumps({**GOOD, "rank": 10**9}).encode(),
    json.dumps({**GOOD, "rank": "1"}).encode(),
    json.dumps({**GOOD, "size": 3}).encode(),
    json.dumps({**GOOD, "order": 1.0}).encode(),
    json.dumps({**GOOD, "control": "0.0.0.0:7001"}).encode(),
    b'{"order":' + b"9" * 20_000 + b"}",
]


def test_c111_wrong_bodies_are_refused_and_change_nothing(thread: HttpThread) -> None:
    address = serve(thread, 2)
    register(address, rank_info(0, 2))
    before = ask(address, "GET", "/v1/group")
    for body in BAD_BODIES:
        status, answer = ask(address, "POST", "/v1/ranks", body)
        assert status in (400, 413), body[:80]
        assert "\n" not in str(answer["error"])
    assert ask(address, "GET", "/v1/group") == before
    until(lambda: thread.bad_requests["bootstrap_port"] == len(BAD_BODIES), "each was counted")
    assert ask(address, "POST", "/v1/ranks", json.dumps({**GOOD, "of a later version": 1}).encode())[0] == 200
    assert ask(address, "GET", "/v1/group")[0] == 200


def test_c111_random_changes_to_a_good_body_never_break_the_service(thread: HttpThread) -> None:
    address = serve(thread, 2)
    chance = random.Random(111)
    good = json.dumps(GOOD).encode()
    for _ in range(300):
        body = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            body[chance.randrange(len(body))] = chance.randrange(256)
        assert ask(address, "POST", "/v1/ranks", bytes(body))[0] in (200, 400, 409)
    assert ask(address, "GET", "/health")[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v2/group", 404),
        ("GET", "/v1/ranks/2", 404),
        ("GET", "/v1/ranks/-1", 404),
        ("GET", "/v1/ranks/1e0", 404),
        ("GET", "/v1/ranks/%D9%A1", 404),
        ("GET", "/v1/ranks/" + "9" * 5000, 404),
        ("GET", "/v1/ranks/../../etc/passwd", 404),
        ("GET", "/v1/ranks", 405),
        ("DELETE", "/v1/ranks/0", 405),
        ("PUT", "/v1/group", 405),
        ("POST", "/health", 405),
        ("BREW", "/v1/group", 400),
    ],
)
def test_c111_unknown_paths_and_methods(thread: HttpThread, method: str, path: str, status: int) -> None:
    address = serve(thread, 2)
    assert ask(address, method, path)[0] == status
    until(lambda: thread.bad_requests == {"bootstrap_port": 1}, "the refusal was counted")
    assert ask(address, "GET", "/health")[0] == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_c111_huge_bodies_are_refused(thread: HttpThread, chunked: bool) -> None:
    address = serve(thread, 1)
    size = 32 * MAX_BODY_BYTES
    connection = http.client.HTTPConnection(address.host, address.port, timeout=LIMIT_S)
    body = (b" " * 4096 for _ in range(size // 4096)) if chunked else b" " * size
    try:
        connection.request(
            "POST", "/v1/ranks", body=body, encode_chunked=chunked, headers={"Transfer-Encoding": "chunked"} if chunked else {}
        )
        assert connection.getresponse().status == 413
    except (BrokenPipeError, ConnectionResetError):
        pass  # refused so early that the rest could not be sent
    finally:
        connection.close()
    until(lambda: thread.bad_requests["bootstrap_port"] == 1, "the refusal was counted")
    assert register(address, rank_info()) == 200


def test_c111_a_compressed_body_is_not_inflated(thread: HttpThread) -> None:
    address = serve(thread, 1)
    bomb = zlib.compress(b" " * 10_000_000)
    assert ask(address, "POST", "/v1/ranks", bomb, {"Content-Encoding": "deflate"})[0] == 400


def test_c111_a_body_that_never_ends_is_refused(thread: HttpThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore.http_io.HANDLER_S", 0.2)
    address = serve(thread, 1)
    with socket.create_connection((address.host, address.port), timeout=LIMIT_S) as sock:
        sock.sendall(b"POST /v1/ranks HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert sock.recv(65536).startswith(b"HTTP/1.1 408")
    assert register(address, rank_info()) == 200


def raw(address: Address, data: bytes) -> bytes:
    """Send bytes as they are and read until the server closes or is silent for a moment."""
    with socket.create_connection((address.host, address.port), timeout=LIMIT_S) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        received = b""
        try:
            while part := sock.recv(65536):
                received += part
        except ConnectionResetError:
            pass
        return received


def test_c111_what_is_not_http_is_refused_with_few_log_lines(thread: HttpThread, caplog: pytest.LogCaptureFixture) -> None:
    address = serve(thread, 1)
    chance = random.Random(7)
    junk = [b"", b"\r\n\r\n", b"GET", b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/ranks HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"\x00" * 10_000]
    junk += [
        b"GET / HTTP/1.1\r\nHost: " + b"a" * 100_000 + b"\r\n\r\n",
        b"POST /v1/ranks HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ]
    junk += [chance.randbytes(chance.randint(1, 5000)) for _ in range(100)]
    for data in junk:
        received = raw(address, data)
        assert not received or received.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), (data[:60], received[:60])
    until(lambda: thread.bad_requests["bootstrap_port"] > 50, "they were counted")
    assert len(caplog.records) < 5
    assert all("\n" not in record.getMessage() and record.exc_info is None for record in caplog.records)
    assert register(address, rank_info()) == 200


# --- the directory


class CountingServer:
    """Answers /v1/group as told and counts requests and connections."""

    def __init__(self, thread: HttpThread, host: str = "127.0.0.1") -> None:
        self.reply: tuple[int, bytes] = (503, b'{"error": "group not ready"}')
        self.requests = 0
        self.connections: set[object] = set()
        self.hosts: list[str] = []
        app = web.Application()
        app.router.add_get("/v1/group", self._group)
        self.address = Address(host, thread.serve(app, host, 0, "test"))

    async def _group(self, request: web.Request) -> web.Response:
        self.requests += 1
        self.hosts.append(request.host)
        assert request.transport is not None
        self.connections.add(request.transport.get_extra_info("peername"))
        return await answer(self.reply[1], self.reply[0])

    def ready(self) -> None:
        self.reply = (200, json.dumps({"size": 1, "ranks": [good(0, 1)]}).encode())


def test_c76_ten_thousand_lookups_cost_few_requests_and_connections(
    thread: HttpThread, other: HttpThread, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvcore")
    server, directory, results = CountingServer(other), Directory(thread), Results()
    address = str(server.address)

    def hammer(_worker: int) -> None:
        for _ in range(2500):
            directory.lookup(address, results)

    before = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(hammer, range(4)))
    assert time.monotonic() - before < 5
    until(lambda: server.requests >= 3, "the question is repeated")
    assert server.requests <= 100
    assert len(server.connections) <= 4
    assert directory.sizes() == {"lookups": 10_000, "questions": 1, "groups": 0}

    server.ready()
    groups = {id(results.next()) for _ in range(10_000)}
    assert len(groups) == 1
    assert directory.sizes() == {"lookups": 0, "questions": 0, "groups": 1}
    asked = server.requests
    for _ in range(1000):
        directory.lookup(address, results)
    for _ in range(1000):
        assert isinstance(results.next(), Group)
    assert server.requests == asked, "a cached group is not asked for"
    assert len(caplog.records) < 20


@pytest.mark.parametrize("status", [503, 404])
def test_c76_rooms_that_come_and_go_share_the_back_off(thread: HttpThread, other: HttpThread, status: int) -> None:
    server, directory, results = CountingServer(other), Directory(thread), Results()
    server.reply = (status, b'{"error": "no"}')
    begin = time.monotonic()
    while time.monotonic() - begin < 1.0:
        directory.drop(directory.lookup(str(server.address), results))
    assert 1 <= server.requests <= 20
    until(lambda: set(directory.sizes().values()) == {0}, "nothing is kept when nobody waits")


def test_back_off_doubles_to_a_second(thread: HttpThread, other: HttpThread) -> None:
    server, directory = CountingServer(other), Directory(thread)
    directory.lookup(str(server.address), Results())
    begin = time.monotonic()
    until(lambda: server.requests == 5, "0.1 + 0.2 + 0.4 + 0.8 seconds passed")
    assert 1.4 < time.monotonic() - begin < 4


def test_c74_no_call_raises_while_the_service_is_down(thread: HttpThread) -> None:
    directory, results = Directory(thread), Results()
    address = f"127.0.0.1:{free_port()}"
    calls: list[Callable[[], object]] = [
        lambda: directory.lookup(address, results),
        lambda: directory.last_error(address),
        lambda: directory.drop(1),
        lambda: directory.forget(address),
    ]
    for order in itertools.permutations(calls):
        for call in order:
            call()
    until(lambda: directory.last_error(address) == "Connection refused", "the reason is known")
    assert results.count() == 0
    for token in range(1, 100):
        directory.drop(token)
        directory.drop(token)
    assert directory.sizes()["lookups"] == 0
    until(lambda: directory.sizes()["questions"] == 0, "the question ends when nobody waits")
    assert directory.last_error(address) is None


def test_c74_a_dropped_lookup_is_not_answered(thread: HttpThread, other: HttpThread) -> None:
    server, directory = CountingServer(other), Directory(thread)
    dropped, kept = Results(), Results()
    token = directory.lookup(str(server.address), dropped)
    directory.lookup(str(server.address), kept)
    directory.drop(token)
    server.ready()
    assert isinstance(kept.next(), Group)
    assert dropped.count() == 0


@pytest.mark.parametrize("address", ["", "node", "::1:80", "http://127.0.0.1:1"])
def test_c74_an_address_that_is_none_is_a_failure_not_an_exception(thread: HttpThread, address: str) -> None:
    results = Results()
    Directory(thread).lookup(address, results)
    failure = results.next()
    assert isinstance(failure, LookupFailure)
    assert "prefill must be host:port" in failure.reason


@pytest.mark.parametrize(
    "ranks",
    [
        [],
        [GOOD],
        [good(0)] * 2,
        [good(0), good(1, 3)],
        [good(0), {**GOOD, "place": {"pp_size": 2, "pp_rank": 1}}],
        [{**GOOD, "control": "[::]:1"}],
        "x",
    ],
)
def test_a_group_that_is_not_whole_is_a_failure(thread: HttpThread, other: HttpThread, ranks: object) -> None:
    server, results = CountingServer(other), Results()
    server.reply = (200, json.dumps({"size": 2, "ranks": ranks}).encode())
    Directory(thread).lookup(str(server.address), results)
    assert "not a group" in str(results.next())


def test_an_endless_answer_is_a_failure(thread: HttpThread, other: HttpThread) -> None:
    server, results = CountingServer(other), Results()
    server.ready()
    server.reply = (200, b" " * (8 << 20) + server.reply[1])
    Directory(thread).lookup(str(server.address), results)
    assert "not a group" in str(results.next())


def test_a_failure_is_not_remembered(thread: HttpThread, other: HttpThread) -> None:
    server, directory, results = CountingServer(other), Directory(thread), Results()
    server.reply = (404, b"")
    directory.lookup(str(server.address), results)
    assert isinstance(results.next(), LookupFailure)
    server.ready()
    directory.lookup(str(server.address), results)
    assert isinstance(results.next(), Group)


def test_c53_a_forgotten_group_is_asked_for_again(thread: HttpThread, other: HttpThread) -> None:
    address, directory, results = serve(other, 1), Directory(thread), Results()
    register(address, rank_info(instance="old", order=1))
    directory.lookup(str(address), results)
    old = results.next()
    assert isinstance(old, Group)
    register(address, rank_info(instance="new", order=2))
    directory.lookup(str(address), results)
    assert results.next() == old
    directory.forget(str(address), old)
    directory.lookup(str(address), results)
    new = results.next()
    assert isinstance(new, Group)
    assert new.ranks[0].instance == "new"
    directory.forget(str(address), old)
    assert directory.sizes()["groups"] == 1, "only who used that very entry drops it"
    directory.forget(str(address))
    assert directory.sizes()["groups"] == 0


def test_the_number_of_cached_groups_is_bounded(thread: HttpThread, other: HttpThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore.bootstrap_client.MAX_CACHED_GROUPS", 2)
    server, directory, results = CountingServer(other, "0.0.0.0"), Directory(thread), Results()
    server.ready()
    for host in ("127.0.0.1", "127.0.0.2", "127.0.0.1", "127.0.0.3", "127.0.0.1"):
        directory.lookup(str(Address(host, server.address.port)), results)
        assert isinstance(results.next(), Group)
    assert server.requests == 3, "the one used last is kept"
    assert directory.sizes()["groups"] == 2


def test_a_callback_that_raises_stops_nobody(thread: HttpThread, other: HttpThread, caplog: pytest.LogCaptureFixture) -> None:
    server, directory, results = CountingServer(other), Directory(thread), Results()

    def broken(_outcome: Group | LookupFailure) -> None:
        raise ValueError("broken callback")

    directory.lookup(str(server.address), broken)
    directory.lookup(str(server.address), results)
    server.ready()
    assert isinstance(results.next(), Group)
    directory.lookup(str(server.address), broken)
    directory.lookup(str(server.address), results)
    assert isinstance(results.next(), Group)
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["broken callback"] * 2


def test_callbacks_run_on_the_http_thread_unless_the_group_is_known(thread: HttpThread, other: HttpThread) -> None:
    server, directory = CountingServer(other), Directory(thread)
    server.ready()
    names: queue.Queue[str] = queue.Queue()
    for name in ("kvcore-http", threading.current_thread().name):
        directory.lookup(str(server.address), lambda outcome: names.put(threading.current_thread().name))
        assert names.get(timeout=LIMIT_S) == name


def test_silent_services_hold_up_no_other(thread: HttpThread, other: HttpThread) -> None:
    silent = [socket.create_server(("127.0.0.1", 0)) for _ in range(5)]
    server, directory, results = CountingServer(other), Directory(thread), Results()
    server.ready()
    try:
        for sock in silent:
            directory.lookup(f"127.0.0.1:{sock.getsockname()[1]}", Results())
        begin = time.monotonic()
        directory.lookup(str(server.address), results)
        assert isinstance(results.next(), Group)
        assert time.monotonic() - begin < 2
    finally:
        for sock in silent:
            sock.close()


# --- addresses of each family


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]", "::1%1", "localhost"])
def test_c77_registration_and_lookup_in_each_family(thread: HttpThread, other: HttpThread, host: str) -> None:
    address = Address(host.strip("[]"), other.serve(BootstrapService(1).app(), host, 0, "bootstrap_port"))
    control = str(Address(address.host, 7000))
    Registrar(thread, address, rank_info(control=control), limit_s=LIMIT_S).start()
    results = Results()
    Directory(thread).lookup(str(address), results)
    group = results.next()
    assert isinstance(group, Group)
    assert str(group.ranks[0].address) == control


def test_c77_a_scope_reaches_the_system_as_it_was_written(thread: HttpThread, other: HttpThread) -> None:
    server, results = CountingServer(other, "::1"), Results()
    address = Address("::1%1", server.address.port)
    Directory(thread).lookup(str(address), results)
    until(lambda: server.hosts[:1] == [str(address)], "the service was asked under the scoped address")


@pytest.mark.parametrize(("bind", "hosts"), [("0.0.0.0", ["127.0.0.1"]), ("::", ["127.0.0.1", "[::1]"])])
def test_c78_a_service_bound_to_a_wildcard_is_reached_by_ranks_on_its_host(
    thread: HttpThread, other: HttpThread, bind: str, hosts: list[str]
) -> None:
    port = other.serve(BootstrapService(len(hosts)).app(), bind, 0, "bootstrap_port")
    for rank, host in enumerate(hosts):
        Registrar(thread, Address(host.strip("[]"), port), rank_info(rank, len(hosts)), limit_s=LIMIT_S).start()


def test_a_name_that_does_not_exist_is_asked_again_and_named(thread: HttpThread) -> None:
    directory = Directory(thread)
    directory.lookup("nowhere.invalid:80", Results())
    until(lambda: directory.last_error("nowhere.invalid:80") is not None, "the look-up failed")
    assert "\n" not in str(directory.last_error("nowhere.invalid:80"))


# --- the thread


def test_c80_a_port_in_use_is_named_with_its_setting(thread: HttpThread, other: HttpThread) -> None:
    address = serve(other, 1)
    with pytest.raises(ConfigError, match=f"bootstrap_port: port {address.port} of 127.0.0.1 is in use"):
        serve(thread, 1, port=address.port)
    assert register(address, rank_info()) == 200


def name_with(monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
    """Let every name have these addresses."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in hosts]
    monkeypatch.setattr("kvcore.http.socket.getaddrinfo", lambda *args, **kwargs: found)


def test_c77_a_name_is_served_on_all_its_addresses_under_one_port(thread: HttpThread, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        name_with(patch, "192.0.2.1", "127.0.0.2", "127.0.0.3")  # the first is none of this host's, like IPv6 where it is off
        port = thread.serve(BootstrapService(1).app(), "name", 0, "bootstrap_port")
    for host in ("127.0.0.2", "127.0.0.3"):
        assert ask(Address(host, port), "GET", "/health")[0] == 200


def test_c80_a_port_in_use_on_one_address_of_a_name_is_an_error(thread: HttpThread, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.3", 0)) as taken, monkeypatch.context() as patch:
        name_with(patch, "127.0.0.2", "127.0.0.3")
        with pytest.raises(ConfigError, match="is in use"):
            thread.serve(BootstrapService(1).app(), "name", taken.getsockname()[1], "bootstrap_port")


@pytest.mark.parametrize("host", ["192.0.2.1", "nowhere.invalid"])
def test_an_address_of_another_host_cannot_be_served(thread: HttpThread, host: str) -> None:
    with pytest.raises(ConfigError, match=f"admin: cannot listen on {host}:0"):
        thread.serve(web.Application(), host, 0, "admin")


def test_stop_frees_thread_and_port_and_may_be_called_again() -> None:
    thread = HttpThread("kvcore-http-stopped")
    thread.start()
    thread.start()
    address = serve(thread, 1)
    directory, results = Directory(thread), Results()
    directory.lookup(str(address), results)
    until(lambda: directory.last_error(str(address)) is not None, "a question is under way")
    waiting = thread.run(forever())
    running = [entry for entry in threading.enumerate() if entry.name == "kvcore-http-stopped"]
    assert [entry.daemon for entry in running] == [True]

    begin = time.monotonic()
    thread.stop()
    thread.stop()
    assert time.monotonic() - begin < 4
    assert not running[0].is_alive()
    assert waiting.cancelled()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.host, address.port), timeout=LIMIT_S)
    assert thread.run(forever()).cancelled()
    assert thread.call(results, Group(0, ())) is False
    directory.drop(directory.lookup(str(address), results))
    thread.start()
    assert not running[0].is_alive()


async def forever() -> None:
    await asyncio.Event().wait()


def test_stop_without_start_and_from_the_thread_itself(caplog: pytest.LogCaptureFixture) -> None:
    HttpThread().stop()
    thread = HttpThread("kvcore-http-itself")
    thread.start()
    assert thread.call(thread.stop)
    until(lambda: all(entry.name != "kvcore-http-itself" for entry in threading.enumerate()), "the thread ended")
    thread.stop()
    assert not caplog.records


def test_stop_is_bounded_when_a_callback_blocks(caplog: pytest.LogCaptureFixture) -> None:
    thread, release = HttpThread("kvcore-http-blocked"), threading.Event()
    thread.start()
    thread.call(release.wait, LIMIT_S)
    begin = time.monotonic()
    thread.stop(timeout_s=0.2)
    assert time.monotonic() - begin < 2
    assert "still runs" in caplog.text
    release.set()
    thread.stop()


def test_a_handler_that_fails_is_one_answer(thread: HttpThread, caplog: pytest.LogCaptureFixture) -> None:
    async def broken(_request: web.Request) -> web.Response:
        raise ValueError("broken handler")

    async def refusing(_request: web.Request) -> web.Response:
        raise Refusal(418, "a teapot", size=3)

    app = web.Application()
    app.router.add_get("/broken", broken)
    app.router.add_get("/refusing", refusing)
    address = Address("127.0.0.1", thread.serve(app, "127.0.0.1", 0, "admin"))
    assert ask(address, "GET", "/broken")[0] == 500
    assert "broken handler" in caplog.text
    assert ask(address, "GET", "/refusing") == (418, {"error": "a teapot", "size": 3})


def test_importing_the_parts_imports_no_http_library() -> None:
    modules = "kvcore.addresses, kvcore.http, kvcore.bootstrap, kvcore.bootstrap_client, kvcore.bootstrap_service"
    program = f"import sys, {modules}; sys.exit('aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
