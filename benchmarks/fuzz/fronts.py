"""Where messages get in: a control port of either side, behind a peer that is paired and lies, and ports that speak TCP."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import zmq
from kvcore_conformance.stage.driver import Child, Handle

from benchmarks.fuzz.letters import Life, frame
from benchmarks.fuzz.liars import PATIENCE_S, LyingDecode, LyingPrefill, as_letter
from benchmarks.fuzz.requests import Facts, request
from benchmarks.fuzz.wards import Neighbour, Plant, cleared, opened
from kvcore.channel import Route

ROOMS = 8
"""Rooms that live at a control port while it is written to."""
AT_ONCE = 100
ANSWER_S = 2.0


class Front(Protocol):
    """A way in."""

    name: str

    def ready(self) -> None:
        """Prepare for a stretch of messages."""
        ...

    def send(self, seed: int, indices: Sequence[int]) -> list[str]:
        """Send the messages with these numbers; their kinds."""
        ...

    def rest(self) -> None:
        """Have the liar go and its rooms cleared, so that only good ones are left."""
        ...


class Control:
    """A control port, with a liar that is paired there."""

    def __init__(self, ward: Child, liar: LyingDecode | LyingPrefill) -> None:
        self.name = f"{ward.role} control"
        self._ward, self.liar = ward, liar
        self._rooms: dict[int, Handle] = {}
        self._inside = Inside(ward, liar.scene.source) if isinstance(ward, Neighbour) else None

    def ready(self) -> None:
        with self._through_sockets():
            self._ready()

    def _ready(self) -> None:
        """Have the liar paired, and rooms that it knows."""
        opened(self._ward, self._rooms, self.liar.address if isinstance(self.liar, LyingPrefill) else "", ROOMS)
        mine = {number: handle.generation for number, handle in self._rooms.items()}
        if isinstance(self.liar, LyingPrefill):
            joined = self.liar.joined
            self.liar.serve(lambda: all(joined.get(number) == generation for number, generation in mine.items()))
            self.liar.scene.lives = [Life(number, 0, generation, 7) for number, generation in mine.items()]
        else:
            self.liar.pair()
            self.liar.scene.lives = [Life(number, 0, 7, generation) for number, generation in mine.items()]

    def send(self, seed: int, indices: Sequence[int]) -> list[str]:
        kinds = []
        for at in range(0, len(indices), AT_ONCE):
            some = indices[at : at + AT_ONCE]
            made = [frame(seed, index, self.liar.scene) for index in some]
            kinds += [kind for kind, _ in made]
            if self._inside is not None:
                self._inside.deliver([data for _, data in made])
            for index, (_, data) in zip(some, made, strict=True) if self._inside is None else ():
                self.liar.send([data] if index % 50 else [data, data])
                self.liar.drain()
            with self._through_sockets():
                if not self.liar.alive():  # one of the letters was a good farewell
                    self._ready()
        return kinds

    def rest(self) -> None:
        cleared(*self._rooms.values())
        self._rooms.clear()
        if isinstance(self.liar, LyingPrefill):
            self.liar.joined.clear()
        with self._through_sockets():
            self.liar.leave()

    @contextmanager
    def _through_sockets(self) -> Iterator[None]:
        if self._inside is None:
            yield
            return
        self._inside.learning = True
        yield
        self._inside.learning = False

    def close(self) -> None:
        """Hang up."""
        self.liar.close()


class Inside:
    """Gives a manager of this process frames as if they came over the liar's connection; what it says to the liar goes nowhere."""

    def __init__(self, ward: Neighbour, liar: str) -> None:
        self._channel, self._liar = ward.manager.control, liar
        self._route: Route | None = None
        self.learning = True
        self._channel.tap = self._tap

    def _tap(self, route: Route, data: bytes, outgoing: bool) -> int:
        if self.learning:
            letter = as_letter(data)
            if letter is not None and not outgoing and letter.source == self._liar:
                self._route = route
            return 1
        mine = self._route is not None and (route.socket, route.identity) == (self._route.socket, self._route.identity)
        return 0 if outgoing and mine else 1

    def deliver(self, frames: Sequence[bytes]) -> None:
        """Have them taken, one after the other, and wait for that."""
        route, done = self._route, threading.Event()
        assert route is not None, f"nothing has come from {self._liar} yet"

        def take() -> None:
            for data in frames:
                self._channel.take(route, data)
            done.set()

        self._channel.call(take)
        assert done.wait(PATIENCE_S), "the control thread did not take the messages"


class Tcp:
    """A port of HTTP, or the data port: one connection a message."""

    def __init__(self, name: str, address: str, facts: Facts, data_port: bool) -> None:
        self.name = name
        self._address, self._facts, self._data_port = address, facts, data_port

    def ready(self) -> None:
        """Nothing is kept here."""

    def send(self, seed: int, indices: Sequence[int]) -> list[str]:
        kinds = []
        for index in indices:
            kind, data = request(seed, index, self._facts, self._data_port)
            kinds.append(kind)
            say(self._address, data)
        return kinds

    def rest(self) -> None:
        """Nothing is kept here."""


def say(address: str, data: bytes) -> None:
    """Send bytes over a connection of their own, and wait until the other side has hung up."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as sock:
        sock.settimeout(ANSWER_S)
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65_536):
                pass
        except OSError:
            pass  # it hung up on us, as it may


def controls(plant: Plant, context: zmq.Context[zmq.Socket[bytes]], spells: tuple[bytes, ...]) -> list[Control]:
    """Both control ports."""
    address = str(plant.rank["control"])
    decode = LyingDecode(context, address, plant.hello, plant.prefill.instance, spells)
    prefill = LyingPrefill(context, plant.prefill.address, plant.welcome, plant.decode.instance, spells)
    return [Control(plant.prefill, decode), Control(plant.decode, prefill)]


def others(plant: Plant, endpoint: bytes, spells: tuple[bytes, ...]) -> list[Tcp]:
    """All ports but the control ports. ``endpoint``: that of the decode's data port."""
    return [
        Tcp("bootstrap", plant.prefill.address, Facts(plant.rank, b"", spells), data_port=False),
        Tcp("prefill admin", plant.prefill.admin, Facts(plant.rank, b"", spells), data_port=False),
        Tcp("decode admin", plant.decode.admin, Facts(plant.rank, b"", spells), data_port=False),
        Tcp("prefill data", f"127.0.0.1:{plant.data[plant.prefill]}", Facts({}, plant.welcome.data, spells), data_port=True),
        Tcp("decode data", f"127.0.0.1:{plant.data[plant.decode]}", Facts({}, endpoint, spells), data_port=True),
    ]
