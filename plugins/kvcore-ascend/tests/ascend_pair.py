"""Backends driven hook by hook: one in this process, which can have one only, and peers in processes that can be frozen or killed."""

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from kvcore_ascend import backend
from kvcore_ascend.backend import AscendBackend
from kvcore_ascend.options import AscendOptions

from kvcore import Pool, Region, Transfer
from kvcore.hookspecs import DONE, Endpoint, OpenContext, Peer, TicketState
from kvcore.planner import Layout, plan
from kvcore.states import RoomKey
from tests.helpers import ROOT, memory

PROTOCOL = "host_rdma" if os.environ.get("KV_MEMTYPE") == "0" else "sdma"
"""What the environment is for: the fake driver calls all memory either device or host memory."""
PAGES, PAGE_BYTES = 64, 4096
SOON_S = 20.0
LIBRARY = "libmf_smem.so"
backend.CLOSE_S = 60.0  # the engine takes seconds for each peer that it has met

Array = npt.NDArray[np.uint8]
_numbers = itertools.count(1)


def context(side: str, name: str, pool: Pool, host: str = "127.0.0.1") -> OpenContext:
    return OpenContext(name, side, 0, host, host, logging.getLogger("kvcore.backends.ascend"), (pool.geometry,))


class Node:
    """A backend that is open in this process, with the pool ``kv`` registered."""

    def __init__(self, side: str, arrays: list[Array], name: str = "", **options: Any) -> None:
        self.name, self.arrays, self.backend = name or f"{side}-{os.getpid()}-{next(_numbers)}", arrays, AscendBackend()
        self.pool = Pool.from_tensors("kv", arrays, page_size=16)
        self.backend.kvcore_open(AscendOptions(**{"protocol": PROTOCOL, **options}), context(side, self.name, self.pool))
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
        there = Layout.of(to.pools, to.regions)
        parts = plan(self.layout, there, {"kv": (np.array(mine, np.int64), np.array(theirs, np.int64))})
        arrays = (parts.local_region, parts.remote_region, parts.local_offset, parts.remote_offset, parts.length)
        return Transfer(RoomKey("prefill", next(_numbers), 0, 1), to.id, *arrays, self.layout.base, there.base)

    def move(self, mine: Sequence[int], theirs: Sequence[int], to: Peer) -> TicketState:
        return self.backend.kvcore_transfer(self.transfer(mine, theirs, to))

    def close(self) -> None:
        self.backend.kvcore_unregister(self.pool.regions)
        self.backend.kvcore_close()


class Guest:
    """A backend in a process of its own. Its memory is seen here too, also while it stands still."""

    def __init__(self, folder: str, side: str, env: Mapping[str, str], session: str) -> None:
        file = Path(folder, f"guest-{next(_numbers)}")
        self.array = np.memmap(file, np.uint8, "w+", shape=(PAGES, PAGE_BYTES))
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("ascend_guest.py")), str(file), side, session],
            env={**os.environ, "PYTHONPATH": str(ROOT), **env}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        told = self._answer()
        pool = Pool("kv", [Region(told["ptr"], PAGES * PAGE_BYTES)], num_pages=PAGES, page_size=16, dtype="uint8")
        self.session = told["session"]
        self.peer = Peer(told["name"], Endpoint(bytes.fromhex(told["endpoint"])), pool.regions, (pool.geometry,))

    @property
    def pid(self) -> int:
        return self._process.pid

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], SOON_S)[0]:
            self.kill()
            raise AssertionError(f"the guest has not answered within {SOON_S:g} s")
        return json.loads(self._process.stdout.readline())

    def write(self, to: Peer, mine: Sequence[int], theirs: Sequence[int]) -> str:
        """Have it write its pages to a peer; how that ended."""
        assert self._process.stdin is not None
        command = {
            "id": to.id, "endpoint": to.endpoint.data.hex(), "regions": [[one.ptr, one.nbytes] for one in to.regions],
            "pages": to.pools[0].num_pages, "mine": list(mine), "theirs": list(theirs),
        }  # fmt: skip
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return str(self._answer())

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
    """The backend of this process and its peers; all ended with the test."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcore-"))

    def node(self, side: str = "prefill", layers: int = 1, **options: Any) -> Node:
        """The backend of this process: on prefill its memory is random, otherwise zero."""
        node = Node(side, memory(PAGES, layers, PAGE_BYTES, seed=3 if side == "prefill" else None), **options)
        self._stack.callback(node.close)
        return node

    def guest(self, side: str = "decode", session: str = "", **env: str) -> Guest:
        """A backend in another process; its memory is zero on decode, else random."""
        guest = Guest(self._folder, side, env, session)
        self._stack.callback(guest.kill)
        return guest

    def joined(self, node: Node, guest: Guest) -> Guest:
        """A guest that a node is connected to."""
        node.backend.kvcore_connect(guest.peer)
        assert node.move([0], [0], guest.peer) == DONE
        guest.array[:] = 0
        return guest


@contextmanager
def stage() -> Iterator[Stage]:
    with ExitStack() as stack:
        yield Stage(stack)


def resources(process: int | str = "self") -> tuple[int, int]:
    """Open files and threads of a process, those of the engine included."""
    return len(os.listdir(f"/proc/{process}/fd")), len(os.listdir(f"/proc/{process}/task"))
