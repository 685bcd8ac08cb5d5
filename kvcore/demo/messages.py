"""What the demo's processes and its driver tell each other; in an engine a router and a scheduler do this."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """What to run. ``patience_s``: seconds without a word from either process, or of waiting for one room, before giving up."""

    model: str = "smollm2"
    backend: str = "local"
    prompts: str | None = None
    page_size: int = 16
    max_new_tokens: int = 16
    prefill_tp: int = 1
    decode_tp: int = 1
    corrupt: bool = False
    patience_s: float = 300.0
    debug: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    """From prefill: its address and, per room (room ``i`` is prompt ``i``), text and number of tokens."""

    address: str
    texts: tuple[str, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Begin:
    """To all but prefill's first rank: where that is, and the number of prompt tokens per room."""

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
class Part:
    """From another rank of decode to its first, per room: K and V of each layer for the heads it holds, ``[1, heads, tokens, head_dim]``,
    as NumPy arrays; and how much arrived."""

    room: int
    layers: tuple[tuple[object, object], ...]
    nbytes: int


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
class Used:
    """From both: the engine that moved the pages, with its version, and the names of all backends that the process has imported."""

    engine: str
    imported: tuple[str, ...]
