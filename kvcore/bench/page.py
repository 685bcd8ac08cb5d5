"""A report as one page of HTML for people who were not there, which needs nothing else: no scripts, and no resources from anywhere."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from kvcore.bench.catalog import MEASUREMENTS, ROOM, WORDS
from kvcore.bench.ranks import ALONE
from kvcore.bench.report import Report, figures

POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(report: Report, table: Sequence[str]) -> str:
    """The whole page; ``table``: the lines that are printed."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns of the fonts that it looks for when it is loaded first
    from kvcore.bench.plots import plots

    measurement = MEASUREMENTS[report.command]
    title = escape(f"kvcore {report.command}" + (f" over {report.backend}" if report.backend is not None else ""))
    style = resources.files("kvcore.bench").joinpath("page.css").read_text(encoding="utf-8")
    several = report.parameters.get("topology", str(ALONE)) != str(ALONE)
    reading = "".join(f"<li>{escape(each)}</li>" for each in measurement.notes(report.results, several))
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{title}</title>
<style>
{style}</style>
<main>
<header>
<h1>{title}</h1>
<p>{escape(ROOM)}</p>
<p>{escape(measurement.what)}</p>
<dl>{"".join(_row(*each) for each in _facts(report))}</dl>
</header>
<h2>How to read it</h2>
<ul>{reading}</ul>
<h2>Plots</h2>
{"".join(f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>" for caption, svg in plots(report))}
<h2>Table</h2>
<div class="wide"><pre>{escape(chr(10).join(table))}</pre></div>
<h2>Every figure</h2>
<details><summary>With the least and the most of the repeats</summary>
{"".join(_figures(report, result) for result in report.results)}</details>
</main>
</html>
"""


def _row(name: str, value: str) -> str:
    return f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>"


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    """What was measured, where, and how it was set."""
    yield "taken", report.taken
    machine, versions = report.machine, report.versions
    yield "machine", f"{machine.cores} cores of {machine.processor} ({machine.architecture}), {machine.memory_gib:g} GiB of memory"
    yield "system", f"{machine.system}, Python {machine.python}"
    yield "kvcore", versions["kvcore"]
    if report.backend is not None:
        yield "backend", f"{report.backend}, of {versions['distribution']} {versions['backend']}"
    beneath = {name: version for name, version in versions.items() if name not in ("kvcore", "distribution", "backend")}
    yield "beneath it", ", ".join(f"{name} {version}" for name, version in beneath.items())
    for name, value in report.parameters.items():
        yield WORDS.get(name, name.replace("_", " ")), _said(value)


def _said(value: Any) -> str:
    if isinstance(value, list | tuple) and value:
        return ", ".join(_said(each) for each in value)
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value, default=str) if value else "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _figures(report: Report, result: Mapping[str, Any]) -> str:
    measurement = MEASUREMENTS[report.command]
    rows = "".join(
        f"<tr><td>{escape(one.name)}</td>{''.join(_number(each) for each in (one.value, *_ends(one.each)))}</tr>"
        for one in figures(result, {*measurement.names, *report.parameters})
    )
    head = "<tr><th>figure</th><th class='number'>value</th><th class='number'>least</th><th class='number'>most</th></tr>"
    return f"<div class='wide'><table><caption>{escape(measurement.name(result))}</caption>{head}{rows}</table></div>"


def _number(value: float | None) -> str:
    return f"<td class='number'>{'' if value is None else format(value, ',.5g')}</td>"


def _ends(each: Sequence[float]) -> tuple[float | None, float | None]:
    return (min(each), max(each)) if each else (None, None)
