"""The backends that come with kvcore, and what the ``local`` one is made of: registered memory, tickets and its wire format.

A connection carries a hello (magic, token, instance id) and its answer, then frames one way and answers the other. A frame is a head,
rows that say where in the receiver's regions each piece goes, and the payload. All numbers are little-endian. Importing this package
imports no backend (B1).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from kvcore.errors import RegistrationError
from kvcore.hookspecs import DONE, PENDING, TicketKind, TicketState, Transfer
from kvcore.memory import Region

HELLO = struct.Struct("<8s24sH")  # magic, token, length of the instance id that follows
FRAME = struct.Struct("<4s?IIQ")  # magic, whether it is the last of its ticket, number of rows, payload bytes, ticket
ROW = np.dtype([("region", "<i4"), ("offset", "<u8"), ("length", "<u8")])
ANSWER = struct.Struct("<QH")  # ticket (0: the hello), length of a text that follows; no text means all is well
HELLO_MAGIC, FRAME_MAGIC = b"kvcore\0\1", b"kvf\1"
MAX_ROWS = 1000  # with head and rows within the 1024 buffers that one system call takes
MAX_PAYLOAD = 64 << 20
MAX_TEXT = 1024
SCRATCH = 1 << 16  # most bytes read at once when they are not for registered memory

Rows = npt.NDArray[np.void]
Numbers = npt.NDArray[np.int32]
Sizes = npt.NDArray[np.uint64]


class Address(msgspec.Struct, frozen=True):
    """What an endpoint's data says: where to connect, and the token to present there."""

    host: str
    port: int
    token: bytes


class Memory:
    """Registered regions, and the only place where addresses become memory. Raises ``RegistrationError`` for one that is none (B3)."""

    def __init__(self, regions: Sequence[Region] = ()) -> None:
        self.regions = tuple(regions)
        self._views = [_view(number, region) for number, region in enumerate(regions)]
        self._sizes = np.array([*(region.nbytes for region in regions), 0], np.uint64)  # the last stands for unknown regions

    def problem(self, region: Numbers, offset: Sizes, length: Sizes) -> str:
        """Which of these descriptors, arrays of shape ``(n,)``, is not within its region (T2); "" if all are."""
        known = (region >= 0) & (region < len(self._views))
        size = self._sizes[np.where(known, region, -1)]
        bad = ~known | (offset > size) | (length > size - offset)  # no sum that could wrap; the difference counts only if offset fits
        if not bad.any():
            return ""
        at = int(bad.argmax())
        bound = f"its {size[at]} bytes" if known[at] else f"the {len(self._views)} registered regions"
        return f"{length[at]} bytes at offset {offset[at]} of region {region[at]} are outside {bound}; compare the pools of both sides"

    def slices(self, region: Numbers, offset: Sizes, length: Sizes) -> list[memoryview]:
        """The memory itself, for descriptors without a problem."""
        return [self._views[r][o : o + n] for r, o, n in zip(region.tolist(), offset.tolist(), length.tolist(), strict=True)]


def _view(number: int, region: Region) -> memoryview:
    code = _code(region)
    if code:
        raise RegistrationError(
            f"region {number} ({region.nbytes} bytes at {region.ptr:#x} on {region.device}) cannot be registered: {errno.errorcode[code]}; "
            "usual causes: memory of an accelerator (choose a backend for it), an empty tensor, memory freed or not mapped"
        )
    return memoryview((ctypes.c_char * region.nbytes).from_address(region.ptr)).cast("B")


def _code(region: Region) -> int:
    if not region.device.startswith("cpu"):
        return errno.ENOTSUP
    if not (0 < region.nbytes < 2**63 and 0 < region.ptr <= 2**64 - region.nbytes):
        return errno.EINVAL
    start = region.ptr & -mmap.PAGESIZE
    # An asynchronous msync (flag 1) only checks that every page of the range is mapped.
    failed = ctypes.CDLL(None, use_errno=True).msync(ctypes.c_void_p(start), ctypes.c_size_t(region.ptr - start + region.nbytes), 1)
    return ctypes.get_errno() if failed else 0


@dataclass(slots=True, eq=False)
class Connection:
    """A socket and the one thread that works on it. ``peer`` is the other side's instance id, "" until an incoming one has said it."""

    sock: socket.socket
    peer: str = ""
    broken: str = ""
    """Why it has ended, "" while it has not."""
    thread: threading.Thread = field(init=False)


@dataclass(slots=True, eq=False)
class Link(Connection):
    """An outgoing connection: what its writer is to send (None: end), and the bytes of answers not yet complete."""

    jobs: queue.SimpleQueue[Job | None] = field(default_factory=queue.SimpleQueue)
    inbox: bytearray = field(default_factory=bytearray)


@dataclass(slots=True, eq=False)
class Job:
    """A ticket on its way."""

    ticket: int
    transfer: Transfer
    memory: Memory
    link: Link
    state: TicketState = PENDING
    started: bool = False
    cancelled: bool = False
    written: TicketState | None = None
    """Set when the writer has left our memory: the end that a good answer then means."""
    answer: str | None = None

    def settle(self) -> None:
        """End once both written and answered, in whichever order that becomes known."""
        if self.state is PENDING and self.written is not None and self.answer is not None:
            self.state = failed(self.answer) if self.answer else self.written


def failed(reason: str, quiescent: bool = True, peer_broken: bool = False) -> TicketState:
    """A failed ticket's state."""
    return TicketState(TicketKind.FAILED, reason, quiescent, peer_broken)


def cut(transfer: Transfer, limit: int) -> Iterator[tuple[bool, Rows, Numbers, Sizes]]:
    """Frames of at most ``limit`` payload bytes and MAX_ROWS rows: whether it is the last, its rows, their local regions and offsets."""
    ends = np.cumsum(transfer.length.astype(np.int64))
    starts = ends - transfer.length.astype(np.int64)
    at, total = 0, int(ends[-1])
    while at < total:
        first = int(np.searchsorted(ends, at, "right"))
        part = slice(first, min(first + MAX_ROWS, int(np.searchsorted(ends, at + limit)) + 1))
        begin = np.maximum(starts[part], at)
        at = min(at + limit, int(ends[part][-1]))
        skipped = (begin - starts[part]).astype(np.uint64)
        rows = np.empty(len(begin), ROW)
        rows["region"], rows["offset"] = transfer.remote_region[part], transfer.remote_offset[part] + skipped
        rows["length"] = np.minimum(ends[part], at) - begin
        yield at == total, rows, transfer.local_region[part], transfer.local_offset[part] + skipped


def dial(address: Address, name: str, seconds: float) -> socket.socket:
    """A connection that the receiver has accepted from instance ``name``; ``OSError``, ``ValueError`` or ``OverflowError`` if none is."""
    deadline = time.monotonic() + seconds
    sock = socket.create_connection((address.host.strip("[]"), address.port), seconds)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw = name.encode()
        sock.sendall(HELLO.pack(HELLO_MAGIC, address.token, len(raw)) + raw)
        _, size = ANSWER.unpack(_receive(sock, ANSWER.size, deadline))
        if size:
            raise ConnectionRefusedError(_receive(sock, size, deadline).decode("utf-8", "replace"))
        sock.settimeout(None)
        return sock
    except BaseException:
        sock.close()
        raise


def greet(sock: socket.socket, seconds: float) -> tuple[bytes, str]:
    """Token and instance id from an incoming connection's hello; ``ValueError`` if it is none, ``OSError`` if it does not come in time."""
    deadline = time.monotonic() + seconds
    magic, token, size = HELLO.unpack(_receive(sock, HELLO.size, deadline))
    if magic != HELLO_MAGIC or size > MAX_TEXT:
        raise ValueError("what came is no hello of this backend")
    name = _receive(sock, size, deadline).decode()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(None)
    return token, name


def answer(sock: socket.socket, ticket: int, text: str) -> None:
    """Tell the sender how a ticket or, as ticket 0, its hello came out."""
    raw = text.encode()[:MAX_TEXT]
    sock.sendall(ANSWER.pack(ticket, len(raw)) + raw)


def send(job: Job, limit: int) -> TicketState:
    """Send a job's frames; blocks. The end that a good answer means: DONE, or cancelled with an empty last frame in place of the rest."""
    transfer = job.transfer
    if problem := job.memory.problem(transfer.local_region, transfer.local_offset, transfer.length):
        job.answer = ""  # nothing goes out, so there is nothing to wait for
        return failed(f"nothing was sent: in local memory, {problem}")
    for last, rows, region, offset in cut(transfer, limit):
        if job.cancelled:
            _send_frame(job, True, np.empty(0, ROW), [])
            return failed("cancelled")
        _send_frame(job, last, rows, job.memory.slices(region, offset, rows["length"]))
    return DONE


def _send_frame(job: Job, last: bool, rows: Rows, payload: list[memoryview]) -> None:
    head = FRAME.pack(FRAME_MAGIC, last, len(rows), sum(map(len, payload)), job.ticket)
    buffers = [memoryview(head), rows.view(np.uint8).data, *payload]
    while buffers:
        buffers = _rest(buffers, job.link.sock.sendmsg(buffers))


def take(connection: Connection, memory: Callable[[], Memory]) -> None:
    """Put frames into memory and answer the last one of each ticket, until the connection is broken; ``ValueError`` for what is no frame.

    A frame with a row outside the regions is read to its end but goes nowhere, and so does the rest of its ticket (T2, T7).
    """
    sock, problem = connection.sock, ""
    while not connection.broken:
        magic, last, count, size, ticket = FRAME.unpack(_receive(sock, FRAME.size))
        if magic != FRAME_MAGIC or count > MAX_ROWS or size > MAX_PAYLOAD:
            raise ValueError("what came is no frame")
        rows, now = np.frombuffer(_receive(sock, count * ROW.itemsize), ROW), memory()
        problem = problem or _mismatch(now, rows, size)
        if not problem:
            _receive_into(sock, now.slices(rows["region"], rows["offset"], rows["length"]))
        while problem and size:
            size -= len(_receive(sock, min(size, SCRATCH)))
        if last:
            answer(sock, ticket, problem)
            problem = ""


def _mismatch(memory: Memory, rows: Rows, size: int) -> str:
    problem = memory.problem(rows["region"], rows["offset"], rows["length"])
    total = 0 if problem else int(rows["length"].sum())  # rows within regions cannot add up to 2**64
    if problem or total == size:
        return problem
    return f"the rows of a frame name {total} bytes, but it carries {size}; use the same kvcore on both sides"


def answers(link: Link) -> tuple[list[tuple[int, str]], str]:
    """The answers that have arrived, as (ticket, text), and why there will be no more ("" if there may be). Does not block."""
    try:
        data = link.sock.recv(SCRATCH, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return [], ""
    except OSError as error:
        return [], str(error)
    link.inbox += data
    found = []
    while len(link.inbox) >= ANSWER.size:
        ticket, size = ANSWER.unpack_from(link.inbox)
        if len(link.inbox) < ANSWER.size + size:
            break
        found.append((ticket, link.inbox[ANSWER.size : ANSWER.size + size].decode("utf-8", "replace")))
        del link.inbox[: ANSWER.size + size]
    return found, "" if data else "closed by the other side"


def _rest(buffers: list[memoryview], done: int) -> list[memoryview]:
    """The buffers without their first ``done`` bytes, and without empty ones in front."""
    for at, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[at + 1 :]]
        done -= len(buffer)
    return []


def _receive_into(sock: socket.socket, buffers: list[memoryview], deadline: float | None = None) -> None:
    while buffers := _rest(buffers, 0):
        if deadline is not None:
            sock.settimeout(max(deadline - time.monotonic(), 1e-3))
        count = sock.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]
        if not count:
            raise ConnectionError("closed by the other side")
        buffers = _rest(buffers, count)


def _receive(sock: socket.socket, count: int, deadline: float | None = None) -> bytearray:
    data = bytearray(count)
    _receive_into(sock, [memoryview(data)], deadline)
    return data
