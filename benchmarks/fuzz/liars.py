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
from kvcore.protocol.messages import Abort, Ack, Drained, Join, Status
from kvcore.states import KVPoll
from kvcore.wire import Body, Hello, Introduction, Letter, Ping, Stranger, Welcome, decode, encode

PATIENCE_S = 10.0
HELLO_EVERY_S, MARKER_S, TURN_S = 0.5, 2.0, 0.1
NOBODYS_ROOM = 1 << 50
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


class Liar:
    """What both kinds have in common: a socket, whom it says it is, and what came back."""

    def __init__(self, socket: zmq.Socket[bytes], scene: Scene) -> None:
        self.scene = scene
        self._socket = socket
        self._socket.setsockopt(zmq.LINGER, 0)
        self._answered, self._nonce = 0, 1 << 40
        self.heard = 0
        """Letters that came back."""

    def alive(self) -> bool:
        """Whether it is still paired; when that is known, all that was sent before has been taken."""
        self._nonce += 1
        self.send([encode(self.scene.source, self.scene.to, self._question(self._nonce))])
        if not self._marked(f"marker-{self._nonce}"):
            return False
        until = time.monotonic() + TURN_S  # the answer to a question is sent a turn later than a stranger's
        while self._answered != self._nonce and (left := until - time.monotonic()) > 0:
            self._socket.poll(int(left * 1000) + 1)
            self.drain()
        return self._answered == self._nonce

    def _marked(self, marker: str) -> bool:
        """Whether a letter is answered that gets an answer in any case, to whom it says it is from."""
        deadline = time.monotonic() + MARKER_S
        while time.monotonic() < deadline and self.send([encode(marker, "nobody", Ping())]):
            self._socket.poll(20)
            if any(letter.to == marker for letter in self.drain()):
                return True
        return False

    def drain(self) -> list[Letter]:
        """Take what came back."""
        found = []
        while self._socket.poll(0):
            *sender, frame = self._socket.recv_multipart()
            self.heard += 1
            letter = as_letter(frame)
            if letter is not None:
                self._answered = max(self._answered, self._answer(letter.body))
                self.take(letter, sender)
                found.append(letter)
        return found

    def take(self, letter: Letter, sender: list[bytes]) -> None:
        """A letter came."""

    def leave(self) -> None:
        """Say that this instance closes."""
        self.send([encode(self.scene.source, self.scene.to, Stranger(closing=True))])
        self.drain()

    def send(self, frames: list[bytes]) -> bool:
        """One message; waits while the port is behind. False if there is no connection any more."""
        self._socket.send_multipart(frames)
        return True

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _question(self, nonce: int) -> Body:
        """Something that every paired instance answers."""
        raise NotImplementedError

    def _answer(self, body: Body) -> int:
        """The number that such an answer names; 0 for anything else."""
        raise NotImplementedError


class LyingDecode(Liar):
    """Dials a prefill's control port. ``hello`` is what an honest decode said there: all but the name is taken from it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], control: str, hello: Hello, to: str, spells: tuple[bytes, ...]) -> None:
        self._hello = msgspec.structs.replace(hello, me=renamed(hello.me))
        super().__init__(context.socket(zmq.DEALER), Scene.of(self._hello.me, hello.data, to, spells))
        self._socket.connect(f"tcp://{control}")

    def pair(self) -> None:
        """Say hello until it is answered with a welcome; each time as a new pairing."""
        self.scene.pairing += 2
        hello = msgspec.structs.replace(self._hello, pairing=self.scene.pairing)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self.send([encode(self.scene.source, "", hello)])
            until = time.monotonic() + HELLO_EVERY_S
            while time.monotonic() < until:
                self._socket.poll(20)
                if any(isinstance(letter.body, Welcome) and letter.body.pairing == hello.pairing for letter in self.drain()):
                    return
        raise TimeoutError(f"{self.scene.to} did not pair with {self.scene.source} within {PATIENCE_S:g} s")

    def _question(self, nonce: int) -> Body:
        return Abort(NOBODYS_ROOM, 0, nonce, 1)

    def _answer(self, body: Body) -> int:
        return body.rg if isinstance(body, Drained) and body.room == NOBODYS_ROOM else 0


class LyingPrefill(Liar):
    """A bootstrap service of its own that leads decodes to its ROUTER, where they are welcomed as an honest prefill once did."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], honest: str, welcome: Welcome, to: str, spells: tuple[bytes, ...]) -> None:
        self._welcome = msgspec.structs.replace(welcome, me=renamed(welcome.me))
        super().__init__(context.socket(zmq.ROUTER), Scene.of(self._welcome.me, welcome.data, to, spells))
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        control = Address("127.0.0.1", self._socket.bind_to_random_port("tcp://127.0.0.1"))
        self._http = HttpThread("fuzz-http")
        self._http.start()
        service = BootstrapService(1, expiry_s=86_400)
        self.address = str(Address("127.0.0.1", self._http.serve(service.app(), "127.0.0.1", 0, "liar")))
        with urlopen(f"http://{honest}/v1/ranks/0", timeout=PATIENCE_S) as answer:
            held = msgspec.convert(json.load(answer), RankInfo)
        mine = msgspec.structs.replace(held, control=str(control), instance=self.scene.source)
        asked = self._http.request("POST", parse(self.address, "liar"), "/v1/ranks", msgspec.json.encode(mine))
        self._http.run(asked).result(PATIENCE_S)
        self._identity = b""
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

    def take(self, letter: Letter, sender: list[bytes]) -> None:
        """A hello is answered, a join noted."""
        body = letter.body
        if isinstance(body, Join):
            self.joined[body.room] = body.rg
        if isinstance(body, Hello):
            self._identity, self.data, self.scene.pairing = sender[0], body.data, body.pairing
            self.send([encode(self.scene.source, letter.source, msgspec.structs.replace(self._welcome, pairing=body.pairing))])

    def send(self, frames: list[bytes]) -> bool:
        try:
            return super().send([self._identity, *frames])
        except zmq.ZMQError:
            return False  # the decode dials again

    def close(self) -> None:
        """Hang up, and end the bootstrap service."""
        super().close()
        self._http.stop()

    def _question(self, nonce: int) -> Body:
        return Status(NOBODYS_ROOM, 0, 1, nonce, KVPoll.SUCCESS)

    def _answer(self, body: Body) -> int:
        return body.sg if isinstance(body, Ack) and body.room == NOBODYS_ROOM else 0
