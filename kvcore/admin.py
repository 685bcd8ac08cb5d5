"""The admin port: health, metrics and the history of a room, for people and probes. Read-only."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvcore.errors import KVCoreError, shown
from kvcore.http import Refusal
from kvcore.room import room_id

if TYPE_CHECKING:
    from aiohttp import web

    from kvcore.overview import Overview

ANSWERS_S = 1.0
"""How long a room's other instances have to tell what they know."""


def admin_app(overview: Overview) -> web.Application:
    """The application served at ``Config.admin``: ``/health``, ``/metrics``, ``/rooms/N`` (``?attempt=``)."""
    from aiohttp import web

    async def health(_request: web.Request) -> web.Response:
        troubles = overview.troubles()
        return web.json_response({"ok": not troubles, "reasons": troubles}, status=503 if troubles else 200)

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=overview.metrics_text().encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def room(request: web.Request) -> web.Response:
        number, attempt = request.match_info["number"], request.query.get("attempt", "0")
        if not (number.isascii() and number.isdigit() and attempt.isascii() and attempt.isdigit()):
            raise Refusal(400, f"room {shown(number)} attempt {shown(attempt)}: pass decimal numbers")
        try:
            name = room_id(int(number), int(attempt))
        except (KVCoreError, ValueError) as error:
            raise Refusal(400, str(error)) from error
        with overview.stories.asking(name) as asked:
            await asyncio.wait((asyncio.wrap_future(asked.complete),), timeout=ANSWERS_S)
        return web.Response(text=asked.text())

    app = web.Application()
    app.add_routes([web.get("/health", health), web.get("/metrics", metrics), web.get("/rooms/{number}", room)])
    return app
