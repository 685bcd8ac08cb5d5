"""The bootstrap service that the leader of a prefill group embeds: ranks register, decode instances ask for the group.

====== ================= ==============================================================================
POST   /v1/ranks         register a rank (JSON of ``RankInfo``); 200, 400 wrong, 409 held by another instance
GET    /v1/group         200 ``{"size", "ranks"}`` once complete; before 503 ``{"error", "registered", "missing"}``
POST   /v1/rooms         200 ``whereabouts.Found`` for an ``Announcement`` of rooms, or a question for them; 400 wrong
GET    /v1/ranks/N       200 one rank; 503 not registered yet; 404 no such rank
GET    /health           200 ``{"status", "size", "registered"}``
====== ================= ==============================================================================

Any other request is answered 4xx and changes nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from kvcore.addresses import Address
from kvcore.bootstrap import EXPIRY_S, GROUP_PATH, MAX_BODY_BYTES, RANKS_PATH, ROOMS_PATH, Group, RankInfo, read
from kvcore.errors import ConfigError
from kvcore.http import Refusal
from kvcore.layouts import MAX_RANKS
from kvcore.logs import SparingLog
from kvcore.whereabouts import Announcement, RoomBook

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger("kvcore.bootstrap")


class RankTable:
    """Which instance holds each rank of a group of ``size``; at most ``size`` entries.

    A rank is held by the instance registered for it until a newer one registers (by start order), or until it has not registered
    again for ``expiry_s`` seconds. ``clock`` counts seconds and never goes back.
    """

    def __init__(self, size: int, *, expiry_s: float = EXPIRY_S, clock: Callable[[], float] = time.monotonic) -> None:
        if not 1 <= size <= MAX_RANKS:
            raise ConfigError(f"a prefill group has 1 .. {MAX_RANKS} ranks, got {size}; correct the topology")
        self.size = size
        self._expiry_s = expiry_s
        self._clock = clock
        self._ranks: dict[int, tuple[RankInfo, float]] = {}
        self._comings = SparingLog(log)

    def register(self, info: RankInfo) -> None:
        """File a rank; doing it again is how an instance keeps it. Raises ``Refusal`` 400 or 409 and changes nothing if it may not."""
        if info.size != self.size:
            raise Refusal(400, f"rank {info.rank} says its group has {info.size} ranks, not {self.size}; start all with one topology")
        unlike = next((held for held in self.registered() if held.rank != info.rank and held.place.sizes != info.place.sizes), None)
        if unlike is not None:
            raise Refusal(
                400,
                f"rank {info.rank} says its group has tp, pp, dp {info.place.sizes}, and rank {unlike.rank} {unlike.place.sizes}; "
                "start all with one topology",
            )
        held = self.get(info.rank)
        if held is not None and held != info:
            self._check_successor(held, info)
        if held != info:
            self._comings.say(logging.INFO, f"rank {info.rank} of {self.size} is instance {info.instance} at {info.control}")
        self._ranks[info.rank] = (info, self._clock() + self._expiry_s)

    def get(self, rank: int) -> RankInfo | None:
        """Who holds a rank; None if nobody does."""
        info, expiry = self._ranks.get(rank, (None, 0.0))
        if info is not None and expiry <= self._clock():
            text = f"rank {rank}, instance {info.instance}, has not registered for {self._expiry_s:g} s and is dropped"
            self._comings.say(logging.WARNING, text)
            del self._ranks[rank]
            return None
        return info

    def registered(self) -> list[RankInfo]:
        """The ranks that are held, in order."""
        return [info for rank in range(self.size) if (info := self.get(rank)) is not None]

    def group(self) -> Group:
        """The complete group. Raises ``Refusal`` 503 naming the missing ranks."""
        ranks = self.registered()
        if len(ranks) == self.size:
            return Group(self.size, tuple(ranks))
        known = [info.rank for info in ranks]
        missing = sorted(set(range(self.size)) - set(known))
        shown = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
        text = f"group not ready, {len(ranks)} of {self.size} ranks registered; missing: {shown}"
        raise Refusal(503, text, registered=known, missing=missing)

    def __len__(self) -> int:
        return len(self._ranks)

    def _check_successor(self, held: RankInfo, info: RankInfo) -> None:
        if held.instance == info.instance:
            raise Refusal(409, f"instance {info.instance} has registered rank {info.rank} with other facts; an instance keeps its address")
        if info.order <= held.order:
            raise Refusal(
                409,
                f"rank {info.rank} is held by instance {held.instance}, started at {held.order}, not before {info.instance}, "
                f"started at {info.order}; give each rank a number of its own",
            )


class BootstrapService:
    """The HTTP face of a ``RankTable``. Serve ``app()`` with ``HttpThread.serve``; everything runs on that thread."""

    def __init__(self, size: int, *, expiry_s: float = EXPIRY_S) -> None:
        self._table = RankTable(size, expiry_s=expiry_s)
        self._book = RoomBook(expiry_s=expiry_s)

    def app(self) -> web.Application:
        """The routes, with the size limit on bodies."""
        from aiohttp import web

        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post(RANKS_PATH, self._register)
        app.router.add_get(RANKS_PATH + "/{rank}", self._rank)
        app.router.add_get(GROUP_PATH, self._group)
        app.router.add_post(ROOMS_PATH, self._rooms)
        app.router.add_get("/health", self._health)
        return app

    def sizes(self) -> dict[str, int]:
        """Entries held."""
        return {"bootstrap_ranks": len(self._table), "bootstrap_rooms": len(self._book)}

    def why_not_ready(self) -> str:
        """Which ranks are missing; "" if none is."""
        try:
            self._table.group()
        except Refusal as missing:
            return str(missing)
        return ""

    async def _register(self, request: web.Request) -> web.Response:
        body = await request.read()
        try:
            info = read(body, RankInfo)
        except ValueError as error:
            raise Refusal(400, f"not a rank: {error}") from error
        known = self._table.get(info.rank) == info
        self._table.register(info)
        if not known and info.address.loopback and request.remote and not Address(request.remote, 0).loopback:
            log.warning(
                "rank %d registers from %s and publishes %s, which leads decode nowhere from other hosts; set its host",
                info.rank, request.remote, info.control,
            )  # fmt: skip
        return _json(info)

    async def _rank(self, request: web.Request) -> web.Response:
        text = request.match_info["rank"]
        if not (text.isascii() and text.isdigit() and len(text) < 5 and int(text) < self._table.size):
            raise Refusal(404, f"no rank {text[:20]!r} in this group, its ranks are 0 .. {self._table.size - 1}")
        info = self._table.get(int(text))
        if info is None:
            raise Refusal(503, f"rank {text} is not registered yet")
        return _json(info)

    async def _rooms(self, request: web.Request) -> web.Response:
        body = await request.read()
        try:
            asked = read(body, Announcement)
        except ValueError as error:
            raise Refusal(400, f"not a list of rooms: {error}") from error
        if asked.dp_rank is not None and (first := self._table.get(0)) is not None and asked.dp_rank >= first.place.dp_size:
            raise Refusal(400, f"no data-parallel rank {asked.dp_rank} in this group, its ranks are 0 .. {first.place.dp_size - 1}")
        return _json(self._book.answer(asked))

    async def _group(self, _request: web.Request) -> web.Response:
        return _json(self._table.group())

    async def _health(self, _request: web.Request) -> web.Response:
        return _json({"status": "ok", "size": self._table.size, "registered": len(self._table.registered())})


def _json(value: object) -> web.Response:
    from aiohttp import web

    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
