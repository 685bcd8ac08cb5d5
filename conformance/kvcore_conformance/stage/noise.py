"""Bytes that no peer would send, on a port at a time, from a thread of its own until the block ends."""

from __future__ import annotations

import os
import pickle  # nosec B403 # it only makes bytes, for others not to read
import random
import socket
import sys
import threading
from pathlib import Path
from types import TracebackType

import msgspec
import zmq

from kvcore.wire import Ping, encode

CONNECT_S = 1.0
LISTENS = "0A"
"""A socket's state in the kernel's table."""


class Spell:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self._folder,)


class Noise:
    """``with Noise(control=[...], tcp=[...]):`` garbage goes to ZeroMQ ports as frames, and to all as raw bytes. Whoever unpickles or
    evaluates it makes the folder ``proof``."""

    def __init__(self, control: list[str], tcp: list[str], proof: Path, seed: int = 1) -> None:
        self._control, self._tcp = control, [*control, *tcp]
        self._spells = pickle.dumps(Spell(proof)), f"__import__('os').mkdir({str(proof)!r})".encode()
        self._random = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="noise", daemon=True)
        self.sent = 0
        """Messages and connections so far."""

    def __enter__(self) -> Noise:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(10.0)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with zmq.Context() as context:
            dealers = [context.socket(zmq.DEALER) for _ in self._control]
            for dealer, address in zip(dealers, self._control, strict=True):
                dealer.setsockopt(zmq.LINGER, 0)
                dealer.connect(f"tcp://{address}")
            held: list[socket.socket] = []
            while not self._stop.wait(0.002):
                for dealer in dealers:
                    self._frames(dealer)
                for address in self._tcp:
                    if (sock := self._raw(address)) is not None:
                        held.append(sock)
                while len(held) > 20:
                    held.pop(0).close()
            for sock in held:
                sock.close()
            for dealer in dealers:
                dealer.close()

    def _frames(self, dealer: zmq.Socket[bytes]) -> None:
        self.sent += 1
        try:
            dealer.send_multipart(self._message(), zmq.NOBLOCK)
        except zmq.Again:
            pass  # the port is behind with the others

    def _message(self) -> list[bytes]:
        good = encode("stranger-0", "somebody", Ping())
        letter = msgspec.msgpack.decode(good)
        kinds = (
            lambda: [b""],
            lambda: [self._random.randbytes(self._random.randrange(1, 400))],
            lambda: [self._random.randbytes(1 << 16)],
            lambda: [good, good],
            lambda: [good[: self._random.randrange(len(good))]],
            lambda: [msgspec.msgpack.encode({**letter, "v": 99})],
            lambda: [msgspec.msgpack.encode({**letter, "body": {"type": "join", "room": -1, "attempt": 0, "rg": 1, "sg": 0}})],
            lambda: [msgspec.msgpack.encode({**letter, "body": {"type": "hello", "pairing": "x"}})],
            lambda: [msgspec.msgpack.encode([1] * 1000)],
            lambda: [b"\xdd\xff\xff\xff\xff"],
            lambda: [good],
            lambda: [self._random.choice(self._spells)],
        )
        return self._random.choice(kinds)()

    def _raw(self, address: str) -> socket.socket | None:
        host, _, port = address.rpartition(":")
        try:
            sock = socket.create_connection((host, int(port)), CONNECT_S)
        except OSError:
            return None  # nobody is there any more; or it is behind
        self.sent += 1
        heads = (
            b"",
            b"GET /v1/group HTTP/1.1\r\n",
            b"POST /v1/ranks HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n",
            b"\xff\0\0\0\0\0\0\1\x7f",
            b"kvcore\0\1",
            *self._spells,
            b"POST /v1/ranks HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(self._spells[0]), self._spells[0]),
        )
        try:
            sock.sendall(self._random.choice(heads) + self._random.randbytes(self._random.randrange(0, 3000)))
        except OSError:
            pass  # it hung up on us, as it may
        return sock


def listening(pid: int) -> list[str]:
    """Where a process can be connected to over TCP."""
    mine = {link for file in Path(f"/proc/{pid}/fd").iterdir() if (link := _link(file)).startswith("socket:")}
    found = set[str]()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENS and f"socket:[{inode}]" in mine:
                found.add(_address(local, family))
    return sorted(found)


def _link(file: Path) -> str:
    try:
        return os.readlink(file)
    except OSError:
        return ""  # closed meanwhile


def _address(local: str, family: socket.AddressFamily) -> str:
    """``host:port``; the table has words of 32 bits in the machine's order."""
    words, port = local.split(":")
    packed = b"".join(int(words[n : n + 8], 16).to_bytes(4, sys.byteorder) for n in range(0, len(words), 8))
    host = socket.inet_ntop(family, packed) if any(packed) else "127.0.0.1"
    return f"{host.removeprefix('::ffff:')}:{int(port, 16)}"
