"""The one thread on which everything HTTP happens: the bootstrap service, its clients and the admin port.

Importing this module imports no HTTP library; that happens on the thread, when it starts (``kvcore.http_io``).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from kvcore.access import OPEN, Guard
from kvcore.addresses import Address, parse_host
from kvcore.errors import ConfigError

if TYPE_CHECKING:
    from aiohttp import web

    from kvcore.http_io import Client

log = logging.getLogger("kvcore.http")

T = TypeVar("T")

STOP_S = 5.0
COMPLAIN_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered: HTTP status and at most 1 MiB of body (a longer one is cut, so it will not parse)."""

    status: int
    body: bytes


class Refusal(Exception):
    """Raised by a handler to answer with ``status`` and JSON ``{"error": text, **details}``."""

    def __init__(self, status: int, text: str, **details: object) -> None:
        super().__init__(text)
        self.status = status
        self.answer: Mapping[str, object] = {"error": text, **details}


class HttpThread:
    """A named daemon thread that runs an asyncio loop. It is started once and stopped once; both may be called again.

    ``guard``: the token and TLS of the ports that it serves, and of those that it asks.
    """

    def __init__(self, name: str = "kvcore-http", guard: Guard = OPEN) -> None:
        self._guard = guard
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._running: set[concurrent.futures.Future[Any]] = set()  # a loop holds its tasks only weakly
        self._runners: list[web.AppRunner] = []
        self._client: Client | None = None
        self._bad: Counter[str] = Counter()

    def start(self) -> None:
        """Start the thread; does nothing if it runs or has been stopped."""
        with self._lock:
            if self._loop is not None or self._stopped:
                return
            self._loop = loop = asyncio.new_event_loop()
            loop.set_exception_handler(_Complaints())
            try:
                self._thread.start()
            except RuntimeError:  # no more threads are to be had
                self._loop = None
                loop.close()
                raise

    def stop(self, timeout_s: float = STOP_S) -> None:
        """Cancel what runs, close every port and connection, and join the thread, for at most ``timeout_s`` seconds. Idempotent."""
        with self._lock:
            loop, first, self._stopped = self._loop, not self._stopped, True
            if loop is None:
                return
            if first:
                loop.call_soon_threadsafe(loop.stop)
        if threading.current_thread() is self._thread:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.error("thread %s still runs %g s after stop; a callback on it blocks", self._thread.name, timeout_s)

    def call(self, callback: Callable[..., object], *args: object) -> bool:
        """Have ``callback(*args)`` called on the thread soon; False if the thread does not run. Never blocks."""
        with self._lock:
            if self._loop is None or self._stopped:
                return False
            self._loop.call_soon_threadsafe(callback, *args)
            return True

    def run(self, coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the thread. The future comes back cancelled if the thread does not run. Never blocks."""
        with self._lock:
            if self._loop is not None and not self._stopped:
                future = asyncio.run_coroutine_threadsafe(coro, self._loop)
                self._running.add(future)
                future.add_done_callback(self._running.discard)
                return future
        coro.close()
        gone: concurrent.futures.Future[T] = concurrent.futures.Future()
        gone.cancel()
        return gone

    @property
    def calls(self) -> int:
        """Coroutines that run, with those that keep a rank registered."""
        return len(self._running)

    def serve(self, app: web.Application, host: str, port: int, setting: str) -> int:
        """Serve ``app`` until ``stop``; returns the bound port (``port`` 0: any free one). Called from another thread.

        Handlers may raise ``Refusal``. Raises ``ConfigError`` naming port and ``setting`` if the address cannot be bound.
        """
        from kvcore.http_io import start_server

        sockets = _bind(Address(parse_host(host, setting), port), setting)
        bound = int(sockets[0].getsockname()[1])

        self._bad[setting] += 0

        def on_bad() -> int:
            self._bad[setting] += 1
            return self._bad[setting]

        async def start() -> None:
            self._runners.append(await start_server(app, sockets, setting, on_bad, self._guard))

        try:
            self.run(start()).result(STOP_S)
        except BaseException:
            for sock in sockets:
                sock.close()
            raise
        return bound

    async def request(self, method: str, address: Address, path: str, body: bytes | None = None) -> Answer:
        """Ask a server, over one connection for each address. To be awaited on this thread.

        Raises ``ConnectionError`` with a short reason if there is no complete answer within a few seconds.
        """
        if self._client is None:
            from kvcore.http_io import Client

            self._client = Client(self._guard)
        return await self._client.request(method, address, path, body)

    @property
    def bad_requests(self) -> Mapping[str, int]:
        """How many requests were answered 4xx, by the setting that the port was served under."""
        return dict(self._bad)

    def _main(self) -> None:
        loop = self._loop
        assert loop is not None
        asyncio.set_event_loop(loop)
        try:
            import kvcore.http_io  # now, or a manager's first room waits for it  # noqa: F401

            loop.run_forever()
            loop.run_until_complete(self._close())
        finally:
            asyncio.set_event_loop(None)
            loop.close()

    async def _close(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for runner in self._runners:
            await _guarded(runner.cleanup())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        if self._client is not None:
            await _guarded(self._client.close())


class _Complaints:
    """Logs what a loop complains of, such as having no file descriptor left to accept with, but not for each attempt (C107)."""

    def __init__(self) -> None:
        self._quiet_until = 0.0

    def __call__(self, _loop: asyncio.AbstractEventLoop, context: Mapping[str, object]) -> None:
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + COMPLAIN_EVERY_S
            log.error("the HTTP thread goes on after: %s (%r)", context.get("message"), context.get("exception"))


async def _guarded(closing: Coroutine[Any, Any, None]) -> None:
    try:
        await closing
    except Exception:
        log.exception("closing a part of the HTTP thread failed; the rest is closed all the same")


def _bind(address: Address, setting: str) -> list[socket.socket]:
    """Listening sockets on every address that the host has, all on one port; those of a family that is off here are left out."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise _cannot_bind(address, setting, error) from error
    sockets: list[socket.socket] = []
    failures: list[OSError] = []
    port = address.port
    for family, _, _, _, where in dict.fromkeys(found):
        try:
            sockets.append(_listening(family, (where[0], port, *where[2:]), dual=address.wildcard))
        except OSError as error:
            failures.append(error)
        else:
            port = int(sockets[0].getsockname()[1])
    taken = [error for error in failures if error.errno == errno.EADDRINUSE and address.port]
    if sockets and not taken:
        return sockets
    for sock in sockets:
        sock.close()
    cause = (taken or failures)[0]
    raise _cannot_bind(address, setting, cause) from cause


def _listening(family: int, where: tuple[Any, ...], *, dual: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        if os.name == "posix":
            # Allows a restart at once; two listeners still exclude each other.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not dual)
        sock.bind(where)
        sock.listen(128)
    except BaseException:
        sock.close()
        raise
    return sock


def _cannot_bind(address: Address, setting: str, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"{setting}: port {address.port} of {address.host} is in use; choose another, or 0 for any free one")
    return ConfigError(f"{setting}: cannot listen on {address} ({error.strerror or error}); give an address of this host")
