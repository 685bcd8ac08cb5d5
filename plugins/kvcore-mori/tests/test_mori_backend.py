"""The hooks, one by one: within this process, and to one that stands still or dies."""

from __future__ import annotations

import dataclasses
import logging
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from kvcore_mori import backend, native
from kvcore_mori.backend import Job
from mori_pair import Calls, Stage, stage

import kvcore
from kvcore.errors import BackendOptionsError
from kvcore.hookspecs import DONE, PENDING, RETRY, Endpoint, TicketState
from tests.engine_nodes import Node, resources, settles
from tests.helpers import stays, wait_until

SCATTERED = ([9, 3, 50, 20, 7], [1, 40, 2, 30, 8])
RUN = (list(range(10, 30)), list(range(20, 40)))
EVEN, ALL = list(range(0, 64, 2)), list(range(64))
NEW = 0xEE
BIG = (64, 1 << 20)


@pytest.fixture
def scene() -> Iterator[Stage]:
    with stage() as found:
        yield found


@pytest.fixture
def pair(scene: Stage) -> tuple[Node, Node]:
    """One that writes, and one that it is connected to."""
    one, two = scene.node("prefill"), scene.node()
    one.backend.kvcore_connect(two.peer())
    return one, two


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disconnect does not wait long for what is in flight."""
    monkeypatch.setattr(backend, "LEAVE_S", 0.1)


def failed(state: Job | TicketState) -> tuple[bool, bool]:
    """Of a failed ticket: whether it is quiescent, and whether the peer is broken."""
    assert isinstance(state, TicketState) and state.kind.value == "failed", state
    return state.quiescent, state.peer_broken


def mapped() -> set[str]:
    """The libraries in this process."""
    return {line.split()[-1].rpartition("/")[2] for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()}


@pytest.mark.parametrize("options", [{}, {"queue_pairs": 4, "workers": 2, "post_batch_size": 3}])
def test_t1_scattered_pages_and_runs_arrive_by_moris_own_writes_and_nothing_else_is_written(
    scene: Stage, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = scene.node("prefill", layers=3, **options), scene.node(layers=3)
    one.backend.kvcore_connect(two.peer())
    calls = Calls(monkeypatch, "IOEngineSession", "batch_write")
    for mine, theirs in (SCATTERED, RUN):
        assert one.move(mine, theirs, two.peer()) == DONE
        assert all(np.array_equal(a[mine], b[theirs]) for a, b in zip(one.arrays, two.arrays, strict=True))
    assert calls.made["batch_write"] == 2 * 3  # one for each pair of regions
    assert {"libmori_io.so", "libmori_pybinds.so"} <= mapped()
    untouched = sorted({*ALL} - {*SCATTERED[1], *RUN[1]})
    assert not any(array[untouched].any() for array in two.arrays)


def test_an_instance_can_write_to_itself(scene: Stage) -> None:
    both = scene.node("both")
    both.backend.kvcore_connect(both.peer())
    assert both.move([3], [5], both.peer()) == DONE
    assert np.array_equal(both.arrays[0][3], both.arrays[0][5])


def test_options_reach_the_engine(scene: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, object]] = []
    library = native.load()[0]
    original = library.RdmaBackendConfig
    monkeypatch.setattr(library, "RdmaBackendConfig", lambda **settings: given.append(settings) or original(**settings))
    node = scene.node(queue_pairs=4, workers=2, post_batch_size=3, devices=native.rdma_devices())
    modes, notifies = library.PollCqMode, {"enable_notification": False}
    changed = {"qp_per_transfer": 4, "post_batch_size": 3, "num_worker_threads": 2, "poll_cq_mode": modes.POLLING}
    default = {"qp_per_transfer": 1, "post_batch_size": -1, "num_worker_threads": 1, "poll_cq_mode": modes.POLLING}
    assert native.os.environ["MORI_RDMA_DEVICES"] == ",".join(native.rdma_devices())
    scene.node()
    assert given == [{**changed, **notifies}, {**default, **notifies}]
    assert "MORI_RDMA_DEVICES" not in native.os.environ
    host, port = node.backend._engine.get_engine_desc().host, node.backend._engine.get_engine_desc().port
    assert host == "127.0.0.1" and port > 1023


# --- what a ticket's end means


def test_t7_what_mori_refuses_is_quiescent_and_costs_only_its_ticket(pair: tuple[Node, Node]) -> None:
    one, two = pair
    good = one.transfer([3], [5], two.peer())
    outside = dataclasses.replace(good, remote_offset=good.remote_offset + np.uint64(64 * 4096))
    state = one.ended(one.backend.kvcore_transfer(outside))  # type: ignore[arg-type]
    assert failed(state) == (True, False) and "ERR_INVALID_ARGS: length out of range" in state.reason
    assert one.move([3], [5], two.peer()) == DONE


def test_what_mori_throws_is_not_quiescent_and_breaks_the_path(pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = pair

    def throws(*args: object) -> object:
        raise RuntimeError("odd")

    with monkeypatch.context() as patch:
        Calls(patch, "IOEngineSession", batch_write=throws)
        state = one.post([3], [5], two.peer())
    assert failed(state) == (False, True) and state.reason == "RuntimeError: odd"  # type: ignore[union-attr]
    one.backend.kvcore_connect(two.peer())
    assert one.move([3], [5], two.peer()) == DONE


def test_r3_a_ticket_ends_when_all_its_writes_have(scene: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = scene.node("prefill", layers=3), scene.node(layers=3)
    one.backend.kvcore_connect(two.peer())
    library, made = native.load()[0], []

    def write(*args: object) -> object:
        made.append(library.mori_cpp.TransferStatus())
        made[-1].SetCode(library.StatusCode.IN_PROGRESS)
        return made[-1]

    Calls(monkeypatch, "IOEngineSession", batch_write=write)
    job = one.post([3], [5], two.peer())
    assert isinstance(job, Job) and len(made) == 3
    made[0].SetCode(library.StatusCode.SUCCESS)
    made[1].Update(library.StatusCode.ERR_RDMA_OP, "broken\nas it is")
    assert one.state(job) is PENDING
    made[2].SetCode(library.StatusCode.SUCCESS)
    assert failed(one.state(job)) == (False, True) and one.state(job).reason == "mori says ERR_RDMA_OP: broken as it is"
    assert one.backend._failed == made  # mori may still write there


def test_statuses_live_as_long_as_mori_may_write_to_them(scene: Stage, hasty: None) -> None:
    guest = scene.guest()
    one = scene.writer(guest)
    job = scene.in_flight(one, guest)
    status = weakref.ref(job.statuses[0])
    del job
    assert status() is not None and one.backend.kvcore_poll([]) == []
    guest.thaw()
    wait_until(lambda: one.backend.kvcore_poll([]) == [] and status() is None)
    assert np.array_equal(guest.array, one.arrays[0])


def test_t6_more_than_a_queue_pair_holds_is_not_posted(scene: Stage, hasty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "MOST_POSTED", 40)
    guest = scene.guest()
    one = scene.writer(guest)
    guest.freeze()
    job = one.post(EVEN, EVEN, guest.peer)  # 32 of them
    assert one.post(EVEN, EVEN, guest.peer) is RETRY
    guest.thaw()
    assert one.ended(job) == DONE
    assert one.move(ALL, ALL[::-1], guest.peer) == DONE  # alone it may be more: mori waits then


# --- peers


def test_a_peer_that_is_not_connected_is_not_written_to(pair: tuple[Node, Node]) -> None:
    one, two = pair
    assert one.backend.kvcore_disconnect(two.name) is True
    assert failed(one.post([3], [5], two.peer())) == (True, True)
    assert one.backend.kvcore_disconnect("nobody") is True


def test_p4_after_an_rdma_error_the_same_peer_pairs_again_under_a_fresh_key(scene: Stage) -> None:
    guest, other = scene.guest(), scene.node()
    one = scene.writer(guest)
    one.backend.kvcore_connect(other.peer())
    first = one.backend._remotes[guest.peer.id].engine.key
    guest.order("unregister")
    state = one.move([3], [5], guest.peer)
    assert failed(state) == (False, True) and "ERR_RDMA_OP" in state.reason
    assert failed(one.post([3], [5], guest.peer)) == (True, True)
    guest.order("register")
    one.backend.kvcore_disconnect(guest.peer.id)
    one.backend.kvcore_connect(guest.peer)
    assert one.move([3], [5], guest.peer) == DONE
    assert np.array_equal(one.arrays[0][3], guest.array[5])
    second = one.backend._remotes[guest.peer.id].engine.key
    assert first != second and {key.rpartition("/")[0] for key in (first, second)} == {guest.peer.id}
    assert one.move([3], [5], other.peer()) == DONE  # who never noticed


def test_a_peer_that_is_connected_again_keeps_a_path_that_works(pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = pair
    calls = Calls(monkeypatch, "IOEngine", "create_session", "deregister_remote_engine")
    one.backend.kvcore_connect(two.peer())
    assert not calls.made
    one.backend._remotes[two.name].broken = True
    one.backend.kvcore_connect(two.peer())
    assert dict(calls.made) == {"create_session": 1, "deregister_remote_engine": 1}
    assert one.move([3], [5], two.peer()) == DONE


def test_a_decode_side_makes_no_session(scene: Stage, pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, "IOEngine", "create_session")
    pair[1].backend.kvcore_connect(pair[0].peer())
    assert not calls.made


@pytest.mark.parametrize("when", ["idle", "writing"])
def test_p3_a_killed_peer_costs_its_own_tickets_and_its_successor_of_that_name_works(scene: Stage, when: str) -> None:
    guest, well = scene.guest(name="guest"), scene.node()
    one = scene.writer(guest)
    one.backend.kvcore_connect(well.peer())
    if when == "writing":
        job = scene.in_flight(one, guest)
        guest.kill()
        assert failed(one.ended(job)) == (False, True)
    else:
        guest.kill()
        wait_until(lambda: one.move([3], [5], guest.peer) != DONE)
    assert failed(one.post([3], [5], guest.peer)) == (True, True)
    assert one.backend.kvcore_disconnect(guest.peer.id) is True
    with pytest.raises(ConnectionError, match=r"peer guest cannot be reached \(RuntimeError: connect.*refused\); check that it runs"):
        one.backend.kvcore_connect(guest.peer)
    again = scene.guest(name="guest")
    one.backend.kvcore_connect(again.peer)
    assert one.move([3], [5], again.peer) == DONE
    assert np.array_equal(one.arrays[0][3], again.array[5])
    assert one.move([3], [5], well.peer()) == DONE


def test_r3_a_peer_that_stands_still_breaks_the_path_in_the_end_and_nothing_is_called_quiescent(scene: Stage) -> None:
    guest = scene.guest()
    one = scene.writer(guest)
    job = scene.in_flight(one, guest)
    assert failed(one.ended(job)) == (False, True)
    guest.thaw()
    one.backend.kvcore_connect(guest.peer)
    assert one.move([3], [5], guest.peer) == DONE


def test_r4_a_disconnect_is_proof_when_nothing_is_in_flight_and_what_is_goes_on(scene: Stage, hasty: None) -> None:
    guest = scene.guest()
    one = scene.writer(guest)
    job = scene.in_flight(one, guest)
    assert one.backend.kvcore_disconnect(guest.peer.id) is False
    assert failed(one.post([1], [1], guest.peer)) == (True, True)
    guest.thaw()
    assert one.ended(job) == DONE
    assert np.array_equal(one.arrays[0], guest.array)
    assert one.backend.kvcore_disconnect(guest.peer.id) is True


@pytest.mark.parametrize("side", ["decode", "both"])
def test_r4_a_side_that_is_written_to_never_says_that_a_peer_is_fenced(scene: Stage, side: str) -> None:
    one, two = scene.node(side), scene.node()
    one.backend.kvcore_connect(two.peer())
    assert one.backend.kvcore_disconnect(two.name) is False
    assert one.backend.kvcore_disconnect("nobody") is False


def test_b5_a_frozen_peer_is_given_up_in_seconds_and_others_work_meanwhile(scene: Stage) -> None:
    guest, well = scene.guest(), scene.node()
    one = scene.node("prefill")
    one.backend.kvcore_connect(well.peer())
    guest.freeze()
    began = time.monotonic()
    with pytest.raises(ConnectionError, match="cannot be reached"):
        one.backend.kvcore_connect(guest.peer)
    assert time.monotonic() - began < 8.0
    assert one.move([3], [5], well.peer()) == DONE
    guest.thaw()
    one.backend.kvcore_connect(guest.peer)
    assert one.move([3], [5], guest.peer) == DONE


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("empty", "0 bytes are no EngineDesc"),
        ("garbage", "7 bytes are no EngineDesc"),
        ("map", "are no EngineDesc"),
        ("nobody", "are no EngineDesc"),
        ("cut short", "are no MemoryDesc"),
        ("a key less", "its engine describes other memory than it does"),
        ("other memory", "its engine describes other memory than it does"),
        ("another's", "is another's"),
    ],
)
def test_p5_a_bad_endpoint_is_refused_and_the_known_peer_works_on(scene: Stage, pair: tuple[Node, Node], bad: str, why: str) -> None:
    one, two = pair
    peer = two.peer()
    data, (key,) = peer.endpoint.data, peer.endpoint.keys
    spoilt = {
        "empty": Endpoint(b"", [key]),
        "garbage": Endpoint(b"garbage", [key]),
        "map": Endpoint(msgspec.msgpack.encode({"a": 1}), [key]),
        "nobody": Endpoint(msgspec.msgpack.encode([]), [key]),
        "cut short": Endpoint(data, [key[:-3]]),
        "a key less": Endpoint(data, []),
        "other memory": Endpoint(data, [msgspec.msgpack.encode([*(row := msgspec.msgpack.decode(key))[:4], row[4] + 4096, *row[5:]])]),
        "another's": scene.node().peer().endpoint,
    }[bad]
    with pytest.raises(ConnectionError, match=f"peer {two.name} cannot be reached .ValueError: .*{why}"):
        one.backend.kvcore_connect(dataclasses.replace(peer, endpoint=spoilt))
    assert one.move([3], [5], peer) == DONE


def test_peers_come_and_go_and_leave_nothing(scene: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, seen = Calls(monkeypatch, "IOEngine", "register_remote_engine", "deregister_remote_engine"), []
    one = scene.node("prefill")
    for number in range(4):
        guest = scene.guest()
        one.backend.kvcore_connect(guest.peer)
        assert one.move([3], [5], guest.peer) == DONE
        guest.kill()
        wait_until(lambda guest=guest: one.move([3], [5], guest.peer) != DONE)  # type: ignore[misc]
        assert one.backend.kvcore_disconnect(guest.peer.id) is True
        assert not one.backend._remotes and not one.backend._jobs, number
        seen.append(resources()[1])
    assert calls.made["register_remote_engine"] == calls.made["deregister_remote_engine"]
    wait_until(lambda: resources()[1] <= seen[0], what=f"threads: {seen}")


# --- memory


def test_b3_memory_is_registered_at_once_and_one_that_is_refused_is_named(scene: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    one = scene.node("prefill", layers=2)
    good = one.pool.regions
    one.backend.kvcore_unregister(good)
    calls = Calls(monkeypatch, "IOEngine", "register_memory", "deregister_memory", "deregister_remote_engine")
    engine, made = calls.kind, []

    def refuses(*args: object) -> object:
        made.append(args)
        if len(made) > 1:
            raise RuntimeError("ibv_reg_mr failed with 12")
        return original(*args)

    original = engine.create_session
    with monkeypatch.context() as patch:
        patch.setattr(engine, "create_session", refuses)
        refused = rf"region of {good[1].nbytes} bytes at .* was not .*ibv_reg_mr failed with 12.; .*ulimit -l"
        with pytest.raises(kvcore.RegistrationError, match=refused):
            one.backend.kvcore_register(good)
    assert dict(calls.made) == {"register_memory": 2, "deregister_memory": 2, "deregister_remote_engine": 1}
    assert one.backend._memory == []
    one.backend.kvcore_register(good)
    assert len(one.backend._memory) == 2


@pytest.mark.parametrize(
    ("limit", "capable", "refused"), [(4096, "0", True), (4096, "4000", False), (1 << 20, "0", False), (-1, "0", False)]
)
def test_b3_memory_that_the_kernel_would_not_lock_is_refused_before_mori_ends_the_process_over_it(
    scene: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: int, capable: str, refused: bool
) -> None:
    one = scene.node()
    one.backend.kvcore_unregister(one.pool.regions)
    (tmp_path / "status").write_text(f"Name:\tx\nCapEff:\t{capable}\n")
    monkeypatch.setattr(native, "STATUS", tmp_path / "status")
    monkeypatch.setattr(native.resource, "getrlimit", lambda which: (limit, limit))
    if not refused:
        return one.backend.kvcore_register(one.pool.regions)
    with pytest.raises(kvcore.RegistrationError, match=r"262144 bytes of 1 regions, .* more than the 4096 that may be locked; .*ulimit -l"):
        one.backend.kvcore_register(one.pool.regions)


# --- the end


def test_r3_close_says_so_if_the_engine_goes_on(scene: Stage) -> None:
    one = scene.node()
    kept = one.backend._engine
    for _ in range(2):
        with pytest.raises(RuntimeError, match="keep the memory of what is in flight"):
            one.backend.kvcore_close()
    del kept


@pytest.mark.parametrize("hook", ["register", "connect"])
def test_b3_an_error_that_somebody_keeps_does_not_keep_the_engine(scene: Stage, hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, gone = scene.node("prefill"), scene.guest()
    gone.kill()
    if hook == "register":
        one.backend.kvcore_unregister(one.pool.regions)
        outside = dataclasses.replace(one.pool.regions[0], ptr=0)
        with pytest.raises(
            kvcore.RegistrationError, match="at 0x0 on .* was not registered .ValueError: PyCapsule_New called with null"
        ) as kept:
            one.backend.kvcore_register([outside])
    else:
        with pytest.raises(ConnectionError, match=r"cannot be reached \(RuntimeError: connect") as kept:  # type: ignore[assignment]
            one.backend.kvcore_connect(gone.peer)
    one.close()  # which would say that the engine goes on
    assert kept.value.__cause__ is not None


def test_r3_after_close_no_byte_of_a_write_in_flight_leaves_the_source(scene: Stage, hasty: None) -> None:
    guest = scene.guest(*BIG)
    before = resources()[1]
    one = scene.writer(guest)
    parts = [range(start, start + 16) for start in range(0, BIG[0], 16)]
    guest.freeze()
    jobs = [one.post(part, part, guest.peer) for part in parts]
    began = time.monotonic()
    one.close()
    assert time.monotonic() - began < 3.0
    assert one.state(jobs[-1]) is PENDING  # nobody can say more
    wait_until(lambda: resources()[1] <= before + 1)  # the shim's own, of the process
    one.arrays[0][:] = NEW
    guest.thaw()
    guest.order("look")  # it goes on
    stays(lambda: not (np.asarray(guest.array) == NEW).all(axis=1).any(), 0.3)


def test_b7_a_closed_backend_leaves_nothing_and_opens_again(scene: Stage) -> None:
    guest, seen = scene.guest(), []
    for _ in range(4):
        one = scene.writer(guest)
        assert one.move([3], [5], guest.peer) == DONE
        one.close()
        one.close()
        assert one.backend._alive() is None
        seen.append(resources())
    settles(seen[0], 1)


def test_a_backend_that_was_not_opened_closes() -> None:
    backend.MoriBackend().kvcore_unregister([])
    backend.MoriBackend().kvcore_close()


@pytest.mark.parametrize(
    ("options", "host", "error", "text"),
    [
        ({"devices": ("nope0",)}, "127.0.0.1", BackendOptionsError, "no RDMA device is called nope0; devices may name "),
        ({}, "203.0.113.9", kvcore.ConfigError, "cannot listen on host '203.0.113.9' .*Cannot assign.*; give an IPv4 address of this host"),
        ({}, "::1", kvcore.ConfigError, "cannot listen on host '::1' .*; give an IPv4 address of this host"),
    ],
)
def test_what_would_end_the_process_or_find_nothing_stops_the_start(
    scene: Stage, options: dict[str, object], host: str, error: type[Exception], text: str
) -> None:
    node = scene.node()
    open_again = backend.MoriBackend()
    with pytest.raises(error, match=text):
        open_again.kvcore_open(backend.MoriOptions(**options), dataclasses.replace(node.backend._context, host=host))
    open_again.kvcore_close()


def test_xgmi_takes_gpu_memory_only(scene: Stage) -> None:
    one = backend.MoriBackend()
    node = scene.node()
    one.kvcore_open(backend.MoriOptions(transport="xgmi"), node.backend._context)
    try:
        with pytest.raises(kvcore.RegistrationError, match="pool 'kv' lies in host memory, .*; choose transport 'rdma'"):
            one.kvcore_register(node.pool.regions)
    finally:
        one.kvcore_close()


def test_what_the_process_has_set_wins(scene: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvcore.backends.mori")
    monkeypatch.setenv("MORI_IO_SL", "2")
    scene.node(environment={"MORI_IO_SL": "3"})
    assert native.os.environ["MORI_IO_SL"] == "2" and "MORI_IO_SL=2 of the process wins over 3" in caplog.text
