"""``bench rooms``: how many rooms a second, how long one takes, and what it costs. One page a room, so it is the core that is measured.
Beside it, as many transfers of a page by the engine alone.

A room is measured from opening its receiver, or from ``receive`` where both handles were opened before and prefill has handed its page
over; with or without rooms that wait meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

import kvcore
from kvcore.bench.bare import Bare, over
from kvcore.bench.fields import by_side, cpu_s, repeated, spread, told
from kvcore.bench.floor import Beside, Figures, NoTurns, Share, Turns, Way, meet
from kvcore.bench.loop import Ended, Pace, all_ended, carry
from kvcore.bench.setup import Clock, Go, Measured, Ready, Setup, buffer_for, content, manager, orders, started, together, verify
from kvcore.bench.waiting import STEP_S, Opener, Waiting, hand_over
from kvcore.memory import Indices
from kvcore.progress import Watch
from kvcore.sides import SIDES, Link, Sides, ToolError
from kvcore.states import KVPoll, Side

SOURCE_PAGES = 256
AHEAD = 16
"""Senders that prefill has open beyond twice those that decode has in flight, so that decode never waits for one to be opened."""
FEWEST_AHEAD = 32
"""Of those opened before what is measured; four times those in flight otherwise. More would repeat themselves while they wait."""

From = Literal["open", "receive"]
MESSAGES: dict[From, int] = {"open": 4, "receive": 2}
"""One way, of those that a room cannot do without."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """What is measured, for each number of rooms that wait, each of rooms in flight and each beginning of the clock."""

    rooms: Annotated[int, told("Rooms of one repeat, and as many for warming up.")] = 1000
    in_flight: Annotated[tuple[int, ...], told("How many rooms are under way at a time.")] = (1, 64)
    page_bytes: Annotated[int, told("Bytes of the one page of a room.")] = 16 * 1024
    repeats: Annotated[int, told("How often each case is measured, after once for warming up.")] = 3
    measured_from: Annotated[tuple[From, ...], told("Where a room's clock starts.")] = ("open", "receive")
    waiting: Annotated[tuple[int, ...], told("How many other rooms wait meanwhile.")] = (0,)


@dataclass(frozen=True, slots=True)
class Raw:
    """The engine alone, with as many transfers of one page in flight, by its fastest way."""

    way: Way
    tried_per_s: Annotated[dict[str, float], told("By way, transfers a second at best when it was tried.")]
    transfers_per_s: Annotated[float, told("Transfers a second.")]
    transfers_per_s_each: tuple[float, ...]
    prefill_cpu_us_per_transfer: Annotated[float, told("Prefill's CPU time for one transfer, in microseconds.")]
    prefill_cpu_us_per_transfer_each: tuple[float, ...]
    decode_cpu_us_per_transfer: Annotated[float, told("Decode's CPU time for one transfer, in microseconds.")]
    decode_cpu_us_per_transfer_each: tuple[float, ...]
    kvcore_share: Share
    kvcore_share_each: tuple[float, ...]
    transfer_ms: Annotated[
        float | None, told("Milliseconds from posting a transfer to its last byte in place; null but with one in flight.")
    ]
    transfer_ms_each: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """Of one number of rooms in flight, beside so many that wait. A figure is the median of the repeats; latencies are those of all rooms,
    as decode's caller sees them, and of several ranks from the first to the last."""

    measured_from: Annotated[From, told("Where a room's clock starts: opening the receiver, or receive with both handles open before.")]
    waiting: Annotated[int, told("How many other rooms waited meanwhile, published on decode with nothing handed over on prefill.")]
    in_flight: Annotated[int, told("How many rooms were under way at a time.")]
    rooms_per_s: Annotated[float, told("Rooms a second.")]
    rooms_per_s_each: tuple[float, ...]
    latency_ms_median: Annotated[float, told("A room's milliseconds until SUCCESS: the median of all rooms.")]
    latency_ms_median_each: tuple[float, ...]
    latency_ms_p90: Annotated[float, told("A room's milliseconds until SUCCESS, which 90 % of all rooms do not exceed.")]
    latency_ms_p99: Annotated[float, told("A room's milliseconds until SUCCESS, which 99 % of all rooms do not exceed.")]
    latency_ms_max: Annotated[float, told("A room's milliseconds until SUCCESS: the most of all rooms.")]
    latency_ms_percentiles: Annotated[tuple[float, ...], told("A room's milliseconds until SUCCESS: percentiles 0 to 100 of all rooms.")]
    prefill_cpu_us_per_room: Annotated[float, told("CPU time of prefill's process for one room, in microseconds.")]
    prefill_cpu_us_per_room_each: tuple[float, ...]
    decode_cpu_us_per_room: Annotated[float, told("CPU time of decode's process for one room, in microseconds.")]
    decode_cpu_us_per_room_each: tuple[float, ...]
    rooms_verified: Annotated[int, told("Rooms of which every byte was compared, those for warming up too.")]
    raw: Annotated[Raw | None, told("The engine alone; null where the backend offers no floor, and with several ranks.")]
    bare: Annotated[Bare | None, told("The bare machine; null with several ranks.")]
    latency_over_wire: Annotated[
        float | None, told("The latency as a multiple of what the wire takes for it; null but with one in flight beside a floor.")
    ]
    latency_over_wire_each: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """What a result is of."""

    measured_from: From
    waiting: int
    in_flight: int

    def __str__(self) -> str:
        waiting = f" beside {self.waiting} that wait" if self.waiting else ""
        return f"{self.in_flight} in flight{waiting}, from {self.measured_from}"


Settings = tuple[Setup, Parameters, Ended]
"""What the processes are given; the last is of decode's ranks."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One repeat: ``rooms`` from number ``first`` on."""

    case: Case
    first: int
    rooms: int
    note: str

    @property
    def numbers(self) -> range:
        """Of its rooms."""
        return range(self.first, self.first + self.rooms)

    @property
    def groups(self) -> list[range]:
        """What is measured in one go: all, or as many as are opened before."""
        size = self.rooms if self.case.measured_from == "open" else max(FEWEST_AHEAD, 4 * self.case.in_flight)
        return [self.numbers[start : start + size] for start in range(0, self.rooms, size)]


def measure(setup: Setup, parameters: Parameters, watch: Watch) -> list[Result]:
    """Run all of it. Raises ``ToolError`` if a room fails or a page arrives with wrong bytes."""
    results = []
    with started(work, setup, (setup, parameters, all_ended(setup.ranks.decode)), watch) as sides:
        ways, moved = meet(sides) if setup.ranks.alone else None, parameters.rooms * parameters.page_bytes
        for case, planned in batches(parameters).items():
            floor, repeats = Turns(sides, ways, parameters.rooms, moved) if ways is not None else NoTurns(), []
            for batch in planned:
                sides.begin("measuring", batch.note)
                repeats.append(total([_measured(sides) for _ in batch.groups]))
                floor.take() if len(repeats) > 1 else floor.warm_up()
            results.append(result(case, parameters, repeats[1:], floor.bare, floor.figures))
        sides.close()
    return results


def _measured(sides: Sides[Settings]) -> dict[Side, Measured]:
    """One group, once both sides are ready for it."""
    sides.tell_both(Go())
    sides.hear_all(Ready)
    sides.tell_both(Go())
    return together(sides.hear_all(Measured))


def total(groups: Sequence[dict[Side, Measured]]) -> dict[Side, Measured]:
    """Of groups that were measured one after the other, by side."""
    found = {}
    for side in SIDES:
        each = [group[side] for group in groups]
        latencies = tuple(latency for one in each for latency in one.latencies_s)
        found[side] = Measured(sum(one.seconds for one in each), sum(one.cpu_s for one in each), latencies)
    return found


def batches(parameters: Parameters) -> dict[Case, list[Batch]]:
    """All repeats in order, with room numbers that are never used twice; the first of each case warms up. Fewer wait at first."""
    first, found = 1, dict[Case, list[Batch]]()
    for waiting in sorted(set(parameters.waiting)):
        for in_flight in dict.fromkeys(parameters.in_flight):
            for measured_from in dict.fromkeys(parameters.measured_from):
                case = Case(measured_from, waiting, in_flight)
                for repeat in range(parameters.repeats + 1):
                    note = f"{case}, " + (f"repeat {repeat} of {parameters.repeats}" if repeat else "warming up")
                    found.setdefault(case, []).append(Batch(case, first, parameters.rooms, note))
                    first += parameters.rooms
    return found


def result(
    case: Case, parameters: Parameters, repeats: Sequence[dict[Side, Measured]], machine: Bare | None, floor: Figures | None = None
) -> Result:
    """What the repeats come to."""
    rooms, alone_ms = parameters.rooms, floor.alone_ms if floor is not None else ()
    rates = [rooms / each["decode"].seconds for each in repeats]
    latency = spread("latency_ms", [1e3 * np.array(each["decode"].latencies_s) for each in repeats])
    medians = latency["latency_ms_median_each"]
    over_wire = over(medians, alone_ms, MESSAGES[case.measured_from], machine) if machine is not None else ()
    return Result(
        measured_from=case.measured_from,
        waiting=case.waiting,
        in_flight=case.in_flight,
        **repeated(rooms_per_s=rates, latency_over_wire=over_wire),
        **latency,
        **by_side("cpu_us_per_room", cpu_s(repeats), 1e6 / rooms),
        rooms_verified=rooms * (len(repeats) + 1),
        raw=None if floor is None else _raw(floor, rates, rooms),
        bare=machine,
    )


def _raw(floor: Figures, rates: Sequence[float], rooms: int) -> Raw:
    return Raw(
        way=floor.way,
        tried_per_s=floor.tried,
        **repeated(transfers_per_s=floor.rates, kvcore_share=floor.shares(rates), transfer_ms=floor.alone_ms),
        **by_side("cpu_us_per_transfer", floor.cpu_s, 1e6 / rooms),
    )


def table(results: Sequence[Result]) -> Iterator[str]:
    """The results for people."""
    yield "waiting   in flight      from   rooms/s   latency ms: median     p90     p99     max   CPU us/room: prefill  decode"
    for one in results:
        latency = f"{one.latency_ms_median:>18.2f} {one.latency_ms_p90:>7.2f} {one.latency_ms_p99:>7.2f} {one.latency_ms_max:>7.2f}"
        cpu = f"{one.prefill_cpu_us_per_room:>21.0f} {one.decode_cpu_us_per_room:>7.0f}"
        yield f"{one.waiting:>7} {one.in_flight:>11} {one.measured_from:>9} {one.rooms_per_s:>9.0f}   {latency} {cpu}"
        if one.raw is not None:
            alone = f"  engine alone: {one.raw.way}, kvcore has {one.raw.kvcore_share:.1%} of it"
            cpu = f"{one.raw.prefill_cpu_us_per_transfer:>21.0f} {one.raw.decode_cpu_us_per_transfer:>7.0f}"
            yield f"{'':>29} {one.raw.transfers_per_s:>9.0f}   {alone:<50} {cpu}"
        wire = f"; latency is {one.latency_over_wire:.2f} times what the wire takes" if one.latency_over_wire is not None else ""
        if one.bare is not None:
            yield f"{'':>39}   {one.bare}{wire}"
    yield f"every byte of {sum(one.rooms_verified for one in results)} rooms verified"


def work(side: Side, settings: Settings, link: Link) -> None:
    """One of the processes."""
    setup, parameters, ended = settings
    if side == "prefill":
        _prefill(setup, parameters, link)
    else:
        _decode(setup, parameters, Pace(ended, link.rank), link)


def _prefill(setup: Setup, parameters: Parameters, link: Link) -> None:
    buffer = buffer_for("prefill", setup, SOURCE_PAGES, parameters.page_bytes)
    buffer.write(content("prefill", link.rank, setup, SOURCE_PAGES, parameters.page_bytes))
    with manager("prefill", setup, buffer, link) as prefill:
        opener = Opener(prefill, "prefill", link)
        waiting = Waiting(opener, setup)

        def begin(number: int) -> kvcore.Handle:
            return opener.begin(number, number % SOURCE_PAGES)

        with Beside("prefill", setup, buffer, link) as beside:
            for batch, numbers, go in _turns(parameters, link):
                if go.way:
                    link.tell(beside.write(go.way, _pages(batch, numbers), batch.case.in_flight))
                    continue
                waiting.grow(batch.case.waiting)
                ahead = {number: begin(number) for number in numbers if batch.case.measured_from == "receive"}
                clock = _go(link)
                carry(prefill, setup, numbers, 2 * batch.case.in_flight + AHEAD, ahead.pop if ahead else begin)
                measured = clock.read()
                waiting.check()
                link.tell(measured)
        waiting.clear()


def _decode(setup: Setup, parameters: Parameters, pace: Pace, link: Link) -> None:
    expected = content("decode", link.rank, setup, SOURCE_PAGES, parameters.page_bytes)
    buffer = buffer_for("decode", setup, parameters.rooms, parameters.page_bytes)
    with manager("decode", setup, buffer, link) as decode:
        opener = Opener(decode, "decode", link)
        waiting = Waiting(opener, setup)
        ahead: dict[int, kvcore.Handle] = {}

        def begin(number: int) -> kvcore.Handle:
            handle = ahead.pop(number, None) or opener.open(number)
            hand_over(handle, number % parameters.rooms)
            return handle

        with Beside("decode", setup, buffer, link) as beside:
            for batch, numbers, go in _turns(parameters, link):
                sources, places = np.concatenate(list(_pages(batch, numbers)), axis=1)
                if go.way:
                    measured = beside.serve(go.way, expected, sources, places)
                else:
                    waiting.grow(batch.case.waiting)
                    if batch.case.measured_from == "receive":
                        ahead |= _paired(opener, numbers, setup)
                    clock = _go(link)
                    took, began = carry(decode, setup, numbers, batch.case.in_flight, begin, pace)
                    measured = clock.read(tuple(took), tuple(began))
                    waiting.check()
                verify(buffer.read()[places], expected[sources], setup)
                buffer.clear()
                link.tell(measured)
        waiting.clear()


def _turns(parameters: Parameters, link: Link) -> Iterator[tuple[Batch, Sequence[int], Go]]:
    """The driver's orders, each with its batch and the rooms of it that are meant: a floor's turns are of all of the batch before."""
    groups = iter([(batch, numbers) for planned in batches(parameters).values() for batch in planned for numbers in batch.groups])
    batch: Batch | None = None
    for go in orders(link):
        if go.way:
            assert batch is not None
            yield batch, batch.numbers, go
        else:
            batch, numbers = next(groups)
            yield batch, numbers, go


def _go(link: Link) -> Clock:
    """A clock that starts as the driver says that both sides are ready."""
    link.tell(Ready())
    link.hear(Go)
    return Clock()


def _paired(opener: Opener, numbers: Iterable[int], setup: Setup) -> dict[int, kvcore.Handle]:
    """Receivers whose senders have answered, so that all that is left is to say where the pages go."""
    handles = {number: opener.open(number) for number in numbers}
    deadline = time.monotonic() + setup.patience_s
    for handle in handles.values():
        while handle.poll() is KVPoll.BOOTSTRAPPING and time.monotonic() < deadline:
            threading.Event().wait(STEP_S)
        if handle.poll() is not KVPoll.WAITING_FOR_INPUT:
            raise ToolError(f"room {handle.room} is {handle.poll().name} ({handle.failure}) where it was to meet its sender; try again")
    return handles


def _pages(batch: Batch, numbers: Iterable[int]) -> Iterator[tuple[Indices, Indices]]:
    """Which page of prefill goes to which of decode, room by room."""
    for number in numbers:
        yield np.array([number % SOURCE_PAGES]), np.array([number % batch.rooms])
