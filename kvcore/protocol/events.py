"""What goes into a step and what comes out of it."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvcore.protocol.messages import AnyRoomMessage, PoolPages
from kvcore.states import FailureCode, Reason, RoomId, Side


class Party(NamedTuple):
    """One rank of the other side as this instance knows it.

    ``size`` is the number of destination ranks that the sender of the two has in this room; ``expired`` the highest generation of
    it for which a ticket was given up without proof here (R2); ``shape`` the tensor and pipeline-parallel sizes of its group.
    """

    instance: str
    rank: int = 0
    size: int = 1
    expired: int = 0
    shape: tuple[int, int] = (1, 1)


class Pair(NamedTuple):
    """A receiver's lifetime (instance and generation) and a sender's generation here."""

    peer: str
    rg: int
    sg: int


class Timer(NamedTuple):
    """A limit that runs for something: ``subject`` starts with what it is."""

    limit: str
    subject: tuple[object, ...]


# --- events: from handles


class Open(msgspec.Struct, frozen=True, gc=False):
    """A handle was made. Ignored while a live lifetime is stored."""

    generation: int


class Hand(msgspec.Struct, frozen=True, gc=False):
    """Sender: a chunk was handed over. ``pages`` says how many pages of each pool are handed over now, in the layer that has the fewest
    and in that which has the most; an empty chunk has none. ``layers``: those it is of (empty: all); ``full``: those that have the most."""

    generation: int
    pages: tuple[tuple[str, int, int], ...]
    last: bool
    record: bytes = b""
    layers: tuple[int, ...] = ()
    full: tuple[int, ...] = ()


class Receive(msgspec.Struct, frozen=True, gc=False):
    """Receiver: the destination pages were handed over."""

    generation: int
    pages: tuple[PoolPages, ...]


class Fail(msgspec.Struct, frozen=True, gc=False):
    """This lifetime has failed here: an abort, a bad page, a lost route."""

    generation: int
    reason: Reason


class Clear(msgspec.Struct, frozen=True, gc=False):
    """Drop the lifetime; of a live one, abort it first (C3)."""

    generation: int


# --- events: from the core


class Route(msgspec.Struct, frozen=True, gc=False):
    """Receiver: the sender ranks to expect are known and paired."""

    generation: int
    parties: tuple[Party, ...]


class Got(msgspec.Struct, frozen=True, gc=False):
    """A message arrived from a paired instance, addressed to this one."""

    message: AnyRoomMessage
    source: Party


class Ended(msgspec.Struct, frozen=True, gc=False):
    """Sender: a ticket ended, or one that was stuck is now known to be quiescent."""

    pair: Pair
    chunk: int
    ok: bool
    quiescent: bool
    reason: Reason | None = None


class Lost(msgspec.Struct, frozen=True, gc=False):
    """A peer was lost (P2): its rooms fail, what is kept for it goes, but not tickets and drain records."""

    instance: str
    reason: Reason
    replaced: bool = False
    """It, or another instance at its address, answers but does not know this one: what has not met it yet may look again (P3)."""


class Fenced(msgspec.Struct, frozen=True, gc=False):
    """It is proved that a lost peer reads and writes nothing here any more (R4)."""

    instance: str


class Timeout(msgspec.Struct, frozen=True, gc=False):
    """A timer that ``timers`` asked for has run out. ``note`` is added to a reason."""

    timer: Timer
    note: str = ""


Event = Open | Hand | Receive | Fail | Clear | Route | Got | Ended | Lost | Fenced | Timeout


# --- effects


class Send(msgspec.Struct, frozen=True, gc=False):
    """Send a message to a peer instance."""

    to: str
    message: AnyRoomMessage


class Start(msgspec.Struct, frozen=True, gc=False):
    """Start the ticket of one chunk towards one destination. Chunks count from 1."""

    pair: Pair
    chunk: int


class Cancel(msgspec.Struct, frozen=True, gc=False):
    """The lifetime has failed: cancel its tickets where the engine can (A5)."""

    generation: int


class Seek(msgspec.Struct, frozen=True, gc=False):
    """Receiver: find the sender ranks of a lifetime, and say so with ``Route``."""

    generation: int


class Forget(msgspec.Struct, frozen=True, gc=False):
    """The lifetime is cleared and no ticket of it is left: the backend may drop what it holds."""

    generation: int


class Unproven(msgspec.Struct, frozen=True, gc=False):
    """Pages of a lifetime were released by limit, without proof (R3)."""

    generation: int
    pair: Pair
    chunk: int = 0
    pages: int = 0
    """On the receiver; on the sender the ledger knows the chunk's."""


Effect = Send | Start | Cancel | Seek | Forget | Unproven

LIMIT_OF = ("", "bootstrap_s", "input_s", "transfer_s", "")
"""The limit of each state by its number, if it is not terminal (S8); the same on both sides."""


def timed_out(room: RoomId, limit: str, waited_for: str, note: str) -> str:
    """The text of a time-out: which limit, which room, what was waited for, what to look at."""
    return f"{limit} passed for room {room} waiting for {waited_for}" + (f" ({note})" if note else "")


def cleared(room: RoomId, side: Side, rank: int) -> Reason:
    """The reason of a lifetime that was cleared while it lived (C3)."""
    return Reason.of(FailureCode.ABORTED, f"room {room} was cleared before it ended", side, rank)
