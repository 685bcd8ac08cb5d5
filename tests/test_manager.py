"""Rules S (states), T (transfer) and P (peers) of running managers, several managers together, and how a manager starts and ends."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

import kvcore
from kvcore import BackendLoadError, Config, ConfigError, FailureCode, Handle, KVManager, KVPoll, PageError, Pool, RoomError, hookimpl
from kvcore.faults import ControlTap
from kvcore.protocol.messages import Join
from kvcore.wire import Ping, Stranger, encode
from tests.cases.ports import ask
from tests.fake_backends import BlockingBackend, install, start
from tests.helpers import (
    BACKENDS,
    SOON_S,
    Array,
    Duo,
    Events,
    Flag,
    config,
    duo,
    ended,
    full_stores,
    limits,
    manager,
    memory,
    number,
    own_threads,
    stays,
    stores_empty,
    wait_until,
)

PAGES = [3, 8, 1]


@pytest.fixture(params=BACKENDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Duo]:
    with duo(request.param) as both:
        yield both.pair()


def failure_of(handle: Handle) -> kvcore.KVTransferError:
    ended(handle, KVPoll.FAILED)
    failure = handle.failure
    assert failure is not None
    return failure


# --- S: states


def test_s1_a_room_only_moves_forward(pair: Duo) -> None:
    watchers = {"prefill": Events(), "decode": Events()}
    pair.prefill.add_observer(watchers["prefill"])
    pair.decode.add_observer(watchers["decode"])
    sender, receiver = pair.open()
    receiver.receive(PAGES)
    wait_until(lambda: sender.poll() is KVPoll.WAITING_FOR_INPUT)
    sender.send(PAGES[:1])
    wait_until(lambda: receiver.poll() is KVPoll.TRANSFERRING)
    sender.send(PAGES[1:], last=True)
    for side, handle in (("prefill", sender), ("decode", receiver)):
        watchers[side].reached(handle, "SUCCESS")
        assert watchers[side].states(handle) == ["BOOTSTRAPPING", "WAITING_FOR_INPUT", "TRANSFERRING", "SUCCESS"]


def test_s5_the_first_reason_wins_and_names_side_rank_and_code(pair: Duo) -> None:
    sender, receiver = pair.open()
    receiver.receive(PAGES)
    wait_until(lambda: sender.poll() is KVPoll.WAITING_FOR_INPUT)
    receiver.abort("the first", FailureCode.RESOURCES)
    receiver.abort("the second")
    sender_failure = failure_of(sender)
    for failure in (sender_failure, failure_of(receiver)):
        assert (failure.room, failure.attempt, failure.reason) == (sender.room, 0, "the first")
        assert (failure.code, failure.side, failure.rank) == (FailureCode.RESOURCES, "decode", 0)
    with pytest.raises(kvcore.KVTransferError, match="the first .resources, from decode rank 0."):
        sender.raise_for_failure()


def test_s5_a_reason_travels_up_to_1_kib_and_whole_characters(pair: Duo) -> None:
    sender, receiver = pair.open()
    wait_until(lambda: receiver.poll() is KVPoll.WAITING_FOR_INPUT)
    sender.abort("ü" * 2000)
    assert failure_of(receiver).reason == "ü" * 512


def test_s8_receive_restarts_input_s() -> None:
    with duo() as pair, manager("decode", memory(32), limits={"input_s": 0.5}) as decode:
        events = Events()
        decode.add_observer(events)
        sender = pair.prefill.sender(number())
        receiver = decode.receiver(sender.room, pair.prefill.address)
        events.reached(receiver, "WAITING_FOR_INPUT")
        stays(lambda: receiver.poll() is KVPoll.WAITING_FOR_INPUT, 0.3)
        received = time.monotonic()
        receiver.receive(PAGES)
        assert events.reached(receiver, "FAILED") - received >= 0.5


def test_s8_ticket_s_and_liveness_s_are_shown_elsewhere_and_all_limits_have_a_default() -> None:
    assert set(kvcore.Limits().model_dump()) == {
        "bootstrap_s", "input_s", "transfer_s", "ticket_s", "liveness_s", "quarantine_s", "orphan_s", "send_s", "drain_s",
    }  # fmt: skip


# --- T: transfer


@pytest.mark.parametrize(
    ("chunks", "theirs"),
    [
        ([[3, 8, 1]], [5, 6, 7]),
        ([[3], [8, 1], []], [5, 9, 7]),
        ([[], [3], [], [8], []], [9, 2]),
        ([[31, 30, 29], [0]], [0, 1, 2, 3]),
        ([[4, 4, 4]], [1, 2, 3]),
        ([list(range(32))], list(reversed(range(32)))),
    ],
)
def test_t1_the_ith_page_goes_to_the_ith_page(pair: Duo, chunks: list[list[int]], theirs: list[int]) -> None:
    sender, receiver = pair.open()
    receiver.receive(theirs)
    for at, chunk in enumerate(chunks):
        sender.send(chunk, last=at == len(chunks) - 1)
    ended(receiver, KVPoll.SUCCESS)
    ended(sender, KVPoll.SUCCESS)
    assert pair.equal([page for chunk in chunks for page in chunk], theirs)
    assert pair.untouched([page for page in range(32) if page not in theirs])
    assert sender.metrics.chunks == len(chunks) and sender.metrics.pages == receiver.metrics.pages == len(theirs)


def test_t1_chunks_may_come_before_the_peer_is_known(pair: Duo) -> None:
    sender = pair.prefill.sender(number())
    sender.send([1, 2])
    sender.send([3], last=True)
    receiver = pair.decode.receiver(sender.room, pair.prefill.address)
    receiver.receive([7, 8, 9])
    ended(receiver, KVPoll.SUCCESS)
    assert pair.equal([1, 2, 3], [7, 8, 9])


def test_t1_the_indices_are_copied_when_they_are_handed_over(pair: Duo) -> None:
    mine, theirs = np.array([1, 2]), np.array([3, 4])
    sender, receiver = pair.open()
    ready = Flag()
    receiver.receive(theirs)
    sender.send(mine, last=True, ready=ready)
    mine[:], theirs[:] = 9, 9
    ready.set()
    ended(receiver, KVPoll.SUCCESS)
    assert pair.equal([1, 2], [3, 4])


@pytest.mark.parametrize(("prefix", "text"), [({"nope": 1}, "nope"), (-1, "-1"), (True, "True"), ("2", "'2'"), (2**31, str(2**31))])
def test_t2_prefix_pages_are_checked(pair: Duo, prefix: Any, text: str) -> None:
    _, receiver = pair.open()
    with pytest.raises(PageError, match=text):
        receiver.receive(PAGES, prefix_pages=prefix)


def test_t2_wrong_arguments_of_send_and_receive_are_refused(pair: Duo) -> None:
    sender, receiver = pair.open()
    with pytest.raises(PageError, match="unknown pools"):
        sender.send({"kw": [1]})
    with pytest.raises(PageError, match="last=True"):
        sender.send([1], record=b"early")
    with pytest.raises(PageError, match="65537 bytes exceeds 65536"):
        sender.send([1], last=True, record=bytes(65537))
    receiver.receive([1])
    with pytest.raises(PageError, match="receive was called already"):
        receiver.receive([1])
    ready = Flag()
    sender.send([1], last=True, ready=ready, record=bytes(65536))
    for last in (True, False):
        with pytest.raises(PageError, match="handed over already"):
            sender.send([], last=last)
    ready.set()
    ended(receiver, KVPoll.SUCCESS)
    assert receiver.record == bytes(65536)
    sender.send([1], last=True)  # does nothing on an ended room
    receiver.receive([1])


@pytest.mark.parametrize(
    ("mine", "theirs", "numbers"),
    [([1, 2, 3], [4, 5], "3 pages.*listed 2"), ([1], [4, 5], "1 pages.*listed 2"), ([], [4], "0 pages.*listed 1")],
)
@pytest.mark.parametrize("first", ["send", "receive"])
def test_t3_unlike_numbers_of_pages_fail_the_room_on_both_sides_and_name_both(
    pair: Duo, mine: list[int], theirs: list[int], numbers: str, first: str
) -> None:
    sender, receiver = pair.open()
    steps = [lambda: sender.send(mine, last=True), lambda: receiver.receive(theirs)]
    for step in steps if first == "send" else reversed(steps):
        step()
    for handle in (sender, receiver):
        failure = failure_of(handle)
        assert failure.code is FailureCode.BAD_PAGES and failure.side == "prefill"
        with pytest.raises(kvcore.KVTransferError, match=numbers):
            handle.raise_for_failure()
    assert pair.untouched() and receiver.wait_release_safe(5)
    pair.transfer([1], [2])


def test_t3_too_many_pages_are_found_with_the_chunk_that_has_them(pair: Duo) -> None:
    sender, receiver = pair.open()
    receiver.receive([4, 5])
    sender.send([1, 2])
    wait_until(lambda: pair.equal([1, 2], [4, 5]))
    sender.send([3])
    assert "3 pages" in failure_of(receiver).reason and "listed 2" in failure_of(sender).reason


@pytest.mark.parametrize(
    "hook", ["kvcore_transfer", "kvcore_poll", "kvcore_abort", "kvcore_clear", "kvcore_held_rooms", "kvcore_disconnect"]
)
def test_t7_a_backend_that_raises_harms_its_room_at_most(pair: Duo, hook: str) -> None:
    bad = number()
    pair.plan.raise_(SystemExit(1), hook=hook, room=bad) if hook not in ("kvcore_held_rooms", "kvcore_disconnect") else pair.plan.raise_(
        hook=hook
    )
    sender, receiver = pair.open(bad)
    receiver.receive(PAGES)
    sender.send(PAGES, last=True)
    sender.wait(5)
    sender.abort()
    sender.clear()
    receiver.clear()
    for _ in range(3):
        pair.transfer([1], [2])
    assert pair.prefill.healthy and pair.decode.healthy


@pytest.mark.parametrize("hook", ["kvcore_endpoint", "kvcore_connect"])
def test_t7_a_pairing_that_fails_is_told_and_may_succeed_later(hook: str) -> None:
    with duo() as pair:
        pair.plan.raise_(RuntimeError("no route to host"), hook=hook, times=1)
        sender, receiver = pair.open()
        failure = failure_of(receiver)
        assert "no route to host" in failure.reason
        sender.clear()
        pair.transfer(PAGES, PAGES)  # P4: nothing is remembered as bad


# --- P: peers


def test_p2_a_peer_that_is_cut_off_fails_only_its_rooms() -> None:
    with duo(liveness_s=0.8) as pair, manager("decode", memory(32), limits={"liveness_s": 0.8}) as other:
        pair.pair()
        rooms = [pair.open() for _ in range(3)]
        rooms[1][1].receive(PAGES)
        rooms[2][1].receive(PAGES)
        rooms[2][0].send(PAGES)
        kept = pair.prefill.sender(number())
        receiver = other.receiver(kept.room, pair.prefill.address)
        wait_until(lambda: receiver.poll() is KVPoll.WAITING_FOR_INPUT and rooms[2][1].poll() is KVPoll.TRANSFERRING)
        wait_until(lambda: rooms[0][1].poll() is KVPoll.WAITING_FOR_INPUT)
        begun = time.monotonic()
        with ControlTap(pair.decode) as tap:
            tap.drop()
            for handles in rooms:
                for handle in handles:
                    failure = failure_of(handle)
                    assert failure.code is FailureCode.PEER_LOST and "silent for liveness_s (0.8 s)" in failure.reason
                    assert time.monotonic() - begun < 4
        assert receiver.poll() is KVPoll.WAITING_FOR_INPUT
        receiver.receive([1])
        kept.send([2], last=True)
        ended(receiver, KVPoll.SUCCESS)
        for handles in rooms:
            for handle in handles:
                assert handle.wait_release_safe(5)
                handle.clear()
        pair.transfer(PAGES, PAGES)  # cut off no more


def test_p2_a_peer_that_is_slow_for_less_than_the_limit_loses_nothing() -> None:
    with duo(liveness_s=2.0) as pair:
        pair.pair()
        sender, receiver = pair.open()
        receiver.receive(PAGES)
        wait_until(lambda: sender.poll() is KVPoll.WAITING_FOR_INPUT)
        with ControlTap(pair.decode) as tap:
            tap.drop()
            stays(lambda: not sender.poll().terminal and not receiver.poll().terminal, 0.6)
        sender.send(PAGES, last=True)
        ended(receiver, KVPoll.SUCCESS)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_p3_a_peer_that_comes_back_at_the_same_address_is_a_new_instance(role: str) -> None:
    source, target = memory(32, seed=5), memory(32)
    with ExitStack() as stack:
        ports: dict[str, Any] = {}
        arrays = {"prefill": source, "decode": target}
        short = {"liveness_s": 2.0}
        managers = {name: stack.enter_context(manager(name, arrays[name], limits=short)) for name in arrays}
        ports["port"] = managers[role].control.port
        if role == "prefill":
            ports["bootstrap_port"] = int(managers[role].address.rpartition(":")[2])
        first = Duo(managers["prefill"], managers["decode"], source, target).pair()
        sender, receiver = first.open()
        receiver.receive(PAGES)
        wait_until(lambda: sender.poll() is KVPoll.WAITING_FOR_INPUT)
        managers[role].close()
        survivor = sender if role == "decode" else receiver
        assert failure_of(survivor).code is FailureCode.SHUTDOWN
        old = managers[role]
        managers[role] = stack.enter_context(manager(role, arrays[role], limits=short, **ports))
        assert managers[role].address == old.address or role == "decode"
        again = Duo(managers["prefill"], managers["decode"], source, target)
        if role == "prefill":  # the first room finds out
            sender, receiver = again.open()
            wait_until(lambda: receiver.poll() in (KVPoll.FAILED, KVPoll.WAITING_FOR_INPUT))
            if receiver.failure is not None:
                assert receiver.failure.code is FailureCode.PEER_LOST and managers[role].instance in receiver.failure.reason
            sender.clear()
            receiver.clear()
        again.transfer(PAGES, [11, 12, 13])
        wait_until(lambda: managers["prefill"].stats().peers == managers["decode"].stats().peers == 1)


def dealer(port: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(f"tcp://127.0.0.1:{port}")
    return socket


def test_p5_a_stranger_is_asked_who_it_is_and_a_wrong_address_has_no_effect(pair: Duo) -> None:
    sender, _ = pair.open()
    with dealer(pair.prefill.control.port) as socket:
        for to in (pair.prefill.instance, "prefill-of-yesterday"):
            socket.send(encode("decode-unknown", to, Join(sender.room, 0, 1, 0)))
            assert socket.poll(5000)
            letter = msgspec.msgpack.decode(socket.recv(), type=dict)
            assert letter["body"]["type"] == "stranger" and letter["to"] == "decode-unknown"
        socket.send(encode(pair.decode.instance, "prefill-of-yesterday", Ping()))
        assert socket.poll(5000)
    assert sender.poll() is KVPoll.BOOTSTRAPPING and pair.prefill.stats().peers == 1


def test_p6_lost_repeated_delayed_and_reordered_messages_harm_nothing(pair: Duo) -> None:
    chance = random.Random(4)
    with ControlTap(pair.prefill) as tap:
        tap.drop(lambda letter, outgoing: not isinstance(letter.body, Ping) and chance.random() < 0.2)
        tap.duplicate(lambda letter, outgoing: chance.random() < 0.2)
        tap.delay(0.05, lambda letter, outgoing: chance.random() < 0.3, copies=0)
        tap.delay(0.4, lambda letter, outgoing: chance.random() < 0.2, copies=1)
        rooms = []
        for at in range(30):
            room = number()
            for attempt in (0, 1):
                sender, receiver = pair.open(room, attempt)
                pages = [(at + attempt) % 32]
                receiver.receive(pages)
                sender.send(pages, last=True)
                rooms.append((sender, receiver, at % 5 == 0 and attempt == 0))
        for _, receiver, aborted in rooms:
            if aborted:
                receiver.abort("no")
        for sender, receiver, aborted in rooms:
            states = sender.wait(20), receiver.wait(20)
            if aborted:
                assert states[1] is KVPoll.FAILED or states == (KVPoll.SUCCESS, KVPoll.SUCCESS)
            else:
                assert states == (KVPoll.SUCCESS, KVPoll.SUCCESS), (sender.failure, receiver.failure)
            assert receiver.wait_release_safe(10) and sender.wait_release_safe(10)
            sender.clear()
            receiver.clear()
        assert pair.equal(range(1, 31), range(1, 31)), "each of these was the page of a room that succeeded"
    pair.stores_empty()


def test_p6_a_stranger_letter_makes_the_two_pair_anew(pair: Duo) -> None:
    with ControlTap(pair.decode) as tap:
        pair.transfer([1], [2])
        tap.inject(encode(pair.prefill.instance, pair.decode.instance, Stranger()), peer=pair.prefill.instance)
        wait_until(lambda: pair.decode.stats().peers == 0)
        pair.transfer([3], [4])


# --- several pools, several managers


def test_several_pools_move_together() -> None:
    def made(seed: int | None) -> tuple[dict[str, list[Array]], list[Pool]]:
        arrays = {"kv": memory(16, 3, 128, seed), "aux": memory(4, 1, 32, seed)}
        return arrays, [Pool.from_tensors(name, tensors, page_size=16) for name, tensors in arrays.items()]

    (source, source_pools), (target, target_pools) = made(1), made(None)
    with KVManager(config("prefill"), source_pools) as prefill, KVManager(config("decode"), target_pools) as decode:
        pair = Duo(prefill, decode, [], [])
        sender, receiver = pair.open()
        receiver.receive({"kv": [4, 5, 6], "aux": [2]}, prefix_pages={"kv": 7})
        wait_until(lambda: sender.poll() is KVPoll.WAITING_FOR_INPUT)
        assert sender.prefix_pages == {"kv": 7, "aux": 0}
        sender.send({"kv": [9]})
        sender.send({"aux": [3], "kv": [1, 0]}, last=True)
        ended(receiver, KVPoll.SUCCESS)
        ended(sender, KVPoll.SUCCESS)
        for name, mine, theirs in (("kv", [9, 1, 0], [4, 5, 6]), ("aux", [3], [2])):
            for a, b in zip(source[name], target[name], strict=True):
                assert (a[mine] == b[theirs]).all() and not b[[page for page in range(len(b)) if page not in theirs]].any()
        assert sender.metrics.bytes == 3 * 3 * 128 + 32 and sender.metrics.pages == 4
        other, other_receiver = pair.open()
        with pytest.raises(PageError, match="exactly one pool"):
            other.send([1])
        other_receiver.receive({"kv": [1], "aux": [1]})
        other.send({"kv": [1]}, last=True)
        assert "pool 'aux'" in failure_of(other_receiver).reason


def test_an_int_as_prefix_means_the_first_pool(pair: Duo) -> None:
    sender, receiver = pair.open()
    assert sender.prefix_pages == {}
    receiver.receive(PAGES, prefix_pages=5)
    wait_until(lambda: sender.poll() is KVPoll.WAITING_FOR_INPUT)
    assert sender.prefix_pages == {"kv": 5}


def test_one_prefill_serves_several_decodes_and_one_decode_several_prefills() -> None:
    with ExitStack() as stack:
        sources = [memory(32, seed=seed) for seed in (1, 2)]
        targets = [memory(32) for _ in range(3)]
        prefills = [stack.enter_context(manager("prefill", arrays)) for arrays in sources]
        decodes = [stack.enter_context(manager("decode", arrays)) for arrays in targets]
        duos = [Duo(p, d, s, t) for p, s in zip(prefills, sources, strict=True) for d, t in zip(decodes, targets, strict=True)]
        rooms = []
        for at, both in enumerate(duos):
            sender, receiver = both.open()
            receiver.receive([at, at + 10])
            sender.send([at, at + 1], last=True)
            rooms.append((both, sender, receiver, [at, at + 1], [at, at + 10]))
        for both, sender, receiver, mine, theirs in rooms:
            ended(receiver, KVPoll.SUCCESS)
            ended(sender, KVPoll.SUCCESS)
            assert both.equal(mine, theirs)
            sender.clear()
            receiver.clear()
        assert [each.stats().peers for each in prefills] == [3, 3] and [each.stats().peers for each in decodes] == [2, 2, 2]
        for each in (*prefills, *decodes):
            stores_empty(each)


def test_two_managers_with_both_roles_send_to_each_other() -> None:
    arrays = memory(32, seed=1), memory(32, seed=2)
    with manager("both", arrays[0]) as one, manager("both", arrays[1]) as two:
        there, back = Duo(one, two, arrays[0], arrays[1]), Duo(two, one, arrays[1], arrays[0])
        sender, receiver = there.open()
        receiver.receive([20, 21])
        wait_until(lambda: sender.poll() is KVPoll.WAITING_FOR_INPUT)
        back.transfer([5], [6])  # the second pairing disturbs nothing of the first
        sender.send([1, 2], last=True)
        ended(receiver, KVPoll.SUCCESS)
        assert there.equal([1, 2], [20, 21])


# --- waiting, metrics, observers, what people read


def test_wait_returns_at_its_timeout_and_at_the_end(pair: Duo) -> None:
    sender, receiver = pair.open()
    begun = time.monotonic()
    assert receiver.wait(0.1) in (KVPoll.BOOTSTRAPPING, KVPoll.WAITING_FOR_INPUT)
    assert 0.1 <= time.monotonic() - begun < 2
    assert sender.wait(0) is KVPoll.BOOTSTRAPPING
    threading.Timer(0.1, receiver.abort).start()
    assert receiver.wait() is KVPoll.FAILED and sender.wait(5) is KVPoll.FAILED


def test_await_returns_the_terminal_state_and_its_cancellation_does_not_abort(pair: Duo) -> None:
    async def both() -> tuple[KVPoll, KVPoll]:
        sender, receiver = pair.open()
        receiver.receive(PAGES)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_awaited(receiver), 0.1)
        assert not receiver.poll().terminal
        sender.send(PAGES, last=True)
        states = await asyncio.wait_for(asyncio.gather(_awaited(sender), _awaited(receiver)), 10)
        assert await receiver is KVPoll.SUCCESS
        return states[0], states[1]

    assert asyncio.run(both()) == (KVPoll.SUCCESS, KVPoll.SUCCESS)
    assert pair.equal(PAGES, PAGES)


async def _awaited(handle: Handle) -> KVPoll:
    return await handle


def test_metrics_of_a_room_and_of_the_manager(pair: Duo) -> None:
    pair.plan.delay(0.1)
    before = pair.prefill.stats().counters["kvcore_bytes_total"]
    sender, receiver = pair.open()
    receiver.receive(PAGES)
    wait_until(lambda: sender.poll() is KVPoll.WAITING_FOR_INPUT)
    stays(lambda: True, 0.1)
    sender.send(PAGES[:2])
    sender.send(PAGES[2:], last=True)
    ended(sender, KVPoll.SUCCESS)
    ended(receiver, KVPoll.SUCCESS)
    moved = len(PAGES) * 2 * 64
    figures = sender.metrics
    assert (figures.pages, figures.bytes, figures.chunks) == (3, moved, 2)
    assert 0.1 <= figures.wait_s < figures.total_s and 0.1 <= figures.active_s < figures.total_s
    assert figures.bytes_per_s == pytest.approx(moved / figures.active_s)
    assert receiver.metrics.pages == 3 and receiver.metrics.active_s >= 0.09
    stays(lambda: sender.metrics == figures, 0.05)
    assert pair.prefill.stats().counters["kvcore_bytes_total"] == before + moved
    other, _ = pair.open()
    other.abort()
    text = pair.prefill.metrics_text()
    for line in (
        'kvcore_rooms{side="prefill",state="SUCCESS"} 1', 'kvcore_rooms{side="prefill",state="FAILED"} 1',
        'kvcore_failures_total{code="aborted"} 1', 'kvcore_room_seconds_count{side="prefill"} 3', "kvcore_transfer_seconds_count 2",
        f"kvcore_bytes_total {before + moved}", "kvcore_quarantined_pages 0",
    ):  # fmt: skip
        assert line in text.splitlines(), line


def test_observers_are_told_and_one_that_raises_disturbs_nobody(pair: Duo) -> None:
    class Broken:
        @hookimpl
        def kvcore_on_event(self) -> None:
            raise SystemExit("not today")

    events = Events()
    pair.prefill.add_observer(Broken())
    pair.prefill.add_observer(events)
    sender, receiver = pair.open()
    receiver.receive(PAGES)
    sender.send(PAGES, last=True)
    events.reached(sender, "SUCCESS")
    assert {event.name for _, event in events.seen} == {"status"}
    assert events.seen[0][1].room == kvcore.states.RoomKey("prefill", sender.room, 0, sender.generation)


def test_an_observer_with_a_hook_that_does_not_exist_is_refused_and_leaves_nothing(pair: Duo) -> None:
    class Typo:
        @hookimpl
        def kvcore_on_evnt(self) -> None: ...

    with pytest.raises(Exception, match="kvcore_on_evnt"):
        pair.prefill.add_observer(Typo())
    pair.transfer([1], [2])


def test_explain_and_repr_say_what_happened(pair: Duo) -> None:
    sender, receiver = pair.open()
    receiver.receive(PAGES)
    sender.send(PAGES, last=True)
    ended(sender, KVPoll.SUCCESS)
    story = pair.prefill.explain(sender.room)
    assert story.startswith(f"room {sender.room} (prefill)") and story.index("BOOTSTRAPPING") < story.index("SUCCESS")
    assert "nothing is stored" in pair.prefill.explain(sender.room, attempt=5)
    assert pair.prefill.poll_all([sender, sender]) == [KVPoll.SUCCESS] * 2
    assert repr(sender) == f"<Sender room {sender.room} generation {sender.generation} SUCCESS>"


def test_the_admin_port_answers(pair: Duo) -> None:
    from urllib.error import HTTPError
    from urllib.request import urlopen

    with manager("prefill", memory(8), admin="127.0.0.1:0") as prefill:
        sender = prefill.sender(7)

        def get(path: str) -> tuple[int, str]:
            try:
                with urlopen(f"http://{prefill.admin_address}{path}", timeout=5) as answer:
                    return answer.status, answer.read().decode()
            except HTTPError as error:
                with error:
                    return error.code, error.read().decode()

        assert get("/health") == (200, '{"ok": true, "reasons": []}')
        assert 'kvcore_rooms{side="prefill",state="BOOTSTRAPPING"} 1' in get("/metrics")[1]
        assert "BOOTSTRAPPING" in get("/rooms/7")[1] and "nothing is stored" in get("/rooms/7?attempt=2")[1]
        assert get("/rooms/x")[0] == get("/rooms/7?attempt=x")[0] == 400
        sender.clear()
    assert pair.prefill.admin_address == ""


UNWELL = {
    "closing": "it is closing",
    "its control thread has ended": "thread kvcore-control does not run",
    "its control thread stands still": "thread kvcore-control has stood still for ",
    "its workers are stuck": "too many workers are stuck",
    "quarantine is full": "6 of 8 pages wait for proof",
}


@pytest.mark.parametrize("why", UNWELL)
def test_health_is_503_while_rooms_cannot_be_served(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    fake, source, target = install(monkeypatch, BlockingBackend), memory(8, seed=3), memory(8)
    monkeypatch.setattr("kvcore.ledger.STUCK_PER_WORKER", 1)
    monkeypatch.setattr("kvcore.overview.QUARANTINE_S", 0.1)
    full, lasts = why == "quarantine is full", why in ("closing", "its control thread has ended")
    stuck = full or why == "its workers are stuck"
    limits = {"ticket_s": 0.3 if stuck else 9.0, "drain_s": SOON_S if why == "closing" else 0.2}
    with (
        manager("prefill", source, backend="fake", admin="127.0.0.1:0", limits=limits) as prefill,
        manager("decode", target, backend="fake") as decode,
    ):

        def health() -> tuple[int, Any]:
            return ask(prefill.admin_address, "GET", "/health")

        def unwell() -> bool:
            status, told = health()
            return (status, told["ok"]) == (503, False) and any(reason.startswith(UNWELL[why]) for reason in told["reasons"])

        assert health() == (200, {"ok": True, "reasons": []})
        gate, freed = fake.made[0].gate(room := number()), threading.Event()
        try:
            start(Duo(prefill, decode, source, target), 1, room, 6 if full else 1)
            wait_until(lambda: gate.met)
            if why == "closing":
                threading.Thread(target=prefill.close, daemon=True).start()
            elif why == "its control thread stands still":
                monkeypatch.setattr(prefill.control.pulse, "_still_s", 0.2)
                prefill.control.call(lambda: freed.wait(SOON_S))
            elif lasts:
                prefill.control.stop(SOON_S)
            wait_until(unwell, what=why)
        finally:
            freed.set()
            fake.made[0].open_gates()
        if not lasts:
            wait_until(lambda: health() == (200, {"ok": True, "reasons": []}))


def test_each_thread_that_serves_rooms_is_watched_and_none_is_unwell_for_resting() -> None:
    with duo() as pair:
        pair.pair()
        core, gate = pair.prefill._core, threading.Event()
        for pulse in (core.channel.pulse, core._ledger.pulse, core._slow.pulse):
            pulse._still_s = 0.3
        stays(lambda: True, 1.0)
        assert pair.prefill.troubles == []
        try:
            core._slow.run(gate.wait)
            core._ledger._order(lambda: gate.wait(SOON_S))
            for thread in ("kvcore-slow", "kvcore-progress"):
                wait_until(lambda thread=thread: any(f"thread {thread} has stood still" in text for text in pair.prefill.troubles))
        finally:
            gate.set()
        wait_until(lambda: pair.prefill.healthy)


# --- beginning and end


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_close_leaves_no_thread_and_no_descriptor() -> None:
    with duo(orphan_s=0.3) as warm:  # what is imported and opened once per process
        warm.pair()
    threads, before = own_threads(), descriptors()
    for _ in range(3):
        with duo(orphan_s=0.3) as pair, ControlTap(pair.decode) as tap:
            tap.delay(0.01)
            pair.prefill.add_observer(Events())
            pair.pair()
            sender, receiver = pair.open()
            receiver.receive(PAGES)
            sender.send(PAGES)
        assert pair.prefill.stats().sockets == pair.decode.stats().sockets == 0
        assert not pair.prefill.healthy
    wait_until(
        lambda: own_threads() <= threads and descriptors() <= before,
        what=f"{own_threads() - threads}, {descriptors()} fds, {before} before",
    )


def test_close_lets_transfers_end_and_aborts_the_rest_and_tells_the_peer() -> None:
    with duo(drain_s=5.0) as pair:
        pair.pair().plan.delay(0.3)
        running, running_receiver = pair.open()
        running_receiver.receive(PAGES)
        running.send(PAGES, last=True)
        wait_until(lambda: running.poll() is KVPoll.TRANSFERRING)
        waiting, waiting_receiver = pair.open()
        wait_until(lambda: waiting_receiver.poll() is KVPoll.WAITING_FOR_INPUT)
        pair.prefill.close()
        assert running.poll() is KVPoll.SUCCESS
        ended(running_receiver, KVPoll.SUCCESS)
        for handle in (waiting, waiting_receiver):
            failure = failure_of(handle)
            assert failure.code is FailureCode.SHUTDOWN and pair.prefill.instance in failure.reason and failure.side == "prefill"


def test_close_gives_up_after_drain_s() -> None:
    with duo(drain_s=0.3) as pair:
        hold = pair.pair().plan.hold()
        sender, receiver = pair.open()
        receiver.receive(PAGES)
        sender.send(PAGES)
        wait_until(lambda: hold.held == 1)
        begun = time.monotonic()
        pair.prefill.close()
        assert 0.3 <= time.monotonic() - begun < 4
        assert failure_of(sender).code is FailureCode.SHUTDOWN
        assert failure_of(receiver).code in (FailureCode.SHUTDOWN, FailureCode.PEER_LOST)
        assert sender.is_release_safe(), "the engine was closed (R3)"
        hold.release()


def test_close_twice_and_from_several_threads_at_once() -> None:
    with duo() as pair:
        pair.pair()
        pair.open()
        threads = [threading.Thread(target=each.close, daemon=True) for each in (pair.prefill, pair.decode) * 3]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
        pair.prefill.close()


def test_after_close_handles_answer_and_new_rooms_are_refused() -> None:
    with duo() as pair:
        pair.pair()
        sender, receiver = pair.open()
        receiver.receive(PAGES)
        pair.prefill.close()
        pair.decode.close()
        for handle in (sender, receiver):
            assert handle.wait(1) is KVPoll.FAILED
            handle.abort()
            assert handle.failure is not None and handle.metrics.total_s > 0 and isinstance(handle.is_release_safe(), bool)
            handle.clear()
            handle.clear()
        sender.send([1])
        for make in (lambda: pair.prefill.sender(1), lambda: pair.decode.receiver(1, pair.prefill.address)):
            with pytest.raises(RoomError, match="closing"):
                make()
        with pytest.raises(RoomError, match="closing"):
            pair.decode.reject(1, "x", pair.prefill.address)
        assert pair.prefill.stats().peers == 0 or pair.prefill.stats().sockets == 0
        assert pair.prefill.rooms() == {} and "nothing is stored" in pair.prefill.explain(99)


def test_a_handle_used_after_close_writes_into_no_file_of_others() -> None:
    """The control thread's pipe is closed then, and its number may name a file of the program."""
    before = descriptors()
    with duo() as pair:
        sender, receiver = pair.pair().open()
        receiver.receive(PAGES)
    pipes = [os.pipe() for _ in range(max(8, before))]
    try:
        receiver.abort()
        receiver.clear()
        del sender
        gc.collect()
        for read, _ in pipes:
            os.set_blocking(read, False)
            with pytest.raises(BlockingIOError):
                os.read(read, 1)
    finally:
        for ends in pipes:
            for end in ends:
                os.close(end)


def test_a_manager_that_cannot_start_leaves_nothing_running() -> None:
    with manager("prefill", memory(8)) as there:
        threads, before = own_threads(), descriptors()
        taken = there.control.port
        for settings, text in (
            ({"port": taken}, f"port: cannot listen on 127.0.0.1:{taken}"),
            ({"bootstrap_port": taken}, f"bootstrap_port: port {taken} of 127.0.0.1 is in use"),
            ({"admin": f"127.0.0.1:{taken}"}, f"admin: port {taken}"),
            ({"admin": "nonsense"}, "admin must be host:port"),
            ({"backend_options": {"prot": 1}}, "no option 'prot'"),
        ):
            with pytest.raises(ConfigError, match=text):
                manager("prefill", memory(8), **settings)
            wait_until(lambda: own_threads() <= threads and descriptors() <= before + 1, what=f"{text}: {own_threads() - threads}")


def test_pools_must_be_named_apart() -> None:
    one, same = (Pool.from_tensors("kv", memory(8), page_size=16) for _ in range(2))
    for given in ([], [one, same]):
        with pytest.raises(ConfigError, match="at least one pool, each with a name of its own"):
            KVManager(Config(role="prefill", limits=limits()), given)


def test_a_manager_can_be_made_again_in_the_same_process() -> None:
    for _ in range(3):
        with duo() as pair:
            pair.pair()
            assert full_stores(pair.prefill) == {}


def test_wrong_addresses_of_prefill_are_told(pair: Duo) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        pair.decode.receiver(number(), "nonsense")
    assert full_stores(pair.decode) == {}
    control = f"127.0.0.1:{pair.prefill.control.port}"  # not the bootstrap service
    receiver = pair.decode.receiver(number(), control)
    stays(lambda: not receiver.poll().terminal or receiver.failure is not None, 0.2)
    receiver.clear()
    pair.transfer([1], [2])


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_where_a_thread_cannot_be_started_nothing_of_the_manager_is_left(
    role: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arrays, start = memory(4), threading.Thread.start
    manager(role, arrays).close()
    before = len(os.listdir("/proc/self/fd")), own_threads()
    for most in itertools.count():
        left = iter(range(most))

        def refuse(thread: threading.Thread, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise RuntimeError("can't start new thread")
            start(thread)

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            try:
                started = manager(role, arrays)
            except (RuntimeError, BackendLoadError):
                continue
        started.close()
        break
    assert most > 4
    gc.collect()
    assert (len(os.listdir("/proc/self/fd")), own_threads()) == before
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
