"""The floor under a measurement: the same bytes by the same descriptors, moved by the engine itself with nothing of kvcore between; and
under that what the bare machine takes.

A distribution may offer one, under the backend's name in the entry-point group ``kvcore.bench``: a class with ``Floor``'s methods. Only a
measurement imports it. All run in the measurement's two processes, beside managers that have nothing to do meanwhile; its turns and
kvcore's alternate, so that whatever else the machine does hits both alike.
"""

from __future__ import annotations

import importlib.metadata
import logging
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol

import numpy as np
from pydantic import BaseModel

from kvcore import interfaces, mapping, registry
from kvcore.bench.bare import Bare, Caller, Echo, bare, copy
from kvcore.bench.fields import cpu_s, told
from kvcore.bench.setup import Clock, Go, Measured, Ready, Setup, pool
from kvcore.buffers import Buffer, Bytes
from kvcore.hookspecs import Endpoint, OpenContext, Peer, Transfer
from kvcore.installed import find_backend
from kvcore.memory import Indices, Region
from kvcore.planner import Layout, plan
from kvcore.sides import SIDES, Link, Sides
from kvcore.states import RoomKey, Side

GROUP = "kvcore.bench"
BARE = "bare"
"""The turn of the bare machine, which is no way of an engine's."""
TRIES = 2
"""How often each way of posting is tried before the fastest is chosen."""

Way = Annotated[str, told("The engine's way of posting that was the fastest when all were tried.")]
Share = Annotated[float, told("What part of the engine's rate kvcore has, 1 for all, over turns that followed each other.")]
"""Fields that results of several measurements have of their floor."""


class Floor(Protocol):
    """One side's engine, used directly. Its class is made without arguments; any of its methods may raise what it likes."""

    @property
    def ways(self) -> Sequence[str]:
        """Names of the engine's own ways to move a transfer; each is tried."""

    def open(self, options: BaseModel, context: OpenContext, regions: Sequence[Region]) -> Endpoint:
        """Start the engine as the backend does with these options, and register memory."""

    def connect(self, peer: Peer) -> None:
        """Prefill: make decode's engine and memory reachable."""

    def prepare(self, way: str, transfers: Sequence[Transfer], at_once: int) -> Callable[[], None]:
        """Prefill: what moves all, at most ``at_once`` transfers at a time, and returns when every byte is in place.

        A call of it is measured; what is made before, such as descriptors in the engine's form, is not. In a turn there is one for all
        transfers, or one for each alone.
        """

    def serve(self, stop: threading.Event) -> None:
        """Decode: drive an engine whose target must work, until ``stop``."""

    def close(self) -> None:
        """Stop the engine."""


@dataclass(frozen=True, slots=True)
class Met:
    """From decode, passed on to prefill: where its end of round trips is, and its engine if there is a floor."""

    echo: str
    peer: Peer | None


@dataclass(frozen=True, slots=True)
class Ways:
    """From prefill, once all is connected: the names of the engine's ways, none without a floor; ``copies``: whether the pages are in CPU
    memory."""

    names: tuple[str, ...]
    copies: bool


@dataclass(frozen=True, slots=True)
class Figures:
    """What a floor came to. ``tried``: the best rate of each way, in the measurement's unit. The rest is of the fastest way: of each turn
    its rate, CPU seconds by side, and where each transfer was alone their median milliseconds."""

    way: str
    tried: dict[str, float]
    rates: tuple[float, ...]
    cpu_s: dict[Side, tuple[float, ...]]
    alone_ms: tuple[float, ...] = ()

    def shares(self, rates: Sequence[float]) -> tuple[float, ...]:
        """How rates of kvcore's compare: each one's part of the turn that came after it."""
        return tuple(mine / raw for mine, raw in zip(rates, self.rates, strict=True))


def offered(backend: str) -> importlib.metadata.EntryPoint | None:
    """The floor of a backend, not imported yet; None if no distribution offers one."""
    found = importlib.metadata.entry_points(group=GROUP, name=find_backend(backend).name)
    return next(iter(found), None)


# --- in the driver


def meet(sides: Sides[Any]) -> Ways:
    """Have the floors of the two sides connect."""
    sides.tell("prefill", sides.hear("decode", Met))
    return sides.hear("prefill", Ways)


class Turns:
    """Turns of the floors: all the engine's ways are tried, then the fastest is measured, and the bare machine after it. ``amount``: what
    a turn moves, in the measurement's unit; ``nbytes``: the same in bytes."""

    def __init__(self, sides: Sides[Any], ways: Ways, amount: float, nbytes: int) -> None:
        self._sides, self._amount, self._nbytes = sides, amount, nbytes
        self._tried = dict.fromkeys(ways.names, 0.0)
        self._copies = ways.copies
        self._taken: list[dict[Side, Measured]] = []
        self._bare: list[dict[Side, Measured]] = []

    def warm_up(self) -> None:
        """Try every way."""
        for way in [*self._tried] * TRIES:
            self._tried[way] = max(self._tried[way], self._rate(self._turn(way)))
        self._turn(BARE)

    def take(self) -> None:
        """Measure once."""
        if self._tried:
            self._taken.append(self._turn(self._fastest))
        self._bare.append(self._turn(BARE))

    @property
    def figures(self) -> Figures | None:
        """Of what was measured of the engine; None without a floor."""
        if not self._taken:
            return None
        rates = tuple(self._rate(turn) for turn in self._taken)
        alone = tuple(1e3 * statistics.median(times) for turn in self._taken if (times := turn["prefill"].latencies_s))
        return Figures(self._fastest, dict(self._tried), rates, cpu_s(self._taken), alone)

    @property
    def bare(self) -> Bare:
        """Of what was measured of the bare machine."""
        return bare(
            [turn["prefill"] for turn in self._bare], [turn["decode"].seconds for turn in self._bare] if self._copies else [], self._nbytes
        )

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


class NoTurns:
    """Where a side is several processes nothing stands beside it."""

    figures = bare = None

    def warm_up(self) -> None:
        """Nothing."""

    def take(self) -> None:
        """Nothing."""


# --- in the two processes


class Raw:
    """A side's engine by itself, with the pages of a measurement."""

    def __init__(self, floor: Floor, side: Side, setup: Setup, buffer: Buffer) -> None:
        self._floor, self._name, self._pool = floor, f"kvcore-bench-{side}", pool(buffer, side, setup)
        _, _, info = registry.plugin_manager(registry.load_backend(setup.backend))
        host = interfaces.placed(setup.host, "")["host"]
        context = OpenContext(self._name, side, 0, host, host, logging.getLogger("kvcore.bench"), (self._pool.geometry,))
        self._endpoint = floor.open(registry.validated_options(info, setup.options), context, self._pool.regions)
        self.serve = floor.serve

    @property
    def peer(self) -> Peer:
        """What the other side is to know of this one."""
        return Peer(self._name, self._endpoint, self._pool.regions, (self._pool.geometry,))

    def connect(self, peer: Peer) -> tuple[str, ...]:
        """On prefill: connect to decode's; the names of the ways."""
        self._peer = peer
        self._floor.connect(peer)
        self._local, self._remote = Layout.of((self._pool.geometry,), self._pool.regions), Layout.of(peer.pools, peer.regions)
        return tuple(self._floor.ways)

    def transfer(self, mine: Indices, theirs: Indices) -> Transfer:
        """On prefill: pages as a backend gets them, but whole, however many they are."""
        whole = mapping.whole(self._peer.pools)
        planned = plan(self._local, self._remote, {"kv": (mine, theirs)}, whole).descriptors()
        arrays = (planned.local_region, planned.remote_region, planned.local_offset, planned.remote_offset, planned.length)
        named = Transfer(RoomKey("prefill", 0, 0, 1), self._peer.id, *arrays, self._local.base, self._remote.base)
        return replace(named, pool="kv", local_pages=mine, remote_pages=theirs)

    def write(self, way: str, transfers: Sequence[Transfer], at_once: int) -> Measured:
        """On prefill: move all. Where they are to go one at a time and are several, each is timed."""
        if at_once > 1 or len(transfers) == 1:
            move = self._floor.prepare(way, transfers, at_once)
            clock = Clock()
            move()
            return clock.read()
        moves, took = [self._floor.prepare(way, [transfer], 1) for transfer in transfers], []
        clock = Clock()
        for move in moves:
            began = time.perf_counter()
            move()
            took.append(time.perf_counter() - began)
        return clock.read(tuple(took))


class Beside:
    """What a side has beside its manager, and the meeting with the other side's; nothing if either side is several processes. Its context
    ends the engine."""

    def __init__(self, side: Side, setup: Setup, buffer: Buffer, link: Link) -> None:
        entry = offered(setup.backend) if setup.ranks.alone else None
        self._floor: Floor | None = entry.load()() if entry is not None else None
        self._link, self._buffer = link, buffer
        if not setup.ranks.alone:
            return
        self._raw = Raw(self._floor, side, setup, buffer) if self._floor is not None else None
        if side == "decode":
            self._echo = Echo(setup)
            return link.tell(Met(self._echo.address, self._raw.peer if self._raw is not None else None))
        met = link.hear(Met)
        self._caller = Caller(met.echo, setup)
        names = self._raw.connect(met.peer) if self._raw is not None and met.peer is not None else ()
        link.tell(Ways(names, isinstance(buffer.tensor, np.ndarray)))

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *_: object) -> None:
        if self._floor is not None:
            self._floor.close()

    def write(self, way: str, pages: Iterable[tuple[Indices, Indices]], at_once: int = 1) -> Measured:
        """A turn on prefill, when the driver says that decode serves. ``pages``: of each transfer, here and there."""
        raw = self._raw if way != BARE else None
        transfers = [raw.transfer(*each) for each in pages] if raw is not None else []
        self._link.tell(Ready())
        self._link.hear(Go)
        return raw.write(way, transfers, at_once) if raw is not None else self._caller.measure()

    def serve(self, way: str, pages: Bytes, sources: Indices, places: Indices) -> Measured:
        """A turn on decode, until the driver says that it is over. When it is, page ``sources[n]`` of ``pages`` is at ``places[n]``; in a
        turn of the bare machine it is copied there, and that is what is measured."""
        raw = self._raw if way != BARE else None
        stop = threading.Event()
        target = raw.serve if raw is not None else self._echo.serve
        server = threading.Thread(target=target, args=(stop,), name="kvcore-bench-floor", daemon=True)
        clock = Clock()
        server.start()
        self._link.tell(Ready())
        self._link.hear(Go)
        stop.set()
        server.join()
        return clock.read() if raw is not None else copy(pages, sources, self._buffer, places)
