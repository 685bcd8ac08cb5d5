"""The data port of the ``local`` backend: whoever is not let in is counted, logged at a limited rate, and not waited for for long (P5)."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from kvcore.backends import local
from kvcore.hookspecs import DONE
from tests.local_nodes import GOOD, MakeNode, Node, making, pair_of, until


@pytest.fixture
def node() -> Iterator[MakeNode]:
    with making() as make:
        yield make


def port_of(receiver: Node) -> int:
    return msgspec.json.decode(receiver.peer().endpoint.data, type=tuple[str, int, bytes])[1]


def knock(port: int, said: bytes) -> None:
    """Say something that is no hello, and wait until the connection is closed."""
    with socket.create_connection(("127.0.0.1", port), 10) as sock:
        sock.sendall(said)
        sock.shutdown(socket.SHUT_WR)
        assert closed(sock)


def closed(sock: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        return sock.recv(1) == b""
    return True


def test_p5_who_is_not_let_in_is_counted_and_logged_at_a_limited_rate(node: MakeNode, caplog: pytest.LogCaptureFixture) -> None:
    sender, receiver = pair_of(node)
    backend, port = receiver.backend, port_of(receiver)
    said = [b"GET / HTTP/1.0\r\n", b"", msgspec.json.encode((bytes(24), "p\nforged")) + b"\n", b"\xff" * local.TEXT_BYTES, b'["", 1]\n']
    with caplog.at_level(logging.WARNING, "test"):
        for turn in range(15):
            knock(port, said[turn % len(said)])
            until(lambda turn=turn: backend.refused == turn + 1)
        until(lambda: len(caplog.records) == 10)
        assert "connection to the data port refused (number 1): " in caplog.messages[0]
        assert "'p\\nforged' does not show a token that is good" in caplog.messages[2]
        assert all("\n" not in line and len(line) < 300 for line in caplog.messages)
        backend.refused = 999
        knock(port, b"one more\n")
        until(lambda: "(number 1000)" in caplog.text)
    assert sender.ended(sender.send("d", [GOOD])) == DONE, "who is in goes on"


def reading() -> bool:
    return any(thread.name == "kvcore-local-from" for thread in threading.enumerate())


def test_who_was_let_in_is_never_called_refused(node: MakeNode, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "test"):
        sender, receiver = pair_of(node)
        assert sender.ended(sender.send("d", [GOOD])) == DONE
        sender.backend.kvcore_disconnect(peer="d")
        until(lambda: not reading())
        sender.connect(receiver)
        receiver.backend.kvcore_disconnect(peer="p")
        with socket.create_connection(("127.0.0.1", port_of(receiver)), 10) as waiting:
            until(reading)
            receiver.backend.kvcore_close()
            assert closed(waiting)
    assert receiver.backend.refused == sender.backend.refused == 0 and caplog.messages == []


def test_a_hello_must_be_whole_within_connect_s(node: MakeNode) -> None:
    """A byte now and then does not keep a connection waiting for ever."""
    receiver = node("d", "decode", connect_s=0.3)
    begun, over = time.monotonic(), threading.Event()
    with socket.create_connection(("127.0.0.1", port_of(receiver)), 10) as sock:

        def drip() -> None:
            while not over.wait(0.05):
                try:
                    sock.sendall(b" ")
                except OSError:
                    return

        dripping = threading.Thread(target=drip, daemon=True)
        dripping.start()
        until(lambda: receiver.backend.refused == 1, 5)
        took = time.monotonic() - begun
        over.set()
        dripping.join(5)
    assert 0.25 < took < 3
