"""Animals that misbehave when they are chosen, opened, driven or closed."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

from kvcore import BackendInfo, Endpoint, Region, TicketKind, TicketState, Transfer, hookimpl
from kvcore.backends.local import Job
from kvcore_zoo.animal import Animal

LARGE = 1 << 16
_never = threading.Event()


class Slow(Animal):
    """Poll waits for something to happen, 30 ms."""

    name = "zoo-slow"

    @hookimpl
    def kvcore_poll(self, tickets: Sequence[Job]) -> list[TicketState]:
        _never.wait(0.03)
        return super().kvcore_poll(tickets)


class Sluggish(Animal):
    """Poll takes 3 ms, whatever there is."""

    name = "zoo-sluggish"

    @hookimpl
    def kvcore_poll(self, tickets: Sequence[Job]) -> list[TicketState]:
        _never.wait(0.003)
        return super().kvcore_poll(tickets)


class Synchronous(Animal):
    """Large batches are sent by ``kvcore_transfer`` itself, at 100 MB/s, and it does not declare that it blocks."""

    name = "zoo-synchronous"

    @hookimpl
    def kvcore_transfer(self, transfer: Transfer) -> Job | TicketState:
        _never.wait(transfer.nbytes / 1e8 if transfer.nbytes > LARGE else 0.0)
        return super().kvcore_transfer(transfer)


class Undead(Animal):
    """Close leaves the connections that come in, and they go on writing."""

    name = "zoo-undead"

    @hookimpl
    def kvcore_close(self) -> None:
        self._connections -= {one for one in self._connections if one.thread.name == "kvcore-local-from"}
        memory = self._memory
        super().kvcore_close()
        self._memory = memory


class Lazy(Animal):
    """Memory is registered, and refused, when a peer first asks for the endpoint."""

    name = "zoo-lazy"

    @hookimpl
    def kvcore_register(self, regions: Sequence[Region]) -> None:
        self._due = regions

    @hookimpl
    def kvcore_endpoint(self) -> Endpoint:
        due, self._due = self._due, ()
        super().kvcore_register(due)
        return super().kvcore_endpoint()


class Greedy(Animal):
    """Declares fewer limits than its engine has: it refuses transfers of more than 64 descriptors."""

    name = "zoo-greedy"

    @hookimpl
    def kvcore_transfer(self, transfer: Transfer) -> Job | TicketState:
        if transfer.length.size > 64:
            return TicketState(TicketKind.FAILED, "too many descriptors", quiescent=True)
        return super().kvcore_transfer(transfer)


class Once(Animal):
    """Cannot be opened again once it was closed, and does not declare that."""

    name = "zoo-once"
    closed = False

    @hookimpl
    def kvcore_open(self, options, context):  # type: ignore[no-untyped-def]
        if self.closed:
            raise RuntimeError("engine already initialised")
        super().kvcore_open(options, context)

    @hookimpl
    def kvcore_close(self) -> None:
        self.closed = True
        super().kvcore_close()


class Halfway(Animal):
    """Declares that it cannot be opened again, and opens again all the same, half: it registers nothing then."""

    name = "zoo-halfway"
    able: ClassVar[dict[str, Any]] = {"reopens": False}
    closed = False

    @hookimpl
    def kvcore_register(self, regions: Sequence[Region]) -> None:
        if self.closed:
            raise RuntimeError("engine of another life")
        super().kvcore_register(regions)

    @hookimpl
    def kvcore_close(self) -> None:
        self.closed = True
        super().kvcore_close()


class Bursting(Animal):
    """The second close raises."""

    name = "zoo-bursting"
    closed = False

    @hookimpl
    def kvcore_close(self) -> None:
        if self.closed:
            raise RuntimeError("double free")
        self.closed = True
        super().kvcore_close()


class Eager(Animal):
    """Loads a native library when it is only described."""

    name = "zoo-eager"

    @hookimpl
    def kvcore_backend_info(self) -> BackendInfo:
        import ctypes

        ctypes.CDLL("libresolv.so.2")
        return super().kvcore_backend_info()


class Leaky(Animal):
    """Every transfer leaves a file descriptor open."""

    name = "zoo-leaky"

    @hookimpl
    def kvcore_transfer(self, transfer: Transfer) -> Job | TicketState:
        os.open(os.devnull, os.O_RDONLY)
        return super().kvcore_transfer(transfer)


class Littering(Animal):
    """Close leaves the port that it listened at, and the thread of that."""

    name = "zoo-littering"

    @hookimpl
    def kvcore_close(self) -> None:
        self._connections.discard(self._listener)
        super().kvcore_close()


class Halfhearted(Animal):
    """A registration that is refused leaves the regions before the bad one registered."""

    name = "zoo-halfhearted"

    @hookimpl
    def kvcore_register(self, regions: Sequence[Region]) -> None:
        for region in regions:
            super().kvcore_register([region])
