"""Kind K5: whatever the control plane is sent, loses or is told late, its threads go on and every room ends as documented."""

from __future__ import annotations

import itertools
import logging
import random
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zmq

from kvcore import FailureCode, Handle, KVManager, KVPoll, Limits, Pool, Receiver, Sender
from kvcore.faults import ControlTap
from kvcore.hookspecs import Transfer
from kvcore.protocol.messages import Abort, Ack, Destination, Drained, Here, Join, RoomMessage, Status, Which
from kvcore.states import Reason
from kvcore.wire import Hello, Letter, Ping, Refuse, RegionInfo, Stranger, Welcome, encode
from tests.cases.ports import Plant, altered, answer, ask, ping, plant, settled, tcp, zmq_client
from tests.fake_backends import BlockingBackend, install, running, start
from tests.helpers import (
    BACKENDS,
    SOON_S,
    Duo,
    Events,
    Flag,
    config,
    cpu_s,
    duo,
    ended,
    manager,
    memory,
    number,
    own_threads,
    stores_empty,
    wait_until,
)

PAGES = [3, 8, 1]
SIDES = ["prefill", "decode"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class OddError(BaseException):
    """What no ``except Exception`` catches."""


def published(pair: Duo, room: int | None = None) -> tuple[Sender, Receiver]:
    """A live room whose two lifetimes are paired."""
    sender, receiver = pair.open(room)
    receiver.receive(PAGES)
    wait_until(lambda: sender.poll() is KVPoll.WAITING_FOR_INPUT)
    return sender, receiver


def of_rooms(letter: Letter, _outgoing: bool) -> bool:
    return isinstance(letter.body, RoomMessage)


# --- C41: odd messages on every port

NOISE = random.Random(41).randbytes(1 << 20)


def with_body(**changes: object) -> list[bytes]:
    """A join in which some fields are not what they should be."""
    return [altered(body={"type": "join", "room": 1, "attempt": 0, "rg": 1, "sg": 0, **changes})]


FRAMES: dict[str, list[bytes]] = {
    "an empty message": [b""],
    "one frame of another format": [b"PING"],
    "a frame too many": [ping(), ping()],
    "a delimiter before it": [b"", ping()],
    "far too many frames": [ping()] * 1000,
    "1 MiB of noise": [NOISE],
    "text where a number is due": with_body(room="seven"),
    "a fraction where a number is due": with_body(room=1.5),
    "nothing where a number is due": with_body(rg=None),
    "a negative number": with_body(room=-1),
    "a negative generation": with_body(sg=-1),
    "a number too large": with_body(room=2**63),
    "an unknown verb": with_body(type="frobnicate"),
    "a verb that is no text": with_body(type=["join"]),
    "no verb": [altered(body={})],
    "no envelope": [msgspec.msgpack.encode({"room": 7})],
    "a wrong version": [altered(v=99)],
    "a version of text": [altered(v="1.0")],
    "an instance with a line break": [altered(source="a\nb")],
    "a deep nesting": [b"\x91" * 100_000],
    "a length that is not there": [b"\xdd\xff\xff\xff\xff"],
    **{f"truncated after {end}": [ping()[:end]] for end in range(1, len(ping()), 5)},
}

REQUESTS: dict[str, bytes] = {
    "no HTTP": b"PING\r\n\r\n",
    "one line": b"GET\r\n\r\n",
    "1 MiB of noise": NOISE,
    "far too many lines": b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 100_000 + b"\r\n",
    "a negative length": b"POST /v1/ranks HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    "a length of text": b"POST /v1/ranks HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n",
    "an unknown verb": b"FROBNICATE /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "an unknown path": b"GET /v1/nothing HTTP/1.1\r\nHost: x\r\n\r\n",
    "a room that is text": b"GET /rooms/seven HTTP/1.1\r\nHost: x\r\n\r\n",
    "a negative room": b"GET /rooms/-1 HTTP/1.1\r\nHost: x\r\n\r\n",
    "a rank that is not there": b"GET /v1/ranks/7 HTTP/1.1\r\nHost: x\r\n\r\n",
    "a wrong version": b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
}
UNANSWERED: dict[str, bytes] = {"an empty message": b"", "a truncated request": b"GET /heal"}


def knock_control(made: Plant, side: str) -> int:
    with zmq_client(made.control(side)) as client:
        for frames in FRAMES.values():
            client.send_multipart(frames)
        client.send(ping())
        assert isinstance(answer(client).body, Stranger), "the next good message is served"
    return len(FRAMES)


def knock_http(made: Plant, name: str) -> int:
    for what, data in REQUESTS.items():
        found = tcp(made.http()[name], data)
        assert not found or found.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), (what, found[:80])
    for data in UNANSWERED.values():
        tcp(made.http()[name], data)
    assert ask(made.http()[name], "GET", "/health")[0] == 200
    return len(REQUESTS)


def knock_data(made: Plant, side: str) -> int:
    for data in [b"", b"\n", NOISE, ping(), b'["seven", 1]\n', b'["", "somebody"]\n', b"kvf\1" * 400, b"x" * 1025]:
        tcp(made.data[side], data)
    return 0


def bad(owner: KVManager, port: str) -> int:
    line = next(line for line in owner.metrics_text().splitlines() if line.startswith(f'kvcore_bad_messages_total{{port="{port}"}}'))
    return int(line.rpartition(" ")[2])


@pytest.mark.parametrize("port", ["control", "http", "data"])
def test_c41_odd_messages_on_every_port(port: str, backend: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each odd message is counted, few are logged, and the room under way and the next one work on the same two managers."""
    with plant(backend) as made:
        waits = Flag()
        sender, receiver = made.open()
        receiver.receive(PAGES)
        sender.send(PAGES, last=True, ready=waits)
        wait_until(lambda: receiver.poll() is KVPoll.TRANSFERRING)
        threads = {thread.name for thread in own_threads()}
        knocks: dict[str, list[tuple[str, KVManager, str, Callable[[], int]]]] = {
            "control": [(side, made.manager(side), "control", lambda side=side: knock_control(made, side)) for side in SIDES],
            "http": [
                (name, made.decode if "decode" in name else made.prefill, name.split()[-1], lambda name=name: knock_http(made, name))
                for name in made.http()
            ],
            "data": [(side, made.manager(side), "", lambda side=side: knock_data(made, side)) for side in made.data],
        }  # type: ignore[misc]
        for name, owner, counter, knock in knocks[port]:
            caplog.clear()
            counter = "bootstrap_port" if counter == "bootstrap" else counter
            before = bad(owner, counter) if counter else 0
            with caplog.at_level(logging.INFO, "kvcore"):
                sent = knock()
                if counter:
                    wait_until(lambda owner=owner, counter=counter, due=before + sent: bad(owner, counter) == due, what=f"{name}: counted")
            assert 1 <= len(caplog.records) <= 12, (name, caplog.messages)
            assert all("\n" not in line and len(line) < 400 for line in caplog.messages)
            assert all(record.exc_info is None for record in caplog.records)
            assert owner.healthy
            made.transfer([4], [5])
        waits.set()
        ended(receiver, KVPoll.SUCCESS)
        assert made.equal(PAGES, PAGES)
        assert {name for name in threads if not name.startswith("kvcore-local-")} <= {thread.name for thread in own_threads()}
        sender.clear()
        receiver.clear()
        made.stores_empty()


# --- C42: each verb, for a known, a finished, a cleared and an unknown room

KNOWLEDGE = ("known", "finished", "cleared", "unknown")
REASON = Reason(FailureCode.BACKEND, "told by the other side", "prefill", 0)
NOTHING = ("", "", "", "")

VERBS: dict[str, dict[str, tuple[Callable[..., RoomMessage], tuple[str, str, str, str]]]] = {
    "prefill": {
        "join": (Join, ("here", "SUCCESS", "FAILED", "")),
        "destination": (Destination, ("", "SUCCESS", "FAILED", "FAILED")),
        "ack": (Ack, NOTHING),
        "ack of a live receiver": (lambda *head: Ack(*head, live=True), NOTHING),
        "abort": (lambda *head: Abort(*head, REASON), ("drained", "drained", "drained", "")),
    },
    "decode": {
        "here": (Here, NOTHING),
        "status TRANSFERRING": (lambda *head: Status(*head, KVPoll.TRANSFERRING), NOTHING),
        "status SUCCESS": (lambda *head: Status(*head, KVPoll.SUCCESS), ("ack live", "ack live", "ack", "")),
        "status FAILED": (lambda *head: Status(*head, KVPoll.FAILED, REASON), ("abort, ack live", "ack live", "ack", "")),
        "which": (Which, NOTHING),
        "drained": (Drained, NOTHING),
    },
}
"""By the side it is for and the verb: how to make the message, and what is answered at each of ``KNOWLEDGE``."""

BECOMES = {
    "abort": KVPoll.FAILED,
    "status TRANSFERRING": KVPoll.TRANSFERRING,
    "status SUCCESS": KVPoll.SUCCESS,
    "status FAILED": KVPoll.FAILED,
}
"""What a known room becomes by a verb, where it changes."""


def said(body: Any) -> str:
    """An answer in a word or two."""
    if isinstance(body, Status):
        return body.state.name
    return type(body).__name__.lower() + (" live" if isinstance(body, Ack) and body.live else "")


def room_at(pair: Duo, moment: str) -> tuple[tuple[Sender, Receiver] | None, tuple[int, int, int, int]]:
    """A room at a moment: its handles, and the head of a message about it."""
    if moment == "unknown":
        return None, (number(), 0, 1, 0)
    sender, receiver = published(pair)
    if moment != "known":
        sender.send(PAGES, last=True)
        ended(receiver, KVPoll.SUCCESS)
        ended(sender, KVPoll.SUCCESS)
        wait_until(lambda: pair.prefill.stats().stores["last_words"] == 0)
    if moment == "cleared":
        sender.clear()
        receiver.clear()
    return (sender, receiver), (sender.room, 0, receiver.generation, sender.generation)


@pytest.mark.parametrize("side", SIDES)
def test_c42_each_verb_has_one_documented_result(backend: str, side: str) -> None:
    """Each verb of the room protocol, for rooms known, finished, cleared and unknown: the documented answer and state, nothing else."""
    with duo(backend) as pair:
        owner, other = (pair.prefill, pair.decode) if side == "prefill" else (pair.decode, pair.prefill)
        with ControlTap(owner) as tap:
            pair.pair()
            for (verb, (make, answers)), moment in itertools.product(VERBS[side].items(), KNOWLEDGE):
                handles, head = room_at(pair, moment)
                real = tap.drop(lambda letter, outgoing, room=head[0]: getattr(letter.body, "room", None) == room)
                before = tap.seen
                tap.inject(Letter(1, other.instance, owner.instance, make(*head)))
                settled(owner)
                new = [seen.letter.body for seen in tap.seen[len(before) :] if seen.outgoing]
                # What is repeated of itself meanwhile is no answer.
                found = ", ".join(said(body) for body in new if getattr(body, "room", None) == head[0] and not repeated(body, side))
                assert found == answers[KNOWLEDGE.index(moment)], (verb, moment, found)
                if handles is not None:
                    mine = handles[0] if side == "prefill" else handles[1]
                    live = BECOMES.get(verb, KVPoll.WAITING_FOR_INPUT)
                    assert mine.poll() is (live if moment == "known" else KVPoll.SUCCESS), (verb, moment)
                real.stop()
                for handle in handles or ():
                    handle.clear()
        pair.transfer([1], [2])
        pair.stores_empty()


def repeated(body: Any, side: str) -> bool:
    return side == "decode" and isinstance(body, Join | Destination)


@pytest.mark.parametrize("side", SIDES)
def test_c42_a_verb_at_the_wrong_side_is_a_bad_message(backend: str, side: str) -> None:
    """A verb that the other side alone takes is counted as bad, is not answered, and changes nothing."""
    with duo(backend) as pair:
        owner, other = (pair.prefill, pair.decode) if side == "prefill" else (pair.decode, pair.prefill)
        with ControlTap(owner) as tap:
            handles, head = room_at(pair.pair(), "known")
            assert handles is not None
            wrong = VERBS["decode" if side == "prefill" else "prefill"]
            before = bad(owner, "control")
            for make, _ in wrong.values():
                tap.inject(Letter(1, other.instance, owner.instance, make(*head)))
            settled(owner)
            assert bad(owner, "control") == before + len(wrong)
            assert {handle.poll() for handle in handles} == {KVPoll.WAITING_FOR_INPUT}
            handles[0].send(PAGES, last=True)
            ended(handles[1], KVPoll.SUCCESS)


def test_c42_a_verb_of_pairing_again_changes_no_room(backend: str) -> None:
    """Pings, and hellos, welcomes and refusals that come again or are of another pairing, leave peers and rooms as they are."""
    with duo(backend) as pair, ControlTap(pair.prefill) as at_prefill, ControlTap(pair.decode) as at_decode:
        sender, receiver = published(pair)
        hello = next(seen.letter for seen in at_prefill.seen if isinstance(seen.letter.body, Hello))
        welcome = next(seen.letter for seen in at_decode.seen if isinstance(seen.letter.body, Welcome))
        assert isinstance(welcome.body, Welcome)
        for tap, letters in (
            (at_prefill, [hello, msgspec.structs.replace(hello, to=pair.prefill.instance, body=Ping())]),
            (
                at_decode,
                [
                    welcome,
                    msgspec.structs.replace(welcome, body=msgspec.structs.replace(welcome.body, pairing=welcome.body.pairing + 1)),
                    msgspec.structs.replace(welcome, body=Refuse(welcome.body.pairing + 1, "not now")),
                    msgspec.structs.replace(welcome, body=Ping()),
                ],
            ),
        ):
            for letter in letters * 3:
                tap.inject(letter)
        settled(pair.prefill)
        settled(pair.decode)
        assert pair.prefill.stats().peers == pair.decode.stats().peers == 1
        sender.send(PAGES, last=True)
        ended(receiver, KVPoll.SUCCESS)
        ended(sender, KVPoll.SUCCESS)


# --- C43: a worker that finishes late


class RandomWorker(BlockingBackend):
    """A transfer ends well after a moment of random length."""

    chance = random.Random(43)
    moment = threading.Event()

    def post(self, transfer: Transfer) -> Any:
        self.moment.wait(self.chance.random() * 0.01)
        return super().post(transfer)


class Watch:
    """Polls handles from a thread of its own, and notes each that was once terminal and then something else."""

    def __init__(self) -> None:
        self.handles: list[Handle] = []
        self.wrong: list[str] = []
        self._first: dict[Handle, KVPoll] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(SOON_S)

    def _run(self) -> None:
        while not self._over.wait(0.0002):
            for handle in list(self.handles):
                self.look(handle)

    def look(self, handle: Handle) -> None:
        first, now = self._first.get(handle), handle.poll()
        if first is not None and now is not first:
            self.wrong.append(f"{handle} was {first.name}")
        elif now.terminal:
            self._first[handle] = now


def race(pair: Duo, rooms: int, at_once: int = 25) -> int:
    """Abort rooms, on either side, while their transfers end; how many failed at the sender."""
    chance, pause, failures = random.Random(1), threading.Event(), 0
    with Watch() as watch:
        for _ in range(rooms // at_once):
            both = [pair.open() for _ in range(at_once)]
            watch.handles = [handle for handles in both for handle in handles]
            for page, (sender, receiver) in enumerate(both):
                receiver.receive([page])
                sender.send([page], last=True)
            for handles in both:
                pause.wait(chance.random() * 0.002)
                here = chance.choice(handles)
                here.abort("not wanted")
                watch.look(here)
            for handles in both:
                for handle in handles:
                    handle.wait(SOON_S)
                    assert handle.wait_release_safe(SOON_S)
                    watch.look(handle)
                failures += handles[0].poll() is KVPoll.FAILED
                for handle in handles:
                    handle.clear()
        assert not watch.wrong
    return failures


def test_c43_a_late_end_changes_no_failed_room(backend: str) -> None:
    """A thousand rooms aborted around the end of their transfers: what has once failed, or succeeded, is never anything else."""
    with duo(backend) as pair:
        pair.pair()
        for seconds in (0.001, 0.004, 0.01):
            pair.plan.delay(seconds, rate=0.4)
        assert 100 < race(pair, 1000) < 1000, "the race was one"
        pair.stores_empty()


def test_c43_a_late_worker_changes_no_failed_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with transfers that block, and end on workers of their own."""
    with running(install(monkeypatch, RandomWorker, parallel=4)) as [pair]:
        pair.pair()
        assert 20 < race(pair, 200) < 200, "the race was one"
        pair.stores_empty()


@pytest.mark.parametrize("late", [KVPoll.TRANSFERRING, KVPoll.SUCCESS])
def test_c43_late_word_of_progress_changes_no_failed_receiver(backend: str, late: KVPoll) -> None:
    """Word of progress or success, from another thread, around and after the abort of a receiver: what has failed stays so."""
    with duo(backend) as pair, ControlTap(pair.decode) as tap:
        pair.pair()
        chance = random.Random(5)
        for _ in range(10):
            sender, receiver = published(pair)
            head = (receiver.room, 0, receiver.generation, sender.generation)
            letter = Letter(1, pair.prefill.instance, pair.decode.instance, Status(*head, KVPoll.TRANSFERRING))
            last = Letter(1, pair.prefill.instance, pair.decode.instance, Status(*head, late))

            def tell(letter: Letter = letter, last: Letter = last) -> None:
                for turn in range(50):
                    tap.inject(last if turn > 25 else letter)

            teller = threading.Thread(target=tell, daemon=True)
            with Watch() as watch:
                watch.handles = [receiver]
                teller.start()
                threading.Event().wait(chance.random() * 0.002)
                receiver.abort("not wanted")
                at_once = receiver.poll()
                teller.join(SOON_S)
                settled(pair.decode)
            assert not watch.wrong and receiver.poll() is at_once and at_once.terminal
            if at_once is KVPoll.FAILED:
                assert receiver.failure is not None and receiver.failure.reason == "not wanted"
            sender.clear()
            receiver.clear()
        pair.stores_empty()


# --- C44: a backend that raises for one room

ERRORS = [
    RuntimeError("odd indices"),
    ValueError("odd indices"),
    SystemExit("odd indices"),
    KeyboardInterrupt("odd indices"),
    OddError("odd indices"),
]


def one_fails_the_other_goes_on(pair: Duo, spoil: Callable[[int], object], error: BaseException) -> None:
    room = number()
    spoil(room)
    one, other = start(pair, 1, room), start(pair, 2)
    for handle in one:
        ended(handle, KVPoll.FAILED)
        assert handle.failure is not None and handle.failure.code is FailureCode.BACKEND
        assert "odd indices" in handle.failure.reason and type(error).__name__ in handle.failure.reason
    for handle in other:
        ended(handle, KVPoll.SUCCESS)
    assert pair.equal([2], [2]) and pair.prefill.healthy
    assert not one[0].is_release_safe(), "an exception says nothing about what was posted"
    assert pair.prefill.stats().quarantined_pages == 1
    pair.transfer([3], [4])


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_c44_an_exception_ends_no_worker(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """A backend that blocks raises for one room on its only worker: that room fails on both sides with the text, the next has that worker.
    (Over every engine: C29.)"""
    fake = install(monkeypatch, BlockingBackend, parallel=1)

    def bad(transfer: Transfer) -> None:
        raise error

    with running(fake) as [pair]:
        pair.pair()
        one_fails_the_other_goes_on(pair, lambda room: fake.made[0].answers.__setitem__(room, bad), error)
        assert pair.prefill.stats().stores["workers"] == 1


# --- C45: transfers that never end


def test_c45_transfers_have_a_limit_by_default() -> None:
    """The limit of a transfer is on unless somebody sets it."""
    assert 0 < Limits().ticket_s < Limits().transfer_s < float("inf")


@pytest.mark.parametrize(("limit", "parallel"), [("ticket_s", 1), ("ticket_s", 2), ("ticket_s", 4), ("transfer_s", 1), ("transfer_s", 3)])
def test_c45_a_fresh_room_gets_a_worker(monkeypatch: pytest.MonkeyPatch, limit: str, parallel: int) -> None:
    """More transfers than workers never end: when the limit has passed all their rooms have failed, and a fresh room gets a worker."""
    fake = install(monkeypatch, BlockingBackend, parallel=parallel)
    with running(fake, **{"ticket_s": {"ticket_s": 0.3}, "transfer_s": {"transfer_s": 0.8, "ticket_s": 1.1}}[limit]) as (pair,):
        rooms = [number() for _ in range(parallel + 1)]
        for room in rooms:
            fake.made[0].gate(room)
        stuck = [start(pair, page, room) for page, room in enumerate(rooms)]
        for sender, receiver in stuck:
            ended(sender, KVPoll.FAILED)
            ended(receiver, KVPoll.FAILED)
            assert sender.failure is not None and sender.failure.code is FailureCode.TIMEOUT and limit in str(sender.failure)
        fresh, _ = start(pair, 9)
        ended(fresh, KVPoll.SUCCESS)
        assert pair.equal([9], [9])

        # Not released, however terminal: what is stuck may still be read and written.
        began = [both for both in stuck if fake.made[0].gates[both[0].room].met]
        most = len(stuck) if limit == "ticket_s" else max(1, parallel - 1)  # the last free worker is kept for another peer
        assert len(began) == most
        wait_until(lambda: pair.prefill.stats().stores["workers_stuck"] == len(began))
        assert not any(handle.is_release_safe() for both in began for handle in both)
        assert all(handle.wait_release_safe(SOON_S) for both in stuck if both not in began for handle in both)
        assert pair.prefill.healthy
        fake.made[0].open_gates()
        assert all(handle.wait_release_safe(SOON_S) for both in stuck for handle in both)
        wait_until(lambda: pair.prefill.stats().stores["workers_stuck"] == 0)
        assert pair.prefill.stats().quarantined_pages == 0
        assert {sender.poll() for sender, _ in stuck} == {KVPoll.FAILED}
        for handle in itertools.chain(*stuck, [fresh]):
            handle.clear()
        stores_empty(pair.prefill)


@pytest.mark.parametrize("how", ["the write hangs", "its end is never told"])
def test_c45_every_backend_serves_on_after_transfers_that_never_end(backend: str, how: str) -> None:
    """Five transfers that never end fail their rooms on both sides at the limit; the next room over the same peer works."""
    with duo(backend, ticket_s=0.5) as pair:
        pair.pair()
        rooms = [number() for _ in range(5)]
        for room in rooms:
            pair.plan.hold(room=room) if how == "the write hangs" else pair.plan.drop_done(room=room)
        stuck = [start(pair, page, room) for page, room in enumerate(rooms)]
        for handle in itertools.chain(*stuck):
            ended(handle, KVPoll.FAILED)
            assert handle.failure is not None and handle.failure.code is FailureCode.TIMEOUT and "ticket_s" in handle.failure.reason
        pair.transfer([9], [9])
        assert pair.prefill.stats().quarantined_pages == 5 and not any(handle.is_release_safe() for handle in itertools.chain(*stuck))
        pair.plan.heal()
        assert all(handle.wait_release_safe(SOON_S) for handle in itertools.chain(*stuck))


# --- C47: any single control message is lost


def begin(pair: Duo, story: str) -> tuple[Sender, Receiver]:
    """A room that goes a certain way, both its handles in use."""
    sender, receiver = pair.open()
    receiver.receive(PAGES)
    if story == "opened":
        return sender, receiver
    if story.endswith("success"):
        if story == "slow success":
            pair.plan.delay(0.1, room=sender.room)
        sender.send(PAGES, last=True)
        return sender, receiver
    wait_until(lambda: sender.poll() is KVPoll.WAITING_FOR_INPUT or sender.poll().terminal)
    if story == "failure":
        sender.send([*PAGES, 4], last=True)
    else:
        (sender if story == "abort by prefill" else receiver).abort("not wanted")
    return sender, receiver


def finish(handles: tuple[Sender, Receiver]) -> tuple[KVPoll, KVPoll]:
    """How both have ended; cleared."""
    found = handles[0].wait(SOON_S), handles[1].wait(SOON_S)
    assert all(state.terminal for state in found), handles
    for handle in handles:
        handle.clear()
    return found


STORIES = ["success", "failure", "abort by prefill", "abort by decode"]


@pytest.mark.parametrize("story", STORIES)
def test_c47_each_letter_of_a_room_may_be_lost_once(backend: str, story: str) -> None:
    """Each single letter that a room needs is lost in turn: the room ends as it would have, on both sides, and leaves nothing."""
    with duo(backend) as pair, ControlTap(pair.prefill) as tap:
        pair.pair()
        usual = finish(begin(pair, story))
        lost_in_all = 0
        for turn in range(20):
            passed = itertools.count()
            lost = tap.drop(lambda letter, outgoing, turn=turn, passed=passed: of_rooms(letter, outgoing) and next(passed) == turn)
            handles = begin(pair, story)
            assert finish(handles) == usual, (turn, handles[0].failure, handles[1].failure)
            pair.stores_empty()
            lost.stop()
            lost_in_all += lost.count
            if not lost.count:
                break
        assert not lost.count and lost_in_all >= 5, "every letter had its turn"


def is_a(kind: type, state: KVPoll | None = None) -> Callable[[Letter, bool], bool]:
    return lambda letter, _outgoing: isinstance(letter.body, kind) and (state is None or letter.body.state is state)  # type: ignore[attr-defined]


LOST_FOR_GOOD = [
    # what is lost; the limit it leads to; how the room goes; how both end; what a side that ran into its limit waited for
    ("join", is_a(Join), "bootstrap_s", "opened", "FAILED", "FAILED", {"a receiver to join", "prefill rank 0 to open the room"}),
    ("here", is_a(Here), "bootstrap_s", "opened", "FAILED", "FAILED", {"a destination (a rec", "prefill rank 0 to open the room"}),
    ("destination", is_a(Destination), "bootstrap_s", "opened", "FAILED", "FAILED", {"a destination (a receiver has joined)"}),
    ("status", is_a(Status), "input_s", "success", "SUCCESS", "FAILED", {"the sender's first chunk"}),
    ("success", is_a(Status, KVPoll.SUCCESS), "transfer_s", "slow success", "SUCCESS", "FAILED", {"the sender's last chunk"}),
    ("beginning", is_a(Status, KVPoll.TRANSFERRING), "transfer_s", "slow success", "SUCCESS", "SUCCESS", set()),
    ("ack", is_a(Ack), "transfer_s", "success", "SUCCESS", "SUCCESS", set()),
    ("verdict", is_a(Status), "input_s", "abort by prefill", "FAILED", "FAILED", {"the sender's first chunk"}),
    ("ack of a failure", is_a(Ack), "input_s", "abort by prefill", "FAILED", "FAILED", set()),
    ("abort", is_a(Abort), "input_s", "abort by decode", "FAILED", "FAILED", {"the first chunk to be handed over with send"}),
    ("drained", is_a(Drained), "input_s", "abort by decode", "FAILED", "FAILED", set()),
]


@pytest.mark.parametrize(
    ("lost", "limit", "story", "sender_ends", "receiver_ends", "waited_for"),
    [row[1:] for row in LOST_FOR_GOOD],
    ids=[row[0] for row in LOST_FOR_GOOD],
)
def test_c47_a_kind_of_letter_lost_for_good(
    lost: Callable[[Letter, bool], bool],
    limit: str,
    story: str,
    sender_ends: str,
    receiver_ends: str,
    waited_for: set[str],
    backend: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No letter of a kind comes through: both sides end within the limits, nothing spins, and one line says what was waited for."""
    with (
        duo(backend, orphan_s=0.3, **{limit: 1.0}) as pair,
        ControlTap(pair.prefill) as tap,
        caplog.at_level(logging.WARNING, "kvcore.core"),
    ):
        pair.pair()
        rule = tap.drop(lost)
        busy, begun = cpu_s(), time.monotonic()
        handles = begin(pair, story)
        for handle in handles:
            handle.wait(SOON_S)
        took = time.monotonic() - begun
        assert [handle.poll().name for handle in handles] == [sender_ends, receiver_ends]
        assert took < SOON_S and cpu_s() - busy < 0.2 + 0.3 * took, "nothing spins"
        wait_until(lambda: rule.count, what="such a letter was lost")
        late = [handle.failure for handle in handles if handle.failure is not None and handle.failure.code is FailureCode.TIMEOUT]
        for failure in late:
            assert [line for line in caplog.messages if line == failure.reason] == [failure.reason]
            assert any(f"_s passed for room {handles[0].room} waiting for {words}" in failure.reason for words in waited_for)
        assert bool(late) == bool(waited_for)


def test_c47_many_rooms_at_once_are_logged_in_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    """Fifty rooms run into a limit at once: few lines, and the next one says how many were left out."""
    limits = "kvcore.core"  # tells of handles that are dropped as well

    def lines() -> list[logging.LogRecord]:
        return [record for record in caplog.records if "bootstrap_s passed" in record.getMessage()]

    with caplog.at_level(logging.WARNING, limits), duo(bootstrap_s=0.2) as pair:
        senders = [pair.prefill.sender(number()) for _ in range(50)]
        for sender in senders:
            ended(sender, KVPoll.FAILED)
        told = len(lines())
        assert 1 <= told <= 5
        wait_until(lambda: time.time() - lines()[-1].created > 1.05)
        ended(pair.prefill.sender(number()), KVPoll.FAILED)
        left_out = [int(words[1]) for line in lines() if (words := re.search(r"\(and (\d+) more", line.getMessage()))]
        assert len(lines()) + sum(left_out) == 51


# --- C48: what does not fit is found while the registration is read

UNFIT: dict[str, tuple[int, dict[str, float], tuple[str, str]]] = {
    # page size, limits, both values
    "page size": (32, {}, ("16", "32")),
    "orphan_s": (16, {"orphan_s": 2.5}, ("1", "2.5")),
    "quarantine_s": (16, {"quarantine_s": 60.0, "ticket_s": 20.0}, ("20", "30")),
}


@pytest.mark.parametrize("what", UNFIT)
def test_c48_a_registration_that_does_not_fit_is_refused_and_the_next_is_served(backend: str, what: str) -> None:
    """A decode side that does not fit: its room fails at once with both values, and one that fits is served by the same prefill."""
    page_size, limits, values = UNFIT[what]
    odd_pool = Pool.from_tensors("kv", memory(32), page_size=page_size)
    target = memory(32)
    with duo(backend) as pair, KVManager(config("decode", backend, limits=limits), [odd_pool]) as unfit:
        sender = pair.prefill.sender(number())
        for _ in range(3):
            refused = unfit.receiver(sender.room, pair.prefill.address)
            ended(refused, KVPoll.FAILED)
            failure = refused.failure
            assert failure is not None and failure.code is FailureCode.INCOMPATIBLE and all(value in failure.reason for value in values)
            assert pair.prefill.instance in failure.reason and unfit.instance in failure.reason
            assert "\n" not in failure.reason and refused.is_release_safe()
            refused.clear()
        sender.clear()
        pair.transfer(PAGES, PAGES)
        with manager("decode", target, backend=backend) as another:
            Duo(pair.prefill, another, pair.source, target).transfer(PAGES, PAGES)
        assert pair.prefill.healthy and unfit.stats().peers == 0


ODD_FACTS: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "backend": (lambda me: {"backend": "another"}, "'another'"),
    "wire version": (lambda me: {"wire_version": "99"}, "99"),
    "role": (lambda me: {"role": "prefill"}, "'prefill'"),
    "major version": (lambda me: {"version": (9, 0)}, "9.0"),
    "no pools": (lambda me: {"pools": (), "regions": ()}, "[]"),
    "a pool twice": (lambda me: {"pools": me.pools * 2, "regions": me.regions * 2}, "listed twice"),
    "a region too few": (lambda me: {"regions": me.regions[1:]}, "1 regions"),
    "a region too short": (lambda me: {"regions": (RegionInfo(me.regions[0].ptr, 1), *me.regions[1:])}, "describes its memory wrongly"),
    "a region at the end of memory": (
        lambda me: {"regions": (RegionInfo(2**64 - 1, 2048), *me.regions[1:])},
        "describes its memory wrongly",
    ),
    "a region before memory": (lambda me: {"regions": (RegionInfo(-1, 2048), *me.regions[1:])}, "describes its memory wrongly"),
    "pages without end": (lambda me: {"pools": (msgspec.structs.replace(me.pools[0], num_pages=2**62),)}, "describes its memory wrongly"),
}


def test_c48_no_registration_ends_the_thread_that_reads_it(backend: str) -> None:
    """Each fact of a registration that cannot be right is refused with a text about it; then a good one pairs on the same port."""
    with duo(backend) as pair, ControlTap(pair.prefill) as tap:
        pair.pair()
        hello = next(seen.letter for seen in tap.seen if isinstance(seen.letter.body, Hello))
        assert isinstance(hello.body, Hello)
        with zmq_client(f"127.0.0.1:{pair.prefill.control.port}") as client:
            for turn, (what, (spoil, words)) in enumerate(ODD_FACTS.items()):
                me = msgspec.structs.replace(hello.body.me, instance=f"decode-odd{turn}", **spoil(hello.body.me))
                client.send(encode(me.instance, "", msgspec.structs.replace(hello.body, pairing=turn, me=me)))
                refusal = answer(client).body
                assert isinstance(refusal, Refuse) and refusal.pairing == turn and words in refusal.text, (what, refusal)
                assert me.instance in refusal.text and len(refusal.text) <= 1024
        with manager("decode", memory(32), backend=backend) as fit:
            Duo(pair.prefill, fit, pair.source, memory(32)).open()
            wait_until(lambda: pair.prefill.stats().peers == 2)
        pair.transfer([1], [2])


# --- C49: whoever does not keep to the form is answered or ignored, and the next one is served


@pytest.mark.parametrize(
    ("kind", "frames"),
    [
        (zmq.REQ, [ping()]),
        (zmq.DEALER, [b"", ping()]),
        (zmq.DEALER, [b"", b"", ping()]),
        (zmq.DEALER, [b"somebody", b"", ping()]),
        (zmq.ROUTER, [b"nobody", ping()]),
        (zmq.PUSH, [ping()]),
        (zmq.PUB, [ping()]),
        (zmq.PAIR, [ping()]),
    ],
    ids=["asks in turn", "a delimiter", "two delimiters", "an identity", "a router", "a pusher", "a publisher", "a pair"],
)
@pytest.mark.parametrize("side", SIDES)
def test_c49_an_envelope_of_another_kind_stops_no_listener(kind: int, frames: list[bytes], side: str) -> None:
    """Clients of other socket kinds, and messages in other envelopes: ignored, and the next proper client is answered."""
    with plant() as made:
        with zmq_client(made.control(side), kind) as odd:
            for _ in range(3):
                try:
                    odd.send_multipart(frames, zmq.NOBLOCK)
                except zmq.ZMQError:
                    pass  # a kind of socket that nobody lets in, or that waits for an answer
            with zmq_client(made.control(side)) as proper:
                proper.send(ping())
                assert isinstance(answer(proper).body, Stranger)
        assert made.manager(side).healthy
        made.transfer([1], [2])


def test_c49_a_rank_that_is_not_served_is_refused_and_the_next_client_served() -> None:
    """Requests for ranks that do not exist, and letters to another instance, get an error; then a new decode side pairs and receives."""
    with plant() as made:
        for rank in ("1", "7", "-1", "1024", "99999", "zero", "%00", "0/0"):
            status, found = ask(made.prefill.address, "GET", f"/v1/ranks/{rank}")
            assert status == 404 and "error" in found, (rank, found)
        assert ask(made.prefill.address, "GET", "/v1/ranks/0")[0] == 200
        for side in SIDES:
            with zmq_client(made.control(side)) as client:
                for to in ("", "prefill-of-yesterday", made.manager(side).instance):
                    client.send(ping(to=to))
                    found_letter = answer(client)
                    assert isinstance(found_letter.body, Stranger) and found_letter.source == made.manager(side).instance
        target = memory(32)
        with manager("decode", target) as another:
            Duo(made.prefill, another, made.source, target).transfer(PAGES, PAGES)
        made.transfer(PAGES, PAGES)


# --- C50: everything comes twice, and a third time after clear


def changes(events: Events) -> dict[object, list[str]]:
    """The states that each lifetime was said to have passed through."""
    found: dict[object, list[str]] = {}
    for _, event in events.seen:
        if event.name == "status":
            found.setdefault(event.room, []).append(str(event.details["state"]))
    return found


def again(tap: ControlTap, letters: list[Letter]) -> None:
    for letter in letters:
        tap.inject(letter)


@pytest.mark.parametrize("story", [*STORIES, "backend failure"])
def test_c50_only_the_first_copy_of_a_letter_has_an_effect(backend: str, story: str) -> None:
    """Each letter of a room comes twice at once, and again after clear, during and after a new use of the number: nothing follows."""
    with duo(backend, orphan_s=0.5) as pair, ControlTap(pair.prefill) as at_prefill, ControlTap(pair.decode) as at_decode:
        pair.pair()
        watched = {pair.prefill: Events(), pair.decode: Events()}
        for owner, events in watched.items():
            owner.add_observer(events)
        copies = [tap.duplicate(lambda letter, outgoing: not outgoing and of_rooms(letter, outgoing)) for tap in (at_prefill, at_decode)]
        before = {owner: owner.stats().counters["kvcore_failures_total"] for owner in watched}
        if story == "backend failure":
            pair.plan.fail("torn", times=1)
        handles = begin(pair, "success" if story == "backend failure" else story)
        room, found = handles[0].room, finish(handles)
        assert found == ((KVPoll.SUCCESS,) * 2 if story == "success" else (KVPoll.FAILED,) * 2)
        pair.stores_empty()
        assert all(rule.count for rule in copies)
        letters = {tap: [seen.letter for seen in tap.seen if not seen.outgoing and of_rooms(*seen)] for tap in (at_prefill, at_decode)}
        assert all(letters.values())

        def late() -> None:
            for tap, mine in letters.items():
                again(tap, [letter for letter in mine if getattr(letter.body, "room", 0) == room])
            settled(pair.prefill)
            settled(pair.decode)

        late()
        pair.stores_empty()
        # The same number and attempt again, at every step of it, and beside another room: neither hears anything of what was.
        receiver = pair.decode.receiver(room, pair.prefill.address)
        wait_until(lambda: pair.prefill.stats().stores["waiting_joins"] == 1)
        late()
        sender = pair.prefill.sender(room)
        late()
        wait_until(lambda: receiver.poll() is KVPoll.WAITING_FOR_INPUT)
        late()
        receiver.receive(PAGES)
        wait_until(lambda: sender.poll() is KVPoll.WAITING_FOR_INPUT)
        both = [(sender, receiver), published(pair)]
        late()
        for sender, receiver in both:
            assert sender.poll() is receiver.poll() is KVPoll.WAITING_FOR_INPUT
            sender.send(PAGES, last=True, record=b"new")
        late()
        for sender, receiver in both:
            ended(sender, KVPoll.SUCCESS)
            ended(receiver, KVPoll.SUCCESS)
            assert receiver.record == b"new"
        late()
        assert [handle.poll() for handle in handles] == list(found)
        for sender, receiver in both:
            sender.clear()
            receiver.clear()
        pair.stores_empty()
        for owner, events in watched.items():
            expected = before[owner] + (story != "success")
            assert owner.stats().counters["kvcore_failures_total"] == expected, "each failure is counted once"
            assert all(len(set(states)) == len(states) for states in changes(events).values()), changes(events)
