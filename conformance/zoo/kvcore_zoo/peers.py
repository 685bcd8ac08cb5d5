"""Animals that misbehave when a peer comes, goes or returns."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from kvcore import TicketState, Transfer, hookimpl
from kvcore.backends.local import Connection, Job
from kvcore.hookspecs import Peer
from kvcore_zoo.animal import Animal

_never = threading.Event()


class Loyal(Animal):
    """A peer that connects again is served through the connection of old, whatever it says now."""

    name = "zoo-loyal"

    def __init__(self) -> None:
        super().__init__()
        self._old: dict[str, Connection] = {}

    @hookimpl
    def kvcore_connect(self, peer: Peer) -> None:
        if peer.id in self._old:
            self._links[peer.id] = self._old[peer.id]
            return
        super().kvcore_connect(peer)
        if peer.id in self._links:
            self._old[peer.id] = self._links[peer.id]

    @hookimpl
    def kvcore_close(self) -> None:
        self._old.clear()
        super().kvcore_close()


class Boastful(Animal):
    """Disconnect says that nothing is written here any more, and cuts nothing."""

    name = "zoo-boastful"

    @hookimpl
    def kvcore_disconnect(self, peer: str) -> bool:
        if self._context.side != "decode":
            return super().kvcore_disconnect(peer)
        return True


class Returning(Animal):
    """Disconnect cuts the link, and the next transfer makes another with the token of old, which is still good."""

    name = "zoo-returning"

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[str, Peer] = {}

    @hookimpl
    def kvcore_connect(self, peer: Peer) -> None:
        super().kvcore_connect(peer)
        self._known[peer.id] = peer

    @hookimpl
    def kvcore_disconnect(self, peer: str) -> bool:
        cut = super().kvcore_disconnect(peer)
        self._fences.pop(peer, None)
        self._known.pop(peer, None)
        return cut

    @hookimpl
    def kvcore_transfer(self, transfer: Transfer) -> Job | TicketState:
        link = self._links.get(transfer.peer)
        if link and link.broken and transfer.peer in self._known:
            with contextlib.suppress(ConnectionError):
                super().kvcore_connect(self._known[transfer.peer])
        return super().kvcore_transfer(transfer)


class Locked(Animal):
    """A connect, and a disconnect, holds the lock that transfer and poll need too."""

    name = "zoo-locked"

    def __init__(self) -> None:
        super().__init__()
        self._all = threading.RLock()

    @hookimpl
    def kvcore_connect(self, peer: Peer) -> None:
        with self._all:
            super().kvcore_connect(peer)

    @hookimpl
    def kvcore_disconnect(self, peer: str) -> bool:
        with self._all:
            return super().kvcore_disconnect(peer)

    @hookimpl
    def kvcore_transfer(self, transfer: Transfer) -> Job | TicketState:
        with self._all:
            return super().kvcore_transfer(transfer)

    @hookimpl
    def kvcore_poll(self, tickets: Sequence[Job]) -> list[TicketState]:
        with self._all:
            return super().kvcore_poll(tickets)


class Queuing(Animal):
    """One write at a time for all peers: one that takes nothing stalls all."""

    name = "zoo-queuing"

    def __init__(self) -> None:
        super().__init__()
        self._turn = threading.Lock()

    def _send(self, job: Job) -> TicketState:
        with self._turn:
            return super()._send(job)


class Modest(Animal):
    """Declares that disconnect can prove that a peer writes no more, and proves nothing."""

    name = "zoo-modest"
    able: ClassVar[dict[str, Any]] = {"needs_process_to_write": True}

    @hookimpl
    def kvcore_disconnect(self, peer: str) -> bool:
        super().kvcore_disconnect(peer)
        return False


class Trusting(Animal):
    """Takes any endpoint for good, and finds out later."""

    name = "zoo-trusting"

    @hookimpl
    def kvcore_connect(self, peer: Peer) -> None:
        try:
            super().kvcore_connect(peer)
        except ConnectionError:
            pass


class Patient(Animal):
    """Waits half a minute for a peer that is not there."""

    name = "zoo-patient"

    @hookimpl
    def kvcore_connect(self, peer: Peer) -> None:
        until = time.monotonic() + 30.0
        while True:
            try:
                return super().kvcore_connect(peer)
            except ConnectionError:
                if time.monotonic() > until:
                    raise
                _never.wait(0.1)


class Puzzled(Animal):
    """A connect of an endpoint that makes no sense never returns."""

    name = "zoo-puzzled"

    @hookimpl
    def kvcore_connect(self, peer: Peer) -> None:
        try:
            msgspec.json.decode(peer.endpoint.data, type=tuple[str, int, bytes])
        except ValueError:
            _never.wait()
        super().kvcore_connect(peer)


class Careless(Animal):
    """A connect of damaged bytes spoils the engine: no transfer works after it."""

    name = "zoo-careless"
    spoilt = False

    @hookimpl
    def kvcore_connect(self, peer: Peer) -> None:
        try:
            msgspec.json.decode(peer.endpoint.data)
        except ValueError:
            self.spoilt = True
        super().kvcore_connect(peer)

    @hookimpl
    def kvcore_transfer(self, transfer):  # type: ignore[no-untyped-def]
        if self.spoilt:
            raise RuntimeError("metadata corrupt")
        return super().kvcore_transfer(transfer)


class Sharing(Animal):
    """Connections belong to the process: close ends those of all managers in it."""

    name = "zoo-sharing"
    _all: ClassVar[weakref.WeakSet[Sharing]] = weakref.WeakSet()

    def __init__(self) -> None:
        super().__init__()
        self._all.add(self)

    @hookimpl
    def kvcore_close(self) -> None:
        for one in list(self._all):
            mine = set(one._links.values())
            one._stop(mine.__contains__, "closed")
        super().kvcore_close()
