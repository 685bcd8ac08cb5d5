"""A start that must fail, in a child process: memory that the engine does not take, and memory of a kind that nobody declared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import kvcore
from kvcore.memory import Region

if TYPE_CHECKING:
    from kvcore_conformance.child.worker import Worker

CODE = 13


class Sabotage:
    """Of managers over a backend that this process starts."""

    def __init__(self, worker: Worker, backend: str) -> None:
        self._worker, self._backend = worker, kvcore.load_backend(backend)
        self._register = vars(self._backend).get("kvcore_register")

    def registration(self) -> None:
        """Have every registration fail once all was registered, until ``over``."""
        whole: Any = self._backend
        original = whole.kvcore_register

        @kvcore.hookimpl
        def kvcore_register(self: object, regions: Sequence[Region]) -> None:
            original(self, regions)
            raise OSError(CODE, "the engine says no")

        whole.kvcore_register = kvcore_register

    def over(self) -> None:
        """Let registrations be."""
        whole: Any = self._backend
        if self._register is None:
            del whole.kvcore_register
        else:
            whole.kvcore_register = self._register

    def start_on(self, device: str, config: dict[str, Any], pools: list[dict[str, Any]]) -> None:
        """Start a manager whose pools are said to lie on a device; closed again if that works."""
        plain = [self._worker.pool(**pool, seed=0) for pool in pools]
        moved = [
            kvcore.Pool(
                pool.name, [replace(region, device=device) for region in pool.regions], num_pages=pool.num_pages,
                page_size=pool.page_size, dtype=pool.dtype,
            )
            for pool in plain
        ]  # fmt: skip
        kvcore.KVManager(kvcore.Config(**config), moved).close()
