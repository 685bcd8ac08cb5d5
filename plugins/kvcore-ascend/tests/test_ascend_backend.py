"""The hooks, one by one, from this process to others that live, stand still or die."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ascend_pair import LIBRARY, PROTOCOL, Stage, stage, write
from kvcore_ascend import backend, native
from kvcore_ascend.backend import AscendBackend

import kvcore
from kvcore import Region
from kvcore.hookspecs import DONE, Endpoint, NothingPosted, TicketState
from tests.engine_nodes import PAGES, SOON_S, Guest, Node, python_path, resources, settles
from tests.helpers import wait_until

SCATTERED = ([9, 3, 50, 20, 7], [1, 40, 2, 30, 8])
RUN = (list(range(10, 30)), list(range(20, 40)))
MANY_PAGES = 1024
"""4 MiB, which is more than what memfabric rounds to."""


@pytest.fixture
def scene() -> Iterator[Stage]:
    with stage() as found:
        yield found


@pytest.fixture(scope="module")
def lasting() -> Iterator[tuple[Node, Guest]]:
    """A writer and one that it writes to, which many tests share since they take long to end."""
    with stage() as found:
        yield (node := found.node(layers=1)), found.joined(node, found.guest())


@pytest.fixture
def pair(lasting: tuple[Node, Guest]) -> tuple[Node, Guest]:
    """The two, connected; zero is where it is written to."""
    one, two = lasting
    one.backend.kvcore_connect(two.peer)
    two.array[:] = 0
    return one, two


class Writes:
    """Counts the engine's writes, those that join a peer apart, and lets a test answer them."""

    def __init__(self, patch: pytest.MonkeyPatch, answer: Callable[[], int] | None = None) -> None:
        self.made: list[tuple[Any, ...]] = []
        engine = native.load()[0].TransferEngine
        write = engine.batch_transfer_sync_write

        def counted(this: Any, *args: Any) -> Any:
            if args[2] == [backend.NOWHERE]:
                return write(this, *args)
            self.made.append(args)
            return write(this, *args) if answer is None else answer()

        patch.setattr(engine, "batch_transfer_sync_write", counted)


def failed(state: TicketState) -> tuple[bool, bool]:
    """Of a failed ticket: whether it is quiescent, and whether the peer is broken."""
    assert state.kind.value == "failed", state
    return state.quiescent, state.peer_broken


# --- in the order of the file: what shares one engine first, since a process has one only


def test_t1_scattered_pages_and_runs_arrive_through_the_vendors_library_and_nothing_else_is_written(
    pair: tuple[Node, Guest], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    writes = Writes(monkeypatch)
    for mine, theirs in (SCATTERED, RUN):
        assert one.move(mine, theirs, two.peer) == DONE
        assert np.array_equal(one.arrays[0][mine], two.array[theirs])
    assert [len(lengths) for *_, lengths in writes.made] == [5, 1]  # one call each, and runs are merged
    assert LIBRARY in Path("/proc/self/maps").read_text()
    assert not two.array[sorted({*range(PAGES)} - {*SCATTERED[1], *RUN[1]})].any()


def test_r3_what_is_refused_is_quiescent_and_nothing_of_it_was_written(pair: tuple[Node, Guest]) -> None:
    one, two = pair
    good = one.transfer(range(0, 60, 2), range(0, 60, 2), two.peer)
    last = good.remote_offset.copy()
    last[-1] = 1 << 40
    with pytest.raises(NothingPosted, match=r"did not write to .* \(code -2000: invalid argument, nothing was begun\)"):
        one.backend.kvcore_transfer(dataclasses.replace(good, remote_offset=last))
    assert not two.array.any()
    assert one.move([3], [5], two.peer) == DONE


def test_r3_what_fails_otherwise_is_never_quiescent_nor_is_its_peer_fenced(
    pair: tuple[Node, Guest], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    assert one.backend.kvcore_disconnect(two.peer.id) is True
    one.backend.kvcore_connect(two.peer)
    with monkeypatch.context() as patch:
        Writes(patch, lambda: -1)
        assert failed(one.move([3], [5], two.peer)) == (False, True)
    assert one.backend.kvcore_disconnect(two.peer.id) is False
    one.backend.kvcore_connect(two.peer)
    assert one.move([3], [5], two.peer) == DONE
    assert one.backend.kvcore_disconnect(two.peer.id) is False  # what failed may still go on
    for remote in one.backend._met.values():
        remote.doubtful = False  # it was not the engine that failed


def test_a_write_is_made_again_when_the_engine_loses_sight_of_an_address(pair: tuple[Node, Guest], monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = pair
    one.backend.kvcore_connect(two.peer)
    with monkeypatch.context() as patch:
        answers = iter([-2, -2, 0])
        writes = Writes(patch, lambda: next(answers))
        assert one.move([3], [5], two.peer) == DONE
        assert len(writes.made) == 3 and writes.made[0][1:] == writes.made[2][1:]
        assert len({name for name, *_ in writes.made}) == 3  # joined anew each time
    with monkeypatch.context() as patch:
        writes = Writes(patch, lambda: -2)
        assert failed(one.move([3], [5], two.peer)) == (False, True)
        assert len(writes.made) == backend.TRIES
    for remote in one.backend._met.values():
        remote.doubtful = False  # it was not the engine that failed


def test_t7_what_the_engine_throws_costs_only_its_ticket(pair: tuple[Node, Guest], monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = pair
    with monkeypatch.context() as patch:
        Writes(patch, lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            one.move([3], [5], two.peer)
    assert one.backend.kvcore_disconnect(two.peer.id) is False
    one.backend.kvcore_connect(two.peer)
    assert one.move([3], [5], two.peer) == DONE
    for remote in one.backend._met.values():
        remote.doubtful = False


def test_b6_writes_run_beside_each_other(pair: tuple[Node, Guest], monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = pair
    together, states = threading.Barrier(8, timeout=SOON_S), list[TicketState]()
    Writes(monkeypatch, lambda: together.wait() * 0)
    workers = [threading.Thread(target=lambda n=n: states.append(one.move([n], [n], two.peer))) for n in range(8)]  # type: ignore[misc]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    assert states == [DONE] * 8


def test_r4_a_disconnect_waits_for_a_call_and_proves_nothing_while_it_runs(
    pair: tuple[Node, Guest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "LEAVE_S", 0.1)
    one, two = pair
    goes, ends, states = threading.Event(), threading.Event(), list[TicketState]()
    with monkeypatch.context() as patch:
        Writes(patch, lambda: goes.set() or ends.wait(SOON_S) - 1)
        worker = threading.Thread(target=lambda: states.append(one.move([3], [5], two.peer)))
        worker.start()
        goes.wait(SOON_S)
        assert one.backend.kvcore_disconnect(two.peer.id) is False
        assert failed(one.move([4], [6], two.peer)) == (True, True)  # it is forgotten at once
        ends.set()
        worker.join()
    assert states == [DONE]
    assert one.backend.kvcore_disconnect(two.peer.id) is True
    assert one.backend.kvcore_disconnect("nobody") is True


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (b"", "Input data was truncated"),
        (b"garbage", "malformed"),
        ({"instance": "another"}, "it is 'another' with protocol"),
        ({"protocol": "device_urma"}, "with protocol 'device_urma', and this side has"),
        ({"session": ""}, "its session must be host:port"),
    ],
)
def test_p5_a_bad_endpoint_is_refused(pair: tuple[Node, Guest], change: bytes | dict[str, str], why: str) -> None:
    one, two = pair
    data = change if isinstance(change, bytes) else json.dumps(json.loads(two.peer.endpoint.data) | change).encode()
    with pytest.raises(ConnectionError, match=rf"peer {two.peer.id} cannot be written to \(.*{why}.*same options"):
        one.backend.kvcore_connect(dataclasses.replace(two.peer, endpoint=Endpoint(data)))
    assert one.move([3], [5], two.peer) == DONE  # as it was connected before


def test_one_manager_in_a_process_and_the_first_goes_on(scene: Stage, pair: tuple[Node, Guest]) -> None:
    one, two = pair
    with pytest.raises(kvcore.BackendLoadError, match=r"memfabric has one engine in a process.*close that manager first, or use another"):
        scene.node("decode")
    assert one.move([3], [5], two.peer) == DONE


def test_b3_a_region_that_is_refused_is_named_with_the_code_and_none_stays(
    pair: tuple[Node, Guest], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    engine, left = native.load()[0].TransferEngine, list[int]()
    register, unregister = engine.batch_register_memory, engine.unregister_memory
    bad = Region(one.pool.regions[0].ptr + (64 << 20), 4096, "npu:0")
    start = bad.ptr // native.BLOCK * native.BLOCK

    def refuses(this: Any, starts: list[int], sizes: list[int]) -> int:
        return -1 if start in starts else register(this, starts, sizes)

    monkeypatch.setattr(engine, "batch_register_memory", refuses)
    monkeypatch.setattr(engine, "unregister_memory", lambda this, address: left.append(address) or unregister(this, address))
    before = one.backend._blocks
    told = rf"region 1 of 4096 bytes at {bad.ptr:#x} on npu:0 \(code -1: failed\).*{native.MEMORY[PROTOCOL]} memory.*ulimit -l"
    with pytest.raises(kvcore.RegistrationError, match=told):
        one.backend.kvcore_register([*one.pool.regions, bad])
    assert {*left} >= {before[0][0], start} and one.backend._blocks == []
    one.backend.kvcore_register(one.pool.regions)
    assert one.backend._blocks == before
    assert one.move([3], [5], two.peer) == DONE


def test_b3_neighbours_share_what_memfabric_rounds_memory_to() -> None:
    block = native.BLOCK
    regions = [Region(block + 4096, 10), Region(block + 8192, 2 * block), Region(5 * block, block), Region(6 * block, 1)]
    assert native.blocks(regions[::-1]) == [(block, 3 * block), (5 * block, block), (6 * block, block)]
    assert native.blocks(regions[:1]) == [(block, block)]


def test_endpoints_tell_who_is_written_to(pair: tuple[Node, Guest]) -> None:
    one, two = pair
    assert json.loads(one.peer().endpoint.data) == {"instance": one.name, "protocol": PROTOCOL, "session": ""}
    found = json.loads(two.peer.endpoint.data)
    assert socket.create_connection((found["session"].partition(":")[0], int(found["session"].partition(":")[2])), 1.0).close() is None


# --- engines that end


def test_the_shared_engine_ends(lasting: tuple[Node, Guest]) -> None:
    lasting[0].close()
    lasting[0].close()
    assert failed(lasting[0].move([3], [5], lasting[1].peer)) == (True, True)


def test_b5_a_peer_that_is_gone_or_stands_still_is_not_connected_and_costs_no_other(scene: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    one = scene.node()
    two = scene.joined(one, scene.guest())
    monkeypatch.setattr(backend, "JOIN_S", 0.5)  # to join takes 20 ms, and two seconds now and then
    gone, frozen = scene.guest(), scene.guest()
    gone.kill()
    frozen.freeze()
    for guest, why in ((gone, "refused"), (frozen, "does not answer within 0.5 s"), (frozen, "does not answer within 0.5 s")):
        began = time.monotonic()
        with pytest.raises(ConnectionError, match=why):
            one.backend.kvcore_connect(guest.peer)
        assert time.monotonic() - began < 2.0
        assert one.move([3], [5], two.peer) == DONE
        assert failed(one.move([3], [5], guest.peer)) == (True, True)
    frozen.thaw()
    monkeypatch.setattr(backend, "JOIN_S", SOON_S)
    one.backend.kvcore_connect(frozen.peer)
    assert one.move([3], [5], frozen.peer) == DONE
    assert np.array_equal(one.arrays[0][3], frozen.array[5])


def test_a_peer_with_more_memory_than_the_one_that_joined_last_is_written_to(scene: Stage) -> None:
    """Of all peers memfabric knows as many bytes as of the last that it joined."""
    one = scene.node()
    large, small, larger = scene.joined(one, scene.guest(pages=MANY_PAGES)), scene.guest(), scene.guest(pages=2 * MANY_PAGES)
    for last in (small, larger, scene.guest()):
        scene.joined(one, last)
        for guest in (large, *((larger,) if last is not small else ()), small, large):
            far = len(guest.array) - 1
            assert one.move([3], [far], guest.peer) == DONE
            assert np.array_equal(one.arrays[0][3], guest.array[far])


@pytest.mark.parametrize(("alive", "made"), [(True, [1, 0] * 4 + [1]), (False, [1])])
def test_a_peer_that_stays_out_of_sight_is_joined_no_more_than_it_is_written_to_and_not_if_gone(
    scene: Stage, monkeypatch: pytest.MonkeyPatch, alive: bool, made: list[int]
) -> None:
    one, calls = scene.node(), []
    guest = scene.joined(one, scene.guest())

    def write(name: str, mine: list[int], theirs: list[int], lengths: list[int]) -> int:
        calls.append(int(theirs != [backend.NOWHERE]))
        return native.LOST_SIGHT if calls[-1] else native.REFUSED

    if not alive:
        guest.kill()
    with monkeypatch.context() as patch:
        patch.setattr(one.backend, "_engines", [SimpleNamespace(batch_transfer_sync_write=write)])
        assert failed(one.move([3], [5], guest.peer)) == (False, True)
    assert calls == made


def test_a_killed_peer_costs_its_own_tickets_and_its_successor_at_the_same_port_works(scene: Stage) -> None:
    one = scene.node()
    two = scene.joined(one, scene.guest())
    guest = scene.joined(one, scene.guest())
    guest.kill()
    assert failed(one.move([3], [5], guest.peer)) == (False, True)
    assert one.backend.kvcore_disconnect(guest.peer.id) is False
    assert one.move([3], [5], two.peer) == DONE
    with pytest.raises(ConnectionError, match="refused"):
        one.backend.kvcore_connect(guest.peer)
    again = scene.joined(one, scene.guest(session=guest.told["session"]))
    assert again.told["session"] == guest.told["session"]
    assert one.backend._peers[again.peer.id].name == guest.told["session"].replace(":", ":0")
    assert one.move([3], [5], again.peer) == DONE
    assert np.array_equal(one.arrays[0][3], again.array[5])


def test_a_peer_that_stood_still_and_goes_on_is_written_to_again(scene: Stage) -> None:
    one = scene.node()
    guest = scene.joined(one, scene.guest())
    guest.freeze()
    state = one.move([3], [5], guest.peer)
    if PROTOCOL == "sdma":  # which needs nothing of the other process
        assert state == DONE and guest.array[5].any()
    else:
        assert failed(state) == (False, True)
    guest.thaw()
    one.backend.kvcore_connect(guest.peer)
    wait_until(lambda: one.move([4], [6], guest.peer) == DONE)
    assert np.array_equal(one.arrays[0][4], guest.array[6])


def test_b7_a_closed_backend_leaves_nothing_and_opens_again(scene: Stage) -> None:
    guest, seen = scene.guest(), []
    for _ in range(3):
        one = scene.node()
        scene.joined(one, guest)
        one.close()
        seen.append(resources())
    settles(seen[0])


@pytest.mark.parametrize("side", ["decode", "both"])
def test_sides_that_are_written_to_never_say_that_a_peer_is_fenced(scene: Stage, side: str) -> None:
    one, writer = scene.node(side), scene.guest("prefill")
    assert write(writer, one.peer(), [3, 7], [5, 1]) == "done"
    assert np.array_equal(one.arrays[0][[5, 1]], writer.array[[3, 7]])
    assert one.backend.kvcore_disconnect(writer.peer.id) is False
    if side == "both":
        guest = scene.joined(one, scene.guest())
        assert one.move([5], [8], guest.peer) == DONE
        assert np.array_equal(one.arrays[0][5], guest.array[8])
        assert one.backend.kvcore_disconnect(guest.peer.id) is False


def test_r3_close_says_so_while_a_call_goes_on(scene: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    one, guest = scene.node(), scene.guest()
    scene.joined(one, guest)
    goes, ends = threading.Event(), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(backend, "CLOSE_S", 0.2)
        Writes(patch, lambda: goes.set() or ends.wait(SOON_S) - 1)
        worker = threading.Thread(target=lambda: one.move([3], [5], guest.peer))
        worker.start()
        goes.wait(SOON_S)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="a call of the engine goes on after 0.2 s; keep its memory"):
                one.backend.kvcore_close()
        ends.set()
        worker.join()


def test_r3_close_does_not_hang_on_a_peer_that_stands_still_and_says_so(scene: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    one, guest = scene.node(), scene.guest()
    scene.joined(one, guest)
    guest.freeze()
    with monkeypatch.context() as patch:
        patch.setattr(backend, "CLOSE_S", 0.3)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the engine has not ended after 0.3 s; keep its memory"):
                one.backend.kvcore_close()
    with pytest.raises(kvcore.BackendLoadError, match="or its engine has not ended"):
        scene.node()
    guest.thaw()
    wait_until(lambda: not any(thread.name == "kvcore-ascend" for thread in threading.enumerate()), 30.0)
    scene.node()


def test_options_reach_the_engine_and_what_the_process_has_set_wins(
    scene: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, given = native.load()[0].TransferEngine, list[tuple[Any, ...]]()
    initialize = engine.initialize
    monkeypatch.setattr(engine, "initialize", lambda this, *args: given.append(args) or initialize(this, *args))
    monkeypatch.setenv("MF_CONFIG_STORE_PORT_START", "23456")
    monkeypatch.delenv("MF_CONFIG_STORE_PORT_END", raising=False)
    caplog.set_level(logging.INFO, "kvcore.backends.ascend")
    nic = native._free_nic("127.0.0.1")
    ports = {"MF_CONFIG_STORE_PORT_START": "1", "MF_CONFIG_STORE_PORT_END": "23476"}
    one = scene.node("decode", nic=nic, environment=ports)
    assert given == [("", "127.0.0.1:0", "Decode", 0, getattr(native.load()[0].TransDataOpType, PROTOCOL.upper()), "Decode", nic)]
    assert "MF_CONFIG_STORE_PORT_START=23456 of the process wins over 1" in caplog.text
    assert os.environ["MF_CONFIG_STORE_PORT_END"] == "23476"
    assert json.loads(one.peer().endpoint.data)["session"].startswith("127.0.0.1:")


def test_an_engine_that_does_not_start_leaves_room_for_another(scene: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = native.load()[0].TransferEngine
    with monkeypatch.context() as patch:
        patch.setattr(engine, "initialize", lambda *_: -1)
        told = rf"no engine with protocol '{PROTOCOL}', device 3 starts at 127.0.0.1.* \(code -1: failed\)"
        with pytest.raises(kvcore.BackendLoadError, match=told):
            scene.node(device=3)
    scene.node()


def test_a_backend_that_was_not_opened_closes() -> None:
    AscendBackend().kvcore_unregister([])
    AscendBackend().kvcore_close()


ENDS = """
import sys
from contextlib import ExitStack
from ascend_pair import GUEST, Node, Stage
from kvcore_ascend import backend
backend.CLOSE_S = 0.3
stack = ExitStack()
scene = Stage(stack, Node, GUEST)
one, guest = scene.node(), scene.guest()
scene.joined(one, guest)
if sys.argv[1] == "closed":
    backend.CLOSE_S = 20.0
    stack.close()
else:
    guest.freeze()
    try:
        one.close()
    except RuntimeError:
        print("guest", guest.pid, file=sys.stderr, flush=True)
"""


@pytest.mark.parametrize("end", ["closed", "frozen"])
def test_a_process_ends_well_also_with_an_engine_that_cannot_end(end: str, tmp_path: Path) -> None:
    with (said := tmp_path / "stderr").open("w") as stderr:  # a pipe would wait for the guest too
        command = [sys.executable, "-c", ENDS, end]
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": python_path(Path(__file__).parent)},
            stdout=stderr,
            stderr=stderr,
            timeout=60,
            check=False,
        )
    if end == "frozen":
        os.kill(int(said.read_text().rpartition("guest ")[2].split()[0]), signal.SIGKILL)
    assert done.returncode == 0 or (end, PROTOCOL) == ("frozen", "host_rdma"), said.read_text()  # which may crash on its way out
