"""The network between two instances, and what happens to it: a port that leads elsewhere or passes nothing on, a cable that is pulled."""

from __future__ import annotations

import itertools
import os
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.helpers import SOON_S

ESTABLISHED, LISTENS, TIME_WAIT = "01", "0A", "06"
"""States of a socket in the kernel's table."""
_cables = itertools.count(1)


@dataclass(eq=False)
class Leg:
    """One of the two connections of somebody who came through a relay."""

    sock: socket.socket
    deaf: bool = False
    """What comes in goes no further."""
    other: Leg | None = None


class Relay:
    """A port through which another address is reached. Everything is done by one thread, in small pieces."""

    def __init__(self, at: tuple[str, int], to: tuple[str, int]) -> None:
        self.to = to
        """Where connections lead that are made from now on."""
        self.refuses = 0
        """So many of the next connections are closed at once."""
        self.met = 0
        """Connections so far."""
        self._listener = socket.create_server(at)
        self.address = "{}:{}".format(*self._listener.getsockname())
        self._looking = selectors.DefaultSelector()
        self._looking.register(self._listener, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._legs: set[Leg] = set()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._thread.join(SOON_S)
        self.cut()
        self._looking.close()
        self._listener.close()

    def silence(self) -> None:
        """Nothing more passes over the connections that there are, and nobody is told: neither way a FIN or an RST."""
        with self._lock:
            for leg in self._legs:
                leg.deaf = True

    def cut(self) -> None:
        """Close the connections that there are."""
        with self._lock:
            for leg in list(self._legs):
                self._drop(leg)

    def _run(self) -> None:
        while not self._over:
            for key, _ in self._looking.select(0.05):
                with self._lock:
                    if key.data is None:
                        self._accept()
                    elif key.data in self._legs:
                        self._pass_on(key.data)

    def _accept(self) -> None:
        here, _ = self._listener.accept()
        self.met += 1
        if self.refuses:
            self.refuses -= 1
            return here.close()
        try:
            there = socket.create_connection(self.to, SOON_S)
        except OSError:
            return here.close()
        legs = Leg(here), Leg(there)
        for leg, other in zip(legs, reversed(legs), strict=True):
            leg.other = other
            self._legs.add(leg)
            self._looking.register(leg.sock, selectors.EVENT_READ, leg)

    def _pass_on(self, leg: Leg) -> None:
        assert leg.other is not None
        if leg.deaf:  # it is read no more, so that whoever writes is told nothing either
            self._looking.unregister(leg.sock)
            return
        try:
            data = leg.sock.recv(65536)
            if data:
                return leg.other.sock.sendall(data)
        except OSError:
            pass  # one of them is gone
        self._drop(leg)

    def _drop(self, leg: Leg) -> None:
        for each in filter(None, (leg, leg.other)):
            if each in self._legs:
                self._legs.remove(each)
                if each.sock in self._looking.get_map():
                    self._looking.unregister(each.sock)
                each.sock.close()


@dataclass(frozen=True)
class End:
    """One end of a cable: a network namespace, with an address in it."""

    namespace: str
    address: str
    interface: str


class Cable:
    """Two hosts, as far as the network goes, and what joins them."""

    def __init__(self) -> None:
        name = f"kvc{os.getpid() % 100_000}-{next(_cables)}"
        self.ends = tuple(End(f"{name}{end}", f"10.213.77.{number}", f"{name[-8:]}{end}") for number, end in ((1, "a"), (2, "b")))

    def lay(self) -> None:
        one, other = self.ends
        for end in self.ends:
            _ip("netns", "add", end.namespace)
        joined = ("type", "veth", "peer", "name", other.interface, "netns", other.namespace)
        _ip("link", "add", one.interface, "netns", one.namespace, *joined)
        for end in self.ends:
            _ip("-n", end.namespace, "addr", "add", f"{end.address}/24", "dev", end.interface)
            _ip("-n", end.namespace, "link", "set", "lo", "up")
            self.plug(end)

    def pull(self, end: End) -> None:
        """Nothing passes from now on, and no connection is told."""
        _ip("-n", end.namespace, "link", "set", end.interface, "down")

    def plug(self, end: End) -> None:
        """Undo it."""
        _ip("-n", end.namespace, "link", "set", end.interface, "up")

    def remove(self) -> None:
        for end in self.ends:
            subprocess.run(["ip", "netns", "del", end.namespace], check=False, capture_output=True, timeout=SOON_S)


@contextmanager
def cable() -> Iterator[Cable]:
    """A cable between two hosts of its own."""
    made = Cable()
    try:
        made.lay()
        yield made
    finally:
        made.remove()


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True, timeout=SOON_S)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr.strip()}; this test makes network namespaces, run it as root"


@dataclass(frozen=True)
class Connection:
    """A TCP connection as the kernel lists it."""

    local: tuple[str, int]
    remote: tuple[str, int]
    state: str


def connections(pid: int) -> set[Connection]:
    """The connections over IPv4 in the network namespace of a process, but for those within that host."""
    lines = Path(f"/proc/{pid}/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    found = (Connection(_place(fields[1]), _place(fields[2]), fields[3]) for fields in map(str.split, lines))
    return {one for one in found if one.state != LISTENS and one.local[0] != one.remote[0]}


def _place(text: str) -> tuple[str, int]:
    word, port = text.split(":")
    return socket.inet_ntoa(int(word, 16).to_bytes(4, sys.byteorder)), int(port, 16)
