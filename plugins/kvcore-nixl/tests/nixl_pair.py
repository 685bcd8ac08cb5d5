"""Two backends in this process, driven hook by hook: what is in flight stays so until a test drives the side that it goes to."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from kvcore_nixl import native
from kvcore_nixl.backend import Job, NixlBackend
from kvcore_nixl.options import NixlOptions

from kvcore import TicketState, Transfer
from kvcore.hookspecs import PENDING
from kvcore.mapping import whole
from kvcore.planner import plan
from kvcore.states import RoomKey
from tests import engine_nodes
from tests.engine_nodes import Array, numbers
from tests.helpers import memory, wait_until

PAGES, LAYERS, PAGE_BYTES = 64, 2, 4096
BIG = {"pages": 256, "page_bytes": 64 * 1024}
"""32 MiB: more than what sockets take up."""


class Calls(engine_nodes.Calls):
    """Of NIXL's agents."""

    def __init__(self, patch: pytest.MonkeyPatch, *names: str) -> None:
        super().__init__(patch, native.load()[0].nixl_agent, *names)


class Node(engine_nodes.Node):
    """With options by name."""

    def __init__(self, side: str, name: str, arrays: list[Array], **options: Any) -> None:
        super().__init__(NixlBackend(), NixlOptions(**options), side, arrays, name)
        self.open = True

    def fill(self, value: int) -> None:
        for array in self.arrays:
            array[:] = value

    def close(self) -> None:
        self.open = False
        super().close()


@dataclass
class Pair:
    """A backend that writes and one that is written to, connected."""

    prefill: Node
    decode: Node
    others: list[Node] = field(default_factory=list)

    def transfer(self, mine: Sequence[int], theirs: Sequence[int], to: Node | None = None) -> Transfer:
        """A transfer of pages as the core makes it."""
        to = to or self.decode
        here, there = self.prefill.pool.indices(mine), to.pool.indices(theirs)
        parts = plan(self.prefill.layout, to.layout, {"kv": (here, there)}, whole((to.pool.geometry,))).descriptors()
        arrays = (parts.local_region, parts.remote_region, parts.local_offset, parts.remote_offset, parts.length)
        room = RoomKey("prefill", next(numbers), 0, 1)
        return Transfer(room, to.name, *arrays, self.prefill.layout.base, to.layout.base, 1, "kv", here, there)

    def post(self, mine: Sequence[int], theirs: Sequence[int], to: Node | None = None) -> Job | TicketState:
        return self.prefill.backend.kvcore_transfer(self.transfer(mine, theirs, to), may_wait=True)

    def in_flight(self) -> Job:
        """A write of all pages of which the other side has taken in nothing yet."""
        job = self.post(range(len(self.prefill.arrays[0])), range(len(self.decode.arrays[0])))
        assert isinstance(job, Job) and self.state(job) is PENDING
        return job

    def state(self, job: Job | TicketState) -> TicketState:
        return self.prefill.backend.kvcore_poll([job])[0] if isinstance(job, Job) else job

    def ended(self, job: Job | TicketState, to: Node | None = None) -> TicketState:
        """Drive both sides until a write has ended."""
        wait_until(lambda: self._drive(to or self.decode) and self.state(job) is not PENDING)
        return self.state(job)

    def _drive(self, to: Node) -> bool:
        for node in (to, self.prefill):
            if node.open:
                node.backend.kvcore_progress()
        return True

    def drive(self, seconds: float) -> None:
        """Drive both sides for a time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._drive(self.decode)

    def equal(self, mine: Sequence[int], theirs: Sequence[int]) -> bool:
        both = zip(self.prefill.arrays, self.decode.arrays, strict=True)
        return all(np.array_equal(a[list(mine)], b[list(theirs)]) for a, b in both)


@contextmanager
def pair(pages: int = PAGES, page_bytes: int = PAGE_BYTES, side: str = "prefill", **options: Any) -> Iterator[Pair]:
    """A connected pair over whatever transports the environment says; closed at the end, if a test has not done so."""
    number = next(numbers)
    prefill = Node(side, f"prefill-{number}", memory(pages, LAYERS, page_bytes, seed=3), **options)
    decode = Node("decode", f"decode-{number}", memory(pages, LAYERS, page_bytes), **options)
    both = Pair(prefill, decode)
    try:
        prefill.backend.kvcore_connect(decode.peer())
        first = both.ended(both.post([0], [0]))  # has the connection made
        assert first.kind.value == "done", first
        decode.fill(0)
        yield both
    finally:
        for node in (prefill, decode, *both.others):
            node.close()
