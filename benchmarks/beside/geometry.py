"""What a room of the comparison is: of how many tensors, which pages a slot has on either side, and what they hold.

Names and rules are those of the peer bench, so that both systems move the same bytes by the same descriptors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.states import Side

Bytes = npt.NDArray[np.uint8]
Pages = npt.NDArray[np.int32]

AUX = (64, 64, 64, 64, 512, 512, 64, 128, 64, 64)
"""Bytes of a slot in each array of side records (the first token and what belongs to it), as SGLang 0.5.23 has them. The last holds the
room's number."""
AUX_SLOTS = 256
ALIGNED = 64
LARGE = 64 << 20


@dataclass(frozen=True, slots=True)
class Geometry:
    """``tensors`` of ``pool`` pages of ``item`` bytes each; a room has ``pages`` of them, and a slot of ``aux``.

    The pages lie in one run, or with ``scatter`` in an order of each side's own.
    """

    tensors: int
    item: int
    pages: int
    pool: int
    scatter: bool
    aux: tuple[int, ...] = AUX

    @classmethod
    def of(cls, config: Mapping[str, Any], aux: Sequence[int] = AUX) -> Geometry:
        """One of the peer bench's own."""
        return cls(config["tensors"], config["item"], config["pages"], config["pool"], config["scatter"], tuple(aux))

    @property
    def room_bytes(self) -> int:
        """Bytes of a room, without its side records."""
        return self.tensors * self.item * self.pages

    @property
    def large(self) -> bool:
        """Whether a room is about bandwidth: few are carried, and few at a time."""
        return self.room_bytes >= LARGE

    def listed(self, slot: int, side: Side) -> Pages:
        """The pages of a slot."""
        first = slot % (self.pool // self.pages) * self.pages
        if not self.scatter:
            return np.arange(first, first + self.pages, dtype=np.int32)
        order = np.random.Generator(np.random.PCG64(77 if side == "prefill" else 99)).permutation(self.pool)
        return order[first : first + self.pages].astype(np.int32)

    def source(self, tensor: int) -> Bytes:
        """What prefill has in a tensor, of shape ``[pool, item]``."""
        return np.random.Generator(np.random.PCG64(tensor + 1)).integers(0, 256, (self.pool, self.item), dtype=np.uint8)

    def zeros(self) -> tuple[list[Bytes], list[Bytes]]:
        """A side's memory: the tensors, and the arrays of side records of shape ``[AUX_SLOTS, length]``."""
        return [_zeros(self.pool, self.item) for _ in range(self.tensors)], [_zeros(AUX_SLOTS, length) for length in self.aux]

    def wrong_pages(self, found: Sequence[Bytes], slots: int) -> int:
        """How many pages of decode's first slots are not those of one slot of prefill, in all tensors alike.

        Both sides take the slot that is free, so a room may have different ones on the two.
        """
        first = self.source(0)
        held = {first[self.listed(slot, "prefill")].tobytes(): slot for slot in range(slots)}
        where = [(self.listed(slot, "decode"), held.get(found[0][self.listed(slot, "decode")].tobytes())) for slot in range(slots)]
        wrong = sum(self.pages * self.tensors for _, slot in where if slot is None)
        pairs = [(theirs, self.listed(slot, "prefill")) for theirs, slot in where if slot is not None]
        if not pairs:
            return wrong
        theirs, mine = (np.concatenate(column) for column in zip(*pairs, strict=True))
        return wrong + sum(int((array[theirs] != self.source(tensor)[mine]).any(axis=1).sum()) for tensor, array in enumerate(found))


def _zeros(rows: int, length: int) -> Bytes:
    """Begins where torch would have it begin."""
    memory = np.zeros(rows * length + ALIGNED, np.uint8)
    first = -memory.ctypes.data % ALIGNED
    return memory[first : first + rows * length].reshape(rows, length)
