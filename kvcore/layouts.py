"""What a page of a pool holds, and so which ranks of a group hold the same. Values that travel with a hello; no arithmetic of addresses."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvcore.errors import ConfigError, shown

MAX_RANKS = 1024
"""Ranks of a group."""

Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class Heads(msgspec.Struct, frozen=True, tag="heads"):
    """KV heads, shared out over the tensor-parallel ranks: rank r of t holds those from ``r * total // t`` up to those of rank r + 1,
    or with more ranks than heads that one head, as its neighbours do.

    A page of a region has the shape ``[page_size, heads here, dim]`` with ``order="token"``, ``[heads here, page_size, dim]`` with
    ``order="head"``.
    """

    total: Size
    dim: Size
    order: Literal["token", "head"] = "token"

    def __post_init__(self) -> None:
        for what, value in (("total", self.total), ("dim", self.dim)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise ConfigError(f"heads: {what} is {shown(value)}; pass a number in 1 .. 2**31-1")
        if self.order not in ("token", "head"):
            raise ConfigError(f"heads: order is {shown(self.order)}; pass 'token' or 'head'")


class Latent(msgspec.Struct, frozen=True, tag="latent"):
    """One copy for all heads, the same on every tensor-parallel rank (as in MLA)."""


class SideRecord(msgspec.Struct, frozen=True, tag="side"):
    """A side record, the same on every rank of a group, whatever its layers. The last pipeline stage writes it."""


class Opaque(msgspec.Struct, frozen=True, tag="opaque"):
    """Not stated: rank i's pages go to rank i, between groups of equal tensor-parallel size only."""


PageLayout = Heads | Latent | SideRecord | Opaque


class Place(msgspec.Struct, frozen=True):
    """Sizes of a group's tensor, pipeline and data-parallel axes, and one rank's place on each."""

    tp_size: Size = 1
    tp_rank: int = 0
    pp_size: Size = 1
    pp_rank: int = 0
    dp_size: Size = 1
    dp_rank: int = 0

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "dp"):
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if not 0 <= rank < size:
                raise ValueError(f"{axis}_rank {rank} is not in 0 .. {size - 1}")
        if self.total > MAX_RANKS:
            raise ValueError(f"{self.total} ranks are more than {MAX_RANKS}")

    @property
    def size(self) -> int:
        """Ranks that take part in one room: those of one data-parallel rank."""
        return self.tp_size * self.pp_size

    @property
    def rank(self) -> int:
        """This rank's number among them: stage by stage."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def total(self) -> int:
        """Ranks of all data-parallel ranks."""
        return self.dp_size * self.size

    @property
    def number(self) -> int:
        """This rank's number among all."""
        return self.dp_rank * self.size + self.rank

    @property
    def sizes(self) -> tuple[int, int, int]:
        """What all ranks of a group must agree on."""
        return self.tp_size, self.pp_size, self.dp_size


def heads_of(heads: Heads, size: int, rank: int) -> range:
    """The heads that a rank of a tensor-parallel group of ``size`` holds. ``ValueError`` if they cannot be shared out evenly."""
    if heads.total % size and size % heads.total:
        raise ValueError(f"{heads.total} heads cannot be shared out over tp {size}; one must divide the other")
    first = rank * heads.total // size
    return range(first, first + max(1, heads.total // size))


def holders_of(heads: Heads, size: int, head: int) -> range:
    """The ranks of a tensor-parallel group of ``size`` that hold a head: the other direction of ``heads_of``."""
    return range(head * size // heads.total, max(head * size // heads.total + 1, (head + 1) * size // heads.total))


OPAQUE = Opaque()
