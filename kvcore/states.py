"""The words every module shares: room states, sides, failure codes and the reason a room failed with."""

from __future__ import annotations

import enum
from typing import Annotated, Literal, NamedTuple

import msgspec

Side = Literal["prefill", "decode"]

MAX_ROOM = 2**63 - 1
MAX_ATTEMPT = 2**31 - 1
MAX_REASON_BYTES = 1024
MAX_RECORD_BYTES = 64 * 1024


class KVPoll(enum.IntEnum):
    """State of a room on one side (contract S). ``FAILED`` is least, so that ranks can reduce by minimum."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4

    terminal: bool
    """Whether the room has ended: ``SUCCESS`` or ``FAILED``."""

    def __init__(self, value: int) -> None:
        self.terminal = value in (0, 4)


class FailureCode(str, enum.Enum):
    """Why a room failed, for programs; the reason's text is for people. Travels to the other side."""

    ABORTED = "aborted"
    REJECTED = "rejected"
    TIMEOUT = "timeout"
    PEER_LOST = "peer_lost"
    INCOMPATIBLE = "incompatible"
    BACKEND = "backend"
    BAD_PAGES = "bad_pages"
    NO_SUCH_ROOM = "no_such_room"
    RESOURCES = "resources"
    SHUTDOWN = "shutdown"
    INTERNAL = "internal"


class Reason(msgspec.Struct, frozen=True, gc=False):
    """The first definite failure of a room and where it arose (contract S5)."""

    code: FailureCode
    text: Annotated[str, msgspec.Meta(max_length=MAX_REASON_BYTES)]
    side: Side
    rank: int = 0

    @classmethod
    def of(cls, code: FailureCode, text: str, side: Side, rank: int = 0) -> Reason:
        """A reason whose text is cut to what may travel: 1 KiB of UTF-8."""
        try:
            raw = str(text).encode("utf-8", "replace")[:MAX_REASON_BYTES]
        except Exception:  # an abort never raises, whatever it is given (A1)
            raw = f"a {type(text).__name__} that cannot be shown as text".encode()
        return cls(code, raw.decode("utf-8", "ignore"), side, rank)

    def __str__(self) -> str:
        return f"{self.text} ({self.code.value}, from {self.side} rank {self.rank})"


class RoomId(NamedTuple):
    """What router and both sides call one hand-off: a number and an attempt."""

    number: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.number}/{self.attempt}" if self.attempt else str(self.number)


class RoomKey(NamedTuple):
    """One lifetime of a room on one side of one instance; what a backend files things under."""

    side: Side
    number: int
    attempt: int
    generation: int
