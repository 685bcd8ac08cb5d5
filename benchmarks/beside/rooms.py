"""Rooms of both systems and transfers of the engine alone, in turns, and what their figures come to."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.beside.pairs import Case, Pair, System, Systems
from kvcore.progress import Watch
from kvcore.sides import SIDES, ToolError
from kvcore.states import Side

IDLE_S = 3.0
RAW_ROOMS, RAW_LARGE = 100, 4
LEAST, LEAST_LARGE = 40, 4
MOST_LARGE_AT_ONCE = 2
FLOORS, PEER, PEER_THREAD = "kvcore-floors", "peer bench", "peer bench, thread"
"""Who measures the engine alone, and the latter from which thread: its main one, or as SGLang's manager does."""
AGAIN = "measure it by itself, with --systems and --debug"
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
class Cost:
    """Rooms a second, and of a room the CPU time of a process's threads, by side."""

    rooms_per_s: float
    prefill_cpu_us: float
    decode_cpu_us: float

    @property
    def cpu_us(self) -> float:
        """Of a room, on both sides."""
        return self.prefill_cpu_us + self.decode_cpu_us


@dataclass(frozen=True, slots=True)
class Turn(Cost):
    """Of one system: how many rooms, and their latencies from before a receiver is opened until its end is seen."""

    rooms: int
    gb_per_s: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class RawTurn(Cost):
    """Of the engine alone: medians of the pages' transfer and of it with that of the side records after it, which make a room."""

    kv_us: float
    kv_aux_us: float


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
    """Of one case at one number in flight.

    ``turns``: by system. ``raw``, ``descriptors``: the engine alone, and of how many its transfer of the pages is, by who measured it.
    ``ratios``: of turns beside each other, kvcore's over SGLang's but where the name says otherwise. ``idle_pct``: of a core, by system and
    side. ``raw_agreement``: what ``agreement`` says of ``raw``.
    """

    backend: str
    config: str
    in_flight: int
    room_bytes: int
    descriptors: dict[str, int]
    turns: dict[str, tuple[Turn, ...]]
    raw: dict[str, tuple[RawTurn, ...]]
    ratios: dict[str, Spread]
    idle_pct: dict[str, dict[Side, float]]
    raw_agreement: tuple[float, ...]

    @property
    def raw_agrees(self) -> bool:
        """Whether both ways of measuring the engine alone come to the same."""
        return all(abs(ratio - 1) <= AGREE for ratio in self.raw_agreement)


def measure(case: Case, systems: Sequence[System], parameters: Parameters, watch: Watch, debug: bool = False) -> list[Result]:
    """Start both systems, measure in turns, and end them. Raises ``ToolError`` if a room fails or a byte is wrong."""
    with Systems(case, systems, watch, debug) as running:
        bench = Bench(running, parameters)
        bench.warm_up()
        for repeat in range(parameters.repeats):
            watch("measuring", f"{case.backend} {case.config}, repeat {repeat + 1} of {parameters.repeats}")
            bench.repeat(systems if repeat % 2 == 0 else systems[::-1])
        bench.idle()
        return bench.results()


class Bench:
    """What was measured of a case so far."""

    def __init__(self, systems: Systems, parameters: Parameters) -> None:
        self._systems, self._case, self._parameters = systems, systems.case, parameters
        self._rooms: dict[tuple[int, System], int] = {}
        self._turns: dict[tuple[int, System], list[Turn]] = {}
        self._raw: dict[str, list[RawTurn]] = {}
        self._descriptors: dict[str, int] = {}
        self._idle: dict[str, dict[Side, float]] = {}

    @property
    def windows(self) -> list[int]:
        """Numbers in flight."""
        return [each for each in self._parameters.windows if not self._case.geometry.large or each <= MOST_LARGE_AT_ONCE]

    def warm_up(self) -> None:
        """Carry some rooms, and find how many a turn takes."""
        least = LEAST_LARGE if self._case.geometry.large else LEAST
        for system in self._systems.names:
            with self._systems.alone(system) as pair:
                for window in self.windows:
                    self._run(pair, self._few(window), window)
                    rate = self._turn(pair, self._few(window), window).rooms_per_s
                    self._rooms[window, system] = max(least, 2 * window, int(rate * self._parameters.seconds))

    def repeat(self, order: Sequence[System]) -> None:
        """Measure everything once, the systems in this order."""
        for window in self.windows:
            for system in order:
                with self._systems.alone(system) as pair:
                    self._run(pair, self._few(window), window)
                    turn = self._turn(pair, self._rooms[window, system], window)
                self._turns.setdefault((window, system), []).append(turn)
        for system in order:
            with self._systems.alone(system) as pair:
                for name, raw in self._raw_turns(pair):
                    self._raw.setdefault(name, []).append(raw)

    def idle(self) -> None:
        """Measure what each costs that has nothing to do."""
        for system in self._systems.names:
            with self._systems.alone(system) as pair:
                found = pair.both("idle_cpu", secs=IDLE_S)
            self._idle[system] = {side: found[side]["cpu_pct"] for side in SIDES}

    def results(self) -> list[Result]:
        """Of each number in flight."""
        case, raw = self._case, {name: tuple(turns) for name, turns in self._raw.items()}
        found = []
        for window in self.windows:
            turns: dict[str, tuple[Turn, ...]] = {system: tuple(self._turns[window, system]) for system in self._systems.names}
            size = case.geometry.room_bytes, self._descriptors
            found.append(Result(case.backend, case.config, window, *size, turns, raw, ratios(turns, raw), self._idle, agreement(raw)))
        return found

    def _few(self, window: int) -> int:
        return 2 if self._case.geometry.large else max(8, window)

    def _run(self, pair: Pair, rooms: int, window: int) -> dict[Side, Any]:
        return pair.both("run_rooms", base=self._systems.base(), n=rooms, window=window, poll_us=self._parameters.poll_us)

    def _turn(self, pair: Pair, rooms: int, window: int) -> Turn:
        with verified(pair, min(window, rooms)):
            found = self._run(pair, rooms, window)
        mine, theirs = found["prefill"], found["decode"]
        if theirs["bad"]:
            raise ToolError(f"{pair.system}: {theirs['bad']} of {rooms} rooms have side records that are not theirs; {AGAIN}")
        seconds, lat = theirs["t1"] - theirs["t0"], sorted(theirs["lat"])
        return Turn(
            rooms / seconds,
            mine["cpu"] / rooms * 1e6,
            theirs["cpu"] / rooms * 1e6,
            rooms,
            rooms * self._case.geometry.room_bytes / seconds / 1e9,
            quantile(lat, 0.5) * 1e3,
            quantile(lat, 0.99) * 1e3,
        )

    def _raw_turns(self, pair: Pair) -> Iterator[tuple[str, RawTurn]]:
        n = RAW_LARGE if self._case.geometry.large else RAW_ROOMS
        if pair.system == "kvcore":
            with verified(pair, 1):
                found = pair.both("raw", n=n)
            mine, cpu = found["prefill"], found["decode"]["cpu"]
            self._descriptors[FLOORS] = mine["descs"]
            yield FLOORS, raw_turn(mine, cpu, n)
            return
        for name, thread in ((PEER, False), (PEER_THREAD, True)):
            with verified(pair, 1):
                began = pair.one("decode", "cpu")
                mine = pair.one("prefill", "raw", n=n, thread=thread)
                cpu = pair.one("decode", "cpu") - began
            self._descriptors[name] = mine["descs"]
            yield name, raw_turn(mine, cpu, n)


@contextmanager
def verified(pair: Pair, slots: int) -> Iterator[None]:
    """Decode's pages are made zero before, and compared with prefill's after."""
    pair.one("decode", "zero")
    yield
    wrong = pair.one("decode", "wrong_pages", slots=slots)
    if wrong:
        raise ToolError(f"{pair.system}: {wrong} pages of {slots} slots have arrived with wrong bytes; {AGAIN}")


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
    return RawTurn(len(whole) / sum(whole), found["cpu"] / n * 1e6, decode_cpu_s / n * 1e6, *middle)


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


def agreement(raw: Mapping[str, Sequence[RawTurn]]) -> tuple[float, ...]:
    """The engine alone by kvcore-floors over that by the peer bench, of the pages and with the side records; nothing if one is missing.

    Each by its best repeat, which what else the machine does has lengthened least.
    """
    ours, theirs = (raw.get(name, ()) for name in (FLOORS, PEER))
    if not ours or not theirs:
        return ()
    return tuple(min(getattr(each, name) for each in ours) / min(getattr(each, name) for each in theirs) for name in ("kv_us", "kv_aux_us"))
