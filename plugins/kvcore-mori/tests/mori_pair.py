"""Backends driven hook by hook: one that writes, and peers that are written to, in this process or in one that can be frozen or killed."""

from __future__ import annotations

import itertools
import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kvcore_mori import native
from kvcore_mori.backend import Job, MoriBackend
from kvcore_mori.options import MoriOptions

from kvcore import Pool, Region, TicketState, Transfer
from kvcore.hookspecs import PENDING, Endpoint, OpenContext, Peer
from kvcore.planner import Layout, plan
from kvcore.states import RoomKey
from tests.helpers import ROOT, memory, wait_until

PAGES, PAGE_BYTES = 64, 4096
SOON_S = 20.0

Array = npt.NDArray[np.uint8]
_numbers = itertools.count(1)


class Calls:
    """Counts calls of mori, and lets a test answer them in its place: ``Calls(patch, "IOEngineSession", "batch_write")``."""

    def __init__(self, patch: pytest.MonkeyPatch, kind: str, *names: str, **answers: Callable[..., Any]) -> None:
        self.made: Counter[str] = Counter()
        self.kind = getattr(native.load()[0], kind)
        for name in (*names, *answers):
            patch.setattr(self.kind, name, self._counted(name, answers.get(name, getattr(self.kind, name))))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self.made[name] += 1
            return call(*args)

        return counted


def context(side: str, name: str, pool: Pool, host: str = "127.0.0.1") -> OpenContext:
    return OpenContext(name, side, 0, host, host, logging.getLogger("kvcore.backends.mori"), (pool.geometry,))


class Node:
    """A backend that is open in this process, with the pool ``kv`` registered."""

    def __init__(self, side: str, arrays: list[Array], name: str = "", **options: Any) -> None:
        self.name, self.arrays, self.backend = name or f"{side}-{next(_numbers)}", arrays, MoriBackend()
        self.pool = Pool.from_tensors("kv", arrays, page_size=16)
        self.backend.kvcore_open(MoriOptions(**options), context(side, self.name, self.pool))
        self.backend.kvcore_register(self.pool.regions)
        self.layout = Layout.of((self.pool.geometry,), self.pool.regions)

    def peer(self) -> Peer:
        """As others are told of it."""
        return Peer(self.name, self.backend.kvcore_endpoint(), self.pool.regions, (self.pool.geometry,))

    def transfer(self, mine: Sequence[int], theirs: Sequence[int], to: Peer) -> Transfer:
        """A transfer of pages as the core makes it."""
        there = Layout.of(to.pools, to.regions)
        parts = plan(self.layout, there, {"kv": (np.array(mine, np.int64), np.array(theirs, np.int64))})
        arrays = (parts.local_region, parts.remote_region, parts.local_offset, parts.remote_offset, parts.length)
        return Transfer(RoomKey("prefill", next(_numbers), 0, 1), to.id, *arrays, self.layout.base, there.base)

    def post(self, mine: Sequence[int], theirs: Sequence[int], to: Peer) -> Job | TicketState:
        return self.backend.kvcore_transfer(self.transfer(mine, theirs, to))  # type: ignore[return-value]

    def state(self, job: Job | TicketState) -> TicketState:
        return self.backend.kvcore_poll([job])[0] if isinstance(job, Job) else job

    def ended(self, job: Job | TicketState) -> TicketState:
        """Wait until a transfer has ended."""
        wait_until(lambda: self.state(job) is not PENDING, SOON_S)
        return self.state(job)

    def move(self, mine: Sequence[int], theirs: Sequence[int], to: Peer) -> TicketState:
        return self.ended(self.post(mine, theirs, to))

    def close(self) -> None:
        self.backend.kvcore_unregister(self.pool.regions)
        self.backend.kvcore_close()


class Guest:
    """A backend in a process of its own that is written to. Its memory, one region, is seen here too, also while it stands still."""

    def __init__(self, folder: str, pages: int, page_bytes: int, name: str = "") -> None:
        file = Path(folder, name or f"guest-{next(_numbers)}")
        self.array = np.memmap(file, np.uint8, "w+", shape=(pages, page_bytes))
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("mori_guest.py")), str(file), str(pages), str(page_bytes)],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.peer = self._told()

    def _told(self) -> Peer:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], SOON_S)[0]:
            self.kill()
            raise AssertionError(f"the guest has not answered within {SOON_S:g} s")
        told = json.loads(self._process.stdout.readline())
        pages, page_bytes = self.array.shape
        pool = Pool("kv", [Region(told["ptr"], pages * page_bytes)], num_pages=pages, page_size=16, dtype="uint8")
        endpoint = Endpoint(bytes.fromhex(told["data"]), [bytes.fromhex(key) for key in told["keys"]])
        return Peer(told["name"], endpoint, pool.regions, (pool.geometry,))

    def order(self, what: str) -> None:
        """Have it ``unregister`` or ``register`` its memory; ``peer`` is how it is reached then."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n".encode())
        self._process.stdin.flush()
        self.peer = self._told()

    def freeze(self) -> None:
        """SIGSTOP, and wait until it has really stopped."""
        os.kill(self._process.pid, signal.SIGSTOP)
        _, status = os.waitpid(self._process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def thaw(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. Idempotent."""
        self._process.kill()
        self._process.wait(SOON_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class Stage:
    """The backend that writes, and whom it writes to; all ended with the test."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcore-"))

    def node(self, side: str = "decode", pages: int = PAGES, page_bytes: int = PAGE_BYTES, layers: int = 1, **options: Any) -> Node:
        """A backend in this process: on prefill its memory is random, on decode zero."""
        node = Node(side, memory(pages, layers, page_bytes, seed=3 if side != "decode" else None), **options)
        self._stack.callback(node.close)
        return node

    def guest(self, pages: int = PAGES, page_bytes: int = PAGE_BYTES, name: str = "") -> Guest:
        """A backend in another process."""
        guest = Guest(self._folder, pages, page_bytes, name)
        self._stack.callback(guest.kill)
        return guest

    def writer(self, guest: Guest, **options: Any) -> Node:
        """A prefill node that is connected to a guest and has written to it once."""
        node = self.node("prefill", *guest.array.shape, **options)
        node.backend.kvcore_connect(guest.peer)
        assert node.move([0], [0], guest.peer).kind.value == "done"
        guest.array[:] = 0
        return node

    def in_flight(self, node: Node, guest: Guest) -> Job:
        """A write of everything to a guest that stands still; it is the guest's process that the shim has take bytes in."""
        guest.freeze()
        job = node.post(range(len(guest.array)), range(len(guest.array)), guest.peer)
        assert isinstance(job, Job) and node.state(job) is PENDING
        return job


@contextmanager
def stage() -> Iterator[Stage]:
    with ExitStack() as stack:
        yield Stage(stack)


def resources(process: int | str = "self") -> tuple[int, int]:
    """Open files and threads of a process, those of the engine included."""
    return len(os.listdir(f"/proc/{process}/fd")), len(os.listdir(f"/proc/{process}/task"))
