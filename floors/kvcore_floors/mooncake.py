"""Mooncake by itself, for ``kvcore bench``: what the backend is measured against. No manager imports this."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from kvcore_mooncake import native
from kvcore_mooncake.options import MooncakeOptions

from kvcore.hookspecs import Endpoint, OpenContext, Peer, Transfer
from kvcore.memory import Region

Columns = tuple[list[int], list[int], list[int]]
"""Local addresses, remote addresses and lengths, as the engine takes them."""


class MooncakeFloor:
    """An engine of its own. ``ways``: a batch that waits, or parts of it on threads; batches waited for later; a write per descriptor."""

    ways = ("batch", "batch, 2 threads", "batch, 4 threads", "async", "submit")

    def open(self, options: MooncakeOptions, context: OpenContext, regions: Sequence[Region]) -> Endpoint:
        """Start an engine as the backend does."""
        _, self._engine, name = native.start(options, context)
        self._accept(self._engine.batch_register_memory([one.ptr for one in regions], [one.nbytes for one in regions]))
        return Endpoint(name.encode())

    def connect(self, peer: Peer) -> None:
        """Note decode's name; the engine connects by itself."""
        self._peer = peer.endpoint.data.decode()

    def prepare(self, way: str, transfers: Sequence[Transfer], at_once: int) -> Callable[[], None]:
        """What posts, and waits until all is done."""
        kind, _, threads = way.partition(", ")
        if kind in ("submit", "async"):
            return partial(self._submit if kind == "submit" else self._async, [_columns([each]) for each in transfers], at_once)
        groups = [_columns(transfers[first : first + at_once]) for first in range(0, len(transfers), at_once)]
        if not threads:
            return partial(self._batches, groups)
        count = int(threads.partition(" ")[0])
        return partial(self._shared, [list(_shares(group, count)) for group in groups], count)

    def serve(self, stop: threading.Event) -> None:
        """The engine's own threads take in what is written."""

    def close(self) -> None:
        """Drop the engine, which has no other end."""
        self._engine = None

    def _batch(self, columns: Columns) -> None:
        self._accept(self._engine.batch_transfer_sync_write(self._peer, *columns))

    def _batches(self, groups: Sequence[Columns]) -> None:
        for group in groups:
            self._batch(group)

    def _shared(self, groups: Sequence[Sequence[Columns]], count: int) -> None:
        with ThreadPoolExecutor(count) as pool:
            for group in groups:
                list(pool.map(self._batch, group))

    def _async(self, transfers: Sequence[Columns], at_once: int) -> None:
        running: deque[int] = deque()
        for transfer in transfers:
            if len(running) == at_once:
                self._accept(self._engine.get_batch_transfer_status([running.popleft()]))
            running.append(self._posted(self._engine.batch_transfer_async_write(self._peer, *transfer)))
        self._accept(self._engine.get_batch_transfer_status(list(running)))

    def _submit(self, transfers: Sequence[Columns], at_once: int) -> None:
        running: deque[list[int]] = deque()
        for transfer in transfers:
            if len(running) == at_once:
                self._wait(running.popleft())
            rows = zip(*transfer, strict=True)
            running.append([self._posted(self._engine.transfer_submit_write(self._peer, *row)) for row in rows])
        for writes in running:
            self._wait(writes)

    def _wait(self, writes: Sequence[int]) -> None:
        for write in writes:
            while not (code := self._engine.transfer_check_status(write)):
                pass
            self._accept(code - 1)

    def _posted(self, number: int) -> int:
        if not number:
            raise RuntimeError(f"Mooncake did not take a write to {self._peer}")
        return number

    def _accept(self, code: int) -> None:
        if code:
            raise RuntimeError(f"Mooncake reports {native.meaning(code)}")


def _columns(transfers: Sequence[Transfer]) -> Columns:
    arrays = [(one.local_address, one.remote_address, one.length) for one in transfers]
    local, remote, length = (np.concatenate(column).tolist() for column in zip(*arrays, strict=True))
    return local, remote, length


def _shares(columns: Columns, count: int) -> Iterator[Columns]:
    for first in range(min(count, len(columns[0]))):
        local, remote, length = (column[first::count] for column in columns)
        yield local, remote, length
