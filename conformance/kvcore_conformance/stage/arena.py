"""A prefill and a decode process with their memory under the oracle's eyes, and the steps that most tests take with them."""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcore_conformance.stage.crew import Crew
from kvcore_conformance.stage.driver import LIMITS as LIMITS, Child, Handle, PoolSpec
from kvcore_conformance.stage.oracle import Memory, Pages, moved
from kvcore_conformance.stage.waits import SOON_S, STEP_S, until

POOLS = (PoolSpec("kv", pages=48, page_bytes=4096, layers=2), PoolSpec("aux", pages=8, page_bytes=64, layers=1))

BRIEF = {**LIMITS, "liveness_s": 2.5, "ticket_s": 1.5, "quarantine_s": 4.2}
"""For tests that wait until ``quarantine_s`` has passed."""

MINE, THEIRS = (3, 30, 31, 32, 7), (8, 40, 2, 3, 21)
"""Pages of a room: scattered, with a run on either side that the other lacks."""
MOMENTS = ("opened", "joined", "published", "in flight", "succeeded", "failed", "cleared")
"""How far ``Pair.at`` brings a room."""
LIVE, ENDED = MOMENTS[:4], MOMENTS[4:]
SIDES = ("prefill", "decode")

_numbers = itertools.count(1)


def number() -> int:
    """A room number that nothing else uses."""
    return next(_numbers)


@dataclass
class Room:
    """Both handles of a room, and the pages that it moves."""

    sender: Handle
    receiver: Handle
    mine: Pages = field(default_factory=lambda: {"kv": MINE})
    theirs: Pages = field(default_factory=lambda: {"kv": THEIRS})

    @property
    def number(self) -> int:
        return self.sender.room

    def side(self, name: str) -> Handle:
        """The handle of a side."""
        return self.sender if name == "prefill" else self.receiver

    def other(self, name: str) -> Handle:
        """The handle of the other side."""
        return self.receiver if name == "prefill" else self.sender

    def receive(self) -> None:
        """Publish the destination."""
        self.receiver.receive({pool: list(pages) for pool, pages in self.theirs.items()})

    def send(self, last: bool = True, **how: Any) -> None:
        """Hand the source over as one chunk."""
        self.sender.send({pool: list(pages) for pool, pages in self.mine.items()}, last=last, **how)

    def ends(self, state: str, timeout: float = SOON_S) -> None:
        """Both sides end so."""
        found = self.receiver.wait(timeout), self.sender.wait(timeout)
        assert found == (state, state), f"receiver and sender ended as {found}: {self.reasons()}"

    def reasons(self) -> list[str]:
        """Why it failed, as both sides tell it."""
        return [handle.failure.text for handle in (self.receiver, self.sender) if handle.poll() == "FAILED"]

    def clear(self) -> None:
        """Clear both sides."""
        self.sender.clear()
        self.receiver.clear()


@dataclass
class Pair:
    """A prefill and a decode manager over the subject, each in its process, and the memory of both."""

    prefill: Child
    decode: Child
    source: Memory
    target: Memory

    def side(self, name: str) -> Child:
        """The process of a side."""
        return self.prefill if name == "prefill" else self.decode

    def open(self, room: int | None = None, attempt: int = 0) -> Room:
        """Both handles of a room, a new one if none is named."""
        room = number() if room is None else room
        return Room(self.prefill.sender(room, attempt), self.decode.receiver(room, self.prefill, attempt))

    def fresh(self) -> None:
        """New random pages at the source, and nothing at the target."""
        self.source.poke(number())
        self.target.wipe()

    def expect(self, room: Room) -> None:
        """The oracle expects what the room moves."""
        moved(self.source, self.target, room.mine, room.theirs)

    def accept(self, room: Room) -> None:
        """Whatever a failed room has left in its pages is right."""
        for pool, pages in room.theirs.items():
            self.target.accept(pool, pages)

    def intact(self) -> None:
        """Every byte of both sides is what it must be; in the end, since that it is so at once is a rule of its own (R6)."""
        self.source.intact()
        self.target.gets_right()
        self.target.intact()

    def transfer(self, mine: Pages | None = None, theirs: Pages | None = None) -> None:
        """A room from beginning to end; every byte of both sides is right after it."""
        room = self.open()
        if mine is not None and theirs is not None:
            room.mine, room.theirs = mine, theirs
        self.expect(room)
        room.receive()
        room.send()
        room.ends("SUCCESS")
        self.intact()
        room.clear()

    def at(self, moment: str, room: int | None = None, attempt: int = 0) -> Room:
        """A room that has come as far as ``moment``. In flight: the write is held back until ``release`` or the end of the test."""
        found = self.open(room, attempt)
        if moment == "opened":
            return found
        assert found.receiver.until("WAITING_FOR_INPUT") == "WAITING_FOR_INPUT"
        if moment == "joined":
            return found
        found.receive()
        assert found.sender.until("WAITING_FOR_INPUT") == "WAITING_FOR_INPUT"
        if moment == "published":
            return found
        if moment == "in flight":
            self.prefill.hold(found.number)
            found.send()
            until(lambda: self.prefill.held_writes(found.number) == 1, "the write is under way")
            assert found.receiver.until("TRANSFERRING") == "TRANSFERRING"
            return found
        if moment == "failed":
            found.sender.abort("enough of it")
            found.ends("FAILED")
            return found
        self.expect(found)
        found.send()
        found.ends("SUCCESS")
        if moment == "cleared":
            found.clear()
        return found

    def release(self, room: Room) -> None:
        """Let the held write of a room go on."""
        self.prefill.release(room.number)

    def over(self, room: Room) -> None:
        """Hold nothing of an ended room back any more, wait until nothing touches its pages, and clear it."""
        self.prefill.heal()
        for handle in (room.sender, room.receiver):
            handle.safe()
        room.clear()

    def empties(self, timeout: float = SOON_S) -> None:
        """Every per-room store of both sides gets empty (C7); what the backend holds is another matter (B4)."""
        for child in (self.prefill, self.decode):
            deadline = time.monotonic() + timeout
            while kept := {name: size for name, size in child.work("held").items() if name != "backend_rooms"}:
                assert time.monotonic() < deadline, f"{timeout:g} s after all was cleared {child.role} keeps {kept}"
                threading.Event().wait(STEP_S)

    @property
    def well(self) -> bool:
        """Whether both processes still serve, after faults were healed."""
        try:
            for child in (self.prefill, self.decode):
                child.heal()
            return self.prefill.running and self.decode.running
        except (AssertionError, OSError):
            return False


@contextmanager
def paired(crew: Crew, pools: Sequence[PoolSpec] = POOLS, meet: bool = True, **config: Any) -> Iterator[Pair]:
    """Two processes of a crew, a manager in each, which know each other (``meet``); ``config`` is both managers'."""
    config["limits"] = {**LIMITS, **config.get("limits", {})}
    with tempfile.TemporaryDirectory(prefix="kvcore-", dir=shared()) as folder, crew.lend(2) as (prefill, decode):
        places = [Path(folder, side) for side in ("prefill", "decode")]
        for place in places:
            place.mkdir()
        source, target = (Memory(place, pools) for place in places)
        prefill.start("prefill", source.specs, **config)
        decode.start("decode", target.specs, **config)
        pair = Pair(prefill, decode, source, target)
        pair.fresh()
        if meet:
            pair.transfer()
        yield pair


def shared() -> str | None:
    """Where files are memory, if there is such a place: some engines do not register pages of a disk's files."""
    place = "/dev/shm"  # nosec B108 # files in it are made by tempfile
    return place if Path(place).is_dir() else None
