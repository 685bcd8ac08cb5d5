"""From a prefill address to sender ranks: what a search does when another instance answers than the one looked up (P3, P4)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import cast

import pytest

from kvcore import FailureCode, KVManager, KVPoll
from kvcore.bootstrap import REFRESH_S, Group, LookupFailure, RankInfo
from kvcore.bootstrap_client import Directory, _Known
from kvcore.faults import ControlTap
from kvcore.http import HttpThread
from kvcore.layouts import Place
from kvcore.pairing import Peer, Waiter
from kvcore.peers import Peers
from kvcore.routes import MOST_PRUNED, Routes, Search
from kvcore.states import RoomId
from kvcore.whereabouts import Whereabouts
from kvcore.wire import Join, Letter
from tests.helpers import Duo, duo, ended, manager, memory, number, stays, wait_until

ADDRESS = "127.0.0.1:7"


def group_of(instance: str) -> Group:
    return Group(1, (RankInfo(0, 1, "127.0.0.1:9", instance, 1, "fake"),))


class FakeDirectory:
    """Answers when told, and keeps what it is asked."""

    def __init__(self) -> None:
        self.waiting: dict[int, Callable[[Group | LookupFailure], None]] = {}
        self.asked = 0
        self.forgotten: list[tuple[str, Group | None]] = []
        self.held = True

    def lookup(self, address: str, on_result: Callable[[Group | LookupFailure], None]) -> int:
        self.asked += 1
        self.waiting[self.asked] = on_result
        return self.asked

    def answer(self, result: Group | LookupFailure) -> None:
        _, on_result = self.waiting.popitem()
        on_result(result)

    def holds(self, address: str, group: Group) -> bool:
        return self.held and address == ADDRESS

    def drop(self, token: int) -> None:
        self.waiting.pop(token, None)

    def forget(self, address: str, used: Group | None = None) -> None:
        self.forgotten.append((address, used))

    def last_error(self, address: str) -> str | None:
        return "connection refused" if address == ADDRESS else None

    def sizes(self) -> dict[str, int]:
        return {"lookups": len(self.waiting)}


class FakePeers:
    """Whoever waits for a link waits until told who is there."""

    def __init__(self) -> None:
        self.waiters: list[tuple[str, Waiter]] = []
        self.pairings: dict[str, Peer] = {}

    def peer(self, side: str, instance: str) -> Peer | None:
        assert side == "decode"
        return self.pairings.get(instance)

    def link(self, address: str, waiter: Waiter, curve: str = "") -> None:
        self.waiters.append((address, waiter))

    def answer(self, instance: str) -> None:
        self.pairings[instance] = peer(instance)
        self.waiters.pop()[1].paired(self.pairings[instance])


def peer(instance: str) -> Peer:
    return cast(Peer, SimpleNamespace(instance=instance))


class Asked:
    """A search under way, and what came of it."""

    def __init__(self) -> None:
        self.directory, self.peers = FakeDirectory(), FakePeers()
        self.routes = Routes(
            cast(Directory, self.directory), cast(Whereabouts, SimpleNamespace(sizes=dict)), cast(Peers, self.peers), lambda call: call()
        )
        self.wanted = True
        self.found: list[list[Peer]] = []
        self.failures: list[tuple[FailureCode, str]] = []
        self.find()

    def find(self, dp_rank: int | None = None) -> None:
        self.routes.find(
            Search(
                ADDRESS,
                RoomId(1),
                dp_rank,
                lambda group, _dp_rank: group.ranks,
                lambda: self.wanted,
                self.found.append,
                lambda code, text: self.failures.append((code, text)),
            )
        )


def test_p3_where_another_instance_answers_the_service_is_asked_once_more() -> None:
    asked = Asked()
    asked.directory.answer(group_of("prefill-1"))
    asked.peers.answer("prefill-2")
    assert asked.directory.forgotten == [(ADDRESS, group_of("prefill-1"))] and asked.directory.asked == 2
    assert asked.found == [] and asked.failures == []
    asked.directory.answer(group_of("prefill-2"))
    asked.peers.answer("prefill-2")
    [peers] = asked.found
    assert [peer.instance for peer in peers] == ["prefill-2"]
    assert asked.routes.sizes() == {"searches": 0, "groups": 1, "directory_lookups": 0}


def test_c79_p3_where_another_instance_answers_for_good_both_are_named_with_the_address() -> None:
    asked = Asked()
    for _ in range(2):
        asked.directory.answer(group_of("prefill-1"))
        asked.peers.answer("prefill-2")
    assert asked.directory.asked == 2 and asked.found == []
    [(code, text)] = asked.failures
    assert code is FailureCode.PEER_LOST and "expected instance prefill-1 at 127.0.0.1:9 and found prefill-2" in text


def test_p4_the_group_of_a_lost_peer_is_asked_for_anew_and_no_other() -> None:
    asked = Asked()
    asked.directory.answer(group_of("prefill-1"))
    asked.peers.answer("prefill-1")
    asked.routes.lost("prefill-9")
    assert asked.directory.forgotten == [] and asked.routes.sizes()["groups"] == 1
    asked.routes.lost("prefill-1")
    assert asked.directory.forgotten == [(ADDRESS, group_of("prefill-1"))] and asked.routes.sizes()["groups"] == 0


@pytest.mark.parametrize("answered", [False, True])
def test_c7_a_search_that_no_room_wants_any_more_is_dropped(answered: bool) -> None:
    asked = Asked()
    if answered:
        asked.directory.answer(group_of("prefill-1"))
    asked.routes.prune(time.monotonic())
    assert asked.routes.sizes()["searches"] == 1
    asked.wanted = False
    asked.routes.prune(time.monotonic())
    assert asked.routes.sizes()["searches"] == asked.routes.sizes()["directory_lookups"] == 0
    if answered:
        _, waiter = asked.peers.waiters[0]
        assert not waiter.wanted()
        waiter.paired(peer("prefill-1"))
        waiter.refused(FailureCode.BACKEND, "too late")
    assert asked.found == [] and asked.failures == []


def test_c7_of_many_searches_some_are_looked_at_each_time_and_none_is_left_out() -> None:
    asked = Asked()
    for _ in range(2 * MOST_PRUNED):
        asked.find()
    asked.routes.prune(time.monotonic())
    assert asked.routes.sizes()["searches"] == 2 * MOST_PRUNED + 1
    asked.wanted = False
    for left in (MOST_PRUNED + 1, 1, 0):
        asked.routes.prune(time.monotonic())
        assert asked.routes.sizes()["searches"] == left


def test_a_way_that_was_found_is_known_for_rooms_that_have_to_do_with_the_same_ranks() -> None:
    asked = Asked()
    asked.directory.answer(group_of_two("prefill-1", "prefill-2"))
    for name in ("prefill-2", "prefill-1"):
        assert asked.routes.known(ADDRESS, RoomId(1), None) is None
        asked.peers.answer(name)
    [found] = asked.found
    assert asked.routes.known(ADDRESS, RoomId(1), None) == asked.routes.known(ADDRESS, RoomId(3, 1), None) == found
    assert asked.routes.known(ADDRESS, RoomId(2), None) is None, "it may have to do with others"
    assert asked.routes.known(ADDRESS, RoomId(1), 0) is None and asked.routes.known("127.0.0.1:8", RoomId(1), None) is None
    asked.directory.held = False
    assert asked.routes.known(ADDRESS, RoomId(1), None) is None, "it is asked for anew by now"
    asked.directory.held = True
    asked.peers.pairings["prefill-2"] = peer("prefill-2")
    assert asked.routes.known(ADDRESS, RoomId(1), None) is None, "it has paired anew"
    asked.peers.pairings["prefill-2"] = found[1]
    assert asked.routes.known(ADDRESS, RoomId(1), None) == found
    asked.routes.lost("prefill-2")
    assert asked.routes.known(ADDRESS, RoomId(1), None) is None and asked.routes.sizes()["groups"] == 0


def test_which_data_parallel_rank_has_a_room_is_never_known_from_another_room() -> None:
    asked = Asked()
    places = [Place(dp_size=2, dp_rank=rank) for rank in range(2)]
    ranks = [RankInfo(rank, 2, "127.0.0.1:9", f"prefill-{rank}", 1, "fake", place) for rank, place in enumerate(places)]
    group, whereabouts = Group(2, tuple(ranks)), list[Callable[[int], None]]()

    def locate(address: str, room: RoomId, located: Callable[[int], None]) -> Callable[[], None]:
        whereabouts.append(located)
        return lambda: None

    asked.routes._whereabouts = cast(Whereabouts, SimpleNamespace(sizes=dict, locate=locate))
    asked.directory.answer(group)
    whereabouts.pop()(1)
    for name in ("prefill-1", "prefill-0"):
        asked.peers.answer(name)
    assert len(asked.found) == 1 and asked.routes.known(ADDRESS, RoomId(1), None) is None
    asked.find(1)
    asked.directory.answer(group)
    for name in ("prefill-1", "prefill-0"):
        asked.peers.answer(name)
    assert asked.routes.known(ADDRESS, RoomId(2), 1) == asked.found[1]
    assert asked.routes.known(ADDRESS, RoomId(2), 0) is asked.routes.known(ADDRESS, RoomId(2), None) is None


def test_known_routes_are_told_without_a_lock_that_a_thread_in_the_middle_of_a_lookup_may_hold() -> None:
    """A finalizer may come there, and wait for the rooms' lock, under which routes are asked for."""
    directory, group = Directory(cast(HttpThread, None)), group_of("prefill-1")
    directory._groups[ADDRESS] = _Known(group, time.monotonic())
    with directory._lock, ThreadPoolExecutor(1) as other:
        assert other.submit(directory.holds, ADDRESS, group).result(5)
        assert other.submit(directory.last_error, ADDRESS).result(5) is None


def group_of_two(*instances: str) -> Group:
    place = [Place(tp_size=2, tp_rank=rank) for rank in range(2)]
    return Group(2, tuple(RankInfo(rank, 2, "127.0.0.1:9", name, 1, "fake", place[rank]) for rank, name in enumerate(instances)))


def test_p4_a_rank_that_does_not_answer_is_asked_for_again_and_found_where_it_is_now() -> None:
    """It was started again at another address; the other rank, which is paired, is dialled no second time."""
    asked = Asked()
    asked.directory.answer(group_of_two("prefill-1", "prefill-2"))
    (_, first), (_, silent) = asked.peers.waiters
    first.paired(peer("prefill-1"))
    assert asked.routes.why(ADDRESS) == f"prefill {ADDRESS}: connection refused"
    asked.routes.prune(time.monotonic() + 1.0)
    assert asked.directory.asked == 1
    asked.routes.prune(time.monotonic() + REFRESH_S)
    assert asked.directory.asked == 2 and asked.directory.forgotten == [(ADDRESS, group_of_two("prefill-1", "prefill-2"))]
    asked.directory.answer(group_of_two("prefill-1", "prefill-3"))
    assert len(asked.peers.waiters) == 3 and asked.found == []
    silent.refused(FailureCode.PEER_LOST, "its old address")
    asked.peers.answer("prefill-3")
    [peers] = asked.found
    assert [peer.instance for peer in peers] == ["prefill-1", "prefill-3"] and asked.failures == []


def test_a4_where_one_rank_is_refused_the_others_are_found_all_the_same() -> None:
    """To be told that the room has failed."""
    asked = Asked()
    asked.directory.answer(group_of_two("prefill-1", "prefill-2"))
    (_, first), (_, second) = asked.peers.waiters
    second.refused(FailureCode.INCOMPATIBLE, "pages differ")
    assert asked.failures == [(FailureCode.INCOMPATIBLE, "pages differ")] and asked.found == []
    first.paired(peer("prefill-1"))
    [[found]] = asked.found
    assert found.instance == "prefill-1" and asked.routes.sizes()["searches"] == 0


def test_p4_a_failed_search_forgets_what_it_used_and_tells_its_room_once() -> None:
    asked = Asked()
    asked.directory.answer(group_of("prefill-1"))
    _, waiter = asked.peers.waiters[0]
    waiter.refused(FailureCode.INCOMPATIBLE, "pages differ")
    waiter.refused(FailureCode.BACKEND, "again")
    assert asked.failures == [(FailureCode.INCOMPATIBLE, "pages differ")]
    assert asked.directory.forgotten == [(ADDRESS, group_of("prefill-1"))]
    asked.find()
    asked.directory.answer(LookupFailure(ADDRESS, "is this a prefill group's address?"))
    assert asked.failures[1][0] is FailureCode.PEER_LOST and ADDRESS in asked.failures[1][1]


def test_s8_a_time_out_says_why_the_other_side_was_not_reached() -> None:
    routes = Asked().routes
    assert routes.why(ADDRESS) == f"prefill {ADDRESS}: connection refused" and routes.why("127.0.0.1:8") == ""


def test_s8_a_time_out_names_an_address_that_has_not_answered_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked()
    monkeypatch.setattr(asked.directory, "last_error", lambda address: None)
    assert asked.routes.why(ADDRESS) == f"prefill {ADDRESS}: its bootstrap service has not answered"


# --- running managers


def test_a_room_of_a_paired_group_waits_for_no_turn_of_the_control_thread_and_fails_with_its_peer() -> None:
    """Also where that was lost already, and only this has not been told yet."""
    with duo() as pair:
        pair.pair()
        pair.transfer([1], [2])
        core, inside, go_on = pair.decode._core, threading.Event(), threading.Event()
        lost = core.lost

        def held(instance: str, text: str, replaced: bool) -> None:
            inside.set()
            go_on.wait(10)
            lost(instance, text, replaced)

        def lose() -> None:
            core.lost = held  # type: ignore[method-assign]
            core._peers.lose(found, "for a test")

        found = core._peers.peer("decode", pair.prefill.instance)
        assert found is not None
        before, during = threading.Event(), threading.Event()
        core.channel.call(lambda: (before.set(), during.wait(10)))
        assert before.wait(10)
        with pair.decode.receiver(number(), pair.prefill.address) as known:
            assert core.table.get("decode", known._room.id).life.sources, "while the control thread is busy"  # type: ignore[union-attr]
            core.channel.call(lose)
            during.set()
            assert inside.wait(10)
            with pair.decode.receiver(number(), pair.prefill.address) as late:
                go_on.set()
                ended(known, KVPoll.FAILED)
                assert known.failure is not None and known.failure.code is FailureCode.PEER_LOST
                with pair.prefill.sender(late.room) as sender:
                    late.receive([3])
                    sender.send([4], last=True)
                    ended(late, KVPoll.SUCCESS)


def replaced(stack: ExitStack, old: KVManager, closing: Callable[[ControlTap], object]) -> KVManager:
    """Another prefill instance at the ports of ``old``, which ends; ``closing`` says which of its last letters are lost."""
    ports = {"port": old.control.port, "bootstrap_port": int(old.address.rpartition(":")[2])}
    with ControlTap(old) as tap:
        closing(tap)
        old.close()
    return stack.enter_context(manager("prefill", memory(32, seed=6), limits={"orphan_s": 5.0}, **ports))


def test_p3_a_receiver_that_has_met_no_sender_finds_the_instance_that_replaced_prefill() -> None:
    with ExitStack() as stack:
        source, target = memory(32, seed=6), memory(32)
        old = stack.enter_context(manager("prefill", source, limits={"orphan_s": 5.0}))
        decode = stack.enter_context(manager("decode", target, limits={"orphan_s": 5.0}))
        with ControlTap(old) as tap:
            receiver = decode.receiver(number(), old.address)
            receiver.receive([4, 5])
            wait_until(lambda: any(isinstance(seen.letter.body, Join) for seen in tap.seen))
        new = replaced(stack, old, lambda tap: tap.drop())  # as if killed: nobody hears of it
        assert new.address == old.address and new.instance != old.instance
        stays(lambda: receiver.poll() is KVPoll.BOOTSTRAPPING, 0.1)
        sender = new.sender(receiver.room)
        sender.send([2, 3], last=True)
        ended(sender, KVPoll.SUCCESS)
        ended(receiver, KVPoll.SUCCESS)
        assert Duo(new, decode, source, target).equal([2, 3], [4, 5])
        wait_until(lambda: decode.stats().peers == new.stats().peers == 1)


def test_p3_a_receiver_that_has_met_its_sender_fails_when_prefill_is_replaced() -> None:
    with ExitStack() as stack:
        old = stack.enter_context(manager("prefill", memory(32, seed=6), limits={"orphan_s": 5.0}))
        decode = stack.enter_context(manager("decode", memory(32), limits={"orphan_s": 5.0}))
        sender, receiver = old.sender(number()), None
        receiver = decode.receiver(sender.room, old.address)
        wait_until(lambda: receiver.poll() is KVPoll.WAITING_FOR_INPUT)
        new = replaced(stack, old, lambda tap: tap.drop())
        ended(receiver, KVPoll.FAILED)
        assert receiver.failure is not None and receiver.failure.code is FailureCode.PEER_LOST
        assert f"instance {new.instance} is at its address now" in receiver.failure.reason


def test_close_a_receiver_that_only_hears_the_farewell_is_told_that_prefill_was_closed() -> None:
    def farewell_only(letter: Letter, outgoing: bool) -> bool:
        return type(letter.body).__name__ != "Stranger"

    with ExitStack() as stack:
        old = stack.enter_context(manager("prefill", memory(32, seed=6), limits={"orphan_s": 5.0}))
        decode = stack.enter_context(manager("decode", memory(32), limits={"orphan_s": 5.0}))
        sender = old.sender(number())
        receiver = decode.receiver(sender.room, old.address)
        wait_until(lambda: receiver.poll() is KVPoll.WAITING_FOR_INPUT)
        with ControlTap(old) as tap:
            tap.drop(farewell_only)
            old.close()
        ended(receiver, KVPoll.FAILED)
        assert receiver.failure is not None and receiver.failure.code is FailureCode.PEER_LOST
        assert receiver.failure.reason.endswith("lost: it was closed")
        of_its_group = ("links", "groups", "directory_groups")
        wait_until(lambda: not any(decode.stats().stores[name] for name in of_its_group), what="C7, P4: its group is forgotten")
