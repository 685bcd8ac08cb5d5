"""The hooks a backend implements and the values that pass through them. API version 1.0.

A backend is a class named by an entry point of the group ``kvcore.backends``. The core makes one instance per manager and
registers it with that manager's own ``pluggy.PluginManager``. Hooks are called from the core's threads only; B5 and B6 of the
contract say which may run beside which. An implementation may name fewer arguments than the spec has.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import pluggy
from pydantic import BaseModel

from kvcore.memory import PoolGeometry, Region, total
from kvcore.states import RoomKey

API_VERSION = (1, 0)
"""Major and minor version of the hooks. A backend works with the same major and a minor not above the core's."""

hookspec = pluggy.HookspecMarker("kvcore")
hookimpl = pluggy.HookimplMarker("kvcore")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend's engine can do; known before the engine's library is loaded."""

    memory: frozenset[str] = frozenset({"cpu"})
    """Kinds of memory it can register: cpu, cuda, rocm, npu."""
    cancel: bool = False
    """``kvcore_abort`` makes tickets end early."""
    blocking: bool = False
    """``kvcore_transfer`` may block; the core calls it on workers of its own, beside every other hook."""
    parallel: int = 1
    """With ``blocking``: transfers that may run at once. Of several the last is kept for a peer that has none running (B5)."""
    quick_bytes: int | None = None
    """With ``blocking``: a transfer of at most so many bytes and 64 descriptors returns within a millisecond, as the other hooks do, or
    answers RETRY where it must wait after all. The core posts it without a worker while none has anything to do."""
    visible_on_done: bool = True
    """A DONE ticket means that all bytes are visible in the peer's memory (R6)."""
    fences_on_disconnect: bool = False
    """``kvcore_disconnect`` can prove that a peer writes no more (R4); where this is not declared, True from it is no such proof."""
    needs_process_to_write: bool = True
    """The engine writes only while the writer's process lives: a peer known to be dead is fenced (R4)."""
    needs_progress: bool = False
    """``kvcore_progress`` must be called for writes to arrive here."""
    descriptors: Literal["flat", "pages"] = "flat"
    """With ``pages`` a transfer is of one pool and names its pages too, for engines that prepare a list of all of them once."""
    max_descriptors: int | None = None
    """Most descriptors of one transfer; the core splits above it."""
    max_bytes: int | None = None
    """Most bytes of one transfer; the core splits above it."""
    exclusive: bool = False
    """No hook may run beside another."""
    reopens: bool = True
    """After ``kvcore_close`` an engine can be opened again in the same process (B7)."""


class NoOptions(BaseModel, extra="forbid", frozen=True):
    """The options model of a backend that takes none."""


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """A backend's own description; making it imports no vendor library."""

    name: str
    """Equals the entry point's name."""
    version: str
    wire_version: str
    """Peers pair only with an equal one (P1)."""
    api_version: tuple[int, int]
    """The version of the hooks it was written for."""
    options: type[BaseModel] = NoOptions
    capabilities: Capabilities = field(default_factory=Capabilities)


@dataclass(frozen=True, slots=True)
class Fact:
    """Something of an engine, or of what it finds here, for a person who looks for a fault."""

    name: str
    """Such as "engine", "libibverbs" or "transports"."""
    value: str
    """Such as "0.3.7", "missing" or "tcp, rdma"."""
    advice: str = ""
    """What to do about it, if something should be done."""


@dataclass(frozen=True, slots=True)
class OpenContext:
    """Where and for whom an engine is started."""

    instance: str
    side: str
    """The manager's role: prefill, decode or both."""
    rank: int
    host: str
    """The address that peers reach this instance under."""
    bind: str
    """The address to listen on."""
    logger: logging.Logger
    pools: tuple[PoolGeometry, ...] = ()
    """What the regions that will be registered are made of, pool by pool."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What a peer needs to reach this engine (``data``) and its regions (``keys``, one each, or none at all)."""

    data: bytes
    keys: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer to be made reachable: its instance id, its engine's endpoint and its regions in registration order."""

    id: str
    endpoint: Endpoint
    regions: tuple[Region, ...]
    pools: tuple[PoolGeometry, ...] = ()
    """What its regions are made of, pool by pool."""


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """One batch of descriptors: copy ``length[i]`` bytes of a local region into a region of ``peer``.

    The five arrays have one shape, ``(n,)`` with n >= 1; regions are int32 indices into the registered lists, offsets and
    lengths uint64 bytes. No length is zero, runs contiguous on both sides are merged, and descriptors are sorted by region pair.
    """

    room: RoomKey
    peer: str
    local_region: npt.NDArray[np.int32]
    remote_region: npt.NDArray[np.int32]
    local_offset: npt.NDArray[np.uint64]
    remote_offset: npt.NDArray[np.uint64]
    length: npt.NDArray[np.uint64]
    local_base: npt.NDArray[np.uint64]
    """Addresses of all local regions, for ``local_address``."""
    remote_base: npt.NDArray[np.uint64]
    chunk: int = 0
    """Which chunk of the room this is, or is a part of; counts from 1 and leaves out empty chunks."""
    pool: str = ""
    """For ``descriptors="pages"``: the one pool it is of. The same bytes as the descriptors are: ``local_pages[i]`` to ``remote_pages[i]``
    in every region of the pool. Empty where a single page is above the limits; then there are descriptors only."""
    local_pages: npt.NDArray[np.int64] | None = None
    remote_pages: npt.NDArray[np.int64] | None = None

    @property
    def local_address(self) -> npt.NDArray[np.uint64]:
        """Absolute local address of each descriptor."""
        return self.local_base[self.local_region] + self.local_offset

    @property
    def remote_address(self) -> npt.NDArray[np.uint64]:
        """Absolute address of each descriptor in the peer."""
        return self.remote_base[self.remote_region] + self.remote_offset

    @property
    def nbytes(self) -> int:
        """Bytes of the whole batch."""
        return total(self.length)


class TicketKind(enum.Enum):
    """What a ticket has come to."""

    PENDING = "pending"
    DONE = "done"
    RETRY = "retry"
    """Nothing is in flight; the core submits the same transfer again, with back-off (T6)."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class TicketState:
    """A ticket's state as ``kvcore_poll`` (or ``kvcore_transfer`` itself) reports it."""

    kind: TicketKind
    reason: str = ""
    quiescent: bool = False
    """FAILED only: nothing of the ticket can be read or written any more. Say so only when it is known."""
    peer_broken: bool = False
    """The path to the peer is poisoned: the core fails its rooms, disconnects and pairs again."""


PENDING = TicketState(TicketKind.PENDING)
DONE = TicketState(TicketKind.DONE)
RETRY = TicketState(TicketKind.RETRY)


class NothingPosted(Exception):
    """Raised by ``kvcore_transfer`` when nothing at all was handed to the engine: a quiescent failure."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something observers may want to see: a name, the room (if any) and details as strings and numbers."""

    name: str
    room: RoomKey | None
    details: dict[str, str | int | float]


Ticket = Hashable


class KVCoreSpec:
    """Hook specifications. Those marked required have no default in the core."""

    @hookspec(firstresult=True)
    def kvcore_backend_info(self) -> BackendInfo:  # type: ignore[empty-body]
        """Required. Names, versions, options model and capabilities."""

    @hookspec(firstresult=True)
    def kvcore_facts(self) -> list[Fact]:  # type: ignore[empty-body]
        """What ``kvcore doctor`` shows beside its own check. Default: nothing. Called on an instance that is never opened, in a process
        of its own and by no manager, so it also tells why an engine cannot start; it may load the engine's library.
        """

    @hookspec(firstresult=True)
    def kvcore_open(self, options: BaseModel, context: OpenContext) -> None:
        """Required. Start the engine, or raise. Others of the process, of other managers, go on. Slow thread."""

    @hookspec(firstresult=True)
    def kvcore_register(self, regions: Sequence[Region]) -> None:
        """Required. Register all regions, or raise ``RegistrationError`` with none left registered (B3): called again, with memory that is
        good, it takes that. Slow thread.
        """

    @hookspec(firstresult=True)
    def kvcore_unregister(self, regions: Sequence[Region]) -> None:
        """Undo ``kvcore_register``, also one that raised; called once for each. Slow thread. Default: nothing."""

    @hookspec(firstresult=True)
    def kvcore_endpoint(self) -> Endpoint:  # type: ignore[empty-body]
        """Required. What a peer needs to reach this engine; asked at every pairing. Slow thread."""

    @hookspec(firstresult=True)
    def kvcore_connect(self, peer: Peer) -> None:
        """Required. Make a peer reachable; bounded in time. Raise if it is not. Slow thread.

        Its endpoint may be any bytes; those behind a whole one may be ignored.
        """

    @hookspec(firstresult=True)
    def kvcore_disconnect(self, peer: str) -> bool:  # type: ignore[empty-body]
        """Forget a peer. True only if from now on nothing of it can be written here or read from here. Default: False. Slow thread.

        Also for a peer that is not connected: that was forgotten before, or that ``kvcore_connect`` raised for last.
        """

    @hookspec(firstresult=True)
    def kvcore_transfer(self, transfer: Transfer, may_wait: bool) -> Ticket | TicketState:
        """Required. Start one batch; its ticket, unlike all others that have not ended, or a terminal state if it has ended already.

        ``may_wait``: whether it is a worker's call. A ``blocking`` backend answers RETRY to any other that would have to wait.
        ``NothingPosted`` is a quiescent failure, any other exception is not. After a partial post return a ticket that
        covers what was posted. Progress thread, or a worker if ``blocking``.
        """

    @hookspec(firstresult=True)
    def kvcore_poll(self, tickets: Sequence[Ticket]) -> list[TicketState]:  # type: ignore[empty-body]
        """Required. One state per ticket. A ticket reported ended is not asked for again. Progress thread."""

    @hookspec(firstresult=True)
    def kvcore_progress(self) -> None:
        """Drive the engine, for those that declare ``needs_progress``. Default: nothing. Progress thread."""

    @hookspec(firstresult=True)
    def kvcore_abort(self, room: RoomKey, tickets: Sequence[Ticket]) -> None:
        """Cancel as far as the engine can; each ticket must still end in ``kvcore_poll``. Default: nothing. Progress thread.

        A transfer of the room that still blocks on a worker has no ticket yet and is not listed; it is meant too. The list may be
        empty, and tickets on it may have been reported ended: those stay as they are.
        """

    @hookspec(firstresult=True)
    def kvcore_clear(self, room: RoomKey) -> None:
        """Drop whatever is held for this lifetime; idempotent. Default: nothing. Progress thread."""

    @hookspec(firstresult=True)
    def kvcore_held_rooms(self) -> list[RoomKey]:  # type: ignore[empty-body]
        """The lifetimes that the backend holds anything for (B4). Default: none. Progress thread."""

    @hookspec(firstresult=True)
    def kvcore_close(self) -> None:
        """Required. Stop the engine, and no other of the process, and leave no thread or port of it. Idempotent. Slow thread."""

    @hookspec
    def kvcore_on_event(self, event: Event) -> None:
        """For observers: called one by one on the events thread; what one raises is logged and stays there."""


REQUIRED = frozenset(
    {
        "kvcore_backend_info",
        "kvcore_open",
        "kvcore_register",
        "kvcore_endpoint",
        "kvcore_connect",
        "kvcore_transfer",
        "kvcore_poll",
        "kvcore_close",
    }
)


class Hooks(Protocol):
    """The hooks as the core calls them: by keyword, one result each. A test keeps it equal to the specs."""

    def kvcore_backend_info(self) -> BackendInfo: ...
    def kvcore_facts(self) -> list[Fact]: ...
    def kvcore_open(self, *, options: BaseModel, context: OpenContext) -> None: ...
    def kvcore_register(self, *, regions: Sequence[Region]) -> None: ...
    def kvcore_unregister(self, *, regions: Sequence[Region]) -> None: ...
    def kvcore_endpoint(self) -> Endpoint: ...
    def kvcore_connect(self, *, peer: Peer) -> None: ...
    def kvcore_disconnect(self, *, peer: str) -> bool: ...
    def kvcore_transfer(self, *, transfer: Transfer, may_wait: bool) -> Ticket | TicketState: ...
    def kvcore_poll(self, *, tickets: Sequence[Ticket]) -> list[TicketState]: ...
    def kvcore_progress(self) -> None: ...
    def kvcore_abort(self, *, room: RoomKey, tickets: Sequence[Ticket]) -> None: ...
    def kvcore_clear(self, *, room: RoomKey) -> None: ...
    def kvcore_held_rooms(self) -> list[RoomKey]: ...
    def kvcore_close(self) -> None: ...
    def kvcore_on_event(self, *, event: Event) -> None: ...
