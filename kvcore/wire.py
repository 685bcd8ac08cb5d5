"""What travels between two instances: letters, one ZeroMQ frame of msgpack each.

Version 1.0. A letter of another major version is dropped, and a hello of one answered with ``Refuse``, which every version reads;
unknown fields are ignored, so that minors can add some (P1). Nothing received is ever evaluated (P5).
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvcore import errors
from kvcore.layouts import Place
from kvcore.memory import PoolGeometry, Region
from kvcore.protocol.messages import Abort, Ack, Attempt, Destination, Drained, Here, Join, Layers, Number, Relay, Status, Which
from kvcore.states import FailureCode

VERSION = (1, 0)
MAX_LETTER_BYTES = 16 * 1024 * 1024

Instance = Annotated[str, Meta(max_length=64, pattern=r"^[!-~]*\Z")]
"""Printable ASCII without blanks: it is logged, so it may not forge lines."""
Word = Annotated[str, Meta(max_length=128, pattern=r"^[ -~]*\Z")]
MAX_TEXT = 1024
MAX_STORY = 65_536
Seconds = Annotated[float, Meta(gt=0)]
Unsigned = Annotated[int, Meta(ge=0)]


class RegionInfo(msgspec.Struct, frozen=True):
    """A region as its owner registered it."""

    ptr: int
    nbytes: int
    device: str = "cpu:0"
    layer: int = 0
    part: str = ""

    @classmethod
    def of(cls, region: Region) -> RegionInfo:
        """The region as it travels."""
        return cls(region.ptr, region.nbytes, region.device, region.layer, region.part)

    def region(self) -> Region:
        """The region as the planner and backends take it."""
        return Region(self.ptr, self.nbytes, self.device, self.layer, self.part)


class Process(msgspec.Struct, frozen=True):
    """Where an instance runs, so that one on the same host can know that it is gone (R4)."""

    host: str
    pid: int
    started: str


class Introduction(msgspec.Struct, frozen=True):
    """What an instance tells of itself when it pairs (P1)."""

    version: tuple[int, int]
    instance: Instance
    order: int
    role: Word
    place: Place
    backend: Word
    wire_version: Word
    pools: tuple[PoolGeometry, ...]
    regions: tuple[RegionInfo, ...]
    liveness_s: Seconds
    ticket_s: Seconds
    quarantine_s: Seconds | None
    orphan_s: Seconds
    process: Process


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Decode to prefill: pair with me. ``pairing`` names this attempt; the engine's endpoint is fresh for it."""

    pairing: Unsigned
    me: Introduction
    data: bytes
    keys: tuple[bytes, ...] = ()
    spoken: Annotated[dict[Instance, Unsigned], Meta(max_length=4096)] = {}
    """Per prefill instance the highest generation here whose pages still wait for its Drained (R2)."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Prefill to decode: paired, from my side."""

    pairing: Unsigned
    me: Introduction
    data: bytes
    keys: tuple[bytes, ...] = ()


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    """Either way: we cannot pair; if we do not fit, the text names both values."""

    pairing: Unsigned
    text: str
    code: FailureCode = FailureCode.INCOMPATIBLE


class Stranger(msgspec.Struct, frozen=True, tag="stranger"):
    """I am this instance and do not know you, or am not whom you wrote to, or am ``closing``: introduce yourself."""

    closing: bool = False
    version: tuple[int, int] = VERSION


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """I am alive."""


class Explain(msgspec.Struct, frozen=True, tag="explain"):
    """What do you know of this room? ``question`` names the asking."""

    question: Unsigned
    room: Number
    attempt: Attempt = 0


class Story(msgspec.Struct, frozen=True, tag="story"):
    """The answer, for people."""

    question: Unsigned
    text: Annotated[str, Meta(max_length=MAX_STORY)]


PeerBody = Hello | Welcome | Refuse | Stranger | Ping | Explain | Story
RoomBody = Join | Here | Destination | Status | Ack | Abort | Which | Drained | Layers | Relay
Body = PeerBody | RoomBody


class Letter(msgspec.Struct, frozen=True):
    """The envelope: major version, both instances (``to`` is empty in a first hello), and the body."""

    v: int
    source: Instance
    to: Instance
    body: Body


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Letter)


def encode(source: str, to: str, body: Body) -> bytes:
    """One frame."""
    return _encoder.encode(Letter(VERSION[0], source, to, body))


def checked(source: str, to: str, body: Body) -> bytes:
    """One frame that is known to be readable; raises ``TypeError`` or ``ValueError`` if the other side could not take it."""
    frame = encode(source, to, body)
    if len(frame) > MAX_LETTER_BYTES:
        raise ValueError(f"a letter of {len(frame)} bytes exceeds {MAX_LETTER_BYTES}")
    decode(frame)
    return frame


def one_line(text: str) -> str:
    """Text that may hold a peer's words, fit to be logged and sent: one line, and not without end."""
    return errors.one_line(text, MAX_TEXT)


def decode(frame: bytes | memoryview) -> Letter:
    """The letter in a frame; raises ``ValueError`` in one line for any other bytes."""
    try:
        return _decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error
