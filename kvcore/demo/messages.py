"""What the demo's processes tell each other over pipes of their own; in an engine a router and a scheduler do this."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal, TypeVar

from kvcore.errors import KVCoreError

Side = Literal["prefill", "decode"]


class DemoError(KVCoreError):
    """The demo could not go on. ``trace`` is the traceback of the process in which it went wrong, if there is one."""

    def __init__(self, text: str, trace: str = "") -> None:
        super().__init__(text)
        self.trace = trace


@dataclass(frozen=True, slots=True)
class Settings:
    """What to run. ``patience_s``: seconds without a word from either process, or of waiting for one room, before giving up."""

    model: str = "smollm2"
    backend: str = "local"
    prompts: str | None = None
    page_size: int = 16
    max_new_tokens: int = 16
    corrupt: bool = False
    patience_s: float = 300.0
    debug: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """From a worker, for a person who watches."""

    text: str


@dataclass(frozen=True, slots=True)
class Failed:
    """From a worker that ends: why, in one line, and its traceback."""

    text: str
    trace: str


@dataclass(frozen=True, slots=True)
class Ready:
    """From prefill: its address and, per room (room ``i`` is prompt ``i``), text and number of tokens."""

    address: str
    texts: tuple[str, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Begin:
    """To decode: where prefill is, and the number of prompt tokens per room."""

    address: str
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Expected:
    """From prefill, per room: the tokens that the model generates in one process, and how long tickets of the room were in flight."""

    room: int
    tokens: tuple[int, ...]
    text: str
    moving_s: float


@dataclass(frozen=True, slots=True)
class Generated:
    """From decode, per room: the tokens generated from the pages that arrived, how much arrived, and seconds from joining to success."""

    room: int
    tokens: tuple[int, ...]
    text: str
    pages: int
    nbytes: int
    total_s: float


@dataclass(frozen=True, slots=True)
class Ended:
    """From both: how the room that decode aborts has ended, with the reason's code and the side it arose on ("" without one)."""

    state: str
    reason: str
    code: str
    origin: str


@dataclass(frozen=True, slots=True)
class Stores:
    """From both: the size of each store of rooms after all rooms were cleared."""

    sizes: dict[str, int]


@dataclass(frozen=True, slots=True)
class Close:
    """To both: the demo is over."""


Message = Progress | Failed | Ready | Begin | Expected | Generated | Ended | Stores | Close
T = TypeVar("T")


class Link:
    """A worker's end of its pipe to the driver. No wait on it outlasts the driver, since a worker ends with its driver."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def tell(self, message: Message) -> None:
        """Send a message."""
        self._connection.send(message)

    def progress(self, text: str) -> None:
        """Send word of what is being done."""
        self.tell(Progress(text))

    def hear(self, kind: type[T]) -> T:
        """The next message, which must be of this kind."""
        message = self._connection.recv()
        if not isinstance(message, kind):
            raise DemoError(f"expected {kind.__name__} from the driver, got {type(message).__name__}; this is a fault of the demo")
        return message
