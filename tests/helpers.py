"""What the tests of a running core share: a prefill and a decode manager in one process, short limits, bounded waits."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

import kvcore
from kvcore import Config, Handle, KVManager, Limits, Pool, Receiver, Sender, hookimpl
from kvcore.faults import FaultPlan
from kvcore.hookspecs import Capabilities, Event, Ticket, Transfer
from kvcore.registry import load_backend, plugin_manager
from kvcore.states import RoomKey

BACKENDS = os.environ.get("KVCORE_TEST_BACKENDS", "local").split(",")
"""What tests that hold for every backend run over. The others are ``-k`` away: ``KVCORE_TEST_BACKENDS=nixl pytest -k nixl``."""

ROOT = Path(__file__).resolve().parents[1]

SOON_S = 10.0
"""How long anything that ought to happen at once may take on a busy machine."""

MOMENTS = ("opened", "joined", "published", "in flight")
"""How far ``at`` brings a room."""

Array = npt.NDArray[np.uint8]

P = ParamSpec("P")
T = TypeVar("T")

_numbers = itertools.count(1)
_never = threading.Event()


@dataclass
class Incoming:
    """Rooms in which a side is written to: all, and those to which data may be on its way."""

    receiving: int = 0
    arriving: int = 0


def number() -> int:
    """A room number that no other test uses."""
    return next(_numbers)


def limits(**changes: float | None) -> Limits:
    """Limits short enough for a test, and long enough for a machine that does something else."""
    short: dict[str, Any] = {
        "bootstrap_s": 20.0, "input_s": 20.0, "transfer_s": 20.0, "ticket_s": 5.0, "liveness_s": 10.0, "quarantine_s": 20.0,
        "orphan_s": 1.0, "send_s": 5.0, "drain_s": 0.2,
    }  # fmt: skip
    return Limits(**short | changes)


def able(backend: str) -> Capabilities:
    """What a backend says that its engine can do."""
    return plugin_manager(load_backend(backend))[2].capabilities


def fences(backend: str, gone: bool = False) -> bool:
    """Whether pages that a lost prefill instance could write come free by evidence (R4), which its death (``gone``) may be; else they
    wait for ``quarantine_s``."""
    can = able(backend)
    return can.fences_on_disconnect or (gone and can.needs_process_to_write)


def wait_until(reached: Callable[[], object], timeout_s: float = SOON_S, what: str = "") -> None:
    """Wait for a condition that nothing signals, looking every other millisecond; fails when it does not come in time."""
    deadline = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what or 'the condition'}"
        _never.wait(0.002)


def stays(holds: Callable[[], object], seconds: float) -> None:
    """Check a condition all through a stretch of time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert holds(), f"no longer true before {seconds:g} s had passed"
        _never.wait(0.005)


def full_stores(manager: KVManager) -> dict[str, int]:
    """The per-room stores that are not empty (C7)."""
    stats = manager.stats()
    return {name: stats.stores[name] for name in stats.room_stores if stats.stores[name]}


def stores_empty(manager: KVManager, timeout_s: float = SOON_S) -> None:
    """Wait until every per-room store is empty."""
    deadline = time.monotonic() + timeout_s
    while full := full_stores(manager):
        assert time.monotonic() < deadline, f"still stored after {timeout_s:g} s: {full}"
        _never.wait(0.002)


def own_threads() -> set[threading.Thread]:
    """The threads of all managers that run now."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("kvcore")}


class Flag:
    """A ready event as ``send`` takes it."""

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def query(self) -> bool:
        return self._set


def memory(pages: int, layers: int = 2, page_bytes: int = 64, seed: int | None = None) -> list[Array]:
    """One array a layer of shape ``[pages, page_bytes]``: random with a seed, zeros without."""
    if seed is None:
        return [np.zeros((pages, page_bytes), np.uint8) for _ in range(layers)]
    random = np.random.default_rng(seed)
    return [random.integers(1, 255, (pages, page_bytes), np.uint8) for _ in range(layers)]


@dataclass
class Duo:
    """A prefill and a decode manager, and the memory of their pool ``kv``: what is sent, and where it arrives."""

    prefill: KVManager
    decode: KVManager
    source: list[Array]
    target: list[Array]
    plan: FaultPlan = field(default_factory=FaultPlan)
    """Faults of the prefill side's backend."""

    @property
    def backend(self) -> str:
        """What both are over."""
        return self.prefill.config.backend

    def open(self, room: int | None = None, attempt: int = 0) -> tuple[Sender, Receiver]:
        """Both handles of a room."""
        room = number() if room is None else room
        return self.prefill.sender(room, attempt), self.decode.receiver(room, self.prefill.address, attempt=attempt)

    def pair(self) -> Duo:
        """Have the two paired, so that a test starts from a known state."""
        self.transfer([0], [0])
        self.stores_empty()
        for array in self.target:
            array[:] = 0
        return self

    def transfer(self, mine: Sequence[int], theirs: Sequence[int]) -> None:
        """One room from beginning to end, cleared."""
        sender, receiver = self.open()
        with sender, receiver:
            receiver.receive(theirs)
            sender.send(mine, last=True)
            ended(sender, kvcore.KVPoll.SUCCESS)
            ended(receiver, kvcore.KVPoll.SUCCESS)
            assert self.equal(mine, theirs)

    def equal(self, mine: Sequence[int], theirs: Sequence[int]) -> bool:
        """Whether pages have arrived, in every layer."""
        return all(np.array_equal(a[list(mine)], b[list(theirs)]) for a, b in zip(self.source, self.target, strict=True))

    def untouched(self, theirs: Sequence[int] | None = None) -> bool:
        """Whether nothing was written to these pages (default: to any)."""
        return not any(array[list(theirs)].any() if theirs is not None else array.any() for array in self.target)

    def stores_empty(self, timeout_s: float = SOON_S) -> None:
        """Wait until both sides' per-room stores are empty."""
        stores_empty(self.prefill, timeout_s)
        stores_empty(self.decode, timeout_s)


def ended(handle: kvcore.Handle, state: kvcore.KVPoll, timeout_s: float = SOON_S) -> None:
    """Wait for a terminal state."""
    found = handle.wait(timeout_s)
    assert found is state, f"{handle} instead of {state.name}: {handle.failure}"


def at(pair: Duo, moment: str, room: int | None = None, pages: Sequence[int] = (3, 8, 1)) -> tuple[Sender, Receiver]:
    """Both handles of a room that has come as far as ``moment``; a write in flight is held until the plan is healed."""
    sender, receiver = pair.open(room)
    if moment == "opened":
        return sender, receiver
    wait_until(lambda: receiver.poll() is kvcore.KVPoll.WAITING_FOR_INPUT)
    if moment == "joined":
        return sender, receiver
    receiver.receive(pages)
    wait_until(lambda: sender.poll() is kvcore.KVPoll.WAITING_FOR_INPUT)
    if moment == "published":
        return sender, receiver
    hold = pair.plan.hold(room=sender.room)
    sender.send(pages)
    wait_until(lambda: hold.held == 1 and receiver.poll() is kvcore.KVPoll.TRANSFERRING)
    return sender, receiver


def config(role: str, backend: str = "local", **settings: Any) -> Config:
    """A manager's settings with short limits; ``limits`` may be a dict of changes."""
    chosen = settings.pop("limits", {})
    return Config(role=role, backend=backend, limits=chosen if isinstance(chosen, Limits) else limits(**chosen), **settings)  # type: ignore[arg-type]


def manager(role: str, arrays: list[Array], **settings: Any) -> KVManager:
    """A manager with the pool ``kv`` over these arrays."""
    return KVManager(config(role, **settings), [Pool.from_tensors("kv", arrays, page_size=16)])


def meet(pair: Duo) -> None:
    """Have the two paired where limits of theirs may end a room before it has succeeded."""
    sender, receiver = pair.open()
    with sender, receiver:
        wait_until(lambda: receiver.poll() is not kvcore.KVPoll.BOOTSTRAPPING and pair.prefill.stats().peers and pair.decode.stats().peers)
        receiver.abort()  # which knows both lifetimes, so that nothing is kept of either
        ended(sender, kvcore.KVPoll.FAILED)
    pair.stores_empty()


def cpu_s() -> float:
    """Seconds of CPU that the threads of all managers running now have taken."""
    return sum(_cpu_s(thread) for thread in own_threads())


def _cpu_s(thread: threading.Thread) -> float:
    try:
        on_cpu_ns = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text(encoding="ascii").split()[0]
    except OSError:  # it has ended
        return 0.0
    return int(on_cpu_ns) / 1e9


@contextmanager
def duo(
    backend: str = "local",
    pages: int = 32,
    layers: int = 2,
    page_bytes: int = 64,
    own: Mapping[str, Mapping[str, float | None]] | None = None,
    **changes: float | None,
) -> Iterator[Duo]:
    """A prefill and a decode manager over one backend; ``changes`` are of the limits, ``own`` those of one role. Faults are healed
    before they close."""
    source, target = memory(pages, layers, page_bytes, seed=7), memory(pages, layers, page_bytes)
    mine, theirs = ({**changes, **(own or {}).get(role, {})} for role in ("prefill", "decode"))
    plan = FaultPlan(seed=1)
    with (
        manager("prefill", source, backend=backend, limits=mine) as prefill,
        manager("decode", target, backend=backend, limits=theirs) as decode,
    ):
        prefill.add_observer(plan)
        try:
            yield Duo(prefill, decode, source, target, plan)
        finally:
            plan.heal()
            both = [threading.Thread(target=each.close) for each in (prefill, decode)]  # at once: an engine may take a second to stop
            for each in both:
                each.start()
            for each in both:
                each.join()


class Pace:
    """How long calls of the scheduler's thread take: ``pace(handle.poll)``. Beside them a thread of its own only waits a moment again and
    again, and so tells how long the machine, or the interpreter's lock, keeps just anybody."""

    QUICK_S, MOST_S, WATCH_S, MANY = 0.005, 0.25, 120.0, 20

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._late_s = 0.0
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="pace", daemon=True).start()

    def _watch(self) -> None:
        begun = now = time.monotonic()
        while not self._over.wait(self.QUICK_S) and now - begun < self.WATCH_S:
            before, now = now, time.monotonic()
            self._late_s = max(self._late_s, now - before - self.QUICK_S)

    def __call__(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make a call and time it."""
        begun = time.monotonic()
        try:
            return call(*args, **kwargs)
        finally:
            self.seconds.setdefault(getattr(call, "__name__", "call"), []).append(time.monotonic() - begun)

    def check(self) -> None:
        """None has waited for anybody: of many of a kind most were quick, of many in all nearly every one, and none took much longer than
        the machine keeps just anybody."""
        self._over.set()
        for kind, took in self.seconds.items():
            assert len(took) < self.MANY or sorted(took)[len(took) // 2] < self.QUICK_S, f"{kind}: {max(took):.3f} s at most of {len(took)}"
        every = sorted(second for took in self.seconds.values() for second in took)
        assert len(every) < self.MANY or every[int(len(every) * 0.95)] < self.QUICK_S, every[-20:]
        assert every[-1] < self.MOST_S + 3 * self._late_s, (self._late_s, every[-10:])


class Events:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, Event]] = []

    @hookimpl
    def kvcore_on_event(self, event: Event) -> None:
        self.seen.append((time.monotonic(), event))

    def states(self, handle: Handle) -> list[str]:
        """The states that a room passed through."""
        return [
            str(event.details["state"])
            for _, event in list(self.seen)
            if event.name == "status" and event.room and event.room.number == handle.room
        ]

    def reached(self, handle: Handle, state: str) -> float:
        """When a room reached a state, without anybody polling."""
        wait_until(lambda: state in self.states(handle), what=f"{state} of room {handle.room}")
        return next(
            when for when, event in self.seen
            if event.name == "status" and event.room is not None and event.room.number == handle.room and event.details["state"] == state
        )  # fmt: skip


class Calls:
    """An observer that keeps what the backend is asked to do."""

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []
        self.aborts: list[tuple[RoomKey, int]] = []
        self.clears: list[RoomKey] = []

    @hookimpl(tryfirst=True)
    def kvcore_transfer(self, transfer: Transfer) -> None:
        self.transfers.append(transfer)

    @hookimpl(tryfirst=True)
    def kvcore_abort(self, room: RoomKey, tickets: list[Ticket]) -> None:
        self.aborts.append((room, len(tickets)))

    @hookimpl(tryfirst=True)
    def kvcore_clear(self, room: RoomKey) -> None:
        self.clears.append(room)
