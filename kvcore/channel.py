"""The control thread: it owns every socket, and nothing else touches one.

One ROUTER is bound where peers dial in; each peer dialled has a DEALER. Sending is best effort, like a datagram: what cannot be
sent now is dropped, since the protocol above repeats whatever matters; how long a route has been blocked is what ``send_s`` limits.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from kvcore.addresses import Address
from kvcore.errors import ConfigError
from kvcore.logs import Failures
from kvcore.wire import MAX_LETTER_BYTES

log = logging.getLogger("kvcore.channel")

HIGH_WATER = 10_000
IDLE_S = 1.0
PAUSE_S = 0.05
"""After an error that is nobody's in particular."""
MOST_KEEPALIVE_S = 32_767
"""More than this Linux refuses, and the connection with it."""
LINGER_MS = 100
"""How long a closed socket may still send what it has."""


@dataclass(eq=False, slots=True)
class Route:
    """A way to one peer: a DEALER of its own, or an identity behind the ROUTER. ``blocked_at``: when a send first failed."""

    socket: zmq.Socket[bytes]
    identity: bytes | None = None
    address: str = ""
    blocked_at: float | None = None
    closed: bool = field(default=False)


class Channel:
    """Sockets and their thread, on which ``on_frame(route, bytes)`` and ``on_tick(now)`` are called; the latter returns when it is due."""

    def __init__(
        self,
        bind: Address,
        setting: str,
        keepalive_s: float,
        on_frame: Callable[[Route, bytes], None],
        on_tick: Callable[[float], float | None],
    ) -> None:
        self._on_frame, self._on_tick = on_frame, on_tick
        self._keepalive_s = max(1, round(min(keepalive_s, MOST_KEEPALIVE_S)))
        self._calls: deque[Callable[[], object]] = deque()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._woken = False
        self._wake_lock = threading.RLock()  # a handle may be collected, and wake this, in the middle of a wake
        self._stopping = threading.Event()
        self._failures = Failures(log)
        self._wake_at = 0.0
        self.bad_messages = 0
        self.tap: Callable[[Route, bytes, bool], int] = straight_through
        """How many times a frame on a route goes on, out (True) or in (False); 0 drops it. Called on the control thread, for tests."""
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 65536)
        self._router = self._socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._routes: dict[zmq.Socket[bytes], Route] = {}
        self.port = self._bind(bind, setting)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="kvcore-control", daemon=True)

    def _bind(self, bind: Address, setting: str) -> int:
        try:
            self._router.bind(f"{Address(bind.host, bind.port).zmq}" if bind.port else Address(bind.host, 0).zmq.removesuffix(":0") + ":*")
        except zmq.ZMQError as error:
            self._close_sockets()
            raise ConfigError(f"{setting}: cannot listen on {bind} ({error.strerror}); free the port, or set another (0 = any)") from error
        endpoint = self._router.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return int(endpoint.rstrip(b"\0").rpartition(b":")[2])

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_LETTER_BYTES)
        # The kernel closes connections to hosts that are gone. No ZMTP heartbeats: libzmq 4.3 aborts the whole process when one is due
        # on a broken connection whose letters are not read fast enough.
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, self._keepalive_s)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, self._keepalive_s)
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        return socket

    # --- from any thread

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def call(self, function: Callable[[], object]) -> None:
        """Have a function called on the control thread, in order of the calls. Never blocks."""
        self._calls.append(function)
        self.wake()

    def wake(self) -> None:
        """Have the loop take a turn soon."""
        if self._woken:
            return
        with self._wake_lock:
            if self._context.closed:
                return  # it has ended, and the number of the pipe may be another file's by now
            self._woken = True
            try:
                os.write(self._wake_write, b"\0")
            except OSError:  # full: it is awake
                return

    def wake_by(self, when: float) -> None:
        """Have the loop take a turn at ``when`` at the latest."""
        if when < self._wake_at:
            self.wake()

    def stop(self, timeout_s: float) -> bool:
        """Send what is queued, close all sockets and end the thread; True if it ended. Idempotent."""
        self._stopping.set()
        self._woken = False
        self.wake()
        if self._thread.ident is None:
            self._close_sockets()
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def calls(self) -> int:
        """Calls that wait for the control thread."""
        return len(self._calls)

    @property
    def sockets(self) -> int:
        """Sockets that are open."""
        return 0 if self._context.closed else 1 + len(self._routes)

    # --- on the control thread only

    def dial(self, address: Address) -> Route:
        """A new route to an address; ``OSError`` if there is none to be had now."""
        try:
            socket = self._socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror) from error
        try:
            socket.connect(address.zmq)
        except zmq.ZMQError as error:
            socket.close()
            raise OSError(error.errno, error.strerror) from error
        route = Route(socket, address=str(address))
        self._routes[socket] = route
        self._poller.register(socket, zmq.POLLIN)
        return route

    def hang_up(self, route: Route) -> None:
        """Close a dialled route; nothing for a route behind the ROUTER. Idempotent."""
        if route.identity is not None or route.closed:
            return
        route.closed = True
        self._poller.unregister(route.socket)
        del self._routes[route.socket]
        route.socket.close()

    def send(self, route: Route, frame: bytes, now: float) -> bool:
        """Send one frame now, or drop it; notes since when the route is blocked."""
        return all(self.pass_on(route, frame, now) for _ in range(self.tap(route, frame, True)))

    def pass_on(self, route: Route, frame: bytes, now: float) -> bool:
        """``send`` past the tap."""
        parts = [frame] if route.identity is None else [route.identity, frame]
        if not route.closed:
            try:
                route.socket.send_multipart(parts, zmq.NOBLOCK)
            except zmq.ZMQError:
                pass
            else:
                route.blocked_at = None
                return True
        route.blocked_at = route.blocked_at or now
        return False

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._turn()
            except Exception:
                self._failures.note("turn", "the control thread goes on after an error")
                self._stopping.wait(PAUSE_S)  # what is broken for good must not keep it busy
        self._take_calls()
        self._close_sockets()

    def _turn(self) -> None:
        self._take_calls()
        now = time.monotonic()
        wanted = self._on_tick(now)
        self._wake_at = now + IDLE_S if wanted is None else min(wanted, now + IDLE_S)
        wait_ms = 0 if self._calls else max(0, int((self._wake_at - now) * 1000) + 1)
        broken = None
        for ready, _ in self._poller.poll(wait_ms):
            if ready == self._wake_read:
                os.read(self._wake_read, 4096)
                self._woken = False  # after the read: a wake in between is served by the turn that follows
            elif isinstance(ready, zmq.Socket) and not ready.closed:  # as another one's frame may have had it
                try:
                    self._receive(ready)
                except zmq.ZMQError as error:
                    broken = error  # the others have their turn before
        if broken is not None:
            raise broken

    def _take_calls(self) -> None:
        for _ in range(len(self._calls)):
            function = self._calls.popleft()
            try:
                function()
            except Exception:
                self._failures.note("call", "a call on the control thread failed; the others go on")

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        for _ in range(256):  # then other sockets and timers have their turn
            if socket.closed:
                return
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            route = self._routes.get(socket)
            frames = parts if route is not None else parts[1:]
            if len(frames) != 1:
                self.note_bad(f"{len(frames)} frames where one is due")
                continue
            route = route or Route(socket, parts[0])
            for _ in range(self.tap(route, frames[0], False)):
                self.take(route, frames[0])

    def take(self, route: Route, frame: bytes) -> None:
        """Handle a frame that came, or is said to have come, over a route."""
        try:
            self._on_frame(route, frame)
        except Exception:
            self._failures.note("message", "a message could not be handled; the next one is served")

    def note_bad(self, what: str) -> None:
        """Count a bad message, and log the first few and then one in a thousand (P5)."""
        self.bad_messages += 1
        if self.bad_messages <= 10 or self.bad_messages % 1000 == 0:
            log.warning("bad message on the control port, dropped (number %d): %s", self.bad_messages, what[:200])

    def _close_sockets(self) -> None:
        for route in list(self._routes.values()):
            self.hang_up(route)
        self._router.close()
        with self._wake_lock:
            self._context.term()
            os.close(self._wake_read)
            os.close(self._wake_write)


def straight_through(_route: Route, _frame: bytes, _outgoing: bool) -> int:
    """No tap."""
    return 1
