"""The plots of a report's page, drawn by matplotlib as SVG whose colours are those of the page's style sheet, so light or dark as it is.

What is plotted follows from the fields that results have: percentiles, a rate by the size of a page, how a room's time grows with the rooms
that wait, CPU time by side; of others, the first figure.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import LogLocator, NullLocator

from kvcore.bench.catalog import MEASUREMENTS
from kvcore.bench.report import Figure, Report, figures

Result = Mapping[str, Any]
Draw = Callable[[Axes], None]

INKS = ("text", "dim", "line", "back", "prefill", "decode", "kvcore", "raw", "bare", "c0", "c1", "c2", "c3", "c4", "c5")
"""Colours of the style sheet; each is drawn in a colour that nothing else has, and replaced."""
INK = {name: f"#0102{number:02x}" for number, name in enumerate(INKS)}
LINES = [name for name in INKS if name.startswith("c")]
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "font.family": "sans-serif",
    "font.size": 11,
    "text.parse_math": False,
    "text.color": INK["text"],
    "axes.edgecolor": INK["line"],
    "axes.labelcolor": INK["text"],
    "axes.titlelocation": "left",
    "axes.titlesize": 13,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK["line"],
    "xtick.color": INK["dim"],
    "ytick.color": INK["dim"],
    "legend.frameon": False,
}
WIDTH = 9.2
GROWTH = (
    ("Latency beside rooms that wait", "milliseconds, median", ("latency_ms_median",)),
    ("CPU time beside rooms that wait", "us a room, both sides", ("prefill_cpu_us_per_room", "decode_cpu_us_per_room")),
)
"""Titles, units, and the fields whose sum is plotted."""


def plots(report: Report) -> Iterator[tuple[str, str]]:
    """Captions and drawings."""
    name, results = MEASUREMENTS[report.command].name, report.results
    named = [(name(result), result) for result in results]
    found = [*_distributions(named), *_by_size(named), *_rates(named), *_over_wire(named), *_growth(named), *_cpu(named)]
    yield from found or _first(named, {*MEASUREMENTS[report.command].names, *report.parameters})


def _distributions(named: Sequence[tuple[str, Result]]) -> Iterator[tuple[str, str]]:
    """What part of all took no longer."""
    fields = {field: _what(field) for field in named[0][1] if field.endswith("percentiles")}
    if not fields:
        return

    def draw(axes: Axes) -> None:
        for number, (name, field) in enumerate((name, field) for name, _ in named for field in fields):
            label = ", ".join([name] * (len(named) > 1 or len(fields) == 1) + [fields[field]] * (len(fields) > 1))
            axes.plot(dict(named)[name][field], range(101), color=INK[LINES[number % len(LINES)]], linewidth=2, label=label)
        _logarithmic(axes)
        axes.set(xlabel="milliseconds (logarithmic)", ylabel="% of all that took no longer", ylim=(0, 100))

    title = f"Distribution of {' and '.join(fields.values())}"
    yield "The further left a line, the quicker; the steeper, the steadier. Where it crosses 50 is the median.", _svg(title, draw)


def _what(field: str) -> str:
    return field.removesuffix("percentiles").removesuffix("ms_").removesuffix("_").replace("_", " ") or "time"


def _by_size(named: Sequence[tuple[str, Result]]) -> Iterator[tuple[str, str]]:
    """Bytes a second, of each order of pages."""
    sized = [result for _, result in named if "page_bytes" in result and "gb_per_s" in result]
    for order in dict.fromkeys(result["order"] for result in sized):
        points = sorted((result for result in sized if result["order"] == order), key=lambda result: int(result["page_bytes"]))

        def draw(axes: Axes, points: Sequence[Result] = points) -> None:
            sizes = [result["page_bytes"] for result in points]
            _line(axes, "kvcore", "kvcore", sizes, points, "gb_per_s")
            _line(axes, "raw", "engine alone", sizes, [result.get("raw") for result in points], "gb_per_s")
            _line(axes, "bare", "copy by one thread", sizes, [result.get("bare") for result in points], "copy_gb_per_s")
            axes.set_xscale("log", base=2)
            axes.set_xticks(sizes, [_size(each) for each in sizes])
            axes.minorticks_off()
            axes.set(xlabel="size of a page", ylabel="GB/s", ylim=(0, None))

        yield "Higher is better; the thin lines are from the least to the most of the repeats.", _svg(f"Throughput, pages {order}", draw)


def _line(axes: Axes, ink: str, label: str, along: Sequence[int], parts: Sequence[Result | None], field: str) -> None:
    """A figure with its ends, of the parts that have it."""
    found = [(at, part) for at, part in zip(along, parts, strict=True) if part and part.get(field) is not None]
    if found:
        values, ends = [part[field] for _, part in found], [_ends(part, field) for _, part in found]
        places = [at for at, _ in found]
        axes.errorbar(places, values, [*zip(*ends, strict=True)], color=INK[ink], marker="o", linewidth=2, elinewidth=1, label=label)


def _rates(named: Sequence[tuple[str, Result]]) -> Iterator[tuple[str, str]]:
    """Rooms a second beside transfers of the engine alone."""
    if "rooms_per_s" not in named[0][1]:
        return

    def draw(axes: Axes) -> None:
        mine = [(result, "rooms_per_s") for _, result in named]
        alone = [(result["raw"], "transfers_per_s") for _, result in named]
        _dots(axes, [name for name, _ in named], [("kvcore", "rooms", mine), ("raw", "transfers of the engine alone", alone)])
        _logarithmic(axes)
        axes.set(xlabel="a second (logarithmic)")

    yield "Further right is better; the thin lines are from the least to the most of the repeats.", _svg("Rooms a second", draw, len(named))


def _over_wire(named: Sequence[tuple[str, Result]]) -> Iterator[tuple[str, str]]:
    """What a room takes beside what the wire takes for it."""
    timed = [(name, result) for name, result in named if result.get("latency_over_wire") is not None]
    if not timed:
        return

    def draw(axes: Axes) -> None:
        took = [result["latency_ms_median"] for _, result in timed]
        engine = [result["raw"]["transfer_ms"] for _, result in timed]
        wire = [mine / result["latency_over_wire"] for mine, (_, result) in zip(took, timed, strict=True)]
        rows = range(len(timed))
        axes.barh([row - 0.2 for row in rows], took, 0.36, color=INK["kvcore"], label="kvcore")
        axes.barh([row + 0.2 for row in rows], engine, 0.36, color=INK["raw"], label="the engine's own transfer")
        rest = [all_of_it - part for all_of_it, part in zip(wire, engine, strict=True)]
        axes.barh([row + 0.2 for row in rows], rest, 0.36, engine, color=INK["bare"], label="control messages")
        _rows(axes, [f"{name}\n{result['latency_over_wire']:.2f} x the wire" for name, result in timed])
        axes.set(xlabel="milliseconds")

    yield (
        "Shorter is better: the median latency of a room, above what the wire takes for it.",
        _svg("A room beside the wire", draw, 2 * len(timed)),
    )


def _growth(named: Sequence[tuple[str, Result]]) -> Iterator[tuple[str, str]]:
    """What a room takes beside more and more that wait."""
    results = sorted((result for _, result in named if "waiting" in result), key=lambda result: int(result["waiting"]))
    if len({result["waiting"] for result in results}) < 2:
        return
    cases: dict[str, list[Result]] = {}
    for result in results:
        cases.setdefault(MEASUREMENTS["bench rooms"].name({**result, "waiting": 0}), []).append(result)
    for title, unit, fields in GROWTH:

        def draw(axes: Axes, unit: str = unit, fields: Sequence[str] = fields) -> None:
            for ink, (case, points) in zip(cycle(LINES), cases.items(), strict=False):
                live = [result["waiting"] + result["in_flight"] for result in points]
                _line(axes, ink, case, live, [_sum(result, fields) for result in points], "sum")
            _logarithmic(axes)
            axes.set(xlabel="live rooms, those that wait and those in flight (logarithmic)", ylabel=unit, ylim=(0, None))

        yield (
            "A level line does not grow with the rooms that wait; the thin lines are from the least to the most of the repeats.",
            _svg(title, draw),
        )


def _sum(part: Result, fields: Sequence[str]) -> Result:
    each = [sum(values) for values in zip(*(part[f"{field}_each"] for field in fields), strict=True)]
    return {"sum": sum(part[field] for field in fields), "sum_each": each}


def _cpu(named: Sequence[tuple[str, Result]]) -> Iterator[tuple[str, str]]:
    """CPU time by side, above that of the engine alone."""
    field = next((name.removeprefix("prefill_") for name in named[0][1] if name.startswith("prefill_cpu")), None)
    if field is None:
        return
    alone = next((name.removeprefix("prefill_") for name in named[0][1].get("raw") or () if name.startswith("prefill_cpu")), "")
    bars: list[tuple[str, Result, str]] = []
    for name, result in named:
        bars.append((name, result, field))
        if result.get("raw"):
            bars.append(("engine alone", result["raw"], alone))

    def draw(axes: Axes) -> None:
        left = [0.0] * len(bars)
        for side in ("prefill", "decode"):
            values = [part[f"{side}_{of}"] for _, part, of in bars]
            axes.barh(range(len(bars)), values, 0.7, left, color=INK[side], label=side)
            left = [one + another for one, another in zip(left, values, strict=True)]
        _rows(axes, [name for name, _, _ in bars])
        axes.set(xlabel=field.removeprefix("cpu_").replace("_", " ").replace("percent", "% of a core"))

    yield "Shorter is better: CPU time of whole processes, that of prefill and of decode end to end.", _svg("CPU", draw, len(bars))


def _first(named: Sequence[tuple[str, Result]], names: set[str]) -> Iterator[tuple[str, str]]:
    """For what is known by no other field: the first figure of each result."""
    firsts: list[tuple[str, Figure]] = [(name, found) for name, result in named if (found := next(figures(result, names), None))]
    if not firsts:
        return

    def draw(axes: Axes) -> None:
        parts = [({found.name: found.value, f"{found.name}_each": found.each}, found.name) for _, found in firsts]
        _dots(axes, [name for name, _ in firsts], [("kvcore", "", parts)])
        _logarithmic(axes)
        axes.set(xlabel=f"{firsts[0][1].name.replace('_', ' ')} (logarithmic)")

    yield "The thin lines are from the least to the most of the repeats.", _svg("Each case", draw, len(firsts))


Dots = Sequence[tuple[Result | None, str]]


def _dots(axes: Axes, names: Sequence[str], groups: Sequence[tuple[str, str, Dots]]) -> None:
    """A row for each name, a dot in it for each group: its ink, its label, and of each row the part that has the field."""
    for ink, label, dots in groups:
        found = [(row, part, field) for row, (part, field) in enumerate(dots) if part is not None]
        if found:
            rows, parts = [row for row, _, _ in found], [part[field] for _, part, field in found]
            ends = [*zip(*(_ends(part, field) for _, part, field in found), strict=True)]
            axes.errorbar(parts, rows, xerr=ends, fmt="o", markersize=10, elinewidth=1.5, color=INK[ink], label=label)
    axes.set_ylim(-0.6, len(names) - 0.4)
    _rows(axes, names)


def _rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0, labelcolor=INK["text"])
    axes.grid(visible=False, axis="y")
    axes.invert_yaxis()


def _logarithmic(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_locator(NullLocator())


def _ends(part: Result, field: str) -> tuple[float, float]:
    """How far the least and the most of the repeats are from the figure."""
    value, each = part[field], part.get(f"{field}_each") or [part[field]]
    return max(0.0, value - min(each)), max(0.0, max(each) - value)


def _size(nbytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes} B"


def _svg(title: str, draw: Draw, rows: int | None = None) -> str:
    """One drawing, as high as its rows need."""
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": title}):
        drawing = Drawing(figsize=(WIDTH, 4.2 if rows is None else 1.7 + 0.42 * rows), layout="constrained")
        axes = drawing.add_subplot()
        draw(axes)
        axes.set_title(title, pad=14)
        if axes.get_legend_handles_labels()[1] not in ([], [""]):
            drawing.legend(loc="outside lower left", ncols=2)
        file = io.StringIO()
        drawing.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _for_page(file.getvalue())


def _for_page(svg: str) -> str:
    """The element alone, without names that other drawings on the page have too, in the page's colours."""
    element = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    names = {colour: f"var(--{name})" for name, colour in INK.items()}
    coloured = re.sub(r"#0102[0-9a-f]{2}", lambda found: names.get(found[0], found[0]), element)
    return re.sub(r'<g id="[^"]*">', "<g>", coloured)
