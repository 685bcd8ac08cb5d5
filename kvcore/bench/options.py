"""What the commands of measurements have in common: options beside their own, and what becomes of their results."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcore.bench.ranks import ALONE, Ranks
from kvcore.cli_options import Backend, Host, JsonFile, Options, Timeout, tell_json, writable, write
from kvcore.installed import find_backend
from kvcore.progress import progress
from kvcore.sides import ToolError

if TYPE_CHECKING:
    from kvcore.bench.setup import Setup


def _html_file(path: Path | None) -> Path | None:
    """Told before anything is measured."""
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise ToolError("--html draws with matplotlib, which is not installed; run: pip install 'kvcore[html]'")
    if str(path) == "-":
        raise typer.BadParameter("a page is not printed; name a file")
    return writable(path)


HtmlFile = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", dir_okay=False, callback=_html_file, help="Write one page with plots there, for people."),
]


def _ranks(given: str | Ranks) -> Ranks:
    """From words, and from the default, which is read likewise."""
    try:
        return Ranks.named(str(given))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--topology") from error


Topology = Annotated[
    Ranks,
    typer.Option(metavar="pNdM", parser=_ranks, help="N tensor-parallel ranks of prefill and M of decode, each a process, such as p4d2."),
]


def apart(json_file: Path | None, html_file: Path | None) -> None:
    """One would be written over the other."""
    if json_file is not None and html_file is not None and json_file.resolve() == html_file.resolve():
        raise typer.BadParameter(f"{html_file} is the file of --json too; choose another", param_hint="--html")


def measurement(command: Callable[..., object]) -> Callable[..., None]:
    """A command of two processes, from a function that has the measurement's own options and returns its parameters: the module of the
    function's name measures. Of the options that all have, those that the function names too are given to it. ``topology`` is one of its
    own that is given to the measurement as well."""
    own, whole = (inspect.signature(function, eval_str=True).parameters for function in (command, _measure))
    common = {name: option for name, option in whole.items() if option.kind is option.KEYWORD_ONLY}

    def run(**given: Any) -> None:
        parameters = command(**{name: given[name] for name in own})
        _measure(command.__name__, parameters, **{name: given[name] for name in whole if name in given})

    first = {name: common[name] for name in ("context", "backend")}
    options = {**first, **own, **common}.values()
    run.__signature__ = inspect.Signature([option.replace(kind=option.KEYWORD_ONLY) for option in options])  # type: ignore[attr-defined]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _measure(
    name: str,
    parameters: object,
    topology: Topology = ALONE,
    *,
    context: typer.Context,
    backend: Backend = "local",
    options: Options = None,
    host: Host = "127.0.0.1",
    timeout: Timeout = 120.0,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    apart(json_file, html_file)
    find_backend(backend)  # a misspelt name should not wait for two processes
    from kvcore.bench.setup import Setup

    module = importlib.import_module(f"kvcore.bench.{name}")
    setup = Setup(backend, options or {}, host, timeout, bool(context.obj), str(topology))
    with progress() as watch:
        results = module.measure(setup, parameters, watch)
    lack = _lack(setup) if any(field.name == "raw" for field in fields(results[0])) else []
    tell(name, setup, parameters, results, [*module.table(results), *lack], json_file, html_file)


def tell(
    name: str,
    setup: Setup | None,
    parameters: Any,
    results: Sequence[Any],
    table: Sequence[str],
    json_file: Path | None,
    html_file: Path | None,
) -> None:
    """The results of ``kvcore bench <name>``, as they were asked for."""
    from kvcore.bench.report import report

    found = report(f"bench {name}", setup, parameters, results)
    try:
        tell_json(json_file, asdict(found), table)
    finally:  # what cannot be written is in the way of nothing else
        if html_file is not None:
            from kvcore.bench.page import page

            write(html_file, page(found, table), "--html")


def _lack(setup: Setup) -> list[str]:
    """For the end of a table: why nothing stands beside its figures."""
    from kvcore.bench.floor import offered

    if not setup.ranks.alone:
        return [f"no engine alone and no bare machine beside it: these are of two processes, and measured with {ALONE} only"]
    if offered(setup.backend) is not None:
        return []
    return [f"no engine alone beside it: no floor of {setup.backend} is installed (kvcore-floors has those of nixl and mooncake)"]
