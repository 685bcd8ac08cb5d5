"""Groups of ranks in processes of their own, unlike on the two sides: every byte is where the whole model has it (T3, T5)."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from kvcore_conformance.stage.driver import free_port

from tests.helpers import BACKENDS, number, stays, wait_until
from tests.rank_workers import LIMITS, Worker, worker, workers
from tests.test_mapping import MODELS, SIZES

Combination = tuple[str, str, tuple[int, int, int, int], bool]
"""Model, order of a page, sizes (prefill tp, decode tp, prefill pp, decode pp), and whether prefill's stages are uneven."""
LARGEST = 12
"""Ranks of both sides together in one combination: each is a manager with an engine."""


def combinations(count: int) -> list[Combination]:
    """As many, drawn once and for all, each model and order in turn."""
    chance = random.Random(7)
    small = [sizes for sizes in SIZES if sizes[0] * sizes[2] + sizes[1] * sizes[3] <= LARGEST]
    kinds = [(model, order) for model in MODELS for order in ("token", "head")]
    return [(*kinds[index % len(kinds)], chance.choice(small), bool(index % 2)) for index in range(count)]


ALL = combinations(40)
FEW = {"local": 8, "nixl": 2, "mooncake": 2}
"""Of which this many run each time; over other backends than ``local`` six in all."""


def drawn() -> list[object]:
    chosen = []
    for backend in BACKENDS:
        for index, combination in enumerate(ALL if backend == "local" else ALL[:6]):
            name = "-".join(map(str, (backend, *combination[:2], *combination[2])))
            marks = [] if index < FEW.get(backend, 2) else [pytest.mark.slow]
            chosen.append(pytest.param(backend, combination, id=name, marks=marks))
    return chosen


@pytest.fixture(scope="module")
def sides() -> Iterator[dict[str, tuple[Worker, Worker]]]:
    """The two processes of each backend, started when they are first wanted."""
    with ExitStack() as stack:

        class Started(dict[str, tuple[Worker, Worker]]):
            def __missing__(self, backend: str) -> tuple[Worker, Worker]:
                self[backend] = stack.enter_context(workers(backend))
                return self[backend]

        yield Started()


def opened(prefill: Worker, decode: Worker, combination: Combination) -> str:
    """All ranks of both sides; the group's address."""
    model, order, (prefill_tp, decode_tp, prefill_pp, decode_pp), uneven = combination
    address: str = prefill.open(model, order, prefill_tp, prefill_pp, uneven)
    decode.open(model, order, decode_tp, decode_pp, False)
    return address


def empty(*workers: Worker) -> None:
    """Nothing is stored of any room on any rank (C7)."""
    wait_until(lambda: not any(worker.left() for worker in workers), what="stores that are empty")


@pytest.mark.parametrize(("backend", "combination"), drawn())
def test_c88_all_ranks_get_their_bytes(backend: str, combination: Combination, sides: dict[str, tuple[Worker, Worker]]) -> None:
    """Three rooms, so that those that hold the same take turns; the last of them layer by layer."""
    prefill, decode = sides[backend]
    address = opened(prefill, decode, combination)
    try:
        for layer_by_layer in (False, False, True):
            room = number()
            prefill.begin("hand_over", room, address, layer_by_layer)
            decode.hand_over(room, address)
            prefill.end()
            assert set(prefill.ended(room)) | set(decode.ended(room)) == {"SUCCESS"}
            assert decode.wrong() == []
            prefill.clear(room)
            decode.clear(room)
        empty(prefill, decode)
        assert backend == "nixl" or prefill.imported() + decode.imported() == []  # NIXL's own package imports torch
    finally:
        prefill.begin("close")
        decode.close()
        prefill.end()


GROUPS: Combination = ("mha", "token", (4, 2, 1, 1), False)
"""Four prefill ranks and two decode ranks, each of which gathers from two, and hears of the leader."""


@contextmanager
def grouped(sides: dict[str, tuple[Worker, Worker]], combination: Combination) -> Iterator[tuple[Worker, Worker, str]]:
    """Groups over ``local``, which must have nothing left of their rooms at the end."""
    prefill, decode = sides["local"]
    address = opened(prefill, decode, combination)
    try:
        yield prefill, decode, address
        empty(prefill, decode)
    finally:
        prefill.begin("close")
        decode.close()
        prefill.end()


@pytest.fixture
def groups(sides: dict[str, tuple[Worker, Worker]]) -> Iterator[tuple[Worker, Worker, str]]:
    with grouped(sides, GROUPS) as all_ranks:
        yield all_ranks


@pytest.mark.parametrize("when", ["before", "held"])
@pytest.mark.parametrize(("side", "rank"), [("prefill", 0), ("prefill", 3), ("decode", 0), ("decode", 1)])
def test_t5_an_abort_on_one_rank_ends_all_with_its_reason(groups: tuple[Worker, Worker, str], side: str, rank: int, when: str) -> None:
    """Before the other side is there, or while all write."""
    prefill, decode, address = groups
    room, (one, other) = number(), (prefill, decode) if side == "prefill" else (decode, prefill)
    prefill.hold(room)
    one.hand_over(room, address)
    if when == "held":
        other.hand_over(room, address)
        wait_until(lambda: set(decode.states(room)) == {"TRANSFERRING"}, what="a transfer to all ranks")
    one.abort(room, rank)
    if when == "before":
        other.hand_over(room, address)
    for end in (*prefill.ended(room), *decode.ended(room)):
        assert end.startswith("FAILED") and f"rank {rank} aborts (aborted, from {side} rank {rank})" in end
    prefill.release()
    prefill.clear(room)
    decode.clear(room)
    decode.reset()


@pytest.mark.parametrize("rank", [0, 2])
def test_t5_a_failed_ticket_on_one_rank_ends_all_with_its_reason(groups: tuple[Worker, Worker, str], rank: int) -> None:
    """While the other ranks still write."""
    prefill, decode, address = groups
    room = number()
    prefill.hold(room, [other for other in range(4) if other != rank])
    prefill.fail(room, rank)
    prefill.hand_over(room, address)
    decode.hand_over(room, address)
    for end in (*prefill.ended(room), *decode.ended(room)):
        assert end.startswith("FAILED") and f"injected (backend, from prefill rank {rank})" in end
    prefill.release()
    prefill.clear(room)
    decode.clear(room)
    decode.reset()


@pytest.mark.parametrize("reason", ["the queue pair is gone", "long " * 1000], ids=["short", "long"])
def test_c106_every_rank_tells_the_first_reason_and_whose_it_was(groups: tuple[Worker, Worker, str], reason: str) -> None:
    """Rank 2 fails with a reason while the others write; slower ranks of both sides then give reasons of their own: all have the first one
    word for word, as far as it may travel, and keep it."""
    prefill, decode, address = groups
    room = number()
    prefill.hold(room, [0, 1, 3])
    prefill.fail(room, 2, reason)
    prefill.hand_over(room, address)
    decode.hand_over(room, address)
    ends = [*prefill.ended(room), *decode.ended(room)]
    assert len(ends) == 6 and len(set(ends)) == 1, ends
    assert reason[:900] in ends[0] and "(backend, from prefill rank 2)" in ends[0] and len(ends[0]) < 1024 + 200
    for side, rank in ((prefill, 0), (prefill, 3), (decode, 1)):
        side.abort(room, rank)
    prefill.release()  # and their writes succeed
    assert [*prefill.ended(room), *decode.ended(room)] == ends
    prefill.clear(room)
    decode.clear(room)
    decode.reset()


FOUR_TO_ONE: Combination = ("mha", "token", (4, 1, 1, 1), False)


def test_c91_success_only_when_the_last_rank_has_said_so(sides: dict[str, tuple[Worker, Worker]]) -> None:
    with grouped(sides, FOUR_TO_ONE) as (prefill, decode, address):
        room = number()
        prefill.hold(room, [3])
        prefill.hand_over(room, address)
        decode.hand_over(room, address)
        wait_until(lambda: prefill.states(room) == [*["SUCCESS"] * 3, "TRANSFERRING"], what="three ranks to have done")
        wait_until(lambda: decode.states(room) == ["TRANSFERRING"], what="decode to hear of them")
        stays(lambda: decode.states(room) == ["TRANSFERRING"], 0.3)
        prefill.release()
        assert {*prefill.ended(room), *decode.ended(room)} == {"SUCCESS"} and decode.wrong() == []
        prefill.clear(room)
        decode.clear(room)


@pytest.mark.parametrize("when", ["before", "after"])
def test_c91_no_success_if_a_rank_fails_before_or_after_the_others(sides: dict[str, tuple[Worker, Worker]], when: str) -> None:
    with grouped(sides, FOUR_TO_ONE) as (prefill, decode, address):
        room = number()
        prefill.hold(room, [3] if when == "after" else None)
        prefill.hand_over(room, address)
        decode.hand_over(room, address)
        if when == "after":
            wait_until(lambda: prefill.states(room)[:3] == ["SUCCESS"] * 3, what="three ranks to have done")
        prefill.abort(room, 3)
        prefill.release()
        (end,) = decode.ended(room)
        assert end.startswith("FAILED") and "rank 3 aborts (aborted, from prefill rank 3)" in end
        assert alike([*prefill.ended(room), end])
        prefill.clear(room)
        decode.clear(room)
        decode.reset()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_c67_of_ranks_whose_limits_pass_one_after_the_other_the_first_ends_all(sides: dict[str, tuple[Worker, Worker]], side: str) -> None:
    """The last rank's limit is the shortest, and each other's 50 ms longer than the next one's."""
    groups = dict(zip(("prefill", "decode"), sides["local"], strict=True))
    groups[side].limit([{"transfer_s": 1.0 + 0.05 * (3 - rank)} for rank in range(4)])
    with grouped(sides, ("mha", "token", (4, 4, 1, 1), False)) as (prefill, decode, address):
        room = number()
        prefill.hold(room)
        prefill.hand_over(room, address)
        decode.hand_over(room, address)
        began = time.monotonic()
        for end in (*prefill.ended(room), *decode.ended(room)):
            assert end.startswith("FAILED") and "transfer_s" in end and f"(timeout, from {side} rank " in end
        assert time.monotonic() - began < 2.0
        prefill.release()
        prefill.clear(room)
        decode.clear(room)
        decode.reset()


def alike(ends: list[str]) -> bool:
    """Whether all ranks of a room ended alike, or those that failed say with one voice why; to whom success was said, keeps it (T5)."""
    reasons = {end for end in ends if end != "SUCCESS"}
    return len(reasons) <= 1


@pytest.mark.slow
def test_t5_two_thousand_rooms_end_alike_or_explain_themselves_and_leave_nothing(groups: tuple[Worker, Worker, str]) -> None:
    """Twenty at a time; of a hundred five are aborted by some rank of either side, and of one a ticket fails on some rank."""
    prefill, decode, address = groups
    outcomes: dict[str, int] = {"SUCCESS": 0, "FAILED": 0}
    for batch in range(100):
        rooms = [number() for _ in range(20)]
        for room in rooms[:1] if batch % 5 == 0 else ():
            prefill.fail(room, batch % 4)
        prefill.begin("many", rooms, address, rooms[1:2] if batch % 2 else [])
        decode.many(rooms, address, [] if batch % 2 else rooms[2:3])
        prefill.end()
        ends = {
            room: [*first, *second]
            for (room, first), second in zip(prefill.all_ended(rooms).items(), decode.all_ended(rooms).values(), strict=True)
        }
        for room, each in ends.items():
            assert alike(each), (room, each)
            outcomes["SUCCESS" if set(each) == {"SUCCESS"} else "FAILED"] += 1
        prefill.all_clear(rooms)
        decode.all_clear(rooms)
    assert outcomes["SUCCESS"] > 1800 and outcomes["FAILED"] >= 100, outcomes
    decode.reset()


def moved(room: int, address: str, decode: Worker, *prefill: Worker) -> None:
    """A room over ranks in several processes succeeds, with the right bytes."""
    for side in (*prefill, decode):
        side.hand_over(room, address)
    for side in (decode, *prefill):
        assert set(side.ended(room)) == {"SUCCESS"}
        side.clear(room)
    assert decode.wrong() == []


def test_c71_decode_waits_for_the_last_rank_and_finds_all_again_when_the_leader_was_restarted() -> None:
    """Three of four ranks, then the fourth; then another leader at the old one's port, where the others register again."""
    sizes, port = ("mha", "token", 4, 1, False), free_port()
    with worker("prefill", "local") as leader, worker("prefill", "local") as last, worker("decode", "local") as decode:
        address = leader.open(*sizes, range(1), None, port)
        with worker("prefill", "local") as middle:
            middle.open(*sizes, range(1, 3), address)
            decode.open("mha", "token", 2, 1, False)
            room = number()
            for side in (leader, middle, decode):
                side.hand_over(room, address)
            stays(lambda: set(decode.states(room)) == {"BOOTSTRAPPING"}, 0.5)
            last.open(*sizes, range(3, 4), address)
            last.hand_over(room, address)
            for side in (decode, leader, middle, last):
                assert set(side.ended(room)) == {"SUCCESS"}
                side.clear(room)
            assert decode.wrong() == []
            met = decode.peers()
            leader.kill()
            wait_until(lambda: decode.peers() == met - 2, what="both decode ranks to know that it is gone")
            with worker("prefill", "local") as successor:
                assert successor.open(*sizes, range(1), None, port) == address
                moved(number(), address, decode, successor, middle, last)


def test_t5_a_rank_that_has_done_its_part_may_close_while_the_others_go_on() -> None:
    """The leader says success and closes; the other rank's tickets end afterwards."""
    sizes = ("mha", "token", 2, 1, False)
    with worker("prefill", "local") as leader, worker("prefill", "local") as other, worker("decode", "local") as decode:
        address = leader.open(*sizes, range(1))
        other.open(*sizes, range(1, 2), address)
        decode.open("mha", "token", 1, 1, False)
        room = number()
        other.hold(room)
        for side in (leader, other, decode):
            side.hand_over(room, address)
        assert leader.ended(room) == ["SUCCESS"]
        leader.clear(room)
        leader.close()
        wait_until(lambda: decode.peers() == 1, what="decode to know that the leader has closed")
        stays(lambda: decode.states(room) == ["TRANSFERRING"], 0.3)
        other.release()
        assert decode.ended(room) == other.ended(room) == ["SUCCESS"] and decode.wrong() == []


def test_p2_a_killed_rank_ends_its_rooms_on_all_ranks() -> None:
    """One of four prefill ranks dies in the middle of a room: both groups learn it within the liveness limit, and keep nothing."""
    sizes = ("mha", "token", 4, 1, False)
    with worker("prefill", "local") as most, worker("prefill", "local") as last, worker("decode", "local") as decode:
        address = most.open(*sizes, range(3))
        last.open(*sizes, range(3, 4), address)
        decode.open("mha", "token", 2, 1, False)
        room = number()
        for prefill in (most, last):
            prefill.hold(room)
            prefill.hand_over(room, address)
        decode.hand_over(room, address)
        wait_until(lambda: set(decode.states(room)) == {"TRANSFERRING"}, what="a transfer to all ranks")
        last.kill()
        began = time.monotonic()
        for end in (*decode.ended(room), *most.ended(room)):
            assert end.startswith("FAILED") and "(peer_lost, from decode rank 1)" in end
        assert time.monotonic() - began < LIMITS["liveness_s"]
        most.release()
        for side in (most, decode):
            side.clear(room)
        empty(most, decode)
