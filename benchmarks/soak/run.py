"""One soak: load and quiet in turn; at each quiet point all rooms are cleared, and the processes that stay are looked at."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from kvcore_conformance.stage.load import letters

from benchmarks.soak.company import Company
from benchmarks.soak.peers import LIMITS, Held, Kept, Peer
from benchmarks.soak.rooms import Rooms

TURN_S = 0.05
OPEN = 0.4
"""Rooms opened at each turn, on average: eight a second."""
LOOK_S = 1.0
"""Between two looks at all memory."""
LOAD_S = 45.0
"""Between two quiet points, or less in a short run."""
QUIET_S = 60.0
"""How long it may take until all rooms are over, and then until the stores are empty: a few times the sum of the limits."""
WARM = 0.25
"""The share of the time until everything is made that is made once."""
MARGIN = Held(threads=3, descriptors=6, sockets=4, resident_kib=32 * 1024, stores=24)
MOST_SLOPE = 1024.0
"""KiB a minute that resident memory may grow in the second half of the points, where these are of five minutes or more."""
SLOPE_MIN = 5.0
MOST_WRONG = 10
"""After so many findings a run ends early; and after the first of wrong bytes, which would be found again and again."""


class Soak:
    """``run`` it, then ``summary`` says what was done and seen. ``wrong`` is empty if all held."""

    def __init__(self, backend: str, options: dict[str, Any], seed: int, kept: Kept = (0, 0)) -> None:
        self._backend, self._options, self._seed = backend, options, seed
        self._rooms = Rooms(seed)
        self.wrong = self._rooms.wrong
        self._points: dict[str, list[tuple[float, Held]]] = {}
        self._counts: dict[str, int] = {}
        self._unproven = 0
        self._took_s = 0.0
        self._looked = 0.0
        self._spoilt = False
        self._kept = kept
        self._met: dict[str, list[int]] = {}

    def run(self, minutes: float) -> None:
        """Load the processes for so long."""
        began = time.monotonic()
        with Company(self._backend, self._options, self._seed, self._rooms) as company:
            try:
                self._run(company, began, 60.0 * minutes)
            except AssertionError as error:  # a process that gives no answer
                self._rooms.note(str(error))
            self._counts = dict(company.counts)
        self._took_s = time.monotonic() - began
        self._judge()

    def _run(self, company: Company, began: float, length: float) -> None:
        self._until(company, lambda: company.settled, "all processes are there")
        load_s = min(LOAD_S, length / 6)
        while (now := time.monotonic()) < began + length:
            self._disturb(company)
            self._load(company, min(now + load_s, began + length))
            if self._hopeless:
                return
            self._quiet(company)
            for peer in company.home:
                if time.monotonic() > began + WARM * length:
                    self._measure(peer, company.met(peer.role), began)
        self._unproven = sum(peer.child.work("stats")["released_unproven"] for peer in company.home)

    @property
    def _hopeless(self) -> bool:
        return self._spoilt or len(self.wrong) >= MOST_WRONG

    def _load(self, company: Company, until: float) -> None:
        owed = 0.0
        while time.monotonic() < until and not self._hopeless:
            owed = min(owed + OPEN, 4.0)
            while owed >= 1.0 and (pair := company.pair()) is not None:
                self._rooms.open(*pair)
                owed -= 1.0
            self._turn(company, events=True)

    def _turn(self, company: Company, events: bool) -> None:
        began = time.monotonic()
        company.turn(events)
        self._rooms.turn()
        if began >= self._looked + LOOK_S:
            self._looked = began
            for peer in company.here:
                if wrong := peer.wrong():
                    self._rooms.note(f"{peer.name}: bytes have changed that nobody may write (R2, T2), by page: {wrong}")
                    self._spoilt = True
        threading.Event().wait(max(TURN_S - (time.monotonic() - began), 0.005))

    def _until(self, company: Company, reached: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + QUIET_S
        while not reached():
            if time.monotonic() > deadline:
                return self._rooms.note(f"not within {QUIET_S:g} s: {what}")
            self._turn(company, events=False)

    def _quiet(self, company: Company) -> None:
        """No room is left, and nothing of any is kept."""
        self._until(company, lambda: company.settled and not self._rooms.under_way, "all rooms are over")
        for peer in company.here:
            peer.child.heal()
            kept: dict[str, int] = {}

            def empty(peer: Peer = peer, kept: dict[str, int] = kept) -> bool:
                kept.clear()
                kept.update(peer.child.work("held"))
                return not kept

            self._until(company, empty, f"the stores of {peer.name} are empty (C7)")
            if kept:
                self._rooms.note(f"{peer.name} keeps {kept} with all rooms cleared")

    def _disturb(self, company: Company) -> None:
        """Letters of those that stay come twice or late."""
        letters(company.home[0].child, company.home[1].child)

    def _measure(self, peer: Peer, met: int, began: float) -> None:
        """What it holds, once what ends by limit has ended, such as what is known of a peer that died lately."""
        points = self._points.setdefault(peer.name, [])
        self._met.setdefault(peer.name, []).append(met)
        deadline = time.monotonic() + LIMITS["liveness_s"] + LIMITS["quarantine_s"]
        while self._above(peer.name, held := peer.held()) and time.monotonic() < deadline:
            threading.Event().wait(0.2)
        points.append(((time.monotonic() - began) / 60.0, held))
        sys.stderr.write(f"{points[-1][0]:6.1f} min {peer.name}: {held} rooms {self._rooms.outcomes.total()} wrong {len(self.wrong)}\n")

    def _above(self, name: str, held: Held) -> list[str]:
        """In what a process holds more than at its first point, with what its engine keeps of the peers met since."""
        points, met = self._points[name], self._met[name]
        return held.above(points[0][1], MARGIN.plus(met[-1] - met[0], self._kept)) if points else []

    def _judge(self) -> None:
        """Has anything grown?"""
        for name, points in self._points.items():
            if above := self._above(name, points[-1][1]):
                self._rooms.note(f"{name} holds more than after the warm-up: {', '.join(above)}")
            slope = self._slope(points)
            if slope is not None and slope > MOST_SLOPE:
                self._rooms.note(f"{name} grows by {slope:.0f} KiB a minute in the second half, more than {MOST_SLOPE:.0f}")
        if not self._points:
            self._rooms.note("nothing was measured; run it for longer")

    def _slope(self, points: list[tuple[float, Held]]) -> float | None:
        """KiB a minute by which resident memory grew over the second half; None if that is too short to tell."""
        late = points[len(points) // 2 :]
        if late[-1][0] - late[0][0] < SLOPE_MIN:
            return None
        return float(np.polyfit([when for when, _ in late], [held.resident_kib for _, held in late], 1)[0])

    def summary(self) -> dict[str, Any]:
        """What was done and seen, for JSON."""
        rooms = self._rooms
        return {
            "held": not self.wrong, "wrong": self.wrong[:MOST_WRONG], "backend": self._backend, "seed": self._seed,
            "minutes": round(self._took_s / 60.0, 2), "rooms": rooms.outcomes.total(), "outcomes": dict(rooms.outcomes),
            "failure_codes": dict(rooms.codes), "faults": dict(rooms.faults), "processes": self._counts,
            "bytes_verified": rooms.bytes_verified, "released_unproven": self._unproven, "stalls": rooms.stalls,
            "footprints": {
                name: {
                    "first": vars(points[0][1]), "last": vars(points[-1][1]), "points": len(points),
                    "met": self._met[name][-1] - self._met[name][0],
                    "most_resident_kib": max(held.resident_kib for _, held in points), "kib_a_minute": self._slope(points),
                }
                for name, points in self._points.items()
            },
        }  # fmt: skip
