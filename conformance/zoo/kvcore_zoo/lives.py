"""Animals that misbehave when they are chosen, opened, driven or closed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from kvcore import BackendInfo, Region, TicketKind, TicketState, Transfer, hookimpl
from kvcore.backends.local import Job, LocalOptions
from kvcore_zoo.animal import Animal

_never = threading.Event()


class LaxOptions(LocalOptions, extra="ignore", frozen=True):
    """Takes options that it does not know."""


class Lax(Animal):
    """Options with a typing error are ignored."""

    name = "zoo-lax"

    @hookimpl
    def kvcore_backend_info(self) -> BackendInfo:
        return replace(super().kvcore_backend_info(), options=LaxOptions)


class Slow(Animal):
    """Poll waits for something to happen, 30 ms."""

    name = "zoo-slow"

    @hookimpl
    def kvcore_poll(self, tickets: Sequence[Job]) -> list[TicketState]:
        _never.wait(0.03)
        return super().kvcore_poll(tickets)


class Greedy(Animal):
    """Declares fewer limits than its engine has: it refuses transfers of more than 64 descriptors."""

    name = "zoo-greedy"

    @hookimpl
    def kvcore_transfer(self, transfer: Transfer) -> Job | TicketState:
        if transfer.length.size > 64:
            return TicketState(TicketKind.FAILED, "too many descriptors", quiescent=True)
        return super().kvcore_transfer(transfer)


class Halves(Animal):
    """A registration that fails keeps the regions that came before the bad one."""

    name = "zoo-halves"

    @hookimpl
    def kvcore_register(self, regions: Sequence[Region]) -> None:
        for one in regions:
            super().kvcore_register([one])


class Once(Animal):
    """Cannot be opened a second time in a process, and does not declare that."""

    name = "zoo-once"
    opened = 0

    @hookimpl
    def kvcore_open(self, options, context):  # type: ignore[no-untyped-def]
        if type(self).opened:
            raise RuntimeError("engine already initialised")
        super().kvcore_open(options, context)

    @hookimpl
    def kvcore_close(self) -> None:
        type(self).opened += 1
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


class Everything(Animal):
    """Declares kinds of memory that it cannot move, and takes them."""

    name = "zoo-everything"

    @hookimpl
    def kvcore_register(self, regions: Sequence[Region]) -> None:
        super().kvcore_register([replace(one, device="cpu") for one in regions])
