"""``bench trace``: a trace of requests, played in time. How long each queues for pages and how long its transfer takes, what was not sent
since decode had it already, and what that costs; beside it, the same transfers by the engine alone, one after the other."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Annotated

import numpy as np

from kvcore.bench.bare import Bare
from kvcore.bench.fields import by_side, cpu_s, repeated, spread, told
from kvcore.bench.floor import Figures, Turns, Way, Ways, meet
from kvcore.bench.replay import work
from kvcore.bench.scheduler import Begin, Parameters, Played, Seconds, Settings
from kvcore.bench.setup import MIB, Address, Go, Ready, Setup
from kvcore.bench.trace_file import Request, digest, read
from kvcore.bench.trace_floor import Moved
from kvcore.errors import ConfigError
from kvcore.memory import Indices
from kvcore.progress import Watch
from kvcore.sides import SIDES, Sides
from kvcore.states import Side

__all__ = ["Parameters", "Raw", "Result", "measure", "play", "table"]

LONG_S = 60.0
"""What takes longer says so before it begins."""
BEGIN_S = 0.1
"""From the driver's word to the beginning, so that both sides are there."""


@dataclass(frozen=True, slots=True)
class Raw:
    """The engine alone, which moves what was moved for warming up, one request's pages after the other, by its fastest way. Requests of
    which no page was missing do not count."""

    way: Way
    tried_per_s: Annotated[dict[str, float], told("By way, transfers a second at best when it was tried.")]
    transfer_ms_mean: Annotated[float, told("Milliseconds of a transfer: the mean.")]
    transfer_ms_mean_each: tuple[float, ...]
    transfer_ms_median: Annotated[float | None, told("Milliseconds of a transfer: the median; null where one request alone moved pages.")]
    transfer_ms_median_each: tuple[float, ...]
    prefill_cpu_ms_per_transfer: Annotated[float, told("Prefill's CPU time for one transfer, in milliseconds.")]
    decode_cpu_ms_per_transfer: Annotated[float, told("Decode's CPU time for one transfer, in milliseconds.")]
    kvcore_times: Annotated[float, told("How many times the engine's mean time for a transfer kvcore takes.")]
    kvcore_times_each: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """Of all requests of all repeats; a figure that each repeat has one of is their median.

    Queueing is from a request's arrival until both sides have pages for it; a transfer from then, and from when prefill has written them,
    until decode's scheduler sees SUCCESS; in all it is from arrival to then, so with what prefill takes to write."""

    requests: Annotated[int, told("Requests of the trace.")]
    trace_digest: Annotated[str, told("The same for the same requests only, whatever the file is called.")]
    seconds: Annotated[float, told("Seconds until the last request had arrived.")]
    seconds_each: tuple[float, ...]
    queueing_ms_median: Annotated[float, told("Milliseconds of queueing: the median.")]
    queueing_ms_median_each: tuple[float, ...]
    queueing_ms_p90: Annotated[float, told("Milliseconds of queueing, which 90 % do not exceed.")]
    queueing_ms_p99: Annotated[float, told("Milliseconds of queueing, which 99 % do not exceed.")]
    queueing_ms_max: Annotated[float, told("Milliseconds of queueing: the most.")]
    queueing_ms_percentiles: Annotated[tuple[float, ...], told("Milliseconds of queueing: percentiles 0 to 100.")]
    transfer_ms_median: Annotated[float, told("Milliseconds of a transfer: the median.")]
    transfer_ms_median_each: tuple[float, ...]
    transfer_ms_p90: Annotated[float, told("Milliseconds of a transfer, which 90 % do not exceed.")]
    transfer_ms_p99: Annotated[float, told("Milliseconds of a transfer, which 99 % do not exceed.")]
    transfer_ms_max: Annotated[float, told("Milliseconds of a transfer: the most.")]
    transfer_ms_percentiles: Annotated[tuple[float, ...], told("Milliseconds of a transfer: percentiles 0 to 100.")]
    transfer_ms_mean: Annotated[float, told("Milliseconds of a transfer: the mean.")]
    transfer_ms_mean_each: tuple[float, ...]
    total_ms_median: Annotated[float, told("Milliseconds of a request in all: the median.")]
    total_ms_median_each: tuple[float, ...]
    total_ms_p90: Annotated[float, told("Milliseconds of a request in all, which 90 % do not exceed.")]
    total_ms_p99: Annotated[float, told("Milliseconds of a request in all, which 99 % do not exceed.")]
    total_ms_max: Annotated[float, told("Milliseconds of a request in all: the most.")]
    total_ms_percentiles: Annotated[tuple[float, ...], told("Milliseconds of a request in all: percentiles 0 to 100.")]
    good_share: Annotated[float, told("Part of the requests whose total is within the limit, 1 for all.")]
    good_share_each: tuple[float, ...]
    good_per_s: Annotated[float, told("Requests whose total is within the limit, a second.")]
    good_per_s_each: tuple[float, ...]
    skipped_share: Annotated[float, told("Part of all pages that decode had already, 1 for all.")]
    skipped_share_each: tuple[float, ...]
    bytes_sent: Annotated[int, told("Bytes that were sent.")]
    bytes_skipped: Annotated[int, told("Bytes that decode had already.")]
    bytes_verified: Annotated[int, told("Bytes that were compared with what they ought to be, those for warming up too.")]
    prefill_pages_most: Annotated[int, told("Pages in use on prefill, at most.")]
    decode_pages_most: Annotated[int, told("Pages in use on decode, at most.")]
    quarantined_pages_most: Annotated[int, told("Pages in quarantine on either side, at most.")]
    prefill_cpu_ms_per_request: Annotated[float, told("CPU time of prefill's process for a request without writing, in milliseconds.")]
    prefill_cpu_ms_per_request_each: tuple[float, ...]
    decode_cpu_ms_per_request: Annotated[float, told("CPU time of decode's process for a request without comparing, in milliseconds.")]
    decode_cpu_ms_per_request_each: tuple[float, ...]
    raw: Annotated[Raw | None, told("The engine alone; null where the backend offers no floor.")]
    bare: Annotated[Bare, told("The bare machine.")]


def measure(setup: Setup, parameters: Parameters, watch: Watch) -> list[Result]:
    """Play the trace. Raises ``ConfigError`` for one that cannot be played, and ``ToolError`` if a room fails or a page, sent or skipped,
    has wrong bytes."""
    requests = read(parameters.trace, parameters.requests)
    if (seconds := least_s(parameters, requests)) >= LONG_S:  # also where nobody watches
        sys.stderr.write(
            f"kvcore: at --speed {parameters.speed:g} {len(requests)} requests, played {parameters.repeats + 1} times, "
            f"take {timedelta(seconds=math.ceil(seconds))} at least\n"
        )
    repeats, floor = play(setup, parameters, requests, watch)
    return [result(parameters, requests, repeats, floor.bare, floor.figures)]


def least_s(parameters: Parameters, requests: Sequence[Request]) -> float:
    """Seconds that all takes if nothing queues, and moves in no time: warming up and each repeat end as the last request is decoded."""
    ends = (request.arrival_s + request.output_tokens * parameters.token_ms / 1e3 for request in requests)
    return (parameters.repeats + 1) * max(ends) / parameters.speed


def play(setup: Setup, parameters: Parameters, requests: Sequence[Request], watch: Watch) -> tuple[list[dict[Side, Played]], Turns]:
    """What both sides noted in each repeat, and the floors."""
    _fit(parameters, requests)
    repeats: list[dict[Side, Played]] = []
    with Sides("bench", work, (setup, parameters, requests), setup.patience_s, watch, setup.debug) as sides:
        sides.tell("decode", sides.hear("prefill", Address))
        ways = meet(sides)
        sides.begin("measuring", "warming up")
        floor = _floor(sides, ways, parameters, _played(sides)["decode"].moved)
        floor.warm_up()
        for repeat in range(parameters.repeats):
            sides.begin("measuring", f"repeat {repeat + 1} of {parameters.repeats}")
            repeats.append(_played(sides))
            floor.take()
        sides.close()
    return repeats, floor


def _played(sides: Sides[Settings]) -> dict[Side, Played]:
    """One repeat."""
    sides.tell_both(Go())
    sides.hear_both(Ready)
    sides.tell_both(Begin(time.monotonic() + BEGIN_S))
    played = sides.hear_both(Played)
    sides.tell("prefill", Moved(played["decode"].moved))
    sides.tell("decode", Moved(played["prefill"].moved))
    return played


def _floor(sides: Sides[Settings], ways: Ways, parameters: Parameters, moved: Sequence[Indices]) -> Turns:
    """Turns that move what moved for warming up; a copy of it has each page once."""
    transfers, places = sum(bool(pages.size) for pages in moved), len(np.unique(np.concatenate(moved)))
    return Turns(sides, ways, transfers, places * parameters.page_bytes)


def _fit(parameters: Parameters, requests: Sequence[Request]) -> None:
    for number, request in enumerate(requests, 1):
        pages = sum(request.pages(parameters.page_tokens))
        if pages > parameters.pages:
            raise ConfigError(
                f"request {number} of trace {parameters.trace} takes {pages} pages, and a side's memory has {parameters.pages}; "
                f"give --memory {pages * parameters.page_bytes} or more, or smaller pages"
            )


def result(
    parameters: Parameters, requests: Sequence[Request], repeats: Sequence[dict[Side, Played]], machine: Bare, floor: Figures | None = None
) -> Result:
    """What the repeats come to."""
    arrived = np.array([request.arrival_s for request in requests]) / parameters.speed
    prefill, decode = ([played[side] for played in repeats] for side in SIDES)
    both = [*zip(prefill, decode, strict=True)]
    queueing = [np.maximum(there.placed_s, here.placed_s) - arrived for here, there in both]
    transfer = [there.complete_s - np.maximum(there.placed_s, here.complete_s) for here, there in both]
    total = [there.complete_s - arrived for there in decode]
    seconds = [float(there.complete_s.max()) for there in decode]
    good = [int(np.count_nonzero(each * 1e3 <= parameters.limit_ms)) for each in total]
    pages = sum(sum(request.pages(parameters.page_tokens)) for request in requests)
    sent = [sum(moved.size for moved in there.moved) for there in decode]
    moving = [each[[moved.size > 0 for moved in there.moved]] for each, there in zip(transfer, decode, strict=True)]
    return Result(
        requests=len(requests),
        trace_digest=digest(requests),
        **spread("queueing_ms", [1e3 * each for each in queueing]),
        **spread("transfer_ms", [1e3 * each for each in transfer]),
        **spread("total_ms", [1e3 * each for each in total]),
        **repeated(
            seconds=seconds,
            transfer_ms_mean=[1e3 * float(each.mean()) for each in transfer],
            good_share=[count / len(requests) for count in good],
            good_per_s=[count / took for count, took in zip(good, seconds, strict=True)],
            skipped_share=[1 - count / pages for count in sent],
        ),
        **by_side("cpu_ms_per_request", cpu_s(repeats), 1e3 / len(requests)),
        bytes_sent=sum(sent) * parameters.page_bytes,
        bytes_skipped=(len(repeats) * pages - sum(sent)) * parameters.page_bytes,
        bytes_verified=(len(repeats) + 1) * pages * parameters.page_bytes,
        prefill_pages_most=max(one.pages_most for one in prefill),
        decode_pages_most=max(one.pages_most for one in decode),
        quarantined_pages_most=max(one.quarantined_most for one in (*prefill, *decode)),
        raw=None if floor is None else _raw(floor, moving),
        bare=machine,
    )


def _raw(floor: Figures, transfer: Sequence[Seconds]) -> Raw:
    means, transfers = [1e3 / rate for rate in floor.rates], len(transfer[0])
    cpu = {side: statistics.median(each) / transfers * 1e3 for side, each in floor.cpu_s.items()}
    return Raw(
        way=floor.way,
        tried_per_s=floor.tried,
        **repeated(
            transfer_ms_mean=means,
            transfer_ms_median=floor.alone_ms,
            kvcore_times=[1e3 * float(mine.mean()) / alone for mine, alone in zip(transfer, means, strict=True)],
        ),
        prefill_cpu_ms_per_transfer=cpu["prefill"],
        decode_cpu_ms_per_transfer=cpu["decode"],
    )


def table(results: Sequence[Result]) -> Iterator[str]:
    """The results for people."""
    for one in results:
        times = asdict(one)
        yield f"{one.requests} requests in {one.seconds:.2f} s, {len(one.seconds_each)} times"
        yield "ms           median      p90      p99      max"
        for name in ("queueing", "transfer", "total"):
            yield f"{name:<10}" + "".join(f" {times[f'{name}_ms_{share}']:>8.2f}" for share in ("median", "p90", "p99", "max"))
        yield f"within the limit: {one.good_share:.1%}, {one.good_per_s:.2f} requests a second"
        sent = f"sent {one.bytes_sent / MIB:.5g} MiB; {one.bytes_skipped / MIB:.5g} MiB"
        yield f"{sent} ({one.skipped_share:.1%}) were there already"
        pages = f"prefill {one.prefill_pages_most}, decode {one.decode_pages_most}, quarantined {one.quarantined_pages_most}"
        yield f"most pages at a time: {pages}"
        yield f"CPU ms/request: prefill {one.prefill_cpu_ms_per_request:.2f}, decode {one.decode_cpu_ms_per_request:.2f}"
        if one.raw is not None:
            yield (
                f"engine alone: {one.raw.way}, {one.raw.transfer_ms_mean:.3g} ms a transfer on average; "
                f"with kvcore {one.transfer_ms_mean:.3g} ms, {one.raw.kvcore_times:.1f} times that"
            )
        yield f"all of {one.bytes_verified / MIB:.5g} MiB verified"
