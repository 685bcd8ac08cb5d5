"""The floor under a measurement: the same bytes by the same descriptors, moved by the engine itself with nothing of kvcore between.

A distribution may offer one, under the backend's name in the entry-point group ``kvcore.bench``: a class with ``Floor``'s methods. Only a
measurement imports it. It runs in the measurement's two processes, beside managers that have nothing to do meanwhile; its turns and
kvcore's alternate, so that whatever else the machine does hits both alike.
"""

from __future__ import annotations

import importlib.metadata
import logging
import statistics
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pydantic import BaseModel

from kvcore import mapping, registry
from kvcore.bench.setup import Clock, Go, Measured, Ready, Setup, pool
from kvcore.buffers import Buffer
from kvcore.hookspecs import Endpoint, OpenContext, Peer, Transfer
from kvcore.installed import find_backend
from kvcore.memory import Indices, Region
from kvcore.planner import Layout, plan
from kvcore.sides import SIDES, Link, Sides
from kvcore.states import RoomKey, Side

GROUP = "kvcore.bench"
TRIES = 2
"""How often each way of posting is tried before the fastest is chosen."""


class Floor(Protocol):
    """One side's engine, used directly. Its class is made without arguments; any of its methods may raise what it likes."""

    @property
    def ways(self) -> Sequence[str]:
        """Names of the engine's own ways to move a transfer; each is tried."""

    def open(self, options: BaseModel, context: OpenContext, regions: Sequence[Region]) -> Endpoint:
        """Start the engine as the backend does with these options, and register memory."""

    def connect(self, peer: Peer) -> None:
        """Prefill: make decode's engine and memory reachable."""

    def write(self, way: str, transfers: Sequence[Transfer], at_once: int) -> None:
        """Prefill: move all, at most ``at_once`` transfers at a time; return when every byte is in place. This is what is measured."""

    def serve(self, stop: threading.Event) -> None:
        """Decode: drive an engine whose target must work, until ``stop``."""

    def close(self) -> None:
        """Stop the engine."""


@dataclass(frozen=True, slots=True)
class Ways:
    """From prefill, once its floor is connected: the names of the ways."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Figures:
    """What a floor came to. ``tried``: the best rate of each way, in the measurement's unit. The rest is of the fastest way: of each turn
    its rate, and CPU seconds by side."""

    way: str
    tried: dict[str, float]
    rates: tuple[float, ...]
    cpu_s: dict[Side, tuple[float, ...]]

    def share(self, rates: Sequence[float]) -> float:
        """How rates of kvcore's compare: the median of each one's part of the turn that came after it."""
        return statistics.median(mine / raw for mine, raw in zip(rates, self.rates, strict=True))


def offered(backend: str) -> importlib.metadata.EntryPoint | None:
    """The floor of a backend, not imported yet; None if no distribution offers one."""
    found = importlib.metadata.entry_points(group=GROUP, name=find_backend(backend).name)
    return next(iter(found), None)


# --- in the driver


def meet(sides: Sides[Any], setup: Setup) -> tuple[str, ...]:
    """Have prefill's floor connect to decode's; the names of its ways, none if there is no floor."""
    if offered(setup.backend) is None:
        return ()
    sides.tell("prefill", sides.hear("decode", Peer))
    return sides.hear("prefill", Ways).names


class Turns:
    """Turns of a floor: all its ways are tried, then the fastest is measured. ``amount``: what a turn moves, in the measurement's unit."""

    def __init__(self, sides: Sides[Any], ways: Sequence[str], amount: float) -> None:
        self._sides, self._amount = sides, amount
        self._ways, self._tried = ways, dict.fromkeys(ways, 0.0)
        self._taken: list[dict[Side, Measured]] = []

    def warm_up(self) -> None:
        """Try every way."""
        for way in [*self._ways] * TRIES:
            self._tried[way] = max(self._tried[way], self._rate(self._turn(way)))

    def take(self) -> None:
        """Measure once."""
        if self._ways:
            self._taken.append(self._turn(self._fastest))

    @property
    def figures(self) -> Figures | None:
        """Of what was measured; None without a floor."""
        if not self._taken:
            return None
        rates = tuple(self._rate(turn) for turn in self._taken)
        cpu_s = {side: tuple(turn[side].cpu_s for turn in self._taken) for side in SIDES}
        return Figures(self._fastest, dict(self._tried), rates, cpu_s)

    @property
    def _fastest(self) -> str:
        return max(self._tried, key=self._tried.__getitem__)

    def _rate(self, turn: dict[Side, Measured]) -> float:
        return self._amount / turn["prefill"].seconds

    def _turn(self, way: str) -> dict[Side, Measured]:
        for side in SIDES:
            self._sides.tell(side, Go(way))
            self._sides.hear(side, Ready)
        self._sides.tell("prefill", Go())
        prefill = self._sides.hear("prefill", Measured)
        self._sides.tell("decode", Go())
        return {"prefill": prefill, "decode": self._sides.hear("decode", Measured)}


# --- in the two processes


class Raw:
    """A side's floor with the pages of a measurement."""

    def __init__(self, floor: Floor, side: Side, setup: Setup, buffer: Buffer, link: Link) -> None:
        self._floor, self._link = floor, link
        mine = pool(buffer)
        _, _, info = registry.plugin_manager(registry.load_backend(setup.backend))
        name = f"kvcore-bench-{side}"
        context = OpenContext(name, side, 0, setup.host, setup.host, logging.getLogger("kvcore.bench"), (mine.geometry,))
        endpoint = floor.open(registry.validated_options(info, setup.options), context, mine.regions)
        if side == "decode":
            return link.tell(Peer(name, endpoint, mine.regions, (mine.geometry,)))
        self._peer = link.hear(Peer)
        floor.connect(self._peer)
        self._local, self._remote = Layout.of((mine.geometry,), mine.regions), Layout.of(self._peer.pools, self._peer.regions)
        link.tell(Ways(tuple(floor.ways)))

    def transfer(self, mine: Indices, theirs: Indices) -> Transfer:
        """On prefill: pages as a backend gets them, but whole, however many they are."""
        whole = mapping.whole(self._peer.pools)
        planned = plan(self._local, self._remote, {"kv": (mine, theirs)}, whole).descriptors()
        arrays = (planned.local_region, planned.remote_region, planned.local_offset, planned.remote_offset, planned.length)
        named = Transfer(RoomKey("prefill", 0, 0, 1), self._peer.id, *arrays, self._local.base, self._remote.base)
        return replace(named, pool="kv", local_pages=mine, remote_pages=theirs)

    def write(self, way: str, transfers: Sequence[Transfer], at_once: int = 1) -> Measured:
        """A turn on prefill, when the driver says that decode serves."""
        self._link.tell(Ready())
        self._link.hear(Go)
        clock = Clock()
        self._floor.write(way, transfers, at_once)
        return clock.read()

    def serve(self) -> Measured:
        """A turn on decode, until the driver says that it is over."""
        stop = threading.Event()
        server = threading.Thread(target=self._floor.serve, args=(stop,), name="kvcore-bench-floor", daemon=True)
        clock = Clock()
        server.start()
        self._link.tell(Ready())
        self._link.hear(Go)
        stop.set()
        server.join()
        return clock.read()


@contextmanager
def raw(side: Side, setup: Setup, buffer: Buffer, link: Link) -> Iterator[Raw | None]:
    """This side's floor, and the meeting with the other's; None if there is none."""
    entry = offered(setup.backend)
    if entry is None:
        yield None
        return
    floor: Floor = entry.load()()
    try:
        yield Raw(floor, side, setup, buffer, link)
    finally:
        floor.close()
