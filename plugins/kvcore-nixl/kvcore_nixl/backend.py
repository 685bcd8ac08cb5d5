"""The NIXL backend. The hooks stand in the order in which the core calls them.

A transfer becomes one NIXL request: picked from prepared lists of all pages, or of plain descriptors where merged runs of pages make far
fewer of them. A request that runs is never released, since NIXL would forget it while its bytes still travel: there is no cancel.
"""

from __future__ import annotations

import contextlib
import hashlib
import resource
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np

from kvcore import BackendInfo, Capabilities, ConfigError, Endpoint, Region, RegistrationError, TicketKind, TicketState, Transfer, hookimpl
from kvcore.hookspecs import DONE, PENDING, RETRY, Fact, OpenContext, Peer
from kvcore.memory import PoolGeometry
from kvcore.page_lists import PageList, page_lists
from kvcore.planner import I32, U64
from kvcore_nixl import __version__, native
from kvcore_nixl.options import NixlOptions

# Over shared memory a post is the copy itself, so it blocks. Over TCP a dead writer's last bytes may still wait in a socket here.
ABLE = Capabilities(
    memory=frozenset({"cpu", "cuda", "rocm"}), blocking=True, needs_progress=True, needs_process_to_write=False,
    descriptors="pages", max_descriptors=4096, max_bytes=64 << 20, quick_bytes=64 << 10,
)  # fmt: skip
LEAVE_S = 1.0  # how long a disconnect waits for what is in flight


@dataclass(slots=True, eq=False)
class Job:
    """A request that was posted: a ticket. Kept until it has ended, whether or not anybody still asks for it."""

    peer: str
    handle: Any
    state: TicketState = PENDING


@dataclass(slots=True, eq=False)
class Agent:
    """This agent's memory, or a peer's that is loaded: kind and device number of each region, and the lists prepared of its pools."""

    name: str  # as NIXL has it
    kinds: list[str]
    devices: U64
    prepared: dict[str, tuple[PageList, Any]] = field(default_factory=dict)
    metadata: bytes = b""
    leaving: bool = False  # to be unloaded when its last job ends
    broken: bool = False  # NIXL says that the connection is; it stays so until the peer is loaded anew

    @classmethod
    def of(cls, pools: Sequence[PoolGeometry], regions: Sequence[Region], name: str = "NIXL_INIT_AGENT") -> Agent:
        """``ConfigError`` for a pool of several kinds, since a request takes one."""
        places = [region.device.partition(":") for region in regions]
        kinds = ["DRAM" if place[0] == "cpu" else "VRAM" for place in places]
        sizes = [len(pool.page_bytes) for pool in pools]
        for pool, size, end in zip(pools, sizes, accumulate(sizes), strict=True):
            if len(set(kinds[end - size : end])) > 1:
                raise ConfigError(f"backend 'nixl': pool {pool.name!r} lies in both host and device memory; make two pools of it")
        return cls(name, kinds, np.array([0 if kind == "cpu" else int(number or 0) for kind, _, number in places], np.uint64))


class NixlBackend:
    """Pushes pages through a NIXL agent named like the instance."""

    def __init__(self) -> None:
        self._lock = threading.Condition()  # of the agent, and all that is made with it; re-entrant
        self._agent: Any = None
        self._engine: Callable[[], object] = lambda: None
        self._registered: list[Any] = []
        self._mine = Agent.of((), ())
        self._peers: dict[str, Agent] = {}
        self._jobs: set[Job] = set()

    @hookimpl
    def kvcore_backend_info(self) -> BackendInfo:
        """What it is and can do."""
        return BackendInfo("nixl", __version__, wire_version="1", api_version=(1, 0), options=NixlOptions, capabilities=ABLE)

    @hookimpl
    def kvcore_facts(self) -> list[Fact]:
        """The library found, its plugins and transports."""
        return native.facts()

    @hookimpl
    def kvcore_open(self, options: NixlOptions, context: OpenContext) -> None:
        """Load the library and start an agent; ``BackendLoadError`` with what is missing."""
        native.prepare_environment(options.environment, context.logger)
        library, version = native.load()
        self._options, self._context = options, context
        self._agent = native.new_agent(library, context.instance, options)
        self._engine = weakref.ref(self._agent.agent)  # the part of it that does the work
        context.logger.info("NIXL %s with plugin %s", version, options.plugin)
        if 0 <= (files := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) < 1024:  # below 0: no limit
            context.logger.warning("%s open files are few: raise ulimit -n; UCX that lacks one once accepts no peers any more", files)

    @hookimpl
    def kvcore_register(self, regions: Sequence[Region]) -> None:
        """Register all regions, and prepare lists of their pages; none stays if one is refused (B3)."""
        self._mine = mine = Agent.of(self._context.pools, regions)
        with self._lock:
            try:
                for region, kind, device in zip(regions, mine.kinds, mine.devices.tolist(), strict=True):
                    self._registered.append(self._agent.register_memory([(region.ptr, region.nbytes, device, "")], kind))
                self._prepare(mine, self._context.pools, regions)
            except Exception as error:
                self.kvcore_unregister(regions)
                raise RegistrationError(
                    f"backend 'nixl': {region} was not registered as {kind} memory ({native.told(error)}); usual causes: the limit of "
                    "locked memory (ulimit -l), a wheel for another CUDA, a driver without peer memory"
                ) from error

    @hookimpl
    def kvcore_unregister(self, regions: Sequence[Region]) -> None:
        """Undo ``kvcore_register``."""
        with self._lock:
            self._release(self._mine)
            while self._registered:
                self._agent.deregister_memory(self._registered.pop())

    @hookimpl
    def kvcore_endpoint(self) -> Endpoint:
        """The agent's metadata behind a digest of it and its name: NIXL forgets a peer of which it is given damaged metadata."""
        with self._lock:
            metadata: bytes = self._agent.get_agent_metadata()
        return Endpoint(hashlib.sha256(self._context.instance.encode() + metadata).digest() + metadata)

    @hookimpl
    def kvcore_connect(self, peer: Peer) -> None:
        """Load a peer and prepare lists of its pages; ``ConnectionError`` if that is impossible. A decode side writes nothing."""
        if self._context.side == "decode":
            return
        digest, metadata = peer.endpoint.data[:32], peer.endpoint.data[32:]
        if hashlib.sha256(peer.id.encode() + metadata).digest() != digest or not metadata.startswith(native.head(peer.id)):
            raise ConnectionError(f"peer {peer.id} sent NIXL metadata that is damaged, or another's; have it pair again")
        with self._lock:
            if (known := self._peers.get(peer.id)) and known.metadata == metadata and not known.broken:
                known.leaving = False
                return
            if self._runs(peer.id):
                raise ConnectionError(f"writes to peer {peer.id} as it was before have not ended; have it pair again later")
            self._unload(peer.id)
            try:
                loaded = Agent.of(peer.pools, peer.regions, peer.id)
                self._agent.add_remote_agent(metadata)
                loaded.metadata, self._peers[peer.id] = metadata, loaded
                self._prepare(loaded, peer.pools, peer.regions)
            except Exception as error:
                self._unload(peer.id)
                raise ConnectionError(f"peer {peer.id} cannot be loaded ({native.told(error)}); {native.NOT_LOADED}") from error

    @hookimpl
    def kvcore_disconnect(self, peer: str) -> bool:
        """Unload a peer, at once or when nothing is in flight to it any more. True if at once: only requests read a prefill side (R4)."""
        deadline = time.monotonic() + LEAVE_S
        with self._lock:
            if peer in self._peers:
                self._peers[peer].leaving = True
            while (busy := self._runs(peer)) and time.monotonic() < deadline:
                self._lock.wait(0.01)  # lets others in; NIXL itself tells nobody
            if not busy:
                self._unload(peer)
        return not busy and self._context.side == "prefill"

    @hookimpl
    def kvcore_transfer(self, transfer: Transfer, may_wait: bool) -> Job | TicketState:
        """Post one request. What fails before the post is quiescent; what fails in it is not known to be."""
        if not self._lock.acquire(blocking=may_wait):
            return RETRY
        try:
            return self._post(transfer)
        finally:
            self._lock.release()

    @hookimpl
    def kvcore_poll(self, tickets: Sequence[Job]) -> list[TicketState]:
        """Drive the engine and ask for each request; all are pending while a post copies."""
        if not self._lock.acquire(blocking=False):
            return [PENDING] * len(tickets)
        try:
            self._agent.get_new_notifs()
            return [self._look(job) for job in tickets]
        finally:
            self._lock.release()

    @hookimpl
    def kvcore_progress(self) -> None:
        """Take in what peers write, and look after requests that nobody asks for any more."""
        self.kvcore_poll(list(self._jobs))

    @hookimpl
    def kvcore_close(self) -> None:
        """Stop the agent, and with it what still runs; ``RuntimeError`` if it goes on, since then nothing is proved (R3)."""
        with self._lock:
            for job in self._jobs:
                job.handle = None  # the ticket is still held somewhere, and would keep the agent
            for peer in list(self._peers):
                self._unload(peer)
            self.kvcore_unregister(())
            self._agent, self._jobs = None, set()
        if self._engine() is not None:
            raise RuntimeError("NIXL's agent goes on, since something still refers to it; keep the memory of what is in flight")

    # --- with the lock held

    def _post(self, transfer: Transfer) -> Job | TicketState:
        peer = self._peers.get(transfer.peer)
        if peer is None or peer.leaving or peer.broken:
            return TicketState(TicketKind.FAILED, f"peer {transfer.peer} is not connected", quiescent=True, peer_broken=True)
        job = None
        try:
            self._jobs.add(job := Job(transfer.peer, self._request(transfer, peer)))
            return job if (state := self._look(job, self._agent.transfer(job.handle))) is PENDING else state
        except Exception as error:
            return self._failed(transfer.peer, error, quiescent=job is None)

    def _runs(self, peer: str) -> bool:
        return any(self._look(job) is PENDING for job in list(self._jobs) if job.peer == peer)

    def _unload(self, name: str) -> None:
        """Forget a peer and what was prepared for it. Harmless for one that is not loaded."""
        peer = self._peers.pop(name, None)
        if peer is not None:
            self._release(peer)
            with contextlib.suppress(Exception):  # a broken connection may have taken it along
                self._agent.remove_remote_agent(name)

    def _release(self, agent: Agent) -> None:
        while agent.prepared:
            self._agent.release_dlist_handle(agent.prepared.popitem()[1][1])

    def _prepare(self, agent: Agent, pools: Sequence[PoolGeometry], regions: Sequence[Region]) -> None:
        """Prepare lists of those pools that there is still room for."""
        everywhere = (pages for some in (self._mine, *self._peers.values()) for pages, _ in some.prepared.values())
        left = self._options.prepared_entries - sum(len(pages.regions) * pages.num_pages for pages in everywhere)
        for pool, pages in page_lists(pools, regions, left).items():
            if len(pages) <= left:
                own, left = Agent.of((), pages.regions), left - len(pages)
                rows = np.stack((pages.address, pages.length, np.repeat(own.devices, pages.num_pages)), axis=1)
                handle = self._agent.prep_xfer_dlist(agent.name, rows, own.kinds[0])
                agent.prepared[pool] = replace(pages, address=(none := np.empty(0, np.uint64)), length=none), handle  # which are large

    def _request(self, transfer: Transfer, peer: Agent) -> Any:
        """A NIXL request: picked from prepared lists, unless merged runs of pages make for far fewer descriptors."""
        name, local, remote = transfer.pool, transfer.local_pages, transfer.remote_pages
        if name in self._mine.prepared and name in peer.prepared and local is not None and remote is not None:
            (ours, mine), (theirs, its) = self._mine.prepared[name], peer.prepared[name]
            if local.size * len(ours.regions) < 2 * transfer.length.size:
                return self._agent.make_prepped_xfer("WRITE", mine, ours.positions(local), its, theirs.positions(remote))
        here = self._listed(self._mine, transfer.local_region, transfer.local_address, transfer.length)
        there = self._listed(peer, transfer.remote_region, transfer.remote_address, transfer.length)
        return self._agent.initialize_xfer("WRITE", here, there, peer.name)

    def _listed(self, agent: Agent, region: I32, address: U64, length: U64) -> Any:
        rows = np.stack((address, length, agent.devices[region]), axis=1)
        return self._agent.get_xfer_descs(rows, agent.kinds[region[0]])

    def _look(self, job: Job, answer: str = "") -> TicketState:
        """A job's state; one that has ended is released and forgotten."""
        if job.state is not PENDING:
            return job.state
        try:
            answer = answer or self._agent.check_xfer_state(job.handle)
            job.state = {"PROC": PENDING, "DONE": DONE}.get(answer) or TicketState(TicketKind.FAILED, f"NIXL reports {answer}")
        except Exception as error:
            job.state = self._failed(job.peer, error)
        if job.state is PENDING:
            return PENDING
        self._jobs.discard(job)
        with contextlib.suppress(Exception):  # it has ended, whatever becomes of its memory
            self._agent.release_xfer_handle(job.handle)
        job.handle = None  # it would keep the agent
        if job.peer in self._peers and self._peers[job.peer].leaving and not self._runs(job.peer):
            self._unload(job.peer)
        return job.state

    def _failed(self, peer: str, error: Exception, quiescent: bool = False) -> TicketState:
        broken = type(error).__name__ == native.LOST or not self._agent.check_remote_metadata(peer)
        if broken and peer in self._peers:
            self._peers[peer].broken = True
        return TicketState(TicketKind.FAILED, f"NIXL says {native.told(error)}", quiescent, peer_broken=broken)
