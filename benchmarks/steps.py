"""``python -m benchmarks.steps``: all steps of a room on both sides, in one thread, with no sockets, engine, threads or waiting.

Handles, room tables, ledger, plan and the making and reading of letters are kvcore's own; an engine that has done everything at once is
not. What that takes with everything in the caches is the least of kvcore's own work on a room. Beside it comes what
``benchmarks.skeleton`` measures.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from kvcore import Config, KVPoll, Pool
from kvcore.backend import Backend
from kvcore.channel import Route
from kvcore.handles import Receiver, Sender
from kvcore.hookspecs import DONE, Capabilities, Hooks, TicketState, Transfer
from kvcore.introduction import introduction
from kvcore.ledger import Ledger
from kvcore.metrics import Metrics
from kvcore.pairing import Peer
from kvcore.planner import Layout
from kvcore.protocol import events as ev
from kvcore.protocol.messages import Status
from kvcore.room import PrefillGroup, Room
from kvcore.rooms import RoomTable
from kvcore.states import RoomId, RoomKey, Side
from kvcore.wire import decode, encode

PAGES, PAGE_BYTES, FAR_S, ROUNDS = 256, 16384, 1e9, 8
ABLE = Capabilities(blocking=True, descriptors="pages", quick_bytes=64 << 10)
GROUP = PrefillGroup("127.0.0.1:1", None)


class Done:
    """An engine that has moved everything when it is asked to."""

    kvcore_clear = SimpleNamespace(get_hookimpls=list)

    def kvcore_transfer(self, transfer: Transfer, may_wait: bool) -> TicketState:
        return DONE


class Half:
    """One side without threads: what its handles reach (``handles.Owner``), its table (``room.Outside``) and its ledger."""

    def __init__(self, side: Side, wire: deque[tuple[Side, bytes]]) -> None:
        pool = Pool.from_tensors("kv", [np.zeros((PAGES, PAGE_BYTES), np.uint8)], page_size=1)
        config = Config(role=side, backend="local", host="127.0.0.1")
        self.side, self.rank, self.pools, self._wire = side, 0, {pool.name: pool}, wire
        self.me = introduction(config, f"{side}-0123456789abcdef", self.pools, Backend("local", {}).info)
        self.layout, self._metrics = Layout.of(self.me.pools, pool.regions), Metrics()
        self.table = RoomTable(config.limits.model_dump() | {"mark_s": FAR_S}, 0, self)
        self.ledger = Ledger(
            cast(Hooks, Done()), ABLE, self.layout, FAR_S, self._metrics, lambda _instance: self.peer,
            lambda room, event: self.table.apply("prefill", room.id, event), lambda _instance, _text: None, self.table,
        )  # fmt: skip

    def meet(self, other: Half) -> None:
        """Be paired."""
        route = Route(cast(Any, None))
        self.peer = Peer(self.side, self.me, other.me, other.layout, 1, route, b"", time.monotonic(), FAR_S)
        self._whom = other.side

    def hear(self, frame: bytes) -> None:
        """Take a letter."""
        body = cast(Any, decode(frame).body)
        self.table.apply(self.side, RoomId(body.room, body.attempt), ev.Got(body, self.peer.party(body.room)))

    def send(self, effect: ev.Send) -> None:
        """Make a letter, but for the one that kvcore does not send of a room that has ended by then."""
        if not (isinstance(effect.message, Status) and effect.message.state is KVPoll.TRANSFERRING):
            self._wire.append((self._whom, encode(self.me.instance, effect.to, effect.message)))

    def start(self, room: Room, effect: ev.Start) -> None:
        self.ledger.start(room, effect, room.chunks[effect.chunk - 1])

    def seek(self, room: Room) -> None:
        self.table.apply("decode", room.id, ev.Route(room.key.generation, (self.peer.party(room.id.number),)))

    def cancel(self, key: RoomKey) -> None:
        self.ledger.cancel(key)

    def forget(self, key: RoomKey) -> None:
        self.ledger.forget(key)

    def changed(self, room: Room, old: KVPoll | None) -> None:
        if room.status.terminal and old is not None:
            self._metrics.ended(room.key.side, room.status, None, room.meter.read(time.monotonic()))

    def why_not_reached(self, room: Room) -> str:
        return ""

    def collect(self, room: Room) -> None: ...
    def unproven(self, key: RoomKey, effect: ev.Unproven) -> None: ...
    def wake_by(self, when: float) -> None: ...
    def listen(self) -> None: ...
    def settle(self) -> None: ...


class Both:
    """Two halves and the letters between them."""

    def __init__(self) -> None:
        self._wire: deque[tuple[Side, bytes]] = deque()
        self._halves: dict[Side, Half] = {"prefill": Half("prefill", self._wire), "decode": Half("decode", self._wire)}
        self._prefill, self._decode = self._halves["prefill"], self._halves["decode"]
        self._prefill.meet(self._decode)
        self._decode.meet(self._prefill)

    def carry(self, number: int) -> None:
        """One room of one page, from opening it to clearing it."""
        room, page = RoomId(number, 0), [number % PAGES]
        opened = self._prefill.table.open("prefill", room), self._decode.table.open("decode", room, GROUP)
        assert opened[0] is not None and opened[1] is not None
        sender, receiver = Sender(self._prefill, opened[0]), Receiver(self._decode, opened[1])
        sender.send(page, last=True)
        receiver.receive(page)
        self._deliver()
        self._prefill.ledger.turn()
        self._deliver()
        assert sender.poll() is receiver.poll() is KVPoll.SUCCESS, (sender.failure, receiver.failure)
        sender.clear()
        receiver.clear()
        self._deliver()

    def stored(self) -> int:
        """What is left of rooms."""
        return sum(sum(half.table.sizes().values()) + half.ledger.tickets for half in self._halves.values())

    def _deliver(self) -> None:
        while self._wire:
            whom, frame = self._wire.popleft()
            self._halves[whom].hear(frame)


def measured(rooms: int) -> str:
    """CPU time and calls of a room, in one line."""
    both, first = Both(), 1
    gc.collect()
    gc.freeze()
    times = []
    for _ in range(ROUNDS + 1):
        began = time.process_time()
        for number in range(first, first + rooms):
            both.carry(number)
        times.append((time.process_time() - began) / rooms * 1e6)
        first += rooms
    calls = 0

    def count(_frame: object, event: str, _what: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    both.carry(first)
    sys.setprofile(None)
    left = both.stored()
    assert not left, f"{left} entries are left of rooms that are over"
    return f"a room, both sides: {min(times[1:]):.0f} us of CPU time (the least of {ROUNDS} rounds of {rooms}), {calls} calls of functions"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps", description=__doc__.split("\n\n")[0].partition(": ")[2])
    parser.add_argument("--rooms", type=int, default=1500, help="how many a round (default: 1500)")
    print(measured(parser.parse_args(arguments).rooms))


if __name__ == "__main__":
    main()
