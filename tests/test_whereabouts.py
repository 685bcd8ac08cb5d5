"""Which data-parallel rank has a room (C40): the service's book, and managers that announce and ask."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection

import msgspec
import numpy as np
import pytest

from kvcore import FailureCode, KVManager, KVPoll, Latent, Pool, Topology
from kvcore.bootstrap import read
from kvcore.whereabouts import MAX_ASKED, MAX_ROOMS, Announcement, Found, RoomBook
from tests.helpers import config, ended, number, stores_empty, wait_until


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_book_knows_what_was_announced_last_until_it_expires() -> None:
    clock = Clock()
    book = RoomBook(expiry_s=10.0, clock=clock)
    book.answer(Announcement(((1, 0), (2, 0)), 3))
    clock.now = 6.0
    book.answer(Announcement(((2, 0), (2, 1)), 4))
    asked = Announcement(((1, 0), (2, 0), (2, 1), (9, 0)))
    assert book.answer(asked) == Found(((1, 0), (2, 0), (2, 1)), (3, 4, 4))
    clock.now = 10.0
    assert book.answer(asked) == Found(((2, 0), (2, 1)), (4, 4))
    clock.now = 16.0
    assert book.answer(asked) == Found((), ()) and len(book) == 0


def test_the_book_forgets_what_is_withdrawn_by_who_announced_it() -> None:
    book = RoomBook(clock=Clock())
    book.answer(Announcement(((1, 0), (2, 0)), 3))
    book.answer(Announcement((), 4, ((1, 0), (9, 0))))
    assert book.answer(Announcement(((1, 0),))) == Found(((1, 0),), (3,))
    book.answer(Announcement((), 3, ((1, 0),)))
    assert book.answer(Announcement(((1, 0), (2, 0)))) == Found(((2, 0),), (3,))


def test_the_book_is_bounded_and_forgets_the_oldest() -> None:
    book = RoomBook(clock=Clock())
    for first in range(0, MAX_ROOMS + MAX_ASKED, MAX_ASKED):
        book.answer(Announcement(tuple((first + room, 0) for room in range(MAX_ASKED)), 0))
    assert len(book) == MAX_ROOMS
    assert book.answer(Announcement(((0, 0), (MAX_ROOMS + 1, 0)))).rooms == ((MAX_ROOMS + 1, 0),)


@pytest.mark.parametrize(
    "body",
    [
        {"rooms": [[-1, 0]]},
        {"rooms": [[2**63, 0]]},
        {"rooms": [[1, 2**31]]},
        {"rooms": [[1]]},
        {"rooms": [[1, 0]] * (MAX_ASKED + 1)},
        {"rooms": [[1, 0]], "dp_rank": -1},
        {"rooms": [[1, 0]], "dp_rank": 1024},
        {"rooms": "x"},
        {},
    ],
)
def test_p5_other_bodies_are_no_announcements(body: object) -> None:
    with pytest.raises(ValueError):
        read(json.dumps(body).encode(), Announcement)


# --- managers


class Groups:
    """Two data-parallel ranks of one rank each, filled with their numbers, and a decode rank."""

    def __init__(self, stack: ExitStack) -> None:
        self.target = np.zeros((8, 4), np.uint8)
        self.prefill: list[KVManager] = []
        for dp_rank in range(2):
            leader = self.prefill[0].address if self.prefill else None
            settings = config("prefill", topology=Topology(dp_size=2, dp_rank=dp_rank), bootstrap=leader)
            self.prefill.append(stack.enter_context(KVManager(settings, [self._pool(np.full((8, 4), 10 + dp_rank, np.uint8))])))
        self.decode = stack.enter_context(KVManager(config("decode"), [self._pool(self.target)]))
        self.address = self.prefill[0].address

    def _pool(self, array: np.ndarray) -> Pool:
        return Pool.from_tensors("kv", [array], page_size=2, layout=Latent())


@pytest.fixture
def groups() -> Iterator[Groups]:
    with ExitStack() as stack:
        yield Groups(stack)


@pytest.mark.parametrize("named", [True, False], ids=["named", "asked for"])
@pytest.mark.parametrize("first", ["sender", "receiver"])
def test_c40_the_stated_rank_serves_the_room_and_never_one_derived_from_its_number(groups: Groups, first: str, named: bool) -> None:
    for dp_rank in (1, 0, 0, 1, 1):
        room = number()

        def opened(room: int = room, dp_rank: int = dp_rank) -> list[object]:
            receiver = lambda: groups.decode.receiver(room, groups.address, dp_rank=dp_rank if named else None)  # noqa: E731
            order = (lambda: groups.prefill[dp_rank].sender(room)), receiver
            return [make() for make in (order if first == "sender" else reversed(order))]

        handles = opened()
        sender, receiver = handles if first == "sender" else reversed(handles)
        receiver.receive([3])  # type: ignore[attr-defined]
        sender.send([5], last=True)  # type: ignore[attr-defined]
        ended(receiver, KVPoll.SUCCESS)  # type: ignore[arg-type]
        assert groups.target[3].tolist() == [10 + dp_rank] * 4
        sender.clear()  # type: ignore[attr-defined]
        receiver.clear()  # type: ignore[attr-defined]
    for manager in (*groups.prefill, groups.decode):
        stores_empty(manager)


def test_c40_a_room_that_has_ended_on_one_rank_is_found_on_another_at_once(groups: Groups) -> None:
    room = number()
    for dp_rank in (0, 1, 0):
        receiver = groups.decode.receiver(room, groups.address)
        with groups.prefill[dp_rank].sender(room) as sender, receiver:
            receiver.receive([3])
            sender.send([5], last=True)
            ended(receiver, KVPoll.SUCCESS)
            ended(sender, KVPoll.SUCCESS)
        assert groups.target[3].tolist() == [10 + dp_rank] * 4
        for manager in (*groups.prefill, groups.decode):
            stores_empty(manager)
        wait_until(lambda: groups.prefill[0].stats().stores["bootstrap_rooms"] == 0)


def test_p5_a_rank_that_the_group_has_not_announces_nothing(groups: Groups) -> None:
    host, _, port = groups.address.rpartition(":")
    connection = HTTPConnection(host, int(port), timeout=10)
    connection.request("POST", "/v1/rooms", json.dumps({"rooms": [[1, 0]], "dp_rank": 2}))
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["error"]) == (400, "no data-parallel rank 2 in this group, its ranks are 0 .. 1")
    connection.close()


def test_c40_a_rank_that_the_group_has_not_is_refused_at_once(groups: Groups) -> None:
    with groups.decode.receiver(number(), groups.address, dp_rank=2) as receiver:
        ended(receiver, KVPoll.FAILED)
        assert receiver.failure is not None and receiver.failure.code is FailureCode.INCOMPATIBLE
        assert "dp_rank is 2 and it has 2 data-parallel ranks" in receiver.failure.reason


def test_a_receiver_that_is_cleared_is_asked_for_no_more(groups: Groups) -> None:
    receiver = groups.decode.receiver(number(), groups.address)
    wait_until(lambda: groups.decode.stats().stores["directory_rooms_sought"] == 1)
    receiver.clear()
    wait_until(lambda: groups.decode.stats().stores["directory_rooms_sought"] == 0)


def test_what_travels_is_small() -> None:
    rooms = tuple((2**63 - 1 - room, 2**31 - 1) for room in range(MAX_ASKED))
    assert len(msgspec.json.encode(Announcement(rooms, 1023))) < 64 * 1024
