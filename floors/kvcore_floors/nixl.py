"""NIXL by itself, for ``kvcore bench``: what the backend is measured against. No manager imports this."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from kvcore_nixl import native
from kvcore_nixl.options import NixlOptions

from kvcore.hookspecs import Endpoint, OpenContext, Peer, Transfer
from kvcore.memory import Indices, Region
from kvcore.page_lists import PageList, page_lists
from kvcore.planner import U64

MOST = np.iinfo(np.int32).max


class Way(NamedTuple):
    """How descriptors are given (as pages of a prepared list, numpy arrays or lists of tuples), how many requests a transfer becomes, and
    how many threads post them."""

    kind: str
    requests: int = 1
    threads: int = 1


WAYS = {
    "prepared": Way("prepared"),
    "arrays": Way("arrays"),
    "tuples": Way("tuples"),
    "prepared, 4 requests": Way("prepared", 4),
    "prepared, 2 threads": Way("prepared", 4, 2),
    "prepared, 4 threads": Way("prepared", 4, 4),
    "arrays, 2 threads": Way("arrays", 4, 2),
    "arrays, 4 threads": Way("arrays", 4, 4),
    "tuples, 2 threads": Way("tuples", 4, 2),
    "tuples, 4 threads": Way("tuples", 4, 4),
}


class NixlFloor:
    """An agent of its own over host memory, driven by whoever waits for it."""

    ways = tuple(WAYS)

    def open(self, options: NixlOptions, context: OpenContext, regions: Sequence[Region]) -> Endpoint:
        """Start an agent as the backend does."""
        native.prepare_environment(options.environment, context.logger)
        library, _ = native.load()
        self._agent, self._drive = native.new_agent(library, context.instance, options), not options.progress_thread
        self._agent.register_memory([(one.ptr, one.nbytes, 0, "") for one in regions], "DRAM")
        self._local = page_lists(context.pools, regions, MOST)
        return Endpoint(self._agent.get_agent_metadata())

    def connect(self, peer: Peer) -> None:
        """Load decode's agent and prepare lists of both sides' pages."""
        self._agent.add_remote_agent(peer.endpoint.data)
        self._remote = page_lists(peer.pools, peer.regions, MOST)
        self._lists = {
            pool: (self._prepared("NIXL_INIT_AGENT", self._local[pool]), self._prepared(peer.id, pages))
            for pool, pages in self._remote.items()
        }

    def prepare(self, way: str, transfers: Sequence[Transfer], at_once: int) -> Callable[[], None]:
        """What posts, and asks until all is done."""
        chosen = WAYS[way]
        requests = [request for transfer in transfers for request in self._requests(chosen, transfer)]
        most = max(1, at_once * chosen.requests // chosen.threads)
        if chosen.threads == 1:
            return partial(self._carry, requests, most)
        return partial(self._carry_on_threads, [requests[first :: chosen.threads] for first in range(chosen.threads)], most)

    def serve(self, stop: threading.Event) -> None:
        """Take in what is written."""
        while self._drive and not stop.is_set():
            self._agent.get_new_notifs()

    def close(self) -> None:
        """Drop the agent."""
        self._agent = None

    def _prepared(self, agent: str, pages: PageList) -> Any:
        return self._agent.prep_xfer_dlist(agent, _rows(pages.address, pages.length), "DRAM")

    def _requests(self, way: Way, transfer: Transfer) -> Iterator[Callable[[], Any]]:
        """What makes the requests of a transfer, so that the making is measured too; positions in lists are ready before."""
        here, there = transfer.local_pages, transfer.remote_pages
        assert here is not None and there is not None
        prepared = way.kind == "prepared"
        count = here.size if prepared else transfer.length.size
        for share in np.array_split(np.arange(count), min(way.requests, count)):
            if prepared:
                mine, theirs = self._lists[transfer.pool]
                at, to = self._local[transfer.pool].positions(here[share]), self._remote[transfer.pool].positions(there[share])
                yield partial(self._agent.make_prepped_xfer, "WRITE", mine, at, theirs, to)
            else:
                yield partial(self._listed, transfer, share, _rows if way.kind == "arrays" else _tuples)

    def _listed(self, transfer: Transfer, share: Indices, rows: Callable[[U64, U64], Any]) -> Any:
        length = transfer.length[share]
        lists = [rows(at[share], length) for at in (transfer.local_address, transfer.remote_address)]
        mine, theirs = (self._agent.get_xfer_descs(one, "DRAM") for one in lists)
        return self._agent.initialize_xfer("WRITE", mine, theirs, transfer.peer)

    def _carry(self, requests: Sequence[Callable[[], Any]], most: int) -> None:
        running: deque[Any] = deque()
        for request in requests:
            handle = request()
            self._look(running, handle, self._agent.transfer(handle))
            while len(running) >= most:
                self._ask(running)
        while running:
            self._ask(running)

    def _carry_on_threads(self, shares: Sequence[Sequence[Callable[[], Any]]], most: int) -> None:
        with ThreadPoolExecutor(len(shares)) as pool:
            list(pool.map(partial(self._carry, most=most), shares))

    def _ask(self, running: deque[Any]) -> None:
        handle = running.popleft()
        self._look(running, handle, self._agent.check_xfer_state(handle))

    def _look(self, running: deque[Any], handle: Any, state: str) -> None:
        if state == "PROC":
            running.append(handle)
        elif state == "DONE":
            self._agent.release_xfer_handle(handle)
        else:
            raise RuntimeError(f"NIXL reports {state}")


def _rows(address: U64, length: U64) -> Any:
    return np.stack((address, length, np.zeros_like(length)), axis=1)


def _tuples(address: U64, length: U64) -> Any:
    return [(at, size, 0) for at, size in zip(address.tolist(), length.tolist(), strict=True)]
