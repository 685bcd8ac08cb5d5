"""Batches of bad messages, a good room after each, and what is seen at the end."""

from __future__ import annotations

import itertools
import pickle
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from kvcore_conformance.stage.driver import Child
from kvcore_conformance.stage.noise import Spell

from benchmarks.fuzz.fronts import Control, Front, controls, others
from benchmarks.fuzz.liars import LyingPrefill
from benchmarks.fuzz.wards import Figures, Plant, figures, move, plant, settled

BATCH = 10_000
STRETCH = 1000
WEIGHTS = (7, 7, 2, 1, 1, 1, 1)
"""How many of 20 stretches go to each control port, the bootstrap service, both admin ports and both data ports."""
"""Messages to one port before it is another's turn."""
MOST_LINES = 500
MOST_KIB = 96 * 1024
FLAT_S = 20.0
"""How long what is kept for a peer that has gone may be seen."""


class Damage(AssertionError):
    """Something did not survive the messages."""


@dataclass
class Report:
    """What was sent and seen. ``wrong`` is empty if nothing was lost."""

    way: str
    seed: int
    messages: int = 0
    seconds: float = 0.0
    good_rooms: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    ports: Counter[str] = field(default_factory=Counter)
    bad: dict[str, int] = field(default_factory=dict)
    log_lines: int = 0
    grown_kib: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return vars(self) | {"kinds": dict(self.kinds), "ports": dict(self.ports)}


def schedule(fronts: Sequence[Front], weights: Sequence[int]) -> Sequence[Front]:
    """Whose turn it is, stretch by stretch, over and over."""
    return [front for front, weight in zip(fronts, weights, strict=True) for _ in range(weight)]


def attack(
    way: str,
    seed: int,
    indices: Sequence[int],
    batch: int = BATCH,
    stretch: int = STRETCH,
    minutes: float | None = None,
    say: Callable[[str], None] = print,
) -> Report:
    """Send the messages with these numbers, ``inside`` one process past the sockets, or to the ``sockets`` of others.

    ``batch``: messages between two good rooms, ``stretch``: those to one port before it is another's turn.
    """
    report, begun = Report(way, seed), time.monotonic()
    with tempfile.TemporaryDirectory() as folder, plant(near=way == "inside") as made, zmq.Context() as context:
        proof = Path(folder) / "proof"
        spells = (*(pickle.dumps(Spell(proof), version) for version in range(6)), f"__import__('os').mkdir({str(proof)!r})".encode())
        ways = controls(made, context, spells)
        try:
            turns = _turns(way, made, ways, spells)
            _batches(report, made, turns, indices, (batch, stretch), None if minutes is None else begun + 60 * minutes, say)
            if proof.exists():
                report.wrong.append("something received was run: it left its mark")
        finally:
            for one in ways:
                one.close()
    report.seconds = round(time.monotonic() - begun, 1)
    return report


def _turns(way: str, made: Plant, ways: Sequence[Control], spells: tuple[bytes, ...]) -> Sequence[Front]:
    for one in ways:
        one.ready()
    if way == "inside":
        return schedule(ways, (1, 1))
    liar = ways[1].liar
    assert isinstance(liar, LyingPrefill)
    return schedule([*ways, *others(made, liar.data, spells)], WEIGHTS)


def _batches(
    report: Report,
    made: Plant,
    turns: Sequence[Front],
    indices: Sequence[int],
    steps: tuple[int, int],
    until: float | None,
    say: Callable[[str], None],
) -> None:
    wards = {"prefill": made.prefill, "decode": made.decode}
    stretches, (batch, stretch) = itertools.cycle(turns), steps
    _calm(made, turns)
    before = _figures(wards)
    warm: dict[str, Figures] | None = None
    for start in range(0, len(indices), batch):
        if until is not None and time.monotonic() > until:
            break
        now = indices[start : start + batch]
        for at in range(0, len(now), stretch):
            front, some = next(stretches), now[at : at + stretch]
            try:
                front.ready()
                kinds = front.send(report.seed, some)
            except (AssertionError, OSError, zmq.ZMQError) as error:
                raise Damage(f"{front.name}, messages {some[0]} .. {some[-1]} of seed {report.seed}: {error!r}") from error
            report.kinds.update(kinds)
            report.ports[front.name] += len(some)
            report.messages += len(some)
        try:
            _calm(made, turns)
            move(made.prefill, made.decode)
        except (AssertionError, OSError) as error:
            raise Damage(f"after messages {now[0]} .. {now[-1]} of seed {report.seed}: {error}") from error
        report.good_rooms += 1
        warm = warm or _figures(wards)
        say(f"{report.way}: {report.messages} of {len(indices)} messages, {report.good_rooms} good rooms")
    _calm(made, turns)
    _judge(report, made, before, warm or before, _flat(wards, before))


def _calm(made: Plant, turns: Sequence[Front]) -> None:
    for front in dict.fromkeys(turns):
        front.rest()
    settled(made.prefill, made.decode)


def _figures(wards: dict[str, Child]) -> dict[str, Figures]:
    return {name: figures(ward) for name, ward in wards.items()}


def _flat(wards: dict[str, Child], before: dict[str, Figures]) -> dict[str, Figures]:
    """The figures as soon as the stores are what they were, or at last."""
    deadline = time.monotonic() + FLAT_S
    while True:
        found = _figures(wards)
        if all(found[name].stores == before[name].stores for name in wards) or time.monotonic() > deadline:
            return found
        threading.Event().wait(0.1)


def _judge(report: Report, made: Plant, before: dict[str, Figures], warm: dict[str, Figures], after: dict[str, Figures]) -> None:
    """Compare what is held now with what was: stores and threads to the beginning, memory to the end of the first batch."""
    wrong = report.wrong
    for name, now in after.items():
        was = before[name]
        if now.stores != was.stores:
            wrong.append(f"{name}: stores {now.stores} where there were {was.stores}")
        if now.raised:
            wrong.append(f"{name}: {len(now.raised)} exceptions, such as {now.raised[0]}")
        if not now.healthy:
            wrong.append(f"{name}: not healthy")
        if now.footprint.threads > was.footprint.threads + 4:
            wrong.append(f"{name}: {now.footprint.threads} threads where there were {was.footprint.threads}")
        if now.footprint.descriptors > was.footprint.descriptors + 8:
            wrong.append(f"{name}: {now.footprint.descriptors} descriptors where there were {was.footprint.descriptors}")
        report.grown_kib[name] = now.footprint.resident - warm[name].footprint.resident
        if report.grown_kib[name] > MOST_KIB:
            wrong.append(f"{name}: {report.grown_kib[name]} KiB more than after the first batch")
        lines = now.lines - was.lines
        report.log_lines += lines
        if lines > MOST_LINES + report.messages // 1000 + 20 * report.good_rooms:
            wrong.append(f"{name}: {lines} lines logged for {report.messages} messages")
        report.bad |= {f"{name} {port}": count - was.bad[port] for port, count in now.bad.items()}
    if made.guards():
        wrong.append(f"{made.guards()} bytes beside the registered memory have changed")
