"""Rules of the contract at running managers that no other file shows directly, each test named after its rule."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pluggy
import pytest

from kvcore import ConfigError, FailureCode, Handle, KVPoll, core, hookimpl, observers, peers
from kvcore.faults import ControlTap
from kvcore.hookspecs import Event, KVCoreSpec, Transfer
from kvcore.observers import Observers
from kvcore.protocol import events as ev
from kvcore.protocol.messages import Abort, Destination, Drained, Here, Join, PoolPages
from kvcore.rooms import TOGETHER_S, RoomTable
from kvcore.states import Reason, RoomId
from kvcore.wire import Letter, Stranger
from tests.fake_backends import BlockingBackend, MemoryBackend, install, running, start
from tests.helpers import (
    BACKENDS,
    SOON_S,
    Duo,
    duo,
    ended,
    full_stores,
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


def published(pair: Duo) -> tuple[Any, Any]:
    sender, receiver = pair.open()
    receiver.receive(PAGES)
    wait_until(lambda: sender.poll() is KVPoll.WAITING_FOR_INPUT)
    return sender, receiver


# --- S: states


def test_s3_only_clear_removes(pair: Duo) -> None:
    good, bad = published(pair), published(pair)
    good[0].send(PAGES, last=True, record=b"first token")
    bad[1].abort("no")
    for handle in good:
        ended(handle, KVPoll.SUCCESS)
    for handle in bad:
        ended(handle, KVPoll.FAILED)
    for manager_of, which in ((pair.prefill, 0), (pair.decode, 1)):
        assert manager_of.status(good[which].room) is KVPoll.SUCCESS and manager_of.status(bad[which].room) is KVPoll.FAILED
        assert "SUCCESS" in manager_of.explain(good[which].room) and "no" in manager_of.explain(bad[which].room)
    assert dict(good[0].prefix_pages) == {"kv": 0} and good[1].record == b"first token"
    for sender, receiver in (good, bad):
        sender.clear()
        receiver.clear()
    for manager_of, which in ((pair.prefill, 0), (pair.decode, 1)):
        assert manager_of.status(good[which].room) is manager_of.status(bad[which].room) is None


def test_s4_the_handle_and_the_shared_store_are_one_fact_in_every_state(pair: Duo) -> None:
    hold = pair.plan.hold()
    handles = sender, receiver = pair.open()

    def both(state: KVPoll) -> None:
        wait_until(lambda: sender.poll() is receiver.poll() is state)
        agree(state)

    def agree(state: KVPoll) -> None:
        for handle, owner, side in zip(handles, (pair.prefill, pair.decode), ("prefill", "decode"), strict=True):
            assert handle.poll() is owner.status(handle.room) is owner.poll_all([handle])[0] is state
            assert owner.rooms() == {(handle.room, 0): state}
            assert f'kvcore_rooms{{side="{side}",state="{state.name}"}} 1' in owner.metrics_text()

    receiver.receive(PAGES)
    both(KVPoll.WAITING_FOR_INPUT)
    sender.send(PAGES, last=True)
    both(KVPoll.TRANSFERRING)
    hold.release()
    both(KVPoll.SUCCESS)
    sender.abort()
    receiver.abort()
    agree(KVPoll.SUCCESS)


def test_s6_a_failure_and_its_reason_are_seen_together_and_no_ticket_changes_them(pair: Duo) -> None:
    rooms = [published(pair) for _ in range(10)]
    handles = [handle for both in rooms for handle in both]
    wrong: list[str] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            for handle in handles:
                failed, reason = handle.poll() is KVPoll.FAILED, handle.failure
                if failed and reason is None:
                    wrong.append(f"{handle} has no reason")
                if reason is not None and handle.poll() is not KVPoll.FAILED:
                    wrong.append(f"{handle} has a reason and is not FAILED")

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    hold = pair.plan.hold()
    for sender, receiver in rooms:
        sender.send(PAGES, last=True)
        (sender if sender.room % 2 else receiver).abort(f"no to {sender.room}")
    for handle in handles:
        ended(handle, KVPoll.FAILED)
    hold.release()  # the tickets end well, too late
    for sender, receiver in rooms:
        assert sender.wait_release_safe(SOON_S) and receiver.wait_release_safe(SOON_S)
        for handle in (sender, receiver):
            assert handle.poll() is KVPoll.FAILED and handle.failure is not None and handle.failure.reason == f"no to {sender.room}"
    over.set()
    watching.join(SOON_S)
    assert not wrong and not watching.is_alive()


# --- A: abort


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("state", [KVPoll.BOOTSTRAPPING, KVPoll.WAITING_FOR_INPUT, KVPoll.TRANSFERRING])
def test_a2_when_abort_returns_the_room_is_failed_here_and_in_the_store(pair: Duo, state: KVPoll, side: str) -> None:
    pair.plan.hold()
    room = number()
    sender = pair.prefill.sender(room) if side == "prefill" or state is not KVPoll.BOOTSTRAPPING else None
    receiver = pair.decode.receiver(room, pair.prefill.address) if side == "decode" or state is not KVPoll.BOOTSTRAPPING else None
    owner, handle = (pair.prefill, sender) if side == "prefill" else (pair.decode, receiver)
    if sender is not None and receiver is not None:
        receiver.receive(PAGES)
        if state is KVPoll.TRANSFERRING:
            sender.send(PAGES, last=True)
    assert handle is not None
    wait_until(lambda: handle.poll() is state)
    handle.abort("not wanted")
    assert handle.poll() is owner.status(room) is KVPoll.FAILED
    assert handle.failure is not None and (handle.failure.reason, handle.failure.side) == ("not wanted", side)
    handle.abort("once more")
    assert handle.failure.reason == "not wanted"


def test_a6_abort_removes_nothing_until_clear(pair: Duo) -> None:
    sender, receiver = published(pair)
    receiver.abort("not wanted")
    ended(sender, KVPoll.FAILED)
    pair.transfer([1], [2])  # and what else goes on removes nothing either
    for owner, handle in ((pair.prefill, sender), (pair.decode, receiver)):
        assert owner.rooms() == {(handle.room, 0): KVPoll.FAILED} and full_stores(owner)["rooms"] == 1
        assert "not wanted" in owner.explain(handle.room)
        handle.clear()
        assert owner.rooms() == {} and owner.status(handle.room) is None
    pair.stores_empty()


# --- R: release safety


EXPIRING: dict[str, float | None] = {"ticket_s": 0.1, "liveness_s": 1.0, "quarantine_s": 1.3}


def test_r2_a_pair_given_up_by_limit_is_called_expired_also_when_it_is_no_longer_known() -> None:
    with duo(**EXPIRING) as pair:
        pair.pair()
        pair.plan.drop_done(times=1)
        sender, receiver = published(pair)
        sender.send(PAGES, last=True)
        ended(sender, KVPoll.FAILED)
        wait_until(lambda: sender.release_unproven)
        sender.clear()
        receiver.clear()
        pair.stores_empty()
        with ControlTap(pair.prefill) as tap:
            later = published(pair)
            for handle in later:
                handle.clear()
            pair.stores_empty()
            answers = {handles[1].generation: ask(tap, pair, *handles) for handles in ((sender, receiver), later)}
        assert answers == {receiver.generation: True, later[1].generation: False}


def ask(tap: ControlTap, pair: Duo, sender: Handle, receiver: Handle) -> bool:
    """Whether prefill calls a pair expired when it is asked whether it is drained."""
    question = Abort(sender.room, 0, receiver.generation, sender.generation, Reason.of(FailureCode.ABORTED, "late", "decode"))
    before = len(drained(tap, receiver.generation))
    tap.inject(Letter(1, pair.decode.instance, pair.prefill.instance, question))
    wait_until(lambda: len(drained(tap, receiver.generation)) > before)
    return drained(tap, receiver.generation)[-1].expired


def drained(tap: ControlTap, generation: int) -> list[Drained]:
    bodies = [seen.letter.body for seen in tap.seen]
    return [body for body in bodies if isinstance(body, Drained) and body.rg == generation]


def test_c1_an_instance_that_returns_is_told_expired_of_what_it_was_lost_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known any more here of the pair; that its tickets ended quiescent is not known either."""
    fake = install(monkeypatch, MemoryBackend)
    with running(fake, liveness_s=2.0) as [pair]:
        pair.pair()
        sender, receiver = published(pair)
        with ControlTap(pair.prefill) as tap, ControlTap(pair.decode) as answers:
            lost = tap.drop(lambda letter, outgoing: isinstance(letter.body, Abort) and not outgoing)
            receiver.abort("no")
            wait_until(lambda: lost.count)
            sender.clear()
            tap.inject(Letter(1, pair.decode.instance, pair.prefill.instance, Stranger()))
            wait_until(lambda: pair.decode.stats().peers == 0)
            lost.stop()
            pair.transfer([1], [1])  # has them pair again
            wait_until(lambda: drained(answers, receiver.generation))
            assert all(answer.expired for answer in drained(answers, receiver.generation))
        assert receiver.poll() is KVPoll.FAILED and not receiver.is_release_safe(), "no proof: until quarantine_s"


@pytest.mark.parametrize("needs", [True, False])
def test_r4_pages_are_fenced_by_the_end_of_a_process_that_the_engine_needs_to_write(monkeypatch: pytest.MonkeyPatch, needs: bool) -> None:
    fake = install(monkeypatch, MemoryBackend, needs_process_to_write=needs)
    with running(fake) as [pair]:
        pair.pair()
        _, receiver = published(pair)
        monkeypatch.setattr(pair.prefill._core._peers, "_check", lambda peer, now: None)  # only decode takes the other for gone
        monkeypatch.setattr(peers, "known_gone", lambda process: True)
        ended(receiver, KVPoll.FAILED)
        assert receiver.failure is not None and "its process is gone" in receiver.failure.reason
        wait_until(lambda: "disconnect" in fake.made[1].calls)
        if needs:
            assert receiver.wait_release_safe(SOON_S) and not receiver.release_unproven
            wait_until(lambda: pair.decode.stats().stores["departed_peers"] == 0)
        else:
            stays(lambda: not receiver.is_release_safe(), 1.2)


def test_r7_after_a_stall_of_its_own_a_sender_hears_of_its_peers_before_it_starts_anything(caplog: pytest.LogCaptureFixture) -> None:
    source, target = memory(32, seed=5), memory(32)
    with (
        manager("prefill", source, limits={"liveness_s": 1.0}) as prefill,
        manager("decode", target) as decode,
        ControlTap(prefill) as tap,
        caplog.at_level(logging.WARNING, "kvcore.peers"),
    ):
        pair = Duo(prefill, decode, source, target).pair()
        transfers: list[Transfer] = []

        class Watch:
            @hookimpl(tryfirst=True)
            def kvcore_transfer(self, transfer: Transfer) -> None:
                transfers.append(transfer)

        prefill.add_observer(Watch())
        sender, receiver = published(pair)
        silence = tap.drop(lambda letter, outgoing: not outgoing)
        stalled, awake = threading.Event(), threading.Event()
        prefill.control.call(lambda: (stalled.wait(1.6), awake.set()))
        assert awake.wait(SOON_S)
        sender.send(PAGES, last=True)
        stays(lambda: not transfers and prefill.stats().peers == 1, 0.3)
        silence.stop()
        ended(receiver, KVPoll.SUCCESS)
        assert transfers and prefill.stats().peers == 1 and "lost" not in caplog.text


# --- C: clear


def test_c7_when_all_is_cleared_every_store_is_empty_and_those_of_peers_end_with_the_peers(pair: Duo) -> None:
    with ExitStack() as stack:
        others = [stack.enter_context(manager("decode", memory(32), backend=pair.backend)) for _ in range(3)]
        rooms = []
        for turn, decode in enumerate([pair.decode, *others]):
            sender = pair.prefill.sender(number())
            receiver = decode.receiver(sender.room, pair.prefill.address)
            receiver.receive(PAGES)
            sender.send(PAGES, last=turn % 2 == 0)
            rooms.append((sender, receiver))
        for turn, (sender, receiver) in enumerate(rooms):
            if turn % 2:
                wait_until(lambda sender=sender: sender.poll() is KVPoll.TRANSFERRING)
                receiver.abort()
            else:
                ended(receiver, KVPoll.SUCCESS)
        assert pair.prefill.stats().peers == 4 and full_stores(pair.prefill)["rooms"] == 4
        for handles in rooms:
            for handle in handles:
                ended(handle, handle.wait(SOON_S))
                handle.clear()
        for owner in (pair.prefill, pair.decode, *others):
            stores_empty(owner)
    of_peers = ("peers", "pairings", "departed_peers")
    wait_until(lambda: [pair.prefill.stats().stores[name] for name in of_peers] == [1, 0, 0])
    assert [pair.decode.stats().stores[name] for name in (*of_peers, "links", "groups")] == [1, 0, 0, 1, 1]


# --- P: peers


def test_p5_a_destination_whose_pages_are_no_whole_numbers_is_bad_and_binds_nothing(pair: Duo) -> None:
    with ControlTap(pair.prefill) as tap:
        sender, receiver = pair.open()
        wait_until(lambda: receiver.poll() is KVPoll.WAITING_FOR_INPUT)
        before = pair.prefill.stats().counters["kvcore_bad_messages_total"]
        for pages in (b"abc", b"abcde"):
            body = Destination(sender.room, 0, receiver.generation, sender.generation, (PoolPages("kv", pages),))
            tap.inject(Letter(1, pair.decode.instance, pair.prefill.instance, body))
        wait_until(lambda: pair.prefill.stats().counters["kvcore_bad_messages_total"] == before + 2)
        assert not sender.poll().terminal and dict(sender.prefix_pages) == {}, "nothing is bound"
    receiver.receive(PAGES)
    sender.send(PAGES, last=True)
    ended(receiver, KVPoll.SUCCESS)


def test_close_the_farewell_of_a_peer_is_no_warning_and_its_rooms_say_so(pair: Duo, caplog: pytest.LogCaptureFixture) -> None:
    sender, _receiver = published(pair)  # kept, since a handle that is collected is aborted
    with ControlTap(pair.decode) as tap, caplog.at_level(logging.INFO, "kvcore"):
        tap.drop(lambda letter, outgoing: isinstance(letter.body, Abort))  # only the farewell is left to tell it
        pair.decode.close()
        ended(sender, KVPoll.FAILED)
    assert sender.failure is not None and sender.failure.code is FailureCode.PEER_LOST
    assert sender.failure.reason == f"peer {pair.decode.instance} lost: it was closed"
    told = [record for record in caplog.records if record.name == "kvcore.peers" and "lost" in record.message]
    assert [record.levelno for record in told] == [logging.INFO]


# --- B: backends


def test_b6_a_blocking_engine_holds_up_neither_the_progress_thread_nor_other_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, BlockingBackend, parallel=2)
    with running(fake, decodes=2) as [slow, quick]:
        quick.pair()
        gate = fake.made[0].gate(slow.decode.instance)
        stuck = start(slow)
        wait_until(lambda: gate.met)
        assert any(thread.name.startswith("kvcore-worker") for thread in own_threads())
        for page in range(3):
            quick.transfer([page], [page])
        other = start(slow, 2)
        other[0].abort("not wanted")  # the thread that would cancel it is not in the engine
        quick.transfer([4], [4])
        assert stuck[0].poll() is KVPoll.TRANSFERRING and gate.met == 1
        gate.opened.set()
        ended(stuck[1], KVPoll.SUCCESS)


def test_b7_a_closed_backend_opens_again_in_the_same_process_over_the_same_memory() -> None:
    source, target = memory(32, seed=5), memory(32)
    port = 0
    instances = set()
    for turn in range(3):
        options = {"backend_options": {"port": port}} if port else {}
        with manager("prefill", source) as prefill, manager("decode", target, **options) as decode:
            Duo(prefill, decode, source, target).transfer([turn, 5], [5, turn + 8])
            instances.add(decode.instance)
            port = port or unused_port()
    assert len(instances) == 3


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("hangs", [False, True], ids=["raises", "hangs"])
def test_b5_a_fence_that_fails_at_the_end_does_not_keep_the_engine_from_being_closed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hangs: bool
) -> None:
    monkeypatch.setattr(core, "STOP_S", 0.5)
    closing = threading.Event()
    let_go = threading.Event()

    class BadFence(MemoryBackend):
        @hookimpl
        def kvcore_disconnect(self, peer: str) -> bool:
            super().kvcore_disconnect(peer)
            if closing.is_set() and hangs:
                let_go.wait(SOON_S)
            if closing.is_set():
                raise RuntimeError("no fence")
            return False

    fake = install(monkeypatch, BadFence, cancel=False, fences_on_disconnect=True)
    with running(fake) as [pair]:
        pair.pair()
        fake.made[0].held.set()
        sender, receiver = published(pair)
        sender.send(PAGES, last=True)
        wait_until(lambda: fake.made[0].jobs)
        receiver.abort("no")
        closing.set()
        with caplog.at_level(logging.ERROR, "kvcore.core"):
            ending = threading.Thread(target=pair.decode.close, daemon=True)
            ending.start()
            wait_until(lambda: "cannot be fenced; its pages stay unproven" in caplog.text)
            let_go.set()
            ending.join(SOON_S)
        assert not ending.is_alive()
        assert fake.made[1].calls[-3:] == ["disconnect", "unregister", "close"]
        assert not receiver.is_release_safe(), "R4: what failed proves nothing"


# --- resending


LIMITS = ("bootstrap_s", "input_s", "transfer_s", "ticket_s", "quarantine_s", "mark_s")


class Silence:
    """An outside for a table of rooms, in which nothing happens; keeps what is sent."""

    def __init__(self, **limits: float) -> None:
        usual: dict[str, float | None] = dict.fromkeys(LIMITS, 1000.0)
        self.table = RoomTable(usual | limits, 0, self)
        self.sent: list[object] = []

    def send(self, effect: ev.Send) -> None:
        self.sent.append(effect.message)

    def start(self, room: object, effect: object) -> None: ...
    def seek(self, room: object) -> None: ...
    def cancel(self, key: object) -> None: ...
    def forget(self, key: object) -> None: ...
    def unproven(self, key: object, effect: object) -> None: ...
    def changed(self, room: object, old: object) -> None: ...
    def listen(self) -> None: ...
    def settle(self) -> None: ...
    def wake_by(self, when: float) -> None: ...

    def why_not_reached(self, room: object) -> str:
        return ""

    def gaps(self, count: int) -> list[float]:
        """Let that many resends come due, one after the other; the seconds between them."""
        due = self.table.tick(0.0)
        found = []
        for _ in range(count):
            assert due is not None
            before, said = due, len(self.sent)
            due = self.table.tick(before)
            assert len(self.sent) == said + 1 and due is not None
            found.append(due - before)
        return found


def joining(outside: Silence) -> tuple[RoomId, int, ev.Party]:
    room, party = RoomId(16 * number()), ev.Party("prefill-1")  # such rooms repeat themselves the most rarely
    record = outside.table.open("decode", room)
    assert record is not None
    outside.table.apply("decode", room, ev.Route(record.key.generation, (party,)))
    return room, record.key.generation, party


def test_p6_what_is_not_answered_is_sent_again_ever_more_slowly_up_to_orphan_s() -> None:
    outside = Silence(orphan_s=3.0)
    joining(outside)
    assert outside.gaps(6) == pytest.approx([0.5, 1.0, 2.0, 3.0, 3.0, 3.0], abs=1.01 * TOGETHER_S)
    assert all(isinstance(message, Join) for message in outside.sent)


def test_p6_short_limits_have_the_first_repetition_soon() -> None:
    outside = Silence(orphan_s=0.4)
    joining(outside)
    assert outside.gaps(5) == pytest.approx([0.1, 0.2, 0.4, 0.4, 0.4], abs=1.01 * TOGETHER_S)


def test_p6_a_change_of_state_starts_resending_anew() -> None:
    outside = Silence(orphan_s=3.0)
    room, generation, party = joining(outside)
    outside.gaps(4)
    outside.table.apply("decode", room, ev.Got(Here(room.number, room.attempt, generation, 5), party))
    outside.table.apply("decode", room, ev.Receive(generation, (PoolPages("kv", b""),)))
    assert outside.gaps(3) == pytest.approx([0.5, 1.0, 2.0], abs=1.01 * TOGETHER_S)
    assert isinstance(outside.sent[-1], Destination)


def test_repeats_of_rooms_opened_at_different_moments_fall_due_together() -> None:
    """Each by itself would take a turn of the control thread, here and on the other side."""
    now = 100.0
    outside = Silence(orphan_s=30.0)
    outside.table = RoomTable(dict.fromkeys(LIMITS, 1000.0) | {"orphan_s": 30.0}, 0, outside, lambda: now)
    for now in (100.001, 100.002, 100.004):  # noqa: B007
        joining(outside)
    outside.sent.clear()
    said, due = [], outside.table.tick(now)
    while due is not None and len(outside.sent) < 9:
        before, due = len(outside.sent), outside.table.tick(due)
        said.append(len(outside.sent) - before)
    assert said == [1, 1, 1, 3, 3]


# --- observers


class Nosy:
    """Keeps the names of events; waits at the first until told to go on."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.busy, self.go_on = threading.Event(), threading.Event()

    @hookimpl
    def kvcore_on_event(self, event: Event) -> None:
        self.busy.set()
        assert self.go_on.wait(SOON_S)
        self.names.append(event.name)


def test_what_observers_do_not_take_in_time_is_bounded_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "MOST_WAITING", 5)
    plugins = pluggy.PluginManager("kvcore")
    plugins.add_hookspecs(KVCoreSpec)
    nosy, told = Nosy(), Observers(plugins)
    told.tell(Event("nobody listens yet", None, {}))
    told.add(nosy)
    told.tell(Event("first", None, {}))
    assert nosy.busy.wait(SOON_S)
    for count in range(20):
        told.tell(Event(str(count), None, {}))
    assert len(told) == 5
    nosy.go_on.set()
    told.stop(SOON_S)
    assert nosy.names == ["first", "15", "16", "17", "18", "19"]


def test_an_observer_added_twice_is_refused_and_goes_on(pair: Duo) -> None:
    nosy = Nosy()
    nosy.go_on.set()
    pair.prefill.add_observer(nosy)
    with pytest.raises(ConfigError, match="observer Nosy was added before; add each object once"):
        pair.prefill.add_observer(nosy)
    pair.transfer([1], [2])
    wait_until(lambda: nosy.names.count("status") >= 3)


def test_an_observer_with_a_misspelt_hook_is_refused_in_one_line(pair: Duo) -> None:
    class Misspelt(Nosy):
        @hookimpl
        def kvcore_on_evnet(self, event: Event) -> None: ...

    nosy = Misspelt()
    with pytest.raises(ConfigError, match="observer Misspelt is refused: .*kvcore_on_evnet") as refused:
        pair.prefill.add_observer(nosy)
    assert "\n" not in str(refused.value)
    good = Nosy()
    good.go_on.set()
    pair.prefill.add_observer(good)  # nothing of the other is left that would refuse it
    pair.transfer([1], [2])
    wait_until(lambda: good.names.count("status") >= 3)
    assert not nosy.names and not nosy.busy.is_set(), "its good hook is not used either"
