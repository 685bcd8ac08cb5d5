"""What a manager holds at a moment, for operators and tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ManagerStats:
    """Sizes of every store, the counters, and the figures asked for most."""

    stores: Mapping[str, int]
    """Name to size of every store of the manager."""
    room_stores: tuple[str, ...]
    """The names of those that C7 wants empty once all rooms are cleared."""
    counters: Mapping[str, int]
    """The Prometheus counters by name, labels summed up."""
    tickets: int
    quarantined_pages: int
    """Pages that wait for proof: of tickets that failed without being quiescent, and of failed rooms not yet drained."""
    released_unproven: int
    """Pages released by limit so far."""
    pending_clears: int
    """Lifetimes cleared whose backend state has not been dropped yet."""
    peers: int
    """Live paired instances."""
    sockets: int
    threads: int
    """Threads of kvcore in this process, of all its managers."""
