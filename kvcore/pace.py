"""How long the progress thread sleeps between two turns: ever longer while nothing moves. To spin would keep others out for 5 ms."""

from __future__ import annotations

from collections.abc import Collection

from kvcore.tickets import Entry

SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.00005, 0.02
SHORTEST_LISTEN_S, LONGEST_LISTEN_S = 0.0003, 0.2  # of a target that must work; the longest while no sender has said that it writes


def pause_s(quiet_s: float, tickets: Collection[Entry], flowing: bool, driven: bool) -> float:
    """Seconds, after so many in which nothing moved. ``flowing``: whether tickets are not over, or data may be on its way to here;
    ``driven``: whether it may, and the engine must be driven for it."""
    shortest, longest = SHORTEST_LISTEN_S, LONGEST_WAIT_S if flowing else LONGEST_LISTEN_S
    if tickets:
        shortest = LONGEST_WAIT_S if not driven and all(map(_in_workers, tickets)) else SHORTEST_WAIT_S
    return min(max(quiet_s / 32, shortest), longest)


def over(tickets: Collection[Entry]) -> bool:
    """Whether no ticket changes by itself any more: only a fence can end it, which needs no turns."""
    return all(entry.unproven and not entry.running for entry in tickets)


def _in_workers(entry: Entry) -> bool:
    """Whether all that a ticket waits for is in the hands of workers, who ring when it is done."""
    return bool(entry.running) and not entry.waiting and all(part.job is not None for part in entry.running)
