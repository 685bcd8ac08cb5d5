"""``bench rooms``: how many rooms a second, how long one takes, and what it costs. One page a room, so it is the core that is measured.
Beside it, as many transfers of a page by the engine alone."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvcore.bench.bare import Bare, over
from kvcore.bench.floor import Beside, Figures, Turns, meet
from kvcore.bench.setup import SEED, Address, Clock, Go, Measured, Setup, manager, orders, percentiles, verify
from kvcore.buffers import Buffer, memory_kinds, random_pages
from kvcore.memory import Indices
from kvcore.progress import Watch
from kvcore.sides import SIDES, Link, Sides
from kvcore.states import Side

SOURCE_PAGES = 256
AHEAD = 16
"""Senders that prefill has open beyond twice those that decode has in flight, so that decode never waits for one to be opened."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """``rooms`` are measured ``repeats`` times for each number of rooms ``in_flight``, after as many for warming up."""

    rooms: int = 1000
    in_flight: tuple[int, ...] = (1, 64)
    page_bytes: int = 16 * 1024
    repeats: int = 3


@dataclass(frozen=True, slots=True)
class Raw:
    """The engine alone, with as many transfers in flight: its fastest way, the best rate of each way when it was tried, and what part of
    its rate kvcore has, which is the median over turns that followed each other. With one in flight also the median milliseconds of a
    transfer, from posting it to its last byte in place."""

    way: str
    tried_per_s: dict[str, float]
    transfers_per_s: float
    transfers_per_s_each: tuple[float, ...]
    prefill_cpu_us_per_transfer: float
    decode_cpu_us_per_transfer: float
    kvcore_share: float
    kvcore_share_each: tuple[float, ...]
    transfer_ms: float | None
    transfer_ms_each: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """Of one number of rooms in flight: medians of the repeats; latencies of all rooms, as decode's caller sees them, and of each repeat
    their median; their percentiles from 0 to 100. ``raw``: None where the backend offers no floor. ``latency_over_wire``: with one in
    flight, the latency over what the wire takes for it, which is the engine's own transfer and four control messages one way."""

    in_flight: int
    rooms_per_s: float
    rooms_per_s_each: tuple[float, ...]
    latency_ms_median: float
    latency_ms_median_each: tuple[float, ...]
    latency_ms_p90: float
    latency_ms_p99: float
    latency_ms_max: float
    latency_ms_percentiles: tuple[float, ...]
    prefill_cpu_us_per_room: float
    prefill_cpu_us_per_room_each: tuple[float, ...]
    decode_cpu_us_per_room: float
    decode_cpu_us_per_room_each: tuple[float, ...]
    rooms_verified: int
    raw: Raw | None
    bare: Bare
    latency_over_wire: float | None
    latency_over_wire_each: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """One repeat: ``rooms`` from number ``first`` on, ``in_flight`` at a time."""

    in_flight: int
    first: int
    rooms: int
    note: str


def measure(setup: Setup, parameters: Parameters, watch: Watch) -> list[Result]:
    """Run all of it. Raises ``ToolError`` if a room fails or a page arrives with wrong bytes."""
    results = []
    with Sides("bench", work, (setup, parameters), setup.patience_s, watch, setup.debug) as sides:
        sides.tell("decode", sides.hear("prefill", Address))
        ways = meet(sides)
        for in_flight, group in itertools.groupby(batches(parameters), lambda batch: batch.in_flight):
            floor, repeats = Turns(sides, ways, parameters.rooms, parameters.rooms * parameters.page_bytes), []
            for batch in group:
                watch("measuring", batch.note)
                sides.tell_both(Go())
                repeats.append(sides.hear_both(Measured))
                floor.take() if len(repeats) > 1 else floor.warm_up()
            results.append(result(in_flight, parameters, repeats[1:], floor.bare, floor.figures))
        sides.close()
    return results


def batches(parameters: Parameters) -> Iterator[Batch]:
    """All repeats in order, with room numbers that are never used twice; the first of each number in flight warms up."""
    first = 1
    for in_flight in dict.fromkeys(parameters.in_flight):
        for repeat in range(parameters.repeats + 1):
            note = f"{in_flight} in flight, " + (f"repeat {repeat} of {parameters.repeats}" if repeat else "warming up")
            yield Batch(in_flight, first, parameters.rooms, note)
            first += parameters.rooms


def result(
    in_flight: int, parameters: Parameters, repeats: Sequence[dict[Side, Measured]], machine: Bare, floor: Figures | None = None
) -> Result:
    """What the repeats come to."""
    rooms = parameters.rooms
    rates = tuple(rooms / each["decode"].seconds for each in repeats)
    latencies = np.concatenate([each["decode"].latencies_s for each in repeats]) * 1e3
    spread, medians = percentiles(latencies), tuple(1e3 * statistics.median(each["decode"].latencies_s) for each in repeats)
    cpu = {side: tuple(each[side].cpu_s / rooms * 1e6 for each in repeats) for side in SIDES}
    over_wire = over(medians, floor.alone_ms if floor is not None else (), 4, machine)
    return Result(
        in_flight=in_flight,
        rooms_per_s=statistics.median(rates),
        rooms_per_s_each=rates,
        latency_ms_median=spread[50],
        latency_ms_median_each=medians,
        latency_ms_p90=spread[90],
        latency_ms_p99=spread[99],
        latency_ms_max=spread[100],
        latency_ms_percentiles=spread,
        prefill_cpu_us_per_room=statistics.median(cpu["prefill"]),
        prefill_cpu_us_per_room_each=cpu["prefill"],
        decode_cpu_us_per_room=statistics.median(cpu["decode"]),
        decode_cpu_us_per_room_each=cpu["decode"],
        rooms_verified=rooms * (len(repeats) + 1),
        raw=None if floor is None else _raw(floor, rates, rooms),
        bare=machine,
        latency_over_wire=statistics.median(over_wire) if over_wire else None,
        latency_over_wire_each=over_wire,
    )


def _raw(floor: Figures, rates: Sequence[float], rooms: int) -> Raw:
    cpu = {side: statistics.median(each) / rooms * 1e6 for side, each in floor.cpu_s.items()}
    rate, alone = statistics.median(floor.rates), statistics.median(floor.alone_ms) if floor.alone_ms else None
    shares = (floor.share(rates), floor.shares(rates))
    return Raw(floor.way, floor.tried, rate, floor.rates, cpu["prefill"], cpu["decode"], *shares, alone, floor.alone_ms)


def table(results: Sequence[Result]) -> Iterator[str]:
    """The results for people."""
    yield "in flight   rooms/s   latency ms: median     p90     p99     max   CPU us/room: prefill  decode"
    for one in results:
        latency = f"{one.latency_ms_median:>18.2f} {one.latency_ms_p90:>7.2f} {one.latency_ms_p99:>7.2f} {one.latency_ms_max:>7.2f}"
        cpu = f"{one.prefill_cpu_us_per_room:>21.0f} {one.decode_cpu_us_per_room:>7.0f}"
        yield f"{one.in_flight:>9} {one.rooms_per_s:>9.0f}   {latency} {cpu}"
        if one.raw is not None:
            alone = f"  engine alone: {one.raw.way}, kvcore has {one.raw.kvcore_share:.1%} of it"
            cpu = f"{one.raw.prefill_cpu_us_per_transfer:>21.0f} {one.raw.decode_cpu_us_per_transfer:>7.0f}"
            yield f"{'':>9} {one.raw.transfers_per_s:>9.0f}   {alone:<50} {cpu}"
    yield f"every byte of {sum(one.rooms_verified for one in results)} rooms verified"


def work(side: Side, settings: tuple[Setup, Parameters], link: Link) -> None:
    """One of the two processes."""
    setup, parameters = settings
    (_prefill if side == "prefill" else _decode)(setup, parameters, link)


def _prefill(setup: Setup, parameters: Parameters, link: Link) -> None:
    buffer = Buffer(memory_kinds(setup.backend), SOURCE_PAGES, parameters.page_bytes)
    buffer.write(random_pages(SEED, SOURCE_PAGES, parameters.page_bytes))
    with manager("prefill", setup, buffer) as prefill:
        link.tell(Address(prefill.address))

        async def send(number: int) -> None:
            with prefill.sender(number) as sender:
                sender.send([number % SOURCE_PAGES], last=True)
                await sender
                sender.raise_for_failure()

        with Beside("prefill", setup, buffer, link) as beside:
            for batch, go in _turns(parameters, link):
                if go.way:
                    link.tell(beside.write(go.way, _pages(batch), batch.in_flight))
                    continue
                clock = Clock()
                asyncio.run(_lanes(2 * batch.in_flight + AHEAD, send, batch))
                link.tell(clock.read())


def _decode(setup: Setup, parameters: Parameters, link: Link) -> None:
    expected = random_pages(SEED, SOURCE_PAGES, parameters.page_bytes)
    buffer = Buffer(memory_kinds(setup.backend), parameters.rooms, parameters.page_bytes)
    with manager("decode", setup, buffer) as decode:
        address = link.hear(Address).text
        latencies: list[float] = []

        async def receive(number: int) -> None:
            began = time.perf_counter()
            with decode.receiver(number, prefill=address) as receiver:
                receiver.receive([number % parameters.rooms])
                await receiver
                latencies.append(time.perf_counter() - began)
                receiver.raise_for_failure()

        with Beside("decode", setup, buffer, link) as beside:
            for batch, go in _turns(parameters, link):
                sources, places = np.concatenate(list(_pages(batch)), axis=1)
                if go.way:
                    measured = beside.serve(go.way, expected, sources, places)
                else:
                    latencies.clear()
                    clock = Clock()
                    asyncio.run(_lanes(batch.in_flight, receive, batch))
                    measured = clock.read(tuple(latencies))
                verify(buffer.read()[places], expected[sources], setup)
                buffer.clear()
                link.tell(measured)


def _turns(parameters: Parameters, link: Link) -> Iterator[tuple[Batch, Go]]:
    """The driver's orders, each with its batch: a floor's turns are of the batch before."""
    planned, begun = list(batches(parameters)), 0
    for go in orders(link):
        begun += not go.way
        yield planned[begun - 1], go


def _pages(batch: Batch) -> Iterator[tuple[Indices, Indices]]:
    """Which page of prefill goes to which of decode, room by room."""
    for number in range(batch.first, batch.first + batch.rooms):
        yield np.array([number % SOURCE_PAGES]), np.array([number % batch.rooms])


async def _lanes(count: int, carry: Callable[[int], Awaitable[None]], batch: Batch) -> None:
    """Carry all rooms of a batch, ``count`` at a time, each when one before it has ended."""
    numbers = iter(range(batch.first, batch.first + batch.rooms))

    async def lane() -> None:
        for number in numbers:
            await carry(number)

    await asyncio.gather(*(lane() for _ in range(count)))
