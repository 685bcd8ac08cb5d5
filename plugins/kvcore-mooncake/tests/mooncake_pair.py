"""A mooncake backend that writes, and peers that are written to, in this process or in one that can be frozen or killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from kvcore_mooncake import native
from kvcore_mooncake.backend import Job, MooncakeBackend
from kvcore_mooncake.options import MooncakeOptions

from tests import engine_nodes
from tests.engine_nodes import Array, Guest
from tests.helpers import wait_until

BIG = (512, 128 * 1024)
"""64 MiB: more than what sockets take up."""


class Calls(engine_nodes.Calls):
    """Of Mooncake's engine."""

    def __init__(self, patch: pytest.MonkeyPatch, *names: str, **answers: Callable[..., Any]) -> None:
        self.engine = native.load()[0].TransferEngine
        super().__init__(patch, self.engine, *names, **answers)


class Node(engine_nodes.Node):
    """With options by name."""

    def __init__(self, side: str, arrays: list[Array], name: str = "", **options: Any) -> None:
        super().__init__(MooncakeBackend(), MooncakeOptions(**options), side, arrays, name)


class Stage(engine_nodes.Stage):
    """With a guest that can be caught in the middle of a write."""

    def in_flight(self, node: engine_nodes.Node, guest: Guest) -> Job:
        """A write of everything, in the middle of which the guest stands still."""
        pages = range(len(guest.array))
        for _ in range(12):
            guest.array[:] = 0
            job = node.post(pages, pages, guest.peer)
            wait_until(lambda: bool(guest.array[0, 0]))
            guest.freeze()
            if isinstance(job, Job) and not guest.array[-1].any():
                return job
            guest.thaw()
            node.ended(job)
        raise AssertionError("no write was caught in the middle: they do not stay in flight")


@contextmanager
def stage() -> Iterator[Stage]:
    with ExitStack() as stack:
        yield Stage(stack, Node, Path(__file__).with_name("mooncake_guest.py"))
