"""T: every page goes where it must, nothing goes anywhere else, and errors stay where they arose."""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcore import Capabilities
from kvcore_conformance.marks import full, rule
from kvcore_conformance.stage.arena import LIMITS, POOLS, Pair, Room, number, paired, shared
from kvcore_conformance.stage.bare import descriptors
from kvcore_conformance.stage.crew import Crew
from kvcore_conformance.stage.driver import Child, PoolSpec, error_of
from kvcore_conformance.stage.oracle import Pages
from kvcore_conformance.stage.waits import SOON_S

KV, AUX = POOLS
BAD_PAGES: dict[str, Sequence[Any]] = {
    "one past the end": [0, KV.pages], "negative": [-1], "a bool": [True, 2], "a float": [1.5], "text": ["3"], "a list": [[1, 2]],
    "above 31 bits": [2**31], "above 63 bits": [2**63], "above 64 bits": [2**64 + 1],
}  # fmt: skip
FAR = PoolSpec("kv", pages=4200, page_bytes=1 << 20, layers=1)
RETRIES_FOR_S = 0.4


def scattered(pages: int, seed: int) -> list[int]:
    """All pages in random order."""
    return random.Random(seed).sample(range(pages), pages)


# --- T1


@rule("T1")
def test_t1_pages_keep_their_order_over_chunks_and_pools(pair: Pair) -> None:
    """Chunks of one pool, of both, and empty ones; both pools have sizes of their own."""
    room = pair.open()
    room.mine = {"kv": [5, 6, 7, 47, 0, 20, 19, 18], "aux": [7, 0, 3]}
    room.theirs = {"kv": [40, 41, 9, 0, 47, 1, 2, 3], "aux": [0, 7, 6]}
    pair.expect(room)
    room.receive()
    chunks: list[dict[str, list[int]]]
    chunks = [{"kv": [5, 6]}, {}, {"aux": [7]}, {"kv": [7, 47, 0], "aux": [0, 3]}, {"kv": []}, {"kv": [20, 19, 18]}]
    for chunk in chunks:
        room.sender.send(chunk)
    room.sender.send({}, last=True)
    room.ends("SUCCESS")
    pair.intact()
    room.clear()


@rule("T1")
def test_t1_all_pages_can_move_at_once(pair: Pair) -> None:
    pair.transfer(
        {"kv": scattered(KV.pages, 1), "aux": range(AUX.pages)},
        {"kv": scattered(KV.pages, 2), "aux": range(AUX.pages - 1, -1, -1)},
    )


@rule("T1")
@pytest.mark.parametrize("chunks", [1, pytest.param(3, marks=full)])
def test_t1_a_room_may_have_no_pages(pair: Pair, chunks: int) -> None:
    room = pair.open()
    room.receiver.receive({})
    for left in range(chunks - 1, -1, -1):
        room.sender.send({}, last=not left)
    room.ends("SUCCESS")
    pair.intact()
    room.clear()


@rule("T1")
def test_t1_prefix_pages_stand_in_neither_list(pair: Pair) -> None:
    room = pair.open()
    pair.decode.call(room.receiver.name, "receive", {"kv": list(room.theirs["kv"])}, prefix_pages=3)
    assert room.sender.until("WAITING_FOR_INPUT") == "WAITING_FOR_INPUT"
    found = pair.prefill.call(room.sender.name, "prefix_pages")
    assert found == {"kv": 3, "aux": 0}, f"the sender is told of {found} prefix pages and not of 3 of kv"
    pair.expect(room)
    room.send()
    room.ends("SUCCESS")
    pair.intact()
    room.clear()


@rule("T1")
def test_t1_many_scattered_pages_of_odd_sizes(crew: Crew, able: Capabilities) -> None:
    """More pages, of a single byte each, than a transfer may have descriptors; some that are far from the pool's beginning; and more
    regions than a byte counts. What the backend is given stays within its limits."""
    pages = descriptors(able) + 77
    pools = (
        PoolSpec("kv", pages, page_bytes=1, layers=2), PoolSpec("odd", pages=300, page_bytes=4099, layers=1),
        PoolSpec("deep", pages=3, page_bytes=8, layers=300),
    )  # fmt: skip
    with paired(crew, pools) as pair:
        pair.prefill.work("aid", "spy:Spy", "spy")
        far = [299, 3, 257, 150, 0, 298, 280]
        pair.transfer({"kv": scattered(pages, 3), "odd": far, "deep": [2]}, {"kv": scattered(pages, 5), "odd": far[::-1], "deep": [0]})
        most, nbytes = pair.prefill.call("spy", "largest")
        assert most <= (able.max_descriptors or most), f"a transfer had {most} descriptors"
        assert nbytes <= (able.max_bytes or nbytes), f"a transfer had {nbytes} bytes"


@rule("T1")
@full
def test_t1_the_sides_may_have_pools_of_different_sizes(pair: Pair, crew: Crew) -> None:
    with crew.lend(1) as (other,):
        other.start("decode", [replace(KV, pages=200), replace(AUX, pages=3)], limits=LIMITS)
        sender = pair.prefill.sender(number_of(pair))
        receiver = other.receiver(sender.room, pair.prefill)
        mine, theirs = scattered(KV.pages, 7), [199, *range(100, 146), 0]
        receiver.receive({"kv": theirs})
        sender.send({"kv": mine}, last=True)
        assert (receiver.wait(), sender.wait()) == ("SUCCESS", "SUCCESS")
        digest = pair.prefill.digest(mine)
        assert other.digest(theirs) == digest, "the pages that arrived are not those that were sent"
        assert other.touched() == sorted(theirs), "other pages were written than those listed"
        for handle in (sender, receiver):
            handle.clear()


def number_of(pair: Pair) -> int:
    """A room number for handles that are opened one by one."""
    room = pair.open()
    room.clear()
    return room.number


# --- T2


@rule("T2")
@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ({"kv": [KV.pages - 1, 0], "aux": [0, AUX.pages - 1]}, {"kv": [0, KV.pages - 1], "aux": [AUX.pages - 1, 0]}),
        ({"kv": range(0, KV.pages - 2, 2)}, {"kv": range(1, KV.pages - 1, 2)}),
    ],
    ids=["first and last", "every other"],
)
def test_t2_what_is_around_and_between_the_pages_is_left_alone(pair: Pair, mine: Pages, theirs: Pages) -> None:
    room = pair.open()
    room.mine, room.theirs = mine, theirs
    pair.expect(room)
    room.receive()
    room.send()
    room.ends("SUCCESS")
    pair.target.gets_right()
    pair.accept(room)  # whether they are right is a matter of T1
    pair.intact()
    room.clear()


@rule("T2")
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_t2_bad_pages_are_refused_and_the_room_goes_on(pair: Pair, side: str) -> None:
    room = pair.open()
    hand_over = room.sender.send if side == "prefill" else room.receiver.receive
    for what, pages in BAD_PAGES.items():
        assert_refused(hand_over, {"kv": list(pages)}, what)
    assert_refused(hand_over, {"nowhere": [0]}, "a pool that there is not")
    if side == "decode":
        assert_refused(hand_over, {"kv": [4, 9, 4]}, "a page listed twice")
    pair.expect(room)
    room.receive()
    room.send()
    room.ends("SUCCESS")
    pair.intact()
    room.clear()


def assert_refused(hand_over: Any, pages: dict[str, list[Any]], what: str) -> None:
    """Handing pages over raises ``PageError``."""
    error = error_of(lambda: hand_over(pages))
    assert error is not None and error.kind == "PageError", f"pages that are {what} were {f'refused with {error}' if error else 'taken'}"


@rule("T2")
@pytest.mark.parametrize(
    "pages", [[8, 40, 2, 3, KV.pages], pytest.param([8, 40, -1, 3, 21], marks=full), pytest.param([8, 8, 2, 3, 1], marks=full)]
)
def test_t2_what_a_peer_names_is_checked_on_the_side_that_writes(pair: Pair, pages: list[int]) -> None:
    """All of it, before the first page moves."""
    room = pair.open()
    assert room.receiver.until("WAITING_FOR_INPUT") == "WAITING_FOR_INPUT"
    pair.prefill.work("aid", "forge:Forge", "tap")
    pair.prefill.call("tap", "destination", room.number, "kv", pages)
    room.receive()
    room.sender.send({"kv": list(room.mine["kv"][:1])})
    room.ends("FAILED")
    assert room.sender.failure.code == "bad_pages", f"pages {pages} of the peer failed the room with: {room.reasons()}"
    pair.intact()
    pair.prefill.heal()
    room.clear()


@rule("T2")
@full
def test_t2_places_above_4_gib_are_exact(crew: Crew) -> None:
    """In files of which only the pages that are named here ever exist; those that 31 or 32 bits would take them for stay as they are."""
    mine, theirs = [4199, 3, 4100, 2500], [4097, 4198, 5, 2300]
    others = {near for page in theirs for near in (page % 4096, page % 2048, page - 1, page + 1)} - set(theirs)
    with tempfile.TemporaryDirectory(prefix="kvcore-", dir=shared()) as folder, crew.lend(2) as (prefill, decode):
        specs = [replace(FAR, file=str(Path(folder, side))) for side in ("prefill", "decode")]
        source, target = (np.memmap(spec.file, np.uint8, "w+", shape=(FAR.pages, FAR.page_bytes)) for spec in specs)
        for page in mine:
            source[page] = np.frombuffer(random.Random(page).randbytes(FAR.page_bytes), np.uint8)
        sender = prefill.start("prefill", specs[:1], limits=LIMITS).sender(number())
        receiver = decode.start("decode", specs[1:], limits=LIMITS).receiver(sender.room, prefill)
        receiver.receive(theirs)
        sender.send(mine, last=True)
        found = receiver.wait(2 * SOON_S), sender.wait(2 * SOON_S)
        assert found == ("SUCCESS", "SUCCESS"), f"receiver and sender ended as {found}"
        wrong = [page for page, its in zip(theirs, mine, strict=True) if (target[page] != source[its]).any()]
        assert not wrong, f"of a pool of {FAR.pages} pages of 1 MiB each these pages are wrong: {wrong}"
        written = sorted(page for page in others if target[page].any())
        assert not written, f"pages {theirs} of 1 MiB each were to be written, and {written} have changed"
        for handle in (sender, receiver):
            handle.clear()


# --- T3


@rule("T3")
@pytest.mark.parametrize("sent", [[1, 2, 3], [1, 2, 3, 4, 5, 6, 7], pytest.param([], marks=full)])
def test_t3_another_number_of_pages_fails_the_room_on_both_sides(pair: Pair, sent: list[int]) -> None:
    room = pair.open()
    room.mine = {"kv": sent}
    room.receive()
    room.send()
    room.ends("FAILED")
    for reason in room.reasons():
        named = set(re.findall(r"\b\d+\b", reason))
        assert {str(len(sent)), "5"} <= named, f"{len(sent)} pages were sent and 5 listed, and the reason is {reason!r}"
    pair.accept(room)
    room.clear()
    pair.transfer()


@rule("T3")
def test_t3_a_pool_that_only_one_side_named_fails_the_room(pair: Pair) -> None:
    room = pair.open()
    room.receive()
    room.sender.send({"kv": list(room.mine["kv"]), "aux": [1]}, last=True)
    room.ends("FAILED")
    assert all("aux" in reason for reason in room.reasons()), f"aux was sent and not listed, and the reasons are {room.reasons()}"
    pair.accept(room)
    room.clear()


# --- T5


@rule("T5")
@pytest.mark.parametrize("copies", [1, 3])
def test_t5_success_comes_only_when_all_is_in(pair: Pair, copies: int) -> None:
    """The first of two chunks is late; what the sender says comes in copies."""
    room = pair.open()
    pair.expect(room)
    pair.prefill.tap("duplicate", "Status", True, copies=copies)
    hold_chunk(pair.prefill, room, 1)
    room.receive()
    room.sender.send({"kv": list(room.mine["kv"][:2])})
    room.sender.send({"kv": list(room.mine["kv"][2:])}, last=True)
    assert room.receiver.until("TRANSFERRING", "SUCCESS") == "TRANSFERRING"
    others_pass(pair)
    found = room.receiver.poll(), room.sender.poll()
    assert found == ("TRANSFERRING", "TRANSFERRING"), f"a chunk is not in, and receiver and sender are {found}: {room.reasons()}"
    pair.release(room)
    room.ends("SUCCESS")
    pair.intact()
    room.clear()


@rule("T5")
def test_t5_the_room_fails_as_soon_as_one_chunk_does(pair: Pair) -> None:
    """The other chunk is still under way."""
    room = pair.open()
    hold_chunk(pair.prefill, room, 1)
    pair.prefill.fault("fail", reason="chunk two broke", room=room.number, chunk=2)
    room.receive()
    room.sender.send({"kv": list(room.mine["kv"][:2])})
    room.sender.send({"kv": list(room.mine["kv"][2:])}, last=True)
    room.ends("FAILED")
    assert all("chunk two broke" in reason for reason in room.reasons()), f"it failed for another reason: {room.reasons()}"
    room.clear()
    pair.prefill.heal()


def hold_chunk(child: Child, room: Room, chunk: int) -> None:
    """Hold one chunk of a room back until ``pair.release``."""
    child.fault("hold", f"hold {room.number}", room=room.number, chunk=chunk, times=1)


def others_pass(pair: Pair) -> None:
    """Let another room go all the way: what was to happen at once has happened then."""
    other = pair.open()
    other.receiver.receive({})
    other.sender.send({}, last=True)
    other.ends("SUCCESS")
    other.clear()


# --- T6


@rule("T6")
def test_t6_retries_are_submitted_again_without_spinning(pair: Pair) -> None:
    """The engine has no room for a while."""
    room = pair.open()
    pair.expect(room)
    pair.prefill.fault("retry", room=room.number)
    room.receive()
    room.send()
    found = room.sender.until("SUCCESS", "FAILED", timeout=RETRIES_FOR_S)
    assert found == "TRANSFERRING", f"the engine says RETRY, and the sender is {found}: {room.reasons()}"
    tries = pair.prefill.call("plan", "counts")["retry"]
    assert 2 <= tries <= 100, f"a transfer was tried {tries} times in {RETRIES_FOR_S:g} s"
    pair.prefill.heal()
    room.ends("SUCCESS")
    pair.intact()
    room.clear()


@rule("T6")
@pytest.mark.parametrize("hook", ["kvcore_transfer", pytest.param("kvcore_poll", marks=full)])
def test_t6_nothing_is_in_flight_between_two_tries(pair: Pair, hook: str) -> None:
    """So an abort ends it at once, and its pages are safe on both sides."""
    room = pair.open()
    pair.prefill.fault("retry", hook=hook, room=room.number)
    room.receive()
    room.send()
    assert room.receiver.until("TRANSFERRING", "FAILED") == "TRANSFERRING"
    room.sender.abort("enough")
    room.ends("FAILED")
    safe = room.sender.safe(), room.receiver.safe()
    assert safe == (True, True), f"nothing is in flight, and sender's and receiver's pages are safe: {safe}"
    assert not (room.sender.unproven or room.receiver.unproven), "pages of a transfer that was to be retried were released by limit"
    pair.intact()
    room.clear()


@rule("T6")
@full
def test_t6_retries_end_by_the_rooms_limit(crew: Crew) -> None:
    with paired(crew, limits={"transfer_s": 2.5, "ticket_s": 2.0}) as pair:
        room = pair.open()
        pair.prefill.fault("retry", room=room.number)
        room.receive()
        room.send()
        room.ends("FAILED", timeout=2 * SOON_S)
        assert room.sender.failure.code == "timeout", f"it ended as {room.reasons()}"
        room.clear()
        pair.transfer()
