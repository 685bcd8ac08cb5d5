"""The commands ``kvcore bench …``: options in, a table or JSON out. What measures is imported when it is asked for."""

from __future__ import annotations

import enum
import importlib.util
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from kvcore.cli_options import Backend, Host, JsonFile, Options, Timeout, folder_exists, positive, seconds, write, write_json
from kvcore.installed import find_backend
from kvcore.progress import progress
from kvcore.sides import ToolError

if TYPE_CHECKING:
    from kvcore.bench.setup import Setup

MOST_BYTES = 1 << 34
"""Of one side's pool."""
MOST_ROOMS = 1_000_000
IN_FLIGHT = [1, 64]
PAGE_BYTES = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]


class Order(str, enum.Enum):
    """Of a room's pages."""

    SCATTERED = "scattered"
    CONTIGUOUS = "contiguous"


class From(str, enum.Enum):
    """Where a room's clock starts."""

    OPEN = "open"
    RECEIVE = "receive"


ORDER = [Order.SCATTERED]
FROM = [From.OPEN, From.RECEIVE]
WAITING = [0]

bench = typer.Typer(name="bench", help="Measure: rooms a second, bandwidth, a trace of requests, aborts, waiting, the planner; compare.")

Report = Annotated[Path, typer.Argument(metavar="FILE", dir_okay=False, help="What one of the other commands has written with --json.")]


def _html_file(path: Path | None) -> Path | None:
    """Told before anything is measured."""
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise ToolError("--html draws with matplotlib, which is not installed; run: pip install kvcore[html]")
    return folder_exists(path)


HtmlFile = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", dir_okay=False, callback=_html_file, help="Write one page with plots there, for people."),
]
Repeats = Annotated[int, typer.Option(min=1, max=1000, help="How often it is measured, after once for warming up.")]


@bench.command()
def rooms(
    context: typer.Context,
    backend: Backend = "local",
    rooms: Annotated[int, typer.Option(min=1, max=MOST_ROOMS, help="Rooms of one repeat.")] = 1000,
    in_flight: Annotated[list[int], typer.Option(min=1, max=10_000, help="Rooms at a time; may be given more than once.")] = IN_FLIGHT,
    page_bytes: Annotated[int, typer.Option(min=1, max=MOST_BYTES, help="Bytes of the one page of a room.")] = 16384,
    repeats: Repeats = 3,
    measured_from: Annotated[
        list[From],
        typer.Option("--from", help="Opening the receiver, or receive with both handles opened before; may be given more than once."),
    ] = FROM,
    waiting: Annotated[
        list[int], typer.Option(min=0, max=100_000, help="Rooms that wait meanwhile; may be given more than once.")
    ] = WAITING,
    options: Options = None,
    host: Host = "127.0.0.1",
    timeout: Timeout = 120.0,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """Rooms a second, a room's latency, and CPU time a room on both sides; one page a room. Beside it, transfers of the engine alone."""
    _fit(rooms * page_bytes, "--page-bytes", "one page a room")
    setup = _setup(context, backend, options, host, timeout)
    from kvcore.bench import rooms as measurement

    clocks = cast("tuple[measurement.From, ...]", tuple(one.value for one in measured_from))
    parameters = measurement.Parameters(rooms, tuple(in_flight), page_bytes, repeats, clocks, tuple(waiting))
    with progress() as watch:
        results = measurement.measure(setup, parameters, watch)
    _tell("bench rooms", setup, parameters, results, [*measurement.table(results), *_lack(backend)], json_file, html_file)


@bench.command()
def bandwidth(
    context: typer.Context,
    backend: Backend = "local",
    page_bytes: Annotated[
        list[int], typer.Option(min=1, max=MOST_BYTES, help="Bytes of a page; may be given more than once.")
    ] = PAGE_BYTES,
    room_bytes: Annotated[int, typer.Option(min=1, max=MOST_BYTES, help="Bytes of a room, a page at least.")] = 64 << 20,
    order: Annotated[list[Order], typer.Option(help="How the pages lie on both sides; may be given more than once.")] = ORDER,
    repeats: Repeats = 5,
    options: Options = None,
    host: Host = "127.0.0.1",
    timeout: Timeout = 120.0,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """Bytes a second, and CPU time a GiB on both sides, for pages of several sizes. Beside it, the same bytes by the engine alone."""
    setup = _setup(context, backend, options, host, timeout)
    from kvcore.bench import bandwidth as measurement

    parameters = measurement.Parameters(tuple(page_bytes), room_bytes, repeats, tuple(one.value for one in order))
    with progress() as watch:
        results = measurement.measure(setup, parameters, watch)
    _tell("bench bandwidth", setup, parameters, results, [*measurement.table(results), *_lack(backend)], json_file, html_file)


@bench.command()
def idle(
    context: typer.Context,
    backend: Backend = "local",
    rooms: Annotated[int, typer.Option(min=1, max=MOST_ROOMS, help="Rooms that wait.")] = 5000,
    window: Annotated[float, typer.Option(callback=seconds, help="Seconds to look at the clocks for.")] = 5.0,
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="How many such windows.")] = 3,
    options: Options = None,
    host: Host = "127.0.0.1",
    timeout: Timeout = 120.0,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """CPU share and memory of both processes while nothing moves, and the time of one poll_all: without rooms, and with many that wait."""
    if window >= timeout:
        raise typer.BadParameter(f"{window:g} s is not below the {timeout:g} s of --timeout", param_hint="--window")
    setup = _setup(context, backend, options, host, timeout)
    from kvcore.bench import idle as measurement

    parameters = measurement.Parameters(rooms, window, repeats)
    with progress() as watch:
        results = measurement.measure(setup, parameters, watch)
    _tell("bench idle", setup, parameters, results, measurement.table(results), json_file, html_file)


@bench.command()
def abort(
    context: typer.Context,
    backend: Backend = "local",
    rooms: Annotated[int, typer.Option(min=1, max=MOST_ROOMS, help="Rooms that are live at first.")] = 1000,
    repeats: Repeats = 3,
    options: Options = None,
    host: Host = "127.0.0.1",
    timeout: Timeout = 120.0,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """The time until the other side of a room knows of an abort, of either side, while many rooms are live."""
    setup = _setup(context, backend, options, host, timeout)
    from kvcore.bench import abort as measurement

    parameters = measurement.Parameters(rooms, repeats=repeats)
    with progress() as watch:
        results = measurement.measure(setup, parameters, watch)
    _tell("bench abort", setup, parameters, results, measurement.table(results), json_file, html_file)


@bench.command()
def kill(
    context: typer.Context,
    backend: Backend = "local",
    rooms: Annotated[int, typer.Option(min=1, max=100_000, help="Rooms that are live at each of three stages.")] = 100,
    liveness: Annotated[float, typer.Option(callback=seconds, help="The limit liveness_s of both sides.")] = 2.0,
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="How often each side is struck by each signal.")] = 3,
    options: Options = None,
    host: Host = "127.0.0.1",
    timeout: Timeout = 120.0,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """The time until rooms have failed with a reason after the other side's process was killed, or stopped."""
    if liveness >= timeout:
        raise typer.BadParameter(f"{liveness:g} s is not below the {timeout:g} s of --timeout", param_hint="--liveness")
    setup = _setup(context, backend, options, host, timeout)
    from kvcore.bench import kill as measurement

    parameters = measurement.Parameters(rooms, liveness, repeats)
    with progress() as watch:
        results = measurement.measure(setup, parameters, watch)
    _tell("bench kill", setup, parameters, results, measurement.table(results), json_file, html_file)


@bench.command()
def trace(
    context: typer.Context,
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", exists=True, dir_okay=False, readable=True, help="Requests in Mooncake's format, one a line.")
    ],
    backend: Backend = "local",
    requests: Annotated[int, typer.Option(min=1, max=MOST_ROOMS, help="At most so many, the first ones.")] = 1000,
    speed: Annotated[float, typer.Option(callback=positive, help="So many times as fast as in the trace.")] = 10.0,
    page_tokens: Annotated[int, typer.Option(min=1, max=512, help="Tokens of a page; 512 must be a multiple of it.")] = 64,
    page_bytes: Annotated[int, typer.Option(min=1, max=MOST_BYTES, help="Bytes of a page.")] = 16384,
    memory: Annotated[int, typer.Option(min=1, max=MOST_BYTES, help="Bytes of either side's pool.")] = 256 << 20,
    token_ms: Annotated[float, typer.Option(callback=positive, help="Decode holds pages for so long for each token of output.")] = 20.0,
    limit_ms: Annotated[float, typer.Option(callback=positive, help="A request is good if it takes no longer, from arrival on.")] = 100.0,
    step_ms: Annotated[float, typer.Option(callback=positive, help="How often the schedulers look at their rooms.")] = 0.5,
    repeats: Repeats = 3,
    options: Options = None,
    host: Host = "127.0.0.1",
    timeout: Timeout = 120.0,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """Play a trace of requests in time: queueing, transfer, goodput, what decode had already. Beside it, the engine alone."""
    if 512 % page_tokens:
        raise typer.BadParameter(f"512, the tokens of a block of the trace, is no multiple of {page_tokens}", param_hint="--page-tokens")
    setup = _setup(context, backend, options, host, timeout)
    from kvcore.bench import trace as measurement

    pages = (page_tokens, page_bytes, memory)
    parameters = measurement.Parameters(str(trace), requests, speed, *pages, token_ms, limit_ms, step_ms, repeats)
    with progress() as watch:
        results = measurement.measure(setup, parameters, watch)
    _tell("bench trace", setup, parameters, results, [*measurement.table(results), *_lack(backend)], json_file, html_file)


@bench.command()
def plan(
    repeats: Annotated[int, typer.Option(min=1, help="How often each chunk is planned.")] = 30,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """Median times of the planner, in this process, without a backend. Exits 1 if one misses its target."""
    from kvcore.bench import plan as measurement

    parameters = measurement.Parameters(repeats)
    with progress() as watch:
        watch("measuring", "the planner")
        results = measurement.measure(parameters)
    _tell("bench plan", None, parameters, results, measurement.table(results), json_file, html_file)
    if any(result.missed for result in results):
        raise typer.Exit(1)


@bench.command()
def compare(a: Report, b: Report, json_file: JsonFile = None) -> None:
    """Two reports of the same command, written with --json: of every figure B / A with its spread, and what else differs."""
    from kvcore.bench import compare as comparing

    found = comparing.compare(a, b)
    if not write_json(json_file, asdict(found)):
        typer.echo("\n".join(comparing.table(found)))


@bench.command()
def schema() -> None:
    """The JSON Schema of what --json writes."""
    from kvcore.bench import report

    typer.echo(json.dumps(report.schema(), indent=2))


def _setup(context: typer.Context, backend: str, options: dict[str, Any] | None, host: str, patience_s: float) -> Setup:
    find_backend(backend)  # a misspelt name should not wait for two processes
    from kvcore.bench.setup import Setup

    return Setup(backend, options or {}, host, patience_s, bool(context.obj))


def _fit(nbytes: int, option: str, what: str) -> None:
    if nbytes > MOST_BYTES:
        raise typer.BadParameter(f"{what} makes a pool of {nbytes} bytes, above {MOST_BYTES}", param_hint=option)


def _tell(
    command: str,
    setup: Setup | None,
    parameters: Any,
    results: list[Any],
    table: Iterable[str],
    json_file: Path | None,
    html_file: Path | None,
) -> None:
    from kvcore.bench.report import report

    found, lines = report(command, setup, parameters, results), list(table)
    if html_file is not None:
        from kvcore.bench.page import page

        write(html_file, page(found, lines), "--html")
    if not write_json(json_file, asdict(found)):
        typer.echo("\n".join(lines))


def _lack(backend: str) -> list[str]:
    """For the end of a table: why nothing stands beside its figures."""
    from kvcore.bench.floor import offered

    if offered(backend) is not None:
        return []
    return [f"no engine alone beside it: no floor of {backend} is installed (kvcore-floors has those of nixl and mooncake)"]
