"""The backend. The hooks stand in the order in which the core calls them.

Each instance has a door, which is its endpoint; a prefill side hands a mailbox in there. A transfer is copied into the mailbox, and the
decode side copies it into its pages when the core lets it make progress. So a page at prefill is free as soon as a transfer was taken,
and a page at decode is written by nobody but decode itself: to close a mailbox is a fence.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from kvcore import BackendInfo, Capabilities, Endpoint, Region, TicketKind, TicketState, Transfer, hookimpl
from kvcore.errors import ConfigError, RegistrationError
from kvcore.hookspecs import DONE, PENDING, RETRY, OpenContext, Peer
from kvcore.states import RoomKey

from kvcore_shm import __version__
from kvcore_shm.mailbox import MOST_ROWS, ROW, SLOT_BYTES, Bytes, Door, End, Inbox, Letter, Outbox
from kvcore_shm.options import ShmOptions

INFO = BackendInfo(
    "shm",
    __version__,
    wire_version="1",
    api_version=(1, 0),
    options=ShmOptions,
    capabilities=Capabilities(
        memory=frozenset({"cpu"}),
        needs_progress=True,  # decode has to empty its mailboxes
        fences_on_disconnect=True,
        needs_process_to_write=False,  # what a prefill process has put into a mailbox is there when it has died
        max_descriptors=MOST_ROWS,
        max_bytes=SLOT_BYTES,
    ),
)


class ShmBackend:
    """Hands pages over in mailboxes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # for what the slow thread and the progress thread share: the peers
        self._known: set[str] = set()  # peers that are connected
        self._out: dict[str, Outbox] = {}  # by peer: where its transfers go
        self._boxes: weakref.WeakSet[Outbox] = weakref.WeakSet()  # also those of peers that are gone, while letters in them are open
        self._in: dict[str, Inbox] = {}  # by peer: where its writes come from; not emptied before it is connected
        self._letters: set[Letter] = set()  # tickets that were not reported ended
        self._memory: list[Bytes] = []
        self._door: Door | None = None

    @hookimpl
    def kvcore_backend_info(self) -> BackendInfo:
        """What it is and can do."""
        return INFO

    @hookimpl
    def kvcore_open(self, options: ShmOptions, context: OpenContext) -> None:
        """Make the door; ``ConfigError`` if that is impossible."""
        self._options, self._context = options, context
        try:
            self._door = Door(context.instance)
        except OSError as error:
            raise ConfigError(f"backend shm has no socket ({error}); raise the limit of open files") from error

    @hookimpl
    def kvcore_register(self, regions: Sequence[Region]) -> None:
        """Add the regions to those registered before: all, or none (B3)."""
        for one in regions:
            if not (one.device.startswith("cpu") and 0 < one.nbytes < 2**63 and 0 < one.ptr <= 2**64 - one.nbytes):
                raise RegistrationError(f"backend shm: {one} is EINVAL; usual causes: a GPU's memory, an empty tensor")
        self._memory += [np.ctypeslib.as_array((ctypes.c_uint8 * one.nbytes).from_address(one.ptr)) for one in regions]

    @hookimpl
    def kvcore_endpoint(self) -> Endpoint:
        """The door's token."""
        return Endpoint(self._door.token if self._door is not None else b"")

    @hookimpl
    def kvcore_connect(self, peer: Peer) -> None:
        """Hand a mailbox in at the peer's door. One that it has and has not closed stays; a decode side writes nothing and needs none."""
        with self._lock:
            self._arrivals()
            self._known.add(peer.id)
            box = self._out.get(peer.id)
        if self._context.side == "decode" or (box is not None and box.token == peer.endpoint.data and not box.closed()):
            return
        try:
            box = Outbox.hand_in(peer.endpoint.data, self._context.instance, peer.id, self._options.slots)
        except OSError as error:
            raise ConnectionError(f"peer {peer.id} has no door here ({error}); run both sides on one host, then pair again") from error
        with self._lock:
            self._out[peer.id] = box
            self._boxes.add(box)

    @hookimpl
    def kvcore_disconnect(self, peer: str) -> bool:
        """Close the peer's mailbox. True: what is still in it is never put into memory here, and pages of this side were copied (R4)."""
        with self._lock:
            self._arrivals()
            self._known.discard(peer)
            self._out.pop(peer, None)  # letters in it are still told how they end
            if box := self._in.pop(peer, None):
                box.close()
        return True

    @hookimpl
    def kvcore_transfer(self, transfer: Transfer) -> Letter | TicketState:
        """Copy the pages into a slot; ``RETRY`` while none is free (T6). Without a mailbox nothing is posted, and the core pairs anew."""
        with self._lock:
            box = self._out.get(transfer.peer)
        rows = np.rec.fromarrays([transfer.remote_region, transfer.remote_offset, transfer.length], ROW)
        places = zip(transfer.local_region.tolist(), transfer.local_offset.tolist(), transfer.length.tolist(), strict=True)
        pieces = [self._memory[region][offset : offset + length] for region, offset, length in places]
        try:
            letter = box.post(transfer.room, transfer.peer, rows, pieces) if box is not None else None
        except OSError:  # the peer has closed it
            box = None
        if box is None:
            return TicketState(TicketKind.FAILED, f"peer {transfer.peer} is not connected", quiescent=True, peer_broken=True)
        if letter is None:
            return RETRY
        self._letters.add(letter)
        return letter

    @hookimpl
    def kvcore_poll(self, tickets: Sequence[Letter]) -> list[TicketState]:
        """Read the answers, and forget the letters that have ended."""
        for box in {letter.box for letter in tickets}:
            box.read()
        self._letters.difference_update(letter for letter in tickets if letter.end is not End.OPEN)
        return [_state(letter) for letter in tickets]

    @hookimpl
    def kvcore_progress(self) -> None:
        """Put into memory what has come."""
        with self._lock:  # so that nothing is put there once disconnect has returned
            self._arrivals()
            for peer, box in self._in.items():
                if peer in self._known:
                    box.take(self._put)

    @hookimpl
    def kvcore_clear(self, room: RoomKey) -> None:
        """Ask no more for the room's letters."""
        for letter in [letter for letter in self._letters if letter.room == room]:
            letter.box.forget(letter)
            self._letters.discard(letter)

    @hookimpl
    def kvcore_held_rooms(self) -> list[RoomKey]:
        """The rooms of letters not yet reported ended."""
        return list({letter.room for letter in self._letters})

    @hookimpl
    def kvcore_close(self) -> None:
        """Close the door and all mailboxes, and forget all memory."""
        with self._lock:
            ends: list[Door | Inbox | Outbox] = [*self._boxes, *self._in.values(), *([self._door] if self._door else [])]
            self._known, self._in, self._out, self._letters, self._memory, self._door = set(), {}, {}, set(), [], None
        for end in ends:
            end.close()

    def _arrivals(self) -> None:
        """Take in new mailboxes, and drop those whose writer is gone. With the lock held."""
        for peer, box in list(self._in.items()):
            if box.over():
                self._in.pop(peer).close()
        for peer, box in self._door.arrivals() if self._door is not None else ():
            if old := self._in.pop(peer, None):
                old.close()
            self._in[peer] = box

    def _put(self, rows: npt.NDArray[np.void], payload: Bytes) -> bool:
        """Put bytes where the rows say, if all of them are within memory here (T2)."""
        sizes = np.array([*(one.size for one in self._memory), 0], np.uint64)
        size = sizes[np.minimum(rows["region"].view(np.uint32), len(self._memory))]  # 0 for regions that are not there
        fits = (rows["offset"] <= size) & (rows["length"] <= size - np.minimum(rows["offset"], size))  # no sum that could wrap
        if not fits.all() or sum(rows["length"].tolist()) > payload.size:
            return False
        end = 0
        for region, offset, length in rows.tolist():
            self._memory[region][offset : offset + length] = payload[end : end + length]
            end += length
        return True


def _state(letter: Letter) -> TicketState:
    if letter.end is End.OPEN:
        return PENDING
    if letter.end is End.TAKEN:
        return DONE
    lost = letter.end is End.LOST
    return TicketState(TicketKind.FAILED, f"peer {letter.peer}: {letter.end.value}", quiescent=True, peer_broken=lost)
