"""What the HTTP thread needs of aiohttp: a guarded server and a bounded client. Imported only when one of them starts."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

import aiohttp
from aiohttp import web
from aiohttp.abc import AbstractAccessLogger, AbstractResolver, ResolveResult
from aiohttp.typedefs import Handler, Middleware
from yarl import URL

from kvcore.access import Guard
from kvcore.addresses import Address
from kvcore.errors import MOST_CAUSE, one_line
from kvcore.http import Answer, Refusal

log = logging.getLogger("kvcore.http")

HANDLER_S = 5.0
CONNECT_S = 2.0
REQUEST_S = 5.0
CONNECTIONS = 256
MAX_ANSWER_BYTES = 1 << 20
LOG_EVERY_S = 10.0

_SILENT = logging.Logger("kvcore.http.aiohttp", logging.CRITICAL + 1)  # it would log a traceback for each bad request


@web.middleware
async def _bounded(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Whatever a handler does becomes one bounded answer in JSON."""
    try:
        return await asyncio.wait_for(handler(request), HANDLER_S)
    except Refusal as refusal:
        return web.json_response(refusal.answer, status=refusal.status)
    except web.HTTPException as answer:
        return web.json_response({"error": f"{request.method} {request.path}: {answer.reason}"}, status=answer.status)
    except asyncio.TimeoutError:
        return web.json_response({"error": f"request not complete within {HANDLER_S:g} s"}, status=408)
    except ConnectionError:
        raise
    except Exception:
        log.exception("handler of %s %s failed; the server goes on", request.method, request.path)
        return web.json_response({"error": "internal error, see the log"}, status=500)


def _bearing(token: str) -> Middleware:
    """Middleware that serves who bears the token; ``/health`` is everybody's, for probes."""
    wanted = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        shown = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if request.path == "/health" or hmac.compare_digest(shown, wanted):
            return await handler(request)
        raise Refusal(401, f"the request bears {'another' if shown else 'no'} token (security.token; header Authorization: Bearer)")

    return check


async def start_server(
    app: web.Application, sockets: Sequence[socket.socket], setting: str, on_bad: Callable[[], int], guard: Guard
) -> web.AppRunner:
    """Serve ``app`` on bound sockets. ``on_bad`` is called for each 4xx answer, malformed requests included, and returns their number."""
    quiet_until = 0.0

    class BadRequests(AbstractAccessLogger):
        def log(self, request: web.BaseRequest, response: web.StreamResponse, _seconds: float) -> None:
            nonlocal quiet_until
            if not 400 <= response.status < 500:
                return
            count, now = on_bad(), time.monotonic()
            if now >= quiet_until:
                quiet_until = now + LOG_EVERY_S
                where = one_line(f"{request.method} {request.path}", MOST_CAUSE)
                log.warning("%s: %s from %s refused with %d; %d so far", setting, where, request.remote, response.status, count)

    if guard.token:
        app.middlewares.insert(0, _bearing(guard.token))
    app.middlewares.insert(0, _bounded)
    runner = web.AppRunner(
        app,
        access_log_class=BadRequests,
        access_log=log,
        logger=_SILENT,
        auto_decompress=False,  # a small body must not grow past the size limit
        keepalive_timeout=15.0,
        lingering_time=1.0,
        shutdown_timeout=0.5,
    )
    await runner.setup()
    for sock in sockets:
        await web.SockSite(runner, sock, ssl_context=guard.serving).start()
    return runner


class _DaemonResolver(AbstractResolver):
    """Looks names up on daemon threads: a name server that does not answer must not hold up the end of the process."""

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[ResolveResult]] = loop.create_future()

        def settle(result: list[ResolveResult] | OSError) -> None:
            if answer.done():
                return
            if isinstance(result, OSError):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        def look_up() -> None:
            try:
                result: list[ResolveResult] | OSError = _addresses(host, port, family)
            except OSError as error:
                result = error
            except UnicodeError as error:
                result = OSError(str(error))
            try:
                loop.call_soon_threadsafe(settle, result)
            except RuntimeError:
                pass  # the loop was closed meanwhile, nobody waits

        threading.Thread(target=look_up, name="kvcore-http-names", daemon=True).start()
        return await answer

    async def close(self) -> None:
        """Nothing is held."""


def _addresses(host: str, port: int, family: socket.AddressFamily) -> list[ResolveResult]:
    found = socket.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
    numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    return [
        ResolveResult(
            hostname=host,
            # Written anew by the system, since an IPv6 answer carries its scope outside the address.
            host=socket.getnameinfo(where, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0],
            port=port,
            family=kind,
            proto=proto,
            flags=numeric,
        )
        for kind, _, proto, _, where in found
    ]


class Client:
    """Asks servers, each over one connection, so that none which does not answer holds up another. Made and used on the loop."""

    def __init__(self, guard: Guard) -> None:
        self._turns: WeakValueDictionary[Address, asyncio.Lock] = WeakValueDictionary()
        self._slots = asyncio.Semaphore(CONNECTIONS)
        self._scheme = "http" if guard.asking is None else "https"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=CONNECTIONS, keepalive_timeout=5.0, resolver=_DaemonResolver(), ssl=guard.asking if guard.asking is not None else True
            ),
            headers={"Authorization": f"Bearer {guard.token}"} if guard.token else None,
            timeout=aiohttp.ClientTimeout(total=REQUEST_S, sock_connect=CONNECT_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def request(self, method: str, address: Address, path: str, body: bytes | None) -> Answer:
        """One question; raises ``ConnectionError`` with a short reason. The time-out starts when the connection is free."""
        url = URL.build(scheme=self._scheme, host=address.host, port=address.port, path=path)  # text would not keep an IPv6 scope as it is
        async with self._turns.setdefault(address, asyncio.Lock()), self._slots:
            try:
                async with self._session.request(method, url, data=body, allow_redirects=False) as response:
                    return Answer(response.status, await _body(response.content))
            except asyncio.TimeoutError as error:
                raise ConnectionError(f"no answer in time ({CONNECT_S:g} s to connect, {REQUEST_S:g} s in all)") from error
            except aiohttp.ClientConnectorCertificateError as error:
                raise ConnectionError(_mistrust(error.certificate_error)) from error
            except aiohttp.ClientConnectorSSLError as error:
                raise ConnectionError(f"it does not speak TLS ({_reason(error)}); set security.tls_cert and tls_key there") from error
            except (aiohttp.ServerDisconnectedError, ConnectionResetError) as error:
                hint = "" if url.scheme == "https" else "; if it speaks TLS, set security.tls_ca here"
                raise ConnectionError(f"{_reason(error)}{hint}") from error
            except (aiohttp.ClientError, OSError, ValueError) as error:
                raise ConnectionError(_reason(error)) from error

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()


async def _body(content: aiohttp.StreamReader) -> bytes:
    parts: list[bytes] = []
    room = MAX_ANSWER_BYTES
    while room and (part := await content.read(room)):
        parts.append(part)
        room -= len(part)
    return b"".join(parts)


def _mistrust(error: Exception) -> str:
    why = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error
    return f"its certificate is not trusted ({one_line(why, MOST_CAUSE)}); see security.tls_ca"


def _reason(error: Exception) -> str:
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, OSError) and cause.errno and cause.errno > 0:
        return os.strerror(cause.errno)
    return " ".join(f"{type(cause).__name__}: {cause}".split())
