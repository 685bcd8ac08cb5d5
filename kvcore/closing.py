"""How an instance lets go of its engine: within limits, also where hooks do not return, and with word of what still runs."""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

from kvcore.backend import Backend
from kvcore.logs import about
from kvcore.memory import Region
from kvcore.slow import SlowThread

log = logging.getLogger("kvcore.closing")

T = TypeVar("T")


def fenced(slow: SlowThread, backend: Backend, peers: Iterable[str], timeout_s: float) -> Iterator[str]:
    """Disconnect from peers, for so long in all, and name those of which that proves that they touch nothing here any more (R4)."""
    deadline = time.monotonic() + timeout_s
    for peer in peers:
        future = slow.run(functools.partial(backend.hooks.kvcore_disconnect, peer=peer))
        if not _ended(future, deadline - time.monotonic()):
            log.error("peer %s cannot be fenced; its pages stay unproven: kvcore_disconnect does not return", peer, extra=about(peer=peer))
            return
        if (error := future.exception()) is not None:
            log.error("peer %s cannot be fenced; its pages stay unproven", peer, exc_info=error, extra=about(peer=peer))
        elif future.result() is True:
            yield peer


def stopped(slow: SlowThread, backend: Backend, regions: Sequence[Region], timeout_s: float) -> bool:
    """Stop the engine; whether it has stopped, so that no transfer of it runs any more (R3)."""
    future = slow.run(lambda: backend.close(regions))
    return _ended(future, timeout_s) and future.result()


def joined(threads: Sequence[threading.Thread], timeout_s: float) -> bool:
    """Wait for threads, so long in all; whether they have ended."""
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def left(threads: Sequence[threading.Thread], at_work: bool) -> str:
    """What goes on after all was asked to end, in words: threads, with the hook that they are in, and perhaps the engine; "" if nothing."""
    told = ", ".join(f"{thread.name}{_hook(thread)}" for thread in threads if thread is not threading.current_thread())
    engine = "its engine may still be at work" if at_work else ""
    return " and ".join(filter(None, (engine, told and f"these threads still run: {told}")))


def _ended(future: Future[T], timeout_s: float) -> bool:
    wait([future], max(0.0, timeout_s))  # a hook may itself raise what a future raises when time is up
    return future.done()


def _hook(thread: threading.Thread) -> str:
    """Where among the hooks a thread is: `` in kvcore_close``."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code.co_name.startswith("kvcore_"):
            return f" in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
