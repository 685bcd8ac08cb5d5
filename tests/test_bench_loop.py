"""How measurements carry rooms and keep others waiting: how many at a time, and that none is lost sight of."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import kvcore
from kvcore.bench.loop import carry
from kvcore.bench.setup import Setup
from kvcore.bench.waiting import GROUP, Opener, Waiting
from kvcore.sides import Link, ToolError
from tests.helpers import Duo, duo, ended, number

SETUP = Setup("local", patience_s=20.0)
HURRIED = Setup("local", patience_s=0.3)


@pytest.fixture(scope="module")
def pair() -> Iterator[Duo]:
    with duo() as found:
        yield found.pair()


@pytest.fixture
def both(pair: Duo) -> tuple[Opener, Opener]:
    """What opens prefill's and decode's rooms."""
    mine, theirs = multiprocessing.Pipe()
    return Opener(pair.prefill, "prefill", Link(mine)), Opener(pair.decode, "decode", Link(theirs))


def side_by_side(*calls: Callable[[], object]) -> None:
    """Each on a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        for call in [pool.submit(call) for call in calls]:
            call.result()


class Counted:
    """Opens rooms, and knows how many were live at most."""

    def __init__(self, opener: Opener) -> None:
        self._opener, self._handles, self.most = opener, list[kvcore.Handle](), 0

    def begin(self, room: int) -> kvcore.Handle:
        self._handles.append(self._opener.begin(room, room % 32))
        self.most = max(self.most, sum(not handle.poll().terminal for handle in self._handles))
        return self._handles[-1]


@pytest.mark.parametrize("at_once", [1, 5])
def test_rooms_are_carried_so_many_at_a_time_and_cleared(at_once: int, pair: Duo, both: tuple[Opener, Opener]) -> None:
    rooms = [number() for _ in range(23)]
    prefill, decode = Counted(both[0]), Counted(both[1])
    took = list[float]()
    side_by_side(
        lambda: carry(pair.prefill, SETUP, rooms, 7, prefill.begin),
        lambda: took.extend(carry(pair.decode, SETUP, rooms, at_once, decode.begin)[0]),
    )
    assert len(took) == 23 and all(0 < each < 20 for each in took)
    assert (decode.most <= at_once, prefill.most <= 7) == (True, True)
    assert decode.most == at_once or at_once > 1
    pair.stores_empty()


def test_a_room_that_gets_nowhere_is_named_after_a_while(pair: Duo, both: tuple[Opener, Opener]) -> None:
    rooms = [number(), number()]
    for at_once in (1, 2):
        with pytest.raises(ToolError, match=rf"room {rooms[0]} is still BOOTSTRAPPING after 0.3 s; try: kvcore doctor local"):
            carry(pair.prefill, HURRIED, rooms, at_once, lambda room, attempt=at_once: both[0].begin(room, 0, attempt))


def test_a_room_that_fails_ends_it_with_its_reason(pair: Duo, both: tuple[Opener, Opener]) -> None:
    room = number()

    def begin(room: int) -> kvcore.Handle:
        handle = both[1].begin(room, 0)
        handle.abort("not today")
        return handle

    with pytest.raises(kvcore.KVTransferError, match="not today"):
        carry(pair.decode, SETUP, [room], 1, begin)


def test_rooms_wait_on_both_sides_until_one_does_not(pair: Duo, both: tuple[Opener, Opener]) -> None:
    mine, theirs = (Waiting(opener, SETUP, attempt=3) for opener in both)
    for count, there in ((GROUP + 3, GROUP + 3), (GROUP + 5, GROUP + 5), (2, GROUP + 5)):
        side_by_side(lambda count=count: mine.grow(count), lambda count=count: theirs.grow(count))  # type: ignore[misc]
        assert len(mine.handles) == len(theirs.handles) == there
        assert len({handle.room for handle in theirs.handles}) == len(theirs.handles)
        mine.check()
        theirs.check()
    mine.handles[1].abort("enough")
    ended(theirs.handles[1], kvcore.KVPoll.FAILED)
    for waiting in (mine, theirs):
        with pytest.raises(ToolError, match=rf"1 of {GROUP + 5} rooms do not wait: room 2 is FAILED \(.*enough.*\); try fewer rooms"):
            waiting.check()
    mine.clear()
    theirs.clear()
    assert not mine.handles
    pair.stores_empty()


def test_rooms_that_meet_nobody_do_not_wait(both: tuple[Opener, Opener]) -> None:
    alone = Waiting(both[1], HURRIED, attempt=4)
    with pytest.raises(ToolError, match="2 of 2 rooms do not wait: room 1 is BOOTSTRAPPING"):
        alone.grow(2)
    alone.clear()
