"""``bench idle``: what a paired prefill and decode cost while nothing moves, without rooms and with many that wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

import kvcore
from kvcore.bench.setup import Address, Clock, Go, Measured, Ready, Setup, finish, manager
from kvcore.buffers import Buffer, memory_kinds
from kvcore.progress import Watch
from kvcore.sides import Close, Link, Sides, ToolError
from kvcore.states import KVPoll, Side

PAGE_BYTES = 256
SETTLE_S = 1.0
STEP_S = 0.01

Open = Callable[[int], kvcore.Handle]


@dataclass(frozen=True, slots=True)
class Parameters:
    """``rooms``: how many wait in the second of the two windows, published on decode, with nothing handed over on prefill."""

    rooms: int = 5000
    window_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Result:
    """Of one window: each process's share of one core, in percent."""

    rooms: int
    window_s: float
    prefill_cpu_percent: float
    decode_cpu_percent: float


def measure(setup: Setup, parameters: Parameters, watch: Watch) -> list[Result]:
    """Measure without a room, then with all of them. Raises ``ToolError`` if a room does not wait all the time."""
    results = []
    with Sides("bench", work, (setup, parameters), setup.patience_s, watch, setup.debug) as sides:
        sides.tell("decode", sides.hear("prefill", Address))
        for rooms in (0, parameters.rooms):
            watch("measuring", f"{rooms} waiting rooms")
            sides.tell_both(Go())
            sides.hear_both(Ready)
            sides.tell_both(Go())
            measured = sides.hear_both(Measured)
            sides.tell_both(Go())
            percent = {side: 100 * each.cpu_s / each.seconds for side, each in measured.items()}
            results.append(Result(rooms, parameters.window_s, percent["prefill"], percent["decode"]))
        sides.close()
    return results


def table(results: Sequence[Result]) -> Iterator[str]:
    """The results for people."""
    yield "waiting rooms   window s   % of a core: prefill  decode"
    for one in results:
        yield f"{one.rooms:>13} {one.window_s:>10g}   {one.prefill_cpu_percent:>20.2f} {one.decode_cpu_percent:>7.2f}"


def work(side: Side, settings: tuple[Setup, Parameters], link: Link) -> None:
    """One of the two processes."""
    setup, parameters = settings
    buffer = Buffer(memory_kinds(setup.backend), parameters.rooms + 1, PAGE_BYTES)
    with manager(side, setup, buffer) as mine:
        (_prefill if side == "prefill" else _decode)(mine, setup, parameters, link)
        link.hear(Close)


def _prefill(mine: kvcore.KVManager, setup: Setup, parameters: Parameters, link: Link) -> None:
    link.tell(Address(mine.address))
    with mine.sender(0) as sender:  # so that the two are paired
        sender.send([0], last=True)
        finish(sender, setup)
    _windows(mine.sender, setup, parameters, link)


def _decode(mine: kvcore.KVManager, setup: Setup, parameters: Parameters, link: Link) -> None:
    address = link.hear(Address).text

    def receive(room: int) -> kvcore.Handle:
        receiver = mine.receiver(room, prefill=address)
        receiver.receive([room])
        return receiver

    with receive(0) as receiver:
        finish(receiver, setup)
    _windows(receive, setup, parameters, link)


def _windows(open_room: Open, setup: Setup, parameters: Parameters, link: Link) -> None:
    for rooms in (0, parameters.rooms):
        link.hear(Go)
        link.progress(f"opening {rooms} rooms")
        handles = [open_room(room) for room in range(1, rooms + 1)]
        settle(handles, setup)
        link.tell(Ready())
        link.hear(Go)
        clock = Clock()
        threading.Event().wait(parameters.window_s)
        measured = clock.read()
        _check(handles)
        link.tell(measured)
        link.hear(Go)  # clearing ends them on the other side too, which may not have looked yet
        for handle in handles:
            handle.clear()


def settle(handles: Sequence[kvcore.Handle], setup: Setup) -> None:
    """Wait until all rooms wait, and until the threads have noticed."""
    deadline = time.monotonic() + setup.patience_s
    while any(handle.poll() is KVPoll.BOOTSTRAPPING for handle in handles) and time.monotonic() < deadline:
        threading.Event().wait(STEP_S)
    _check(handles)
    threading.Event().wait(SETTLE_S)


def _check(handles: Sequence[kvcore.Handle]) -> None:
    states = np.array([handle.poll() for handle in handles])
    strays = int(np.count_nonzero(states != KVPoll.WAITING_FOR_INPUT))
    if strays:
        first = next(handle for handle in handles if handle.poll() is not KVPoll.WAITING_FOR_INPUT)
        raise ToolError(
            f"{strays} of {len(handles)} rooms do not wait: room {first.room} is {first.poll().name} ({first.failure}); try fewer rooms"
        )
