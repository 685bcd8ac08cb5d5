"""Release safety with a peer that stands still in the middle of a write (R3, R5), between two processes over a backend whose writes stay
in flight then. Both sides use their pages anew the instant these are release-safe, and whatever arrives after that is late.

A plugin's tests call ``check_nothing_late``; and ``check_late_is_seen``, the test of the test: pages that are released by limit
are counted as unproven, and there the same look finds bytes that came late.
"""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tests.processes.driver import Child, Handle, PoolSpec, until

Side = Literal["prefill", "decode"]

PAGES, PAGE_BYTES = 1024, 64 * 1024
AUX = PoolSpec("aux", pages=4, page_bytes=64, layers=1)
"""What other rooms than the one that is frozen are about."""
OLD, NEW, CLEAN = 0x11, 0xEE, 0x77
"""Every byte of the source, of the source when it is used anew, and of the destination when that is."""
TRIES = 12
"""How often a write is frozen until one is caught in the middle."""
HOLDS_S = 3.0
"""How long the frozen side stands still; longer than ``liveness_s``, so that its peer is lost meanwhile."""
SAFE_S = 20.0
PROOF = {"liveness_s": 1.5, "ticket_s": 20.0, "quarantine_s": 60.0}
NO_PROOF = {"liveness_s": 0.3, "ticket_s": 0.5, "quarantine_s": 1.0}
PATIENT = {"bootstrap_s": 60.0, "input_s": 60.0, "transfer_s": 60.0}


@dataclass(frozen=True)
class Engine:
    """A backend, its options, and variables of the environment that it needs to have writes in flight."""

    backend: str
    options: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Scene:
    """The two processes, and the destination as this process sees it too: it can look at it while they stand still."""

    prefill: Child
    decode: Child
    target: npt.NDArray[np.uint8]
    rooms: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def sides(self) -> dict[Side, Child]:
        return {"prefill": self.prefill, "decode": self.decode}

    def open(self) -> tuple[Handle, Handle]:
        room = next(self.rooms)
        return self.prefill.sender(room), self.decode.receiver(room, self.prefill)

    def written(self) -> int:
        """Bytes of the destination that have been written."""
        return int(np.count_nonzero(self.target))

    def move(self) -> bool:
        """Whether a room of the pool ``aux`` works."""
        sender, receiver = self.open()
        receiver.receive({"aux": [2]})
        sender.send({"aux": [1]}, last=True)
        well = (receiver.wait(SAFE_S), sender.wait(SAFE_S)) == ("SUCCESS", "SUCCESS")
        sender.clear()
        receiver.clear()
        return well


@contextmanager
def scene(engine: Engine, limits: Mapping[str, float]) -> Iterator[Scene]:
    """Two paired processes over an engine; ended with the context, whatever state they are in."""
    children: list[Child] = []
    with tempfile.TemporaryDirectory(prefix="kvcore-") as folder:
        try:
            for side, first in (("prefill", OLD), ("decode", 0)):
                file = Path(folder, side)
                np.memmap(file, np.uint8, "w+", shape=(PAGES, PAGE_BYTES))[:] = first
                children.append(child := Child(engine.env))
                kv = PoolSpec("kv", PAGES, PAGE_BYTES, layers=1, file=str(file))
                options = {"backend": engine.backend, "backend_options": dict(engine.options)}
                child.start(side, [kv, AUX], limits={**PATIENT, **limits}, **options)
            found = Scene(*children, target=np.memmap(Path(folder, "decode"), np.uint8, "r+", shape=(PAGES, PAGE_BYTES)))
            until(found.move, "the processes pair", SAFE_S)
            yield found
        finally:
            for child in children:
                child.end()


def caught(found: Scene, side: Side) -> tuple[Handle, Handle]:
    """A room whose write is under way, with one side frozen in the middle of it: the destination is partly written and stays so."""
    for _ in range(TRIES):
        found.target[:] = 0
        sender, receiver = found.open()
        receiver.receive(range(PAGES))
        assert sender.until("WAITING_FOR_INPUT") == "WAITING_FOR_INPUT"
        sender.send(range(PAGES), last=True)
        while not found.target[0, 0] and sender.child.running:
            threading.Event().wait(0.0005)
        found.sides[side].freeze()
        if _stays_partly_written(found) and (side == "prefill" or found.prefill.work("held").get("ledger_tickets") == 1):
            return sender, receiver
        found.sides[side].thaw()
        for handle in (sender, receiver):
            handle.wait(SAFE_S)
            handle.clear()
    raise AssertionError(f"not one of {TRIES} writes of {PAGES * PAGE_BYTES >> 20} MiB was caught in the middle; is the engine asynchronous?")


def _stays_partly_written(found: Scene) -> bool:
    """Wait for the destination to come to rest: what was already under way between the processes still arrives."""
    before = -1
    while before != (now := found.written()):
        before = now
        threading.Event().wait(0.2)
    return 0 < now < found.target.size


def late_bytes(found: Scene, receiver: Handle) -> int:
    """Bytes that came late: of the new source before the destination was released, or of anything at all after."""
    before = found.decode.work("reused", receiver.name)
    assert before is not None
    return int(before) + int(np.count_nonzero(found.target != CLEAN))


def _reuse_when_safe(sender: Handle, receiver: Handle) -> None:
    sender.child.work("reuse", sender.name, "kv", NEW, 0)
    receiver.child.work("reuse", receiver.name, "kv", CLEAN, NEW)


def _both_reused(found: Scene, sender: Handle, receiver: Handle) -> None:
    for handle in (sender, receiver):
        until(lambda handle=handle: handle.child.work("reused", handle.name) is not None, f"{handle.name} is safe", SAFE_S)  # type: ignore[misc]
    until(found.move, "rooms work again", SAFE_S)  # and whatever was written before has arrived
    until(found.move, "and again", SAFE_S)


def check_nothing_late(engine: Engine, frozen: Side) -> None:
    """While a side stands still the other does not call the pages safe; afterwards both do so by proof, and nothing comes late."""
    with scene(engine, PROOF) as found:
        sender, receiver = caught(found, frozen)
        living = sender if frozen == "decode" else receiver
        _arm_and_abort(found, frozen, sender, receiver)
        deadline = time.monotonic() + HOLDS_S
        while time.monotonic() < deadline:
            assert not living.safe_now(), f"{living.name} is called safe while its peer stands still in the middle of a write"
        found.sides[frozen].thaw()
        _both_reused(found, sender, receiver)
        assert not (sender.unproven or receiver.unproven)
        assert late_bytes(found, receiver) == 0
        for child in (found.prefill, found.decode):
            assert child.work("stats")["released_unproven"] == 0


def check_late_is_seen(engine: Engine, frozen: Side) -> None:
    """With limits that do not wait for proof the living side releases its pages, says and counts that, and bytes come late."""
    with scene(engine, NO_PROOF) as found:
        sender, receiver = caught(found, frozen)
        living = sender if frozen == "decode" else receiver
        _arm_and_abort(found, frozen, sender, receiver)
        until(lambda: living.child.work("reused", living.name) is not None, "the limit passes", SAFE_S)
        assert living.unproven
        assert living.child.work("stats")["released_unproven"] == PAGES
        found.sides[frozen].thaw()
        _both_reused(found, sender, receiver)
        assert late_bytes(found, receiver) > 0


def _arm_and_abort(found: Scene, frozen: Side, sender: Handle, receiver: Handle) -> None:
    ...
