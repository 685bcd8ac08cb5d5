"""The fields of what measurements write: each with what it is where it is declared, and those of figures that every repeat has one of."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from kvcore.sides import SIDES
from kvcore.states import Side

Values = Sequence[float] | npt.NDArray[np.float64]


def told(what: str) -> msgspec.Meta:
    """What a field is, with its unit, in one line: it stands beside the type, in ``Annotated``, and so in the JSON Schema.

    An ``x_each`` goes without, since it is the ``x`` beside it of each repeat.
    """
    return msgspec.Meta(description=what)


def repeated(**each: Sequence[float]) -> dict[str, Any]:
    """Of figures that each repeat has one of: ``x`` is the median, None of none, and ``x_each`` are all."""
    medians = {name: statistics.median(values) if values else None for name, values in each.items()}
    return medians | {f"{name}_each": tuple(values) for name, values in each.items()}


def by_side(name: str, each: Mapping[Side, Sequence[float]], scale: float = 1.0) -> dict[str, Any]:
    """The same of each side, as ``prefill_<name>`` and ``decode_<name>``: values times ``scale``."""
    return repeated(**{f"{side}_{name}": [scale * value for value in values] for side, values in each.items()})


def spread(name: str, each: Sequence[Values]) -> dict[str, Any]:
    """Of a time that each repeat has many of: of all together some percentiles and all of them, and of each repeat the median."""
    found = percentiles(np.concatenate(each))
    shares = {"median": found[50], "p90": found[90], "p99": found[99], "max": found[100], "percentiles": found}
    return {f"{name}_{share}": value for share, value in shares.items()} | {
        f"{name}_median_each": tuple(float(np.median(values)) for values in each)
    }


def percentiles(values: Values) -> tuple[float, ...]:
    """From 0 to 100, in steps of one."""
    return tuple(float(value) for value in np.percentile(values, range(101)))


class Costly(Protocol):
    """What a side has measured of itself."""

    @property
    def cpu_s(self) -> float:
        """CPU seconds of its process."""


def cpu_s(repeats: Sequence[Mapping[Side, Costly]]) -> dict[Side, tuple[float, ...]]:
    """CPU seconds of each repeat, by side."""
    return {side: tuple(repeat[side].cpu_s for repeat in repeats) for side in SIDES}
