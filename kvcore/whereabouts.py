"""Which data-parallel rank of a prefill group has a room: senders announce theirs at the bootstrap service, decode instances ask there.

Only where a group has several data-parallel ranks and the receiver names none. What is announced lasts until it is withdrawn, or is not
announced again, so that a service that restarts empty soon knows all.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from kvcore.addresses import Address, parse
from kvcore.bootstrap import EXPIRY_S, REFRESH_S, ROOMS_PATH, read
from kvcore.errors import KVCoreError, cause
from kvcore.http import Answer, HttpThread
from kvcore.layouts import MAX_RANKS
from kvcore.protocol.messages import Attempt, Number
from kvcore.states import RoomId

log = logging.getLogger("kvcore.bootstrap")

MAX_ASKED = 1000
"""Rooms in one request."""
MAX_ROOMS = 65_536
"""Rooms that a service remembers; of more the oldest is forgotten, and announced again."""
FIRST_DELAY_S, LAST_DELAY_S = 0.02, 0.5

Named = tuple[Number, Attempt]
Rooms = Annotated[tuple[Named, ...], Meta(max_length=MAX_ASKED)]
DpRank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]


class Announcement(msgspec.Struct, frozen=True):
    """Rooms that wait at a data-parallel rank, and such that wait there no more; or with None the question who has them."""

    rooms: Rooms
    dp_rank: DpRank | None = None
    gone: Rooms = ()


class Found(msgspec.Struct, frozen=True):
    """Those of the rooms asked for that are known, and who has each."""

    rooms: Rooms
    dp_ranks: Annotated[tuple[DpRank, ...], Meta(max_length=MAX_ASKED)]


class RoomBook:
    """The service's side. ``clock`` counts seconds and never goes back."""

    def __init__(self, *, expiry_s: float = EXPIRY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._expiry_s, self._clock = expiry_s, clock
        self._rooms: OrderedDict[Named, tuple[int, float]] = OrderedDict()

    def answer(self, asked: Announcement) -> Found:
        """File an announcement, or look rooms up."""
        self._expire()
        if asked.dp_rank is not None:
            for room in asked.rooms:
                self._rooms.pop(room, None)
                self._rooms[room] = asked.dp_rank, self._clock() + self._expiry_s
            for room in asked.gone:
                if room in self._rooms and self._rooms[room][0] == asked.dp_rank:
                    del self._rooms[room]
            while len(self._rooms) > MAX_ROOMS:
                self._rooms.popitem(last=False)
            return Found((), ())
        known = [room for room in asked.rooms if room in self._rooms]
        return Found(tuple(known), tuple(self._rooms[room][0] for room in known))

    def _expire(self) -> None:
        now = self._clock()
        while self._rooms and next(iter(self._rooms.values()))[1] <= now:
            self._rooms.popitem(last=False)

    def __len__(self) -> int:
        return len(self._rooms)


class Announcer:
    """Tells a group's bootstrap service which rooms wait at this data-parallel rank: new ones at once, all again every ``REFRESH_S``."""

    def __init__(self, http: HttpThread, address: Address, dp_rank: int, waiting: Callable[[], Iterable[RoomId]]) -> None:
        self._http, self._address, self._dp_rank, self._waiting = http, address, dp_rank, waiting
        self._fresh: dict[RoomId, bool] = {}
        self._bell = asyncio.Event()
        self._telling: concurrent.futures.Future[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._telling = self._http.run(self._tell())

    def stop(self) -> None:
        """End; idempotent. The service forgets the rooms by itself."""
        if self._telling is not None:
            self._telling.cancel()

    def announce(self, room: RoomId, waits: bool) -> None:
        """A room waits here from now on, or no more. From any thread; never blocks."""
        self._fresh[room] = waits
        self._http.call(self._bell.set)

    async def _tell(self) -> None:
        all_again = 0.0
        while True:
            try:
                await asyncio.wait_for(self._bell.wait(), REFRESH_S)
            except asyncio.TimeoutError:
                pass
            self._bell.clear()
            fresh, self._fresh = self._fresh, {}
            rooms, gone = ([room for room, waits in fresh.items() if waits is wanted] for wanted in (True, False))
            if time.monotonic() >= all_again:
                rooms, all_again = list(self._waiting()), time.monotonic() + REFRESH_S
            said = [Announcement(some, self._dp_rank) for some in _cut(rooms)]
            for what in (*said, *(Announcement((), self._dp_rank, some) for some in _cut(gone))):
                if await _ask(self._http, self._address, what) is None:
                    all_again = 0.0


class Whereabouts:
    """Asks for decode instances. All methods may be called from any thread and none blocks."""

    def __init__(self, http: HttpThread) -> None:
        self._http = http
        self._tokens = itertools.count(1)
        self._asked: dict[str, dict[int, tuple[RoomId, Callable[[int], None]]]] = {}

    def locate(self, address: str, room: RoomId, on_found: Callable[[int], None]) -> Callable[[], None]:
        """Have ``on_found`` called once, on the HTTP thread, with the data-parallel rank that has a room; returns how to stop asking."""
        token = next(self._tokens)
        self._http.call(self._begin, address, token, room, on_found)

        def stop() -> None:
            self._http.call(self._drop, address, token)

        return stop

    def sizes(self) -> dict[str, int]:
        """Entries held: one per room that is asked for."""
        return {"rooms_sought": sum(map(len, list(self._asked.values())))}

    def _begin(self, address: str, token: int, room: RoomId, on_found: Callable[[int], None]) -> None:
        known = address in self._asked
        self._asked.setdefault(address, {})[token] = room, on_found
        if not known:
            self._http.run(self._search(address))

    def _drop(self, address: str, token: int) -> None:
        self._asked.get(address, {}).pop(token, None)

    async def _search(self, address: str) -> None:
        delay, asked = FIRST_DELAY_S, self._asked[address]
        before: set[int] = set()
        while asked:
            delay = FIRST_DELAY_S if asked.keys() - before else min(2 * delay, LAST_DELAY_S)
            before = set(asked)
            for some in _cut([room for room, _ in asked.values()]):
                found = await _ask(self._http, parse(address, "prefill"), Announcement(some))
                self._deliver(asked, dict(zip(found.rooms, found.dp_ranks, strict=True)) if found is not None else {})
            await asyncio.sleep(delay)
        del self._asked[address]

    def _deliver(self, asked: dict[int, tuple[RoomId, Callable[[int], None]]], found: dict[Named, int]) -> None:
        for token, (room, on_found) in list(asked.items()):
            dp_rank = found.get((room.number, room.attempt))
            if dp_rank is not None and asked.pop(token, None) is not None:
                on_found(dp_rank)


def _cut(rooms: Sequence[RoomId]) -> Iterable[Rooms]:
    for start in range(0, len(rooms), MAX_ASKED):
        yield tuple((room.number, room.attempt) for room in rooms[start : start + MAX_ASKED])


async def _ask(http: HttpThread, address: Address, what: Announcement) -> Found | None:
    """The answer; None if there is none that can be read."""
    try:
        answer: Answer = await http.request("POST", address, ROOMS_PATH, msgspec.json.encode(what))
        found = read(answer.body, Found) if answer.status == 200 else None
    except (ConnectionError, ValueError, KVCoreError) as error:
        log.debug("asking %s about rooms: %s", address, cause(error))
        return None
    return found if found is not None and len(found.rooms) == len(found.dp_ranks) else None
