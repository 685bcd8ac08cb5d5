"""What measurements of two processes share: managers, messages, clocks, and the check of the bytes."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np

import kvcore
from kvcore.bench.fields import told
from kvcore.buffers import Buffer, Bytes
from kvcore.sides import Close, Link, ToolError
from kvcore.states import Side

MIB, GIB = 1 << 20, 1 << 30
SEED = 1
WAIT_S = 86_400.0
LIVENESS_S = kvcore.Limits().liveness_s


@dataclass(frozen=True, slots=True)
class Setup:
    """What moves the pages, and where. ``patience_s``: seconds without a sign of life, or of one room, before giving up."""

    backend: str
    options: Annotated[dict[str, Any], told("Options of the backend.")] = field(default_factory=dict)
    host: Annotated[str, told("The address that both processes use.")] = "127.0.0.1"
    patience_s: float = 120.0
    debug: bool = False


@dataclass(frozen=True, slots=True)
class Address:
    """From prefill, passed on to decode: where prefill is."""

    text: str


@dataclass(frozen=True, slots=True)
class Go:
    """To a side: the next thing that is measured begins. With a ``way`` it is a turn of the floor's, moved in this way."""

    way: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """From a side: it is ready for the next thing."""


@dataclass(frozen=True, slots=True)
class Measured:
    """From a side: what it has measured of its own. ``latencies_s`` by decode only, one a room, from opened to SUCCESS."""

    seconds: float
    cpu_s: float
    latencies_s: tuple[float, ...] = ()


class Clock:
    """Seconds, and CPU seconds of this process, since it was made."""

    def __init__(self) -> None:
        self._began, self._cpu = time.perf_counter(), time.process_time()

    def read(self, latencies_s: tuple[float, ...] = ()) -> Measured:
        """What has passed."""
        return Measured(time.perf_counter() - self._began, time.process_time() - self._cpu, latencies_s)


def manager(side: Side, setup: Setup, buffer: Buffer, liveness_s: float = LIVENESS_S) -> kvcore.KVManager:
    """A manager with one pool, ``kv``, of one region; its rooms may wait as long as a measurement lasts, move for as long as the driver has
    patience, and take half of that to meet.

    What is there once it has started is left out of garbage collections from then on, as engines do once a model is loaded: a full one
    would go through the objects of all libraries, with every thread of the process standing still for 50 ms and more.
    """
    patience_s = setup.patience_s
    limits = kvcore.Limits(
        bootstrap_s=patience_s / 2, input_s=WAIT_S, transfer_s=patience_s, ticket_s=patience_s, quarantine_s=None, drain_s=1.0,
        liveness_s=liveness_s,
    )  # fmt: skip
    config = kvcore.Config(role=side, backend=setup.backend, backend_options=setup.options, host=setup.host, limits=limits)
    started = kvcore.KVManager(config, [pool(buffer)])
    gc.collect()
    gc.freeze()
    return started


def pool(buffer: Buffer) -> kvcore.Pool:
    """The pool that is measured."""
    return kvcore.Pool.from_tensors("kv", [buffer.tensor], page_size=1)


def orders(link: Link) -> Iterator[Go]:
    """What the driver wants measured, one by one, until it closes."""
    while not isinstance(order := link.hear(object), Close):
        assert isinstance(order, Go)
        yield order


def finish(handle: kvcore.Handle, setup: Setup) -> None:
    """Wait until a room has succeeded; raises its failure."""
    handle.wait(setup.patience_s)
    handle.raise_for_failure()
    if not handle.poll().terminal:
        raise ToolError(
            f"room {handle.room} is still {handle.poll().name} after {setup.patience_s:g} s; try: kvcore doctor {setup.backend}"
        )


def verify(found: Bytes, expected: Bytes, setup: Setup) -> None:
    """Compare pages, of shape ``[pages, page_bytes]``; raises ``ToolError`` if one is not as it was sent."""
    wrong = int(np.count_nonzero((found != expected).any(axis=1)))
    if wrong:
        raise ToolError(f"{wrong} of {len(found)} pages have arrived with wrong bytes; try: kvcore doctor {setup.backend}")
