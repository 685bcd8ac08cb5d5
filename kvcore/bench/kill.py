"""``bench kill``: how long it takes until the rooms of a process whose other side was killed, or fell silent, have failed with a reason."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import numpy as np

import kvcore
from kvcore.bench.fields import percentiles, told
from kvcore.bench.setup import Go, Ready, Setup, buffer_for, manager, started
from kvcore.bench.waiting import PAGE_BYTES, SETTLE_S, SPARE_PAGE, STEP_S, Opener
from kvcore.progress import Watch
from kvcore.sides import SIDES, Close, Link, ToolError
from kvcore.states import KVPoll, Side

Stage = Literal["joined", "published", "transferring"]
Signal = Literal["SIGKILL", "SIGSTOP"]
STAGES: tuple[Stage, ...] = get_args(Stage)
SHOWS: dict[Side, dict[Stage, KVPoll]] = {
    "prefill": {"joined": KVPoll.BOOTSTRAPPING, "published": KVPoll.WAITING_FOR_INPUT, "transferring": KVPoll.TRANSFERRING},
    "decode": {"joined": KVPoll.WAITING_FOR_INPUT, "published": KVPoll.WAITING_FOR_INPUT, "transferring": KVPoll.TRANSFERRING},
}
"""What a room polls as at each stage, on either side."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """What is measured. A process that is stopped is there and says nothing, as one on a host that cannot be reached."""

    rooms: Annotated[int, told("Rooms that are live at each stage.")] = 100
    liveness_s: Annotated[float, told("The liveness limit of both sides, in seconds.")] = 2.0
    repeats: Annotated[int, told("How often each side is struck by each signal.")] = 3
    signals: Annotated[tuple[Signal, ...], told("What the processes are struck by.")] = ("SIGKILL", "SIGSTOP")


@dataclass(frozen=True, slots=True)
class Result:
    """Of the rooms of one side at one stage, from the signal to the other side's process until a thread that waits has seen FAILED; of all
    repeats together. Of several ranks all of the one side are struck, and the last of the other counts. The limit counts from the last
    message of the side that was struck, so ``over_limit_s`` may be below 0."""

    struck: Annotated[Side, told("The side whose process was struck.")]
    signal: Annotated[Signal, told("What it was struck by.")]
    stage: Annotated[Stage, told("Joined: nothing published yet; published: nothing handed over yet; transferring: a first chunk moved.")]
    rooms: Annotated[int, told("Rooms at this stage in each repeat.")]
    liveness_s: Annotated[float, told("The liveness limit of both sides, in seconds.")]
    median_s: Annotated[float, told("Seconds from the signal until FAILED is seen: the median of all rooms.")]
    median_s_each: tuple[float, ...]
    p99_s: Annotated[float, told("Seconds from the signal until FAILED is seen, which 99 % of all rooms do not exceed.")]
    max_s: Annotated[float, told("Seconds from the signal until FAILED is seen: the most of all rooms.")]
    over_limit_s: Annotated[float | None, told("Seconds from the liveness limit to max_s; null for SIGKILL, seen without the limit.")]
    codes: Annotated[dict[str, int], told("By failure code, how many rooms failed with it.")]
    reason: Annotated[str, told("The first reason, in words.")]


@dataclass(frozen=True, slots=True)
class Ends:
    """From the side that lives: of each room, stage by stage, when its end was seen, its code, and the first reason."""

    seconds: tuple[float, ...]
    codes: tuple[str, ...]
    reason: str


def measure(setup: Setup, parameters: Parameters, watch: Watch) -> list[Result]:
    """Strike each side with each signal several times, in processes of their own. Raises ``ToolError`` if a room does not end FAILED."""
    results = []
    for sign in parameters.signals:
        for struck in SIDES:
            repeats = []
            for repeat in range(1, parameters.repeats + 1):
                note = f"{sign} to {struck}, {repeat} of {parameters.repeats}"
                repeats.append(_once(struck, signal.Signals[sign], setup, parameters, note, watch))
            results += [result(struck, sign, number, parameters, repeats) for number in range(len(STAGES))]
    return results


def _once(struck: Side, sign: signal.Signals, setup: Setup, parameters: Parameters, note: str, watch: Watch) -> tuple[float, Ends]:
    """When it was struck, and what the other side saw."""
    living: Side = "decode" if struck == "prefill" else "prefill"
    with started(work, setup, (setup, parameters), watch) as sides:
        sides.begin("measuring", note)
        sides.tell_both(Go(struck))
        sides.hear_all(Ready)
        at = sides.strike(struck, sign)
        ends = sides.hear_side(living, Ends)
        sides.close()
    return at, last(ends)


def last(ranks: Sequence[Ends]) -> Ends:
    """Of each room what the rank has seen that saw its end last."""
    rooms = [max(each) for each in zip(*(zip(one.seconds, one.codes, strict=True) for one in ranks), strict=True)]
    seconds, codes = zip(*rooms, strict=True)
    return Ends(seconds, codes, ranks[0].reason)


def result(struck: Side, sign: Signal, stage: int, parameters: Parameters, repeats: Sequence[tuple[float, Ends]]) -> Result:
    """What the repeats come to for the rooms at one stage."""
    mine = slice(stage * parameters.rooms, (stage + 1) * parameters.rooms)
    took = [np.array(ends.seconds[mine]) - at for at, ends in repeats]
    spread = percentiles(np.concatenate(took))
    codes = Counter(code for _, ends in repeats for code in ends.codes[mine])
    return Result(
        struck=struck,
        signal=sign,
        stage=STAGES[stage],
        rooms=parameters.rooms,
        liveness_s=parameters.liveness_s,
        median_s=spread[50],
        median_s_each=tuple(float(np.median(each)) for each in took),
        p99_s=spread[99],
        max_s=spread[100],
        over_limit_s=spread[100] - parameters.liveness_s if sign == "SIGSTOP" else None,
        codes=dict(codes),
        reason=repeats[0][1].reason,
    )


def table(results: Sequence[Result]) -> Iterator[str]:
    """The results for people."""
    yield "struck    by        rooms that were   rooms   limit s   s until FAILED: median     p99     max   codes"
    for one in results:
        codes = ", ".join(f"{count} {code}" for code, count in one.codes.items())
        times = f"{one.median_s:>24.3f} {one.p99_s:>7.3f} {one.max_s:>7.3f}"
        yield f"{one.struck:<9} {one.signal:<9} {one.stage:<15} {one.rooms:>7} {one.liveness_s:>9g} {times}   {codes}"


def work(side: Side, settings: tuple[Setup, Parameters], link: Link) -> None:
    """One of the processes."""
    setup, parameters = settings
    buffer = buffer_for(side, setup, 1, PAGE_BYTES * setup.ranks.heads)
    with manager(side, setup, buffer, link, parameters.liveness_s) as mine:
        opener = Opener(mine, side, link)
        opener.meet(setup)
        struck = link.hear(Go).way
        handles = [_begin(opener, 1 + number, stage) for number, stage in _rooms(parameters)]
        _settle(handles, side, setup, parameters)
        link.tell(Ready())
        if side != struck:
            link.tell(_ends(handles, setup))
        link.hear(Close)
        for handle in handles:
            handle.clear()


def _rooms(parameters: Parameters) -> Iterator[tuple[int, Stage]]:
    yield from enumerate(stage for stage in STAGES for _ in range(parameters.rooms))


def _begin(opener: Opener, room: int, stage: Stage) -> kvcore.Handle:
    handle = opener.open(room)
    if isinstance(handle, kvcore.Receiver) and stage != "joined":
        handle.receive([SPARE_PAGE])
    if isinstance(handle, kvcore.Sender) and stage == "transferring":
        handle.send([SPARE_PAGE])
    return handle


def _settle(handles: Sequence[kvcore.Handle], side: Side, setup: Setup, parameters: Parameters) -> None:
    """Wait until each room is at its stage."""
    deadline = time.monotonic() + setup.patience_s
    for handle, (_, stage) in zip(handles, _rooms(parameters), strict=True):
        while handle.poll() is not SHOWS[side][stage]:
            if handle.poll().terminal or time.monotonic() > deadline:
                raise ToolError(f"room {handle.room} is {handle.poll().name} ({handle.failure}) where it was to be {stage}; try again")
            threading.Event().wait(STEP_S)
    threading.Event().wait(SETTLE_S)


def _ends(handles: Sequence[kvcore.Handle], setup: Setup) -> Ends:
    seconds, codes, reason = [], [], ""
    for handle in handles:
        state = handle.wait(setup.patience_s)
        seconds.append(time.monotonic())
        failure = handle.failure
        if state is not KVPoll.FAILED or failure is None:
            raise ToolError(f"room {handle.room} is {state.name} where the other side is no more; try: kvcore doctor {setup.backend}")
        codes.append(failure.code.name)
        reason = reason or failure.reason
    return Ends(tuple(seconds), tuple(codes), reason)
