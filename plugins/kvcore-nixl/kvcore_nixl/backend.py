"""The NIXL backend. The hooks stand in the order in which the core calls them.

A transfer becomes one NIXL request: picked from lists of all pages prepared per peer and pool, or from plain descriptors where merged runs
of pages make far fewer of them. A request that runs is never released, since NIXL would forget it while its bytes still travel; so there
is no cancel, and an aborted ticket ends when the engine says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore import BackendInfo, Capabilities, ConfigError, Endpoint, Region, RegistrationError, TicketKind, TicketState, Transfer, hookimpl
from kvcore.hookspecs import DONE, PENDING, OpenContext, Peer
from kvcore.memory import PoolGeometry
from kvcore.page_lists import PageList, page_lists
from kvcore.states import RoomKey
from kvcore_nixl import __version__, native
from kvcore_nixl.options import NixlOptions

ABLE = Capabilities(
    memory=frozenset({"cpu", "cuda", "rocm"}),
    blocking=True,  # over shared memory a post is the copy itself
    needs_progress=True,
    needs_process_to_write=False,  # over TCP a dead writer's last bytes may still wait in a socket here
    descriptors="pages",
    max_descriptors=4096,
    max_bytes=64 << 20,
)
DIGEST_BYTES = 32
LEAVE_S = 1.0
"""How long ``kvcore_disconnect`` waits for what is in flight to a peer."""


@dataclass(slots=True, eq=False)
class Job:
    """A request that was posted. ``room`` is None once nobody asks for it any more; it is kept until it has ended all the same."""

    room: RoomKey | None
    peer: str
    handle: Any
    state: TicketState = PENDING


@dataclass(slots=True, eq=False)
class Lists:
    """A pool's pages, and the list that NIXL has prepared of them."""

    pages: PageList
    handle: Any


@dataclass(slots=True, eq=False)
class Remote:
    """A peer that is loaded: its memory kind and device number by region, and its prepared lists by pool."""

    kinds: list[str]
    devices: npt.NDArray[np.uint64]
    lists: dict[str, Lists] = field(default_factory=dict)
    leaving: bool = False
    """Disconnected, and to be unloaded when its last job ends."""


class NixlBackend:
    """Pushes pages through a NIXL agent named like the instance."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of the agent, and all that is prepared with it
        self._agent: Any = None
        self._registered: list[Any] = []
        self._lists: dict[str, Lists] = {}
        self._remotes: dict[str, Remote] = {}
        self._jobs: set[Job] = set()
        self._closing = threading.Event()

    @hookimpl
    def kvcore_backend_info(self) -> BackendInfo:
        """What it is and can do."""
        return BackendInfo("nixl", __version__, wire_version="1", api_version=(1, 0), options=NixlOptions, capabilities=ABLE)

    @hookimpl
    def kvcore_open(self, options: NixlOptions, context: OpenContext) -> None:
        """Load the library and start an agent; ``BackendLoadError`` with what is missing."""
        native.prepare_environment(options.environment, context.logger)
        self._library, version = native.load()
        self._options, self._context = options, context
        self._agent = native.new_agent(self._library, context.instance, options)
        self._closing.clear()
        context.logger.info("NIXL %s with plugin %s", version, options.plugin)

    @hookimpl
    def kvcore_register(self, regions: Sequence[Region]) -> None:
        """Register all regions, kind by kind, and prepare lists of their pages; none stays if one is refused (B3)."""
        self._kinds, self._devices = _kinds(self._context.pools, regions), _devices(regions)
        with self._lock:
            for kind in sorted(set(self._kinds)):
                rows = [(one.ptr, one.nbytes, _device(one), "") for one, its in zip(regions, self._kinds, strict=True) if its == kind]
                try:
                    self._registered.append(self._agent.register_memory(rows, kind))
                except Exception as error:
                    self._unregister()
                    raise RegistrationError(
                        f"backend 'nixl': {len(rows)} regions of {kind} memory, {sum(row[1] for row in rows)} bytes in all, were refused "
                        f"({native.told(error)}); usual causes: the limit of locked memory (ulimit -l), a device that {self._options.plugin} "
                        "does not reach"
                    ) from error
            self._lists = self._prepare("NIXL_INIT_AGENT", self._context.pools, regions)

    @hookimpl
    def kvcore_unregister(self, regions: Sequence[Region]) -> None:
        """Undo ``kvcore_register``."""
        with self._lock:
            self._unregister()

    @hookimpl
    def kvcore_endpoint(self) -> Endpoint:
        """The agent's metadata behind its digest: NIXL forgets a known peer when it is given damaged metadata of it."""
        with self._lock:
            metadata: bytes = self._agent.get_agent_metadata()
        return Endpoint(hashlib.sha256(metadata).digest() + metadata)

    @hookimpl
    def kvcore_connect(self, peer: Peer) -> None:
        """Load a peer's metadata and prepare lists of its pages. A decode side writes nothing and loads nobody."""
        if self._context.side == "decode":
            return
        digest, metadata = peer.endpoint.data[:DIGEST_BYTES], peer.endpoint.data[DIGEST_BYTES:]
        if hashlib.sha256(metadata).digest() != digest:
            raise ConnectionError(f"peer {peer.id} sent damaged NIXL metadata; have it pair again")
        with self._lock:
            self._unload(peer.id)
            try:
                name = self._agent.add_remote_agent(metadata)
                if native.text(name) != peer.id:
                    self._agent.remove_remote_agent(name)
                    raise ConnectionError(f"its metadata is of agent {native.text(name)!r}")
                remote = self._remotes[peer.id] = Remote(_kinds(peer.pools, peer.regions), _devices(peer.regions))
                remote.lists = self._prepare(peer.id, peer.pools, peer.regions)
            except Exception as error:
                self._unload(peer.id)
                raise ConnectionError(
                    f"peer {peer.id} cannot be loaded ({native.told(error)}); check that both sides run one NIXL"
                ) from error

    @hookimpl
    def kvcore_disconnect(self, peer: str) -> bool:
        """Unload a peer once nothing is in flight to it. True if so: a prefill side's memory is read by its own requests only (R4)."""
        deadline = time.monotonic() + LEAVE_S
        while self._in_flight(peer) and time.monotonic() < deadline:
            self._closing.wait(0.01)  # the engine itself tells nobody
        with self._lock:
            busy = self._runs(peer)
            if not busy:
                self._unload(peer)
            elif peer in self._remotes:
                self._remotes[peer].leaving = True
        return not busy and self._context.side == "prefill"

    @hookimpl
    def kvcore_transfer(self, transfer: Transfer) -> Job | TicketState:
        """Post one request. What fails before the post is quiescent; what fails in it is not known to be."""
        with self._lock:
            remote = self._remotes.get(transfer.peer)
            if remote is None or remote.leaving:
                return _failed(f"peer {transfer.peer} is not loaded", quiescent=True, peer_broken=True)
            try:
                handle = self._request(transfer, remote)
            except Exception as error:
                return _failed(f"no request could be made: {native.told(error)}", quiescent=True, peer_broken=native.lost(error))
            job = Job(transfer.room, transfer.peer, handle)
            self._jobs.add(job)
            try:
                posted = self._agent.transfer(handle)
            except Exception as error:
                job.room = None
                return _failed(f"the post failed: {native.told(error)}", peer_broken=native.lost(error))
            state = self._look(job, posted)
            return job if state is PENDING else state

    @hookimpl
    def kvcore_poll(self, tickets: Sequence[Job]) -> list[TicketState]:
        """Ask for each request, which drives the engine too; all are pending while a post copies."""
        if not self._lock.acquire(blocking=False):
            return [PENDING] * len(tickets)
        try:
            return [self._look(job) for job in tickets]
        finally:
            self._lock.release()

    @hookimpl
    def kvcore_progress(self) -> None:
        """Take in what peers write, and look after requests that nobody asks for."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if not self._options.progress_thread:
                self._agent.get_new_notifs()
            for job in [job for job in self._jobs if job.room is None]:
                self._look(job)
        finally:
            self._lock.release()

    @hookimpl
    def kvcore_clear(self, room: RoomKey) -> None:
        """Ask no more for the room's requests; each is kept until it has ended."""
        for job in list(self._jobs):
            if job.room == room:
                job.room = None

    @hookimpl
    def kvcore_held_rooms(self) -> list[RoomKey]:
        """The rooms of requests that run."""
        return list({job.room for job in list(self._jobs) if job.room is not None})

    @hookimpl
    def kvcore_close(self) -> None:
        """Stop the agent; requests that still run go with it."""
        self._closing.set()
        with self._lock:
            for peer in list(self._remotes):
                self._unload(peer)
            self._unregister()
            self._jobs.clear()
            self._agent = None

    def _in_flight(self, peer: str) -> bool:
        with self._lock:
            return self._runs(peer)

    # --- with the lock held

    def _runs(self, peer: str) -> bool:
        return any(self._look(job) is PENDING for job in list(self._jobs) if job.peer == peer)

    def _unload(self, peer: str) -> None:
        """Forget a peer and what was prepared for it. Harmless for one that is not loaded."""
        remote = self._remotes.pop(peer, None)
        if remote is None:
            return
        self._release(remote.lists)
        with contextlib.suppress(Exception):  # a broken connection may have taken it along
            self._agent.remove_remote_agent(peer)

    def _unregister(self) -> None:
        self._release(self._lists)
        while self._registered:
            self._agent.deregister_memory(self._registered.pop())

    def _release(self, lists: dict[str, Lists]) -> None:
        while lists:
            self._agent.release_dlist_handle(lists.popitem()[1].handle)

    def _prepare(self, agent: str, pools: Sequence[PoolGeometry], regions: Sequence[Region]) -> dict[str, Lists]:
        lists = {}
        for pool, pages in page_lists(pools, regions, self._options.prepared_entries).items():
            rows = np.stack((pages.address, pages.length, np.repeat(_devices(pages.regions), pages.num_pages)), axis=1)
            lists[pool] = Lists(pages, self._agent.prep_xfer_dlist(agent, rows, _kind(pages.regions[0])))
        return lists

    def _request(self, transfer: Transfer, remote: Remote) -> Any:
        mine, theirs = self._lists.get(transfer.pool), remote.lists.get(transfer.pool)
        if mine and theirs and transfer.local_pages is not None and transfer.remote_pages is not None:
            picked = mine.pages.positions(transfer.local_pages)
            if picked.size < 2 * transfer.length.size:
                return self._agent.make_prepped_xfer(
                    "WRITE", mine.handle, picked, theirs.handle, theirs.pages.positions(transfer.remote_pages)
                )
        local, away, size = transfer.local_region, transfer.remote_region, transfer.length
        here = np.stack((transfer.local_address, size, self._devices[local]), axis=1)
        there = np.stack((transfer.remote_address, size, remote.devices[away]), axis=1)
        descriptors = self._agent.get_xfer_descs
        return self._agent.initialize_xfer(
            "WRITE", descriptors(here, self._kinds[local[0]]), descriptors(there, remote.kinds[away[0]]), transfer.peer
        )

    def _look(self, job: Job, answer: str = "") -> TicketState:
        """A job's state; one that has ended is released and forgotten."""
        if job.state is not PENDING:
            return job.state
        try:
            answer = answer or self._agent.check_xfer_state(job.handle)
        except Exception as error:
            job.state = _failed(native.told(error), peer_broken=native.lost(error))
        else:
            if answer == "PROC":
                return PENDING
            job.state = DONE if answer == "DONE" else _failed(f"NIXL reports {answer}")
        self._jobs.discard(job)
        self._agent.release_xfer_handle(job.handle)
        remote = self._remotes.get(job.peer)
        if remote is not None and remote.leaving and not self._runs(job.peer):
            self._unload(job.peer)
        return job.state


def _failed(reason: str, quiescent: bool = False, peer_broken: bool = False) -> TicketState:
    return TicketState(TicketKind.FAILED, reason, quiescent, peer_broken)


def _kind(region: Region) -> str:
    return "DRAM" if region.device.startswith("cpu") else "VRAM"


def _kinds(pools: Sequence[PoolGeometry], regions: Sequence[Region]) -> list[str]:
    """NIXL's kind of memory of each region; ``ConfigError`` for a pool of several, since a request takes one."""
    kinds = [_kind(region) for region in regions]
    first = 0
    for pool in pools:
        last = first + len(pool.page_bytes)
        if len(set(kinds[first:last])) > 1:
            raise ConfigError(f"backend 'nixl': pool {pool.name!r} lies in both host and device memory; make two pools of it")
        first = last
    return kinds


def _device(region: Region) -> int:
    """NIXL's number of a region's device; host memory has but one."""
    return 0 if region.device.startswith("cpu") else int(region.device.partition(":")[2] or 0)


def _devices(regions: Sequence[Region]) -> npt.NDArray[np.uint64]:
    return np.array([_device(region) for region in regions], np.uint64)
