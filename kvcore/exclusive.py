"""Hooks of an ``exclusive`` backend: one lock around them all, so that none runs beside another (B5)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import cast

from kvcore.hookspecs import Hooks

PATIENCE_S = 0.02
SLOW = frozenset(
    {"kvcore_open", "kvcore_register", "kvcore_unregister", "kvcore_endpoint", "kvcore_connect", "kvcore_disconnect", "kvcore_close"}
)


class HookBusy(Exception):
    """Another hook of an exclusive backend is still running; nothing was called, ask again later."""


class OneAtATime:
    """Stands for the hooks. Slow ones wait for their turn; the others raise ``HookBusy`` after ``PATIENCE_S``.

    The progress thread keeps the limits of all tickets, so it must not hang on the lock when a transfer is stuck.
    """

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Callable[..., object]:
        return partial(self._call, name)

    def _call(self, name: str, **arguments: object) -> object:
        if not self._lock.acquire(timeout=-1 if name in SLOW else PATIENCE_S):
            raise HookBusy(f"{name} waits for another hook of this exclusive backend to return")
        try:
            return cast("Callable[..., object]", getattr(self._hooks, name))(**arguments)
        finally:
            self._lock.release()
