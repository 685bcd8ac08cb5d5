"""Peers that pair as they should, and lie from then on: hand-made ZeroMQ clients, one for each side's control port."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from urllib.request import urlopen

import msgspec
import zmq

from benchmarks.fuzz.letters import Scene
from kvcore.addresses import Address, parse
from kvcore.bootstrap import RankInfo
from kvcore.bootstrap_service import BootstrapService
from kvcore.http import HttpThread
from kvcore.protocol.messages import Join
from kvcore.wire import Body, Hello, Introduction, Letter, Stranger, Welcome, decode, encode

PATIENCE_S = 10.0
HELLO_EVERY_S = 0.5
_numbers = itertools.count(1)


def renamed(me: Introduction) -> Introduction:
    """The introduction of another instance, which is otherwise the same."""
    return msgspec.structs.replace(me, instance=f"{me.role}-liar-{next(_numbers)}")


def as_letter(frame: bytes) -> Letter | None:
    """The letter in a frame, if it holds one."""
    try:
        return decode(frame)
    except ValueError:
        return None


class LyingDecode:
    """Dials a prefill's control port. ``hello`` is what an honest decode said there: all but the name is taken from it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], control: str, hello: Hello, to: str, spells: tuple[bytes, ...]) -> None:
        self._hello = msgspec.structs.replace(hello, me=renamed(hello.me))
        self.scene = Scene.of(self._hello.me, hello.data, to, spells)
        self._socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"tcp://{control}")
        self.heard = 0
        """Letters that came back."""

    def pair(self) -> None:
        """Say hello until it is answered with a welcome; each time as a new pairing."""
        self.scene.pairing += 2
        hello = msgspec.structs.replace(self._hello, pairing=self.scene.pairing)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self._say(hello, to="")
            until = time.monotonic() + HELLO_EVERY_S
            while (left := until - time.monotonic()) > 0 and self._socket.poll(int(left * 1000) + 1):
                letter = as_letter(self._socket.recv())
                self.heard += 1
                if letter is not None and isinstance(letter.body, Welcome) and letter.body.pairing == hello.pairing:
                    return
        raise TimeoutError(f"{self.scene.to} did not pair with {self.scene.source} within {PATIENCE_S:g} s")

    def send(self, frames: list[bytes]) -> None:
        """One message; waits while the port is behind."""
        self._socket.send_multipart(frames)

    def drain(self) -> None:
        """Take what came back."""
        while self._socket.poll(0):
            self._socket.recv_multipart()
            self.heard += 1

    def leave(self) -> None:
        """Say that this instance closes."""
        self._say(Stranger(closing=True), self.scene.to)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _say(self, body: Body, to: str) -> None:
        self._socket.send(encode(self.scene.source, to, body))


class LyingPrefill:
    """A bootstrap service of its own that leads decodes to its ROUTER, where they are welcomed as an honest prefill once did."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], honest: str, welcome: Welcome, to: str, spells: tuple[bytes, ...]) -> None:
        self._welcome = msgspec.structs.replace(welcome, me=renamed(welcome.me))
        self.scene = Scene.of(self._welcome.me, welcome.data, to, spells)
        self._socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        control = Address("127.0.0.1", self._socket.bind_to_random_port("tcp://127.0.0.1"))
        self._http = HttpThread("fuzz-http")
        self._http.start()
        service = BootstrapService(1, expiry_s=86_400)
        self.address = str(Address("127.0.0.1", self._http.serve(service.app(), "127.0.0.1", 0, "liar")))
        self.control = str(control)
        with urlopen(f"http://{honest}/v1/ranks/0", timeout=PATIENCE_S) as answer:
            held = msgspec.convert(json.load(answer), RankInfo)
        mine = msgspec.structs.replace(held, control=str(control), instance=self.scene.source)
        self._http.run(self._http.request("POST", parse(self.address, "liar"), "/v1/ranks", msgspec.json.encode(mine))).result(PATIENCE_S)
        self._identity = b""
        self.heard = 0
        self.joined: dict[int, int] = {}
        """By room the generation that joined last."""
        self.data = b""
        """The endpoint that the decode gave in its latest hello."""

    def serve(self, until: Callable[[], bool]) -> None:
        """Welcome who says hello, and drop the rest, until something has happened."""
        deadline = time.monotonic() + PATIENCE_S
        while not until():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.scene.to} did not pair with {self.scene.source} within {PATIENCE_S:g} s")
            self._socket.poll(20)
            self.drain()

    def send(self, frames: list[bytes]) -> None:
        """One message; waits while the port is behind."""
        self._send([self._identity, *frames])

    def drain(self) -> None:
        """Take what came; a hello is answered."""
        while self._socket.poll(0):
            identity, *frames = self._socket.recv_multipart()
            self.heard += 1
            letter = as_letter(frames[-1])
            if letter is not None and isinstance(letter.body, Join):
                self.joined[letter.body.room] = letter.body.rg
            if letter is not None and isinstance(letter.body, Hello):
                self._identity, self.data, self.scene.pairing = identity, letter.body.data, letter.body.pairing
                self._say(msgspec.structs.replace(self._welcome, pairing=letter.body.pairing), letter.source)

    def leave(self) -> None:
        """Say that this instance closes."""
        self._say(Stranger(closing=True), self.scene.to)

    def close(self) -> None:
        """Hang up, and end the bootstrap service."""
        self._socket.close()
        self._http.stop()

    def _say(self, body: Body, to: str) -> None:
        self._send([self._identity, encode(self.scene.source, to, body)])

    def _send(self, frames: list[bytes]) -> None:
        try:
            self._socket.send_multipart(frames)
        except zmq.ZMQError:
            pass  # that connection is gone: it dials again
