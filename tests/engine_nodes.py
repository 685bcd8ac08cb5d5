"""Backends driven hook by hook, for the tests of plugins: in this process, and in processes that can be frozen or killed."""

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
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from pydantic import BaseModel

from kvcore import Pool, Region, Transfer
from kvcore.hookspecs import DONE, PENDING, Endpoint, OpenContext, Peer, TicketState
from kvcore.mapping import whole
from kvcore.planner import Layout, plan
from kvcore.states import RoomKey
from tests.helpers import ROOT, memory, wait_until

PAGES, PAGE_BYTES = 64, 4096
SOON_S = 20.0

Array = npt.NDArray[np.uint8]
numbers = itertools.count(1)


class Calls:
    """Counts calls of a class of an engine's, and lets a test answer them in its place."""

    def __init__(self, patch: pytest.MonkeyPatch, engine: type, *names: str, **answers: Callable[..., Any]) -> None:
        self.made: Counter[str] = Counter()
        for name in (*names, *answers):
            patch.setattr(engine, name, self._counted(name, answers.get(name, getattr(engine, name))))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.made[name] += 1
            return call(*args, **kwargs)

        return counted


def context(backend: str, side: str, name: str, pool: Pool, host: str = "127.0.0.1") -> OpenContext:
    return OpenContext(name, side, 0, host, host, logging.getLogger(f"kvcore.backends.{backend}"), (pool.geometry,))  # type: ignore[arg-type]


class Node:
    """A backend that is open in this process, with the pool ``kv`` registered."""

    def __init__(self, backend: Any, options: BaseModel, side: str, arrays: list[Array], name: str = "") -> None:
        self.name, self.arrays, self.backend = name or f"{side}-{os.getpid()}-{next(numbers)}", arrays, backend
        self.pool = Pool.from_tensors("kv", arrays, page_size=16)
        self.backend.kvcore_open(options, context(backend.kvcore_backend_info().name, side, self.name, self.pool))
        try:
            self.backend.kvcore_register(self.pool.regions)
        except BaseException:
            self.backend.kvcore_close()
            raise
        self.layout = Layout.of((self.pool.geometry,), self.pool.regions)

    def peer(self) -> Peer:
        """As others are told of it."""
        return Peer(self.name, self.backend.kvcore_endpoint(), self.pool.regions, (self.pool.geometry,))

    def transfer(self, mine: Sequence[int], theirs: Sequence[int], to: Peer) -> Transfer:
        """A transfer of pages as the core makes it."""
        here, there, remote = np.array(mine, np.int64), np.array(theirs, np.int64), Layout.of(to.pools, to.regions)
        parts = plan(self.layout, remote, {"kv": (here, there)}, whole((self.pool.geometry,))).descriptors()
        arrays = (parts.local_region, parts.remote_region, parts.local_offset, parts.remote_offset, parts.length)
        room = RoomKey("prefill", next(numbers), 0, 1)
        return Transfer(room, to.id, *arrays, self.layout.base, remote.base, 1, "kv", here, there)

    def post(self, mine: Sequence[int], theirs: Sequence[int], to: Peer) -> Any:
        """A ticket, or how it has ended already."""
        may_wait = {"may_wait": True} if "may_wait" in signature(self.backend.kvcore_transfer).parameters else {}
        return self.backend.kvcore_transfer(self.transfer(mine, theirs, to), **may_wait)

    def state(self, ticket: Any) -> TicketState:
        found: TicketState = ticket if isinstance(ticket, TicketState) else self.backend.kvcore_poll([ticket])[0]
        return found

    def ended(self, ticket: Any) -> TicketState:
        """Wait until a transfer has ended."""
        wait_until(lambda: self.state(ticket) is not PENDING, SOON_S)
        return self.state(ticket)

    def move(self, mine: Sequence[int], theirs: Sequence[int], to: Peer) -> TicketState:
        return self.ended(self.post(mine, theirs, to))

    def close(self) -> None:
        self.backend.kvcore_unregister(self.pool.regions)
        self.backend.kvcore_close()


class Guest:
    """A backend in a process of its own, which ``script`` opens; it takes and gives a line of JSON at a time. Its memory, one region, is
    seen here too, also while it stands still."""

    def __init__(self, script: Path, file: Path, shape: tuple[int, int], *arguments: str, **env: str) -> None:
        self.array = np.memmap(file, np.uint8, "w+", shape=shape)
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(file), *map(str, shape), *arguments],
            env={**os.environ, "PYTHONPATH": python_path(), **env},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.told = self.answer()
        self.peer = self._peer()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _peer(self) -> Peer:
        pages, page_bytes = self.array.shape
        pool = Pool("kv", [Region(self.told["ptr"], pages * page_bytes)], num_pages=pages, page_size=16, dtype="uint8")
        endpoint = Endpoint(bytes.fromhex(self.told["data"]), [bytes.fromhex(key) for key in self.told.get("keys", ())])
        return Peer(self.told["name"], endpoint, pool.regions, (pool.geometry,))

    def answer(self) -> Any:
        """The next line that it says."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], SOON_S)[0]:
            self.kill()
            raise AssertionError(f"the guest has not answered within {SOON_S:g} s")
        return json.loads(self._process.stdout.readline())

    def tell(self, order: object) -> None:
        """Say a line to it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def freeze(self) -> None:
        """SIGSTOP, and wait until it has really stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. Idempotent."""
        self._process.kill()
        self._process.wait(SOON_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def order(self, what: str) -> None:
        """Have it ``unregister`` or ``register`` its memory (see ``serve``); ``peer`` is how it is reached then."""
        self.tell(what)
        self.told = self.answer()
        self.peer = self._peer()


def serve(backend: Any, options: BaseModel) -> None:
    """A guest's process: opens a backend over the file's memory, says how it is reached, and does what it is ordered."""
    file, pages, page_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    pool = Pool.from_tensors("kv", [np.memmap(file, np.uint8, "r+", shape=(pages, page_bytes))], page_size=16)
    name = Path(file).name
    backend.kvcore_open(options, context(backend.kvcore_backend_info().name, "decode", name, pool))
    backend.kvcore_register(pool.regions)
    for order in itertools.chain(['"begin"'], sys.stdin):
        if json.loads(order) == "unregister":
            backend.kvcore_unregister(pool.regions)
        elif json.loads(order) == "register":
            backend.kvcore_register(pool.regions)
        endpoint = backend.kvcore_endpoint()
        told = {"name": name, "data": endpoint.data.hex(), "keys": [key.hex() for key in endpoint.keys], "ptr": pool.regions[0].ptr}
        print(json.dumps(told), flush=True)
    backend.kvcore_close()


class Stage:
    """The backend that writes, and whom it writes to; all ended with the test. ``make`` is the plugin's own node, ``script`` a guest's."""

    def __init__(self, stack: ExitStack, make: Callable[..., Node], script: Path) -> None:
        self._stack, self._make, self._script = stack, make, script
        self._folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcore-"))

    def node(self, side: str = "decode", pages: int = PAGES, page_bytes: int = PAGE_BYTES, layers: int = 1, **options: Any) -> Node:
        """A backend in this process: its memory is zero on decode, else random."""
        node = self._make(side, memory(pages, layers, page_bytes, seed=None if side == "decode" else 3), **options)
        self._stack.callback(node.close)
        return node

    def guest(self, pages: int = PAGES, page_bytes: int = PAGE_BYTES, *arguments: str, name: str = "", **env: str) -> Guest:
        """A backend in another process."""
        file = Path(self._folder, name or f"guest-{next(numbers)}")
        guest = Guest(self._script, file, (pages, page_bytes), *arguments, **env)
        self._stack.callback(guest.kill)
        return guest

    def writer(self, guest: Guest, **options: Any) -> Node:
        """A prefill node that is connected to a guest and has written to it once."""
        node = self.node("prefill", *guest.array.shape, **options)
        self.joined(node, guest)
        return node

    def joined(self, node: Node, guest: Guest) -> Guest:
        """A guest that a node is connected to and has written to once."""
        node.backend.kvcore_connect(guest.peer)
        assert node.move([0], [0], guest.peer) == DONE
        guest.array[:] = 0
        return guest


def python_path(*folders: Path) -> str:
    """For a process that imports from the checkout, and from these folders."""
    return os.pathsep.join([str(ROOT), *map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def resources(process: int | str = "self") -> tuple[int, int]:
    """Open files and threads of a process, those of the engine included."""
    return len(os.listdir(f"/proc/{process}/fd")), len(os.listdir(f"/proc/{process}/task"))


def within(most: tuple[int, int], more: int = 0) -> bool:
    """Whether no more is open in this process, and no more threads run, than then."""
    return all(now <= then + more for now, then in zip(resources(), most, strict=True))


def settles(most: tuple[int, int], more: int = 0) -> None:
    """Wait until it is so; a thread that has ended is seen for a moment more."""
    wait_until(lambda: within(most, more), what=f"files and threads within {most} and {more} more")
