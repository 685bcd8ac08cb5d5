"""``bench bandwidth``: bytes a second, and what they cost, by the size of a page. A room at a time, of many pages;
beside it, the same by the engine alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np

from kvcore.bench.bare import Bare
from kvcore.bench.fields import by_side, cpu_s, repeated, told
from kvcore.bench.floor import Beside, Figures, NoTurns, Share, Turns, Way, meet
from kvcore.bench.setup import (
    GIB,
    MIB,
    Address,
    Clock,
    Go,
    Measured,
    Ready,
    Setup,
    buffer_for,
    content,
    finish,
    manager,
    orders,
    started,
    together,
    verify,
)
from kvcore.manager import KVManager
from kvcore.memory import Indices
from kvcore.progress import Watch
from kvcore.sides import Link
from kvcore.states import Side

Order = Literal["scattered", "contiguous"]
"""Of a room's pages: scattered on both sides, or in one run."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """What is measured, for each size of a page and each order of the pages."""

    page_bytes: Annotated[tuple[int, ...], told("Bytes of a page.")] = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
    room_bytes: Annotated[int, told("Bytes of a room, which has as many whole pages as go into them, but one at least.")] = 64 * MIB
    repeats: Annotated[int, told("How often each case is measured, after once for warming up.")] = 5
    order: Annotated[tuple[Order, ...], told("How a room's pages lie on both sides.")] = ("scattered",)


@dataclass(frozen=True, slots=True)
class Raw:
    """The engine alone, by its fastest way."""

    way: Way
    tried_gb_per_s: Annotated[dict[str, float], told("By way, GB (10^9 bytes) a second at best when it was tried.")]
    gb_per_s: Annotated[float, told("GB (10^9 bytes) a second.")]
    gb_per_s_each: tuple[float, ...]
    prefill_cpu_s_per_gib: Annotated[float, told("Prefill's CPU time for a GiB (2^30 bytes), in seconds.")]
    prefill_cpu_s_per_gib_each: tuple[float, ...]
    decode_cpu_s_per_gib: Annotated[float, told("Decode's CPU time for a GiB (2^30 bytes), in seconds.")]
    decode_cpu_s_per_gib_each: tuple[float, ...]
    kvcore_share: Share
    kvcore_share_each: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """Of one size of a page in one order, from decode's opening of a room to its SUCCESS; of several ranks from the first to the last. A
    figure is the median of the repeats."""

    page_bytes: Annotated[int, told("Bytes of a page.")]
    order: Annotated[Order, told("How the pages lay on both sides: scattered, or in one run.")]
    pages: Annotated[int, told("Pages of a room.")]
    room_bytes: Annotated[int, told("Bytes of a room.")]
    gb_per_s: Annotated[float, told("GB (10^9 bytes) a second.")]
    gb_per_s_each: tuple[float, ...]
    prefill_cpu_s_per_gib: Annotated[float, told("CPU time of prefill's process for a GiB (2^30 bytes), in seconds.")]
    prefill_cpu_s_per_gib_each: tuple[float, ...]
    decode_cpu_s_per_gib: Annotated[float, told("CPU time of decode's process for a GiB (2^30 bytes), in seconds.")]
    decode_cpu_s_per_gib_each: tuple[float, ...]
    bytes_verified: Annotated[int, told("Bytes that were compared with what was sent, those for warming up too.")]
    raw: Annotated[Raw | None, told("The engine alone; null where the backend offers no floor, and with several ranks.")]
    bare: Annotated[Bare | None, told("The bare machine; null with several ranks.")]


def measure(setup: Setup, parameters: Parameters, watch: Watch) -> list[Result]:
    """Run all of it, each size in processes of its own. Raises ``ToolError`` if a room fails or a page arrives with wrong bytes."""
    cases = [(size, order) for size in dict.fromkeys(parameters.page_bytes) for order in dict.fromkeys(parameters.order)]
    return [_measure(setup, replace(parameters, page_bytes=(size,), order=(order,)), watch) for size, order in cases]


def _measure(setup: Setup, parameters: Parameters, watch: Watch) -> Result:
    (page_bytes,), (order,) = parameters.page_bytes, parameters.order
    repeats = []
    with started(work, setup, (setup, parameters), watch) as sides:
        nbytes = pages_of(parameters, page_bytes) * page_bytes
        floor = Turns(sides, meet(sides), nbytes / 1e9, nbytes) if setup.ranks.alone else NoTurns()
        for repeat in range(parameters.repeats + 1):
            sides.begin(
                "measuring",
                f"{order} pages of {page_bytes} bytes, " + (f"repeat {repeat} of {parameters.repeats}" if repeat else "warming up"),
            )
            sides.tell_side("prefill", Go())
            sides.hear_side("prefill", Ready)
            sides.tell_side("decode", Go())
            repeats.append(together(sides.hear_all(Measured)))
            floor.take() if repeat else floor.warm_up()
        sides.close()
    return result(page_bytes, parameters, repeats[1:], floor.bare, floor.figures)


def pages_of(parameters: Parameters, page_bytes: int) -> int:
    """Pages of a room."""
    return max(1, parameters.room_bytes // page_bytes)


def result(
    page_bytes: int, parameters: Parameters, repeats: Sequence[dict[Side, Measured]], machine: Bare | None, floor: Figures | None = None
) -> Result:
    """What the repeats come to."""
    pages = pages_of(parameters, page_bytes)
    nbytes = pages * page_bytes
    rates = [nbytes / each["decode"].seconds / 1e9 for each in repeats]
    return Result(
        page_bytes=page_bytes,
        order=parameters.order[0],
        pages=pages,
        room_bytes=nbytes,
        **repeated(gb_per_s=rates),
        **by_side("cpu_s_per_gib", cpu_s(repeats), GIB / nbytes),
        bytes_verified=nbytes * (len(repeats) + 1),
        raw=None if floor is None else _raw(floor, rates, nbytes),
        bare=machine,
    )


def _raw(floor: Figures, rates: Sequence[float], nbytes: int) -> Raw:
    return Raw(
        way=floor.way,
        tried_gb_per_s=floor.tried,
        **repeated(gb_per_s=floor.rates, kvcore_share=floor.shares(rates)),
        **by_side("cpu_s_per_gib", floor.cpu_s, GIB / nbytes),
    )


def table(results: Sequence[Result]) -> Iterator[str]:
    """The results for people."""
    yield "page bytes  order         pages   room MiB     GB/s      min      max   CPU s/GiB: prefill  decode"
    for one in results:
        room = f"{one.page_bytes:>10}  {one.order:<10} {one.pages:>8} {one.room_bytes / MIB:>10.4g}"
        yield f"{room} {_rates(one)}"
        if one.raw is not None:
            yield f"{'  engine alone: ' + one.raw.way:<{len(room)}} {_rates(one.raw)}   kvcore: {one.raw.kvcore_share:.0%} of it"
        if one.bare is not None:
            yield str(one.bare)
    yield "a room has as many whole pages as go into --room-bytes, one at least"
    yield f"all of {sum(one.bytes_verified for one in results) / MIB:.4g} MiB verified"


def _rates(one: Result | Raw) -> str:
    cpu = f"{one.prefill_cpu_s_per_gib:>18.2f} {one.decode_cpu_s_per_gib:>7.2f}"
    return f"{one.gb_per_s:>8.3g} {min(one.gb_per_s_each):>8.3g} {max(one.gb_per_s_each):>8.3g}   {cpu}"


def work(side: Side, settings: tuple[Setup, Parameters], link: Link) -> None:
    """One of the processes."""
    setup, parameters = settings
    (page_bytes,) = parameters.page_bytes
    (_prefill if side == "prefill" else _decode)(setup, parameters.order[0], pages_of(parameters, page_bytes), page_bytes, link)


def _prefill(setup: Setup, order: Order, count: int, page_bytes: int, link: Link) -> None:
    buffer = buffer_for("prefill", setup, count, page_bytes)
    buffer.write(content("prefill", link.rank, setup, count, page_bytes))
    pages = listed(order, "prefill", count)
    with manager("prefill", setup, buffer, link) as prefill:
        if not link.rank:
            link.tell(Address(prefill.address))
        with Beside("prefill", setup, buffer, link) as beside:
            for room, go in enumerate(orders(link)):
                if go.way:
                    link.tell(beside.write(go.way, [(pages, listed(order, "decode", len(pages)))]))
                else:
                    link.tell(_send(prefill, room, pages, setup, link))


def _send(prefill: KVManager, room: int, pages: Indices, setup: Setup, link: Link) -> Measured:
    clock = Clock()
    with prefill.sender(room) as sender:
        sender.send(pages, last=True)
        link.tell(Ready())
        finish(sender, setup)
        return clock.read()


def _decode(setup: Setup, order: Order, count: int, page_bytes: int, link: Link) -> None:
    buffer = buffer_for("decode", setup, count, page_bytes)
    sent = content("decode", link.rank, setup, count, page_bytes)[listed(order, "prefill", count)]
    pages = listed(order, "decode", count)
    with manager("decode", setup, buffer, link) as decode:
        address = link.hear(Address).text
        sources = np.arange(len(pages))
        with Beside("decode", setup, buffer, link) as beside:
            for room, go in enumerate(orders(link)):
                buffer.clear()
                beside_it = go.way != ""
                measured = beside.serve(go.way, sent, sources, pages) if beside_it else _receive(decode, room, pages, setup, address)
                verify(buffer.read()[pages], sent, setup)
                link.tell(measured)


def _receive(decode: KVManager, room: int, pages: Indices, setup: Setup, address: str) -> Measured:
    clock = Clock()
    with decode.receiver(room, prefill=address) as receiver:
        receiver.receive(pages)
        finish(receiver, setup)
        return clock.read()


def listed(order: Order, side: Side, pages: int) -> Indices:
    """All pages: in one run, or in an order of this side's own, so that next to none are neighbours on both."""
    if order == "contiguous":
        return np.arange(pages, dtype=np.int64)
    return np.random.default_rng(1 if side == "prefill" else 2).permutation(pages)
