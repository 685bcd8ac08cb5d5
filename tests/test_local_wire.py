"""The local backend against peers whose every byte the test decides: what ends a ticket, and what arrives on its port."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from kvcore.backends import local
from kvcore.hookspecs import DONE, Endpoint, Peer, TicketKind, TicketState
from tests.local_nodes import ENDLESS, GOOD, MIB, MakeNode, Node, assert_not_posted, making, pair_of, room


@pytest.fixture
def node() -> Iterator[MakeNode]:
    with making() as make:
        yield make


def peer_at(port: int, token: bytes, name: str = "d") -> Peer:
    return Peer(name, Endpoint(msgspec.json.encode(("127.0.0.1", port, token))), ())


def place(receiver: Node) -> tuple[int, bytes]:
    """Its port and a fresh token."""
    _, port, token = msgspec.json.decode(receiver.peer().endpoint.data, type=tuple[str, int, bytes])
    return port, token


class FakeReceiver:
    """A peer whose every byte the test decides: accepts one connection and its hello, then reads and answers when told."""

    def __init__(self, name: str = "fake") -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(10)
        self.peer = peer_at(self.listener.getsockname()[1], bytes(24), name)
        self.sock = self.listener

    def pair(self, sender: Node) -> None:
        connecting = threading.Thread(target=sender.connect, args=(self.peer,))
        connecting.start()
        self.sock, _ = self.listener.accept()
        self.sock.settimeout(10)
        assert self.hello() == sender.name
        self.sock.sendall(local.WELCOME)
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
        line = b""
        while not line.endswith(b"\n"):
            line += self.read(1)
        return str(msgspec.json.decode(line)[1])

    def frame(self) -> int:
        """Payload bytes of the next frame; 0 for the end of a ticket."""
        head = self.read(6)
        assert head.startswith(local.MAGIC)
        rows = np.frombuffer(self.read(int.from_bytes(head[4:], "little") * local.ROW.itemsize), local.ROW)
        size = int(rows["length"].sum())
        assert len(rows) <= local.MAX_ROWS
        self.read(size)
        return size

    def answer(self, text: bytes = b"") -> None:
        self.sock.sendall(text.ljust(local.TEXT_BYTES, b"\0"))

    def close(self) -> None:
        self.sock.close()
        self.listener.close()


@pytest.fixture
def fake() -> Iterator[FakeReceiver]:
    receiver = FakeReceiver()
    yield receiver
    receiver.close()


def test_done_is_the_receivers_word(node: MakeNode, fake: FakeReceiver) -> None:
    sender = node("p", "prefill", frame_bytes=4096)
    fake.pair(sender)
    ticket = sender.send("fake", [(0, 0, 0, 0, 10_000)])
    assert sender.backend.kvcore_held_rooms() == [room()]
    assert [fake.frame() for _ in range(4)] == [4096, 4096, 1808, 0]
    assert sender.pending(ticket)
    fake.answer()
    assert sender.ended(ticket) == DONE
    assert sender.backend.kvcore_held_rooms() == []
    refused = sender.send("fake", [GOOD])
    fake.answer(b"no room for it")  # comes before the ticket has ended, and is read when it has
    assert sender.ended(refused) == TicketState(TicketKind.FAILED, "no room for it", quiescent=True)


def test_an_answer_that_comes_in_part_proves_nothing(node: MakeNode, fake: FakeReceiver) -> None:
    sender = node("p", "prefill")
    fake.pair(sender)
    ticket = sender.send("fake", [GOOD])
    assert (fake.frame(), fake.frame()) == (16, 0)
    fake.sock.sendall(bytes(10))
    fake.sock.close()
    state = sender.ended(ticket)
    assert (state.kind, state.quiescent, state.peer_broken) == (TicketKind.FAILED, False, True)
    assert "link to peer fake ended: closed by the other side" in state.reason


def test_frames_are_bounded_and_cover_the_transfer_exactly(node: MakeNode, fake: FakeReceiver) -> None:
    sender = node("p", "prefill", frame_bytes=4096)
    fake.pair(sender)
    lengths = [1, 9000, 4096, 1, 1, 20_000, *[2] * 2500]
    sender.send("fake", [(0, 30_000 * (i % 30), 0, 0, n) for i, n in enumerate(lengths)])
    sizes = [fake.frame()]
    while sizes[-1]:
        sizes.append(fake.frame())
    assert sum(sizes) == sum(lengths) and max(sizes) == 4096


def test_a_bad_frame_is_drained_and_answered_and_the_next_one_served(node: MakeNode) -> None:
    receiver = node("d", "decode")
    with hand_made(receiver) as sock:
        sock.sendall(frame([(0, 0, 5), (0, MIB, 200_000)]) + b"x" * 200_005 + frame([]))
        assert f"200000 bytes at {MIB} of region 0 are outside its {MIB} bytes".encode() in sock.recv(local.TEXT_BYTES, socket.MSG_WAITALL)
        assert not receiver.memory[0].any()
        sock.sendall(frame([(0, 0, 10)]) + b"y" * 10 + frame([]))
        assert sock.recv(local.TEXT_BYTES, socket.MSG_WAITALL) == bytes(local.TEXT_BYTES)
    assert receiver.memory[0][:11].tobytes() == b"y" * 10 + b"\0"


def test_cancel_ends_a_queued_ticket_at_once_and_one_in_flight_by_proof(node: MakeNode, fake: FakeReceiver) -> None:
    sender = node("p", "prefill")
    fake.pair(sender)
    flying, queued, later = (sender.send("fake", ENDLESS, 1), sender.send("fake", [GOOD], 2), sender.send("fake", [GOOD], 3))
    assert fake.frame() == MIB  # the first is on its way
    sender.backend.kvcore_abort(room=room(2), tickets=[queued])
    assert sender.backend.kvcore_poll(tickets=[queued]) == [TicketState(TicketKind.FAILED, "cancelled", quiescent=True)]
    sender.backend.kvcore_abort(room=room(1), tickets=[flying])
    assert sender.pending(flying)
    sizes = [fake.frame()]
    while sizes[-1]:
        sizes.append(fake.frame())
    assert len(sizes) < 100
    assert sender.pending(flying), "without the answer there is no proof"
    fake.answer()
    assert sender.ended(flying) == TicketState(TicketKind.FAILED, "cancelled", quiescent=True)
    assert (fake.frame(), fake.frame()) == (16, 0)
    fake.answer()
    assert sender.ended(later) == DONE


def test_no_hook_of_the_progress_thread_waits_for_a_peer_that_stalls(node: MakeNode, fake: FakeReceiver) -> None:
    sender = node("p", "prefill")
    fake.pair(sender)
    ticket = sender.send("fake", ENDLESS)
    fake.read(1)
    start = time.monotonic()
    for _ in range(100):
        sender.send("fake", [GOOD], 2)
        assert sender.pending(ticket)
        assert len(sender.backend.kvcore_held_rooms()) == 2
        sender.backend.kvcore_abort(room=room(), tickets=[ticket])
        sender.backend.kvcore_clear(room=room(2))
    assert time.monotonic() - start < 5


def test_clear_drops_what_is_held_for_its_room_only(node: MakeNode, fake: FakeReceiver) -> None:
    sender = node("p", "prefill")
    fake.pair(sender)
    sender.send("fake", [GOOD], 1)
    kept = sender.send("fake", [GOOD], 2)
    sender.backend.kvcore_clear(room=room(1))
    sender.backend.kvcore_clear(room=room(1))
    assert sender.backend.kvcore_held_rooms() == [room(2)]
    assert sender.pending(kept)


def test_a_peer_that_died_while_idle_costs_no_quarantine(node: MakeNode, fake: FakeReceiver) -> None:
    sender = node("p", "prefill")
    fake.pair(sender)
    fake.sock.close()
    state = sender.ended(sender.send("fake", [GOOD]))
    assert (state.kind, state.quiescent, state.peer_broken) == (TicketKind.FAILED, True, True)
    assert_not_posted(sender.send("fake", [GOOD]), "closed by the other side")


def test_a_live_link_is_kept_with_what_is_in_flight_and_a_dead_one_replaced(node: MakeNode, fake: FakeReceiver) -> None:
    sender = node("p", "prefill")
    fake.pair(sender)
    ticket = sender.send("fake", [GOOD])
    sender.connect(fake.peer)  # returns at once: nobody accepts
    assert (fake.frame(), fake.frame()) == (16, 0)
    fake.answer()
    assert sender.ended(ticket) == DONE
    fake.sock.close()
    fake.pair(sender)
    assert [thread.name for thread in threading.enumerate()].count("kvcore-local-to-fake") == 1
    ticket = sender.send("fake", [GOOD])
    assert (fake.frame(), fake.frame()) == (16, 0)
    fake.answer()
    assert sender.ended(ticket) == DONE


def test_disconnect_ends_what_is_unanswered_without_calling_the_peer_broken(node: MakeNode, fake: FakeReceiver) -> None:
    sender = node("p", "prefill")
    fake.pair(sender)
    flying, queued = sender.send("fake", ENDLESS), sender.send("fake", [GOOD])
    fake.read(1)
    assert sender.backend.kvcore_disconnect(peer="fake") is True
    for ticket, quiescent in ((flying, False), (queued, True)):
        state = sender.ended(ticket)
        assert (state.kind, state.quiescent, state.peer_broken) == (TicketKind.FAILED, quiescent, False)
    assert_not_posted(sender.send("fake", [GOOD]), "no link")


def test_answers_that_came_before_the_break_count(node: MakeNode, fake: FakeReceiver) -> None:
    sender = node("p", "prefill")
    fake.pair(sender)
    done, flying = sender.send("fake", [GOOD]), sender.send("fake", ENDLESS)
    assert (fake.frame(), fake.frame()) == (16, 0)
    fake.answer()
    fake.read(1)
    assert sender.backend.kvcore_disconnect(peer="fake") is True
    assert sender.ended(done) == DONE
    assert not sender.ended(flying).quiescent


@contextlib.contextmanager
def hand_made(receiver: Node) -> Iterator[socket.socket]:
    """A connection to a receiver that has passed the hello."""
    port, token = place(receiver)
    with socket.create_connection(("127.0.0.1", port), 5) as sock:
        sock.sendall(msgspec.json.encode((token, "hand")) + b"\n")
        assert sock.recv(1) == local.WELCOME
        sock.settimeout(10)
        yield sock


def frame(rows: list[tuple[int, int, int]]) -> bytes:
    return local.MAGIC + len(rows).to_bytes(2, "little") + np.array(rows, local.ROW).tobytes()


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\n\r\n" + bytes(100),
    "zeros": bytes(5000),
    "endless line": b"[" * 5000,
    "wrong types": b'["", 5]\n',
    "not text": b'["", "\xff\xfe"]\n',
    "random": np.random.default_rng(5).bytes(5000) + b"\n",
}
BAD_FRAMES = {
    "magic": b"HTTP\1\0" + bytes(100),
    "random": np.random.default_rng(6).bytes(5000),
    "after an end": frame([]) + b"kvf\2" + bytes(100),
    "empty piece in no region": frame([(7, 0, 0)]),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_instead_of_a_hello_closes_that_connection_only(node: MakeNode, garbage: bytes) -> None:
    sender, receiver = pair_of(node)
    with socket.create_connection(("127.0.0.1", place(receiver)[0]), 3) as sock:  # well below connect_s
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
        while sock.recv(local.TEXT_BYTES):
            pass
    return True


def test_a_hello_that_comes_in_pieces_is_understood(node: MakeNode) -> None:
    receiver, tick = node("d", "decode"), threading.Event()
    port, token = place(receiver)
    with socket.create_connection(("127.0.0.1", port), 5) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in msgspec.json.encode((token, "abc")) + b"\n":
            sock.sendall(bytes([byte]))
            tick.wait(0.001)
        assert sock.recv(1) == local.WELCOME
        assert receiver.backend.kvcore_disconnect(peer="abc") is True
        assert closed(sock)


def test_a_connection_that_says_nothing_is_dropped(node: MakeNode) -> None:
    receiver = node("d", "decode", connect_s=0.05)
    with socket.create_connection(("127.0.0.1", place(receiver)[0]), 10) as sock:
        assert closed(sock)


def test_tokens_of_others_are_refused(node: MakeNode) -> None:
    receiver, sender = node("d", "decode"), node("p", "prefill")
    port, token = place(receiver)
    for forged in (bytes([token[0] ^ 1]) + token[1:], token[:16], token[:8], b""):
        with pytest.raises(ConnectionError, match="token"):
            sender.connect(peer_at(port, forged))
    for data in (b"\xc1 no endpoint", b'["h", 1]', b'["127.0.0.1", 70000, ""]', b'["\\u0000", 1, ""]'):
        with pytest.raises(ConnectionError, match="d cannot be reached"):
            sender.connect(Peer("d", Endpoint(data), ()))
    assert not [thread for thread in threading.enumerate() if thread.name == "kvcore-local-to-d"]


def test_connecting_is_bounded_in_time(node: MakeNode) -> None:
    sender = node("p", "prefill", connect_s=0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # its backlog accepts, but nobody answers
        start = time.monotonic()
        with pytest.raises(ConnectionError, match="timed out"):
            sender.connect(peer_at(silent.getsockname()[1], bytes(24)))
    assert time.monotonic() - start < 5
