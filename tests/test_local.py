"""The local backend: bytes land where they should and nowhere else, and what it says of tickets and fences is true."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pluggy
import pytest
from pydantic import ValidationError

from kvcore.backends import local
from kvcore.backends.local import LocalBackend, LocalOptions
from kvcore.errors import ConfigError, RegistrationError
from kvcore.hookspecs import DONE, Endpoint, KVCoreSpec, Peer, TicketKind, TicketState
from kvcore.memory import Region
from tests.local_nodes import ENDLESS, GOOD, MIB, MakeNode, Node, Row, assert_not_posted, making, pair_of, region, room, until


@pytest.fixture
def node() -> Iterator[MakeNode]:
    with making() as make:
        yield make


CHILD = """
import logging, sys, numpy as np
from kvcore.backends.local import LocalBackend, LocalOptions
from kvcore.hookspecs import OpenContext
from kvcore.memory import Region
memory = np.memmap(sys.argv[1], np.uint8, "r+")
backend = LocalBackend()
backend.kvcore_open(options=LocalOptions(), context=OpenContext(sys.argv[2], "decode", 0, "127.0.0.1", "", logging.getLogger("child")))
backend.kvcore_register(regions=[Region(memory.ctypes.data, memory.nbytes)])
print(backend.kvcore_endpoint().data.hex(), flush=True)
sys.stdin.read()
"""


class Child:
    """A receiver in a process of its own, with memory that the test can see."""

    def __init__(self, name: str, path: Path) -> None:
        path.write_bytes(bytes(MIB))
        self.memory = np.memmap(path, np.uint8, "r+")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", CHILD, str(path), name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        self.peer = Peer(name, Endpoint(bytes.fromhex(self.process.stdout.readline())), ())

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=20)


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Callable[[str], Child]]:
    children: list[Child] = []

    def make(name: str) -> Child:
        children.append(Child(name, tmp_path / name))
        return children[-1]

    yield make
    for one in children:
        one.end()


def test_works_through_the_plugin_manager() -> None:
    manager = pluggy.PluginManager("kvcore")
    manager.add_hookspecs(KVCoreSpec)
    manager.register(LocalBackend())
    manager.check_pending()
    info = manager.hook.kvcore_backend_info()
    assert (info.name, info.wire_version, info.api_version, info.options) == ("local", "1", (1, 0), LocalOptions)
    assert info.capabilities.cancel and info.capabilities.fences_on_disconnect and info.capabilities.visible_on_done
    assert not info.capabilities.needs_process_to_write
    manager.hook.kvcore_close()


@pytest.mark.parametrize(("piece", "count"), [(4096, 64), (3, 5000), (70_001, 5), (1, 1)])
@pytest.mark.parametrize("frame_bytes", [4096, MIB])
def test_pieces_of_any_size_land_where_they_belong(node: MakeNode, piece: int, count: int, frame_bytes: int) -> None:
    sender, receiver = pair_of(node, regions=2, frame_bytes=frame_bytes)
    order = np.random.default_rng(1).permutation(count)
    rows = [(0, i * piece, i % 2, int(order[i]) * piece, piece) for i in range(count)]
    expected = [np.zeros(MIB, np.uint8), np.zeros(MIB, np.uint8)]
    for _, source, to, target, length in rows:
        expected[to][target : target + length] = sender.memory[0][source : source + length]
    assert sender.ended(sender.send("d", rows)) == DONE
    assert all(np.array_equal(a, b) for a, b in zip(receiver.memory, expected, strict=True))


def test_an_instance_can_send_to_itself(node: MakeNode) -> None:
    both = node("me", "both")
    both.memory[0][:5] = 7
    both.connect(both)
    assert both.ended(both.send("me", [(0, 0, 0, 1000, 5)])) == DONE
    assert both.memory[0][1000:1006].tolist() == [7, 7, 7, 7, 7, 0]
    assert both.backend.kvcore_disconnect(peer="me") is True


@pytest.mark.parametrize("host", ["::1", "[::1]", "[::1%1]", "localhost"])
def test_other_ways_to_write_an_address(node: MakeNode, host: str) -> None:
    sender, receiver = pair_of(node, host=host)
    assert sender.ended(sender.send("d", [(0, 0, 0, 0, MIB)])) == DONE
    assert np.array_equal(sender.memory[0], receiver.memory[0])


BAD_ROWS = {
    "offset behind the end": ((0, 0, 0, 1000, 1), "region 0", "its 1000 bytes"),
    "across the end": ((0, 0, 0, 996, 5), "region 0", "its 1000 bytes"),
    "sum wraps in 64 bits": ((0, 0, 0, 2**64 - 8, 16), "region 0", "its 1000 bytes"),
    "region too high": ((0, 0, 2, 0, 1), "region 2", "2 regions"),
    "region negative": ((0, 0, -1, 0, 1), "region -1", "2 regions"),
    "region more negative": ((0, 0, -2, 0, 1), "region -2", "2 regions"),
}


@pytest.mark.parametrize(("bad", "which", "bound"), BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_a_write_outside_the_regions_is_refused_and_the_next_one_served(node: MakeNode, bad: Row, which: str, bound: str) -> None:
    sender, receiver = node("p", "prefill", frame_bytes=4096), node("d", "decode")
    whole, second = np.zeros(3000, np.uint8), np.zeros(5, np.uint8)
    receiver.backend.kvcore_close()
    receiver.regions = (region(whole[1000:2000]), region(second))
    receiver.open()
    sender.memory[0][:] = 9
    sender.connect(receiver)
    rows = [GOOD, bad, *[(0, 0, 2, 0, 900)] * 10]  # several frames
    state = sender.ended(sender.send("d", rows))
    assert (state.kind, state.quiescent, state.peer_broken) == (TicketKind.FAILED, True, False)
    assert which in state.reason and bound in state.reason
    assert not whole.any()
    assert sender.ended(sender.send("d", [GOOD])) == DONE
    assert whole.nonzero()[0].tolist() == list(range(1000, 1016))


def test_a_read_outside_local_memory_is_refused_and_the_next_one_served(node: MakeNode) -> None:
    sender, receiver = pair_of(node)
    state = sender.ended(sender.send("d", [(0, MIB, 0, 0, 1)]))
    assert state.quiescent and not state.peer_broken and f"1 bytes at {MIB} of region 0 are outside its {MIB} bytes" in state.reason
    assert not receiver.memory[0].any()
    assert sender.ended(sender.send("d", [GOOD])) == DONE


def test_nothing_is_posted_to_a_peer_that_is_not_connected(node: MakeNode) -> None:
    decode, other = node("d", "decode"), node("p", "prefill")
    decode.connect(other)  # only recorded: a decode side does not write
    assert_not_posted(decode.send("p", [GOOD]), "p is not connected")


def test_cancel_towards_a_stopped_process_waits_for_it(node: MakeNode, child: Callable[[str], Child]) -> None:
    sender, receiver = node("p", "prefill"), child("d")
    sender.connect(receiver.peer)
    sender.memory[0][:] = 1
    ticket = sender.send("d", ENDLESS)
    until(lambda: bool(receiver.memory[0]))
    receiver.stop()
    sender.backend.kvcore_abort(room=room(), tickets=[ticket])
    for _ in range(100):
        assert sender.pending(ticket)
    receiver.process.send_signal(signal.SIGCONT)
    assert sender.ended(ticket) == TicketState(TicketKind.FAILED, "cancelled", quiescent=True)
    receiver.memory[:] = 0
    assert sender.ended(sender.send("d", [(0, 0, 0, 100, 1)])) == DONE
    assert receiver.memory.nonzero()[0].tolist() == [100], "nothing of a cancelled ticket lands behind its end"


def test_a_killed_peer_breaks_its_tickets_and_its_successor_works(node: MakeNode, child: Callable[[str], Child]) -> None:
    sender, receiver = node("p", "prefill"), child("d1")
    sender.connect(receiver.peer)
    sender.memory[0][:] = 1
    flying, queued = sender.send("d1", ENDLESS), sender.send("d1", [GOOD])
    until(lambda: bool(receiver.memory[0]))
    receiver.end()
    state = sender.ended(flying)
    assert (state.kind, state.quiescent, state.peer_broken) == (TicketKind.FAILED, False, True)
    assert "link to peer d1 ended" in state.reason
    assert sender.ended(queued).quiescent, "no byte of it was ever sent"
    assert_not_posted(sender.send("d1", [GOOD]), "d1 is not connected")
    assert sender.backend.kvcore_disconnect(peer="d1") is True
    successor = child("d2")
    sender.connect(successor.peer)
    assert sender.ended(sender.send("d2", [GOOD])) == DONE
    assert successor.memory[:17].tolist() == [1] * 16 + [0]


def test_two_instances_write_to_each_other_while_they_pair_again(node: MakeNode) -> None:
    one, two = node("one", "both"), node("two", "both")
    one.memory[0][:], two.memory[0][: MIB // 2] = 1, 2
    one.connect(two)
    there = one.send("two", ENDLESS)
    until(lambda: bool(two.memory[0][-1]))
    two.connect(one)
    one.connect(two)
    back = two.send("one", [(0, 0, 0, 0, MIB)])
    assert two.ended(back) == DONE
    assert one.pending(there)
    one.backend.kvcore_abort(room=room(), tickets=[there])
    assert one.ended(there) == TicketState(TicketKind.FAILED, "cancelled", quiescent=True)


def test_a_fence_holds_against_a_sender_that_goes_on(node: MakeNode) -> None:
    sender, receiver = pair_of(node)
    stale, unused = receiver.peer(), receiver.peer()
    ticket = sender.send("d", ENDLESS)
    until(lambda: bool(receiver.memory[0][-1]))
    assert receiver.backend.kvcore_disconnect(peer="p") is True
    receiver.memory[0][:] = 0
    assert sender.ended(ticket).peer_broken
    for old in (stale, unused):  # issued before the fence, presented or not
        with pytest.raises(ConnectionError, match="d cannot be reached.*token"):
            sender.connect(old)
    assert not receiver.memory[0].any()
    sender.connect(receiver.peer())
    assert sender.ended(sender.send("d", [GOOD])) == DONE
    assert receiver.memory[0][:16].all()


def test_fences_are_bounded_and_stay_sound(node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MAX_FENCES", 2)
    receiver, sender = node("d", "decode"), node("p0", "prefill")
    stale = receiver.peer()
    receiver.backend.kvcore_disconnect(peer="p0")
    fresh = receiver.peer()
    for number in range(1, 4):
        receiver.backend.kvcore_disconnect(peer=f"p{number}")
    newest = receiver.peer()
    with pytest.raises(ConnectionError):
        sender.connect(stale)
    with pytest.raises(ConnectionError):
        sender.connect(fresh)  # void for all since the fence of p1 became everybody's
    sender.connect(newest)


def test_a_peer_fenced_alone_leaves_others_their_tokens(node: MakeNode) -> None:
    receiver, sender = node("d", "decode"), node("p", "prefill")
    token = receiver.peer()
    receiver.backend.kvcore_disconnect(peer="another")
    sender.connect(token)
    assert sender.ended(sender.send("d", [GOOD])) == DONE


def test_running_out_of_files_does_not_end_the_acceptor(node: MakeNode, child: Callable[[str], Child]) -> None:
    receiver, sender = child("d"), node("p", "prefill", connect_s=0.2)
    resource.prlimit(receiver.process.pid, resource.RLIMIT_NOFILE, (3, 4096))
    with contextlib.suppress(ConnectionError):  # an accept that waits has taken its file already
        sender.connect(receiver.peer)
        sender.backend.kvcore_disconnect(peer="d")
    with pytest.raises(ConnectionError, match="timed out"):
        sender.connect(receiver.peer)
    resource.prlimit(receiver.process.pid, resource.RLIMIT_NOFILE, (1024, 4096))
    patient = node("q", "prefill")
    patient.connect(receiver.peer)
    assert patient.ended(patient.send("d", [GOOD])) == DONE


@pytest.mark.parametrize("bad", [Region(4096, 100, "cuda:0"), Region(0, 100), Region(2**63, 0), Region(2**64 - 5, 10), Region(4096, -1)])
def test_memory_that_is_none_is_refused_whole(node: MakeNode, bad: Region) -> None:
    sender, receiver = node("p", "prefill"), node("d", "decode")
    extra = np.zeros(100, np.uint8)
    with pytest.raises(RegistrationError, match=f"{bad} is EINVAL; usual causes"):
        receiver.backend.kvcore_register(regions=[region(extra), bad])
    sender.connect(receiver)
    assert "1 regions" in sender.ended(sender.send("d", [(0, 0, 1, 0, 1)])).reason
    receiver.backend.kvcore_register(regions=[region(extra)])
    assert sender.ended(sender.send("d", [(0, 0, 1, 0, 1)])) == DONE


def test_options_are_checked() -> None:
    for wrong in ({"prot": 1}, {"port": 70000}, {"frame_bytes": 0}, {"connect_s": 0}):
        with pytest.raises(ValidationError):
            LocalOptions(**wrong)


def test_a_port_in_use_is_a_clear_error(node: MakeNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match=r"cannot listen on '127.0.0.1' port \d+.*set"):
        node("d", "decode", port=taken.getsockname()[1])


def test_a_reopened_backend_works_and_knows_no_old_token(node: MakeNode) -> None:
    sender, receiver = pair_of(node)
    data_port = msgspec.json.decode(receiver.peer().endpoint.data)[1]
    old = receiver.peer()
    receiver.backend.kvcore_close()
    receiver.options = LocalOptions(port=data_port)
    receiver.open()
    with pytest.raises(ConnectionError, match="token"):
        sender.connect(old)
    sender.connect(receiver)
    first = sender.send("d", [GOOD])
    assert sender.ended(first) == DONE
    sender.backend.kvcore_close()
    sender.open()
    sender.connect(receiver)
    second = sender.send("d", [GOOD])
    assert second != first
    assert sender.ended(second) == DONE


def test_close_leaves_no_thread_and_no_file(node: MakeNode) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    other = node("o", "decode")
    threads, files = threading.active_count(), open_files()
    sender, receiver = Node("p", "prefill"), Node("d", "decode")
    sender.connect(receiver)
    sender.send("d", ENDLESS)
    with socket.create_connection(("127.0.0.1", msgspec.json.decode(receiver.peer().endpoint.data)[1])):
        for one in (sender, receiver):
            one.backend.kvcore_close()
            one.backend.kvcore_close()
            assert one.backend.kvcore_held_rooms() == []
    assert threading.active_count() == threads
    assert open_files() == files
    with pytest.raises(ConnectionError, match="closed"):
        sender.connect(other)
