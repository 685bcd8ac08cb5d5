"""Rooms of both systems and transfers of the engine alone, in turns, and what their figures come to."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

from benchmarks.beside.pairs import Case, Pair, System
from kvcore.progress import Watch
from kvcore.sides import SIDES, ToolError
from kvcore.states import Side

IDLE_S = 3.0
RAW_ROOMS, RAW_LARGE = 100, 4
LEAST, LEAST_LARGE = 40, 4
MOST_LARGE_AT_ONCE = 2
FLOORS, PEER, PEER_THREAD = "kvcore-floors", "peer bench", "peer bench, thread"
"""Who measures the engine alone, and the latter from which thread: its main one, or as SGLang's manager does."""
AGREE = 0.2
"""How far the two figures of the engine alone may lie apart."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """``windows``: rooms in flight. A turn of a system takes about ``seconds``; its loop rests for ``poll_us`` microseconds a time."""

    windows: tuple[int, ...] = (1, 64)
    repeats: int = 5
    seconds: float = 1.0
    poll_us: float = 50.0


@dataclass(frozen=True, slots=True)
class Turn:
    """Of one system: rates, latencies from before a receiver is opened until its end is seen, and CPU time of a process's threads."""

    rooms: int
    rooms_per_s: float
    gb_per_s: float
    p50_ms: float
    p99_ms: float
    prefill_cpu_us: float
    decode_cpu_us: float

    @property
    def cpu_us(self) -> float:
        """Of a room, on both sides."""
        return self.prefill_cpu_us + self.decode_cpu_us


@dataclass(frozen=True, slots=True)
class RawTurn:
    """Of the engine alone: medians of the pages' transfer and of it with that of the side records after it, and CPU time for both."""

    kv_us: float
    kv_aux_us: float
    rooms_per_s: float
    prefill_cpu_us: float
    decode_cpu_us: float

    @property
    def cpu_us(self) -> float:
        """Of a room, on both sides."""
        return self.prefill_cpu_us + self.decode_cpu_us


@dataclass(frozen=True, slots=True)
class Spread:
    """Of a figure or a ratio over the repeats."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one."""
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{short(self.median)} ({short(self.min)} to {short(self.max)})"


@dataclass(frozen=True, slots=True)
class Result:
    """Of one case at one number in flight. ``turns``: by system; ``raw``: the engine alone, by who measured it; ``ratios``: kvcore's over
    SGLang's, but where their name says otherwise, each of turns beside each other; ``idle_pct``: of a core, by system and side."""

    backend: str
    config: str
    in_flight: int
    room_bytes: int
    descriptors: int
    turns: dict[str, tuple[Turn, ...]]
    raw: dict[str, tuple[RawTurn, ...]]
    ratios: dict[str, Spread]
    idle_pct: dict[str, dict[Side, float]]

    @property
    def raw_agreement(self) -> tuple[float, ...]:
        """The engine alone by kvcore-floors over that by the peer bench, of the pages and with the side records; none if one is missing.

        Each by its best repeat, which what else the machine does has lengthened least.
        """
        ours, theirs = (self.raw.get(name, ()) for name in (FLOORS, PEER))
        if not ours or not theirs:
            return ()
        return tuple(
            min(getattr(each, name) for each in ours) / min(getattr(each, name) for each in theirs) for name in ("kv_us", "kv_aux_us")
        )

    @property
    def raw_agrees(self) -> bool:
        """Whether both ways of measuring the engine alone come to the same."""
        return all(abs(ratio - 1) <= AGREE for ratio in self.raw_agreement)


def measure(case: Case, systems: Sequence[System], parameters: Parameters, watch: Watch, debug: bool = False) -> list[Result]:
    """Start both systems, measure in turns, and end them. Raises ``ToolError`` if a room fails or a byte is wrong."""
    with ExitStack() as stack:
        bench = Bench(case, systems, parameters, watch, debug, stack)
        for repeat in range(parameters.repeats):
            watch("measuring", f"{case.backend} {case.config}, repeat {repeat + 1} of {parameters.repeats}")
            bench.repeat(systems if repeat % 2 == 0 else systems[::-1])
        bench.idle()
        return bench.results()


class Bench:
    """The systems of a case, running, and what was measured of them so far."""

    def __init__(self, case: Case, systems: Sequence[System], parameters: Parameters, watch: Watch, debug: bool, stack: ExitStack) -> None:
        self._case, self._parameters = case, parameters
        self._numbers = itertools.count(10_000, 1_000_000)  # of a run's first room
        self._pairs: dict[System, Pair] = {}
        self._turns: dict[tuple[int, System], list[Turn]] = {}
        self._raw: dict[str, list[RawTurn]] = {}
        self._rooms: dict[tuple[int, System], int] = {}
        self._descriptors = 0
        self._idle: dict[str, dict[Side, float]] = {}
        for system in systems:
            watch("measuring", f"{case.backend} {case.config}, starting {system}")
            with self._alone(system):
                self._pairs[system] = stack.enter_context(Pair(system, case, watch, debug))
                self._warm_up(system)

    @property
    def windows(self) -> list[int]:
        """Numbers in flight."""
        return [each for each in self._parameters.windows if not self._case.geometry.large or each <= MOST_LARGE_AT_ONCE]

    def repeat(self, systems: Sequence[System]) -> None:
        """Measure everything once, the systems in this order."""
        for window in self.windows:
            for system in systems:
                with self._alone(system):
                    self._run(system, self._few(window), window)
                    turn = self._turn(system, window)
                self._turns.setdefault((window, system), []).append(turn)
        for system in systems:
            with self._alone(system):
                for name, raw in self._raw_turns(system):
                    self._raw.setdefault(name, []).append(raw)

    def idle(self) -> None:
        """Measure what each costs that has nothing to do."""
        for system, pair in self._pairs.items():
            with self._alone(system):
                found = pair.both("idle_cpu", secs=IDLE_S)
            self._idle[system] = {side: found[side]["cpu_pct"] for side in SIDES}

    def results(self) -> list[Result]:
        """Of each number in flight."""
        case, raw = self._case, {name: tuple(turns) for name, turns in self._raw.items()}
        found = []
        for window in self.windows:
            turns: dict[str, tuple[Turn, ...]] = {system: tuple(self._turns[window, system]) for system in self._pairs}
            size = case.geometry.room_bytes, self._descriptors
            found.append(Result(case.backend, case.config, window, *size, turns, raw, ratios(turns, raw), self._idle))
        return found

    def _alone(self, system: System) -> Any:
        """SGLang stands still while another is measured; kvcore idles, which costs next to nothing, as is measured too."""
        other = self._pairs.get("sglang")
        return nullcontext() if other is None or system == "sglang" else other.still()

    def _few(self, window: int) -> int:
        return 2 if self._case.geometry.large else max(8, window)

    def _warm_up(self, system: System) -> None:
        least = LEAST_LARGE if self._case.geometry.large else LEAST
        for window in self.windows:
            self._run(system, self._few(window), window)
            rate = self._turn(system, window, self._few(window)).rooms_per_s
            self._rooms[window, system] = max(least, 2 * window, int(rate * self._parameters.seconds))

    def _run(self, system: System, rooms: int, window: int) -> dict[Side, Any]:
        arguments = {"base": next(self._numbers), "n": rooms, "window": window, "poll_us": self._parameters.poll_us}
        return self._pairs[system].both("run_rooms", **arguments)

    def _turn(self, system: System, window: int, rooms: int = 0) -> Turn:
        rooms = rooms or self._rooms[window, system]
        found = self._verified(system, lambda: self._run(system, rooms, window), min(window, rooms))
        mine, theirs = found["prefill"], found["decode"]
        if theirs["bad"]:
            raise ToolError(f"{system}: {theirs['bad']} of {rooms} rooms have side records that are not theirs")
        seconds, lat = theirs["t1"] - theirs["t0"], sorted(theirs["lat"])
        return Turn(
            rooms,
            rooms / seconds,
            rooms * self._case.geometry.room_bytes / seconds / 1e9,
            quantile(lat, 0.5) * 1e3,
            quantile(lat, 0.99) * 1e3,
            mine["cpu"] / rooms * 1e6,
            theirs["cpu"] / rooms * 1e6,
        )

    def _raw_turns(self, system: System) -> Iterator[tuple[str, RawTurn]]:
        pair, n = self._pairs[system], RAW_LARGE if self._case.geometry.large else RAW_ROOMS
        if system == "kvcore":
            found = self._verified(system, lambda: pair.both("raw", n=n), 1)
            yield FLOORS, raw_turn(found["prefill"], found["decode"]["cpu"], n)
            return
        for name, thread in ((PEER, False), (PEER_THREAD, True)):

            def run(thread: bool = thread) -> tuple[Any, float]:
                began: float = pair.one("decode", "cpu")
                return pair.one("prefill", "raw", n=n, thread=thread), pair.one("decode", "cpu") - began

            mine, cpu = self._verified(system, run, 1)
            self._descriptors = mine["descs"]
            yield name, raw_turn(mine, cpu, n)

    def _verified(self, system: System, run: Callable[[], Any], slots: int) -> Any:
        """What it gives; decode's pages are made zero before and compared with prefill's after."""
        pair = self._pairs[system]
        pair.one("decode", "zero")
        found = run()
        wrong = pair.one("decode", "wrong_pages", slots=slots)
        if wrong:
            raise ToolError(f"{system}: {wrong} pages of {slots} slots have arrived with wrong bytes")
        return found


def short(value: float) -> str:
    """Three digits at least."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def quantile(ordered: Sequence[float], share: float) -> float:
    """As the peer bench has it."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def raw_turn(found: Mapping[str, Any], decode_cpu_s: float, n: int) -> RawTurn:
    """From what a child's ``raw`` gives on prefill."""
    kv, whole = found["kv"], found["kv_aux"]
    middle = quantile(sorted(kv), 0.5) * 1e6, quantile(sorted(whole), 0.5) * 1e6
    return RawTurn(*middle, len(whole) / sum(whole), found["cpu"] / n * 1e6, decode_cpu_s / n * 1e6)


def ratios(turns: Mapping[str, Sequence[Turn]], raw: Mapping[str, Sequence[RawTurn]]) -> dict[str, Spread]:
    """What both come to beside each other, and each beside the engine alone, as far as they were measured."""
    found: dict[str, Spread] = {}
    floors, thread = (raw.get(name, ()) for name in (FLOORS, PEER_THREAD))
    mine, theirs = turns.get("kvcore", ()), turns.get("sglang", ())

    def add(name: str, upper: Sequence[float], lower: Sequence[float]) -> None:
        if upper and lower:
            found[name] = Spread.of([one / other for one, other in zip(upper, lower, strict=True)])

    for name in ("rooms_per_s", "p50_ms", "p99_ms", "cpu_us"):
        add(name, [getattr(each, name) for each in mine], [getattr(each, name) for each in theirs])
    if mine and theirs and floors:
        costs = [[turn.cpu_us - raw.cpu_us for turn, raw in zip(each, floors, strict=True)] for each in (mine, theirs)]
        add("cpu_us_above_raw", *costs)
    alone = [each.rooms_per_s for each in thread or floors]
    add("kvcore_rate_over_raw", [each.rooms_per_s for each in mine], alone)
    add("sglang_rate_over_raw", [each.rooms_per_s for each in theirs], alone)
    return found
