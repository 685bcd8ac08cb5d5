"""The ports of a prefill and a decode manager, and how anybody at all may speak to them."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import zmq
from kvcore_conformance.stage.driver import free_port

from kvcore import KVManager
from kvcore.wire import Letter, Ping, encode
from tests.helpers import SOON_S, Duo, manager, memory


@dataclass
class Plant(Duo):
    """Both managers with every port they can have. ``data`` are the ports of the backend ``local``, by side; other backends own theirs."""

    data: dict[str, str] = field(default_factory=dict)

    def control(self, side: str) -> str:
        """The control port of a side."""
        return f"127.0.0.1:{self.manager(side).control.port}"

    def manager(self, side: str) -> KVManager:
        return self.prefill if side == "prefill" else self.decode

    def http(self) -> dict[str, str]:
        """The HTTP ports by name."""
        return {"bootstrap": self.prefill.address, "prefill admin": self.prefill.admin_address, "decode admin": self.decode.admin_address}

    def everywhere(self) -> list[str]:
        """All addresses that something listens on."""
        return [*(self.control(side) for side in ("prefill", "decode")), *self.http().values(), *self.data.values()]


@contextmanager
def plant(backend: str = "local", **limits: float) -> Iterator[Plant]:
    """A running plant; the two are paired already."""
    ports = {side: free_port() for side in ("prefill", "decode")} if backend == "local" else {}
    options = {side: {"backend_options": {"port": port}} for side, port in ports.items()}
    source, target = memory(32, seed=7), memory(32)
    with (
        manager("prefill", source, backend=backend, admin="127.0.0.1:0", limits=limits, **options.get("prefill", {})) as prefill,
        manager("decode", target, backend=backend, admin="127.0.0.1:0", limits=limits, **options.get("decode", {})) as decode,
    ):
        made = Plant(prefill, decode, source, target, data={side: f"127.0.0.1:{port}" for side, port in ports.items()})
        prefill.add_observer(made.plan)
        made.pair()
        yield made


@contextmanager
def zmq_client(address: str, kind: int = zmq.DEALER) -> Iterator[zmq.Socket[bytes]]:
    """A ZeroMQ socket of any kind that dials a port."""
    with zmq.Context() as context, context.socket(kind) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.SNDTIMEO, int(SOON_S * 1000))
        client.connect(f"tcp://{address}")
        yield client


def ping(frm: str = "somebody-1", to: str = "") -> bytes:
    """A letter that is good, from nobody known."""
    return encode(frm, to, Ping())


def altered(**changes: object) -> bytes:
    """That letter with other fields in its envelope."""
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(ping()), **changes})


def answer(client: zmq.Socket[bytes]) -> Letter:
    """The next letter that comes back, but for pings, which come whenever a peer is due for one."""
    while True:
        assert client.poll(int(SOON_S * 1000)), "no answer"
        letter = msgspec.msgpack.decode(client.recv(), type=Letter)
        if not isinstance(letter.body, Ping):
            return letter


def tcp(address: str, data: bytes) -> bytes:
    """Send bytes as they are; what comes back until the other side hangs up, or is silent for a moment."""
    host, _, port = address.rpartition(":")
    received = b""
    with socket.create_connection((host, int(port)), SOON_S) as sock:
        sock.settimeout(0.2)
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while part := sock.recv(65536):
                received += part
        except OSError:
            pass  # it hung up on us, as it may, or has nothing to say
    return received


def ask(address: str, method: str, path: str, body: bytes | None = None) -> tuple[int, dict[str, object]]:
    """One HTTP request; status and JSON."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=SOON_S)
    try:
        connection.request(method, path, body=body)
        found = connection.getresponse()
        text = found.read()
        return found.status, json.loads(text) if text.startswith(b"{") else {"text": text}
    finally:
        connection.close()


def settled(owner: KVManager) -> None:
    """Wait until what was injected is handled, and what follows from it is sent."""
    done = threading.Event()
    owner.control.call(done.set)
    assert done.wait(SOON_S)
    with owner.control._using:  # that turn is over, and the letters that came of it have gone
        pass
