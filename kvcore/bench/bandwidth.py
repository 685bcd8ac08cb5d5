"""``bench bandwidth``: bytes a second, and what they cost, by the size of a page. A room at a time, of many pages that lie scattered."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvcore.bench.setup import GIB, MIB, SEED, Address, Clock, Go, Measured, Ready, Setup, finish, manager, verify
from kvcore.buffers import Buffer, memory_kinds, random_pages
from kvcore.memory import Indices
from kvcore.progress import Watch
from kvcore.sides import Close, Link, Sides
from kvcore.states import Side


@dataclass(frozen=True, slots=True)
class Parameters:
    """A room has as many pages of each size as go into ``room_bytes``, but one at least. Each size is warmed up, then measured."""

    page_bytes: tuple[int, ...] = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
    room_bytes: int = 64 * MIB
    repeats: int = 5


@dataclass(frozen=True, slots=True)
class Result:
    """Of one size of a page: medians of the repeats, from decode's opening of a room to its SUCCESS. A GB is 10**9 bytes."""

    page_bytes: int
    pages: int
    room_bytes: int
    gb_per_s: float
    gb_per_s_each: tuple[float, ...]
    prefill_cpu_s_per_gib: float
    decode_cpu_s_per_gib: float
    bytes_verified: int


def measure(setup: Setup, parameters: Parameters, watch: Watch) -> list[Result]:
    """Run all of it, each size in processes of its own. Raises ``ToolError`` if a room fails or a page arrives with wrong bytes."""
    return [_measure(setup, replace(parameters, page_bytes=(size,)), watch) for size in dict.fromkeys(parameters.page_bytes)]


def _measure(setup: Setup, parameters: Parameters, watch: Watch) -> Result:
    (page_bytes,) = parameters.page_bytes
    repeats = []
    with Sides("bench", work, (setup, parameters), setup.patience_s, watch, setup.debug) as sides:
        sides.tell("decode", sides.hear("prefill", Address))
        for repeat in range(parameters.repeats + 1):
            watch("measuring", f"pages of {page_bytes} bytes, " + (f"repeat {repeat} of {parameters.repeats}" if repeat else "warming up"))
            sides.tell("prefill", Go())
            sides.hear("prefill", Ready)
            sides.tell("decode", Go())
            repeats.append(sides.hear_both(Measured))
        sides.close()
    return result(page_bytes, parameters, repeats[1:])


def pages_of(parameters: Parameters, page_bytes: int) -> int:
    """Pages of a room."""
    return max(1, parameters.room_bytes // page_bytes)


def result(page_bytes: int, parameters: Parameters, repeats: Sequence[dict[Side, Measured]]) -> Result:
    """What the repeats come to."""
    pages = pages_of(parameters, page_bytes)
    nbytes = pages * page_bytes
    rates = tuple(nbytes / each["decode"].seconds / 1e9 for each in repeats)
    cpu = {side: statistics.median(each[side].cpu_s for each in repeats) / nbytes * GIB for side in ("prefill", "decode")}
    verified = nbytes * (len(repeats) + 1)
    return Result(page_bytes, pages, nbytes, statistics.median(rates), rates, cpu["prefill"], cpu["decode"], verified)


def table(results: Sequence[Result]) -> Iterator[str]:
    """The results for people."""
    yield "page bytes   pages   room MiB     GB/s   CPU s/GiB: prefill  decode"
    for one in results:
        cpu = f"{one.prefill_cpu_s_per_gib:>18.2f} {one.decode_cpu_s_per_gib:>7.2f}"
        yield f"{one.page_bytes:>10} {one.pages:>7} {one.room_bytes / MIB:>10.4g} {one.gb_per_s:>8.2f}   {cpu}"
    yield f"all of {sum(one.bytes_verified for one in results) / MIB:.4g} MiB verified"


def work(side: Side, settings: tuple[Setup, Parameters], link: Link) -> None:
    """One of the two processes."""
    setup, parameters = settings
    (page_bytes,) = parameters.page_bytes
    buffer = Buffer(memory_kinds(setup.backend), pages_of(parameters, page_bytes), page_bytes)
    (_prefill if side == "prefill" else _decode)(setup, parameters.repeats + 1, buffer, link)


def _prefill(setup: Setup, rooms: int, buffer: Buffer, link: Link) -> None:
    buffer.write(random_pages(SEED, *buffer.tensor.shape))
    pages = scattered("prefill", len(buffer.tensor))
    with manager("prefill", setup, buffer) as prefill:
        link.tell(Address(prefill.address))
        for room in range(rooms):
            link.hear(Go)
            clock = Clock()
            with prefill.sender(room) as sender:
                sender.send(pages, last=True)
                link.tell(Ready())
                finish(sender, setup)
                link.tell(clock.read())
        link.hear(Close)


def _decode(setup: Setup, rooms: int, buffer: Buffer, link: Link) -> None:
    sent = random_pages(SEED, *buffer.tensor.shape)[scattered("prefill", len(buffer.tensor))]
    pages = scattered("decode", len(buffer.tensor))
    with manager("decode", setup, buffer) as decode:
        address = link.hear(Address).text
        for room in range(rooms):
            buffer.clear()
            link.hear(Go)
            clock = Clock()
            with decode.receiver(room, prefill=address) as receiver:
                receiver.receive(pages)
                finish(receiver, setup)
                measured = clock.read()
            verify(buffer.read()[pages], sent, setup)
            link.tell(measured)
        link.hear(Close)


def scattered(side: Side, pages: int) -> Indices:
    """All pages in an order of this side's own, so that next to none are neighbours on both."""
    return np.random.default_rng(1 if side == "prefill" else 2).permutation(pages)
