"""The admin port: health, metrics and the history of a room, for people and probes. Read-only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvcore.errors import KVCoreError, shown
from kvcore.http import Refusal

if TYPE_CHECKING:
    from aiohttp import web


class Watched(Protocol):
    """What the port shows."""

    @property
    def healthy(self) -> bool: ...
    def metrics_text(self) -> str: ...
    def story(self, room: int, attempt: int) -> str: ...


def admin_app(watched: Watched) -> web.Application:
    """The application served at ``Config.admin``: ``/health``, ``/metrics``, ``/rooms/N`` (``?attempt=``)."""
    from aiohttp import web

    async def health(_request: web.Request) -> web.Response:
        return web.json_response({"ok": watched.healthy}, status=200 if watched.healthy else 503)

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=watched.metrics_text().encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def room(request: web.Request) -> web.Response:
        number, attempt = request.match_info["number"], request.query.get("attempt", "0")
        if not (number.isascii() and number.isdigit() and attempt.isascii() and attempt.isdigit()):
            raise Refusal(400, f"room {shown(number)} attempt {shown(attempt)}: pass decimal numbers")
        try:
            return web.Response(text=watched.story(int(number), int(attempt)))
        except (KVCoreError, ValueError) as error:
            raise Refusal(400, str(error)) from error

    app = web.Application()
    app.add_routes([web.get("/health", health), web.get("/metrics", metrics), web.get("/rooms/{number}", room)])
    return app
