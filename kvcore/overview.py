"""What an instance tells people of itself: sizes of its stores, figures, and whether it is well."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvcore.bootstrap_service import BootstrapService
from kvcore.channel import Channel
from kvcore.http import HttpThread
from kvcore.late_words import LateWords
from kvcore.ledger import Ledger
from kvcore.memory import Pool
from kvcore.metrics import Labels, Metrics
from kvcore.observers import Observers
from kvcore.peers import Peers
from kvcore.room import Room
from kvcore.rooms import RoomTable
from kvcore.routes import Routes
from kvcore.slow import SlowThread
from kvcore.states import KVPoll
from kvcore.stats import ManagerStats
from kvcore.stories import Stories

QUARANTINE_SHARE, QUARANTINE_S = 0.5, 10.0
"""An instance of whose pages more than this share wait for proof for so long, as far as it was looked at, is not well. A peer that dies may
leave as much behind for a moment."""
ROOM_STORES = (
    "rooms", "tickets", "last_words", "marks", "waiting_joins", "drain_records", "unrouted_aborts", "slots", "timers", "watchers",
    "searches", "ledger_tickets", "pending_clears", "backend_rooms", "late_words",
)  # fmt: skip


@dataclass(eq=False)
class Overview:
    """Looks at the parts of one manager."""

    pools: Sequence[Pool]
    metrics: Metrics
    table: RoomTable
    ledger: Ledger
    peers: Peers
    routes: Routes
    channel: Channel
    slow: SlowThread
    http: HttpThread
    observers: Observers
    stories: Stories
    late: LateWords
    collected: Sequence[Room]
    service: BootstrapService | None = None
    closing: bool = False
    _full_since: float | None = None

    def stats(self) -> ManagerStats:
        """What this manager holds now."""
        stores = self.service.sizes() if self.service is not None else {}
        stores |= self.table.sizes() | self.routes.sizes() | self.peers.sizes() | self.ledger.sizes()
        stores |= {
            "ledger_tickets": self.ledger.tickets,
            "pending_clears": self.ledger.pending_clears,
            "backend_rooms": self.ledger.backend_rooms,
            "events": len(self.observers),
            "flight_record": len(self.table.flight),
            "questions": len(self.stories),
            "records": self.table.records,
            "late_words": len(self.late),
            "collected": len(self.collected),
            "control_calls": self.channel.calls,
            "slow_calls": self.slow.calls,
            "http_calls": self.http.calls,
        }
        counters = self._counted().counters()
        return ManagerStats(
            stores, ROOM_STORES, counters, self.ledger.tickets, self.quarantined_pages,
            counters["kvcore_released_unproven_total"], self.ledger.pending_clears, len(self.peers.pairings),
            self.channel.sockets, sum(thread.name.startswith("kvcore") for thread in threading.enumerate()),
        )  # fmt: skip

    @property
    def quarantined_pages(self) -> int:
        """Pages that wait for proof (R3)."""
        return self.ledger.quarantined_pages + self.table.draining_pages()

    def metrics_text(self) -> str:
        """All metrics in the Prometheus text format."""
        counts = {(side, state): 0 for side in ("prefill", "decode") for state in KVPoll}
        for side, _, _, record in self.table.states():
            if record is not None:
                counts[side, record.status] += 1
        gauges: dict[str, list[tuple[Labels, float]]] = {
            "kvcore_rooms": [((("side", side), ("state", state.name)), float(count)) for (side, state), count in counts.items()],
            "kvcore_quarantined_pages": [((), float(self.quarantined_pages))],
            "kvcore_peers": [((), float(len(self.peers.pairings)))],
            "kvcore_healthy": [((), float(not self.troubles()))],
        }
        return self._counted().text(gauges)

    def _counted(self) -> Metrics:
        """The metrics, with what the ports counted themselves brought up to date."""
        for port, count in {"control": self.channel.bad_messages, **self.http.bad_requests}.items():
            self.metrics.set_count("kvcore_bad_messages_total", count, port=port)
        self.metrics.set_count("kvcore_refused_peers_total", self.channel.refused)
        return self.metrics

    def why_not_ready(self) -> str:
        """Which ranks of its group the bootstrap service here misses; "" if none, or without one."""
        return self.service.why_not_ready() if self.service is not None else ""

    def _quarantine(self) -> str:
        pages, held, now = sum(pool.num_pages for pool in self.pools), self.quarantined_pages, time.monotonic()
        if held <= QUARANTINE_SHARE * pages:
            self._full_since = None
            return ""
        self._full_since = self._full_since or now
        if now - self._full_since < QUARANTINE_S:
            return ""
        return f"{held} of {pages} pages wait for proof that no engine touches them; see the log for the peers"

    def troubles(self) -> list[str]:
        """Why this instance cannot serve rooms as it should, a line each; empty while it is well."""
        found = [pulse.trouble for pulse in (self.channel.pulse, self.ledger.pulse, self.slow.pulse)]
        if not self.ledger.workers.healthy:
            found.append("too many workers are stuck in the backend's transfer; see the log for the peers")
        found.append(self._quarantine())
        if self.closing:
            found.append("it is closing")
        return [text for text in found if text]
