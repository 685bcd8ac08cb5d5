"""What is attacked: instances in processes of their own, or in this one; and how it is seen that they are well."""

from __future__ import annotations

import gc
import itertools
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from kvcore_conformance.child.worker import Worker, serve
from kvcore_conformance.stage.driver import Child, ChildError, Handle, PoolSpec, free_port
from kvcore_conformance.stage.footprint import Footprint
from kvcore_conformance.stage.waits import until

from kvcore import KVManager
from kvcore.faults import ControlTap
from kvcore.wire import Hello, Welcome

LIMITS: dict[str, float] = {
    "bootstrap_s": 60.0,
    "input_s": 60.0,
    "transfer_s": 60.0,
    "liveness_s": 10.0,
    "quarantine_s": 15.0,
    "send_s": 10.0,
}
"""Longer than a stretch of messages takes on a busy machine; what is kept for longer than a peer lives is short."""
PAGES, PAGE_BYTES, LAYERS, GUARD = 32, 256, 3, 4096
MOVED_S, UP_S = 30.0, 60.0
"""How long a good room may take on a busy machine, and a process until it listens to commands."""
_rooms = itertools.count(1)


class Neighbour(Child):
    """A child that is not one: its manager is in this process, and messages get to it past its sockets."""

    def __init__(self) -> None:
        self.backend, self.options = "local", {}
        self._worker = Worker()
        self._names, self.took_s = 0, 0.0
        self.role = self.address = self.instance = self.admin = ""

    @property
    def pid(self) -> int:
        return os.getpid()

    @property
    def running(self) -> bool:
        return True

    @property
    def manager(self) -> KVManager:
        """Its manager."""
        found = self._worker.objects["manager"]
        assert isinstance(found, KVManager)
        return found

    def call(self, on: str, do: str, *args: object, name: str = "", waits_s: float = 0.0, **kwargs: Any) -> Any:
        answer = serve(self._worker.objects, {"on": on, "do": do, "args": args, "kwargs": kwargs, "as": name})
        if "error" in answer:
            raise ChildError(str(answer["error"]), str(answer["text"]))
        return json.loads(json.dumps(answer["value"]))

    def end(self) -> None:
        self.work("stop")


class Figures(NamedTuple):
    """What an instance holds at one moment. ``stores``: those that are not empty, but for queues of what is just being done."""

    stores: dict[str, int]
    lines: int
    bad: dict[str, int]
    footprint: Footprint
    healthy: bool
    raised: list[str]
    """Log lines that tell of an exception that nobody expected."""


QUEUES = {
    "control_calls", "slow_calls", "http_calls", "orders", "events", "collected", "workers", "records", "flight_record", "bootstrap_rooms",
}  # fmt: skip
"""Stores of what is just being done, or was; and the rooms that were announced at a bootstrap service, which it keeps for a while."""


def figures(ward: Child) -> Figures:
    """Those of an instance now."""
    gc.collect()
    stores = {name: size for name, size in ward.work("stats")["stores"].items() if size and name not in QUEUES}
    bad = {port: ward.bad_messages(port) for port in ("control", "bootstrap_port", "admin")}
    healthy = json.loads(_get(ward.admin, "/health"))["ok"] is True
    return Figures(stores, ward.work("log_lines"), bad, Footprint.of(ward.pid), healthy, ward.logged("Traceback"))


def _get(address: str, path: str) -> bytes:
    from urllib.request import urlopen

    with urlopen(f"http://{address}{path}", timeout=MOVED_S) as answer:
        found: bytes = answer.read()
    return found


def move(prefill: Child, decode: Child, pages: Sequence[int] = (3, 4, 9)) -> None:
    """A good room: its bytes are equal, no others have changed, and it is cleared again."""
    decode.work("wipe")
    room = next(_rooms)
    sender, receiver = prefill.sender(room), decode.receiver(room, prefill)
    to = [page + 1 for page in reversed(pages)]
    receiver.receive(to)
    sender.send(pages, last=True)
    found = receiver.wait(MOVED_S), sender.wait(MOVED_S)
    assert found == ("SUCCESS", "SUCCESS"), f"a good room ended {found}: {decode.call(receiver.name, 'failure')}"
    assert decode.digest(to) == prefill.digest(pages), "a good room's bytes are not those that were sent"
    assert decode.touched() == sorted(to), f"pages {decode.touched()} were written where {sorted(to)} were listed"
    cleared(sender, receiver)


def cleared(*handles: Handle) -> None:
    """Clear rooms, and have their instances forget the handles."""
    for handle in handles:
        handle.clear()
        handle.child.work("drop", handle.name)


def settled(*wards: Child) -> None:
    """Wait until nothing is held for any room."""
    for ward in wards:
        until(lambda ward=ward: not ward.work("held"), f"{ward.instance} holds no room", MOVED_S)  # type: ignore[misc]


class Plant:
    """A prefill and a decode instance with every port they can have, and an honest decode of which liars copy what they introduce."""

    def __init__(self, near: bool, folder: Path) -> None:
        self._memory = folder / "decode"
        self.prefill, self.decode = (Neighbour(), Neighbour()) if near else (Child(), Child())
        self.donor = Neighbour()
        self.data = {self.prefill: free_port(), self.decode: free_port()}

    def start(self) -> None:
        """Make the managers, and have them meet."""
        with self._memory.open("wb") as file:
            file.truncate(LAYERS * (PAGES * PAGE_BYTES + 2 * GUARD))
        kv = PoolSpec(pages=PAGES, page_bytes=PAGE_BYTES, layers=LAYERS)
        theirs = PoolSpec(pages=PAGES, page_bytes=PAGE_BYTES, layers=LAYERS, file=str(self._memory), guard=GUARD)
        for ward in self.data:
            ward.work("cpu_s", waits_s=UP_S)
        for ward, role, pool in ((self.prefill, "prefill", kv), (self.decode, "decode", theirs)):
            ward.start(role, [pool], admin="127.0.0.1:0", limits=LIMITS, backend_options={"port": self.data[ward]})
        self.donor.start("decode", [kv], limits=LIMITS)
        with ControlTap(self.donor.manager) as tap:
            move(self.prefill, self.donor)
            letters = [seen.letter.body for seen in tap.seen]
        self.hello = next(body for body in letters if isinstance(body, Hello))
        self.welcome = next(body for body in letters if isinstance(body, Welcome))
        move(self.prefill, self.decode)
        self.rank = json.loads(_get(self.prefill.address, "/v1/ranks/0"))

    def guards(self) -> int:
        """Bytes right before and after the decode's memory that have changed (T2)."""
        whole = np.memmap(self._memory, np.uint8, "r", 0, (LAYERS, PAGES * PAGE_BYTES + 2 * GUARD))
        return int(np.count_nonzero(whole[:, :GUARD]) + np.count_nonzero(whole[:, -GUARD:]))

    def end(self) -> None:
        """Stop all instances."""
        for ward in (self.donor, self.decode, self.prefill):
            ward.end()


@contextmanager
def plant(near: bool) -> Iterator[Plant]:
    """A running plant, in this process or in others; the honest ones are paired."""
    with tempfile.TemporaryDirectory() as folder:
        made = Plant(near, Path(folder))
        try:
            made.start()
            yield made
        finally:
            made.end()


def opened(ward: Child, rooms: dict[int, Handle], address: str, most: int) -> None:
    """Have so many rooms live there; those that have ended are replaced. Every other one is given pages."""
    for number, handle in list(rooms.items()):
        if handle.poll() in ("SUCCESS", "FAILED"):
            cleared(handle)
            del rooms[number]
    while len(rooms) < most:
        number = next(_rooms)
        rooms[number] = handle = ward.receiver(number, address) if ward.role == "decode" else ward.sender(number)
        if number % 2:
            handle.receive([1, 2]) if ward.role == "decode" else handle.send([1, 2], last=number % 4 == 1)
