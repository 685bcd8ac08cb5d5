"""A pair of managers over any engine, shared by the tests of a module: each backend, and fakes for the ways in which engines differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvcore import KVPoll, Receiver, Sender, hookimpl
from kvcore.hookspecs import Transfer
from tests.fake_backends import BlockingBackend, ExclusiveBackend, MemoryBackend, install, running
from tests.helpers import BACKENDS, Duo, duo, wait_until

FAKES: dict[str, tuple[type[MemoryBackend], dict[str, Any]]] = {
    "cannot cancel": (MemoryBackend, {"cancel": False}),
    "blocks": (BlockingBackend, {}),
    "one hook at a time": (ExclusiveBackend, {}),
}
ENGINES = [*BACKENDS, *FAKES]


class Watch:
    """An observer that keeps what the engine is given; what a fault plan gives it later is there twice."""

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []

    @hookimpl(tryfirst=True)
    def kvcore_transfer(self, transfer: Transfer) -> None:
        self.transfers.append(transfer)


@dataclass
class Shared(Duo):
    """A pair that outlives a test: ``tidy`` ends what the test opened and heals what it broke."""

    watch: Watch = field(default_factory=Watch)
    handles: list[Sender | Receiver] = field(default_factory=list)

    def open(self, room: int | None = None, attempt: int = 0) -> tuple[Sender, Receiver]:
        both = super().open(room, attempt)
        self.handles += both
        return both

    def published(self, pages: list[int], room: int | None = None, attempt: int = 0) -> tuple[Sender, Receiver]:
        """A room whose destination is known on both sides."""
        sender, receiver = self.open(room, attempt)
        receiver.receive(pages)
        wait_until(lambda: sender.poll() is KVPoll.WAITING_FOR_INPUT)
        return sender, receiver

    def read(self, room: int) -> set[int]:
        """The chunks of a room that the engine was given."""
        return {transfer.chunk for transfer in self.watch.transfers if transfer.room.number == room}

    def wipe(self) -> None:
        """Zero the target."""
        for array in self.target:
            array[:] = 0

    def tidy(self) -> None:
        self.plan.heal()
        for handle in self.handles:
            handle.clear()
        self.handles.clear()
        self.watch.transfers.clear()


@contextmanager
def shared(engine: str, **limits: float | None) -> Iterator[Shared]:
    """A paired pair over a backend or one of ``FAKES``."""
    with ExitStack() as stack:
        if engine in FAKES:
            base, able = FAKES[engine]
            with pytest.MonkeyPatch.context() as patch:  # only while the managers are made
                (one,) = stack.enter_context(running(install(patch, base, **able), **limits))
            one.prefill.add_observer(one.plan)
            stack.callback(one.plan.heal)
        else:
            one = stack.enter_context(duo(engine, **limits))
        pair = Shared(one.prefill, one.decode, one.source, one.target, one.plan)
        pair.prefill.add_observer(pair.watch)
        pair.pair()
        pair.tidy()
        yield pair
