"""The ``local`` backend: pages travel over TCP between threads, processes or hosts, straight from memory into memory.

The embedded default, and the one to read before writing another; its hooks stand in the order in which the core calls them.
Outgoing, a peer has one link with a writer thread, which cuts tickets into frames. The receiver answers the last frame of a ticket when
every byte is in place, so DONE is the receiver's word (R6); a cancelled ticket gets an early last frame, and its answer proves the end.
Incoming, a connection has one reader thread, which checks all rows of a frame before a byte of its payload gets near memory (T2).
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from pydantic import BaseModel, Field

from kvcore import backends as parts, hookspecs as api
from kvcore.backends import Connection, Job, Link, failed
from kvcore.errors import ConfigError
from kvcore.hookspecs import DONE, PENDING, NothingPosted, Ticket, TicketState, Transfer, hookimpl
from kvcore.memory import Region
from kvcore.states import RoomKey

MAX_CONNECTIONS = 4096
MAX_FENCES = 1024
STOP_S = 5.0  # how long threads whose sockets are shut are waited for


class LocalOptions(BaseModel, extra="forbid", frozen=True):
    """Data port (0: any), seconds for a new connection to be up and accepted, most payload bytes between two chances to cancel."""

    port: int = Field(0, ge=0, le=65535)
    connect_s: float = Field(5.0, gt=0, allow_inf_nan=False)
    frame_bytes: int = Field(1 << 20, ge=4096, le=parts.MAX_PAYLOAD)


class LocalBackend:
    """Pushes pages over TCP (IPv4 and IPv6). What it claims it can prove: DONE is the receiver's word, a fence is a joined thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._closed.set()
        self._listener: socket.socket | None = None
        self._connections: set[Connection] = set()  # each whose thread may still run
        self._links: dict[str, Link] = {}
        self._jobs: dict[Ticket, Job] = {}
        self._numbers = itertools.count(1)  # goes on after a reopen: an old ticket never names a new one
        self._memory = parts.Memory()
        self._issued = self._floor = 0  # number of the newest token; the newest number that is void for everybody
        self._fences: dict[str, int] = {}  # the newest number that is void for this peer

    @hookimpl
    def kvcore_backend_info(self) -> api.BackendInfo:
        """What it is and can do. A dead writer's last bytes may still wait in a socket here, so its death alone fences nothing (R4)."""
        able = api.Capabilities(cancel=True, visible_on_done=True, fences_on_disconnect=True, needs_process_to_write=False)
        return api.BackendInfo("local", "1.0", wire_version="1", api_version=(1, 0), options=LocalOptions, capabilities=able)

    @hookimpl
    def kvcore_open(self, options: LocalOptions, context: api.OpenContext) -> None:
        """Listen; ``ConfigError`` if that is impossible."""
        self._options, self._context, self._secret = options, context, secrets.token_bytes(32)
        host = (context.bind or context.host).strip("[]")
        try:
            family, _, _, _, address = socket.getaddrinfo(host, options.port, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(address, family=family, dualstack_ipv6=address[0] == "::" and socket.has_dualstack_ipv6())
        except (OSError, ValueError) as error:
            raise ConfigError(f"backend local cannot listen on {host!r} port {options.port} ({error}); set bind or the port") from error
        self._listener, self._port = listener, int(listener.getsockname()[1])
        self._closed.clear()
        self._acceptor = threading.Thread(target=self._accept, args=(listener,), name="kvcore-local-accept", daemon=True)
        self._acceptor.start()

    @hookimpl
    def kvcore_register(self, regions: Sequence[Region]) -> None:
        """Add the regions to those registered before: all, or none."""
        self._memory = parts.Memory([*self._memory.regions, *regions])

    @hookimpl
    def kvcore_unregister(self, regions: Sequence[Region]) -> None:
        """Forget regions, and with them every connection and token: the indices that peers know are void."""
        with self._lock:
            self._memory = parts.Memory([region for region in self._memory.regions if region not in regions])
            self._floor = self._issued
        self._stop_all("memory was unregistered")

    @hookimpl
    def kvcore_endpoint(self) -> api.Endpoint:
        """Where to connect, and a fresh token: a number that fences compare, signed for this open of this instance."""
        with self._lock:
            self._issued += 1
            number = self._issued.to_bytes(8, "little")
        return api.Endpoint(msgspec.msgpack.encode(parts.Address(self._context.host, self._port, number + self._sign(number))))

    @hookimpl
    def kvcore_connect(self, peer: api.Peer) -> None:
        """Connect, or raise ``ConnectionError`` within ``connect_s``. A decode side writes nothing and needs no link."""
        if self._context.side == "decode":
            return
        old = self._links.pop(peer.id, None)
        self._stop(lambda one: one is old, "connected anew")
        try:
            address = msgspec.msgpack.decode(peer.endpoint.data, type=parts.Address)
            link = Link(parts.dial(address, self._context.instance, self._options.connect_s), peer.id)
        except (OSError, ValueError, OverflowError) as error:  # what msgspec raises is a ValueError
            raise ConnectionError(f"peer {peer.id} cannot be reached ({error}); check that it runs, then pair again") from error
        self._start(link, partial(self._write, link), f"kvcore-local-to-{peer.id}")
        self._links[peer.id] = link

    @hookimpl
    def kvcore_disconnect(self, peer: str) -> bool:
        """True once every thread that worked for the peer has ended; no token issued until now lets it in again (R4)."""
        with self._lock:
            self._fences.pop(peer, None)
            self._fences[peer] = self._issued
            if len(self._fences) > MAX_FENCES:  # the oldest becomes a fence for everybody: bounded, and still sound
                self._floor = max(self._floor, self._fences.pop(next(iter(self._fences))))
            self._links.pop(peer, None)
        return self._stop(lambda one: one.peer == peer, "disconnected")

    @hookimpl
    def kvcore_transfer(self, transfer: Transfer) -> Ticket | TicketState:
        """Queue a batch for its peer's writer."""
        if not transfer.length.any():
            return DONE
        with self._lock:
            link = self._links.get(transfer.peer)
            if link is not None:
                self._hear(link)  # a peer that died while idle costs no quarantine
            if link is None or link.broken:
                raise NothingPosted(f"peer {transfer.peer} is not connected ({link.broken if link else 'no connection'}); pair again")
            job = Job(next(self._numbers), transfer, self._memory, link)
            self._jobs[job.ticket] = job
            link.jobs.put(job)
        return job.ticket

    @hookimpl
    def kvcore_poll(self, tickets: Sequence[Ticket]) -> list[TicketState]:
        """Read the answers that have arrived. A ticket reported ended is forgotten."""
        with self._lock:
            for link in {self._jobs[ticket].link for ticket in tickets if ticket in self._jobs}:
                self._hear(link)
            unknown = failed("no such ticket: it was reported or cleared before", quiescent=False)
            states = [self._jobs[ticket].state if ticket in self._jobs else unknown for ticket in tickets]
            for ticket, state in zip(tickets, states, strict=True):
                if state is not PENDING:
                    self._jobs.pop(ticket, None)
        return states

    @hookimpl
    def kvcore_abort(self, room: RoomKey, tickets: Sequence[Ticket]) -> None:
        """End tickets not begun; have the writer end the one it is at behind its current frame. One fully sent ends as it ends."""
        with self._lock:
            for job in [self._jobs[ticket] for ticket in tickets if ticket in self._jobs]:
                job.cancelled = True
                if job.state is PENDING and not job.started:
                    job.state = failed("cancelled")

    @hookimpl
    def kvcore_clear(self, room: RoomKey) -> None:
        """Forget the room's tickets; what was written off is cancelled."""
        with self._lock:
            tickets = [ticket for ticket, job in self._jobs.items() if job.transfer.room == room]
            self.kvcore_abort(room, tickets)
            for ticket in tickets:
                del self._jobs[ticket]

    @hookimpl
    def kvcore_held_rooms(self) -> list[RoomKey]:
        """The rooms of tickets not yet reported ended."""
        with self._lock:
            return list({job.transfer.room for job in self._jobs.values()})

    @hookimpl
    def kvcore_close(self) -> None:
        """Stop all threads, close all sockets, forget all memory."""
        self._closed.set()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the acceptor
            self._acceptor.join(STOP_S)
            self._listener.close()
            self._listener = None
        self._stop_all("closed")
        for table in (self._links, self._jobs, self._fences):
            table.clear()
        self._memory = parts.Memory()

    def _sign(self, number: bytes) -> bytes:
        return hmac.digest(self._secret, number, "sha256")[:16]

    def _start(self, connection: Connection, work: Callable[[], None], name: str) -> None:
        connection.thread = threading.Thread(target=self._run, args=(connection, work), name=name, daemon=True)
        with self._lock, contextlib.ExitStack() as undo:
            undo.callback(connection.sock.close)
            if self._closed.is_set() or len(self._connections) >= MAX_CONNECTIONS:
                raise ConnectionError("backend local is closed or has too many connections")
            connection.thread.start()
            self._connections.add(connection)
            undo.pop_all()

    def _run(self, connection: Connection, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # whatever came or failed, it ends this connection only (T7, P5)
            self._break(connection, str(error) or repr(error))
        finally:
            with self._lock:
                self._connections.discard(connection)
                connection.sock.close()

    def _stop(self, which: Callable[[Connection], bool], why: str) -> bool:
        """End connections and wait for their threads; whether all have ended."""
        with self._lock:
            chosen = [connection for connection in self._connections if which(connection)]
        for connection in chosen:
            self._break(connection, why, peer_broken=False)
        deadline = time.monotonic() + STOP_S
        for connection in chosen:
            connection.thread.join(max(deadline - time.monotonic(), 0))
        return not any(connection.thread.is_alive() for connection in chosen)

    def _stop_all(self, why: str) -> None:
        if not self._stop(lambda one: True, why):
            raise RuntimeError(f"backend local: {why}, but a thread has not ended within {STOP_S:g} s; keep the memory until it has")

    def _break(self, connection: Connection, why: str, peer_broken: bool = True) -> None:
        """Mark a connection as ended and wake its thread. What a link has not had answered by now fails."""
        with self._lock:
            if connection.broken:
                return
            connection.broken = why
            self._context.logger.debug("connection with %s ended: %s", connection.peer or "nobody known", why)
            if isinstance(connection, Link):
                self._hear(connection)
                connection.jobs.put(None)
                for job in self._jobs.values():
                    if job.link is connection and job.state is PENDING:
                        job.state = failed(f"connection to peer {connection.peer} ended: {why}", not job.started, peer_broken)
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _hear(self, link: Link) -> None:
        """Take in the answers that have arrived, and whether no more will. Called with the lock held."""
        answers, ended = parts.answers(link)
        for ticket, text in answers:
            job = self._jobs.get(ticket)
            if job is not None and job.link is link and job.answer is None:
                job.answer = text
                job.settle()
        if ended:
            self._break(link, ended)

    def _write(self, link: Link) -> None:
        """The writer thread."""
        while (job := link.jobs.get()) is not None:
            with self._lock:
                if job.state is not PENDING:
                    continue
                job.started = True
            written = parts.send(job, self._options.frame_bytes)
            with self._lock:
                job.written = written
                job.settle()

    def _accept(self, listener: socket.socket) -> None:
        """The acceptor thread."""
        while not self._closed.is_set():
            try:
                incoming = Connection(listener.accept()[0])
                self._start(incoming, partial(self._serve, incoming), "kvcore-local-from")
            except (OSError, RuntimeError):  # out of file descriptors, threads or connections: some may come free
                self._closed.wait(0.05)

    def _serve(self, incoming: Connection) -> None:
        """A reader thread: the hello, then frames."""
        token, peer = parts.greet(incoming.sock, self._options.connect_s)
        number = token[:8]
        with self._lock:
            void = max(self._floor, self._fences.get(peer, 0))
            good = hmac.compare_digest(token[8:], self._sign(number)) and int.from_bytes(number, "little") > void
            incoming.peer = peer if good else ""  # from here on a disconnect finds it: a fence has no gap
        parts.answer(incoming.sock, 0, "" if good else "its token is not, or no longer, good here")
        if good:
            parts.take(incoming, lambda: self._memory)
