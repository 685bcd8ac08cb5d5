"""The mori backend. The hooks stand in the order in which the core calls them.

A transfer becomes one batch write per pair of regions, through sessions that were made when the peer was connected. After an RDMA error
mori's path between two engine keys is dead for ever; it files a peer under whatever key its descriptor names, so each pairing files it
under a fresh one. That gives new queue pairs to the same engine, and those of before drain untouched. There is no cancel.
"""

from __future__ import annotations

import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any

from kvcore import BackendInfo, Capabilities, Endpoint, Region, RegistrationError, TicketKind, TicketState, Transfer, hookimpl
from kvcore.errors import cause, one_line
from kvcore.hookspecs import DONE, PENDING, RETRY, Fact, OpenContext, Peer
from kvcore.memory import PoolGeometry
from kvcore_mori import __version__, native
from kvcore_mori.options import MoriOptions

# Posting takes milliseconds. The card writes without the peer's process, but not without the writer's: its queue pairs end with it.
ABLE = Capabilities(frozenset({"cpu", "cuda", "rocm"}), blocking=True, max_descriptors=2048, max_bytes=16 << 20)
MOST_POSTED = 8192  # work requests that a queue pair holds: with more, mori waits a while and then fails the transfer
LEAVE_S = 1.0  # how long a disconnect waits for what is in flight


@dataclass(slots=True, eq=False)
class Remote:
    """A peer as of one pairing: its endpoint, its engine under the key of that pairing, and a session for each pair of regions."""

    endpoint: Endpoint
    engine: Any
    sessions: dict[tuple[int, int], Any] = field(default_factory=dict)
    broken: bool = False

    @property
    def works(self) -> bool:
        """Whether nothing has failed. mori knows of a peer that is gone, but not of a write that was refused."""
        return not self.broken and all(session.alive() for session in self.sessions.values())


@dataclass(slots=True, eq=False)
class Job:
    """A ticket: the statuses that mori writes to. Kept until all have ended, whether or not anybody still asks for it."""

    peer: str
    remote: Remote
    size: int
    statuses: list[Any] = field(default_factory=list)
    posting: bool = True
    problem: str = ""  # why not all of it was posted
    state: TicketState = PENDING


class MoriBackend:
    """Pushes pages through one mori engine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held while a batch is posted, and to change what that needs
        self._engine: Any = None
        self._alive: Callable[[], object] = lambda: None
        self._memory: list[Any] = []
        self._remotes: dict[str, Remote] = {}
        self._jobs: set[Job] = set()
        self._failed: list[Any] = []  # statuses that mori may still write to: it may have posted a part

    @hookimpl
    def kvcore_backend_info(self) -> BackendInfo:
        """What it is and can do."""
        return BackendInfo("mori", __version__, wire_version="1", api_version=(1, 0), options=MoriOptions, capabilities=ABLE)

    @hookimpl
    def kvcore_facts(self) -> list[Fact]:
        """The library found, and what it needs of this host."""
        return native.facts()

    @hookimpl
    def kvcore_open(self, options: MoriOptions, context: OpenContext) -> None:
        """Load the library and start an engine; ``BackendLoadError`` with what is missing, ``ConfigError`` for a host or a device."""
        self._options, self._context = options, context
        self._library, self._engine = native.start(options, context)
        self._alive = weakref.ref(self._engine._engine)  # the part of it that does the work

    @hookimpl
    def kvcore_register(self, regions: Sequence[Region]) -> None:
        """Register all regions, or none (B3). mori does it with the first session, so each has one with itself."""
        native.check_fit(self._context.pools, regions, self._options)
        place, own = self._library.MemoryLocationType, self._engine.get_engine_desc()
        try:
            self._engine.register_remote_engine(own)
            for region in regions:
                kind, _, number = region.device.partition(":")
                where = (-1, place.CPU) if kind == "cpu" else (int(number or 0), place.GPU)
                self._memory.append(memory := self._engine.register_memory(region.ptr, region.nbytes, *where))
                if self._options.transport == "rdma":
                    self._engine.create_session(memory, memory)
        except Exception as error:
            self.kvcore_unregister(regions)
            raise RegistrationError(f"backend 'mori': {region} was not registered ({native.told(error)}); {native.REFUSED}") from error
        finally:
            self._engine.deregister_remote_engine(own)

    @hookimpl
    def kvcore_unregister(self, regions: Sequence[Region]) -> None:
        """Undo ``kvcore_register``."""
        while self._memory:
            self._engine.deregister_memory(self._memory.pop())

    @hookimpl
    def kvcore_endpoint(self) -> Endpoint:
        """The engine's descriptor and those of its memory."""
        return Endpoint(self._engine.get_engine_desc().pack(), [memory.pack() for memory in self._memory])

    @hookimpl
    def kvcore_connect(self, peer: Peer) -> None:
        """Make sessions with a peer; ``ConnectionError`` if that is impossible, or takes mori 5 seconds. A decode side writes nothing."""
        known = self._remotes.get(peer.id)
        if self._context.side == "decode" or (known and known.endpoint == peer.endpoint and known.works):
            return
        try:
            remote = self._paired(peer)
        except Exception as error:
            raise ConnectionError(f"peer {peer.id} cannot be reached ({native.told(error)}); check that it runs, pair again") from error
        self._leave(peer.id)
        self._remotes[peer.id] = remote

    @hookimpl
    def kvcore_disconnect(self, peer: str) -> bool:
        """Forget a peer. True if nothing is in flight to it: a prefill side's memory is read by its own writes only (R4)."""
        self._leave(peer)
        deadline = time.monotonic() + LEAVE_S
        while (busy := any(self._look(job) is PENDING for job in list(self._jobs) if job.peer == peer)) and time.monotonic() < deadline:
            time.sleep(0.01)
        return not busy and self._context.side == "prefill"

    @hookimpl
    def kvcore_transfer(self, transfer: Transfer) -> Job | TicketState:
        """Post one batch write per pair of regions. A failure is quiescent if mori took nothing of what failed."""
        with self._lock:
            remote, size = self._remotes.get(transfer.peer), int(transfer.length.size)
            if remote is None or not remote.works:
                return TicketState(TicketKind.FAILED, f"peer {transfer.peer} is not connected", quiescent=True, peer_broken=True)
            posted = sum(job.size for job in list(self._jobs) if job.remote is remote)
            if posted and posted + size > MOST_POSTED:
                return RETRY
            self._jobs.add(job := Job(transfer.peer, remote, size))
            try:
                self._post(job, transfer)
            except Exception as error:
                job.problem = cause(error)
            job.posting = False
            return job if self._look(job) is PENDING else job.state

    @hookimpl
    def kvcore_poll(self, tickets: Sequence[Job]) -> list[TicketState]:
        """Look at what is in flight, also at what nobody asks for any more."""
        for job in list(self._jobs):
            self._look(job)
        return [job.state for job in tickets]

    @hookimpl
    def kvcore_close(self) -> None:
        """Stop the engine, and with it what still runs; ``RuntimeError`` if it goes on, since then nothing is proved (R3)."""
        for peer in list(self._remotes):
            self._leave(peer)
        self.kvcore_unregister(())
        self._engine, self._failed = None, []
        self._jobs.clear()
        if self._alive() is not None:
            raise RuntimeError("mori's engine goes on, since something still refers to it; keep the memory of what is in flight")

    def _paired(self, peer: Peer) -> Remote:
        """A peer under a fresh key, with sessions for all pairs of regions that a transfer may be of."""
        key = f"{peer.id}/{uuid.uuid4().hex}"
        remote = Remote(peer.endpoint, native.renamed(self._library.EngineDesc, peer.endpoint.data, peer.id, key))
        memory = [native.renamed(self._library.MemoryDesc, packed, peer.id, key) for packed in peer.endpoint.keys]
        if [(one.data, one.size) for one in memory] != [(one.ptr, one.nbytes) for one in peer.regions]:
            raise ValueError("its engine describes other memory than it does")
        self._engine.register_remote_engine(remote.engine)
        try:
            mine, its = _numbers(self._context.pools), _numbers(peer.pools)
            for pair in (pair for name in mine.keys() & its.keys() for pair in zip(mine[name], its[name], strict=False)):
                remote.sessions[pair] = self._engine.create_session(self._memory[pair[0]], memory[pair[1]])
                if remote.sessions[pair] is None:
                    raise ValueError(f"{self._options.transport} does not join {self._memory[pair[0]].loc} with {memory[pair[1]].loc}")
        except Exception:
            self._engine.deregister_remote_engine(remote.engine)
            raise
        return remote

    def _leave(self, peer: str) -> None:
        """Forget a peer. What is in flight to it ends by itself, and needs no session for that."""
        with self._lock:
            if (remote := self._remotes.pop(peer, None)) is not None:
                self._engine.deregister_remote_engine(remote.engine)
                remote.sessions.clear()

    def _post(self, job: Job, transfer: Transfer) -> None:
        regions, offsets = (transfer.local_region, transfer.remote_region), (transfer.local_offset, transfer.remote_offset)
        rows = zip(*(numbers.tolist() for numbers in (*regions, *offsets, transfer.length)), strict=True)
        for pair, group in groupby(rows, itemgetter(0, 1)):
            _, _, here, there, length = zip(*group, strict=True)
            session = job.remote.sessions[pair]
            job.statuses.append(session.batch_write(here, there, length, session.allocate_transfer_uid()))
            if job.statuses[-1].Failed():
                break

    def _look(self, job: Job) -> TicketState:
        """A job's state. It ends when each of its writes has: of one that failed mori may still be writing a part."""
        if job.state is not PENDING or job.posting:
            return job.state
        failed = [one for one in job.statuses if not one.Succeeded()]
        if not all(one.Failed() for one in failed):
            return PENDING
        if failed or job.problem:
            refused = not job.problem and all(one.Code() == self._library.StatusCode.ERR_INVALID_ARGS for one in failed)
            reason = job.problem or f"mori says {failed[0].Code().name}: {one_line(failed[0].Message())}"
            self._failed += () if refused else job.statuses
            job.remote.broken |= not refused
            job.state = TicketState(TicketKind.FAILED, reason, quiescent=refused, peer_broken=not refused)
        else:
            job.state = DONE
        self._jobs.discard(job)
        return job.state


def _numbers(pools: Sequence[PoolGeometry]) -> dict[str, range]:
    """Which regions each pool has."""
    ends = accumulate(len(pool.page_bytes) for pool in pools)
    return {pool.name: range(end - len(pool.page_bytes), end) for pool, end in zip(pools, ends, strict=True)}
