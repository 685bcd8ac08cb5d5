"""Who is there: two processes that stay, and two that are killed, stand still, are closed and come anew."""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from kvcore_conformance.stage.arena import shared

from benchmarks.soak.peers import LIMITS, Peer, Role
from benchmarks.soak.rooms import Rooms

EVERY_S, AHEAD_S = 20.0, 1.0
"""Between two events, and how long before one the process that it is about gets most rooms."""
SHORT_S, LONG_S = LIMITS["liveness_s"] / 4, LIMITS["liveness_s"] + 2.0
"""How long a process stands still: its rooms lose nothing, or are lost."""
EVENTS = ("killed", "frozen shortly", "frozen", "closed")


class Company:
    """A context manager; leaving it ends all processes."""

    def __init__(self, backend: str, options: dict[str, Any], seed: int, rooms: Rooms) -> None:
        self._backend, self._options, self._rooms = backend, options, rooms
        self._random = random.Random(seed)
        self._folder = tempfile.TemporaryDirectory(prefix="kvcore-", dir=shared())
        self._slow = ThreadPoolExecutor(1, "soak")
        self._all: list[Peer] = []
        self._waits: list[tuple[Peer, Future[None], Callable[[Peer], None]]] = []
        self._thaw: tuple[float, Peer] | None = None
        self._next, self._turn = time.monotonic() + EVERY_S / 2, self._random.randrange(8)
        self._due: float | None = None
        self.counts = Counter[str]()
        self.home = [self._new("prefill"), self._new("decode")]
        """Those that stay."""
        self.guests = [self._new("prefill"), self._new("decode")]

    def _new(self, role: Role) -> Peer:
        name = f"{role} {len(self._all) // 2}"
        folder = Path(self._folder.name, f"{len(self._all)}")
        peer = Peer(role, name, self._backend, self._options, folder, self._random.getrandbits(32))
        self._all.append(peer)
        self._later(peer, peer.start, self._arrived)
        return peer

    def _later(self, peer: Peer, work: Callable[[], None], then: Callable[[Peer], None]) -> None:
        """What takes long is done beside the rooms."""
        self._waits.append((peer, self._slow.submit(work), then))

    def _arrived(self, peer: Peer) -> None:
        peer.state = "here"
        self.counts["started"] += 1

    def _left(self, peer: Peer) -> None:
        self._rooms.disturb(peer)  # from now on its rooms' time runs
        peer.end()
        self._replace(peer)

    def _replace(self, peer: Peer) -> None:
        self.guests[self.guests.index(peer)] = self._new(peer.role)

    @property
    def settled(self) -> bool:
        """Whether all are here, and nothing is done to any."""
        return not self._waits and self._thaw is None

    @property
    def here(self) -> list[Peer]:
        """Those that can be talked to."""
        return [peer for peer in (*self.home, *self.guests) if peer.state == "here"]

    @property
    def _guest(self) -> Peer:
        """Whose turn it is; each has every event in turn."""
        return self.guests[(self._turn + self._turn // len(EVENTS)) % 2]

    def met(self, role: Role) -> int:
        """How many processes those of a role have met."""
        return sum(peer.role != role for peer in self._all)

    def pair(self) -> tuple[Peer, Peer] | None:
        """Two for a room; one of them stays mostly, more often both."""
        choices = [(0, 0), (0, 0), (1, 0), (0, 1)]
        if self._due is not None:
            choices = [(1, 0), (1, 1)] if self._guest.role == "prefill" else [(0, 1), (1, 1)]
        prefill, decode = self._random.choice(choices)
        found = (self.guests if prefill else self.home)[0], (self.guests if decode else self.home)[1]
        return found if all(peer.state == "here" for peer in found) else None

    def turn(self, events: bool) -> None:
        """Follow what was begun, and begin what is due (``events``)."""
        for wait in [wait for wait in self._waits if wait[1].done()]:
            self._waits.remove(wait)
            peer, future, then = wait
            future.result()
            then(peer)
        now = time.monotonic()
        if self._thaw is not None and now >= self._thaw[0]:
            peer, self._thaw = self._thaw[1], None
            peer.child.thaw()
            peer.state = "here"
        if not events:
            self._due = None
        elif self._due is None and now >= self._next and self.settled:
            self._due = now + AHEAD_S
        elif self._due is not None and now >= self._due:
            self._due, self._next = None, now + EVERY_S
            self._begin(EVENTS[self._turn % len(EVENTS)], self._guest)
            self._turn += 1

    def _begin(self, event: str, peer: Peer) -> None:
        self.counts[event] += 1
        if event != "frozen shortly":
            self._rooms.disturb(peer)
        if event == "killed":
            peer.child.kill()
            peer.end()
            self._replace(peer)
        elif event == "closed":
            peer.state = "closing"
            self._later(peer, peer.close, self._left)
        else:
            peer.child.freeze()
            peer.state = "frozen"
            self._thaw = time.monotonic() + (SHORT_S if event == "frozen shortly" else LONG_S), peer

    def __enter__(self) -> Company:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._slow.shutdown(wait=False, cancel_futures=True)
        for peer in self._all:
            peer.end()
        self._folder.cleanup()
