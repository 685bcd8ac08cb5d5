"""The commands ``kvcore backends`` and ``kvcore doctor``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kvcore.cli_options import Host, Options, Timeout
from kvcore.errors import one_line
from kvcore.installed import InstalledBackend, find_backend, list_backends
from kvcore.progress import progress

if TYPE_CHECKING:
    from kvcore.doctor.examination import Finding

MOST_CHARACTERS = 300
"""Of a thing that a backend says of itself."""

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")]


def backends(as_json: AsJson = False) -> None:
    """Show which backends are installed, without importing any."""
    found = list_backends()
    if as_json:
        typer.echo(json.dumps({"backends": [asdict(backend) for backend in found]}))
        return
    rows = [("name", "distribution", "version"), *(tuple(map(_said, (one.name, one.distribution, one.version))) for one in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def doctor(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The backend to check; default: all that are installed.")] = None,
    options: Options = None,
    host: Host = "127.0.0.1",
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Check backends: load each, start its engine, move a page between two processes and look at every byte of it.

    Says for each what is wrong and what to do. Exits 0 only if all that were asked for work. The time limit is for any one step.
    """
    if options is not None and name is None:
        raise typer.BadParameter("options are for one backend; name it", param_hint="--options")
    asked = [find_backend(name)] if name else list_backends()
    from kvcore.doctor.examination import examine
    from kvcore.doctor.patient import Settings

    findings = []
    for backend in asked:
        settings = Settings(f"{backend.name}@{backend.distribution}", options or {}, host, timeout, bool(context.obj))
        with progress() as watch:
            watch("checking", f"{backend.name} of {backend.distribution}")
            findings.append(examine(backend, settings, watch))
        if context.obj:
            sys.stderr.write(findings[-1].trace)
        if not as_json:
            typer.echo("\n".join(lines(findings[-1])))
    well = all(not finding.problem for finding in findings)
    if as_json:
        typer.echo(json.dumps({"ok": well, "backends": [finding.as_json() for finding in findings]}, default=str))
    else:
        typer.echo(summary(findings))
    if not well:
        raise typer.Exit(1)


def lines(finding: Finding) -> Iterator[str]:
    """What was found of one backend, for people."""
    mark = "FAILED" if finding.problem else "ok"
    well = f"moved a page between two processes in {finding.seconds:.1f} s"
    yield f"{mark:6}  {_name(finding.backend)}: {one_line(finding.problem) or well}"
    about = finding.about
    if about is None:
        return
    able = ", ".join(about.capabilities["memory"])
    yield f"        version {about.version}, hooks {about.api_version}, wire version {about.wire_version}, moves {able} memory"
    for fact in about.facts:
        yield f"        {_said(fact.name)}: {_said(fact.value)}" + (f"; {_said(fact.advice)}" if fact.advice else "")


def summary(findings: list[Finding]) -> str:
    """The last line."""
    sick = [_name(finding.backend) for finding in findings if finding.problem]
    if sick:
        return f"failed: {len(sick)} of {len(findings)} do not work: {', '.join(sick)}"
    return f"ok: {len(findings)} of {len(findings)} work"


def _said(text: str) -> str:
    return one_line(text, MOST_CHARACTERS)


def _name(backend: InstalledBackend) -> str:
    return _said(f"{backend.name} ({backend.distribution} {backend.version})")
