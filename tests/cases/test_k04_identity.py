"""Cases of kind K4: what a room is called, who may use the name, and that two uses of it never meet."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from kvcore_conformance.stage.crew import Crew
from kvcore_conformance.stage.driver import Child, Handle as Far
from kvcore_conformance.stage.waits import until

from kvcore import FailureCode, Handle, KVManager, KVPoll, Receiver, RoomError, Sender
from kvcore.faults import ControlTap, Hold
from kvcore.protocol.messages import Abort, Here, Status
from kvcore.states import RoomId
from kvcore.wire import Letter, decode
from tests.cases.engines import Shared, shared
from tests.helpers import BACKENDS, MOMENTS, ROOT, SOON_S, Duo, at, duo, ended, full_stores, manager, memory, number, stays, wait_until

PAGES = [3, 8, 1]
OTHERS = [20, 21]
SIDES = ["prefill", "decode"]


@pytest.fixture(scope="module", params=BACKENDS)
def lasting(request: pytest.FixtureRequest) -> Iterator[Shared]:
    with shared(request.param, orphan_s=0.3) as pair:
        yield pair


@pytest.fixture
def pair(lasting: Shared) -> Iterator[Shared]:
    """A pair over each backend; its rooms must have left nothing behind."""
    lasting.wipe()
    yield lasting
    lasting.tidy()
    lasting.stores_empty()


def reopen(pair: Duo, side: str, handle: Handle) -> Handle:
    """The same room once more."""
    if side == "prefill":
        return pair.prefill.sender(handle.room, handle.attempt)
    return pair.decode.receiver(handle.room, pair.prefill.address, attempt=handle.attempt)


def finish(pair: Duo, sender: Sender, receiver: Receiver) -> None:
    """Let a room that is live on both sides succeed, wherever it stands."""
    pair.plan.heal()
    if not receiver.metrics.pages:
        receiver.receive(PAGES)
    sender.send([] if sender.metrics.pages else PAGES, last=True)
    ended(sender, KVPoll.SUCCESS)
    ended(receiver, KVPoll.SUCCESS)
    assert pair.equal(PAGES, PAGES)


# --- C32, C33: one name, one live room


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("side", SIDES)
def test_c32_a_second_handle_of_a_live_room_is_refused_and_the_first_goes_on(pair: Shared, side: str, moment: str) -> None:
    """Only the opening fails, with an error that names room and side; nothing of it is stored, and the first room succeeds."""
    first = at(pair, moment, pages=PAGES)
    before = pair.prefill.stats().stores["rooms"], pair.decode.stats().stores["rooms"]
    for _ in range(2):
        with pytest.raises(RoomError, match=f"room {first[0].room} is live on the {side} side here; clear it first, or .* another attempt"):
            reopen(pair, side, first[0])
    assert (pair.prefill.stats().stores["rooms"], pair.decode.stats().stores["rooms"]) == before
    finish(pair, *first)


REMOVERS: dict[str, Callable[[Duo, str, Handle], object]] = {
    "cleared in another thread": lambda pair, side, handle: in_thread(handle.clear),
    "replaced by a new use": lambda pair, side, handle: (handle.abort("given up"), reopen(pair, side, handle)),
}


def owner(pair: Duo, side: str) -> KVManager:
    return pair.prefill if side == "prefill" else pair.decode


def in_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(SOON_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("remover", REMOVERS)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("side", SIDES)
def test_c32_a_room_that_somebody_else_removed_polls_as_failed(pair: Shared, side: str, moment: str, remover: str) -> None:
    """No question to its handle raises, and whoever waits for it wakes; the peer fails too."""
    sender, receiver = at(pair, moment, pages=PAGES)
    handle = sender if side == "prefill" else receiver
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(handle.wait(SOON_S)), daemon=True)
    waiting.start()
    kept = REMOVERS[remover](pair, side, handle)
    waiting.join(SOON_S)
    assert found == [KVPoll.FAILED] and handle.poll() is KVPoll.FAILED and handle.wait(0) is KVPoll.FAILED
    assert handle.failure is not None and handle.failure.side == side
    assert asyncio.run(awaited(handle)) is KVPoll.FAILED
    pair.plan.heal()
    assert handle.wait_release_safe(SOON_S) and handle.metrics.total_s > 0 and "FAILED" in repr(handle)
    handle.abort()
    handle.clear()
    if remover != "replaced by a new use":
        assert owner(pair, side).status(handle.room) is None
    del kept


async def awaited(handle: Handle) -> KVPoll:
    return await handle


@pytest.mark.parametrize("side", SIDES)
def test_c33_of_many_openings_of_one_room_at_once_one_succeeds(pair: Shared, side: str) -> None:
    """n samples under one room: one opens it, the others are refused by name and start nothing; with attempts of their own all work."""
    room, start = number(), threading.Barrier(6)
    opened: list[Handle] = []
    refused: list[str] = []

    def open_it() -> None:
        start.wait(SOON_S)
        try:
            opened.append(pair.prefill.sender(room) if side == "prefill" else pair.decode.receiver(room, pair.prefill.address))
        except RoomError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=open_it, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    assert len(opened) == 1 and len(refused) == 5 and all(f"room {room} is live" in text for text in refused)
    assert owner(pair, side).rooms() == {(room, 0): opened[0].poll()}
    other = reopen(pair, "decode" if side == "prefill" else "prefill", opened[0])
    pair.handles += [opened[0], other]  # type: ignore[list-item]
    sender, receiver = (opened[0], other) if side == "prefill" else (other, opened[0])
    assert isinstance(sender, Sender) and isinstance(receiver, Receiver)
    finish(pair, sender, receiver)
    samples = [pair.open(room, attempt) for attempt in range(1, 6)]
    for sample, (sender, receiver) in enumerate(samples):
        receiver.receive([sample])
        sender.send([sample + 10], last=True)
    for sample, (_, receiver) in enumerate(samples):
        ended(receiver, KVPoll.SUCCESS)
        assert pair.equal([sample + 10], [sample])


def test_c33_a_warm_up_uses_no_room_up(pair: Shared) -> None:
    """A room that was used, and cleared or not, is there for the next request under that name, again and again."""
    room = number()
    for turn in range(4):
        sender, receiver = pair.open(room)
        finish(pair, sender, receiver)
        if turn % 2:
            sender.clear()
            receiver.clear()
        pair.wipe()


# --- C34, C35: a name used again, or not the one that was meant


@pytest.mark.parametrize("attempt", [0, 1], ids=["same name", "another attempt"])
@pytest.mark.parametrize("left", ["live", "failed"])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("side", SIDES)
def test_c34_a_retry_meets_nothing_of_the_first_try(pair: Shared, side: str, moment: str, left: str, attempt: int) -> None:
    """One side failed and cleared the room, the other has it still, live or failed: the retry moves its own data, or is refused at once."""
    old_sender, old_receiver = at(pair, "published" if moment == "in flight" else moment, pages=PAGES)
    hold = pair.plan.hold(room=old_sender.room, times=1) if moment == "in flight" else Hold()
    if moment == "in flight":
        old_sender.send(PAGES)
        wait_until(lambda: hold.held == 1)
    mine, theirs = (old_sender, old_receiver) if side == "prefill" else (old_receiver, old_sender)
    other = "decode" if side == "prefill" else "prefill"
    with ControlTap(pair.decode) as tap:
        news = tap.drop(lambda letter, outgoing: isinstance(letter.body, Status | Abort)) if left == "live" else None
        mine.abort("the first try")
        mine.clear()
        if news is None or attempt == 0:
            if news is not None:
                with pytest.raises(RoomError, match="is live"):
                    reopen(pair, other, theirs)
                assert not theirs.poll().terminal
                news.stop()
            ended(theirs, KVPoll.FAILED)
        first_try = [seen for seen in tap.seen if getattr(seen.letter.body, "room", None) == mine.room]
        unmet = tap.drop(lambda letter, outgoing: isinstance(letter.body, Here))
        new = {this: open_at(pair, this, mine.room, attempt) for this in (side, other)}  # where it ended is opened first (C4)
        sender, receiver = new["prefill"], new["decode"]
        assert isinstance(sender, Sender) and isinstance(receiver, Receiver)
        receiver.receive(OTHERS)
        for known in (False, True):
            wait_until(lambda: unmet.count if not known else sender.poll() is KVPoll.WAITING_FOR_INPUT)  # noqa: B023
            for letter, outgoing in first_try:  # late and once more
                tap.inject(letter, outgoing=outgoing)
            stays(lambda: not sender.poll().terminal and not receiver.poll().terminal, 0.02)
            unmet.stop()
        if news is not None:
            news.stop()
        sender.send([10, 11], last=True)
        ended(receiver, KVPoll.SUCCESS)
        ended(sender, KVPoll.SUCCESS)
        assert pair.equal([10, 11], OTHERS)
    ended(theirs, KVPoll.FAILED)
    assert theirs.failure is not None and theirs.failure.reason == "the first try" and theirs.failure.side == side
    assert pair.untouched(PAGES)
    hold.release()  # the first try's write lands now, if there was one
    assert theirs.wait_release_safe(SOON_S) and mine.wait_release_safe(SOON_S) and pair.equal([10, 11], OTHERS)
    assert moment != "in flight" or pair.equal(PAGES, PAGES)


def open_at(pair: Shared, side: str, room: int, attempt: int) -> Handle:
    """One side of a room, which the fixture clears."""
    handle = pair.prefill.sender(room, attempt) if side == "prefill" else pair.decode.receiver(room, pair.prefill.address, attempt=attempt)
    pair.handles.append(handle)
    return handle


@pytest.mark.parametrize("differs", ["number", "attempt"])
@pytest.mark.parametrize("published", [False, True])
def test_c35_two_sides_that_wait_under_unlike_names_end_and_say_which(published: bool, differs: str) -> None:
    """Prefill opened another name than decode waits for: both fail by a limit, and each names what it waited for."""
    with duo(bootstrap_s=0.3, orphan_s=0.2) as pair:
        room = number()
        mine, theirs = RoomId(room, 1), RoomId(number(), 0) if differs == "number" else RoomId(room, 2)
        sender, receiver = pair.prefill.sender(*mine), pair.decode.receiver(theirs.number, pair.prefill.address, attempt=theirs.attempt)
        if published:
            receiver.receive(PAGES)
            sender.send(PAGES, last=True)
        for handle, name, codes in (
            (sender, mine, {FailureCode.TIMEOUT}),
            (receiver, theirs, {FailureCode.NO_SUCH_ROOM, FailureCode.TIMEOUT}),
        ):
            ended(handle, KVPoll.FAILED)
            failure = handle.failure
            assert failure is not None and failure.code in codes and f"room {name}" in failure.reason
            assert "waiting for" in failure.reason or "no such room" in failure.reason
            assert str(failure).startswith(f"room {name} failed")
            handle.clear()
        assert pair.untouched()
        pair.stores_empty()


# --- C37, C38: numbers


GOOD = [0, 1, 2**31, 2**53 + 1, 2**63 - 1]
BAD: list[Any] = [-1, 2**63, 2**64 - 1, 2**64, 1.0, float("nan"), True, False, "12a", "12", b"12", None, [1], np.int64(3), np.float64(1)]
GOOD_ATTEMPTS = [0, 1, 2**31 - 1]
BAD_ATTEMPTS: list[Any] = [-1, 2**31, 2**63, 1.0, True, None, "0", b"0"]

OPENERS: dict[str, Callable[[Duo, Any, Any], object]] = {
    "sender": lambda pair, room, attempt: pair.prefill.sender(room, attempt),
    "receiver": lambda pair, room, attempt: pair.decode.receiver(room, pair.prefill.address, attempt=attempt),
    "reject": lambda pair, room, attempt: pair.decode.reject(room, "busy", pair.prefill.address, attempt),
    "status": lambda pair, room, attempt: pair.decode.status(room, attempt),
    "explain": lambda pair, room, attempt: pair.decode.explain(room, attempt),
}


@pytest.mark.parametrize("attempt", GOOD_ATTEMPTS)
@pytest.mark.parametrize("room", GOOD)
def test_c37_a_number_comes_back_exactly(pair: Shared, room: int, attempt: int) -> None:
    """Through the store, both ways over the wire, the engine's key, texts and errors: the number that was given."""
    name = RoomId(room, attempt)
    with ControlTap(pair.decode) as tap:
        sender, receiver = pair.open(room, attempt)
        receiver.receive(PAGES)
        sender.send(PAGES, last=True)
        ended(receiver, KVPoll.SUCCESS)
        bodies: list[Any] = [seen.letter.body for seen in tap.seen]
    named = [(type(body).__name__, body.room, body.attempt) for body in bodies if "room" in type(body).__struct_fields__]
    assert {"Join", "Here", "Destination", "Status"} <= {kind for kind, *_ in named} and {tuple(rest) for _, *rest in named} == {name}
    assert {(one.room.number, one.room.attempt) for one in pair.watch.transfers if one.room.generation == sender.generation} == {name}
    for handle, owner_of in ((sender, pair.prefill), (receiver, pair.decode)):
        assert (handle.room, handle.attempt) == name and set(owner_of.rooms()) == {name}
        assert owner_of.explain(room, attempt).startswith(f"room {name} ") and f"room {name} " in repr(handle)
        ended(handle, KVPoll.SUCCESS)
        handle.clear()
    pair.stores_empty()
    sender, receiver = pair.published(PAGES, room, attempt)
    receiver.abort("no")
    ended(sender, KVPoll.FAILED)
    assert sender.failure is not None and (sender.failure.room, sender.failure.attempt) == name
    assert str(sender.failure).startswith(f"room {name} failed: no")


@pytest.mark.parametrize("room", GOOD)
def test_c37_a_number_comes_back_exactly_between_processes_and_as_json(sides: tuple[Child, Child], room: int) -> None:
    """Over a real wire, and through JSON and the admin port of both processes."""
    prefill, decode = sides
    sender, receiver = prefill.sender(room), decode.receiver(room, prefill)
    receiver.receive([1])
    sender.send([2], last=True)
    for handle in (receiver, sender):
        assert handle.wait() == "SUCCESS"
        assert handle.child.call(handle.name, "room") == room and handle.child.status(room) == "SUCCESS"
        assert asked(handle.child.admin, f"/rooms/{room}")[1].startswith(f"room {room} ")
        handle.clear()


def asked(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=SOON_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize("text", ["-1", str(2**63), str(2**64), "1.0", "12a", "True", "None", "1?attempt=2147483648", "1?attempt=-1"])
def test_c37_the_admin_port_refuses_what_is_no_number(sides: tuple[Child, Child], text: str) -> None:
    """In words, and it goes on serving."""
    status, answer = asked(sides[1].admin, f"/rooms/{text}")
    assert status == 400 and json.loads(answer)["error"]
    assert asked(sides[1].admin, "/rooms/1")[0] == 200


@pytest.mark.parametrize("opener", OPENERS)
def test_c37_what_is_no_room_is_refused_with_the_range_and_leaves_nothing(pair: Shared, opener: str) -> None:
    """When the handle is made, on every way a number comes in; no thread dies of it."""
    for room in BAD:
        with pytest.raises(RoomError, match=r"room .* 0 \.\. 2\*\*63-1"):
            OPENERS[opener](pair, room, 0)
    for attempt in BAD_ATTEMPTS:
        with pytest.raises(RoomError, match=r"attempt .* 0 \.\. 2\*\*31-1"):
            OPENERS[opener](pair, 1, attempt)
    assert full_stores(pair.prefill) == full_stores(pair.decode) == {}
    pair.transfer([1], [2])
    assert pair.prefill.healthy and pair.decode.healthy


def test_c37_a_number_out_of_range_that_a_peer_names_is_a_bad_message(pair: Shared) -> None:
    """Each is counted, concerns no room, and the next good letter is served."""
    sender, receiver = pair.published(PAGES)
    with ControlTap(pair.prefill) as tap:
        pair.transfer([1], [2])
        good = Letter(1, pair.decode.instance, pair.prefill.instance, Abort(sender.room, 0, receiver.generation, sender.generation))
        plain = msgspec.to_builtins(good)
        changes = [{"room": room} for room in BAD if type(room) in (int, float, bool, str, bytes, list, type(None))]
        changes += [{"attempt": attempt} for attempt in BAD_ATTEMPTS]
        before = pair.prefill.control.bad_messages
        sent = 0
        for change in changes:
            try:
                frame = msgspec.msgpack.encode(plain | {"body": plain["body"] | change})
            except OverflowError:
                continue  # no such number in msgpack
            with pytest.raises(ValueError):
                decode(frame)
            tap.inject(frame, peer=pair.decode.instance)
            sent += 1
        wait_until(lambda: pair.prefill.control.bad_messages == before + sent)
        assert sent > 10 and sender.poll() is KVPoll.WAITING_FOR_INPUT
    sender.send(PAGES, last=True)
    ended(receiver, KVPoll.SUCCESS)


def test_c38_no_id_is_drawn_twice(tmp_path: Path) -> None:
    """In 8 processes forked at once: 100,000 instance ids, and lifetimes opened by 4 threads each. None comes twice, no generation is 0."""
    command = [sys.executable, "-m", "tests.cases.drawing", "8", "12500", "4", "100", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, timeout=60, check=True)
    drawn = [json.loads(file.read_text(encoding="ascii")) for file in tmp_path.iterdir()]
    ids = [each for one in drawn for each in (one["instance"], *one["ids"])]
    assert len(drawn) == 8 and len(set(ids)) == len(ids) == 100_008
    generations = [one["generations"] for one in drawn]
    assert all(len(set(each)) == len(each) == 400 and min(each) > 0 for each in generations)


# --- C39, C40: what a room is found by


@pytest.fixture(scope="module", params=BACKENDS)
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    crew = Crew(backend=request.param)
    try:
        yield crew
    finally:
        crew.end()


@pytest.fixture(scope="module")
def sides(crew: Crew) -> Iterator[tuple[Child, Child]]:
    """A prefill and a decode process."""
    with crew.lend(2) as (prefill, decode):
        yield prefill.start("prefill", admin="127.0.0.1:0"), decode.start("decode", admin="127.0.0.1:0")


def test_c39_two_processes_match_by_the_room_alone(sides: tuple[Child, Child]) -> None:
    """What each side counts and names for itself differs: opened in other orders, with other generations, after other rooms."""
    prefill, decode = sides
    for _ in range(20):  # so that no count of the two is the same
        prefill.sender(2**40).clear()
    rooms = [7_000_000_000_000 + 1021 * step for step in range(6)]
    senders = {room: prefill.sender(room) for room in rooms}
    receivers = {room: decode.receiver(room, prefill) for room in reversed(rooms)}
    generations = [(generation(senders[room]), generation(receivers[room])) for room in rooms]
    assert not any(mine == theirs for mine, theirs in generations)
    for page, room in enumerate(rooms):
        receivers[room].receive([page])
    for page, room in reversed(list(enumerate(rooms))):
        senders[room].send([31 - page], last=True, record=f"of {room}")
    for page, room in enumerate(rooms):
        assert receivers[room].wait() == "SUCCESS" and receivers[room].record == f"of {room}"
        assert decode.digest([page]) == prefill.digest([31 - page])
    for handle in itertools.chain(senders.values(), receivers.values()):
        handle.clear()
    for child in sides:
        until(lambda child=child: child.work("held") == {}, "nothing is held")  # type: ignore[misc]


def generation(handle: Far) -> int:
    return int(handle.child.call(handle.name, "generation"))


@pytest.mark.parametrize("dp_rank", [None, 0])
def test_c40_the_stated_rank_is_used_whatever_the_rooms_number(pair: Shared, dp_rank: int | None) -> None:
    """No rank is derived from the number: any number meets the rank that was stated, or the only one."""
    for room in (2**62 + 1, 2**62 + 2, 1_000_003, 7, 2**63 - 1):
        sender, receiver = pair.prefill.sender(room), pair.decode.receiver(room, pair.prefill.address, dp_rank)
        with sender, receiver:
            receiver.receive([4])
            sender.send([5], last=True)
            ended(receiver, KVPoll.SUCCESS)
            ended(sender, KVPoll.SUCCESS)


@pytest.mark.parametrize("way", ["receiver", "reject"])
def test_c40_a_rank_that_does_not_exist_is_refused_and_leaves_nothing(pair: Shared, way: str) -> None:
    """Never another rank instead: what can be none is refused at once, with the room and the rank, and no room is opened anywhere; what
    only that group has not fails the room (``tests/test_whereabouts.py``)."""
    room, ways = number(), {"receiver": pair.decode.receiver, "reject": pair.decode.reject}
    arguments = [room, pair.prefill.address] if way == "receiver" else [room, "busy", pair.prefill.address]
    ranks: list[Any] = [-1, 1024, 2**31, 2**64, True, False, "0", 0.0, [0]]
    for rank in ranks:
        with pytest.raises(RoomError) as refused:
            ways[way](*arguments, dp_rank=rank)
        assert f"room {room}: dp_rank is {rank!r}" in str(refused.value) and "or None" in str(refused.value)
    assert full_stores(pair.decode) == full_stores(pair.prefill) == {}


def test_c40_the_stated_prefill_is_used_and_no_other_that_has_the_room() -> None:
    """The router picks the instance as well: the room is met where it was said, whoever else has one of that name."""
    source, target = memory(32, seed=5), memory(32)
    with manager("prefill", memory(32, seed=6)) as other, manager("prefill", source) as stated, manager("decode", target) as decode:
        room = number()
        elsewhere, sender = other.sender(room), stated.sender(room)
        receiver = decode.receiver(room, stated.address)
        receiver.receive(PAGES)
        elsewhere.send(PAGES, last=True)
        sender.send(PAGES, last=True)
        ended(receiver, KVPoll.SUCCESS)
        assert Duo(stated, decode, source, target).equal(PAGES, PAGES)
        assert elsewhere.poll() is KVPoll.BOOTSTRAPPING
