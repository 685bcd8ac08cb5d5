"""What an attack on the finished core found: odd values, letters nobody can read, slow engines, and rooms opened while a manager closes."""

from __future__ import annotations

import asyncio
import copy
import enum
import errno
import logging
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from kvcore import ConfigError, FailureCode, KVManager, KVPoll, PageError, Pool, Receiver, Region, RoomError, hookimpl
from kvcore.faults import ControlTap
from kvcore.handles import MAX_LISTED
from kvcore.hookspecs import API_VERSION, BackendInfo, Endpoint, Event
from kvcore.http import HttpThread
from kvcore.process import known_gone, this_process
from kvcore.protocol.messages import Abort, Destination
from kvcore.rooms import RoomTable
from kvcore.states import MAX_REASON_BYTES, Reason
from kvcore.wire import Letter, Ping, Refuse, decode, encode
from tests.fake_backends import MemoryBackend, install, running, start
from tests.helpers import SOON_S, config, duo, ended, manager, memory, number, own_threads, stays, wait_until


class Odd(int):
    """An integer that msgpack does not take as one."""


class OddText(str):
    """Text that msgpack does not take as such."""


class Silent:
    """Something that cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


# --- odd values


@pytest.mark.parametrize("pages", [[True, 2], [2, np.True_]], ids=["bool", "numpy bool"])
def test_t2_a_bool_among_integers_is_no_page(pages: list[Any]) -> None:
    with duo() as pair, pair.prefill.sender(number()) as sender, pytest.raises(PageError, match="True"):
        sender.send(pages)


@pytest.mark.parametrize("record", [5, 0, True, "text", None, [1, 2]], ids=repr)
def test_t1_a_record_is_bytes_and_nothing_else(record: Any) -> None:
    with duo() as pair, pair.prefill.sender(number()) as sender:
        with pytest.raises(PageError, match="record is bytes"):
            sender.send([1], last=True, record=record)
        sender.send([1], last=True, record=memoryview(np.array([1, 2], np.uint8)))  # type: ignore[arg-type]


@pytest.mark.parametrize("ready", [5, "event", lambda: True], ids=["int", "str", "function"])
def test_t4_a_ready_event_without_query_is_refused_at_once(ready: Any) -> None:
    with duo() as pair, pair.prefill.sender(number()) as sender, pytest.raises(PageError, match="query"):
        sender.send([1], ready=ready)


def test_c6_any_kind_of_integer_travels() -> None:
    kind = enum.IntEnum("kind", {"ROOM": 2**40})
    with duo() as pair:
        for room, attempt in ((Odd(number()), Odd(3)), (kind.ROOM, 0)):  # type: ignore[attr-defined]
            sender, receiver = pair.open(room, attempt)
            with sender, receiver:
                receiver.receive([1], prefix_pages=Odd(2))
                sender.send([1], last=True)
                ended(receiver, KVPoll.SUCCESS)
                assert dict(sender.prefix_pages) == {"kv": 2}


def test_a1_abort_never_raises_whatever_it_is_given() -> None:
    with duo() as pair:
        for reason in (Silent(), None, b"bytes", "\ud800"):
            sender, receiver = pair.open()
            with sender, receiver:
                sender.abort(reason)  # type: ignore[arg-type]
                assert sender.poll() is KVPoll.FAILED


def test_a8_a_rejection_with_any_reason_leaves_no_room_behind() -> None:
    with duo() as pair, pair.prefill.sender(number()) as sender:
        pair.decode.reject(sender.room, None, pair.prefill.address)  # type: ignore[arg-type]
        ended(sender, KVPoll.FAILED)
        assert pair.decode.status(sender.room) is None


def test_wait_takes_any_timeout() -> None:
    with duo() as pair, pair.prefill.sender(number()) as sender:
        timer = threading.Timer(0.1, sender.abort)
        timer.start()
        assert sender.wait(float("inf")) is KVPoll.FAILED
        assert sender.wait_release_safe(1e300)
        timer.join()


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_c8_a_handle_is_not_copied(how: Callable[[object], object]) -> None:
    with duo() as pair, pair.prefill.sender(number()) as sender:
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            how(sender)
        assert not sender.poll().terminal


def test_t2_a_destination_that_no_letter_holds_is_refused() -> None:
    pages = MAX_LISTED + 1
    pool = Pool.from_tensors("kv", [np.zeros((pages, 1), np.uint8)], page_size=1)
    with KVManager(config("decode"), [pool]) as one, one.receiver(1, "127.0.0.1:9") as receiver:
        with pytest.raises(PageError, match=str(MAX_LISTED)):
            receiver.receive(np.arange(pages))
        receiver.receive(np.arange(pages - 1))


def test_a_side_that_is_none_is_refused() -> None:
    with duo() as pair:
        for question in (
            lambda: pair.decode.status(1, side="Decode"),
            lambda: pair.decode.rooms("x"),
            lambda: pair.decode.explain(1, side="x"),
        ):  # type: ignore[arg-type]
            with pytest.raises(RoomError, match="side"):
                question()


# --- pools


def test_p1_pools_of_any_kind_of_integers_and_text_can_be_introduced() -> None:
    def odd(array: np.ndarray) -> Pool:
        region = Region(np.uint64(array.ctypes.data), np.int64(array.nbytes), OddText("cpu:0"), np.int8(3), OddText("k"))  # type: ignore[arg-type]
        return Pool(OddText("kv"), [region], num_pages=Odd(4), page_size=Odd(1), dtype=OddText("uint8"))

    source, target = memory(4, 1, seed=1)[0], memory(4, 1)[0]
    with (
        KVManager(config("prefill"), [odd(source)]) as prefill,
        KVManager(config("decode"), [odd(target)]) as decode,
        prefill.sender(1) as sender,
        decode.receiver(1, prefill.address) as receiver,
    ):
        receiver.receive([2])
        sender.send([1], last=True)
        ended(receiver, KVPoll.SUCCESS)
    assert np.array_equal(source[1], target[2])


@pytest.mark.parametrize(
    "change",
    [{"name": 5}, {"name": b"kv"}, {"dtype": np.float32}, {"layer": 1.5}, {"ptr": "1"}, {"device": None}, {"part": None}],
    ids=str,
)
def test_p1_what_cannot_be_introduced_is_refused_when_the_pool_is_made(change: dict[str, Any]) -> None:
    region = {"ptr": 4096, "nbytes": 64, "device": "cpu:0", "layer": 0, "part": ""}
    pool: dict[str, Any] = {"name": "kv", "num_pages": 4, "page_size": 1, "dtype": ""}
    (region if next(iter(change)) in region else pool).update(change)
    with pytest.raises(ConfigError):
        Pool(regions=[Region(**region)], **pool)  # type: ignore[arg-type]


def test_t3_arrays_of_python_objects_are_no_pool() -> None:
    with pytest.raises(ConfigError, match="Python objects"):
        Pool.from_tensors("kv", [np.array([object()] * 4)], page_size=1)


# --- letters that nobody can read are noticed where they are made


class NumberedWire(MemoryBackend):
    """Gives its wire version as a number."""

    @hookimpl
    def kvcore_backend_info(self) -> BackendInfo:
        return BackendInfo("fake", "1", 1, API_VERSION, capabilities=self.able)  # type: ignore[arg-type]


def test_p1_an_instance_that_no_peer_could_read_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    before = own_threads()
    install(monkeypatch, NumberedWire)
    with pytest.raises(ConfigError, match="cannot be described to a peer"):
        manager("prefill", memory(4), backend="fake")
    assert own_threads() <= before


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("endpoint", [Endpoint("text"), Endpoint(b"", [5]), Endpoint(b"", None)], ids=["data", "key", "keys"])  # type: ignore[arg-type, list-item]
def test_p1_an_endpoint_that_cannot_travel_fails_the_room_at_once(monkeypatch: pytest.MonkeyPatch, side: str, endpoint: Endpoint) -> None:
    fake = install(monkeypatch, MemoryBackend)
    with running(fake) as (pair,):

        class Instead:
            @hookimpl(tryfirst=True)
            def kvcore_endpoint(self) -> Endpoint:
                return endpoint

        (pair.prefill if side == "prefill" else pair.decode).add_observer(Instead())
        _, receiver = start(pair)
        ended(receiver, KVPoll.FAILED)
        assert receiver.failure is not None
        assert receiver.failure.code is FailureCode.BACKEND


# --- what a peer says is bounded, and forges no line of a log


def test_p5_a_reason_longer_than_may_travel_is_a_bad_message() -> None:
    with duo() as pair:
        pair.pair()
        sender, receiver = pair.open()
        with sender, receiver, ControlTap(pair.prefill) as tap:
            receiver.receive([1])
            wait_until(lambda: sender.poll() is KVPoll.WAITING_FOR_INPUT)
            long = Reason(FailureCode.ABORTED, "x" * (MAX_REASON_BYTES + 1), "decode")
            bad = pair.prefill.control.bad_messages
            body = Abort(sender.room, 0, receiver.generation, sender.generation, long)
            tap.inject(msgspec.msgpack.encode(Letter(1, pair.decode.instance, pair.prefill.instance, body)), peer=pair.decode.instance)
            wait_until(lambda: pair.prefill.control.bad_messages == bad + 1)
            assert not sender.poll().terminal


@pytest.mark.parametrize("name", ["decode-1\nall is well", "decode-1\n", "decode \x1b[31m"])
def test_p5_an_instance_id_forges_no_line(name: str) -> None:
    with pytest.raises(ValueError, match=r"\$.source"):
        decode(encode(name, "", Ping()))


def test_p5_a_refusal_is_told_in_one_line_of_bounded_length(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), duo() as pair, ControlTap(pair.decode) as tap:
        tap.drop(lambda letter, outgoing: not outgoing)
        receiver = pair.decode.receiver(number(), pair.prefill.address)
        with receiver:
            wait_until(lambda: any(outgoing for _, outgoing in tap.seen))
            hello: Any = next(letter for letter, outgoing in tap.seen if outgoing).body
            text = "no\nroot: all is well" + "x" * 1_000_000
            wait_until(lambda: any(not outgoing for _, outgoing in tap.seen))
            tap.inject(Letter(1, pair.prefill.instance, pair.decode.instance, Refuse(hello.pairing, text)))
            ended(receiver, KVPoll.FAILED)
    told = [record.getMessage() for record in caplog.records if "all is well" in record.getMessage()]
    assert told
    assert all("\n" not in line and len(line) < 2000 for line in told)


# --- slow engines


class SlowConnect:
    """Has ``kvcore_connect`` take longer than ``liveness_s``."""

    @hookimpl(wrapper=True)
    def kvcore_connect(self) -> Any:
        threading.Event().wait(1.8)
        return (yield)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_p2_an_engine_may_take_longer_to_connect_than_liveness_s(side: str) -> None:
    with duo(liveness_s=1.0) as pair:
        (pair.prefill if side == "prefill" else pair.decode).add_observer(SlowConnect())
        sender, receiver = pair.open()
        with sender, receiver:
            receiver.receive([1])
            sender.send([1], last=True)
            ended(receiver, KVPoll.SUCCESS)
            ended(sender, KVPoll.SUCCESS)


# --- out of file descriptors


def test_r4_a_process_that_cannot_be_looked_up_is_not_known_to_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    me = this_process()
    for error in (OSError(errno.EMFILE, "too many open files"), FileNotFoundError(), PermissionError()):

        def refuse(*_: object, error: OSError = error, **__: object) -> str:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_text", refuse)
            assert not known_gone(me), error
    assert not known_gone(me)


def test_r4_a_process_that_has_ended_is_known_to_be_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    stat = Path(f"/proc/{child.pid}/stat").read_text(encoding="ascii")
    process = msgspec.structs.replace(this_process(), pid=child.pid, started=stat.rpartition(")")[2].split()[19])
    assert not known_gone(process)
    child.communicate()
    assert known_gone(process)


def test_s8_a_room_whose_peer_cannot_be_dialled_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with duo() as pair:

        def refuse(*_: object) -> Any:
            raise zmq.ZMQError(errno.EMFILE)

        monkeypatch.setattr("kvcore.sockets.made", refuse)
        with pair.decode.receiver(number(), pair.prefill.address) as receiver:
            ended(receiver, KVPoll.FAILED)
            assert receiver.failure is not None
            assert receiver.failure.code is FailureCode.PEER_LOST


def test_c107_a_loop_that_cannot_accept_logs_a_bounded_number_of_lines(caplog: pytest.LogCaptureFixture) -> None:
    async def complain() -> None:
        for _ in range(500):
            asyncio.get_running_loop().call_exception_handler({"message": "out of file descriptors"})

    http = HttpThread()
    http.start()
    http.run(complain()).result(SOON_S)
    http.stop()
    assert len([record for record in caplog.records if "out of file descriptors" in record.getMessage()]) == 1


# --- long transfers


def test_p6_a_destination_is_repeated_ever_more_rarely_while_its_pages_are_on_their_way() -> None:
    with duo(orphan_s=30.0) as pair:
        pair.pair()
        pair.plan.hold()
        sender, receiver = pair.open()
        with sender, receiver, ControlTap(pair.decode) as tap:
            receiver.receive([1])
            sender.send([1], last=True)
            wait_until(lambda: receiver.poll() is KVPoll.TRANSFERRING)
            stays(lambda: sender.poll() is KVPoll.TRANSFERRING, 2.5)
            asked = [letter for letter, outgoing in tap.seen if outgoing and isinstance(letter.body, Destination)]
            assert len(asked) <= 5


# --- closing


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_s8_a_room_opened_while_the_manager_closes_is_refused_and_not_left_live(monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    with duo() as pair:
        closing = pair.prefill if side == "prefill" else pair.decode
        opens = RoomTable.open
        opened: list[Any] = []

        def late(table: RoomTable, *arguments: Any) -> Any:
            closing.close()
            opened.append(opens(table, *arguments))
            return opened[-1]

        monkeypatch.setattr(RoomTable, "open", late)
        with pytest.raises(RoomError, match="closing"):
            closing.sender(number()) if side == "prefill" else closing.receiver(number(), pair.prefill.address)
        assert opened[0].status is KVPoll.FAILED


def test_a4_close_tells_prefill_of_a_receiver_opened_just_before() -> None:
    with duo(drain_s=2.0) as pair, pair.prefill.sender(number()) as sender:
        receiver: Receiver = pair.decode.receiver(sender.room, pair.prefill.address)
        pair.decode.close()
        assert receiver.poll() is KVPoll.FAILED
        assert sender.wait(SOON_S) is KVPoll.FAILED
        assert sender.failure is not None
        assert sender.failure.code is FailureCode.SHUTDOWN


def test_t7_an_observer_may_close_the_manager(caplog: pytest.LogCaptureFixture) -> None:
    closed = threading.Event()

    class Closer:
        @hookimpl
        def kvcore_on_event(self, event: Event) -> None:
            if event.name == "status" and not closed.is_set():
                pair.prefill.close()
                closed.set()

    with duo() as pair:
        pair.prefill.add_observer(Closer())
        sender = pair.prefill.sender(number())
        assert closed.wait(SOON_S)
        assert sender.poll() is KVPoll.FAILED
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
