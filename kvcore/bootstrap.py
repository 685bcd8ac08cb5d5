"""What a prefill group's bootstrap service says: who its ranks are and where. Values and their JSON form, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from kvcore.addresses import Address, parse
from kvcore.errors import ConfigError, shown
from kvcore.layouts import MAX_RANKS, Place

MAX_BODY_BYTES = 64 * 1024
REFRESH_S = 3.0
"""Seconds between two registrations of a living rank, so that a service that restarts empty is soon complete again."""
EXPIRY_S = 15.0
"""Seconds without a registration after which a rank is taken to be gone."""

RANKS_PATH = "/v1/ranks"
GROUP_PATH = "/v1/group"
ROOMS_PATH = "/v1/rooms"

Word = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[!-~]+\Z")]
"""Printable ASCII without blanks: it is logged, so it may not forge lines."""

T = TypeVar("T")


class RankInfo(msgspec.Struct, frozen=True):
    """One rank of a prefill group. Types and ranges are checked when it is read from JSON; unknown fields are ignored (P1)."""

    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    size: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    """Number of ranks in the group."""
    control: Annotated[str, Meta(max_length=320)]
    """Address of its control port, ``host:port``; never a wildcard."""
    instance: Word
    """The instance's unique id."""
    order: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    """The instance's start order: nanoseconds; of two instances with one rank the later one holds it."""
    backend: Word
    place: Place = Place()
    """Where it stands; rank and size follow from it."""
    curve: Annotated[str, Meta(max_length=40, pattern=r"^([!-~]{40})?\Z")] = ""
    """Its public curve key, without which its control port cannot be dialled; "" if it has none."""

    def __post_init__(self) -> None:
        if self.rank >= self.size:
            raise ConfigError(f"rank {self.rank} is not in 0 .. {self.size - 1}, the ranks of a group of {self.size}; correct rank or size")
        if (self.rank, self.size) != (self.place.number, self.place.total):
            raise ConfigError(f"rank {self.rank} of {self.size} stands at {self.place.number} of {self.place.total}; correct its topology")
        if self.address.wildcard:
            raise ConfigError(
                f"control {shown(self.control)} of rank {self.rank} is a wildcard that peers cannot reach; publish an address"
            )

    @property
    def address(self) -> Address:
        """``control``, parsed."""
        return parse(self.control, "control")


@dataclass(frozen=True, slots=True)
class Group:
    """A complete prefill group: ``ranks[i]`` is rank i of ``size``, which is all data-parallel ranks, one after the other."""

    size: int
    ranks: tuple[RankInfo, ...]

    def __post_init__(self) -> None:
        listed = [info.rank for info in self.ranks]
        if listed != list(range(self.size)) or any(info.size != self.size for info in self.ranks):
            raise ValueError(f"group of {self.size} lists ranks {listed[:16]}; expected each rank once, in order")
        if len({info.place.sizes for info in self.ranks}) > 1:
            raise ValueError(f"group of {self.size} lists ranks of several topologies; expected one")

    def of(self, dp_rank: int) -> tuple[RankInfo, ...]:
        """The ranks of one data-parallel rank, in order."""
        size = self.ranks[0].place.size
        return self.ranks[dp_rank * size : (dp_rank + 1) * size]


@dataclass(frozen=True, slots=True)
class LookupFailure:
    """The definite answer that ``address`` does not name a usable bootstrap service, and why."""

    address: str
    reason: str

    def __str__(self) -> str:
        return f"bootstrap service {self.address}: {self.reason}"


def read(body: bytes, kind: type[T]) -> T:
    """Decode JSON of that type; raises ``ValueError`` with one line for anything else, whatever the bytes (P5)."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error


def error_text(body: bytes) -> str:
    """The text of an error answer: its ``error`` member, or the start of the body where it has none."""
    try:
        answer = read(body, dict[str, object])
    except ValueError:
        answer = {}
    text = answer.get("error")
    if not isinstance(text, str):
        text = body[:200].decode("utf-8", "replace")
    return " ".join(text[:500].split())
