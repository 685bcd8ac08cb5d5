"""``bench compare``: two reports of the same measurement, figure by figure, as ratios with their spread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from kvcore.bench.catalog import MEASUREMENTS
from kvcore.bench.fields import told
from kvcore.bench.report import SCHEMA, Figure, Report, figures, read
from kvcore.sides import ToolError

Verdict = Literal["better", "worse", "alike", "unknown"]
"""Of B beside A: alike if 1 lies within the spread of their ratio; unknown with few repeats."""
FEWEST_REPEATS = 5
"""Of either, for a verdict: the spread that fewer leave is too narrow, and would tell chance as a difference too often."""
DRAWS = 2000
"""Of repeats, with replacement, for the spread of a ratio."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What is not the same in both: a parameter, a version, a fact of the machine, a word in a result."""

    what: Annotated[str, told("What differs.")]
    a: Annotated[Any, told("What it is in A.")]
    b: Annotated[Any, told("What it is in B.")]


@dataclass(frozen=True, slots=True)
class Ratio:
    """B over A of one figure. Repeats of either are drawn again and again, with replacement, and the interval has 95 % of the ratios of
    their medians."""

    figure: Annotated[str, told("The figure's name, with its unit at the end.")]
    a: Annotated[float, told("The figure in A, in its unit.")]
    b: Annotated[float, told("The figure in B, in its unit.")]
    ratio: Annotated[float | None, told("The figure in B over that in A; null where this is 0.")]
    low: Annotated[float | None, told("Where the interval of the ratio begins; null with fewer than two repeats.")]
    high: Annotated[float | None, told("Where the interval of the ratio ends; null with fewer than two repeats.")]
    verdict: Annotated[Verdict, told("Of B beside A: alike if 1 lies within the interval; unknown with few repeats.")]


@dataclass(frozen=True, slots=True)
class Case:
    """One result that both have."""

    name: Annotated[str, told("What the result is of.")]
    ratios: Annotated[tuple[Ratio, ...], told("One of each figure that both have.")]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two reports, figure by figure."""

    schema: Annotated[Literal[1], told("Of this form; raised when a field goes or changes its meaning.")]
    command: Annotated[Literal["bench compare"], told("The command that compared.")]
    compared: Annotated[str, told("The command that wrote both.")]
    a: Annotated[str, told("The file of A.")]
    b: Annotated[str, told("The file of B.")]
    differences: Annotated[tuple[Difference, ...], told("What is not the same in both, beside figures.")]
    missing: Annotated[tuple[str, ...], told("Names of results that one of them only has.")]
    results: Annotated[tuple[Case, ...], told("One of each case that both have.")]


def compare(a: Path, b: Path) -> Comparison:
    """Raises ``ToolError`` if one of them is no report, or if they are not of the same thing."""
    one, two = read(a), read(b)
    if one.command != two.command:
        raise ToolError(f"{a} is of {one.command} and {b} of {two.command}; give two files of the same command")
    first, second = _by_name(one), _by_name(two)
    both = [name for name in first if name in second]
    if not both:
        raise ToolError(f"{a} has {'; '.join(first)} and {b} has {'; '.join(second)}; give two files with a case that both have")
    found = [*_differences(one, two)]
    for name in both:
        found += _unlike(f"{name}: ", first[name], second[name])
    names = {*MEASUREMENTS[one.command].names, *one.parameters}
    cases = tuple(Case(name, tuple(_ratios(names, first[name], second[name]))) for name in both)
    missing = tuple(f"{name} (only in {where})" for where, names in (("A", first), ("B", second)) for name in names if name not in both)
    return Comparison(SCHEMA, "bench compare", one.command, str(a), str(b), tuple(found), missing, cases)


def ratio(a: Figure, b: Figure) -> Ratio:
    """Of one figure."""
    plain = b.value / a.value if a.value else None
    if min(len(a.each), len(b.each)) < 2 or not all(a.each):
        return Ratio(a.name, a.value, b.value, plain, None, None, "unknown")
    few = min(len(a.each), len(b.each)) < FEWEST_REPEATS
    random = np.random.default_rng(0)
    below, above = (np.median(random.choice(each, (DRAWS, len(each))), axis=1) for each in (a.each, b.each))
    low, high = (float(limit) for limit in np.percentile(above / below, (2.5, 97.5)))
    verdict: Verdict = "unknown" if few else "alike" if low <= 1 <= high else "better" if (low > 1) == a.higher else "worse"
    return Ratio(a.name, a.value, b.value, plain, low, high, verdict)


def table(comparison: Comparison) -> Iterator[str]:
    """The comparison for people."""
    yield f"{comparison.compared}: B / A of the medians, and the spread that their repeats leave it (95 %)"
    yield f"A: {comparison.a}"
    yield f"B: {comparison.b}"
    yield from (f"differs: {each.what}: {each.a} in A, {each.b} in B" for each in comparison.differences)
    yield from (f"left out: {name}" for name in comparison.missing)
    if all(each.verdict == "unknown" for case in comparison.results for each in case.ratios):
        yield f"better or worse is said from {FEWEST_REPEATS} repeats of both on"
    for case in comparison.results:
        width = max(len(each.figure) for each in case.ratios)
        yield f"\n{case.name}\n{'':<{width}} {'A':>12} {'B':>12} {'B / A':>8}"
        for each in case.ratios:
            spread = f"({each.low:.3f} to {each.high:.3f})" if each.low is not None else ""
            quotient = f"{each.ratio:.3f}" if each.ratio is not None else "-"
            said = each.verdict if each.verdict != "unknown" else ""
            yield f"{each.figure:<{width}} {each.a:>12.6g} {each.b:>12.6g} {quotient:>8}   {spread:<20} {said}".rstrip()


def _by_name(report: Report) -> dict[str, dict[str, Any]]:
    return {MEASUREMENTS[report.command].name(result): result for result in report.results}


def _ratios(names: Iterable[str], a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Ratio]:
    theirs = {each.name: each for each in figures(b, names)}
    return (ratio(each, theirs[each.name]) for each in figures(a, names) if each.name in theirs)


def _differences(a: Report, b: Report) -> Iterator[Difference]:
    if a.backend != b.backend:
        yield Difference("backend", a.backend, b.backend)
    for what, mine, yours in (
        ("versions", a.versions, b.versions),
        ("machine", asdict(a.machine), asdict(b.machine)),
        ("parameters", a.parameters, b.parameters),
    ):
        for name in dict.fromkeys((*mine, *yours)):
            if mine.get(name) != yours.get(name):
                yield Difference(f"{what}.{name}", mine.get(name), yours.get(name))


def _unlike(prefix: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    """Words, and whole numbers, which count something."""
    for name, mine in a.items():
        yours = b.get(name)
        if isinstance(mine, Mapping) and isinstance(yours, Mapping):
            yield from _unlike(f"{prefix}{name}.", mine, yours)
        elif isinstance(mine, str | int) and f"{name}_each" not in a and mine != yours:
            yield Difference(prefix + name, mine, yours)
