"""The Mooncake backend. The hooks stand in the order in which the core calls them.

A transfer becomes one write of the engine per descriptor, each asked for until it has ended by itself: the engine's own batches spin on a
core, give up after a while, and report a failure while the rest of them still runs. What was posted cannot be cancelled.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from kvcore import BackendInfo, Capabilities, Endpoint, Region, RegistrationError, TicketKind, TicketState, Transfer, hookimpl
from kvcore.addresses import parse
from kvcore.errors import cause
from kvcore.hookspecs import DONE, PENDING, RETRY, Fact, OpenContext, Peer
from kvcore.states import RoomKey
from kvcore_mooncake import __version__, native
from kvcore_mooncake.options import P2P, MooncakeOptions

# A probe of a peer that is stopped blocks for a minute; over TCP a dead writer's last bytes may still wait in a socket here.
ABLE = Capabilities(
    frozenset({"cpu", "cuda", "rocm"}), blocking=True, parallel=8, needs_process_to_write=False, max_descriptors=2048, max_bytes=64 << 20,
    quick_bytes=64 << 10,
)  # fmt: skip
FRESH_S = 1.0  # a peer that has taken a transfer within this time is not probed before the next
CONNECT_S, LEAVE_S, CLOSE_S = 5.0, 1.0, 3.0  # to reach a peer's port; for what is in flight to one that is forgotten; for calls at the end
MOST_QUEUED, NOWHERE = 65535, 0  # writes that may wait for a peer; an address that no engine has registered
CHECKS = 256  # most writes of a ticket that are looked at in one call of kvcore_poll


@dataclass(slots=True, eq=False)
class Remote:
    """A peer's engine: the name it is opened under, whether over TCP, when it last was well, and whether a probe of it runs."""

    name: str
    linked: bool = False
    heard: float = 0.0
    probing: bool = False


@dataclass(slots=True, eq=False)
class Job:
    """A ticket: its writes that have not ended. ``room`` is None once nobody asks for it any more; it is kept until it has ended."""

    room: RoomKey | None
    peer: str
    remote: Remote
    unposted: int  # writes to come, as long as the call that posts them has not returned; then 0
    running: deque[int] = field(default_factory=deque)
    failed: int = 0
    cancelled: bool = False
    problem: TicketState | None = None  # why not all of it was posted
    state: TicketState = PENDING


class MooncakeBackend:
    """Pushes pages through one Mooncake engine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)  # a call of the engine has, or a job
        self._engine: Any = None
        self._remotes: dict[str, Remote] = {}
        self._opened: dict[str, tuple[str, int]] = {}  # by address: who was last there, and how many before
        self._left: dict[str, Remote] = {}  # by name: peers that were forgotten, and may still have connections
        self._jobs: set[Job] = set()
        self._regions: list[Region] = []

    @hookimpl
    def kvcore_backend_info(self) -> BackendInfo:
        return BackendInfo("mooncake", __version__, wire_version="2", api_version=(1, 0), options=MooncakeOptions, capabilities=ABLE)

    @hookimpl
    def kvcore_facts(self) -> list[Fact]:
        return native.facts()

    @hookimpl
    def kvcore_open(self, options: MooncakeOptions, context: OpenContext) -> None:
        """Load the library and start an engine; ``BackendLoadError`` with what is missing, ``ConfigError`` for a setting or variable."""
        self._options, self._context = options, context
        self._library, self._engine, self._session = native.start(options, context)

    @hookimpl
    def kvcore_register(self, regions: Sequence[Region]) -> None:
        """Register all regions, or none (B3)."""
        if unfit := sorted({one.device.partition(":")[0] for one in regions} - native.able(self._library)[0]):
            remedy = f"uninstall it, then {native.BUILD.format(unfit[-1])}"
            raise RegistrationError(f"backend 'mooncake': this build does not move {unfit} memory; {remedy}")
        addresses = [one.ptr for one in regions]
        if not (code := self._engine.batch_register_memory(addresses, [one.nbytes for one in regions])):
            self._regions = list(regions)
            return
        codes = [self._engine.register_memory(one.ptr, one.nbytes) for one in regions]  # which it was, the engine does not tell
        self._engine.batch_unregister_memory([ptr for ptr, refused in zip(addresses, codes, strict=True) if not refused])
        found = (f"region {n} of {regions[n].nbytes} bytes at {regions[n].ptr:#x} ({native.meaning(c)})" for n, c in enumerate(codes) if c)
        told = f"{len(regions)} regions ({native.meaning(code)}): {', '.join(found)}"
        causes = "a region listed twice, the limit of locked memory (ulimit -l), a device that the network does not reach"
        raise RegistrationError(f"backend 'mooncake' could not register {told}; usual causes: {causes}")

    @hookimpl
    def kvcore_unregister(self, regions: Sequence[Region]) -> None:
        registered, self._regions = self._regions, []
        if registered and (code := self._engine.batch_unregister_memory([one.ptr for one in registered])):
            self._context.logger.warning("memory could not be unregistered (%s); closing the engine does it", native.meaning(code))

    @hookimpl
    def kvcore_endpoint(self) -> Endpoint:
        """The engine's name, how bytes must travel to it, and whose it is."""
        return Endpoint(msgspec.msgpack.encode((self._session, self._options.protocol, self._context.instance)))

    @hookimpl
    def kvcore_connect(self, peer: Peer) -> None:
        """Check a peer's endpoint and that its port can be reached, or raise ``ConnectionError``. A decode side writes nothing."""
        if self._context.side == "decode":
            return
        try:
            session, protocol, instance = msgspec.msgpack.decode(peer.endpoint.data, type=tuple[str, str, str])
            if (instance, protocol) != (peer.id, self._options.protocol):
                raise ValueError(f"it is {instance!r} with protocol {protocol!r} and this side uses {self._options.protocol!r}, set alike")
            name = self._name(session, peer.id)
        except (OSError, ValueError) as error:  # what msgspec raises is a ValueError
            raise ConnectionError(f"peer {peer.id} cannot be reached ({error}); check that it runs, then pair again") from error
        with self._lock:  # a peer that is connected again, or has writes in flight, is the one it was
            known = [*self._remotes.values(), *(job.remote for job in self._jobs)]
            self._remotes[peer.id] = next((one for one in known if one.name == name), None) or Remote(name)
            self._left.pop(name, None)

    @hookimpl
    def kvcore_disconnect(self, peer: str) -> bool:
        """Forget a peer. True if nothing is in flight to it: a prefill side's memory is read by its own writes only (R4)."""
        with self._lock:
            remote = self._remotes.pop(peer, None)
            jobs = [job for job in self._jobs if job.peer == peer]
            for job in jobs:
                job.cancelled = True
            idle = self._ended.wait_for(lambda: all(self._look(job) is not PENDING for job in jobs), LEAVE_S)
        self._left |= {remote.name: remote} if remote is not None and remote.linked and self._regions else {}
        for gone in [one for one in self._left.values() if not _listens(one.name)]:
            self._hang_up(self._left.pop(gone.name))
        return idle and self._context.side == "prefill"

    @hookimpl
    def kvcore_transfer(self, transfer: Transfer, may_wait: bool) -> Job | TicketState:
        """Post one write per descriptor. A failure is quiescent if all that was posted, or nothing, ended well."""
        with self._lock:
            remote, size = self._remotes.get(transfer.peer), int(transfer.length.size)
            if remote is None:
                return _failed(f"peer {transfer.peer} is not connected", peer_broken=True)
            queued = sum(job.unposted + len(job.running) for job in self._jobs if job.remote is remote)
            probe = time.monotonic() - remote.heard > FRESH_S
            if remote.probing or (probe and not may_wait) or (queued and queued + size > MOST_QUEUED):
                return RETRY
            remote.probing = probe
            self._jobs.add(job := Job(transfer.room, transfer.peer, remote, size))
        try:
            job.problem = self._post(job, transfer, probe)
        except Exception as error:
            job.problem, job.failed = _failed(cause(error)), job.failed + 1
        with self._lock:
            job.unposted = 0
            remote.probing &= not probe
            self._ended.notify_all()
            return job if job.running else self._end(job)

    @hookimpl
    def kvcore_poll(self, tickets: Sequence[Job]) -> list[TicketState]:
        """Look at the writes, also at those that nobody asks for any more."""
        with self._lock:
            states = [self._look(job) for job in tickets]
            for job in [job for job in self._jobs if job.room is None]:
                self._look(job)
        return states

    @hookimpl
    def kvcore_abort(self, room: RoomKey, tickets: Sequence[Job]) -> None:
        """Post no more of the room; what was posted ends as it ends."""
        with self._lock:
            for job in self._jobs:
                job.cancelled |= job.room == room

    @hookimpl
    def kvcore_clear(self, room: RoomKey) -> None:
        """Ask no more for the room's writes; each is kept until it has ended."""
        with self._lock:
            for job in [job for job in self._jobs if job.room == room]:
                job.room, job.cancelled = None, True

    @hookimpl
    def kvcore_held_rooms(self) -> list[RoomKey]:
        with self._lock:
            return list({job.room for job in self._jobs if job.room is not None})

    @hookimpl
    def kvcore_close(self) -> None:
        """Stop the engine; writes that still run go with it. ``RuntimeError`` if a call of it has not returned, which keeps it alive."""
        with self._lock:
            self._remotes, self._left = {}, {}
            for job in self._jobs:
                job.cancelled = True
            if not self._ended.wait_for(lambda: not any(job.unposted for job in self._jobs), CLOSE_S):
                raise RuntimeError(f"backend 'mooncake': a call of the engine goes on after {CLOSE_S:g} s; keep its memory")
            while self._jobs:
                self._jobs.pop().state = _failed("the engine was closed", quiescent=False)
            self._engine = None  # ends its threads and closes its sockets

    def _name(self, session: str, peer: str) -> str:
        """What to call a peer's engine. Mooncake remembers for ever what it finds under a name, and ports come back: another instance
        at a known port is called by as many leading zeros as the port has changed hands."""
        if self._options.metadata_server != P2P:
            return session
        address = parse(session, "its engine's address")
        socket.create_connection((address.host, address.port), CONNECT_S).close()
        owner, times = self._opened.get(session, (peer, 0))
        times += owner != peer
        self._opened[session] = (peer, times)
        host, _, port = session.rpartition(":")
        return f"{host}:{'0' * times}{port}"

    def _post(self, job: Job, transfer: Transfer, probe: bool) -> TicketState | None:
        """Post a write per descriptor; why not all were posted. A probe waits up to a minute for a peer that is stopped."""
        name, tcp = job.remote.name, self._options.protocol == "tcp"
        if probe and (code := self._engine.send_probe(name)):
            return _failed(f"no answer from {job.peer} at {name} ({native.meaning(code)})", peer_broken=True)
        addresses = transfer.local_address.tolist(), transfer.remote_address.tolist(), transfer.length.tolist()
        for local, away, size in zip(*addresses, strict=True):
            if job.cancelled:
                return _failed("cancelled before all of it was posted")
            write = self._engine.transfer_submit_write(name, local, away, size)
            if not write:
                job.failed += not tcp  # others may have begun it
                return _failed(f"the engine did not take a write of {size} bytes to {name}; see its own log")
            job.remote.linked = tcp
            job.running.append(write)
        return None

    def _hang_up(self, remote: Remote) -> None:
        """Have the engine close its connections to a peer that is gone, which it does when one fails: by writes that no engine takes. To
        one that lives they stay: it may be connected again, and what it is sent must not meet a connection that is being closed."""
        lanes = 16 if "MC_TCP_LANES_PER_PEER" in os.environ else 4  # the most it allows; what it has by itself
        writes = [self._engine.transfer_submit_write(remote.name, self._regions[0].ptr, NOWHERE, 1) for _ in range(lanes)]
        with self._lock:
            self._jobs.add(Job(None, "", remote, 0, deque(filter(None, writes))))

    def _look(self, job: Job) -> TicketState:
        """With the lock held: a job's state. The engine frees a write that it has reported ended, so none is asked for twice."""
        if job.unposted or job.state is not PENDING:
            return job.state
        for _ in range(CHECKS):
            if not job.running:
                return self._end(job)
            code = self._engine.transfer_check_status(job.running[0])
            if code in (0, -2):  # a time-out of the engine's is not the end
                break
            job.running.popleft()
            job.failed += code != 1
        return PENDING

    def _end(self, job: Job) -> TicketState:
        """With the lock held: book the end of a job of which nothing runs. A write that failed may still be on its way in the network."""
        self._jobs.discard(job)
        self._ended.notify_all()
        job.state = job.problem or DONE
        if job.failed:
            failure = _failed(f"{job.failed} writes to {job.remote.name} failed in the engine; see its own log")
            job.state = replace(job.problem or failure, quiescent=False)
        job.remote.heard = time.monotonic() if job.state is DONE else 0.0
        return job.state


def _listens(name: str) -> bool:
    """Whether somebody does at the port of an engine's name."""
    try:
        host, _, port = name.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S / 10).close()
    except (OSError, ValueError):
        return False
    return True


def _failed(reason: str, quiescent: bool = True, peer_broken: bool = False) -> TicketState:
    return TicketState(TicketKind.FAILED, reason, quiescent, peer_broken)
