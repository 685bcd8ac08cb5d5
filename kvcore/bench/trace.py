"""``bench trace``: a trace of requests, played in time. How long each queues for pages and how long its transfer takes, what was not sent
since decode had it already, and what that costs; beside it, the same transfers by the engine alone, one after the other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvcore.bench.floor import Figures, Turns, meet
from kvcore.bench.replay import Moved, work
from kvcore.bench.scheduler import Begin, Parameters, Played, Seconds
from kvcore.bench.setup import MIB, Address, Ready, Setup
from kvcore.bench.trace_file import Request, read
from kvcore.errors import ConfigError
from kvcore.progress import Watch
from kvcore.sides import Sides
from kvcore.states import Side

__all__ = ["Parameters", "Raw", "Result", "measure", "play", "table"]

BEGIN_S = 0.1
"""From the driver's word to the beginning, so that both sides are there."""
FLOOR_TURNS = 3


@dataclass(frozen=True, slots=True)
class Spread:
    """Of all requests, in milliseconds."""

    median: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Seconds) -> Spread:
        """Percentiles of times."""
        return cls(*(float(value) for value in np.percentile(seconds * 1e3, (50, 90, 99, 100))))


@dataclass(frozen=True, slots=True)
class Raw:
    """The engine alone: its fastest way, the best rate of each when it was tried; of the turns their median, and how many times its mean
    time kvcore's transfers take, those of requests of which no page was missing left out."""

    way: str
    tried_transfers_per_s: dict[str, float]
    transfers: int
    transfer_ms_mean: float
    transfer_ms_mean_each: tuple[float, ...]
    gb_per_s: float
    prefill_cpu_ms_per_transfer: float
    decode_cpu_ms_per_transfer: float
    kvcore_times: float


@dataclass(frozen=True, slots=True)
class Result:
    """``queueing_ms``: from a request's arrival until both sides have pages for it. ``transfer_ms``: from then, and from when prefill has
    written them, until decode's scheduler sees SUCCESS. ``total_ms``: from arrival to then, so with what prefill takes to write.
    ``good_…``: requests whose total is within the limit. Bytes and CPU times are of the whole trace, those of writing and comparing left
    out; pages are the most at any time. ``raw``: None where the backend offers no floor."""

    requests: int
    seconds: float
    queueing_ms: Spread
    transfer_ms: Spread
    transfer_ms_mean: float
    total_ms: Spread
    good_per_s: float
    good_share: float
    bytes_sent: int
    bytes_skipped: int
    bytes_verified: int
    prefill_pages_most: int
    decode_pages_most: int
    quarantined_pages_most: int
    prefill_cpu_ms_per_request: float
    decode_cpu_ms_per_request: float
    raw: Raw | None


def measure(setup: Setup, parameters: Parameters, watch: Watch) -> list[Result]:
    """Play the trace once. Raises ``ConfigError`` for a trace that cannot be played, and ``ToolError`` if a room fails or a page, sent or
    skipped, has wrong bytes."""
    requests = read(Path(parameters.trace), parameters.requests)
    played, figures = play(setup, parameters, requests, watch)
    return [result(parameters, requests, played, figures)]


def play(setup: Setup, parameters: Parameters, requests: Sequence[Request], watch: Watch) -> tuple[dict[Side, Played], Figures | None]:
    """What both sides noted, and the engine alone."""
    _fit(parameters, requests)
    with Sides("bench", work, (setup, parameters, requests), setup.patience_s, watch, setup.debug) as sides:
        sides.tell("decode", sides.hear("prefill", Address))
        sides.hear_both(Ready)
        sides.tell_both(Begin(time.monotonic() + BEGIN_S))
        played = sides.hear_both(Played)
        sides.tell("prefill", Moved(played["decode"].moved))
        sides.tell("decode", Moved(played["prefill"].moved))
        turns = Turns(sides, meet(sides, setup), sum(bool(pages.size) for pages in played["decode"].moved))
        watch("measuring", "the engine alone")
        turns.warm_up()
        for _ in range(FLOOR_TURNS):
            turns.take()
        sides.close()
    return played, turns.figures


def _fit(parameters: Parameters, requests: Sequence[Request]) -> None:
    for number, request in enumerate(requests, 1):
        pages = sum(request.pages(parameters.page_tokens))
        if pages > parameters.pages:
            raise ConfigError(
                f"request {number} of trace {parameters.trace} takes {pages} pages, and a side's memory has {parameters.pages}; "
                f"give --memory {pages * parameters.page_bytes} or more, or smaller pages"
            )


def result(parameters: Parameters, requests: Sequence[Request], played: dict[Side, Played], figures: Figures | None) -> Result:
    """What all of it comes to."""
    prefill, decode = played["prefill"], played["decode"]
    arrived = np.array([request.arrival_s for request in requests]) / parameters.speed
    total, transfer = decode.complete_s - arrived, decode.complete_s - np.maximum(decode.placed_s, prefill.complete_s)
    pages = sum(sum(request.pages(parameters.page_tokens)) for request in requests)
    sent = sum(pages.size for pages in decode.moved)
    good, seconds = int(np.count_nonzero(total * 1e3 <= parameters.limit_ms)), float(decode.complete_s.max())
    moved = np.array([pages.size > 0 for pages in decode.moved])
    return Result(
        requests=len(requests),
        seconds=seconds,
        queueing_ms=Spread.of(np.maximum(decode.placed_s, prefill.placed_s) - arrived),
        transfer_ms=Spread.of(transfer),
        transfer_ms_mean=float(transfer.mean()) * 1e3,
        total_ms=Spread.of(total),
        good_per_s=good / seconds,
        good_share=good / len(requests),
        bytes_sent=sent * parameters.page_bytes,
        bytes_skipped=(pages - sent) * parameters.page_bytes,
        bytes_verified=pages * parameters.page_bytes,
        prefill_pages_most=prefill.pages_most,
        decode_pages_most=decode.pages_most,
        quarantined_pages_most=max(prefill.quarantined_most, decode.quarantined_most),
        prefill_cpu_ms_per_request=prefill.cpu_s / len(requests) * 1e3,
        decode_cpu_ms_per_request=decode.cpu_s / len(requests) * 1e3,
        raw=None if figures is None else _raw(figures, transfer[moved], sent * parameters.page_bytes),
    )


def _raw(figures: Figures, transfer_s: Seconds, nbytes: int) -> Raw:
    transfers = transfer_s.size
    cpu = {side: statistics.median(each) / transfers * 1e3 for side, each in figures.cpu_s.items()}
    rate = statistics.median(figures.rates)
    return Raw(
        way=figures.way,
        tried_transfers_per_s=figures.tried,
        transfers=transfers,
        transfer_ms_mean=1e3 / rate,
        transfer_ms_mean_each=tuple(1e3 / each for each in figures.rates),
        gb_per_s=nbytes / transfers * rate / 1e9,
        prefill_cpu_ms_per_transfer=cpu["prefill"],
        decode_cpu_ms_per_transfer=cpu["decode"],
        kvcore_times=float(transfer_s.mean()) * rate,
    )


def table(results: Sequence[Result]) -> Iterator[str]:
    """The results for people."""
    for one in results:
        yield f"{one.requests} requests in {one.seconds:.2f} s"
        yield "ms           median      p90      p99      max"
        for name, spread in (("queueing", one.queueing_ms), ("transfer", one.transfer_ms), ("total", one.total_ms)):
            yield f"{name:<10} {spread.median:>8.2f} {spread.p90:>8.2f} {spread.p99:>8.2f} {spread.max:>8.2f}"
        yield f"within the limit: {one.good_share:.1%}, {one.good_per_s:.2f} requests a second"
        skipped = one.bytes_skipped / (one.bytes_sent + one.bytes_skipped)
        yield f"sent {one.bytes_sent / MIB:.5g} MiB; {one.bytes_skipped / MIB:.5g} MiB ({skipped:.1%}) were there already"
        pages = f"prefill {one.prefill_pages_most}, decode {one.decode_pages_most}, quarantined {one.quarantined_pages_most}"
        yield f"most pages at a time: {pages}"
        yield f"CPU ms/request: prefill {one.prefill_cpu_ms_per_request:.2f}, decode {one.decode_cpu_ms_per_request:.2f}"
        if one.raw is not None:
            yield (
                f"engine alone: {one.raw.way}, {one.raw.transfer_ms_mean:.3g} ms a transfer on average; "
                f"with kvcore {one.transfer_ms_mean:.3g} ms, {one.raw.kvcore_times:.1f} times that"
            )
        yield f"all of {one.bytes_verified / MIB:.5g} MiB verified"
