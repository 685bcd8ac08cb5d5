"""How soon the other side knows of an abort, and what is left of rooms that have ended, in both systems."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.beside.pairs import Case, Pair, System, Systems
from benchmarks.beside.rooms import quantile
from kvcore.progress import Watch
from kvcore.sides import SIDES
from kvcore.states import KVPoll, Side

ABORTS = {"recv_wait": 100, "recv_inflight": 30, "send_inflight": 6, "send_wait": 2}
"""Who aborts and when, and how many rooms: few where SGLang waits for its limit."""
WARM_UP = 64
LIMIT = {"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "5"}
"""Instead of its 300 s, so that there is an end to see."""


@dataclass(frozen=True, slots=True)
class Aborted:
    """Of a system and a kind of abort.

    Milliseconds until the other side saw FAILED, of each room that did, and until a receiver that aborted had its pages back.
    ``states``: how the other side's rooms ended, "none" if they did not within the time given.
    """

    backend: str
    config: str
    system: str
    kind: str
    seen_ms: tuple[float, ...]
    released_ms: tuple[float, ...]
    states: dict[str, int]


@dataclass(frozen=True, slots=True)
class Left:
    """Of a system: what rooms that have ended by success and by abort have left, by side, as it was before and after.

    ``grew``: the size of each store that is not as before; ``rss_mb, threads, fds``: of the process; ``stuck``: rooms that never ended.
    """

    backend: str
    system: str
    rooms: int
    grew: dict[Side, dict[str, tuple[Any, Any]]]
    rss_mb: dict[Side, tuple[float, float]]
    threads: dict[Side, tuple[int, int]]
    fds: dict[Side, tuple[int, int]]
    stuck: dict[Side, int]


def aborts(case: Case, systems: Sequence[System], watch: Watch, debug: bool = False) -> list[Aborted]:
    """Abort rooms one by one, in every way; SGLang runs with ``LIMIT``."""
    found = []
    with Systems(case, systems, watch, debug) as running:
        for kind, n in ABORTS.items():
            for system in running.names:
                watch("measuring", f"{case.backend} {case.config}, {kind} by {system}")
                with running.alone(system) as pair:
                    pair.both("run_rooms", base=running.base(), n=8, window=1, poll_us=50)
                    answers = pair.both("abort_lat", base=running.base(), n=n, kind=kind)
                found.append(aborted(case, system, kind, answers))
    return found


def aborted(case: Case, system: System, kind: str, answers: Mapping[Side, Sequence[Any]]) -> Aborted:
    """What the answers of ``abort_lat`` come to."""
    by_receiver = kind.startswith("recv")
    ends = answers["prefill" if by_receiver else "decode"]
    began = [each[0] for each in answers["decode"]] if by_receiver else list(answers["prefill"])
    seen = [(end - at) * 1e3 for (end, state), at in zip(ends, began, strict=True) if end and state == KVPoll.FAILED]
    released = [(each[2] - each[0]) * 1e3 for each in answers["decode"] if each[2]] if by_receiver else []
    states: dict[str, int] = {}
    for end, state in ends:
        name = KVPoll(state).name if end else "none"
        states[name] = states.get(name, 0) + 1
    return Aborted(case.backend, case.config, system, kind, tuple(sorted(seen)), tuple(sorted(released)), states)


def leaks(case: Case, systems: Sequence[System], rooms: int, watch: Watch, debug: bool = False) -> list[Left]:
    """Let so many rooms end in every way, and look at what is left."""
    found = []
    with Systems(case, systems, watch, debug) as running:
        for system in running.names:
            watch("measuring", f"{case.backend} {case.config}, what {system} keeps of {rooms} rooms")
            with running.alone(system) as pair:
                found.append(_left(case, pair, running, rooms))
    return found


def _left(case: Case, pair: Pair, running: Systems, rooms: int) -> Left:
    pair.both("leak", base=running.base(), n=WARM_UP)
    before = pair.both("sizes")
    ended = pair.both("leak", base=running.base(), n=rooms)
    after = pair.both("sizes")

    def both(name: str) -> dict[Side, Any]:
        return {side: (before[side][name], after[side][name]) for side in SIDES}

    grew: dict[Side, dict[str, tuple[Any, Any]]] = {}
    for side in SIDES:
        names = [name for name in after[side] if not name.startswith("_")]
        pairs = {name: (before[side].get(name, 0), after[side][name]) for name in names}
        grew[side] = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    stuck: dict[Side, int] = {side: ended[side]["stuck"] for side in SIDES}
    return Left(case.backend, pair.system, rooms, grew, both("_rss_mb"), both("_threads"), both("_fds"), stuck)


def aborts_table(results: Sequence[Aborted]) -> Iterator[str]:
    """The aborts for people."""
    head = f"{'other side FAILED ms: median':>28} {'p99':>8}   {'pages back ms: median':>21}   how the other side's rooms ended"
    yield f"{'case':<18} {'aborted':<14} {'system':<8} {head}"
    for one in results:
        seen = [f"{quantile(one.seen_ms, share):.2f}" for share in (0.5, 0.99)] if one.seen_ms else ["", ""]
        back = f"{quantile(one.released_ms, 0.5):.2f}" if one.released_ms else ""
        ways = ", ".join(f"{name} {count}" for name, count in sorted(one.states.items()))
        case = f"{one.backend + ' ' + one.config:<18} {one.kind:<14} {one.system:<8}"
        yield f"{case} {seen[0]:>28} {seen[1]:>8}   {back:>21}   {ways}"


def leaks_table(results: Sequence[Left]) -> Iterator[str]:
    """What is left, for people."""
    for one in results:
        yield f"{one.backend}, {one.system}: {one.rooms} rooms"
        for side in SIDES:
            before, after = one.rss_mb[side]
            process = f"threads {_to(one.threads[side])}, files {_to(one.fds[side])}"
            yield f"  {side}: {one.stuck[side]} never ended; memory {before:.0f} to {after:.0f} MiB; {process}"
            for name, sizes in one.grew[side].items():
                yield f"    {name}: {_to(sizes)}"


def _to(sizes: tuple[Any, Any]) -> str:
    return f"{sizes[0]} to {sizes[1]}"
