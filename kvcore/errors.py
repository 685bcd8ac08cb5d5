"""Every error kvcore raises. Each text says what happened, to what, and what to do next, in one line."""

from __future__ import annotations

from collections.abc import Mapping

from kvcore.states import FailureCode, Reason, RoomId, Side


class KVCoreError(Exception):
    """Base of all errors of kvcore."""


class ConfigError(KVCoreError, ValueError):
    """A setting is wrong; the text names the setting, the value and the allowed form."""


class BackendNotFoundError(KVCoreError, LookupError):
    """No installed distribution offers a backend of that name (B2)."""


class BackendLoadError(KVCoreError):
    """A backend is installed but cannot be used as it is: its import failed, or hooks are missing or unknown (B2)."""


class BackendVersionError(KVCoreError):
    """A backend was written for another version of the hooks than this core has (B2)."""


class BackendConflictError(KVCoreError):
    """Two distributions offer a backend under one name (B2)."""


class BackendOptionsError(ConfigError):
    """The options given to a backend do not fit its options model (B2)."""


class RegistrationError(KVCoreError):
    """Memory could not be registered with the engine (B3); the text names region, size, code and usual causes."""


class RoomError(KVCoreError, ValueError):
    """A room number or attempt is out of range, or the room is already live on this side (C6)."""


class PageError(KVCoreError, ValueError):
    """Page indices do not fit the pools they are meant for (T2), or a chunk was given after the last one."""


class IncompatiblePeerError(KVCoreError):
    """Two instances cannot be paired (P1); the text names both values."""


NEXT_STEP: Mapping[FailureCode, str] = {
    FailureCode.ABORTED: "start the request again if it is still wanted",
    FailureCode.REJECTED: "answer the request with this reason",
    FailureCode.TIMEOUT: "see why that took so long, or raise the limit",
    FailureCode.PEER_LOST: "try another instance, or this one once it is back",
    FailureCode.INCOMPATIBLE: "set both sides up alike",
    FailureCode.BACKEND: "see the log of that side and of its engine",
    FailureCode.BAD_PAGES: "correct the lists of pages of that request",
    FailureCode.NO_SUCH_ROOM: "open the sender when the request arrives, and use a number once",
    FailureCode.RESOURCES: "try later, or another instance",
    FailureCode.SHUTDOWN: "try another instance",
    FailureCode.INTERNAL: "report it with the log of that side",
}
"""What to do about a failed room, by its code."""


MOST_SHOWN, MOST_CAUSE, MOST_TEXT = 100, 500, 4000
"""Characters of a value and of a foreign error's text that an error quotes, and of an error as a whole."""


def one_line(value: object, most: int = MOST_TEXT) -> str:
    """A foreign text as errors quote it: one printable line of at most ``most`` characters. Anything may be given (T7)."""
    try:
        return _line(str(value), most)
    except BaseException:
        return _unshown(value)


def shown(value: object) -> str:
    """A foreign value as errors quote it: its repr in one printable line of at most 100 characters. Anything may be given (T7)."""
    try:
        return _line(repr(value), MOST_SHOWN)
    except BaseException:
        return _unshown(value)


def cause(error: BaseException) -> str:
    """Type and text of what foreign code raised, in one printable line."""
    text = one_line(error, MOST_CAUSE)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _line(text: str, most: int) -> str:
    """What cannot be printed becomes a blank, and blanks in a row are one."""
    start = text[: 4 * most]
    line = " ".join("".join(char if char.isprintable() else " " for char in start).split())
    return line if len(line) <= most and len(start) == len(text) else f"{line[: most - 3]}..."


def _unshown(value: object) -> str:
    return f"<{type(value).__name__} that cannot be shown as text>"


class KVTransferError(KVCoreError):
    """A room has failed. Carries the first reason, word for word, and where it arose (S5); its own text is one line all the same."""

    def __init__(self, room: RoomId, reason: Reason) -> None:
        super().__init__(f"room {room} failed: {one_line(reason)}; {NEXT_STEP[reason.code]}")
        self.room: int = room.number
        self.attempt: int = room.attempt
        self.reason: str = reason.text
        self.code: FailureCode = reason.code
        self.side: Side = reason.side
        self.rank: int = reason.rank

    def __reduce__(self) -> tuple[object, ...]:
        return KVTransferError, (RoomId(self.room, self.attempt), Reason(self.code, self.reason, self.side, self.rank))
