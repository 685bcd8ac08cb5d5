"""kvcore as one more child of the peer bench: the same commands over the same memory, from the same loop.

What differs from SGLang's child, each because the interfaces do:

- The loop asks ``poll_all`` once a turn for all rooms; SGLang's asks each handle. Both rest as long between turns.
- A room's pages and its slot of side records are handed over in one ``send``; SGLang's sender writes the records itself, after the pages.
- SGLang's receiver is polled once when it is opened, and told its pages if it has joined, as it has; kvcore's is told at once.
- Memory is numpy's, aligned as torch aligns it.

A sender waits for ``WAITING_FOR_INPUT`` before it sends, as SGLang's must, although kvcore's need not. kvcore is in its default
configuration: no option of it or of its backend is set. The clock starts before a handle is made and stops when the loop has seen
its end, before it is cleared.
"""

from __future__ import annotations

import collections
import gc
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import kvcore
from benchmarks.beside.alone import Alone
from benchmarks.beside.geometry import Geometry, Pages
from kvcore import KVPoll
from kvcore.states import Side

now = time.monotonic
STEP_S = 20e-6
"""Between two looks at one room."""
SETTLE_S = 1.0
KINDS = ("ok", "recv_abort_pre", "recv_abort_meta", "send_abort_pre", "send_abort_inflight", "ok", "recv_abort_inflight", "ok")
"""What happens to the rooms of ``leak``, in turn."""


@dataclass(slots=True)
class _Active:
    handle: kvcore.Handle
    slot: int
    opened: float
    sent: bool = False


class KvcoreChild:
    """One side. ``end``: of a pipe to the other side, over which the two wait for each other."""

    def __init__(self, side: Side, backend: str, geometry: Geometry, end: Connection) -> None:
        self.side, self._geometry, self._pipe = side, geometry, end
        self.kv, self.aux = geometry.zeros()
        self._rooms = self.aux[-1].view(np.uint64)
        if side == "prefill":
            for tensor, array in enumerate(self.kv):
                array[:] = geometry.source(tensor)
        pools = [kvcore.Pool.from_tensors("kv", self.kv, page_size=16), kvcore.Pool.from_tensors("aux", self.aux, page_size=1)]
        self.manager = kvcore.KVManager(kvcore.Config(role=side, backend=backend, host="127.0.0.1"), pools)
        if side == "prefill":
            end.send(self.manager.address)
        else:
            self._prefill = str(end.recv())
        self._alone = Alone(backend, side, pools, geometry, end)

    def close(self) -> None:
        """End."""
        self._alone.close()
        self.manager.close()

    # --- rooms

    def run_rooms(self, base: int, n: int, window: int, poll_us: float = 50) -> dict[str, Any]:
        """Carry ``n`` rooms, ``window`` at a time.

        ``t0, t1``: when it began and ended; ``cpu``: seconds of this process; ``lat``: seconds from opening to success, room by room;
        ``bad``: side records that are not the room's.
        """
        lat: list[float] = []
        active: dict[int, _Active] = {}
        free = collections.deque(range(window))
        lists = [self._pages(slot) for slot in range(window)]
        opened = bad = 0
        c0, t0 = time.process_time(), now()
        while opened < n or active:
            while opened < n and free:
                slot, room, at = free.popleft(), base + opened, now()
                active[room] = _Active(self._open(room, lists[slot]), slot, at)
                opened += 1
            turn = list(active.items())
            for (room, one), state in zip(turn, self.manager.poll_all([one.handle for _, one in turn]), strict=True):
                if state is KVPoll.SUCCESS:
                    lat.append(now() - one.opened)
                    one.handle.clear()
                    del active[room]
                    free.append(one.slot)
                    bad += self.side == "decode" and int(self._rooms[one.slot, 0]) != room
                elif state is KVPoll.FAILED:
                    one.handle.raise_for_failure()
                elif state is KVPoll.WAITING_FOR_INPUT and not one.sent:
                    one.sent = True
                    self._send(one.handle, room, lists[one.slot])
            if active:
                time.sleep(poll_us * 1e-6)
        t1, c1 = now(), time.process_time()
        return {"t0": t0, "t1": t1, "cpu": c1 - c0, "lat": lat, "bad": bad}

    def zero(self) -> None:
        """Forget what has arrived."""
        for array in self.kv:
            array[:] = 0

    def wrong_pages(self, slots: int) -> int:
        """Pages of the first slots that are not as they were sent."""
        return self._geometry.wrong_pages(self.kv, slots)

    def raw(self, n: int) -> dict[str, Any] | None:
        """Transfers of the engine alone, by the descriptors of slot 0."""
        return self._alone.raw(n)

    def _pages(self, slot: int) -> dict[str, Pages | list[int]]:
        return {"kv": self._geometry.listed(slot, self.side), "aux": [slot]}

    def _open(self, room: int, pages: dict[str, Pages | list[int]]) -> kvcore.Handle:
        if self.side == "prefill":
            return self.manager.sender(room)
        receiver = self.manager.receiver(room, prefill=self._prefill)
        receiver.receive(pages)
        return receiver

    def _send(self, handle: kvcore.Handle, room: int, pages: dict[str, Pages | list[int]]) -> None:
        if isinstance(handle, kvcore.Sender):
            self._rooms[pages["aux"][0], 0] = room
            handle.send(pages, last=True)

    # --- what it holds, and what it costs to hold it

    def sizes(self) -> dict[str, Any]:
        """Every store of the manager, and of the process memory in MiB, threads, file descriptors and objects."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        process = {
            "_rss_mb": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
            "_threads": len(os.listdir("/proc/self/task")),
            "_fds": len(os.listdir("/proc/self/fd")),
            "_gc_objects": len(gc.get_objects()),
            "_alive_threads": sorted(thread.name for thread in threading.enumerate()),
        }
        return dict(self.manager.stats().stores) | process

    def idle_cpu(self, secs: float) -> dict[str, float]:
        """Share of a core that this process takes while nothing moves, in per cent."""
        c0, t0 = time.process_time(), now()
        time.sleep(secs)
        return {"cpu_pct": (time.process_time() - c0) / (now() - t0) * 100}

    # --- aborts

    def abort_lat(self, base: int, n: int, kind: str, tmo: float = 20.0) -> list[Any]:
        """Abort ``n`` rooms one by one. ``kind``: ``recv`` or ``send``, who aborts; ``wait`` or ``inflight``, when.

        Who aborts gives, a room, the moment (the receiver with it: seconds of the call, the moment from which its pages are free, the
        state before), the other the moment at which it saw the end, None if it did not, and the state.
        """
        by, when = kind.split("_")
        run = self._abort_prefill if self.side == "prefill" else self._abort_decode
        return [run(room, by, when, tmo) for room in range(base, base + n)]

    def _abort_prefill(self, room: int, by: str, when: str, tmo: float) -> Any:
        sender = self.manager.sender(room)
        self._barrier()
        _until(partial(_may_send, sender), tmo)
        self._barrier()
        if when == "inflight":
            self._send(sender, room, self._pages(0))
            time.sleep(0.003 if self._geometry.pages > 1 else 0)
        result: Any
        if by == "send":
            result = now()
            sender.abort()
        else:
            at = _until(partial(_ended, sender), tmo)
            result = (at, sender.poll())
        self._barrier()
        sender.clear()
        self._barrier()
        return result

    def _abort_decode(self, room: int, by: str, when: str, tmo: float) -> Any:
        self._barrier()
        receiver = self._open(room, self._pages(0))
        self._barrier()
        result: Any
        if by == "recv":
            if when == "inflight":
                time.sleep(0.005)
            state, at = receiver.poll(), now()
            receiver.abort()
            called = now() - at
            result = (at, called, _until(receiver.is_release_safe, 5.0), state)
        else:
            at_end = _until(partial(_ended, receiver), tmo)
            result = (at_end, receiver.poll())
        self._barrier()
        receiver.clear()
        self._barrier()
        return result

    def leak(self, base: int, n: int, batch: int = 32) -> dict[str, Any]:
        """Carry ``n`` rooms that end in every way of ``KINDS``. How many did, by kind and state, and how many never ended."""
        counts: collections.Counter[str] = collections.Counter()
        for first in range(0, n, batch):
            rooms = [(base + first + slot, KINDS[(first + slot) % len(KINDS)], slot) for slot in range(min(batch, n - first))]
            (self._leak_prefill if self.side == "prefill" else self._leak_decode)(rooms, counts)
        time.sleep(SETTLE_S)
        stuck = sum(count for name, count in counts.items() if not KVPoll[name.rpartition(">")[2]].terminal)
        return {"counts": dict(sorted(counts.items())), "stuck": stuck}

    def _leak_prefill(self, rooms: list[tuple[int, str, int]], counts: collections.Counter[str]) -> None:
        handles = {room: self.manager.sender(room) for room, _, _ in rooms}
        self._barrier()  # senders exist
        self._barrier()  # receivers exist
        for room, kind, slot in rooms:
            sender = handles[room]
            if kind in ("ok", "send_abort_inflight", "send_abort_pre", "recv_abort_inflight"):
                _until(partial(_may_send, sender), 10.0)
                if kind != "send_abort_pre":
                    self._send(sender, room, self._pages(slot))
                if kind.startswith("send_abort"):
                    sender.abort()
        self._end(rooms, handles, counts)

    def _leak_decode(self, rooms: list[tuple[int, str, int]], counts: collections.Counter[str]) -> None:
        self._barrier()
        handles: dict[int, kvcore.Handle] = {}
        for room, kind, slot in rooms:
            if kind == "recv_abort_pre":
                handles[room] = self.manager.receiver(room, prefill=self._prefill)
            else:
                handles[room] = self._open(room, self._pages(slot))
            if kind in ("recv_abort_pre", "recv_abort_meta"):
                handles[room].abort()
        self._barrier()
        for room, kind, _ in rooms:
            if kind == "recv_abort_inflight":
                time.sleep(50e-6)
                handles[room].abort()
        self._end(rooms, handles, counts)

    def _end(self, rooms: list[tuple[int, str, int]], handles: Mapping[int, kvcore.Handle], counts: collections.Counter[str]) -> None:
        self._barrier()  # all is done to all
        for room, kind, _ in rooms:
            handle = handles[room]
            _until(partial(_ended, handle), 3.0)
            counts[f"{kind}->{handle.poll().name}"] += 1
            handle.clear()
        self._barrier()

    def _barrier(self) -> None:
        self._pipe.send(1)
        self._pipe.recv()


def _ended(handle: kvcore.Handle) -> bool:
    return handle.poll().terminal


def _may_send(handle: kvcore.Handle) -> bool:
    return handle.poll() is KVPoll.WAITING_FOR_INPUT or _ended(handle)


def _until(reached: Callable[[], bool], tmo: float) -> float | None:
    """The moment at which it was seen; None if it was not in time."""
    began = now()
    while not reached():
        if now() - began > tmo:
            return None
        time.sleep(STEP_S)
    return now()
