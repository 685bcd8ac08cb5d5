"""The ``local`` backend: pages travel over TCP between threads, processes or hosts, from memory into memory.

The embedded default, and the one to read before writing another: the hooks stand in the order in which the core calls them. Outgoing, a
peer has one link, whose writer thread takes one ticket at a time and sends its frames (magic, number of rows, rows that say where in the
receiver's regions each piece goes, the pieces) and an empty one, answered when every byte is in place. So DONE is the receiver's word
(R6), also for a cancelled ticket. Incoming, a reader thread checks all rows of a frame before a byte gets near memory (T2).
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from pydantic import BaseModel, Field

from kvcore import hookspecs as api
from kvcore.config import Seconds
from kvcore.errors import ConfigError, RegistrationError
from kvcore.hookspecs import DONE, PENDING, TicketKind, TicketState, hookimpl
from kvcore.memory import Region
from kvcore.planner import I32, U64, Descriptors, Plan, split
from kvcore.states import RoomKey

ROW = np.dtype([("region", "<i4"), ("offset", "<u8"), ("length", "<u8")])
MAGIC, WELCOME, ESTABLISHED = b"kvf\1", b"\1", b"\1"  # the last is how TCP_INFO of a connection that nobody closed begins
TEXT_BYTES, MAX_ROWS, MAX_PAYLOAD, MAX_FENCES, STOP_S = 1024, 1024, 64 << 20, 1024, 5.0  # TEXT: of a hello or answer; STOP: for a thread
MAX_STRANGERS = 256  # connections that are not let in yet; of more the oldest goes (P5)


class LocalOptions(BaseModel, extra="forbid", frozen=True):
    """Data port (0: any), seconds to be connected and again to be accepted, most payload bytes between two chances to cancel."""

    port: int = Field(0, ge=0, le=65535)
    connect_s: Seconds = 5.0
    frame_bytes: int = Field(1 << 20, ge=4096, le=MAX_PAYLOAD)


@dataclass(slots=True, eq=False)
class Connection:
    """A socket and its one thread. ``peer`` is the other side's instance id, "" for the listener and until a hello has said it."""

    sock: socket.socket
    peer: str = ""
    broken: str = ""  # why it has ended
    jobs: queue.SimpleQueue[Job | None] = field(default_factory=queue.SimpleQueue)  # what its writer is to send; None ends it
    thread: threading.Thread = field(init=False)


@dataclass(slots=True, eq=False)
class Job:
    """A ticket. Once ``begun``, bytes of it may be anywhere until the receiver answers."""

    transfer: api.Transfer
    link: Connection
    state: TicketState = PENDING
    begun: bool = False
    cancelled: bool = False


class LocalBackend:
    """Pushes pages over TCP (IPv4 and IPv6)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()  # each whose thread may still run
        self._links: dict[str, Connection] = {}  # the outgoing ones, by peer
        self._jobs: set[Job] = set()  # all that have not been reported ended
        self._memory: list[tuple[Region, memoryview]] = []
        self._issued = self._floor = 0  # number of the newest token; the newest number that is void for everybody
        self.refused = 0  # connections that were not let in (P5)
        self._fences: dict[str, int] = {}  # the newest number that is void for this peer

    @hookimpl
    def kvcore_backend_info(self) -> api.BackendInfo:
        """What it is and can do. A dead writer's last bytes may still wait in a socket here, so its death alone fences nothing (R4)."""
        able = api.Capabilities(cancel=True, visible_on_done=True, fences_on_disconnect=True, needs_process_to_write=False)
        return api.BackendInfo("local", "1.0", wire_version="1", api_version=(1, 0), options=LocalOptions, capabilities=able)

    @hookimpl
    def kvcore_open(self, options: LocalOptions, context: api.OpenContext) -> None:
        """Listen; ``ConfigError`` if that is impossible."""
        self._options, self._context, self._secret = options, context, secrets.token_bytes(16)
        host = (context.bind or context.host).strip("[]")
        try:
            family, _, _, _, address = socket.getaddrinfo(host, options.port, type=socket.SOCK_STREAM)[0]
            sock = socket.create_server(address, family=family, dualstack_ipv6=address[0] == "::" and socket.has_dualstack_ipv6())
        except (OSError, ValueError) as error:
            why = f"cannot listen on {host!r} port {options.port} ({error})"
            raise ConfigError(f"backend local {why}; set host, bind or the port") from error
        self._port, self._listener = int(sock.getsockname()[1]), Connection(sock)
        self._start(self._listener, self._accept, "kvcore-local-accept")

    @hookimpl
    def kvcore_register(self, regions: Sequence[Region]) -> None:
        """Add the regions to those registered before: all, or none (B3)."""
        for one in regions:
            if not (one.device.startswith("cpu") and 0 < one.nbytes < 2**63 and 0 < one.ptr <= 2**64 - one.nbytes):
                raise RegistrationError(f"backend local: {one} is EINVAL; usual causes: memory of an accelerator, an empty tensor")
        self._memory += [(one, memoryview((ctypes.c_char * one.nbytes).from_address(one.ptr)).cast("B")) for one in regions]

    @hookimpl
    def kvcore_endpoint(self) -> api.Endpoint:
        """Where to connect, and a fresh token to show there: the secret of this open, and a number that fences compare."""
        self._issued += 1
        return api.Endpoint(msgspec.json.encode((self._context.host, self._port, self._secret + self._issued.to_bytes(8, "little"))))

    @hookimpl
    def kvcore_connect(self, peer: api.Peer) -> None:
        """Connect, or raise ``ConnectionError``. A live link stays as it is; a decode side writes nothing and needs none."""
        link = self._links.get(peer.id)
        alive = link and not link.broken and link.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == ESTABLISHED
        if self._context.side == "decode" or alive:
            return
        self._stop(lambda one: one is link, "connected anew")
        try:
            host, port, token = msgspec.json.decode(peer.endpoint.data, type=tuple[str, int, bytes])
            link = Connection(socket.create_connection((host.strip("[]"), port), self._options.connect_s), peer.id)
            self._start(link, self._write, f"kvcore-local-to-{peer.id}")
            link.sock.sendall(msgspec.json.encode((token, self._context.instance)) + b"\n")
            if link.sock.recv(1) != WELCOME:
                raise ConnectionRefusedError("it does not take this token, or no longer")
            link.sock.settimeout(None)
        except (OSError, ValueError, OverflowError) as error:  # what msgspec raises is a ValueError
            self._stop(lambda one: one is link, "not accepted")
            raise ConnectionError(f"peer {peer.id} cannot be reached ({error}); check that it runs, then pair again") from error
        self._links[peer.id] = link

    @hookimpl
    def kvcore_disconnect(self, peer: str) -> bool:
        """True once every thread that worked for the peer has ended; no token issued until now lets it in again (R4)."""
        self._links.pop(peer, None)
        with self._lock:
            self._fences[peer] = self._issued
            if len(self._fences) > MAX_FENCES:  # the oldest becomes a fence for everybody: bounded, and still sound
                self._floor = max(self._floor, self._fences.pop(next(iter(self._fences))))
        self._stop(lambda one: one.peer == peer, "disconnected")
        return True

    @hookimpl
    def kvcore_transfer(self, transfer: api.Transfer) -> Job | TicketState:
        """Queue a batch for its peer's writer; the job is the ticket. Without a link nothing is posted, and the core pairs anew."""
        with self._lock:
            if (link := self._links.get(transfer.peer)) is None or link.broken:
                why = f"peer {transfer.peer} is not connected ({link.broken if link else 'no link'})"
                return TicketState(TicketKind.FAILED, why, quiescent=True, peer_broken=True)
            self._jobs.add(job := Job(transfer, link))
            link.jobs.put(job)
        return job

    @hookimpl
    def kvcore_poll(self, tickets: Sequence[Job]) -> list[TicketState]:
        """Look at the jobs, and forget those that have ended."""
        states = [job.state for job in tickets]
        self._jobs.difference_update(job for job, state in zip(tickets, states, strict=True) if state is not PENDING)
        return states

    @hookimpl
    def kvcore_abort(self, room: RoomKey, tickets: Sequence[Job]) -> None:
        """End tickets not begun; have the writer end the one it is at behind its current frame. One fully sent ends as it ends."""
        with self._lock:
            for job in tickets:
                job.cancelled = True
                if job.state is PENDING and not job.begun:
                    job.state = TicketState(TicketKind.FAILED, "cancelled", quiescent=True)

    @hookimpl
    def kvcore_clear(self, room: RoomKey) -> None:
        """Forget the room's tickets; what was written off is cancelled."""
        jobs = [job for job in list(self._jobs) if job.transfer.room == room]
        self.kvcore_abort(room, jobs)
        self._jobs.difference_update(jobs)

    @hookimpl
    def kvcore_held_rooms(self) -> list[RoomKey]:
        """The rooms of tickets not yet reported ended."""
        return list({job.transfer.room for job in list(self._jobs)})

    @hookimpl
    def kvcore_close(self) -> None:
        """Stop all threads, close all sockets, forget all memory."""
        self._stop(lambda one: True, "closed")
        self._links, self._jobs, self._fences, self._memory = {}, set(), {}, []

    def _start(self, connection: Connection, work: Callable[[Connection], None], name: str) -> None:
        connection.thread = threading.Thread(target=self._run, args=(connection, work), name=name, daemon=True)
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            if self._listener.broken:
                connection.sock.close()
                raise ConnectionError("backend local is closed")
            try:
                connection.thread.start()
            except RuntimeError as error:  # no more threads are to be had
                connection.sock.close()
                raise ConnectionError(str(error)) from error
            self._connections = {one for one in self._connections if one.thread.is_alive()} | {connection}

    def _run(self, connection: Connection, work: Callable[[Connection], None]) -> None:
        why = "closed by the other side"
        try:
            work(connection)
        except Exception as error:  # whatever came or failed, it ends this connection only (T7, P5)
            why = str(error) or repr(error)
        with self._lock:
            stopped, connection.broken = bool(connection.broken), connection.broken or why
            for job in [job for job in list(self._jobs) if job.link is connection and job.state is PENDING]:
                reason = f"link to peer {connection.peer} ended: {connection.broken}"
                job.state = TicketState(TicketKind.FAILED, reason, quiescent=not job.begun, peer_broken=not stopped)
            connection.sock.close()
            self.refused += (refused := not (stopped or connection.peer))
        if refused and (self.refused <= 10 or self.refused % 1000 == 0):
            self._context.logger.warning("connection to the data port refused (number %d): %s", self.refused, why[:200])

    def _stop(self, which: Callable[[Connection], bool], why: str) -> None:
        """End connections and wait for their threads; ``RuntimeError`` if one goes on."""
        with self._lock:
            chosen = [one for one in self._connections if which(one)]
            for one in chosen:
                one.broken = one.broken or why
                one.jobs.put(None)
                with contextlib.suppress(OSError):
                    one.sock.shutdown(socket.SHUT_RDWR)  # wakes whoever waits for it
        for one in chosen:
            one.thread.join(STOP_S)
            if one.thread.is_alive():
                raise RuntimeError(f"backend local: {why}, but {one.thread.name} goes on after {STOP_S:g} s; keep its memory")
        with self._lock:
            self._connections.difference_update(chosen)

    def _pieces(self, region: I32, offset: U64, length: U64) -> tuple[list[memoryview], str]:
        """The memory itself for arrays of shape ``(n,)``; or none of it, and which of them is not within its region (T2)."""
        views = [view for _, view in self._memory]
        size = np.array([*map(len, views), 0], np.uint64)[np.minimum(region.view(np.uint32), len(views))]  # 0 for unknown regions
        bad = (offset > size) | (length > size - offset)  # no sum that could wrap; the difference counts only if offset fits
        if bad.any():
            n, o, r, most = (array[bad][0] for array in (length, offset, region, size))
            return [], f"{n} bytes at {o} of region {r} are outside its {most} bytes ({len(views)} regions); compare both sides' pools"
        return [views[r][o : o + n] for r, o, n in zip(region.tolist(), offset.tolist(), length.tolist(), strict=True)], ""

    def _write(self, link: Connection) -> None:
        while (job := link.jobs.get()) is not None:
            if link.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) != ESTABLISHED:  # no byte of it was sent: no quarantine
                return
            with self._lock:
                job.begun = job.state is PENDING
            job.state = self._send(job) if job.begun else job.state

    def _send(self, job: Job) -> TicketState:
        sock, batch, problem = job.link.sock, job.transfer, ""
        each = Descriptors(batch.local_region, batch.remote_region, batch.local_offset, batch.remote_offset, batch.length)
        for part in (rows.first for rows in split(Plan(each), MAX_ROWS, self._options.frame_bytes)):
            pieces, problem = self._pieces(part.local_region, part.local_offset, part.length)
            if problem := "cancelled" if job.cancelled else problem:
                break
            rows = np.rec.fromarrays([part.remote_region, part.remote_offset, part.length], ROW).tobytes()
            sock.sendall(b"".join([MAGIC, len(part).to_bytes(2, "little"), rows, *pieces]))
        sock.sendall(MAGIC + bytes(2))
        if len(answer := sock.recv(TEXT_BYTES, socket.MSG_WAITALL)) < TEXT_BYTES:
            raise ConnectionError("closed by the other side")
        problem = problem or answer.rstrip(b"\0").decode()
        return TicketState(TicketKind.FAILED, problem, quiescent=True) if problem else DONE

    def _accept(self, listener: Connection) -> None:
        latest: deque[Connection] = deque()
        while not listener.broken:
            try:
                latest.append(Connection(listener.sock.accept()[0]))
                self._start(latest[-1], self._read, "kvcore-local-from")
                if len(latest) > MAX_STRANGERS and not (oldest := latest.popleft()).peer:
                    with contextlib.suppress(OSError):
                        oldest.sock.shutdown(socket.SHUT_RDWR)
            except (OSError, RuntimeError):  # out of file descriptors or threads: some may come free
                with contextlib.suppress(queue.Empty):
                    listener.jobs.get(timeout=0.05)

    def _let_in(self, incoming: Connection) -> None:
        line, until = b"", time.monotonic() + self._options.connect_s  # for the whole hello
        while not line.endswith(b"\n") and len(line) < TEXT_BYTES:
            incoming.sock.settimeout(max(until - time.monotonic(), 0.001))
            line += incoming.sock.recv(1) or b"\n"
        token, peer = msgspec.json.decode(line, type=tuple[bytes, str])
        with self._lock:
            if token[:16] != self._secret or int.from_bytes(token[16:], "little") <= max(self._floor, self._fences.get(peer, 0)):
                raise PermissionError(f"{peer!r:.99} does not show a token that is good")
            incoming.peer = peer  # from here on a disconnect finds it: a fence has no gap
        incoming.sock.settimeout(None)
        incoming.sock.sendall(WELCOME)

    def _read(self, incoming: Connection) -> None:
        self._let_in(incoming)
        problem = ""
        with incoming.sock.makefile("rb") as file:
            while not incoming.broken and (head := file.read(len(MAGIC) + 2)).startswith(MAGIC):
                if not (count := int.from_bytes(head[len(MAGIC) :], "little")):
                    incoming.sock.sendall(problem.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0"))
                    problem = ""
                    continue
                rows = np.frombuffer(file.read(count * ROW.itemsize), ROW)
                pieces, wrong = self._pieces(rows["region"], rows["offset"], rows["length"])
                if wrong:  # what this frame carries goes nowhere
                    problem = problem or wrong
                    file.read(min(sum(rows["length"].tolist()), MAX_PAYLOAD))
                for piece in pieces:
                    file.readinto(piece)
