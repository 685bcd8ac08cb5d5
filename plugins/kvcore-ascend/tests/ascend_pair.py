"""The Ascend backend of this process, which can have one only, and peers in processes that can be frozen or killed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvcore_ascend import backend
from kvcore_ascend.backend import AscendBackend
from kvcore_ascend.options import AscendOptions

from kvcore.hookspecs import Peer
from tests import engine_nodes
from tests.engine_nodes import PAGE_BYTES, PAGES, Array, Guest

PROTOCOL = "host_rdma" if os.environ.get("KV_MEMTYPE") == "0" else "sdma"
"""What the environment is for: the fake driver calls all memory either device or host memory."""
LIBRARY = "libmf_smem.so"
GUEST = Path(__file__).with_name("ascend_guest.py")
backend.CLOSE_S = 60.0  # the engine takes seconds for each peer that it has met


class Node(engine_nodes.Node):
    """With options by name, and the protocol of the environment."""

    def __init__(self, side: str, arrays: list[Array], name: str = "", **options: Any) -> None:
        super().__init__(AscendBackend(), AscendOptions(**{"protocol": PROTOCOL, **options}), side, arrays, name)


class Stage(engine_nodes.Stage):
    """Whose nodes write, and whose guests may."""

    def node(self, side: str = "prefill", layers: int = 1, **options: Any) -> engine_nodes.Node:
        """The backend of this process."""
        return super().node(side, layers=layers, **options)

    def guest(self, side: str = "decode", session: str = "", pages: int = PAGES, **env: str) -> Guest:  # type: ignore[override]
        """A backend in another process; its memory is zero on decode, else random."""
        return super().guest(pages, PAGE_BYTES, side, session, **env)


def write(guest: Guest, to: Peer, mine: Sequence[int], theirs: Sequence[int]) -> str:
    """Have a guest write its pages to a peer; how that ended."""
    guest.tell({
        "id": to.id, "endpoint": to.endpoint.data.hex(), "regions": [[one.ptr, one.nbytes] for one in to.regions],
        "pages": to.pools[0].num_pages, "mine": list(mine), "theirs": list(theirs),
    })  # fmt: skip
    return str(guest.answer())


@contextmanager
def stage() -> Iterator[Stage]:
    with ExitStack() as stack:
        yield Stage(stack, Node, GUEST)
