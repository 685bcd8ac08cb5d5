"""The messages of the room protocol. They are also what travels: msgpack maps with a tag (``wire`` adds the envelope).

All carry the room, the receiver's generation ``rg`` and the sender's ``sg``; 0 means "not yet known" (P6).
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvcore.states import MAX_ATTEMPT, MAX_RECORD_BYTES, MAX_ROOM, KVPoll, Reason

Number = Annotated[int, Meta(ge=0, le=MAX_ROOM)]
Attempt = Annotated[int, Meta(ge=0, le=MAX_ATTEMPT)]
Generation = Annotated[int, Meta(ge=0, le=MAX_ROOM)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class RoomMessage(msgspec.Struct, frozen=True, gc=False):
    """What every message of a room names."""

    room: Number
    attempt: Attempt
    rg: Generation
    sg: Generation


class PoolPages(msgspec.Struct, frozen=True, gc=False):
    """A destination's pages for one pool of the sender: little-endian int32 indices, how many prefix pages stand before them, and the
    receiver's pool in which they lie ("": of the same name)."""

    pool: str
    pages: bytes
    prefix: Count = 0
    into: str = ""


class Join(RoomMessage, frozen=True, gc=False, tag="join"):
    """R to S: I am here; also keep-alive."""


class Here(RoomMessage, frozen=True, gc=False, tag="here"):
    """S to R: a live sender names itself. Only now may a Destination go out."""


class Destination(RoomMessage, frozen=True, gc=False, tag="destination"):
    """R to S: pairs the two lifetimes. Its resend asks how it ended."""

    pages: tuple[PoolPages, ...] = ()
    n_dest: Annotated[int, Meta(ge=1, le=65536)] = 1


class Status(RoomMessage, frozen=True, gc=False, tag="status"):
    """S to R: a rank's verdict, or that it is TRANSFERRING. With ``sg`` 0: no such room."""

    state: KVPoll = KVPoll.FAILED
    reason: Reason | None = None
    record: Annotated[bytes, Meta(max_length=MAX_RECORD_BYTES)] = b""


class Ack(RoomMessage, frozen=True, gc=False, tag="ack"):
    """R to S: the verdict was taken, and whether by the receiver it was meant for."""

    live: bool = False


class Abort(RoomMessage, frozen=True, gc=False, tag="abort"):
    """R to S: this lifetime has failed; also the question "drained?"."""

    reason: Reason | None = None


class Which(RoomMessage, frozen=True, gc=False, tag="which"):
    """S to R: a live sender answers an Abort that does not name it."""


class Drained(RoomMessage, frozen=True, gc=False, tag="drained"):
    """S to R: R2 holds for the pair; ``expired``: a ticket of it was given up without proof."""

    expired: bool = False


class Layers(RoomMessage, frozen=True, gc=False, tag="layers"):
    """S to R: these layers are complete for all pages announced so far. ``step`` grows; neither kept nor acknowledged."""

    step: Count = 0
    layers: Annotated[tuple[Count, ...], Meta(max_length=4096)] = ()


class Relay(RoomMessage, frozen=True, gc=False, tag="relay"):
    """S to R: another rank of your group has failed; sent to those that keep this rank's success (T5)."""

    reason: Reason | None = None


ToSender = Join | Destination | Ack | Abort
ToReceiver = Here | Status | Which | Drained | Layers | Relay
AnyRoomMessage = ToSender | ToReceiver
