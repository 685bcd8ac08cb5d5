"""The rooms of a soak: each has a fate, which is a list of steps; one or two are taken at each turn, so that many rooms are under way."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from kvcore_conformance.stage.driver import ChildError, Handle

from benchmarks.soak.peers import LAYERS, PLOT, Lot, Peer

MOST = 10
"""Rooms under way between two processes that are here."""
END_S, SAFE_S = 30.0, 30.0
"""How long a room to which all was done may take to end, and then to become release-safe: above the sum of its limits."""
FATES = {"whole": 30, "chunks": 25, "layers": 12, "aborted": 5, "cleared": 3, "rejected": 3, "not joined": 2, "fault": 20}
PASSING: dict[str, dict[str, Any]] = {
    "delay": {"seconds": 0.3}, "late end": {"kind": "delay", "seconds": 0.3, "hook": "kvcore_poll"}, "retry": {}, "hold": {},
}  # fmt: skip
"""Faults after which a room succeeds all the same."""
ENDING: dict[str, dict[str, Any]] = {
    "fail": {}, "fail unproven": {"kind": "fail", "quiescent": False}, "refused": {"kind": "fail", "hook": "kvcore_transfer"},
    "raise_": {"error": "OSError"}, "partial": {}, "drop_done": {},
}  # fmt: skip
"""Faults by which a room with pages fails."""
Bytes = npt.NDArray[np.uint8]


@dataclass
class Half:
    """One side of a room: its handle, if it is opened, what that says, and the pages lent to it."""

    peer: Peer
    lot: Lot
    handle: Handle | None = None
    state: str = ""
    safe: bool = False
    cleared: bool = False
    over: bool = False
    """Its pages are used anew, or its process is gone."""

    @property
    def ended(self) -> bool:
        return self.over or self.handle is None or self.state in ("SUCCESS", "FAILED")


@dataclass
class Room:
    """A room and what is still to be done to it."""

    number: int
    attempt: int
    fate: str
    sender: Half
    receiver: Half
    content: Bytes
    record: str
    steps: deque[tuple[Half, Callable[[], None]]] = field(default_factory=deque)
    fault: str = ""
    disturbed: bool = False
    """A process of it was killed, stood still for long, or was closed meanwhile."""
    since: float = 0.0
    """When something was done or seen last."""
    judged: bool = False

    @property
    def halves(self) -> tuple[Half, Half]:
        return self.sender, self.receiver

    def __str__(self) -> str:
        where = f"{self.sender.peer.name} -> {self.receiver.peer.name}"
        kind = f"{self.fate} {self.fault}".strip()
        return f"room {self.number}.{self.attempt} ({kind}, {len(self.sender.lot.pages)} pages, {where})"


class Rooms:
    """All rooms under way. ``wrong`` has what was seen to be wrong, and the counters what was done."""

    def __init__(self, seed: int) -> None:
        self.wrong: list[str] = []
        self.outcomes, self.codes, self.faults = Counter[str](), Counter[str](), Counter[str]()
        self.bytes_verified = 0
        self.stalls = 0
        self._random = random.Random(seed)
        self._numbers = itertools.count(1)
        self._rooms: list[Room] = []
        self._turned = time.monotonic()

    @property
    def under_way(self) -> int:
        """Rooms that are not over."""
        return len(self._rooms)

    def disturb(self, peer: Peer) -> None:
        """Something is done to a process: its rooms need not succeed."""
        for room in self._rooms:
            if peer in (room.sender.peer, room.receiver.peer):
                room.disturbed, room.since = True, time.monotonic()

    def turn(self) -> None:
        """Look at all rooms, and take a step or two of each."""
        now = time.monotonic()
        if now - self._turned > 2.0:  # this machine stood still: limits may have passed between two steps
            self.stalls += 1
            for room in self._rooms:
                room.disturbed = True
        self._turned = now
        for peer in {half.peer for room in self._rooms for half in room.halves}:
            self._look(peer)
        for room in self._rooms:
            try:
                self._take_steps(room)
                self._follow(room)
            except ChildError as error:
                self.note(f"{room}: {error}")
        self._rooms = [room for room in self._rooms if not all(half.over for half in room.halves)]

    def note(self, text: str) -> None:
        """Something is wrong."""
        self.wrong.append(text)

    # --- what has become of them

    def _look(self, peer: Peer) -> None:
        """Ask a process for all its handles at once."""
        mine = [half for room in self._rooms for half in room.halves if half.peer is peer and not half.over]
        if peer.state == "gone":
            for half in mine:
                half.over = True
        asked = [half for half in mine if half.handle is not None]
        if peer.state == "here" and asked:
            names = [half.handle.name for half in asked if half.handle is not None]
            for half, (state, safe) in zip(asked, peer.child.work("look", names), strict=True):
                if half.state in ("SUCCESS", "FAILED") and state != half.state:
                    self.note(f"{peer.name}: a room that was {half.state} is {state} (S1)")
                half.state, half.safe = state, safe

    def _take_steps(self, room: Room) -> None:
        for _ in range(self._random.choice((0, 1, 1, 2))):
            if not room.steps:
                return
            half, step = room.steps[0]
            if half.peer.state in ("frozen", "closing"):
                return
            room.steps.popleft()
            room.since = time.monotonic()
            if half.peer.state == "here":
                step()

    def _follow(self, room: Room) -> None:
        if room.steps or any(half.peer.state in ("frozen", "closing") for half in room.halves if not half.over):
            return
        waited = time.monotonic() - room.since
        if not room.judged:
            if all(half.ended for half in room.halves):
                self._judge(room)
                room.judged, room.since = True, time.monotonic()
            elif waited > END_S:
                self._stuck(room, f"has not ended after {waited:.0f} s: {room.sender.state}, {room.receiver.state} (S8)")
            return
        for half in room.halves:
            if half.handle is None and not half.over:
                half.peer.give_back(half.lot)
                half.over = True
            elif not half.over and half.handle is not None:
                self._let_go(half, half.handle)
        if waited > SAFE_S and not all(half.over for half in room.halves):
            self._stuck(room, f"is not release-safe after {waited:.0f} s: {room.sender.safe}, {room.receiver.safe} (R1)")

    def _let_go(self, half: Half, handle: Handle) -> None:
        """Clear it at once or when its pages are safe, and then have them used anew."""
        if not half.cleared and (half.safe or self._random.random() < 0.3):
            handle.clear()
            half.cleared = True
        elif half.safe and half.cleared:
            half.peer.give_back(half.lot)
            half.peer.child.work("drop", handle.name)
            half.over = True

    def _stuck(self, room: Room, text: str) -> None:
        self.note(f"{room} {text}")
        for half in room.halves:
            half.over = True

    def _judge(self, room: Room) -> None:
        """All of it that is here has ended: rightly so?"""
        sender, receiver = room.sender, room.receiver
        here = [half for half in room.halves if not half.over and half.handle is not None]
        found = {half.peer.role: half.state for half in here}
        for half in here:
            if half.state == "FAILED" and half.handle is not None:
                self.codes[half.handle.failure.code] += 1
        if found == {"prefill": "FAILED", "decode": "SUCCESS"}:
            self.note(f"{room}: SUCCESS at the receiver, and FAILED at its only sender (P6)")
        if receiver in here and receiver.state == "SUCCESS":
            self._verify(room)
        self._expect(room, set(found.values()))
        self.outcomes[self._outcome(room, set(found.values()))] += 1
        if room.fault:
            self.faults[room.fault] += 1
        if sender in here and room.fate == "rejected" and not room.disturbed and sender.handle is not None:
            code = sender.handle.failure.code if sender.state == "FAILED" else sender.state
            if code != "rejected":
                self.note(f"{room}: ended as {code} (A8)")

    def _expect(self, room: Room, found: set[str]) -> None:
        """What was done to a room says how it must end, where no process of it was disturbed."""
        if room.disturbed or room.fate in ("aborted", "cleared"):
            return
        fails = room.fate in ("rejected", "not joined") or (room.fault in ENDING and bool(room.sender.lot.pages))
        due = "FAILED" if fails else "SUCCESS"
        if found != {due}:
            halves = [half for half in room.halves if half.state == "FAILED" and half.handle is not None and not half.over]
            why = "; ".join(half.handle.failure.text for half in halves if half.handle is not None)
            self.note(f"{room}: {sorted(found)} where {due} is due: {why}")

    def _outcome(self, room: Room, found: set[str]) -> str:
        if found == {"SUCCESS"}:
            return "succeeded"
        if not found:
            return "gone with both processes"
        if room.fate in ("aborted", "cleared", "rejected", "not joined"):
            return room.fate
        if room.fault in ENDING:
            return "failed by fault"
        return "failed with a peer" if room.disturbed else "failed"

    def _verify(self, room: Room) -> None:
        """SUCCESS: all bytes are there (R6), and the record."""
        receiver = room.receiver
        if not receiver.peer.arrived(receiver.lot, room.content):
            self.note(f"{room}: SUCCESS, and not all of its bytes are there (R6)")
        if receiver.handle is not None and receiver.handle.record != room.record:
            self.note(f"{room}: SUCCESS, and its record is {receiver.handle.record!r} instead of {room.record!r}")
        self.bytes_verified += room.content.nbytes

    # --- what is to be done to them

    def open(self, prefill: Peer, decode: Peer) -> None:
        """A room between two processes that are here, if they have pages for it and few rooms already."""
        under_way = sum(room.sender.peer is prefill and room.receiver.peer is decode for room in self._rooms)
        if under_way >= MOST or not (prefill.free and decode.free):
            return
        pages = self._random.choice((0, 1, 1, 2, 3, 5, 8, PLOT))
        sender, receiver = Half(prefill, prefill.lend(pages)), Half(decode, decode.lend(pages))
        fate = self._random.choices(list(FATES), list(FATES.values()))[0]
        record = f"{self._random.getrandbits(64):x}" * self._random.choice((0, 1, 20))
        content = prefill.content(sender.lot)
        room = Room(next(self._numbers), self._random.randrange(3), fate, sender, receiver, content, record, since=time.monotonic())
        if fate == "rejected":
            room.steps += [(sender, lambda: self._open_sender(room)), (receiver, lambda: self._reject(room))]
        elif fate == "not joined":
            only = self._random.choice((self._sending, self._receiving))
            room.steps += only(room)
        else:
            room.steps += self._merged(self._sending(room), self._receiving(room))
        if fate in ("aborted", "cleared"):
            self._break_off(room)
        self._rooms.append(room)

    def _merged(self, *chains: Sequence[tuple[Half, Callable[[], None]]]) -> list[tuple[Half, Callable[[], None]]]:
        """The steps of several, those of each in order."""
        rests = [deque(chain) for chain in chains]
        return [rest.popleft() for rest in self._shuffled([rest for rest in rests for _ in rest])]

    def _shuffled(self, rests: list[deque[tuple[Half, Callable[[], None]]]]) -> list[deque[tuple[Half, Callable[[], None]]]]:
        self._random.shuffle(rests)
        return rests

    def _break_off(self, room: Room) -> None:
        """Abort or clear one side, somewhere between its opening and after the last step."""
        half = self._random.choice(room.halves)
        first = next(number for number, (whose, _) in enumerate(room.steps) if whose is half)
        room.steps.insert(self._random.randint(first + 1, len(room.steps)), (half, lambda: self._end(room, half)))

    def _end(self, room: Room, half: Half) -> None:
        assert half.handle is not None
        if room.fate == "aborted":
            half.handle.abort("not wanted any more")
        else:
            half.handle.clear()

    def _sending(self, room: Room) -> list[tuple[Half, Callable[[], None]]]:
        sends: list[Callable[[], None]] = [lambda: self._open_sender(room)]
        if room.fate == "fault":
            room.fault = self._random.choice([*PASSING, *ENDING])
            sends.append(lambda: self._set_fault(room))
        sends += self._chunks(room)
        if room.fault == "hold":
            sends.append(lambda: room.sender.peer.child.call(f"hold {room.number}", "release"))
            sends.append(lambda: room.sender.peer.child.work("drop", f"hold {room.number}"))
        return [(room.sender, step) for step in sends]

    def _chunks(self, room: Room) -> list[Callable[[], None]]:
        pages = room.sender.lot.pages
        parts = self._cut(pages) if room.fate in ("chunks", "aborted", "cleared") else [pages]
        if room.fate != "layers":
            found = [self._chunk(room, part) for part in parts[:-1]]
            last = parts[-1]
            if self._random.random() < 0.3:
                return [*found, self._chunk(room, last), self._chunk(room, [], last=True)]
            return [*found, self._chunk(room, last, last=True)]
        chains = [[(room.sender, self._chunk(room, part, layer=layer)) for part in self._cut(pages)] for layer in range(LAYERS)]
        return [*(step for _, step in self._merged(*chains)), self._chunk(room, [], last=True)]

    def _cut(self, pages: list[int]) -> list[list[int]]:
        """In a few parts, some perhaps empty."""
        places = sorted(self._random.randint(0, len(pages)) for _ in range(self._random.randrange(4)))
        return [pages[start:end] for start, end in itertools.pairwise([0, *places, len(pages)])]

    def _chunk(self, room: Room, pages: list[int], last: bool = False, layer: int | None = None) -> Callable[[], None]:
        def send() -> None:
            assert room.sender.handle is not None
            room.sender.handle.send(pages, last=last, record=room.record if last else "", layer=layer)

        return send

    def _open_sender(self, room: Room) -> None:
        room.sender.handle = room.sender.peer.child.sender(room.number, room.attempt)

    def _set_fault(self, room: Room) -> None:
        how = {**PASSING, **ENDING}[room.fault]
        kind, where = how.get("kind", room.fault), {name: value for name, value in how.items() if name != "kind"}
        name = f"hold {room.number}" if kind == "hold" else ""
        room.sender.peer.child.fault(kind, name, room=room.number, times=1, **where)

    def _receiving(self, room: Room) -> list[tuple[Half, Callable[[], None]]]:
        prefix = self._random.choice((0, 0, 3))

        def begin() -> None:
            room.receiver.handle = room.receiver.peer.child.receiver(room.number, room.sender.peer.child, room.attempt)

        def receive() -> None:
            assert room.receiver.handle is not None
            room.receiver.handle.receive(room.receiver.lot.pages, prefix)

        return [(room.receiver, begin), (room.receiver, receive)]

    def _reject(self, room: Room) -> None:
        address = room.sender.peer.child.address
        room.receiver.peer.child.call("manager", "reject", room.number, "no memory left", address, room.attempt)
