"""What measurements of two processes share: managers, messages, clocks, and the check of the bytes."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import numpy as np

import kvcore
from kvcore.bench.fields import told
from kvcore.bench.ranks import ALONE, Ranks
from kvcore.buffers import Buffer, Bytes, memory_kinds, random_pages
from kvcore.progress import Watch
from kvcore.sides import SIDES, Close, Link, Place, Sides, ToolError, Work
from kvcore.states import Side

MIB, GIB = 1 << 20, 1 << 30
SEED = 1
WAIT_S = 86_400.0
LIVENESS_S = kvcore.Limits().liveness_s

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Setup:
    """What moves the pages, and where. ``patience_s``: seconds without a sign of life, or of one room, before giving up."""

    backend: str
    options: Annotated[dict[str, Any], told("Options of the backend.")] = field(default_factory=dict)
    host: Annotated[str, told("The address that all processes use.")] = "127.0.0.1"
    patience_s: float = 120.0
    debug: bool = False
    topology: Annotated[str, told("Ranks of prefill and decode, pNdM; figures of a side are those of all its ranks.")] = str(ALONE)

    @property
    def ranks(self) -> Ranks:
        """What ``topology`` names."""
        return Ranks.named(self.topology)


@dataclass(frozen=True, slots=True)
class Address:
    """From prefill's first rank, passed on to all others: where prefill is."""

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
    """From a process: what it has measured of its own, from ``began_s`` on, on the clock that all processes of the machine share.
    ``latencies_s`` by decode only, one a room, from opened, which was at ``opened_s``, to SUCCESS."""

    seconds: float
    cpu_s: float
    latencies_s: tuple[float, ...] = ()
    began_s: float = 0.0
    opened_s: tuple[float, ...] = ()


class Clock:
    """Seconds, and CPU seconds of this process, since it was made."""

    def __init__(self) -> None:
        self._began, self._cpu = time.monotonic(), time.process_time()

    def read(self, latencies_s: tuple[float, ...] = (), opened_s: tuple[float, ...] = ()) -> Measured:
        """What has passed."""
        seconds, cpu_s = time.monotonic() - self._began, time.process_time() - self._cpu
        return Measured(seconds, cpu_s, latencies_s, self._began, opened_s)


# --- in the driver


@contextmanager
def started(work: Work[S], setup: Setup, settings: S, watch: Watch) -> Iterator[Sides[S]]:
    """The processes of a measurement, which know where prefill is, or will as soon as they want to."""
    with Sides("bench", work, settings, setup.patience_s, watch, setup.debug, setup.ranks.each) as sides:
        address = sides.hear("prefill", Address)
        for side, rank in sides.places[1:]:
            sides.tell(side, address, rank)
        yield sides


def together(measured: Mapping[Place, Measured]) -> dict[Side, Measured]:
    """What the ranks of each side have measured, as one: from the first that began to the last that ended, and so is each room's time; CPU
    time is that of all."""
    return {side: _together([each for place, each in measured.items() if place[0] == side]) for side in SIDES}


def _together(ranks: Sequence[Measured]) -> Measured:
    if len(ranks) == 1:
        return ranks[0]
    began = min(each.began_s for each in ranks)
    opened = np.array([each.opened_s for each in ranks])
    ended = opened + np.array([each.latencies_s for each in ranks])
    return Measured(
        seconds=max(each.began_s + each.seconds for each in ranks) - began,
        cpu_s=sum(each.cpu_s for each in ranks),
        latencies_s=tuple((ended.max(axis=0) - opened.min(axis=0)).tolist()),
        began_s=began,
        opened_s=tuple(opened.min(axis=0).tolist()),
    )


# --- in the processes


def manager(side: Side, setup: Setup, buffer: Buffer, link: Link, liveness_s: float = LIVENESS_S) -> kvcore.KVManager:
    """One rank's manager with one pool, ``kv``, of one region; its rooms may wait as long as a measurement lasts, move for as long as the
    driver has patience, and take half of that to meet.

    What is there once it has started is left out of garbage collections from then on, as engines do once a model is loaded: a full one
    would go through the objects of all libraries, with every thread of the process standing still for 50 ms and more.
    """
    patience_s = setup.patience_s
    limits = kvcore.Limits(
        bootstrap_s=patience_s / 2, input_s=WAIT_S, transfer_s=patience_s, ticket_s=patience_s, quarantine_s=None, drain_s=1.0,
        liveness_s=liveness_s,
    )  # fmt: skip
    config = kvcore.Config(
        role=side, backend=setup.backend, backend_options=setup.options, host=setup.host, limits=limits,
        bootstrap=link.hear(Address).text if side == "prefill" and link.rank else None,
        topology=kvcore.Topology(tp_size=setup.ranks.of(side), tp_rank=link.rank),
    )  # fmt: skip
    made = kvcore.KVManager(config, [pool(buffer, side, setup)])
    gc.collect()
    gc.freeze()
    return made


def pool(buffer: Buffer, side: Side, setup: Setup) -> kvcore.Pool:
    """The pool that is measured: one rank's heads of each page."""
    ranks = setup.ranks
    if ranks.alone:
        return kvcore.Pool.from_tensors("kv", [buffer.tensor], page_size=1)
    layout = kvcore.Heads(total=ranks.heads, dim=buffer.tensor.shape[1] * ranks.of(side) // ranks.heads)
    return kvcore.Pool.from_tensors("kv", [buffer.tensor], page_size=1, layout=layout)


def buffer_for(side: Side, setup: Setup, pages: int, page_bytes: int) -> Buffer:
    """For what one rank holds of so many pages; ``page_bytes`` are those of a whole one, over all ranks of the side."""
    return Buffer(memory_kinds(setup.backend), pages, page_bytes // setup.ranks.of(side))


def content(side: Side, rank: int, setup: Setup, pages: int, page_bytes: int) -> Bytes:
    """What is in it: each head has bytes of its own in every page, which are the same on both sides."""
    head_bytes = page_bytes // setup.ranks.heads
    return np.concatenate([random_pages(SEED + head, pages, head_bytes) for head in setup.ranks.heads_of(side, rank)], axis=1)


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
