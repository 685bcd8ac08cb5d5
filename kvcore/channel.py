"""The control thread: it owns every socket, and nothing else touches one.

One ROUTER is bound where peers dial in; each peer dialled has a DEALER. Sending is best effort, like a datagram: what cannot be
sent now is dropped, since the protocol above repeats whatever matters; how long a route has been blocked is what ``send_s`` limits.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from kvcore.access import CurveKeys, unlike
from kvcore.addresses import Address
from kvcore.descriptors import DescriptorWatch
from kvcore.doorkeeper import Doorkeeper
from kvcore.errors import ConfigError, IncompatiblePeerError
from kvcore.logs import Failures, Once
from kvcore.pulse import Pulse
from kvcore.wire import MAX_LETTER_BYTES

log = logging.getLogger("kvcore.channel")

HIGH_WATER = 10_000
IDLE_S = 1.0
PAUSE_S = 0.05
"""After an error that is nobody's in particular."""
MOST_KEEPALIVE_S = 32_767
"""More than this Linux refuses, and the connection with it."""
READABLE = int(zmq.POLLIN)
MORE_COMES = zmq.NOBLOCK | zmq.SNDMORE
MOST_CALLS = 1000
LINGER_MS = 100
"""How long a closed socket may still send what it has."""


@dataclass(eq=False, slots=True)
class Route:
    """A way to one peer: a DEALER of its own, or an identity behind the ROUTER. ``blocked_at``: when a send first failed; ``monitor``:
    where one with keys hears that it is not let in."""

    socket: zmq.Socket[bytes]
    identity: bytes | None = None
    address: str = ""
    blocked_at: float | None = None
    closed: bool = field(default=False)
    monitor: zmq.Socket[bytes] | None = None


class Channel:
    """Sockets and their thread, on which ``on_frame(route, bytes)`` and ``on_tick(now)`` are called; the latter returns when it is due."""

    def __init__(
        self,
        bind: Address,
        setting: str,
        keepalive_s: float,
        on_frame: Callable[[Route, bytes], None],
        on_tick: Callable[[float], float | None],
        keys: CurveKeys | None = None,
    ) -> None:
        self._on_frame, self._on_tick = on_frame, on_tick
        self.keys = keys
        self.on_refused: Callable[[Route, str], None] = lambda _route, _why: None
        """Called on the control thread with a dialled route that is not let in, and why."""
        self._keepalive_s = max(1, round(min(keepalive_s, MOST_KEEPALIVE_S)))
        self._calls: deque[Callable[[], object]] = deque()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._woken = self._again = self._resting = self._tick_soon = False
        self._ident: int | None = None
        self._wake_lock = threading.RLock()  # a handle may be collected, and wake this, in the middle of a wake
        self._stopping = threading.Event()
        self._once, self._failures = Once(), Failures(log)
        self._wake_at = self._look_at = 0.0
        self._descriptors = DescriptorWatch(log)
        self.bad_messages = 0
        self.tap: Callable[[Route, bytes, bool], int] = straight_through
        """How many times a frame on a route goes on, out (True) or in (False); 0 drops it. Called on the control thread, for tests."""
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 65536)
        self._router = self._socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._routes: dict[zmq.Socket[bytes], Route] = {}
        self._monitored: dict[zmq.Socket[bytes], Route] = {}
        self._door = Doorkeeper(self._context, keys) if keys is not None else None
        if self._door is not None:
            self._door.guard(self._router)
        self.port = self._bind(bind, setting)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)
        for socket in self._door.sockets if self._door is not None else ():
            self._poller.register(socket, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="kvcore-control", daemon=True)
        self.pulse = Pulse(self._thread)

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
        if threading.get_ident() == self._ident and not self._resting:  # as it is where a handle is collected just before it sleeps
            self._again = True
            return
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
        """Have ``on_tick`` called at ``when`` at the latest."""
        if when < self._wake_at:
            with self._wake_lock:
                self._wake_at = min(when, self._wake_at)
            self.wake()

    def tick_soon(self) -> None:
        """Have ``on_tick`` called in the next turn. From anywhere, a finalizer too."""
        self._tick_soon = True
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
    def calls(self) -> int:
        """Calls that wait for the control thread."""
        return len(self._calls)

    @property
    def sockets(self) -> int:
        """Sockets that are open."""
        doors = len(self._door.sockets) if self._door is not None else 0
        return 0 if self._context.closed else 1 + len(self._routes) + len(self._monitored) + doors

    @property
    def public(self) -> str:
        """Our public key; "" without keys."""
        return self.keys.public if self.keys is not None else ""

    @property
    def refused(self) -> int:
        """Connections to the control port that were refused for their curve key."""
        return self._door.refused if self._door is not None else 0

    def why_refused(self, since: float) -> str:
        """What the latest of them showed; "" if there was none since then."""
        latest = self._door.latest if self._door is not None and self._door.latest_at >= since else ""
        return f"the control port refused {self.refused} connections, the latest: {latest}" if latest else ""

    # --- on the control thread only

    def dial(self, address: Address, curve: str = "") -> Route:
        """A new route to an address, whose instance has this public key; "" for none.

        Raises ``OSError`` if there is none to be had now, and ``IncompatiblePeerError`` if we cannot be let in, or it not by us.
        """
        if why := unlike(self.keys, curve):
            self._tell(address, why)
            raise IncompatiblePeerError(why)
        route: Route | None = None
        try:
            route = Route(self._socket(zmq.DEALER), address=str(address))
            if self._door is not None:
                route.monitor = self._door.introduce(route.socket, curve)
            route.socket.connect(address.zmq)
        except zmq.ZMQError as error:
            if route is not None:
                self._close(route)
            raise OSError(error.errno, error.strerror) from error
        self._routes[route.socket] = route
        self._poller.register(route.socket, zmq.POLLIN)
        if route.monitor is not None:
            self._monitored[route.monitor] = route
            self._poller.register(route.monitor, zmq.POLLIN)
        return route

    def hang_up(self, route: Route) -> None:
        """Close a dialled route; nothing for a route behind the ROUTER. Idempotent."""
        if route.identity is not None or route.closed:
            return
        route.closed = True
        self._poller.unregister(route.socket)
        del self._routes[route.socket]
        if route.monitor is not None:
            self._poller.unregister(route.monitor)
            del self._monitored[route.monitor]
        self._close(route)

    def _close(self, route: Route) -> None:
        route.socket.close()
        if route.monitor is not None:
            route.monitor.close()

    def send(self, route: Route, frame: bytes, now: float) -> bool:
        """Send one frame now, or drop it; notes since when the route is blocked."""
        sent = True
        for _ in range(self.tap(route, frame, True)):
            sent = self.pass_on(route, frame, now) and sent
        return sent

    def pass_on(self, route: Route, frame: bytes, now: float) -> bool:
        """``send`` past the tap."""
        if not route.closed:
            try:
                if route.identity is not None:
                    route.socket.send(route.identity, MORE_COMES)
                route.socket.send(frame, zmq.NOBLOCK)
            except zmq.ZMQError:
                pass
            else:
                route.blocked_at = None
                return True
        route.blocked_at = route.blocked_at or now
        return False

    def _run(self) -> None:
        self._ident = threading.get_ident()
        while not self._stopping.is_set():
            try:
                self._turn()
            except Exception:
                self._failures.note("turn", "the control thread goes on after an error")
                self._stopping.wait(PAUSE_S)  # what is broken for good must not keep it busy
        for _ in range(0, len(self._calls), MOST_CALLS):
            self._take_calls()
        self._close_sockets()

    def _turn(self) -> None:
        self.pulse.began()
        self._again = False
        self._take_calls()
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + IDLE_S
            self._descriptors.look(self._wake_read)
        if self._tick_soon or now >= self._wake_at:
            self._wake_at, self._tick_soon, next_s = math.inf, False, PAUSE_S  # what is armed from now on may come too late for the answer
            try:
                wanted = self._on_tick(now)
                next_s = IDLE_S if wanted is None else min(wanted - now, IDLE_S)
            except Exception:
                self._failures.note("tick", "the control thread could not do all that was due; it goes on, and tries again")
            with self._wake_lock:
                self._wake_at = min(self._wake_at, now + next_s)
        self._resting = True
        wait_ms = 0 if self._calls or self._again else max(0, int((self._wake_at - now) * 1000) + 1)
        self.pulse.rests()
        came = self._poller.poll(wait_ms)
        self.pulse.began()
        self._resting = False
        broken = None
        for ready, _ in came:
            if ready == self._wake_read:
                os.read(self._wake_read, 4096)
                self._woken = False  # after the read: a wake in between is served by the turn that follows
            elif self._door is not None and ready in self._door.sockets:
                self._door.serve(ready)
            elif ready in self._monitored:
                self._turned_away(self._monitored[ready])
            elif isinstance(ready, zmq.Socket) and not ready.closed:  # as another one's frame may have had it
                try:
                    self._receive(ready)
                except zmq.ZMQError as error:
                    broken = error  # the others have their turn before
        if broken is not None:
            raise broken

    def _turned_away(self, route: Route) -> None:
        if self._door is not None and route.monitor is not None and (why := self._door.turned_away(route.monitor)):
            self._tell(route.address, why)
            self.on_refused(route, why)

    def _tell(self, address: Address | str, why: str) -> None:
        """Log once why there is no way to an address: every room there will fail with it."""
        if self._once.first(f"{address} {why}"):
            log.warning("no way to %s: %s", address, why)

    def _take_calls(self) -> None:
        for _ in range(MOST_CALLS):  # those made meanwhile too; then the sockets have their turn
            if not self._calls:
                return
            try:
                self._calls.popleft()()
            except Exception:
                self._failures.note("call", "a call on the control thread failed; the others go on")

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        for number in range(256):  # then other sockets and timers have their turn
            if socket.closed or (number and not int(socket.get(zmq.EVENTS)) & READABLE):
                return
            try:
                route = self._routes.get(socket) or Route(socket, socket.recv(zmq.NOBLOCK))  # the ROUTER's first part says who
                last = socket.recv(zmq.NOBLOCK, copy=False)
                frame, more = last.bytes, 1 if last.more else 0
                while last.more:
                    last, more = socket.recv(zmq.NOBLOCK, copy=False), more + 1
            except zmq.Again:
                return
            if more:
                self.note_bad(f"{more} frames where one is due")
                continue
            for _ in range(self.tap(route, frame, False)):
                self.take(route, frame)

    def take(self, route: Route, frame: bytes) -> None:
        """Handle a frame that came, or is said to have come, over a route."""
        try:
            self._on_frame(route, frame)
        except Exception:
            self._failures.note("message", "a message could not be handled; the next one is served")

    def note_bad(self, what: str) -> None:
        """Count a bad message, and log the first few and then one in a thousand (P5)."""
        self.bad_messages += 1
        if _worth_a_line(self.bad_messages):
            log.warning("bad message on the control port, dropped (number %d): %s", self.bad_messages, what[:200])

    def _close_sockets(self) -> None:
        for route in list(self._routes.values()):
            self.hang_up(route)
        self._router.close()
        if self._door is not None:
            self._door.close()
        with self._wake_lock:
            self._context.term()
            os.close(self._wake_read)
            os.close(self._wake_write)


def _worth_a_line(number: int) -> bool:
    return number <= 10 or number % 1000 == 0


def straight_through(_route: Route, _frame: bytes, _outgoing: bool) -> int:
    """No tap."""
    return 1
