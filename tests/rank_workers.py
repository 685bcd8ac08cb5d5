"""All ranks of one side in a process of their own, driven over a pipe; no torch is imported. See ``test_ranks``."""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import numpy as np

from kvcore import Heads, KVManager, Latent, Pool, SideRecord, Topology
from kvcore.faults import FaultPlan
from kvcore.handles import Handle, Receiver, Sender
from tests.helpers import config
from tests.ranks import DIM, FROM, MODELS, TO, TOKENS, Held, group

PATIENCE_S = 60.0
LIMITS = {"bootstrap_s": 30.0, "input_s": 30.0, "transfer_s": 30.0} | {
    "orphan_s": 5.0, "liveness_s": 5.0, "ticket_s": 10.0, "quarantine_s": 60.0
}  # fmt: skip


class Side:
    """The ranks of one side."""

    def __init__(self, side: str, backend: str) -> None:
        self.side, self.backend = side, backend
        self.held: list[Held] = []
        self.managers: list[KVManager] = []
        self.handles: dict[int, list[Handle]] = {}
        self.plans: list[FaultPlan] = []
        self.holds: list[Any] = []
        self.limits: list[dict[str, float]] = []

    def limit(self, each: list[dict[str, float]]) -> None:
        """What the ranks that are opened next have of limits of their own."""
        self.limits = each

    def open(
        self, model: str, order: str, tp: int, pp: int, uneven: bool, ranks: range | None = None, leader: str | None = None, port: int = 0
    ) -> str:
        """Start all ranks, or some beside a ``leader`` in another process, with the leader at a ``port``; the address of the group."""
        every = group(MODELS[model], order, self.side, tp, pp, uneven)
        self.held = every if ranks is None else [every[rank] for rank in ranks]
        for held, limits in itertools.zip_longest(self.held, self.limits, fillvalue={}):
            assert isinstance(held, Held)
            place = Topology(tp_size=tp, tp_rank=held.tp_rank, pp_size=pp, pp_rank=held.pp_rank)
            if self.managers and self.side == "prefill":
                leader = self.managers[0].address
            own = 0 if leader else port
            settings = config(self.side, self.backend, topology=place, bootstrap=leader, bootstrap_port=own, limits=LIMITS | limits)
            self.managers.append(KVManager(settings, list(pools(held))))
            self.plans.append(FaultPlan(seed=1))
            self.managers[-1].add_observer(self.plans[-1])
        return self.managers[0].address

    def close(self) -> None:
        """Stop all ranks."""
        self.plans, self.limits = [], []
        while self.managers:
            self.managers.pop().close()

    def hand_over(self, room: int, prefill: str, layer_by_layer: bool = False) -> None:
        """Open a room on all ranks, and hand over its pages."""
        self.handles[room] = [self._opened(manager, room, prefill) for manager in self.managers]
        for handle, held in zip(self.handles[room], self.held, strict=True):
            names = {name for name, _, _ in held.regions()}
            if isinstance(handle, Receiver):
                handle.receive(dict.fromkeys(names, TO))
                continue
            assert isinstance(handle, Sender)
            if not layer_by_layer:
                handle.send(dict.fromkeys(names, FROM), last=True)
                continue
            for layer in held.layers:
                handle.send({"kv": FROM}, layers=range(layer, layer + 1))
            handle.send(dict.fromkeys(names - {"kv"}, FROM), last=True)

    def _opened(self, manager: KVManager, room: int, prefill: str) -> Handle:
        return manager.sender(room) if self.side == "prefill" else manager.receiver(room, prefill=prefill)

    def ended(self, room: int) -> list[str]:
        """How a room ended on each rank."""
        return [f"{handle.wait(PATIENCE_S).name} {handle.failure or ''}".strip() for handle in self.handles[room]]

    def states(self, room: int) -> list[str]:
        """How a room stands on each rank."""
        return [handle.poll().name for handle in self.handles[room]]

    def abort(self, room: int, rank: int) -> None:
        """Abort a room on one rank."""
        self.handles[room][rank].abort(f"rank {rank} aborts")

    def fail(self, room: int, rank: int, reason: str = "injected") -> None:
        """Have the first ticket of a room fail on one rank."""
        self.plans[rank].fail(reason, room=room, times=1)

    def hold(self, room: int, ranks: Sequence[int] | None = None) -> None:
        """Have no ticket of a room end on any rank, or some, until ``release``."""
        self.holds = [plan.hold(room=room) for rank, plan in enumerate(self.plans) if ranks is None or rank in ranks]

    def release(self) -> None:
        """Let what is held go on."""
        while self.holds:
            self.holds.pop().release()

    def clear(self, room: int) -> None:
        """Clear a room on all ranks."""
        for handle in self.handles.pop(room):
            handle.clear()

    def wrong(self) -> list[int]:
        """Decode ranks whose memory is not what a room should make of it; all are as before a room then."""
        found = [number for number, held in enumerate(self.held) if not np.array_equal(held.memory, held.expected())]
        self.reset()
        return found

    def reset(self) -> None:
        """Make the memory what it was before any room."""
        for held in self.held:
            held.reset()

    def many(self, rooms: list[int], prefill: str, aborted: list[int]) -> None:
        """Open many rooms at once on all ranks and hand over their pages; the ``aborted`` ones are aborted here by one rank, each by
        another."""
        for room in rooms:
            self.hand_over(room, prefill)
            if room in aborted:
                self.abort(room, room % len(self.managers))

    def all_ended(self, rooms: list[int]) -> dict[int, list[str]]:
        """How they ended on each rank."""
        return {room: self.ended(room) for room in rooms}

    def all_clear(self, rooms: list[int]) -> None:
        """Clear them on all ranks."""
        for room in rooms:
            self.clear(room)

    def left(self) -> dict[str, int]:
        """What is still stored of rooms, on all ranks together."""
        sums: dict[str, int] = {}
        for manager in self.managers:
            stats = manager.stats()
            for name in stats.room_stores:
                sums[name] = sums.get(name, 0) + stats.stores[name]
        return {name: count for name, count in sums.items() if count}

    def peers(self) -> int:
        """Instances that are paired, over all ranks."""
        return sum(manager.stats().peers for manager in self.managers)

    def imported(self) -> list[str]:
        """Of the modules that no rank needs, those that are imported."""
        return [name for name in ("torch", "transformers") if name in sys.modules]


def pools(held: Held) -> Iterator[Pool]:
    """A rank's pools."""
    for name, some in itertools.groupby(held.regions(), key=lambda region: region[0]):
        layers, arrays = zip(*[(layer, memory) for _, layer, memory in some], strict=True)
        kv = Heads(held.model.heads, DIM, held.order) if held.model.heads else Latent()  # type: ignore[arg-type]
        yield Pool.from_tensors(name, arrays, page_size=TOKENS, layers=layers, layout=kv if name == "kv" else SideRecord())


class Worker:
    """The other end of the pipe: calls what ``Side`` has, in the process that has it."""

    def __init__(self, pipe: Connection, process: SpawnProcess) -> None:
        self._pipe, self._process = pipe, process

    def kill(self) -> None:
        """End the process as a crash does, and wait until it is gone."""
        self._process.kill()
        self._process.join(PATIENCE_S)

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.begin(name, *arguments)
            return self.end()

        return call

    def begin(self, name: str, *arguments: Any) -> None:
        """Have a call made; its answer is for ``end``."""
        self._pipe.send((name, arguments))

    def end(self) -> Any:
        """The answer of the call that was begun."""
        assert self._pipe.poll(3 * PATIENCE_S), "a worker gave no answer"
        answer, error = self._pipe.recv()
        assert error is None, error
        return answer


def serve(pipe: Connection, side: str, backend: str) -> None:
    """The process: answer calls until the pipe is closed."""
    here = Side(side, backend)
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((getattr(here, name)(*arguments), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))
    here.close()


@contextmanager
def worker(side: str, backend: str) -> Iterator[Worker]:
    """A process for ranks of a side."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, side, backend), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Worker(ours, process)
    finally:
        ours.close()
        process.join(PATIENCE_S)
        if process.is_alive():
            process.kill()
            process.join(PATIENCE_S)


@contextmanager
def workers(backend: str) -> Iterator[tuple[Worker, Worker]]:
    """A process for prefill's ranks and one for decode's."""
    with worker("prefill", backend) as prefill, worker("decode", backend) as decode:
        yield prefill, decode
