"""A mori backend that writes, and peers that are written to, in this process or in one that can be frozen or killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from kvcore_mori import native
from kvcore_mori.backend import Job, MoriBackend
from kvcore_mori.options import MoriOptions

from kvcore.hookspecs import PENDING
from tests import engine_nodes
from tests.engine_nodes import Array, Guest


class Calls(engine_nodes.Calls):
    """Of one of mori's classes, by its name."""

    def __init__(self, patch: pytest.MonkeyPatch, kind: str, *names: str, **answers: Callable[..., Any]) -> None:
        self.kind = getattr(native.load()[0], kind)
        super().__init__(patch, self.kind, *names, **answers)


class Node(engine_nodes.Node):
    """With options by name."""

    def __init__(self, side: str, arrays: list[Array], name: str = "", **options: Any) -> None:
        super().__init__(MoriBackend(), MoriOptions(**options), side, arrays, name)


class Stage(engine_nodes.Stage):
    """With a guest towards which a write stays in flight."""

    def in_flight(self, node: engine_nodes.Node, guest: Guest) -> Job:
        """A write of everything to a guest that stands still; it is the guest's process that the shim has take bytes in."""
        guest.freeze()
        job = node.post(range(len(guest.array)), range(len(guest.array)), guest.peer)
        assert isinstance(job, Job) and node.state(job) is PENDING
        return job


@contextmanager
def stage() -> Iterator[Stage]:
    with ExitStack() as stack:
        yield Stage(stack, Node, Path(__file__).with_name("mori_guest.py"))
