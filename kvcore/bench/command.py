"""The commands ``kvcore bench …``: options in, a table or JSON out. What measures is imported when it is asked for."""

from __future__ import annotations

import enum
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, cast

import typer

from kvcore.bench.memory import afford
from kvcore.bench.options import HtmlFile, Topology, apart, measurement, tell
from kvcore.bench.ranks import ALONE, Ranks
from kvcore.cli_options import JsonFile, Timeout, positive, seconds, tell_json
from kvcore.progress import progress
from kvcore.sides import ToolError

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

bench = typer.Typer(
    name="bench",
    help="Measure: rooms a second, bandwidth, a trace of requests, aborts, a side that is killed, waiting, the planner; compare two runs.",
)

Report = Annotated[Path, typer.Argument(metavar="FILE", dir_okay=False, help="What one of the other commands has written with --json.")]
Repeats = Annotated[int, typer.Option(min=1, max=1000, help="How often it is measured, after once for warming up.")]


@bench.command()
@measurement
def rooms(
    rooms: Annotated[int, typer.Option(min=1, max=MOST_ROOMS, help="Rooms of one repeat.")] = 1000,
    in_flight: Annotated[
        list[int], typer.Option(min=1, max=10_000, help="Rooms at a time, all at most; may be given more than once.")
    ] = IN_FLIGHT,
    page_bytes: Annotated[int, typer.Option(min=1, max=MOST_BYTES, help="Bytes of the one page of a room.")] = 16384,
    repeats: Repeats = 3,
    measured_from: Annotated[
        list[From],
        typer.Option("--from", help="Opening the receiver, or receive with both handles opened before; may be given more than once."),
    ] = FROM,
    waiting: Annotated[
        list[int], typer.Option(min=0, max=100_000, help="Rooms that wait meanwhile; may be given more than once.")
    ] = WAITING,
    topology: Topology = ALONE,
) -> object:
    """Rooms a second, a room's latency, and CPU time a room on both sides; one page a room. Beside it, transfers of the engine alone."""
    _fit(rooms * page_bytes, "--page-bytes", "one page a room")
    _shared(page_bytes, topology)
    from kvcore.bench import rooms as module

    # both have the pages that are sent, twice; decode has those of all rooms, and compares a copy with what they ought to be
    nbytes = (4 * module.SOURCE_PAGES + 4 * rooms) * page_bytes
    afford("--rooms, --page-bytes, --waiting", nbytes, rooms=rooms + max(waiting), ranks=topology)
    clocks = cast("tuple[module.From, ...]", tuple(one.value for one in measured_from))
    under_way = tuple(min(count, rooms) for count in in_flight)  # as it will be told
    return module.Parameters(rooms, under_way, page_bytes, repeats, clocks, tuple(waiting))


@bench.command()
@measurement
def bandwidth(
    page_bytes: Annotated[
        list[int], typer.Option(min=1, max=MOST_BYTES, help="Bytes of a page; may be given more than once.")
    ] = PAGE_BYTES,
    room_bytes: Annotated[
        int, typer.Option(min=1, max=MOST_BYTES, help="Bytes of a room: as many whole pages as go into them, one at least.")
    ] = 64 << 20,
    order: Annotated[list[Order], typer.Option(help="How the pages lie on both sides; may be given more than once.")] = ORDER,
    repeats: Repeats = 5,
    topology: Topology = ALONE,
) -> object:
    """Bytes a second, and CPU time a GiB on both sides, for pages of several sizes. Beside it, the same bytes by the engine alone."""
    for size in page_bytes:
        _shared(size, topology)
    from kvcore.bench.bandwidth import Parameters

    # both have the pool and what is to be in it, and decode compares a copy
    afford("--room-bytes, --page-bytes", 6 * max(room_bytes, *page_bytes), pages=room_bytes // min(page_bytes), ranks=topology)
    return Parameters(tuple(page_bytes), room_bytes, repeats, tuple(one.value for one in order))


@bench.command()
@measurement
def idle(
    rooms: Annotated[int, typer.Option(min=1, max=MOST_ROOMS, help="Rooms that wait.")] = 5000,
    window: Annotated[float, typer.Option(callback=seconds, help="Seconds to look at the clocks for.")] = 5.0,
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="How many such windows.")] = 3,
    timeout: Timeout = 120.0,
    topology: Topology = ALONE,
) -> object:
    """CPU share and memory of both processes while nothing moves, and the time of one poll_all: without rooms, and with many that wait."""
    if window >= timeout:
        raise typer.BadParameter(f"{window:g} s is not below the {timeout:g} s of --timeout", param_hint="--window")
    afford("--rooms", 0, rooms=rooms, ranks=topology)
    from kvcore.bench.idle import Parameters

    return Parameters(rooms, window, repeats)


@bench.command()
@measurement
def abort(
    rooms: Annotated[int, typer.Option(min=1, max=MOST_ROOMS, help="Rooms that are live at first.")] = 1000,
    repeats: Repeats = 3,
    topology: Topology = ALONE,
) -> object:
    """The time until the other side of a room knows of an abort, of either side, while many rooms are live."""
    afford("--rooms", 0, rooms=rooms, ranks=topology)
    from kvcore.bench.abort import Parameters

    return Parameters(rooms, repeats=repeats)


@bench.command()
@measurement
def kill(
    rooms: Annotated[int, typer.Option(min=1, max=100_000, help="Rooms that are live at each of three stages.")] = 100,
    liveness: Annotated[float, typer.Option(callback=seconds, help="The limit liveness_s of both sides.")] = 2.0,
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="How often each side is struck by each signal.")] = 3,
    timeout: Timeout = 120.0,
    topology: Topology = ALONE,
) -> object:
    """The time until rooms have failed with a reason after the other side's process was killed, or stopped."""
    if liveness >= timeout:
        raise typer.BadParameter(f"{liveness:g} s is not below the {timeout:g} s of --timeout", param_hint="--liveness")
    afford("--rooms", 0, rooms=3 * rooms, ranks=topology)
    from kvcore.bench.kill import Parameters

    return Parameters(rooms, liveness, repeats)


@bench.command()
@measurement
def trace(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", exists=True, dir_okay=False, readable=True, help="Requests in Mooncake's format, one a line.")
    ],
    requests: Annotated[int, typer.Option(min=1, max=MOST_ROOMS, help="At most so many, the first ones.")] = 1000,
    speed: Annotated[float, typer.Option(callback=positive, help="So many times as fast as in the trace.")] = 10.0,
    page_tokens: Annotated[int, typer.Option(min=1, max=512, help="Tokens of a page; 512 must be a multiple of it.")] = 64,
    page_bytes: Annotated[int, typer.Option(min=1, max=MOST_BYTES, help="Bytes of a page.")] = 16384,
    memory: Annotated[int, typer.Option(min=1, max=MOST_BYTES, help="Bytes of either side's pool.")] = 256 << 20,
    token_ms: Annotated[float, typer.Option(callback=positive, help="Decode holds pages for so long for each token of output.")] = 20.0,
    limit_ms: Annotated[float, typer.Option(callback=positive, help="A request is good if it takes no longer, from arrival on.")] = 100.0,
    step_ms: Annotated[float, typer.Option(callback=positive, help="How often the schedulers look at their rooms.")] = 0.5,
    repeats: Repeats = 3,
) -> object:
    """Play a trace of requests in time: queueing, transfer, goodput, what decode had already. Beside it, the engine alone."""
    if 512 % page_tokens:
        raise typer.BadParameter(f"512, the tokens of a block of the trace, is no multiple of {page_tokens}", param_hint="--page-tokens")
    afford("--memory, --page-bytes", 3 * memory, pages=memory // page_bytes)  # decode copies its pages once for the bare machine
    from kvcore.bench.trace import Parameters

    pages = (page_tokens, page_bytes, memory)
    return Parameters(trace, requests, speed, *pages, token_ms, limit_ms, step_ms, repeats)


@bench.command()
def plan(
    repeats: Annotated[int, typer.Option(min=1, help="How often each chunk is planned.")] = 30,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """Median times of the planner, in this process, without a backend. Exits 1 if one misses its target."""
    apart(json_file, html_file)
    from kvcore.bench import plan as module

    parameters = module.Parameters(repeats)
    with progress() as watch:
        watch("measuring", "the planner")
        results = module.measure(parameters)
    tell("plan", None, parameters, results, [*module.table(results)], json_file, html_file)
    if missed := "; ".join(f"{result.case} took {result.median_ms:.3g} ms" for result in results if result.missed):
        raise ToolError(f"targets missed: {missed}; run it again on a machine that does nothing else")


@bench.command()
def compare(a: Report, b: Report, json_file: JsonFile = None) -> None:
    """Two reports of the same command, written with --json: of every figure B / A with its spread, and what else differs."""
    from kvcore.bench import compare as comparing

    found = comparing.compare(a, b)
    tell_json(json_file, asdict(found), [*comparing.table(found)])


@bench.command()
def schema() -> None:
    """The JSON Schema of what --json writes."""
    from kvcore.bench import report

    typer.echo(json.dumps(report.schema(), indent=2))


def _shared(page_bytes: int, ranks: Ranks) -> None:
    if page_bytes % ranks.heads:
        what = f"a page of {page_bytes} bytes cannot be shared out over the ranks of {ranks}"
        raise typer.BadParameter(f"{what}; give a multiple of {ranks.heads}", param_hint="--page-bytes")


def _fit(nbytes: int, option: str, what: str) -> None:
    if nbytes > MOST_BYTES:
        raise typer.BadParameter(f"{what} makes a pool of {nbytes} bytes, above {MOST_BYTES}", param_hint=option)
