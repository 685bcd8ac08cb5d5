"""What both sides of the demo do with their rooms."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Sequence

import kvcore
from kvcore import registry
from kvcore.demo.messages import Ended, Stores, Used
from kvcore.demo.models import Loaded
from kvcore.handles import Handle
from kvcore.integrations.transformers import PagedKV
from kvcore.sides import ToolError

EMPTY_S = 60.0
"""How long what C7 allows to outlast ``clear`` may take to go."""


def limits(patience_s: float) -> kvcore.Limits:
    """Rooms may take as long as the demo has patience; one that fails should say so, not wait for its rooms to end by themselves."""
    return kvcore.Limits(bootstrap_s=patience_s, input_s=patience_s, transfer_s=patience_s, drain_s=1.0)


def abort_pages(lengths: Sequence[int], page_size: int) -> int:
    """Pages of the room that is aborted half-way: those of the longest prompt, but two at least, so that it has halves."""
    return max(2, max(context_pages(length, page_size) for length in lengths))


def context_pages(length: int, page_size: int) -> int:
    """Pages of a prompt of ``length`` tokens: the last token is not in them, decode computes it itself."""
    return -(-(length - 1) // page_size)


def pool_for(loaded: Loaded, page_size: int, lengths: Sequence[int], seed: int, topology: kvcore.Topology) -> PagedKV:
    """A pool that holds all prompts at once, the heads of one rank of them, and hands its pages out in no order, as after a long day's
    work."""
    num_pages = sum(context_pages(length, page_size) for length in lengths) + abort_pages(lengths, page_size)
    tp_size, tp_rank = topology.tp_size, topology.tp_rank
    kv = PagedKV(loaded.model.config, num_pages=num_pages, page_size=page_size, tp_size=tp_size, tp_rank=tp_rank)
    pages = kv.allocate(num_pages)
    random.Random(seed).shuffle(pages)
    kv.free(pages)
    return kv


def succeeded(handle: Handle, patience_s: float) -> None:
    """Wait until a room has succeeded; raises its failure, or ``ToolError`` if it takes too long."""
    state = handle.wait(patience_s)
    handle.raise_for_failure()
    if state is not kvcore.KVPoll.SUCCESS:
        raise ToolError(f"room {handle.room} is still {state.name} after {patience_s:g} s; see what the backend is doing")


def ended(handle: Handle) -> Ended:
    """How a room has ended, for the driver."""
    state, failure = handle.poll(), handle.failure
    if failure is None:
        return Ended(state.name, "", "", "")
    return Ended(state.name, failure.reason, failure.code.value, failure.side)


def clear_all(manager: kvcore.KVManager, kv: PagedKV, rooms: Sequence[tuple[Handle, list[int]]], patience_s: float) -> Stores:
    """Clear every room and free its pages, then wait until the manager holds nothing of any; what it still holds in the end."""
    for handle, pages in rooms:
        handle.clear()
        if not handle.wait_release_safe(patience_s):
            raise ToolError(f"pages of room {handle.room} may still be in use after {patience_s:g} s; see what the backend is doing")
        kv.free(pages)
    pause = threading.Event()
    deadline = time.monotonic() + EMPTY_S
    while any(_sizes(manager).values()) and time.monotonic() < deadline:
        pause.wait(0.05)
    return Stores(_sizes(manager))


def used(backend: str) -> Used:
    """What moved the pages, for the driver. A backend that tells no facts is its own engine."""
    plugins, _, info = registry.plugin_manager(kvcore.load_backend(backend))
    engine = next((fact.value for fact in plugins.hook.kvcore_facts() if fact.name == "engine"), f"{info.name} {info.version}")
    imported = (one.name for one in kvcore.list_backends() if one.entry_point.partition(":")[0] in sys.modules)
    return Used(engine, tuple(imported))


def _sizes(manager: kvcore.KVManager) -> dict[str, int]:
    stats = manager.stats()
    return {name: stats.stores[name] for name in sorted(stats.room_stores)}
