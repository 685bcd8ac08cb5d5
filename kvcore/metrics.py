"""What is measured: one room's transfer, and the counters an operator scrapes (Prometheus text format)."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvcore.states import FailureCode, KVPoll, Side


@dataclass(frozen=True, slots=True)
class TransferMetrics:
    """One room's figures. Seconds are monotonic; a part that has not ended counts up to now."""

    pages: int
    """Pages handed over (sender) or listed (receiver), of all pools."""
    bytes: int
    """Bytes moved, of all tensors and destinations."""
    chunks: int
    """Calls of ``send``; 0 on the receiver."""
    wait_s: float
    """From opened to the first ticket; on the receiver to TRANSFERRING."""
    active_s: float
    """The union of the times in which a ticket of the room was in flight; on the receiver from TRANSFERRING to the end."""
    total_s: float
    """From opened to terminal."""

    @property
    def bytes_per_s(self) -> float:
        """Bytes over active time; 0 without."""
        return self.bytes / self.active_s if self.active_s > 0 else 0.0


class Meter:
    """Collects one room's figures. Written by one thread at a time; a read may be slightly behind."""

    __slots__ = ("_active_s", "_began", "_ended", "_in_flight", "_opened", "_since", "bytes", "chunks", "listed_bytes", "pages")

    def __init__(self, opened: float) -> None:
        self._opened = opened
        self._began: float | None = None
        self._ended: float | None = None
        self._in_flight = 0
        self._since = 0.0
        self._active_s = 0.0
        self.pages = 0
        self.bytes = 0
        self.chunks = 0
        self.listed_bytes = 0
        """Receiver: what its pages hold; they have moved with SUCCESS."""

    def began(self, now: float) -> None:
        """Something of the room is in flight from now on."""
        if self._began is None:
            self._began = now
        if self._in_flight == 0:
            self._since = now
        self._in_flight += 1

    def done(self, now: float) -> None:
        """One thing that was in flight is over."""
        self._in_flight -= 1
        if self._in_flight == 0:
            self._active_s += now - self._since

    def state(self, side: Side, state: KVPoll, now: float) -> None:
        """The room changed its state."""
        if side == "decode" and state is KVPoll.TRANSFERRING:
            self.began(now)
        if state.terminal:
            self._ended = now
            if side == "decode" and self._in_flight:
                self.done(now)
            if state is KVPoll.SUCCESS:
                self.bytes += self.listed_bytes

    def read(self, now: float) -> TransferMetrics:
        """The figures so far."""
        end = self._ended if self._ended is not None else now
        active = self._active_s + (now - self._since if self._in_flight else 0.0)
        wait = (self._began if self._began is not None else end) - self._opened
        return TransferMetrics(self.pages, self.bytes, self.chunks, wait, active, end - self._opened)


Labels = tuple[tuple[str, str], ...]


class Metrics:
    """Counters of one manager, safe to count from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may count in the middle of counting
        self._counts: Counter[tuple[str, Labels]] = Counter()
        self._sums: dict[tuple[str, Labels], tuple[int, float]] = {}

    def count(self, name: str, amount: int = 1, **labels: str) -> None:
        """Add to a counter; what is not a number above 0 is ignored (a counter never falls, C105)."""
        if 0 < amount < math.inf:
            with self._lock:
                self._counts[name, tuple(sorted(labels.items()))] += amount

    def set_count(self, name: str, total: int, **labels: str) -> None:
        """Bring a counter up to a total that is counted elsewhere."""
        key = name, tuple(sorted(labels.items()))
        with self._lock:
            held = self._counts[key]
            self._counts[key] = total if held < total < math.inf else held

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Add one observation to a summary; a time that is none counts as 0."""
        key = name, tuple(sorted(labels.items()))
        with self._lock:
            number, total = self._sums.get(key, (0, 0.0))
            self._sums[key] = number + 1, total + (seconds if 0 < seconds < math.inf else 0.0)

    def ended(self, side: Side, state: KVPoll, code: FailureCode | None, figures: TransferMetrics) -> None:
        """A room became terminal."""
        self.observe("kvcore_room_seconds", figures.total_s, side=side)
        if code is not None:
            self.count("kvcore_failures_total", code=code.value)
        elif side == "prefill":
            self.observe("kvcore_transfer_seconds", figures.active_s)

    def counters(self) -> dict[str, int]:
        """The counters by Prometheus name, labels summed up."""
        totals: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        with self._lock:
            for (name, _), value in self._counts.items():
                totals[name] += value
        return dict(totals)

    def text(self, gauges: Mapping[str, Iterable[tuple[Labels, float]]]) -> str:
        """Everything in the Prometheus text format, version 0.0.4."""
        lines: list[str] = []
        with self._lock:
            counts, sums = dict(self._counts), dict(self._sums)
        for name in COUNTERS:
            lines += [f"# HELP {name} {COUNTERS[name]}", f"# TYPE {name} counter"]
            found = [(labels, value) for (this, labels), value in counts.items() if this == name]
            lines += [f"{name}{_labels(labels)} {value}" for labels, value in sorted(found) or [((), 0)]]
        for name in SUMMARIES:
            lines += [f"# HELP {name} {SUMMARIES[name]}", f"# TYPE {name} summary"]
            for (this, labels), (number, total) in sorted(sums.items()):
                if this == name:
                    lines += [f"{name}_count{_labels(labels)} {number}", f"{name}_sum{_labels(labels)} {total:.6f}"]
        for name, values in gauges.items():
            lines += [f"# HELP {name} {GAUGES[name]}", f"# TYPE {name} gauge"]
            lines += [f"{name}{_labels(labels)} {value:g}" for labels, value in values]
        return "\n".join(lines) + "\n"


COUNTERS = {
    "kvcore_bytes_total": "Bytes written to peers.",
    "kvcore_failures_total": "Rooms that failed, by code.",
    "kvcore_released_unproven_total": "Pages released by limit, without proof that no engine touches them.",
    "kvcore_bad_messages_total": "Messages that could not be understood, by port.",
    "kvcore_refused_peers_total": "Connections to the control port that were refused for their curve key.",
    "kvcore_handles_collected_total": "Handles that were garbage-collected without clear.",
}
SUMMARIES = {
    "kvcore_room_seconds": "Seconds from opened to terminal, by side.",
    "kvcore_transfer_seconds": "Seconds in which a ticket of a successful room was in flight.",
}
GAUGES = {
    "kvcore_rooms": "Rooms stored, by side and state.",
    "kvcore_quarantined_pages": "Pages that wait for proof that no engine touches them.",
    "kvcore_peers": "Instances that are paired.",
    "kvcore_healthy": "1 if this instance is well, else 0; /health says why.",
}


def _labels(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels) + "}" if labels else ""
