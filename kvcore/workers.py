"""Workers for a backend whose transfer blocks (B5, B6): a lane of waiting calls per peer, and few threads that serve all lanes in turn.

The last free worker is kept for a peer that has none, so an unreachable peer stalls no other. A call that is written off no longer
counts and its worker is replaced, until too many are stuck: then that peer, or everybody, waits until some return.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from kvcore.logs import about

log = logging.getLogger("kvcore.workers")

IDLE_S = 5.0
"""After so long without work a worker ends; the next call starts another."""
STUCK_PER_WORKER = 8
"""Most calls written off, times ``parallel``; half of them towards one peer."""

_numbers = itertools.count(1)


@dataclass(eq=False, slots=True)
class Job:
    """A call towards a peer, made by ``work`` on a worker."""

    peer: str
    work: Callable[[], None]


class Workers:
    """At most ``parallel`` jobs run at once, those apart that were written off; of these there are at most ``most_stuck``."""

    def __init__(self, parallel: int, most_stuck: int) -> None:
        self._parallel, self._most_stuck = parallel, most_stuck
        self._lock = threading.Lock()
        self._called = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)
        self._lanes: OrderedDict[str, deque[Job]] = OrderedDict()
        self._running: set[Job] = set()
        self._stuck: set[Job] = set()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._stopping = False

    def put(self, job: Job) -> None:
        """Have a job done in its peer's turn. Never blocks."""
        with self._lock:
            if not self._stopping:
                self._lanes.setdefault(job.peer, deque()).append(job)
                self._call_worker()

    def take_out(self, job: Job) -> bool:
        """Whether the job still waited; it will not be done."""
        with self._lock:
            lane = self._lanes.get(job.peer)
            if lane is None or job not in lane:
                return False
            lane.remove(job)
            self._drop_if_empty(job.peer)
            return True

    def write_off(self, job: Job) -> None:
        """Count a job no longer, and replace its worker. Harmless for one that has ended."""
        with self._lock:
            if job in self._running:
                self._running.remove(job)
                self._stuck.add(job)
                self._call_worker()

    def stop(self, timeout_s: float) -> bool:
        """Begin nothing more, and wait until no job runs but those written off; True if there are none of these either. Idempotent."""
        with self._lock:
            self._stopping = True
            self._lanes.clear()
            self._called.notify_all()
            self._ended.wait_for(lambda: not self._running, timeout_s)
            return not (self._running or self._stuck)

    def running(self) -> list[threading.Thread]:
        """The threads that have not ended."""
        with self._lock:
            return list(self._threads)

    @property
    def idle(self) -> bool:
        """Whether no job waits, runs, or was written off and has not returned. For who alone puts jobs."""
        with self._lock:
            return not (self._lanes or self._running or self._stuck)

    @property
    def healthy(self) -> bool:
        """Whether a new job of any peer would get a worker."""
        with self._lock:
            by_peer = Counter(job.peer for job in self._stuck)
            return len(self._stuck) < self._most_stuck and all(stuck < self._most_of_one for stuck in by_peer.values())

    def sizes(self) -> dict[str, int]:
        """Threads, peers with jobs that wait, and jobs written off that have not returned."""
        with self._lock:
            return {"workers": len(self._threads), "worker_lanes": len(self._lanes), "workers_stuck": len(self._stuck)}

    # --- with the lock held

    @property
    def _most_of_one(self) -> int:
        return max(1, self._most_stuck // 2)

    def _call_worker(self) -> None:
        """See that a worker comes for what may run now."""
        if self._stopping or self._next_peer() is None:
            return
        if self._idle:
            return self._called.notify()
        if len(self._threads) > len(self._running) + len(self._stuck):
            return  # one is on its way, and will call the next
        thread = threading.Thread(target=self._run, name=f"kvcore-worker-{next(_numbers)}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            log.error("no worker can be started (%s); %d peers wait for one", error, len(self._lanes))
        else:
            self._threads.add(thread)

    def _next_peer(self) -> str | None:
        free = self._parallel - len(self._running)
        if free < 1 or len(self._stuck) >= self._most_stuck:
            return None
        return next((peer for peer in self._lanes if self._may_run(peer, free)), None)

    def _may_run(self, peer: str, free: int) -> bool:
        served = free > 1 or not any(job.peer == peer for job in self._running)
        return served and sum(job.peer == peer for job in self._stuck) < self._most_of_one

    def _next_job(self) -> Job | None:
        peer = self._next_peer()
        if peer is None:
            return None
        job = self._lanes[peer].popleft()
        self._lanes.move_to_end(peer)
        self._drop_if_empty(peer)
        self._running.add(job)
        self._call_worker()  # for the one behind it, if that may run as well
        return job

    def _drop_if_empty(self, peer: str) -> None:
        if not self._lanes[peer]:
            del self._lanes[peer]

    # --- on a worker

    def _run(self) -> None:
        while self._serve():
            pass

    def _serve(self) -> bool:
        """Do one job; False if there was none for long."""
        job = self._wait_for_job()
        if job is None:
            return False
        try:
            job.work()
        except BaseException:
            log.exception("a job towards %s failed; its worker goes on", job.peer, extra=about(peer=job.peer))
        with self._lock:
            self._running.discard(job)
            self._stuck.discard(job)
            self._ended.notify_all()
        return True

    def _wait_for_job(self) -> Job | None:
        waited = False
        with self._lock:
            while not self._stopping:
                job = self._next_job()
                if job is not None:
                    return job
                if waited:
                    break
                self._idle += 1
                waited = not self._called.wait(IDLE_S)
                self._idle -= 1
            self._threads.discard(threading.current_thread())
            self._ended.notify_all()
        return None
