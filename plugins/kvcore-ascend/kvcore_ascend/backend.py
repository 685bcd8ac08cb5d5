"""The Ascend backend. The hooks stand in the order in which the core calls them.

A transfer is one call of memfabric that blocks until its bytes are in place. Nothing can cancel it, and a call that fails does not say how
much of it still runs: unless its arguments were refused before it began, such an end is never quiescent.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvcore import BackendInfo, Capabilities, Endpoint, Region, RegistrationError, TicketKind, TicketState, Transfer, hookimpl
from kvcore.addresses import parse
from kvcore.hookspecs import DONE, Fact, NothingPosted, OpenContext, Peer
from kvcore_ascend import __version__, native
from kvcore_ascend.options import AscendOptions

# Whether an NPU ends what it was told to write when its process dies, nobody has shown. Every descriptor costs some 0.1 ms.
ABLE = Capabilities(
    memory=frozenset({"cpu", "npu"}), blocking=True, parallel=8, needs_process_to_write=False, max_descriptors=4096, max_bytes=64 << 20
)
REACH_S, JOIN_S = 2.0, 5.0  # for a peer's port to answer, and then its engine, which now and then takes two seconds
LEAVE_S, CLOSE_S = 1.0, 15.0  # for calls towards a peer that is forgotten; for all that ends with the engine, which takes up to 14 s
NOWHERE = 0  # an address that no engine has registered
TRIES = 5  # of a write towards addresses that the engine has lost sight of


class Reach(msgspec.Struct, frozen=True):
    """An endpoint: whose engine it is, how bytes must travel to it, and its session, "" of one that is not written to."""

    instance: str
    protocol: str
    session: str


@dataclass(slots=True, eq=False)
class Remote:
    """A peer's engine that was met, at its session: what memfabric calls it, and what is known of the calls towards it."""

    session: str
    name: str
    joining: threading.Thread | None = None
    code: int = native.DONE  # of joining it
    calls: int = 0
    doubtful: bool = False  # a call failed, and may go on


class AscendBackend:
    """Pushes pages through the memfabric engine of this process."""

    def __init__(self) -> None:
        self._lock = threading.Condition()  # of all that is counted; the engine itself needs none
        self._engines: list[Any] = []
        self._blocks: list[tuple[int, int]] = []
        self._met: dict[tuple[str, str], Remote] = {}  # by instance and session; memfabric forgets none either
        self._peers: dict[str, Remote] = {}
        self._named: dict[str, int] = {}
        self._ending: threading.Thread | None = None

    @hookimpl
    def kvcore_backend_info(self) -> BackendInfo:
        """What it is and can do."""
        return BackendInfo("ascend", __version__, wire_version="1", api_version=(1, 0), options=AscendOptions, capabilities=ABLE)

    @hookimpl
    def kvcore_facts(self) -> list[Fact]:
        """The library found, and what it needs of driver and CANN."""
        return native.facts()

    @hookimpl
    def kvcore_open(self, options: AscendOptions, context: OpenContext) -> None:
        """Load the library and start the engine; ``BackendLoadError`` with what is missing, or if the process has one already."""
        self._engines, self._session = native.start(options, context)
        self._options, self._context, self._ending = options, context, None
        self._met, self._peers, self._named = {}, {}, {}

    @hookimpl
    def kvcore_register(self, regions: Sequence[Region]) -> None:
        """Register all regions, or none (B3). What memory a protocol takes, the engine decides."""
        self._blocks = native.blocks(regions)
        starts, sizes = [start for start, _ in self._blocks], [size for _, size in self._blocks]
        for engine in self._engines:
            if code := engine.batch_register_memory(starts, sizes):
                codes = {start: engine.batch_register_memory([start], [size]) for start, size in self._blocks}
                self.kvcore_unregister(regions)
                raise RegistrationError(self._refused(regions, code, [start for start, found in codes.items() if found]))

    @hookimpl
    def kvcore_unregister(self, regions: Sequence[Region]) -> None:
        """Undo ``kvcore_register``."""
        registered, self._blocks = self._blocks, []
        for engine in self._engines:
            for start, _ in registered:
                if code := engine.unregister_memory(start):
                    self._context.logger.warning("memory at %#x stays registered until the engine ends (%s)", start, native.meaning(code))

    @hookimpl
    def kvcore_endpoint(self) -> Endpoint:
        """The engine's session, which is known since it was started, and whose it is."""
        return Endpoint(msgspec.json.encode(Reach(self._context.instance, self._options.protocol, self._session)))

    @hookimpl
    def kvcore_connect(self, peer: Peer) -> None:
        """Have the engine join a peer's, or raise ``ConnectionError``. A decode side writes nothing."""
        if self._context.side == "decode":
            return
        try:
            reach = msgspec.json.decode(peer.endpoint.data, type=Reach)
            if reach.instance != peer.id or reach.protocol != self._options.protocol:
                raise ValueError(f"it is {reach.instance!r} with protocol {reach.protocol!r}, and this side has {self._options.protocol!r}")
            self._peers[peer.id] = self._joined(peer.id, reach.session)
        except (OSError, ValueError) as error:  # what msgspec raises is a ValueError
            raise ConnectionError(f"peer {peer.id} cannot be written to ({error}); see that it runs and has the same options") from error

    @hookimpl
    def kvcore_disconnect(self, peer: str) -> bool:
        """Forget a peer. True if no call towards it runs or has failed in doubt: a prefill side is read by its own calls only (R4)."""
        self._peers.pop(peer, None)
        met = [remote for (instance, _), remote in self._met.items() if instance == peer]
        with self._lock:
            idle = self._lock.wait_for(lambda: not any(remote.calls for remote in met), LEAVE_S)
            return idle and not any(remote.doubtful for remote in met) and self._context.side == "prefill"

    @hookimpl
    def kvcore_transfer(self, transfer: Transfer) -> TicketState:
        """Write one batch and wait for it. What the engine refuses was not begun; what fails otherwise may go on."""
        with self._lock:
            remote = self._peers.get(transfer.peer)
            if remote is None or not self._engines:
                return TicketState(TicketKind.FAILED, f"peer {transfer.peer} is not connected", quiescent=True, peer_broken=True)
            engine = self._engines[0]
            remote.calls += 1
        code = -1
        try:
            lists = transfer.local_address.tolist(), transfer.remote_address.tolist(), transfer.length.tolist()
            for left in reversed(range(TRIES)):  # of one thread, in order: with the last also what an earlier one began has ended
                code = engine.batch_transfer_sync_write(remote.name, *lists)
                if code != native.LOST_SIGHT or not left or not self._found_again(remote):
                    break
        finally:
            with self._lock:
                remote.calls -= 1
                remote.doubtful |= code not in (native.DONE, native.REFUSED)
                self._lock.notify_all()
        if code == native.DONE:
            return DONE
        told = f"memfabric did not write to {transfer.peer} at {remote.name} ({native.meaning(code)})"
        if code == native.REFUSED:
            raise NothingPosted(told)
        return TicketState(TicketKind.FAILED, told, peer_broken=True)

    @hookimpl
    def kvcore_poll(self, tickets: Sequence[Any]) -> list[TicketState]:
        """Of no ticket: each transfer has ended when it returns."""
        return []

    @hookimpl
    def kvcore_close(self) -> None:
        """Stop the engine; ``RuntimeError`` if a call of it or its end has not returned, since then nothing is proved (R3)."""
        deadline = time.monotonic() + CLOSE_S
        with self._lock:
            self._peers = {}
            if not self._lock.wait_for(lambda: not any(remote.calls for remote in self._met.values()), CLOSE_S):
                raise RuntimeError(f"backend 'ascend': a call of the engine goes on after {CLOSE_S:g} s; keep its memory")
            engines, self._engines = self._engines, []
        if engines:
            self._ending = _started(native.stop, engines)
        if self._ending is not None:
            self._ending.join(max(0.0, deadline - time.monotonic()))
            if self._ending.is_alive():
                raise RuntimeError(f"backend 'ascend': the engine has not ended after {CLOSE_S:g} s; keep its memory")

    def _refused(self, regions: Sequence[Region], code: int, starts: list[int]) -> str:
        """Which regions lie in blocks that the engine refused."""
        found = [
            f"region {n} of {one.nbytes} bytes at {one.ptr:#x} on {one.device}"
            for n, one in enumerate(regions)
            if any(native.blocks([one])[0][0] <= start < one.ptr + one.nbytes for start in starts)
        ]
        taken = f"protocol {self._options.protocol!r} takes {native.MEMORY[self._options.protocol]} memory"
        causes = f"memory of another kind ({taken}), or not of the device's own allocator; for cpu memory its limit (ulimit -l)"
        told = ", ".join(found) or f"{len(regions)} regions"
        return f"backend 'ascend' could not register {told} ({native.meaning(code)}); usual causes: {causes}"

    def _joined(self, peer: str, session: str) -> Remote:
        """A peer's engine once it has answered; ``OSError`` or ``ValueError`` if it does not."""
        _try_port(session)
        if (remote := self._met.get((peer, session))) is None:
            self._met[peer, session] = remote = Remote(session, self._new_name(session))
        if remote.joining is None:
            remote.calls += 1
            remote.joining = _started(self._join, remote)
        remote.joining.join(JOIN_S)
        if remote.joining.is_alive():
            raise TimeoutError(f"its engine does not answer within {JOIN_S:g} s")
        if remote.code != native.REFUSED:
            remote.joining = None
            raise ConnectionError(f"its engine cannot be joined, {native.meaning(remote.code)}")
        return remote

    def _found_again(self, remote: Remote) -> bool:
        """Have the engine join once more, under a new name, a peer whose memory it has lost sight of; False if its port does not answer."""
        try:
            _try_port(remote.session)
        except OSError:
            return False
        remote.name = self._new_name(remote.session)
        return self._write_nowhere(remote) == native.REFUSED

    def _join(self, remote: Remote) -> None:
        """Have the engine connect."""
        try:
            remote.code = self._write_nowhere(remote)
        finally:
            with self._lock:
                remote.calls -= 1
                self._lock.notify_all()

    def _write_nowhere(self, remote: Remote) -> int:
        """By this the engine joins another's: a write that it refuses when it has, since there is no such address."""
        return int(self._engines[0].batch_transfer_sync_write(remote.name, [self._blocks[0][0]], [NOWHERE], [1]))

    def _new_name(self, session: str) -> str:
        """What to call an engine that is to be joined, again or because its port has come back: one zero more each time.

        Memfabric never forgets what it found under a name; but of all peers' memory it knows only as much, from its beginning on, as the
        one has that it joined last.
        """
        with self._lock:
            zeros = self._named[session] = self._named.get(session, -1) + 1
        host, _, port = session.rpartition(":")
        return f"{host}:{'0' * zeros}{port}"


def _try_port(session: str) -> None:
    """``OSError`` if nobody listens: to join an engine that is gone may take two minutes, in which no other is joined."""
    address = parse(session, "its session")
    socket.create_connection((address.host, address.port), REACH_S).close()


def _started(work: Any, argument: Any) -> threading.Thread:
    """A thread for a call that may never return; it keeps no process from its end."""
    thread = threading.Thread(target=work, args=(argument,), name="kvcore-ascend", daemon=True)
    thread.start()
    return thread
