"""The engine alone in the processes of the kvcore child, by the floor that ``kvcore bench`` has of it: what its figures stand on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import kvcore
from benchmarks.beside.geometry import Geometry
from kvcore import mapping, registry
from kvcore.bench.floor import Floor, offered
from kvcore.hookspecs import OpenContext, Peer, Transfer
from kvcore.memory import Indices
from kvcore.planner import Layout, plan
from kvcore.sides import ToolError
from kvcore.states import RoomKey, Side


class Alone:
    """One side's engine, started when it is first measured. Both sides' ``raw`` are called at the same time."""

    def __init__(self, backend: str, side: Side, pools: Sequence[kvcore.Pool], geometry: Geometry, end: Connection) -> None:
        self._backend, self._side, self._pools, self._geometry, self._pipe = backend, side, pools, geometry, end
        self._floor: Floor | None = None
        self._room: list[Transfer] = []

    def close(self) -> None:
        """Stop the engine, if it was started."""
        if self._floor is not None:
            self._floor.close()

    def raw(self, n: int) -> dict[str, Any]:
        """Transfer ``n`` rooms of slot 0, one after the other: the pages, then the side records, and then as often the pages alone.

        ``cpu``: seconds of this process for the ``n`` rooms, on decode without the thread that only asks the engine to go on. Prefill also:
        ``kv, kv_aux``: seconds of each; ``descs``: descriptors of the pages; ``way``: how they were posted.
        """
        floor = self._opened()
        return self._write(floor, n) if self._side == "prefill" else self._serve(floor)

    def _opened(self) -> Floor:
        if self._floor is not None:
            return self._floor
        entry = offered(self._backend)
        if entry is None:
            raise ToolError(f"no engine alone for {self._backend}: no floor of it is installed; pip install ./floors")
        floor: Floor = entry.load()()
        self._floor = floor
        _, _, info = registry.plugin_manager(registry.load_backend(self._backend))
        geometries = tuple(pool.geometry for pool in self._pools)
        regions = tuple(region for pool in self._pools for region in pool.regions)
        name = f"kvcore-beside-{self._side}"
        context = OpenContext(name, self._side, 0, "127.0.0.1", "127.0.0.1", logging.getLogger("kvcore.bench"), geometries)
        endpoint = floor.open(registry.validated_options(info, {}), context, regions)
        if self._side == "decode":
            self._pipe.send(Peer(name, endpoint, regions, geometries))
            return floor
        peer: Peer = self._pipe.recv()
        floor.connect(peer)
        mine, theirs = (np.asarray(self._geometry.listed(0, side), np.int64) for side in ("prefill", "decode"))
        slot = np.array([0])
        sides = Layout.of(geometries, regions), Layout.of(peer.pools, peer.regions)
        self._room = [transfer(peer, *sides, name, *pages) for name, pages in (("kv", (mine, theirs)), ("aux", (slot, slot)))]
        return floor

    def _write(self, floor: Floor, n: int) -> dict[str, Any]:
        way, (pages, _) = floor.ways[0], self._room  # the way of the peer bench
        self._meet()
        whole_room, pages_alone = floor.prepare(way, self._room, 1), floor.prepare(way, [pages], 1)
        for _ in range(n // 5 + 1):
            whole_room()
        self._meet()
        cpu = time.process_time()
        whole = [_timed(whole_room) for _ in range(n)]
        cpu = time.process_time() - cpu
        self._meet()
        alone = [_timed(pages_alone) for _ in range(n)]
        self._meet()
        count = self._geometry.pages * self._geometry.tensors if way == "prepared" else len(pages.length)
        return {"kv": alone, "kv_aux": whole, "descs": count, "cpu": cpu, "way": way}

    def _serve(self, floor: Floor) -> dict[str, Any]:
        stop = threading.Event()

        def serve() -> None:
            floor.serve(stop)
            stop.wait()

        server = threading.Thread(target=serve, name="kvcore-beside-floor", daemon=True)
        server.start()
        assert server.ident is not None
        asking = time.pthread_getcpuclockid(server.ident)
        self._meet()
        self._meet()
        began = time.process_time() - time.clock_gettime(asking)
        self._meet()
        ended = time.process_time() - time.clock_gettime(asking)
        self._meet()
        stop.set()
        server.join()
        return {"cpu": ended - began}

    def _meet(self) -> None:
        self._pipe.send(0)
        self._pipe.recv()


def transfer(peer: Peer, local: Layout, remote: Layout, pool: str, mine: Indices, theirs: Indices) -> Transfer:
    """Pages of a pool as a floor gets them, whole, however many they are."""
    planned = plan(local, remote, {pool: (mine, theirs)}, mapping.whole(peer.pools)).descriptors()
    arrays = (planned.local_region, planned.remote_region, planned.local_offset, planned.remote_offset, planned.length)
    named = Transfer(RoomKey("prefill", 0, 0, 1), peer.id, *arrays, local.base, remote.base)
    return replace(named, pool=pool, local_pages=mine, remote_pages=theirs)


def _timed(move: Callable[[], None]) -> float:
    began = time.perf_counter()
    move()
    return time.perf_counter() - began
