"""The hooks, one by one, over TCP: within this process, and to one that stands still or dies."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from kvcore_conformance.stage.driver import free_port
from kvcore_mooncake import backend, native
from kvcore_mooncake.backend import Job
from mooncake_pair import BIG, Calls, Stage, stage

import kvcore
from benchmarks.fuzz.endpoints import spoiled
from kvcore import Region
from kvcore.hookspecs import DONE, PENDING, RETRY, Endpoint, TicketState
from kvcore.states import RoomKey
from tests.engine_nodes import Guest, Node, resources, settles
from tests.helpers import stays, wait_until

SCATTERED = ([9, 3, 50, 20, 7], [1, 40, 2, 30, 8])
RUN = (list(range(10, 30)), list(range(20, 40)))
NEW = 0xEE
EVEN, ALL = list(range(0, 64, 2)), list(range(64))


@pytest.fixture
def scene() -> Iterator[Stage]:
    with stage() as found:
        yield found


@pytest.fixture(scope="module")
def lasting() -> Iterator[tuple[Node, Node, Guest]]:
    """A writer, one that it writes to and a big guest, which many tests share since it takes long to start and end them."""
    with stage() as found:
        yield found.node("prefill"), found.node(), found.guest(*BIG)


@pytest.fixture
def pair(lasting: tuple[Node, Node, Guest]) -> tuple[Node, Node]:
    """The two, connected; zero is where it is written to."""
    one, two, _ = lasting
    one.backend.kvcore_connect(two.peer())
    two.arrays[0][:] = 0
    return one, two


@pytest.fixture
def guest(lasting: tuple[Node, Node, Guest]) -> Iterator[Guest]:
    """The guest. Whatever a test has it stand still for, in the end it goes on."""
    lasting[2].array[:] = 0
    yield lasting[2]
    lasting[2].thaw()


@pytest.fixture
def stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every transfer probes its peer first."""
    monkeypatch.setattr(backend, "FRESH_S", -1.0)


def failed(state: Job | TicketState) -> tuple[bool, bool]:
    """Of a failed ticket: whether it is quiescent, and whether the peer is broken."""
    assert isinstance(state, TicketState) and state.kind.value == "failed", state
    return state.quiescent, state.peer_broken


def test_t1_scattered_pages_and_runs_arrive_and_nothing_else_is_written(scene: Stage) -> None:
    one, two = scene.node("prefill", layers=3), scene.node(layers=3)
    one.backend.kvcore_connect(two.peer())
    for mine, theirs in (SCATTERED, RUN):
        assert one.move(mine, theirs, two.peer()) == DONE
        assert all(np.array_equal(a[mine], b[theirs]) for a, b in zip(one.arrays, two.arrays, strict=True))
    untouched = sorted({*ALL} - {*SCATTERED[1], *RUN[1]})
    assert not any(array[untouched].any() for array in two.arrays)


def test_64_mib_arrive_in_one_piece_and_in_pieces(scene: Stage) -> None:
    one, two = scene.node("prefill", *BIG), scene.node("decode", *BIG)
    one.backend.kvcore_connect(two.peer())
    pages = np.random.default_rng(1).permutation(BIG[0]).tolist()
    for mine, theirs in ((range(BIG[0]), range(BIG[0])), (range(BIG[0]), pages)):
        two.arrays[0][:] = 0
        assert one.move(mine, theirs, two.peer()) == DONE
        assert np.array_equal(one.arrays[0], two.arrays[0][list(theirs)])


def test_an_instance_can_write_to_itself(scene: Stage) -> None:
    both = scene.node("both")
    both.arrays[0][3] = 7
    both.backend.kvcore_connect(both.peer())
    assert both.move([3], [5], both.peer()) == DONE
    assert (both.arrays[0][5] == 7).all()


# --- what is posted, and what is not


@pytest.mark.parametrize("refused", [0, 3])
def test_t7_what_the_engine_did_not_take_is_quiescent(pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    one, two = pair
    assert one.move([0], [0], two.peer()) == DONE
    submit, made = Calls(monkeypatch).engine.transfer_submit_write, []

    def some(*args: object) -> object:
        made.append(args)
        return submit(*args) if len(made) <= refused else 0

    Calls(monkeypatch, transfer_submit_write=some)
    assert failed(one.ended(one.post(EVEN, EVEN, two.peer()))) == (True, False)
    assert len(made) == refused + 1
    assert [bool(two.arrays[0][page].any()) for page in EVEN[1:5]] == [refused > 1, refused > 2, False, False]


def test_a_protocol_that_may_have_begun_what_it_refused_is_not_quiescent(scene: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.load()[0], "SUPPORT_HIP", True)  # which comes down to TCP here
    other = {"protocol": "hip", "environment": {"MC_FORCE_TCP": "1"}}
    one, two = scene.node("prefill", **other), scene.node(**other)
    one.backend.kvcore_connect(two.peer())
    assert one.move([3], [5], two.peer()) == DONE
    Calls(monkeypatch, transfer_submit_write=lambda *_: 0)
    assert failed(one.post([3], [5], two.peer())) == (False, False)


def test_what_the_engine_throws_is_not_quiescent_and_costs_only_its_ticket(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    bad = dataclasses.replace(one.transfer([3], [5], two.peer()), peer=two.name, length=np.array([[1]], np.uint64))
    assert failed(one.backend.kvcore_transfer(bad, may_wait=True)) == (False, False)
    assert one.backend.kvcore_held_rooms() == []
    assert one.move([3], [5], two.peer()) == DONE


@pytest.mark.parametrize(("codes", "quiescent"), [((1, -1, 1), False), ((0, -2, 1, 1, 1), True)])
def test_r3_a_ticket_ends_when_all_of_it_has_ended_and_a_time_out_is_no_end(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch, codes: tuple[int, ...], quiescent: bool
) -> None:
    one, two = pair
    assert one.move([0], [0], two.peer()) == DONE
    job = one.post([2, 4, 6], [2, 4, 6], two.peer())
    wait_until(lambda: two.arrays[0][[2, 4, 6]].all())
    answers = iter(codes)
    calls = Calls(monkeypatch, transfer_check_status=lambda *_: next(answers))
    states = [one.state(job) for _ in range(sum(code in (0, -2) for code in codes) + 1)]
    assert states[:-1] == [PENDING] * (len(states) - 1)
    assert states[-1] == DONE if quiescent else failed(states[-1]) == (False, False)
    assert calls.made["transfer_check_status"] == len(codes)
    assert one.state(job) == states[-1]  # and is not asked for again: the engine has freed it
    assert calls.made["transfer_check_status"] == len(codes)


def test_a_write_that_the_peer_refuses_is_not_quiescent_and_the_next_one_served(pair: tuple[Node, Node]) -> None:
    one, two = pair
    wrong = dataclasses.replace(one.transfer([3], [5], two.peer()), remote_base=np.array([4096], np.uint64))
    assert failed(one.ended(one.backend.kvcore_transfer(wrong, may_wait=True))) == (False, False)  # type: ignore[arg-type]
    assert one.move([3], [5], two.peer()) == DONE


def test_b6_no_poll_looks_at_more_writes_of_a_ticket_than_it_has_time_for(pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = pair
    job = one.post(EVEN, EVEN, two.peer())
    wait_until(lambda: two.arrays[0][EVEN].all(axis=1).all())
    monkeypatch.setattr(backend, "CHECKS", 10)
    calls = Calls(monkeypatch, "transfer_check_status")
    assert one.state(job) is PENDING and calls.made["transfer_check_status"] <= 10
    assert one.ended(job) == DONE and calls.made["transfer_check_status"] >= 32


def test_t6_what_does_not_fit_into_the_engines_queue_is_tried_again(scene: Stage, guest: Guest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "MOST_QUEUED", 40)
    one = scene.writer(guest)
    job = scene.in_flight(one, guest)
    some = list(range(0, 80, 2))
    assert one.post(some, some, guest.peer) is RETRY
    small = one.post([1], [1], guest.peer)
    assert isinstance(small, Job)
    guest.thaw()
    assert one.ended(job) == one.ended(small) == DONE
    assert one.move(some, some, guest.peer) == DONE
    more = list(range(0, 200, 2))
    assert one.move(more, more, guest.peer) == DONE  # alone it is given to the engine whatever its size


# --- abort and clear


@pytest.mark.parametrize("how", ["abort", "clear", "disconnect"])
def test_a5_what_ends_the_posting(pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(backend, "LEAVE_S", 0.1)
    one, two = pair
    transfer = one.transfer(EVEN, EVEN, two.peer())
    submit, made = Calls(monkeypatch).engine.transfer_submit_write, []
    ends = {
        "abort": lambda room: one.backend.kvcore_abort(room, []),
        "clear": one.backend.kvcore_clear,
        "disconnect": lambda room: one.backend.kvcore_disconnect(two.name if room == transfer.room else "another"),
    }

    def ended(*args: object) -> object:
        if args[3] != backend.NOWHERE:  # which is how it hangs up
            made.append(args)
            if len(made) == 2:
                ends[how](RoomKey("prefill", 1, 0, 1))  # another room
            if len(made) == 5:
                ends[how](transfer.room)
        return submit(*args)

    Calls(monkeypatch, transfer_submit_write=ended)
    assert failed(one.ended(one.backend.kvcore_transfer(transfer, may_wait=True))) == (True, False)  # type: ignore[arg-type]
    assert len(made) == 5


def test_a_write_that_nobody_asks_for_is_kept_until_it_has_ended(pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = pair
    job = one.post([3], [5], two.peer())
    assert isinstance(job, Job) and job.room is not None
    assert one.backend.kvcore_held_rooms() == [job.room]
    one.backend.kvcore_clear(RoomKey("prefill", 1, 0, 1))
    assert one.backend.kvcore_held_rooms() == [job.room]
    one.backend.kvcore_clear(job.room)
    assert one.backend.kvcore_held_rooms() == []
    wait_until(lambda: one.backend.kvcore_poll([]) == [] and job.state == DONE)  # it is looked at with others


# --- peers


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "Input data was truncated"),
        (b"\x93garbage", "Expected"),
        (("127.0.0.1:1", "tcp"), "Expected `array` of length 3"),  # of wire version 1
        (("127.0.0.1:1", "rdma", "NAME"), "with protocol 'rdma' and this side uses 'tcp', set alike"),
        (("127.0.0.1:1", "tcp", "another"), "it is 'another' with protocol 'tcp'"),
        (("no address", "tcp", "NAME"), "its engine's address must be host:port"),
    ],
)
def test_p5_a_bad_endpoint_is_refused(pair: tuple[Node, Node], data: bytes | tuple[str, ...], why: str) -> None:
    one, two = pair
    if isinstance(data, tuple):
        data = msgspec.msgpack.encode([two.name if word == "NAME" else word for word in data])
    one.backend.kvcore_disconnect(two.name)
    with pytest.raises(ConnectionError, match=f"peer {two.name} cannot be reached .*{why}"):
        one.backend.kvcore_connect(dataclasses.replace(two.peer(), endpoint=Endpoint(data)))
    one.backend.kvcore_connect(two.peer())
    assert one.move([3], [5], two.peer()) == DONE


def test_p5_an_endpoint_changed_in_any_way_is_refused(pair: tuple[Node, Node]) -> None:
    """2,000 endpoints changed on their way, but for those that name another address, where there may be anybody: refused, each."""
    one, two = pair
    one.backend.kvcore_disconnect(two.name)
    data, refused = two.peer().endpoint.data, 0
    session = msgspec.msgpack.decode(data)[0]
    for index in range(2000):
        bad = spoiled(8, index, data)
        if named_address(bad) not in ("", session):
            continue
        with pytest.raises(ConnectionError, match=f"peer {two.name} cannot be reached"):
            one.backend.kvcore_connect(dataclasses.replace(two.peer(), endpoint=Endpoint(bad)))
        refused += 1
    assert refused > 1000
    one.backend.kvcore_connect(two.peer())
    assert one.move([3], [5], two.peer()) == DONE


def named_address(data: bytes) -> str:
    """The address in an endpoint; "" if it cannot be read."""
    try:
        return msgspec.msgpack.decode(data, type=tuple[str, str, str])[0]
    except (msgspec.MsgspecError, ValueError):
        return ""


def test_a_peer_whose_port_nobody_listens_at_is_not_connected(pair: tuple[Node, Node]) -> None:
    one, two = pair
    one.backend.kvcore_disconnect(two.name)
    nobody = Endpoint(msgspec.msgpack.encode((f"127.0.0.1:{free_port()}", "tcp", two.name)))
    with pytest.raises(ConnectionError, match="refused.*check that it runs"):
        one.backend.kvcore_connect(dataclasses.replace(two.peer(), endpoint=nobody))
    assert failed(one.post([3], [5], two.peer())) == (True, True)


def test_a_peer_that_is_gone_is_not_written_to(scene: Stage, monkeypatch: pytest.MonkeyPatch, stale: None) -> None:
    guest = scene.guest()
    one = scene.writer(guest)
    guest.kill()
    calls = Calls(monkeypatch, "transfer_submit_write", "send_probe")
    state = one.post([3], [5], guest.peer)
    assert failed(state) == (True, True)
    assert "no answer" in state.reason and "code -102: no connection" in state.reason  # type: ignore[union-attr]
    assert dict(calls.made) == {"send_probe": 1}


def test_a_peer_that_was_just_written_to_is_not_probed(scene: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "FRESH_S", 60.0)
    guest = scene.guest()
    one = scene.writer(guest)
    calls = Calls(monkeypatch, "send_probe")
    assert one.move([3], [5], guest.peer) == DONE
    assert calls.made["send_probe"] == 0
    guest.kill()
    assert failed(one.move([3], [5], guest.peer)) == (False, False)
    assert failed(one.move([3], [5], guest.peer)) == (True, True)  # a failure has it probed again
    assert calls.made["send_probe"] == 1


def test_b6_a_call_that_may_not_wait_probes_nobody(scene: Stage, monkeypatch: pytest.MonkeyPatch, stale: None) -> None:
    guest = scene.guest()
    one = scene.writer(guest)
    calls = Calls(monkeypatch, "send_probe", "transfer_submit_write")
    transfer = one.transfer([3], [5], guest.peer)
    assert one.backend.kvcore_transfer(transfer, may_wait=False) is RETRY
    assert not dict(calls.made)
    monkeypatch.setattr(backend, "FRESH_S", 60.0)
    assert one.ended(one.backend.kvcore_transfer(transfer, may_wait=False)) == DONE


def test_b5_a_peer_that_stands_still_takes_one_worker_and_nothing_is_posted_to_it(
    scene: Stage, guest: Guest, monkeypatch: pytest.MonkeyPatch, stale: None
) -> None:
    one, well = scene.writer(guest), scene.node("decode", *BIG)
    one.backend.kvcore_connect(well.peer())
    transfer, found = one.transfer([3], [5], guest.peer), []
    guest.freeze()
    worker = threading.Thread(target=lambda: found.append(one.backend.kvcore_transfer(transfer, may_wait=True)))
    worker.start()
    try:
        wait_until(lambda: one.backend.kvcore_held_rooms() == [transfer.room])
        assert one.post([4], [6], guest.peer) is RETRY
        assert one.move([3], [5], well.peer()) == DONE
        one.backend.kvcore_abort(transfer.room, [])
        one.backend.kvcore_poll([])
        assert not found
    finally:
        guest.thaw()
        worker.join(20.0)
    assert failed(found[0]) == (True, False)
    assert not guest.array.any()
    assert one.move([4], [6], guest.peer) == DONE


def test_r3_what_the_engine_gives_up_is_not_quiescent_and_still_arrives(scene: Stage, guest: Guest) -> None:
    one = scene.writer(guest, timeout_s=1)
    job = scene.in_flight(one, guest)
    assert failed(one.ended(job)) == (False, False)
    before = int(np.count_nonzero(guest.array))
    guest.thaw()
    wait_until(lambda: np.count_nonzero(guest.array) > before)


@pytest.mark.parametrize("when", ["idle", "writing"])
def test_a_killed_peer_costs_its_own_tickets_and_its_successor_works(scene: Stage, when: str) -> None:
    guest = scene.guest(*BIG)
    one = scene.writer(guest)
    if when == "writing":
        job = scene.in_flight(one, guest)
        guest.kill()
        assert failed(one.ended(job)) == (False, False)
    else:
        guest.kill()
    assert one.backend.kvcore_disconnect(guest.peer.id) is True
    assert failed(one.post([3], [5], guest.peer)) == (True, True)
    again = scene.guest(*BIG)
    one.backend.kvcore_connect(again.peer)
    assert one.move([3], [5], again.peer) == DONE
    assert np.array_equal(one.arrays[0][3], again.array[5])


def test_p3_another_instance_at_a_known_address_is_opened_anew(pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake remembers what it found under a name, and would write to where its predecessor had its memory."""
    one, two = pair
    session, protocol, _ = msgspec.msgpack.decode(two.peer().endpoint.data)
    peers = [
        dataclasses.replace(two.peer(), id=name, endpoint=Endpoint(msgspec.msgpack.encode((session, protocol, name))))
        for name in ("first", "second", "third")
    ]
    names = []
    submit = Calls(monkeypatch).engine.transfer_submit_write
    Calls(monkeypatch, transfer_submit_write=lambda *args: names.append(args[1]) or submit(*args))
    for peer in (*peers, peers[2]):
        one.backend.kvcore_connect(peer)
        two.arrays[0][:] = 0
        assert one.move([3], [5], peer) == DONE
        assert np.array_equal(one.arrays[0][3], two.arrays[0][5])
    first = names[0].replace(":", ":0")
    assert names[1:] == [first, first.replace(":", ":0"), first.replace(":", ":0")]


def test_r4_a_disconnect_is_proof_when_nothing_is_in_flight_to_the_peer(
    scene: Stage, guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "LEAVE_S", 0.1)
    one = scene.writer(guest)
    job = scene.in_flight(one, guest)
    assert one.backend.kvcore_disconnect(guest.peer.id) is False
    assert failed(one.post([1], [1], guest.peer)) == (True, True)
    guest.thaw()
    assert one.ended(job) == DONE
    assert one.backend.kvcore_disconnect(guest.peer.id) is True
    one.backend.kvcore_connect(guest.peer)
    assert one.move([3], [5], guest.peer) == DONE


def test_a_disconnect_waits_for_what_is_in_flight_to_end(pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "LEAVE_S", 20.0)
    one, two = pair
    answer = [0]
    Calls(monkeypatch, transfer_check_status=lambda *_: answer[0])
    job, found = one.post([3], [5], two.peer()), []
    assert isinstance(job, Job)
    leaving = threading.Thread(target=lambda: found.append(one.backend.kvcore_disconnect(two.name)))
    leaving.start()
    wait_until(lambda: job.cancelled)
    assert one.state(job) is PENDING  # which takes the lock: it waits by now
    answer[0] = 1
    assert one.ended(job) == DONE
    leaving.join(10.0)
    assert found == [True]


def test_a_peer_that_is_connected_again_is_the_one_it_was(scene: Stage, guest: Guest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "LEAVE_S", 0.1)
    monkeypatch.setattr(backend, "MOST_QUEUED", 40)
    one, some = scene.writer(guest), list(range(0, 80, 2))
    job = scene.in_flight(one, guest)
    one.backend.kvcore_connect(guest.peer)
    assert one.post(some, some, guest.peer) is RETRY  # with what is in flight it is too much
    one.backend.kvcore_disconnect(guest.peer.id)
    one.backend.kvcore_connect(guest.peer)
    assert one.post(some, some, guest.peer) is RETRY
    guest.thaw()
    assert one.ended(job) == DONE
    wait_until(lambda: one.move(some, some, guest.peer) == DONE)


@pytest.mark.parametrize("side", ["decode", "both"])
def test_r4_a_side_that_is_written_to_never_says_that_a_peer_is_fenced(scene: Stage, side: str) -> None:
    one, two = scene.node(side), scene.node()
    one.backend.kvcore_connect(two.peer())
    assert one.backend.kvcore_disconnect(two.name) is False
    assert one.backend.kvcore_disconnect("nobody") is False


@pytest.mark.parametrize("connects", [1, 2])  # twice by one that has the role "both", in either direction
def test_peers_that_die_leave_no_connection(scene: Stage, connects: int) -> None:
    guest = scene.guest()
    one = scene.writer(guest)
    before = resources()
    for _ in range(1, connects):
        one.backend.kvcore_connect(guest.peer)
    for _ in range(2):
        guest.kill()
        one.backend.kvcore_disconnect(guest.peer.id)
        wait_until(lambda: one.backend.kvcore_poll([]) == [] and resources() < before)
        guest = scene.guest()
        one.backend.kvcore_connect(guest.peer)
        assert one.move(EVEN, EVEN, guest.peer) == DONE
        for _ in range(1, connects):
            one.backend.kvcore_connect(guest.peer)


# --- memory


def test_b3_a_region_that_is_refused_is_named_with_the_code_and_none_stays(scene: Stage) -> None:
    one, two = scene.node("prefill", layers=2), scene.node(layers=2)
    good = list(one.pool.regions)
    one.backend.kvcore_unregister(good)
    within = Region(good[1].ptr + 4096, 4096)
    with pytest.raises(
        kvcore.RegistrationError, match=rf"3 regions .*: region 2 of 4096 bytes at {within.ptr:#x} \(code -7: overlaps.*ulimit -l"
    ):
        one.backend.kvcore_register([*good, within])
    one.backend.kvcore_register(good)  # it would be refused if one of them were registered
    one.backend.kvcore_connect(two.peer())
    assert one.move([3], [5], two.peer()) == DONE


@pytest.mark.parametrize("kind", ["cuda", "rocm"])
def test_memory_that_this_build_does_not_move_is_refused(scene: Stage, kind: str) -> None:
    one = scene.node()
    with pytest.raises(
        kvcore.RegistrationError,
        match=rf"does not move \['{kind}'\] memory; uninstall it, then pip install '[^ ]*kvcore-mooncake\[{kind}\]'",
    ):
        one.backend.kvcore_register([dataclasses.replace(one.pool.regions[0], device=f"{kind}:0")])


# --- the end


def test_r3_after_close_no_byte_of_a_write_in_flight_leaves_the_source(scene: Stage, guest: Guest) -> None:
    one = scene.writer(guest)
    job = scene.in_flight(one, guest)
    one.close()
    one.arrays[0][:] = NEW
    guest.thaw()
    stays(lambda: not (np.asarray(guest.array) == NEW).all(axis=1).any(), 0.5)  # what lay in a socket before the close may still arrive
    assert not guest.array[-1].any(), "all of it was written before the close: nothing was tested"
    assert failed(one.state(job)) == (False, False)


def test_r3_close_says_so_while_a_call_of_the_engine_goes_on(
    scene: Stage, guest: Guest, monkeypatch: pytest.MonkeyPatch, stale: None
) -> None:
    monkeypatch.setattr(backend, "CLOSE_S", 0.2)
    one = scene.writer(guest)
    transfer, found = one.transfer([3], [5], guest.peer), []
    guest.freeze()
    worker = threading.Thread(target=lambda: found.append(one.backend.kvcore_transfer(transfer, may_wait=True)))
    worker.start()
    try:
        wait_until(lambda: one.backend.kvcore_held_rooms() == [transfer.room])
        for _ in range(2):
            with pytest.raises(RuntimeError, match="a call of the engine goes on after 0.2 s; keep its memory"):
                one.backend.kvcore_close()
        assert failed(one.post([4], [6], guest.peer)) == (True, True)
    finally:
        guest.thaw()
        worker.join(20.0)
    one.close()
    assert failed(found[0]) == (True, False)
    assert not guest.array.any()


def test_b7_a_closed_backend_leaves_nothing_and_opens_again(scene: Stage, guest: Guest) -> None:
    one = scene.writer(guest)
    seen = []
    for _ in range(3):
        one.close()
        one.close()
        seen.append(resources())
        one = scene.node("prefill", *BIG)
        one.backend.kvcore_connect(guest.peer)
        assert one.move([3], [5], guest.peer) == DONE
    one.close()
    settles(seen[0])


def test_options_reach_the_engine_and_what_the_process_has_set_wins(
    scene: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MC_TCP_LANES_PER_PEER", "2")
    monkeypatch.delenv("MC_SLICE_SIZE", raising=False)
    caplog.set_level(logging.INFO, "kvcore.backends.mooncake")
    scene.node(timeout_s=77, environment={"MC_TCP_LANES_PER_PEER": "3", "MC_SLICE_SIZE": "65536"})
    assert [os.environ[name] for name in ("MC_TCP_LANES_PER_PEER", "MC_SLICE_SIZE", "MC_TCP_PROGRESS_TIMEOUT_SEC")] == ["2", "65536", "77"]
    assert "MC_TCP_LANES_PER_PEER=2 of the process wins over 3" in caplog.text
    scene.node(timeout_s=78)
    assert os.environ["MC_TCP_PROGRESS_TIMEOUT_SEC"] == "78" and "MC_SLICE_SIZE" not in os.environ
    assert "of the process wins over 78" not in caplog.text
    here = json.loads(os.environ["MOONCAKE_SET_BY_KVCORE"])
    assert "MC_TCP_LANES_PER_PEER" not in here and here["MC_TCP_PROGRESS_TIMEOUT_SEC"] == "78"


@pytest.mark.parametrize(
    ("variable", "value", "options", "error", "text"),
    [
        ("MC_TCP_PROTO", "1", {}, kvcore.ConfigError, "MC_TCP_PROTO=1 .*called done before their bytes are in place; unset it"),
        ("MC_TCP_ENABLE_CONNECTION_POOL", "0", {}, kvcore.ConfigError, "MC_TCP_ENABLE_CONNECTION_POOL=0 .*unset it"),
        ("MC_FORCE_TCP", "yes", {"protocol": "rdma"}, kvcore.ConfigError, "MC_FORCE_TCP and MC_FORCE_HCA .*exclude each other"),
        (
            "MC_OTHER",
            "1",
            {"protocol": "rdma", "devices": ("none0",)},
            kvcore.BackendOptionsError,
            "finds no protocol 'rdma', device 'none0', only",
        ),
        (
            "MC_OTHER",
            "1",
            {"metadata_server": f"http://127.0.0.1:{free_port()}/m"},
            kvcore.BackendLoadError,
            "http://.*code -1.*correct these",
        ),
        ("MOONCAKE_SET_BY_KVCORE", "odd", {}, kvcore.ConfigError, "MOONCAKE_SET_BY_KVCORE='odd' is not what kvcore notes .*; unset it"),
    ],
)
def test_an_environment_or_options_that_cannot_work_stop_the_start(
    scene: Stage,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    options: dict[str, object],
    error: type[Exception],
    text: str,
) -> None:
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    monkeypatch.setenv(variable, value)
    with pytest.raises(error, match=text):
        scene.node(**options)
    monkeypatch.delenv(variable)
    one, two = scene.node("prefill"), scene.node()
    one.backend.kvcore_connect(two.peer())
    assert one.move([3], [5], two.peer()) == DONE


def test_a_backend_that_was_not_opened_closes(scene: Stage) -> None:
    began = time.monotonic()
    backend.MooncakeBackend().kvcore_unregister([])
    backend.MooncakeBackend().kvcore_close()
    assert time.monotonic() - began < 1.0
