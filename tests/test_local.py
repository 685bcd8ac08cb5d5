"""The local backend: bytes land where they should and nowhere else, and what it says of tickets and fences is true."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pluggy
import pytest
from pydantic import ValidationError

from kvcore import backends as parts
from kvcore.backends import local
from kvcore.backends.local import LocalBackend, LocalOptions
from kvcore.errors import ConfigError, RegistrationError
from kvcore.hookspecs import (
    DONE,
    Endpoint,
    KVCoreSpec,
    NothingPosted,
    OpenContext,
    Peer,
    Ticket,
    TicketKind,
    TicketState,
    Transfer,
)
from kvcore.memory import Region
from kvcore.states import RoomKey

MIB = 1 << 20
LOG = logging.getLogger("test")
Row = tuple[int, int, int, int, int]  # local region, local offset, remote region, remote offset, length


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline, tick = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        tick.wait(0.001)


def room(number: int = 1) -> RoomKey:
    return RoomKey("prefill", number, 0, 1)


def region(array: np.ndarray) -> Region:
    return Region(array.ctypes.data, array.nbytes)


def batch(peer: str, rows: list[Row] | np.ndarray, number: int = 1) -> Transfer:
    table = np.array(rows, dtype=object).T
    lr, rr = table[0].astype(np.int32), table[2].astype(np.int32)
    lo, ro, n = (table[i].astype(np.uint64) for i in (1, 3, 4))
    base = np.zeros(1, np.uint64)
    return Transfer(room(number), peer, lr, rr, lo, ro, n, base, base)


class Node:
    def __init__(self, name: str, side: str, nbytes: int = MIB, regions: int = 1, host: str = "127.0.0.1", **options: object) -> None:
        self.name, self.side, self.host = name, side, host
        self.options = LocalOptions(**options)
        self.memory = [np.zeros(nbytes, np.uint8) for _ in range(regions)]
        self.regions = tuple(region(array) for array in self.memory)
        self.backend = LocalBackend()
        self.open()

    def open(self) -> None:
        self.backend.kvcore_open(options=self.options, context=OpenContext(self.name, self.side, 0, self.host, "", LOG))
        self.backend.kvcore_register(regions=self.regions)

    def peer(self) -> Peer:
        return Peer(self.name, self.backend.kvcore_endpoint(), self.regions)

    def connect(self, other: Node | Peer) -> None:
        self.backend.kvcore_connect(peer=other if isinstance(other, Peer) else other.peer())

    def send(self, peer: str, rows: list[Row] | np.ndarray, number: int = 1) -> Ticket:
        ticket = self.backend.kvcore_transfer(transfer=batch(peer, rows, number))
        assert not isinstance(ticket, TicketState)
        return ticket

    def pending(self, ticket: Ticket) -> bool:
        return self.backend.kvcore_poll(tickets=[ticket])[0].kind is TicketKind.PENDING

    def ended(self, ticket: Ticket) -> TicketState:
        states: list[TicketState] = []

        def over() -> bool:
            states[:] = self.backend.kvcore_poll(tickets=[ticket])
            return states[0].kind is not TicketKind.PENDING

        until(over)
        return states[0]


MakeNode = Callable[..., Node]


@pytest.fixture
def node() -> Iterator[MakeNode]:
    nodes: list[Node] = []

    def make(*args: object, **options: object) -> Node:
        nodes.append(Node(*args, **options))  # type: ignore[arg-type]
        return nodes[-1]

    yield make
    for one in nodes:
        one.backend.kvcore_close()


class FakeReceiver:
    """A peer whose every byte the test decides: accepts one connection and its hello, then reads and answers when told."""

    def __init__(self, name: str = "fake") -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(10)
        address = parts.Address("127.0.0.1", self.listener.getsockname()[1], bytes(24))
        self.peer = Peer(name, Endpoint(msgspec.msgpack.encode(address)), ())
        self.sock = self.listener

    def pair(self, sender: Node) -> None:
        connecting = threading.Thread(target=sender.connect, args=(self.peer,))
        connecting.start()
        self.sock, _ = self.listener.accept()
        self.sock.settimeout(10)
        assert self.hello() == sender.name
        self.answer(0)
        connecting.join(10)
        assert not connecting.is_alive()

    def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self.sock.recv(count - len(data))
            assert piece, "the sender closed"
            data += piece
        return data

    def hello(self) -> str:
        return self.read(parts.HELLO.unpack(self.read(parts.HELLO.size))[2]).decode()

    def frame(self) -> tuple[bool, int, int]:
        """Last, payload bytes and ticket of the next frame."""
        _, last, count, size, ticket = parts.FRAME.unpack(self.read(parts.FRAME.size))
        self.read(count * parts.ROW.itemsize + size)
        return last, size, ticket

    def answer(self, ticket: int, text: bytes = b"") -> None:
        self.sock.sendall(parts.ANSWER.pack(ticket, len(text)) + text)

    def close(self) -> None:
        self.sock.close()
        self.listener.close()


@pytest.fixture
def fake() -> Iterator[FakeReceiver]:
    receiver = FakeReceiver()
    yield receiver
    receiver.close()


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


def pair_of(node: MakeNode, **options: object) -> tuple[Node, Node]:
    sender, receiver = node("p", "prefill", **options), node("d", "decode", **options)
    sender.memory[0][:] = np.random.default_rng(0).integers(1, 256, sender.memory[0].size)
    receiver.connect(sender)
    sender.connect(receiver)
    return sender, receiver


ENDLESS: list[Row] = [(0, 0, 0, 0, MIB)] * 20_000  # 20 GB into one MiB: never done within a test


# -- bytes -----------------------------------------------------------------------------------------------------------------------


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


def test_frames_are_bounded_and_cover_the_transfer_exactly() -> None:
    lengths = [1, 9000, 4096, 1, 1, 20_000, *[2] * 2500]
    rows = [(0, 100_000 * i, 1, 100_000 * i, n) for i, n in enumerate(lengths)]
    frames = list(parts.cut(batch("d", rows), 4096))
    assert [last for last, *_ in frames] == [False] * (len(frames) - 1) + [True]
    assert all(part["length"].sum() <= 4096 and len(part) <= parts.MAX_ROWS and part["length"].all() for _, part, _, _ in frames)
    covered = [0] * len(lengths)
    for _, part, _, offsets in frames:
        for (_, offset, length), source in zip(part.tolist(), offsets.tolist(), strict=True):
            assert offset == source
            assert offset % 100_000 == covered[offset // 100_000]
            covered[offset // 100_000] += length
    assert covered == lengths


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


# -- tickets -----------------------------------------------------------------------------------------------------------------------


def test_done_is_the_receivers_word(node: MakeNode, fake: FakeReceiver) -> None:
    sender = node("p", "prefill", frame_bytes=4096)
    fake.pair(sender)
    ticket = sender.send("fake", [(0, 0, 0, 0, 10_000)])
    assert sender.backend.kvcore_held_rooms() == [room()]
    assert [fake.frame()[:2] for _ in range(3)] == [(False, 4096), (False, 4096), (True, 1808)]
    assert sender.pending(ticket)
    fake.answer(ticket)  # type: ignore[arg-type]
    assert sender.ended(ticket) == DONE
    assert sender.backend.kvcore_held_rooms() == []
    assert sender.ended(ticket).kind is TicketKind.FAILED, "an ended ticket is reported once"


def test_an_answer_before_the_last_byte_ends_nothing(node: MakeNode, fake: FakeReceiver) -> None:
    sender = node("p", "prefill")
    fake.pair(sender)
    ticket = sender.send("fake", [(0, 0, 0, 0, MIB)] * 64)  # more than the sockets hold
    fake.answer(ticket)
    for _ in range(200):
        assert sender.pending(ticket)
    while not fake.frame()[0]:
        pass
    assert sender.ended(ticket) == DONE


def test_a_peer_ends_its_own_tickets_only(node: MakeNode, fake: FakeReceiver) -> None:
    sender, other = node("p", "prefill"), FakeReceiver("other")
    fake.pair(sender)
    other.pair(sender)
    mine, others = sender.send("fake", [GOOD]), sender.send("other", [GOOD])
    fake.frame()
    for ticket in (others, mine, 12345):
        fake.answer(ticket)
    assert sender.ended(mine) == DONE
    assert sender.pending(others)
    other.close()


class DribblingSocket:
    """Takes at most seven bytes at a time."""

    def __init__(self) -> None:
        self.data = b""

    def sendmsg(self, buffers: list[memoryview]) -> int:
        piece = b"".join(buffers)[:7]
        self.data += piece
        return len(piece)


def test_a_socket_that_takes_frames_in_pieces_gets_all_of_them() -> None:
    memory, sock = np.arange(100, dtype=np.uint8), DribblingSocket()
    job = parts.Job(1, batch("d", [(0, 90, 0, 5, 10), (0, 20, 0, 30, 3)]), parts.Memory([region(memory)]), parts.Link(sock))  # type: ignore[arg-type]
    assert parts.send(job, 4096) == DONE
    rows = np.array([(0, 5, 10), (0, 30, 3)], parts.ROW)
    assert sock.data == parts.FRAME.pack(parts.FRAME_MAGIC, True, 2, 13, 1) + rows.tobytes() + bytes([*range(90, 100), 20, 21, 22])


GOOD: Row = (0, 0, 0, 0, 16)
BAD_ROWS = {
    "offset behind the end": ((0, 0, 0, 1000, 1), "region 0", "1000 bytes"),
    "across the end": ((0, 0, 0, 996, 5), "region 0", "1000 bytes"),
    "sum wraps in 64 bits": ((0, 0, 0, 2**64 - 8, 16), "region 0", "1000 bytes"),
    "region too high": ((0, 0, 2, 0, 1), "region 2", "2 registered regions"),
    "region negative": ((0, 0, -1, 0, 1), "region -1", "2 registered regions"),
}


@pytest.mark.parametrize(("bad", "which", "bound"), BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_a_write_outside_the_regions_is_refused_and_the_next_one_served(node: MakeNode, bad: Row, which: str, bound: str) -> None:
    sender, receiver = node("p", "prefill", frame_bytes=4096), node("d", "decode")
    whole, second = np.zeros(3000, np.uint8), np.zeros(5, np.uint8)
    receiver.backend.kvcore_unregister(regions=receiver.regions)
    receiver.backend.kvcore_register(regions=[region(whole[1000:2000]), region(second)])
    sender.memory[0][:] = 9
    sender.connect(receiver)
    rows = [GOOD, bad, *[(0, 0, 0, 0, 900)] * 10]  # several frames: what follows the bad one goes nowhere either
    state = sender.ended(sender.send("d", rows))
    assert (state.kind, state.quiescent, state.peer_broken) == (TicketKind.FAILED, True, False)
    assert which in state.reason and bound in state.reason
    assert not whole.any()
    assert sender.ended(sender.send("d", [GOOD])) == DONE
    assert whole.nonzero()[0].tolist() == list(range(1000, 1016))


def test_a_read_outside_local_memory_fails_before_anything_is_sent(node: MakeNode) -> None:
    sender, receiver = pair_of(node)
    state = sender.ended(sender.send("d", [(0, MIB, 0, 0, 1)]))
    assert state.quiescent and "local memory" in state.reason and f"{MIB} bytes" in state.reason
    assert not receiver.memory[0].any()
    assert sender.ended(sender.send("d", [GOOD])) == DONE


def test_rows_and_payload_that_disagree_are_refused(node: MakeNode) -> None:
    receiver = node("d", "decode")
    with hand_made(receiver) as sock:
        rows = np.array([(0, 0, 10)], parts.ROW)
        sock.sendall(parts.FRAME.pack(parts.FRAME_MAGIC, True, 1, 200_000, 5) + rows.tobytes() + b"x" * 200_000)
        ticket, size = parts.ANSWER.unpack(sock.recv(parts.ANSWER.size, socket.MSG_WAITALL))
        assert ticket == 5 and b"10 bytes, but it carries 200000" in sock.recv(size, socket.MSG_WAITALL)
        sock.sendall(parts.FRAME.pack(parts.FRAME_MAGIC, True, 1, 10, 6) + rows.tobytes() + b"y" * 10)
        assert parts.ANSWER.unpack(sock.recv(parts.ANSWER.size, socket.MSG_WAITALL)) == (6, 0)
    assert receiver.memory[0][:11].tobytes() == b"y" * 10 + b"\0"


def test_nothing_is_posted_to_a_peer_that_is_not_connected(node: MakeNode) -> None:
    decode, other = node("d", "decode"), node("p", "prefill")
    decode.connect(other)  # only recorded: a decode side does not write
    with pytest.raises(NothingPosted, match="p is not connected.*pair again"):
        decode.send("p", [GOOD])


# -- cancel ------------------------------------------------------------------------------------------------------------------------


def test_cancel_ends_a_queued_ticket_at_once_and_one_in_flight_by_proof(node: MakeNode, fake: FakeReceiver) -> None:
    sender = node("p", "prefill")
    fake.pair(sender)
    flying, queued, later = (sender.send("fake", ENDLESS, 1), sender.send("fake", [GOOD], 2), sender.send("fake", [GOOD], 3))
    fake.read(1)  # the first is on its way
    sender.backend.kvcore_abort(room=room(2), tickets=[queued])
    assert sender.backend.kvcore_poll(tickets=[queued]) == [TicketState(TicketKind.FAILED, "cancelled", quiescent=True)]
    sender.backend.kvcore_abort(room=room(1), tickets=[flying])
    for _ in range(100):
        assert sender.pending(flying)
    fake.read(parts.FRAME.size - 1 + parts.ROW.itemsize + MIB)
    sizes = []
    while True:
        last, size, ticket = fake.frame()
        assert ticket == flying
        sizes.append(size)
        if last:
            break
    assert sizes[-1] == 0 and len(sizes) < 100
    assert sender.pending(flying), "without the answer there is no proof"
    fake.answer(flying)
    assert sender.ended(flying) == TicketState(TicketKind.FAILED, "cancelled", quiescent=True)
    assert fake.frame()[2] == later
    fake.answer(later)
    assert sender.ended(later) == DONE


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


def test_clear_drops_what_is_held_for_its_room_only(node: MakeNode, fake: FakeReceiver) -> None:
    sender = node("p", "prefill")
    fake.pair(sender)
    sender.send("fake", [GOOD], 1)
    kept = sender.send("fake", [GOOD], 2)
    sender.backend.kvcore_clear(room=room(1))
    sender.backend.kvcore_clear(room=room(1))
    assert sender.backend.kvcore_held_rooms() == [room(2)]
    assert sender.pending(kept)


# -- peers that go and come ----------------------------------------------------------------------------------------------------------


def test_a_killed_peer_breaks_its_tickets_and_its_successor_works(node: MakeNode, child: Callable[[str], Child]) -> None:
    sender, receiver = node("p", "prefill"), child("d1")
    sender.connect(receiver.peer)
    sender.memory[0][:] = 1
    flying, queued = sender.send("d1", ENDLESS), sender.send("d1", [GOOD])
    until(lambda: bool(receiver.memory[0]))
    receiver.end()
    state = sender.ended(flying)
    assert (state.kind, state.quiescent, state.peer_broken) == (TicketKind.FAILED, False, True)
    assert "peer d1" in state.reason
    assert sender.ended(queued).quiescent, "no byte of it was ever sent"
    with pytest.raises(NothingPosted, match="d1 is not connected.*pair again"):
        sender.send("d1", [GOOD])
    assert sender.backend.kvcore_disconnect(peer="d1") is True
    successor = child("d2")
    sender.connect(successor.peer)
    assert sender.ended(sender.send("d2", [GOOD])) == DONE
    assert successor.memory[:17].tolist() == [1] * 16 + [0]


def test_a_peer_that_died_while_idle_costs_no_quarantine(node: MakeNode, fake: FakeReceiver) -> None:
    sender = node("p", "prefill")
    fake.pair(sender)
    fake.sock.close()
    with pytest.raises(NothingPosted, match="closed by the other side"):
        sender.send("fake", [GOOD])


def test_disconnect_ends_what_is_unanswered_without_calling_the_peer_broken(node: MakeNode, fake: FakeReceiver) -> None:
    sender = node("p", "prefill")
    fake.pair(sender)
    flying, queued = sender.send("fake", ENDLESS), sender.send("fake", [GOOD])
    fake.read(1)
    assert sender.backend.kvcore_disconnect(peer="fake") is True
    for ticket, quiescent in ((flying, False), (queued, True)):
        state = sender.ended(ticket)
        assert (state.kind, state.quiescent, state.peer_broken) == (TicketKind.FAILED, quiescent, False)
    with pytest.raises(NothingPosted, match="no connection"):
        sender.send("fake", [GOOD])


def test_connecting_anew_replaces_the_link(node: MakeNode) -> None:
    sender, receiver = pair_of(node)
    for _ in range(3):
        sender.connect(receiver)
    assert [thread.name for thread in threading.enumerate()].count("kvcore-local-to-d") == 1
    assert sender.ended(sender.send("d", [GOOD])) == DONE


def test_answers_that_came_before_the_break_count(node: MakeNode, fake: FakeReceiver) -> None:
    sender = node("p", "prefill")
    fake.pair(sender)
    done, flying = sender.send("fake", [GOOD]), sender.send("fake", ENDLESS)
    fake.frame()
    fake.answer(done)
    fake.read(1)
    assert sender.backend.kvcore_disconnect(peer="fake") is True
    assert sender.ended(done) == DONE
    assert not sender.ended(flying).quiescent


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


# -- the port ------------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def hand_made(receiver: Node) -> Iterator[socket.socket]:
    """A connection to a receiver that has passed the hello."""
    address = msgspec.msgpack.decode(receiver.peer().endpoint.data, type=parts.Address)
    sock = parts.dial(address, "hand", 10)
    sock.settimeout(5)
    yield sock
    sock.close()


def head(magic: bytes = parts.FRAME_MAGIC, rows: int = 0, size: int = 0) -> bytes:
    return parts.FRAME.pack(magic, True, rows, size, 1)


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\n\r\n" + bytes(100),
    "zeros": bytes(5000),
    "name too long": parts.HELLO.pack(parts.HELLO_MAGIC, bytes(24), 65535),
    "name not text": parts.HELLO.pack(parts.HELLO_MAGIC, bytes(24), 2) + b"\xff\xfe",
    "random": np.random.default_rng(5).bytes(5000),
}
BAD_FRAMES = {
    "magic": head(magic=b"HTTP"),
    "rows": head(rows=parts.MAX_ROWS + 1),
    "many rows": head(rows=2**32 - 1),
    "payload": head(size=2**32 - 1),
    "random": np.random.default_rng(6).bytes(5000),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_instead_of_a_hello_closes_that_connection_only(node: MakeNode, garbage: bytes) -> None:
    sender, receiver = pair_of(node)
    address = msgspec.msgpack.decode(receiver.peer().endpoint.data, type=parts.Address)
    with socket.create_connection((address.host, address.port), 3) as sock:  # well below connect_s
        sock.sendall(garbage)
        assert closed(sock)
    assert sender.ended(sender.send("d", [GOOD])) == DONE
    sender.connect(receiver)
    assert sender.ended(sender.send("d", [GOOD])) == DONE


@pytest.mark.parametrize("garbage", BAD_FRAMES.values(), ids=BAD_FRAMES.keys())
def test_garbage_instead_of_a_frame_closes_that_connection_only(node: MakeNode, garbage: bytes) -> None:
    sender, receiver = pair_of(node)
    with hand_made(receiver) as sock:
        sock.sendall(garbage)
        assert closed(sock)
    assert sender.ended(sender.send("d", [GOOD])) == DONE


def closed(sock: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        return sock.recv(1) == b""
    return True


def test_a_hello_that_comes_in_pieces_is_understood(node: MakeNode) -> None:
    receiver, tick = node("d", "decode"), threading.Event()
    address = msgspec.msgpack.decode(receiver.peer().endpoint.data, type=parts.Address)
    with socket.create_connection((address.host, address.port), 5) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in parts.HELLO.pack(parts.HELLO_MAGIC, address.token, 3) + b"abc":
            sock.sendall(bytes([byte]))
            tick.wait(0.001)
        assert parts.ANSWER.unpack(sock.recv(parts.ANSWER.size, socket.MSG_WAITALL)) == (0, 0)
    assert receiver.backend.kvcore_disconnect(peer="abc") is True


def test_a_connection_that_says_nothing_is_dropped(node: MakeNode) -> None:
    receiver = node("d", "decode", connect_s=0.05)
    address = msgspec.msgpack.decode(receiver.peer().endpoint.data, type=parts.Address)
    with socket.create_connection((address.host, address.port), 10) as sock:
        assert closed(sock)


def test_running_out_of_files_does_not_end_the_acceptor(node: MakeNode, child: Callable[[str], Child]) -> None:
    receiver, sender = child("d"), node("p", "prefill", connect_s=0.2)
    resource.prlimit(receiver.process.pid, resource.RLIMIT_NOFILE, (3, 4096))
    sender.connect(receiver.peer)  # for this one the waiting accept has taken its file already
    with pytest.raises(ConnectionError, match="timed out"):
        sender.connect(receiver.peer)
    resource.prlimit(receiver.process.pid, resource.RLIMIT_NOFILE, (1024, 4096))
    patient = node("q", "prefill")
    patient.connect(receiver.peer)
    assert patient.ended(patient.send("d", [GOOD])) == DONE


def test_tokens_of_others_are_refused(node: MakeNode) -> None:
    receiver, sender = node("d", "decode"), node("p", "prefill")
    address = msgspec.msgpack.decode(receiver.peer().endpoint.data, type=parts.Address)
    forged = bytearray(address.token)
    forged[-1] ^= 1
    data = msgspec.msgpack.encode(parts.Address(address.host, address.port, bytes(forged)))
    with pytest.raises(ConnectionError, match="token"):
        sender.connect(Peer("d", Endpoint(data), ()))
    with pytest.raises(ConnectionError, match="d cannot be reached"):
        sender.connect(Peer("d", Endpoint(b"\xc1 no endpoint"), ()))


def test_connecting_is_bounded_in_time(node: MakeNode) -> None:
    sender = node("p", "prefill", connect_s=0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # its backlog accepts, but nobody answers
        data = msgspec.msgpack.encode(parts.Address("127.0.0.1", silent.getsockname()[1], bytes(24)))
        start = time.monotonic()
        with pytest.raises(ConnectionError, match="timed out"):
            sender.connect(Peer("d", Endpoint(data), ()))
    assert time.monotonic() - start < 5


# -- memory, opening, closing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "code"),
    [(Region(4096, 100, "cuda:0"), "ENOTSUP"), (Region(0, 100), "EINVAL"), (Region(2**63, 0), "EINVAL"), (Region(4096, 4096), "ENOMEM")],
)
def test_memory_that_is_none_is_refused_whole(node: MakeNode, bad: Region, code: str) -> None:
    sender, receiver = node("p", "prefill"), node("d", "decode")
    extra = np.zeros(100, np.uint8)
    with pytest.raises(RegistrationError, match=rf"region 2 \({bad.nbytes} bytes.*{code}; usual causes"):
        receiver.backend.kvcore_register(regions=[region(extra), bad])
    sender.connect(receiver)
    assert "the 1 registered regions" in sender.ended(sender.send("d", [(0, 0, 1, 0, 1)])).reason
    receiver.backend.kvcore_register(regions=[region(extra)])
    assert sender.ended(sender.send("d", [(0, 0, 1, 0, 1)])) == DONE


def test_unregistered_memory_is_never_written_again(node: MakeNode) -> None:
    sender, receiver = pair_of(node)
    old = receiver.peer()
    ticket = sender.send("d", ENDLESS)
    until(lambda: bool(receiver.memory[0][-1]))
    receiver.backend.kvcore_unregister(regions=receiver.regions)
    receiver.memory[0][:] = 0
    assert sender.ended(ticket).peer_broken
    with pytest.raises(ConnectionError):
        sender.connect(old)
    assert not receiver.memory[0].any()


def test_options_are_checked() -> None:
    for wrong in ({"prot": 1}, {"port": 70000}, {"frame_bytes": 0}, {"connect_s": 0}):
        with pytest.raises(ValidationError):
            LocalOptions(**wrong)


def test_a_port_in_use_is_a_clear_error(node: MakeNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match=r"cannot listen on '127.0.0.1' port \d+.*set"):
        node("d", "decode", port=taken.getsockname()[1])


def test_a_reopened_backend_works_and_knows_no_old_token(node: MakeNode) -> None:
    sender, receiver = pair_of(node)
    data_port = msgspec.msgpack.decode(receiver.peer().endpoint.data, type=parts.Address).port
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
    with hand_made(receiver):
        for one in (sender, receiver):
            one.backend.kvcore_close()
            one.backend.kvcore_close()
            assert one.backend.kvcore_held_rooms() == []
    with pytest.raises(ConnectionError, match="closed"):
        sender.connect(other)
    other.backend.kvcore_disconnect(peer="p")
    assert threading.active_count() == threads
    assert open_files() == files
