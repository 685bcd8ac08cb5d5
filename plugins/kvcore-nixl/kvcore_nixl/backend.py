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
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcore import BackendInfo, Capabilities, ConfigError, Endpoint, Region, RegistrationError, TicketKind, TicketState, Transfer, hookimpl
from kvcore.hookspecs import DONE, PENDING, Fact, OpenContext, Peer
from kvcore.memory import PoolGeometry
from kvcore.page_lists import PageList, page_lists
from kvcore.states import RoomKey
from kvcore_nixl import __version__, native
from kvcore_nixl.facts import facts
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
    """A request that was posted, and the ticket of it. ``room`` is None once nobody asks for it; it is kept until it has ended all the same."""

    room: RoomKey | None
    peer: str
    handle: Any
    state: TicketState = PENDING


class Lists(NamedTuple):
    """A pool's pages, and the list that NIXL has prepared of them."""

    pages: PageList
    handle: Any


@dataclass(slots=True, eq=False)
class Remote:
    """A peer that is loaded: kind of memory and device number of each of its regions, and its prepared lists by pool."""

    metadata: bytes
    kinds: list[str]
    devices: npt.NDArray[np.uint64]
    lists: dict[str, Lists] = field(default_factory=dict)
    leaving: bool = False  # to be unloaded when its last job ends
    broken: bool = False  # NIXL says that the connection is; it stays so until the peer is loaded anew


class NixlBackend:
    """Pushes pages through a NIXL agent named like the instance."""

    def __init__(self) -> None:
        self._lock = threading.Condition(threading.Lock())  # of the agent, and all that is made with it
        self._agent: Any = None
        self._engine: Callable[[], object] = lambda: None
        self._registered: list[Any] = []
        self._lists: dict[str, Lists] = {}
        self._remotes: dict[str, Remote] = {}
        self._jobs: set[Job] = set()

    @hookimpl
    def kvcore_backend_info(self) -> BackendInfo:
        """What it is and can do."""
        return BackendInfo("nixl", __version__, wire_version="1", api_version=(1, 0), options=NixlOptions, capabilities=ABLE)

    @hookimpl
    def kvcore_facts(self) -> list[Fact]:
        """The library found, its plugins and transports."""
        return facts()

    @hookimpl
    def kvcore_open(self, options: NixlOptions, context: OpenContext) -> None:
        """Load the library and start an agent; ``BackendLoadError`` with what is missing."""
        native.prepare_environment(options.environment, context.logger)
        library, version = native.load()
        self._options, self._context = options, context
        self._agent = native.new_agent(library, context.instance, options)
        self._engine = weakref.ref(self._agent.agent)  # the part of it that works
        context.logger.info("NIXL %s with plugin %s", version, options.plugin)

    @hookimpl
    def kvcore_register(self, regions: Sequence[Region]) -> None:
        """Register all regions, kind by kind, and prepare lists of their pages; none stays if one is refused (B3)."""
        self._kinds, self._devices = _kinds(self._context.pools, regions), _devices(regions)
        with self._lock:
            for kind in sorted(set(self._kinds)):
                rows = [(one.ptr, one.nbytes, _device(one), "") for one in regions if _kind(one) == kind]
                try:
                    self._registered.append(self._agent.register_memory(rows, kind))
                except Exception as error:
                    self._unregister()
                    raise RegistrationError(
                        f"backend 'nixl': one of {len(rows)} regions of {kind} memory, {sum(row[1] for row in rows)} bytes in all, was "
                        f"refused ({native.told(error)}); usual causes: the limit of locked memory (ulimit -l), memory that plugin "
                        f"{self._options.plugin} does not reach, a wheel for another CUDA"
                    ) from error
            self._prepare(self._lists, "NIXL_INIT_AGENT", self._context.pools, regions)

    @hookimpl
    def kvcore_unregister(self, regions: Sequence[Region]) -> None:
        """Undo ``kvcore_register``."""
        with self._lock:
            self._unregister()

    @hookimpl
    def kvcore_endpoint(self) -> Endpoint:
        """The agent's metadata behind a digest of it and its name: NIXL forgets a peer of which it is given damaged metadata."""
        with self._lock:
            metadata: bytes = self._agent.get_agent_metadata()
        return Endpoint(_digest(self._context.instance, metadata) + metadata)

    @hookimpl
    def kvcore_connect(self, peer: Peer) -> None:
        """Load a peer's metadata and prepare lists of its pages; ``ConnectionError`` if it is not to be had. A decode side writes nothing."""
        if self._context.side == "decode":
            return
        digest, metadata = peer.endpoint.data[:DIGEST_BYTES], peer.endpoint.data[DIGEST_BYTES:]
        if _digest(peer.id, metadata) != digest:
            raise ConnectionError(f"peer {peer.id} sent NIXL metadata that is damaged, or another's; have it pair again")
        with self._lock:
            known = self._remotes.get(peer.id)
            if known and known.metadata == metadata and not known.broken:
                known.leaving = False
                return
            if self._runs(peer.id):
                raise ConnectionError(f"writes to what peer {peer.id} was before have not ended; have it pair again later")
            self._unload(peer.id)
            try:
                self._agent.add_remote_agent(metadata)
                remote = self._remotes[peer.id] = Remote(metadata, _kinds(peer.pools, peer.regions), _devices(peer.regions))
                self._prepare(remote.lists, peer.id, peer.pools, peer.regions)
            except Exception as error:
                self._unload(peer.id)
                raise ConnectionError(
                    f"peer {peer.id} cannot be loaded ({native.told(error)}); run one version of NIXL everywhere"
                ) from error

    @hookimpl
    def kvcore_disconnect(self, peer: str) -> bool:
        """Unload a peer, or have that done when nothing is in flight to it. True if so: a prefill side is only read by its own requests (R4)."""
        deadline = time.monotonic() + LEAVE_S
        with self._lock:
            while (busy := self._runs(peer)) and time.monotonic() < deadline:
                self._lock.wait(0.01)  # lets others in; NIXL itself tells nobody
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
            if remote is None or remote.leaving or remote.broken:
                return TicketState(TicketKind.FAILED, f"peer {transfer.peer} is not connected", quiescent=True, peer_broken=True)
            try:
                handle = self._request(transfer, remote)
            except Exception as error:
                return self._failed(transfer.peer, error, quiescent=True)
            self._jobs.add(job := Job(transfer.room, transfer.peer, handle))
            try:
                state = self._look(job, self._agent.transfer(handle))
            except Exception as error:
                job.room, state = None, self._failed(transfer.peer, error)
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
        for job in [job for job in list(self._jobs) if job.room == room]:
            job.room = None

    @hookimpl
    def kvcore_held_rooms(self) -> list[RoomKey]:
        """The rooms of requests that run."""
        return list({job.room for job in list(self._jobs) if job.room is not None})

    @hookimpl
    def kvcore_close(self) -> None:
        """Stop the agent, and with it what still runs; ``RuntimeError`` if it goes on, since then nothing is proved (R3)."""
        with self._lock:
            for job in self._jobs:
                job.handle = None  # it would keep the agent, whoever holds the ticket
            self._jobs.clear()
            for peer in list(self._remotes):
                self._unload(peer)
            self._unregister()
            self._agent = None
        if self._engine() is not None:
            raise RuntimeError("NIXL's agent goes on, since something still refers to it; keep the memory of what is in flight")

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

    def _prepare(self, lists: dict[str, Lists], agent: str, pools: Sequence[PoolGeometry], regions: Sequence[Region]) -> None:
        """Fill ``lists`` with those pools that there is still room for."""
        all_lists = [self._lists, *(remote.lists for remote in self._remotes.values())]
        left = self._options.prepared_entries - sum(len(one.pages) for some in all_lists for one in some.values())
        for pool, pages in page_lists(pools, regions, left).items():
            if len(pages) <= left:
                left -= len(pages)
                rows = np.stack((pages.address, pages.length, np.repeat(_devices(pages.regions), pages.num_pages)), axis=1)
                lists[pool] = Lists(pages, self._agent.prep_xfer_dlist(agent, rows, _kind(pages.regions[0])))

    def _request(self, transfer: Transfer, remote: Remote) -> Any:
        """A NIXL request: picked from prepared lists, unless merged runs of pages make for far fewer descriptors."""
        mine, theirs, here, there = (
            self._lists.get(transfer.pool),
            remote.lists.get(transfer.pool),
            transfer.local_pages,
            transfer.remote_pages,
        )
        if mine and theirs and here is not None and there is not None and here.size * len(mine.pages.regions) < 2 * transfer.length.size:
            places = mine.pages.positions(here), theirs.pages.positions(there)
            return self._agent.make_prepped_xfer("WRITE", mine.handle, places[0], theirs.handle, places[1])
        local, away = transfer.local_region, transfer.remote_region
        sides = (
            (transfer.local_address, self._devices[local], self._kinds[local[0]]),
            (transfer.remote_address, remote.devices[away], remote.kinds[away[0]]),
        )
        lists = [self._agent.get_xfer_descs(np.stack((at, transfer.length, device), axis=1), kind) for at, device, kind in sides]
        return self._agent.initialize_xfer("WRITE", *lists, transfer.peer)

    def _look(self, job: Job, answer: str = "") -> TicketState:
        """A job's state; one that has ended is released and forgotten."""
        if job.state is not PENDING:
            return job.state
        try:
            answer = answer or self._agent.check_xfer_state(job.handle)
        except Exception as error:
            job.state = self._failed(job.peer, error)
        else:
            if answer == "PROC":
                return PENDING
            job.state = DONE if answer == "DONE" else TicketState(TicketKind.FAILED, f"NIXL reports {answer}")
        self._jobs.discard(job)
        with contextlib.suppress(Exception):  # it has ended, whatever becomes of its memory
            self._agent.release_xfer_handle(job.handle)
        remote = self._remotes.get(job.peer)
        if remote is not None and remote.leaving and not self._runs(job.peer):
            self._unload(job.peer)
        return job.state

    def _failed(self, peer: str, error: Exception, quiescent: bool = False) -> TicketState:
        broken = native.lost(error)
        if broken and peer in self._remotes:
            self._remotes[peer].broken = True
        return TicketState(TicketKind.FAILED, f"NIXL says {native.told(error)}", quiescent, peer_broken=broken)


def _digest(instance: str, metadata: bytes) -> bytes:
    return hashlib.sha256(instance.encode() + metadata).digest()


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
