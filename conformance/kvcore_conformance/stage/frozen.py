"""Release safety with a peer that stands still in the middle of a write (R3, R5), between two processes over a backend whose writes stay
in flight then. Both sides use their pages anew the instant these are release-safe, and whatever arrives after that is late.

A plugin's tests call ``check_nothing_late``; and ``check_late_is_seen``, the test of the test: pages that are released by limit
are counted as unproven, and there the same look finds bytes that came late.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvcore_conformance.stage.crew import Crew
from kvcore_conformance.stage.driver import Child, Handle, PoolSpec
from kvcore_conformance.stage.waits import stays, until
from kvcore_conformance.subject import Subject

Side = Literal["prefill", "decode"]
SIDES: tuple[Side, ...] = ("decode", "prefill")
Memory = npt.NDArray[np.uint8]

PAGES, PAGE_BYTES = 1024, 64 * 1024
AUX = PoolSpec("aux", pages=4, page_bytes=64, layers=1)
"""What other rooms than the one that is frozen are about."""
OLD, NEW, CLEAN = 0x11, 0xEE, 0x77
"""Every byte of the source, of the source when it is used anew, and of the destination when that is."""
TRIES = 12
"""How often a write is frozen until one is caught in the middle."""
LOOKS = 2
"""How often a write is frozen over an engine that may not wait for the frozen side."""
HOLDS_S = 3.0
"""How long the frozen side stands still; longer than ``liveness_s``, so that its peer is lost meanwhile."""
SAFE_S = 20.0
PROOF = {"liveness_s": 1.5, "ticket_s": 20.0, "quarantine_s": 60.0}
NO_PROOF = {"liveness_s": 0.3, "ticket_s": 0.5, "quarantine_s": 1.0}
PATIENT = {"bootstrap_s": 60.0, "input_s": 60.0, "transfer_s": 60.0}


@dataclass
class Scene:
    """The two processes, and their memory as this process sees it too: it can look at it while they stand still."""

    prefill: Child
    decode: Child
    source: Memory
    target: Memory
    rooms: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def side(self, name: Side) -> Child:
        return self.prefill if name == "prefill" else self.decode

    def open(self) -> tuple[Handle, Handle]:
        room = next(self.rooms)
        return self.prefill.sender(room), self.decode.receiver(room, self.prefill)

    def moves(self) -> bool:
        """Whether a room of the pool ``aux`` works."""
        sender, receiver = self.open()
        receiver.receive({"aux": [2]})
        sender.send({"aux": [1]}, last=True)
        well = (receiver.wait(SAFE_S), sender.wait(SAFE_S)) == ("SUCCESS", "SUCCESS")
        sender.clear()
        receiver.clear()
        return well


@contextmanager
def scene(subject: Subject, limits: Mapping[str, float], crew: Crew | None = None) -> Iterator[Scene]:
    """Two paired processes over an engine; ended with the context, whatever state they are in. A crew keeps their last words."""
    config: dict[str, Any] = {"backend": subject.backend, "backend_options": dict(subject.options), "limits": {**PATIENT, **limits}}
    with tempfile.TemporaryDirectory(prefix="kvcore-") as folder, ExitStack() as stack:
        memory, children = list[Memory](), list[Child]()
        for side in ("prefill", "decode"):
            file = str(Path(folder, side))
            memory.append(np.memmap(file, np.uint8, "w+", shape=(PAGES, PAGE_BYTES)))
            children.append(child := Child(subject.env))
            stack.callback(child.end)
            child.start(side, [PoolSpec("kv", PAGES, PAGE_BYTES, layers=1, file=file), AUX], **config)
        if crew is not None:
            stack.enter_context(crew.telling(children))
        found = Scene(children[0], children[1], memory[0], memory[1])
        until(found.moves, "the processes pair", SAFE_S)
        for child in children:
            _give_way(child)
        yield found


def _give_way(child: Child) -> None:
    """Have a child's threads step back for this process, which must be there when the first byte arrives, on a busy machine too."""
    for thread in Path(f"/proc/{child.pid}/task").iterdir():
        os.setpriority(os.PRIO_PROCESS, int(thread.name), 5)


@dataclass(frozen=True)
class Caught:
    """A room of which one side stands still in the middle of the write. Each side's pages are used anew once they are release-safe."""

    scene: Scene
    sender: Handle
    receiver: Handle
    frozen: Child

    @property
    def living(self) -> Handle:
        """The handle of the side that goes on."""
        return self.receiver if self.frozen is self.sender.child else self.sender

    def reused(self, *handles: Handle) -> None:
        """Wait until the pages of handles are used anew."""
        for handle in handles:
            whose = "receiver" if handle is self.receiver else "sender"
            until(lambda handle=handle: _strangers(handle) is not None, f"the {whose}'s pages are safe", SAFE_S)  # type: ignore[misc]

    def clear(self) -> None:
        self.sender.clear()
        self.receiver.clear()

    def late_bytes(self) -> int:
        """Thaw, and count what came late, when both sides' pages are used anew: bytes of the new source before the destination was
        released, or of anything after."""
        self.frozen.thaw()
        for _ in range(2):  # the sides pair anew; and then a write is behind all that was to be written before
            until(self.scene.moves, "rooms work again", SAFE_S)
            self.reused(self.sender, self.receiver)
        return self._late()

    def arrived_late(self) -> int:
        """The same when the destination is used anew; the source may have to wait, if its engine cannot say that it has let go."""
        self.frozen.thaw()
        for _ in range(2):
            until(self.scene.moves, "rooms work again", SAFE_S)
            self.reused(self.receiver)
        return self._late()

    def _late(self) -> int:
        return (_strangers(self.receiver) or 0) + int(np.count_nonzero(self.scene.target != CLEAN))


@contextmanager
def standing_still(child: Child) -> Iterator[None]:
    """A process that is stopped within the context."""
    child.freeze()
    try:
        yield
    finally:
        child.thaw()


def catch(scene: Scene, side: Side) -> Caught:
    """Start writes and freeze a side, until one is caught in the middle: it is in flight, and the destination partly written."""
    seen = []
    for _ in range(TRIES):
        caught, found = _strike(scene, side)
        if _in_the_middle(scene, *found):
            return caught
        seen.append((*found, caught.living.poll()))
        caught.frozen.thaw()
        caught.reused(caught.sender, caught.receiver)
        caught.clear()
    raise AssertionError(f"no write was caught in the middle, do they stay in flight? of {scene.target.size} bytes, tickets, state: {seen}")


def _strike(scene: Scene, side: Side) -> tuple[Caught, tuple[int, int]]:
    """Freeze a side when the first byte has arrived; also how many bytes were written then, and how many tickets were left: a prefill
    side that stands still cannot be asked, and counts as one, so there only the bytes tell that the write has not ended."""
    scene.source[:], scene.target[:] = OLD, 0
    caught = Caught(scene, *_under_way(scene), scene.side(side))
    caught.frozen.freeze()
    return caught, (_at_rest(scene.target), 1 if side == "prefill" else scene.prefill.work("stats")["tickets"])


def _in_the_middle(scene: Scene, written: int, tickets: int) -> bool:
    return 0 < written < scene.target.size // 2 and tickets == 1  # of the second half sockets hold but a part


def _under_way(scene: Scene) -> tuple[Handle, Handle]:
    """A room whose first byte has arrived."""
    sender, receiver = scene.open()
    receiver.receive(range(PAGES))
    until(lambda: not receiver.safe_now(), "the destination is published: before that its pages count as safe", SAFE_S)
    receiver.child.work("reuse", receiver.name, "kv", CLEAN, NEW)
    gate = f"gate of {sender.name}"
    sender.send(range(PAGES), last=True, gate=gate)
    sender.child.work("reuse", sender.name, "kv", NEW, 0)
    sender.child.open_gate(gate)
    deadline = time.monotonic() + SAFE_S
    while not scene.target[0, 0]:
        assert time.monotonic() < deadline, f"nothing was written: {sender.poll()}, {receiver.poll()}"
        threading.Event().wait(0.0005)
    return sender, receiver


def _at_rest(target: Memory) -> int:
    """Bytes written, once no more come: what is under way between the processes still arrives while the writer stands still."""
    before = -1
    while before != (now := int(np.count_nonzero(target))):
        before = now
        threading.Event().wait(0.2)
    return now


def _strangers(handle: Handle) -> int | None:
    found: int | None = handle.child.work("reused", handle.name)
    return found


def check_nothing_late(subject: Subject, sides: Sequence[Side] = SIDES) -> None:
    """While a side stands still the other does not call its pages safe; after that both do, by proof, and nothing comes late."""
    with scene(subject, PROOF) as found:
        for side in sides:
            caught = catch(found, side)
            _kept_waiting(caught, side)
            assert caught.late_bytes() == 0
            assert not (caught.sender.unproven or caught.receiver.unproven)
            assert [child.work("stats")["released_unproven"] for child in (found.prefill, found.decode)] == [0, 0]
            caught.clear()


def _kept_waiting(caught: Caught, side: Side) -> None:
    """The living side ends the room, and its pages are not safe as long as the other stands still."""
    caught.living.abort("enough")
    stays(lambda: not caught.living.safe_now(), f"{side} stands still in the middle of a write, and no page is safe", HOLDS_S)


def check_any_engine(subject: Subject, side: Side, fences: bool, crew: Crew | None = None) -> None:
    """The same of one side, over an engine of which is not known whether its writes go on without that side: a few writes are frozen,
    wherever each is then. ``fences``: the living side may prove by itself that nothing of the other can arrive."""
    with scene(subject, PROOF, crew) as found:
        for _ in range(LOOKS):
            caught, seen = _strike(found, side)
            if not _in_the_middle(found, *seen):
                pass  # it has ended, or ends, without the other side
            elif fences:
                caught.living.abort("enough")
                assert caught.living.safe(SAFE_S), f"{side} was fenced, and the other side's pages are not safe"
            else:
                _kept_waiting(caught, side)
            late = caught.arrived_late()
            assert late == 0, f"{late} bytes came after {side} had stood still, into pages or from pages that were safe"
            assert not (caught.sender.unproven or caught.receiver.unproven)
            caught.clear()


def check_late_is_seen(subject: Subject, sides: Sequence[Side] = SIDES) -> None:
    """With limits that do not wait for proof the living side gives its pages up, says and counts that, and bytes come late."""
    with scene(subject, NO_PROOF) as found:
        for side in sides:
            caught = catch(found, side)
            before = caught.living.child.work("stats")["released_unproven"]
            caught.living.abort("enough")
            caught.reused(caught.living)
            assert caught.living.unproven
            assert caught.living.child.work("stats")["released_unproven"] == before + PAGES
            assert caught.late_bytes() > 0
            caught.clear()
