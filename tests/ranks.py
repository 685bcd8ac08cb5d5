"""Ranks of a model in plain numpy: what each holds of one global KV tensor, and what its pools must hold after a hand-off.

The cutting is numpy slicing and knows nothing of kvcore: it is what the mapping is held to.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

TOKENS, DIM, PAGES, LAYERS = 2, 2, 5, 5
"""Tokens of a page, bytes of a head of a token, pages of a pool, layers of the model."""
FROM, TO = np.array([4, 0, 3]), np.array([1, 2, 0])
"""The pages of a room, of prefill and of decode."""
GAP = np.array([0xEE], np.uint8)


@dataclass(frozen=True)
class Model:
    """KV heads of the model (0: one latent copy), and whether a side pool goes along."""

    heads: int
    side: bool = False


MODELS = {"mha": Model(8), "gqa 8": Model(8), "gqa 2": Model(2), "mla": Model(0), "hybrid": Model(2, side=True)}


def whole(model: Model, order: str, side: str) -> np.ndarray:
    """All of the model's KV on one side, with different bytes everywhere it matters: [layer, page, token, head, dim] in that order."""
    shape = (LAYERS, PAGES, TOKENS, max(1, model.heads), DIM)
    values = np.random.default_rng(1 if side == "prefill" else 2).integers(0, 256, shape, np.uint8)
    return values if order == "token" else values.transpose(0, 1, 3, 2, 4)


def cut(values: np.ndarray, model: Model, order: str, layers: list[int], tp: int, rank: int) -> np.ndarray:
    """The part of it that one rank holds."""
    if not model.heads:
        return np.ascontiguousarray(values[layers])
    first = rank * model.heads // tp
    heads = slice(first, first + max(1, model.heads // tp))
    return np.ascontiguousarray(values[layers][:, :, :, heads] if order == "token" else values[layers][:, :, heads])


def stages(pp: int, uneven: bool) -> list[list[int]]:
    """The layers of each pipeline stage."""
    bounds = [round(LAYERS * stage / pp) for stage in range(pp + 1)]
    if uneven and pp > 1:
        bounds[1] = 1
    return [list(range(start, stop)) for start, stop in itertools.pairwise(bounds)]


@dataclass
class Held:
    """The memory of one rank: its pools' regions one after the other, a gap of a byte after each."""

    model: Model
    order: str
    side: str
    tp: int
    tp_rank: int
    pp: int
    pp_rank: int
    layers: list[int]
    memory: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.memory = self._joined([*self._kv(whole(self.model, self.order, self.side)), *self._side(7 if self.side == "prefill" else 9)])

    def regions(self) -> list[tuple[str, int, np.ndarray]]:
        """Pool, layer and memory of each region, of shape [pages, ...]."""
        shapes = [
            ("kv", layer, part.shape) for layer, part in zip(self.layers, self._kv(whole(self.model, self.order, "prefill")), strict=True)
        ]
        shapes += [("side", 0, part.shape) for part in self._side(0)]
        found, at = [], 0
        for pool, layer, shape in shapes:
            size = int(np.prod(shape))
            found.append((pool, layer, self.memory[at : at + size].reshape(shape)))
            at += size + 1
        return found

    def reset(self) -> None:
        """As it was before any room."""
        self.memory[:] = Held(self.model, self.order, self.side, self.tp, self.tp_rank, self.pp, self.pp_rank, self.layers).memory

    def expected(self) -> np.ndarray:
        """Of a decode rank: its memory after a room has come."""
        values = whole(self.model, self.order, "decode").copy()
        values[:, TO] = whole(self.model, self.order, "prefill")[:, FROM]
        side = self._side(9)
        for part in side:
            part[TO] = 7
        return self._joined([*self._kv(values), *side])

    def touched(self) -> np.ndarray:
        """Of a decode rank: 1 for each byte that a room brings, else 0."""
        parts = [*self._kv(whole(self.model, self.order, "decode")), *self._side(9)]
        return np.concatenate([np.append(np.isin(np.arange(PAGES), TO).repeat(part.size // PAGES), False) for part in parts]).astype(
            np.int64
        )

    def _kv(self, values: np.ndarray) -> list[np.ndarray]:
        return list(cut(values, self.model, self.order, self.layers, self.tp, self.tp_rank))

    def _side(self, fill: int) -> list[np.ndarray]:
        return [np.full((PAGES, 3), fill, np.uint8)] if self.model.side else []

    def _joined(self, parts: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([part for region in parts for part in (region.reshape(-1), GAP)])


def group(model: Model, order: str, side: str, tp: int, pp: int, uneven: bool = False) -> list[Held]:
    """All ranks of one side."""
    layers = stages(pp, uneven)
    return [Held(model, order, side, tp, rank, pp, stage, layers[stage]) for stage in range(pp) for rank in range(tp)]
