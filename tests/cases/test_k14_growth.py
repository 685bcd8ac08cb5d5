"""Kind K14: nothing that arrives on an open port stays, runs or breaks anything, and long use leaves no more behind than short use."""

from __future__ import annotations

import ast
import contextlib
import gc
import json
import os
import pickle
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kvcore
from kvcore import KVManager, KVPoll, Receiver, Sender, rooms
from kvcore.faults import ControlTap, FaultPlan
from kvcore.protocol.messages import Abort, Ack, Destination, Join, PoolPages, RoomMessage
from kvcore.wire import Hello, Letter, Refuse, Stranger, Welcome, encode
from tests.cases.ports import Plant, answer, ask, ping, plant, settled, tcp, zmq_client
from tests.helpers import BACKENDS, SOON_S, Duo, config, duo, ended, full_stores, manager, memory, number, own_threads, wait_until

PAGES = [3, 8, 1]
MIB = 1 << 20


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def resident() -> int:
    """Bytes of memory that this process has now."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- C109: messages for rooms that nobody ever opens

PUBLISHED = (PoolPages("kv", bytes(4 * 16)),)
STRAY: dict[str, Callable[[int], RoomMessage]] = {
    "destination": lambda room: Destination(room, 0, 1, 0, PUBLISHED),
    "destination for a sender of another room": lambda room: Destination(room, 0, 1, 1, PUBLISHED),
    "join": lambda room: Join(room, 0, 1, 0),
    "abort": lambda room: Abort(room, 0, 1, 0),
    "ack": lambda room: Ack(room, 0, 1, 1),
}
BATCH = 1000


def flood(backend: str, kinds: list[str], messages: int, most_mib: int) -> None:
    """So many messages of these kinds, while real rooms are served; then nothing of them is left."""
    with duo(backend, orphan_s=0.5) as pair, ControlTap(pair.prefill) as tap:
        pair.pair()
        strays(pair, tap, kinds, 0, BATCH)  # what is made once is there before it is measured
        pair.stores_empty()
        before, sockets, memory_before = lasting(pair.prefill), pair.prefill.stats().sockets, resident()
        for at in range(BATCH, messages + BATCH, BATCH):
            strays(pair, tap, kinds, at, min(BATCH, messages + BATCH - at))
            if at % (10 * BATCH) == 0:
                pair.transfer([at % 31], [at % 29])
            assert pair.prefill.stats().stores["slots"] <= rooms.MAX_ORPHANS + 10
        pair.stores_empty()
        assert lasting(pair.prefill) == before and pair.prefill.stats().sockets == sockets
        assert resident() - memory_before < most_mib * MIB
        assert pair.prefill.healthy
        pair.transfer(PAGES, PAGES)


QUEUES = {"flight_record", "control_calls", "slow_calls", "http_calls", "orders", "late_words", "events", "collected", "workers"}
"""Stores of what was or is just being done."""


def lasting(owner: KVManager) -> dict[str, int]:
    """Sizes of what a manager keeps, but for its queues."""
    gc.collect()
    return {name: size for name, size in owner.stats().stores.items() if name not in QUEUES}


def strays(pair: Duo, tap: ControlTap, kinds: list[str], at: int, count: int) -> None:
    for turn in range(at, at + count):
        body = STRAY[kinds[turn % len(kinds)]]((1 << 40) + turn)
        tap.inject(encode(pair.decode.instance, pair.prefill.instance, body), peer=pair.decode.instance)
    settled(pair.prefill)


@pytest.mark.parametrize("kind", STRAY)
def test_c109_messages_for_rooms_never_opened_leave_nothing(backend: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """20,000 messages about rooms that nobody opens: real rooms are served meanwhile, tables are bounded, and empty after the keep time."""
    monkeypatch.setattr(rooms, "MAX_ORPHANS", 3000)
    flood(backend, [kind], 20_000 if kind == "destination" else 5000, most_mib=16)


@pytest.mark.slow
def test_c109_a_million_messages_for_rooms_never_opened_leave_nothing(backend: str) -> None:
    """The same with 1,000,000 destinations, and joins, aborts and acknowledgements among them."""
    kinds = ["destination"] * 20 + list(STRAY)  # 22 of these 25 are destinations
    flood(backend, kinds, 1_000_000 * 25 // 22, most_mib=128)


def test_c109_instances_that_only_say_hello_are_forgotten(backend: str) -> None:
    """Hellos of instances that are never heard of again: their peers go with the liveness limit, and those who live stay paired."""
    with duo(backend, liveness_s=1.5, send_s=30.0) as pair, ControlTap(pair.prefill) as tap:
        pair.pair()
        hello = next(seen.letter.body for seen in tap.seen if isinstance(seen.letter.body, Hello))
        with zmq_client(f"127.0.0.1:{pair.prefill.control.port}") as client:
            for turn in range(30):
                me = msgspec.structs.replace(hello.me, instance=f"decode-made-up-{turn}")
                client.send(encode(me.instance, "", msgspec.structs.replace(hello, pairing=turn, me=me)))
                assert isinstance(answer(client).body, Welcome | Refuse)
        pair.transfer(PAGES, PAGES)
        names = ("peers", "pairings", "departed_peers")
        wait_until(lambda: [pair.prefill.stats().stores[name] for name in names] == [1, 0, 0])
        pair.transfer(PAGES, PAGES)


def test_c109_strangers_leave_nothing() -> None:
    """Room messages of instances that never paired are answered with a question, and no state is made."""
    with plant() as made, zmq_client(made.control("prefill")) as client:
        for turn in range(2000):
            client.send(encode(f"decode-{turn}", made.prefill.instance, STRAY["join"](turn)))
            if turn % 100 == 0:
                assert isinstance(answer(client).body, Stranger)
        settled(made.prefill)
        assert full_stores(made.prefill) == {} and made.prefill.stats().peers == 1
        made.transfer(PAGES, PAGES)


# --- C110: nothing that arrives is run


class Trap:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.path,)


def traps(path: Path) -> list[bytes]:
    """Bytes that make the folder where somebody unpickles or evaluates them."""
    code = f"__import__('os').mkdir({str(path)!r})"
    pickled = [pickle.dumps(Trap(path), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    yaml = f"!!python/object/apply:os.mkdir [{str(path)!r}]"
    return [*pickled, code.encode(), f"{{{code}}}".encode(), yaml.encode()]


def test_c110_the_trap_is_one(tmp_path: Path) -> None:
    """Who unpickles, or evaluates, would be found out."""
    for turn, trap in enumerate(traps(tmp_path / "a")[: pickle.HIGHEST_PROTOCOL + 1]):
        pickle.loads(trap)
        (tmp_path / "a").rmdir()
        assert turn < 10
    eval(traps(tmp_path / "b")[pickle.HIGHEST_PROTOCOL + 1])
    assert (tmp_path / "b").is_dir()


def test_c110_nothing_received_is_run(tmp_path: Path, backend: str) -> None:
    """Pickled bytes and code with a visible effect, sent to every port and inside good messages: no effect, and rooms work on."""
    path = tmp_path / "trap"
    with plant(backend) as made, ControlTap(made.prefill) as tap:
        for trap in traps(path):
            for address in made.everywhere():
                tcp(address, trap)
            for side in ("prefill", "decode"):
                with zmq_client(made.control(side)) as client:
                    for frames in (
                        [trap],
                        [trap, ping()],
                        [msgspec.msgpack.encode(trap)],
                        [msgspec.msgpack.encode(msgspec.msgpack.Ext(5, trap))],
                    ):
                        client.send_multipart(frames)
                    client.send(ping())
                    assert isinstance(answer(client).body, Stranger)
            for address in made.http().values():
                for way in ("/v1/ranks", "/rooms/1", "/health"):
                    assert ask(address, "POST", way, trap)[0] >= 400
            sender, receiver = made.open()
            with sender, receiver:
                receiver.receive(PAGES)
                wait_until(lambda sender=sender: sender.poll() is KVPoll.WAITING_FOR_INPUT)
                bad = Destination(sender.room, 0, 1, 1, (PoolPages("kv", trap), PoolPages(trap.decode("latin-1"), b"")))
                tap.inject(Letter(1, made.decode.instance, made.prefill.instance, bad))
                sender.send(PAGES, last=True, record=trap)
                ended(receiver, KVPoll.SUCCESS)
                assert receiver.record == trap, "delivered as it is"
            refused, receiver = made.open()
            receiver.abort(trap.decode("latin-1"))
            ended(refused, KVPoll.FAILED)
            refused.clear()
            receiver.clear()
        assert isinstance(answer_to_endpoint(made, traps(path)[2]), Welcome | Refuse)
        made.transfer(PAGES, PAGES)
        assert made.prefill.healthy and made.decode.healthy
    assert not path.exists()


def answer_to_endpoint(made: Plant, data: bytes) -> object:
    """What prefill answers an instance whose endpoint is these bytes."""
    with manager("decode", memory(32)) as another, ControlTap(another) as tap, zmq_client(made.control("prefill")) as client:
        Duo(made.prefill, another, made.source, memory(32)).open()
        wait_until(lambda: any(isinstance(seen.letter.body, Hello) for seen in tap.seen))
        hello = next(seen.letter.body for seen in tap.seen if isinstance(seen.letter.body, Hello))
        me = msgspec.structs.replace(hello.me, instance="decode-odd")
        client.send(encode(me.instance, "", msgspec.structs.replace(hello, me=me, data=data, keys=(data,))))
        return answer(client).body


UNSAFE_MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle", "yaml", "xmlrpc"}
UNSAFE_NAMES = {"Listener", "Client", "BaseManager", "SyncManager"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__", "recv_pyobj", "send_pyobj", "recv_serialized", "literal_eval"}
PIPES = {"sides", "demo", "bench", "doctor"}
"""Parts that talk to processes which they started themselves, over pipes that nobody else has an end of."""
ROOT = Path(kvcore.__file__).parent


def unsafe(path: Path) -> Iterator[str]:
    """Every import and call of a source that unpickles, or evaluates text."""
    piped = path.relative_to(ROOT).parts[0].removesuffix(".py") in PIPES
    modules = UNSAFE_MODULES if piped else UNSAFE_MODULES | {"multiprocessing"}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        bad = False
        if isinstance(node, ast.Import):
            bad = any(alias.name.partition(".")[0] in modules for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").partition(".")[0]
            bad = module in modules or (module == "multiprocessing" and any(alias.name in UNSAFE_NAMES for alias in node.names))
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            bad = called.rpartition(".")[2] in UNSAFE_CALLS and called != "re.compile"
            bad = bad or any(word.arg in ("allow_pickle", "weights_only") for word in node.keywords) or called.startswith("torch.load")
        if bad:
            yield f"{path.relative_to(ROOT)}: {ast.unparse(node)}"


def test_c110_no_source_unpickles_or_evaluates() -> None:
    """No module imports what unpickles, or calls what evaluates text; only what talks to its own children may use pipes of objects."""
    sources = sorted(ROOT.rglob("*.py"))
    assert len(sources) > 40
    assert [found for path in sources for found in unsafe(path)] == []


# --- C111: the bootstrap service of a running manager. ``tests/test_bootstrap.py`` has the service by itself.


def wrong_bodies(good: dict[str, Any]) -> Iterator[bytes]:
    chance = random.Random(111)
    text = json.dumps(good).encode()
    yield from (b"", b"{", b"null", b"[]", b'"text"', b"\xff\xfe", b"[" * 50_000, b" " * 70_000, text[:-1], text + b"}", pickle.dumps(good))
    yield from (chance.randbytes(length) for length in (1, 10, 100, 1000, 60_000))
    yield from (json.dumps({**good, "curve": curve}).encode() for curve in (None, 1, ["x"], "x", "x" * 41, "x" * 39 + " ", "x" * 39 + "\n"))
    for name in good.keys() - {"place", "curve"}:
        yield json.dumps({key: value for key, value in good.items() if key != name}).encode()
        for value in (None, True, -1, 1.5, [], {}, "", "a\nb", 2**64, "x" * 400):
            yield json.dumps({**good, name: value}).encode()
    for place in (None, 1, [], {"tp_size": 2}, {"tp_size": 0}, {"tp_size": 2**31}, {"tp_rank": 1}, {"pp_rank": -1}, {"dp_size": "1"}):
        yield json.dumps({**good, "place": place}).encode()
    yield from (json.dumps({**good, "rank": rank}).encode() for rank in (1, 2, 1024, 10**9, "0"))


def test_c111_junk_leaves_the_table_as_it_is() -> None:
    """Broken, wrong and huge requests to a running manager's bootstrap service: 4xx each, the table unchanged, new decodes served."""
    with plant() as made:
        held = ask(made.prefill.address, "GET", "/v1/group")
        good = dict(held[1]["ranks"][0])  # type: ignore[index]
        for body in wrong_bodies(good):
            status, found = ask(made.prefill.address, "POST", "/v1/ranks", body)
            assert status in (400, 409, 413), (status, body[:80])
            assert "\n" not in str(found["error"])
        for method, path in [
            ("GET", "/"),
            ("GET", "/v2/group"),
            ("PUT", "/v1/group"),
            ("DELETE", "/v1/ranks/0"),
            ("GET", "/v1/ranks/1"),
            ("POST", "/v1"),
        ]:
            assert 400 <= ask(made.prefill.address, method, path)[0] < 500
        for data in (random.Random(1).randbytes(100_000), b"\x00" * 5000, b"GET", b"POST /v1/ranks HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"):
            found_raw = tcp(made.prefill.address, data)
            assert not found_raw or found_raw.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4"))
        assert ask(made.prefill.address, "GET", "/v1/group") == held
        target = memory(32)
        with manager("decode", target) as another:
            Duo(made.prefill, another, made.source, target).transfer(PAGES, PAGES)


def test_c111_the_rank_of_a_live_owner_is_taken_by_a_later_instance_only() -> None:
    """A second registration of a rank: refused, and nothing changes, unless its instance started later; then the rank is its own."""
    with plant() as made:
        held = ask(made.prefill.address, "GET", "/v1/group")
        good = dict(held[1]["ranks"][0])  # type: ignore[index]
        for changes, words in [
            ({"instance": "another", "order": good["order"] - 1}, "is held by instance"),
            ({"instance": "another"}, "is held by instance"),
            ({"control": "127.0.0.1:9"}, "other facts"),
            ({"order": good["order"] + 1}, "other facts"),
        ]:
            status, found = ask(made.prefill.address, "POST", "/v1/ranks", json.dumps({**good, **changes}).encode())
            assert (status, words in str(found["error"])) == (409, True), found
            assert ask(made.prefill.address, "GET", "/v1/group") == held
        assert ask(made.prefill.address, "POST", "/v1/ranks", json.dumps(good).encode())[0] == 200, "the owner keeps it"
        later = {**good, "instance": "another", "order": good["order"] + 1}
        assert ask(made.prefill.address, "POST", "/v1/ranks", json.dumps(later).encode())[0] == 200
        assert ask(made.prefill.address, "GET", "/v1/ranks/0")[1]["instance"] == "another"
        assert ask(made.prefill.address, "POST", "/v1/ranks", json.dumps(good).encode())[0] == 409


# --- C112: long use


@dataclass(frozen=True)
class Held:
    """What two idle managers hold, and their process."""

    stores: dict[str, int]
    sockets: int
    threads: int
    files: int
    memory: int


class Life:
    """A prefill and a decode manager that serve many small rooms, and are restarted now and then."""

    def __init__(self, backend: str, stack: contextlib.ExitStack) -> None:
        self._backend, self._stack = backend, stack
        self._arrays = {"prefill": memory(64, seed=9), "decode": memory(64)}
        self._ports: dict[str, int] = {}
        self._under_way: deque[tuple[Sender, Receiver]] = deque()
        self._chance = random.Random(112)
        self.ended = {KVPoll.SUCCESS: 0, KVPoll.FAILED: 0}
        self.restarts = 0
        self.managers: dict[str, KVManager] = {}
        for role in self._arrays:
            self._start(role)

    def _start(self, role: str) -> None:
        pool = kvcore.Pool.from_tensors("kv", self._arrays[role], page_size=16)
        limits = {"orphan_s": 2.0, "liveness_s": 5.0, "bootstrap_s": 8.0, "input_s": 8.0, "transfer_s": 8.0}
        self.managers[role] = made = KVManager(
            config(role, self._backend, limits=limits, **self._ports if role == "prefill" else {}), [pool]
        )
        if role == "prefill":
            self._ports = {"port": made.control.port, "bootstrap_port": int(made.address.rpartition(":")[2])}
            self.plan = FaultPlan(seed=self.restarts).fail("torn", rate=0.01)
            made.add_observer(self.plan)

    def close(self) -> None:
        for made in self.managers.values():
            made.close()

    def restart(self) -> None:
        """End one of the two, with rooms under way, and have another come in its place."""
        role = "prefill" if self.restarts % 2 else "decode"
        self.restarts += 1
        self.managers[role].close()
        self._end_all()
        self._start(role)

    def serve(self, count: int, aborts: float = 0.05) -> None:
        """So many rooms, up to 24 at once; a share of them aborted by either side."""
        for _ in range(count):
            if len(self._under_way) >= 24:
                self._end()
            room, page = number(), len(self._under_way)
            sender = self.managers["prefill"].sender(room)
            receiver = self.managers["decode"].receiver(room, self.managers["prefill"].address)
            receiver.receive([page])
            sender.send([page], last=True)
            if self._chance.random() < aborts:
                self._chance.choice((sender, receiver)).abort("not wanted")
            self._under_way.append((sender, receiver))
        self._end_all()

    def _end_all(self) -> None:
        while self._under_way:
            self._end()

    def _end(self) -> None:
        sender, receiver = self._under_way.popleft()
        states = sender.wait(SOON_S), receiver.wait(SOON_S)
        assert all(state.terminal for state in states), (sender, sender.failure, receiver, receiver.failure)
        self.ended[states[1]] += 1
        sender.clear()
        receiver.clear()

    def held(self) -> Held:
        """What is held once everything is still."""
        for made in self.managers.values():
            wait_until(lambda made=made: not full_stores(made), what="the stores are empty")
            wait_until(lambda made=made: made.stats().stores["departed_peers"] == 0 and made.stats().peers == 1, what="one peer")
        stores = {f"{role} {name}": size for role, made in self.managers.items() for name, size in lasting(made).items()}
        sockets = sum(made.stats().sockets for made in self.managers.values())
        threads, files = self.quiet()
        return Held(stores, sockets, threads, files, resident())

    def quiet(self) -> tuple[int, int]:
        """Threads and files, when both have been the same for a while: what has nothing to do any more ends by itself."""
        seen: deque[tuple[int, int]] = deque(maxlen=50)

        def steady() -> bool:
            seen.append((len(own_threads()), len(os.listdir("/proc/self/fd"))))
            return len(seen) == 50 and len(set(seen)) == 1

        wait_until(steady, what="threads and files are steady")
        return seen[-1]


def long_life(backend: str, count: int, seconds: float, most_mib: int, first_count: int = 1000) -> int:
    """Up to ``count`` rooms in ``seconds``, measured against ``first_count``; how many there were."""
    with contextlib.ExitStack() as stack:
        life = Life(backend, stack)
        stack.callback(life.close)
        until, served = time.monotonic() + seconds, first_count
        life.serve(first_count // 2)
        life.restart()
        life.serve(first_count // 2)
        first = life.held()
        while served < count and time.monotonic() < until:
            life.serve(500)
            life.restart()
            life.serve(500)
            served += 1000
        share = life.ended[KVPoll.FAILED] / served
        assert 0.03 < share < 0.12, "some were meant to fail, and few did"
        before = dict(life.ended)
        life.plan.heal()
        life.serve(100, aborts=0.0)
        assert life.ended[KVPoll.SUCCESS] == before[KVPoll.SUCCESS] + 100, "the last hundred succeed"
        last = life.held()
        assert last.stores == first.stores
        assert last.sockets == first.sockets and last.threads <= first.threads and last.files <= first.files, (first, last)
        assert last.memory - first.memory < most_mib * MIB, (first, last)
        return served


def test_c112_two_thousand_rooms_leave_what_one_thousand_left(backend: str) -> None:
    """2,000 rooms with aborts, backend errors and restarts: stores, sockets, threads, files and memory as after 1,000."""
    assert long_life(backend, 2000, seconds=60.0, most_mib=24) == 2000


@pytest.mark.slow
def test_c112_twenty_thousand_rooms_leave_what_two_thousand_left(backend: str) -> None:
    """The same with 20,000 rooms, measured after 2,000: memory is flat from then on."""
    assert long_life(backend, 20_000, seconds=1200.0, most_mib=12, first_count=2000) == 20_000


@pytest.mark.slow
def test_c112_long_use_leaves_what_short_use_left(backend: str) -> None:
    """The same with 200,000 rooms, or as many as there are in six minutes."""
    served = long_life(backend, 200_000, seconds=360.0, most_mib=64)
    print(f"{served} rooms")
    assert served >= 20_000, f"only {served} rooms in six minutes"
