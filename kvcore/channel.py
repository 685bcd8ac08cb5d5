"""The control plane's sockets, the lock that whoever uses one holds, and the control thread, which holds it but while it sleeps.

Another thread that has something to send does it itself where the control thread sleeps (``settle``), and leaves it to that otherwise. One
ROUTER is bound where peers dial in; each peer dialled has a DEALER. Sending is best effort, like a datagram: what cannot be sent now is
dropped, since the protocol above repeats whatever matters; how long a route has been blocked is what ``send_s`` limits.
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

from kvcore import frames, sockets
from kvcore.access import CurveKeys, unlike
from kvcore.addresses import Address
from kvcore.descriptors import DescriptorWatch
from kvcore.doorkeeper import Doorkeeper
from kvcore.errors import ConfigError, IncompatiblePeerError
from kvcore.logs import Failures, Once
from kvcore.pulse import Pulse
from kvcore.readiness import Readiness
from kvcore.seat import Seat
from kvcore.sockets import Socket

log = logging.getLogger("kvcore.channel")

IDLE_S = 1.0
PAUSE_S = 0.05
"""After an error that is nobody's in particular."""
MOST_CALLS = 1000
MOST_LETTERS = 64
"""That another thread sends in one go; it is a scheduler's, perhaps."""


@dataclass(eq=False, slots=True)
class Route:
    """A way to one peer: a DEALER of its own, or an identity behind the ROUTER. ``blocked_at``: when a send first failed; ``monitor``:
    where one with keys hears that it is not let in."""

    socket: Socket
    identity: bytes | None = None
    address: str = ""
    blocked_at: float | None = None
    closed: bool = field(default=False)
    monitor: Socket | None = None


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
        self._keepalive_s = keepalive_s
        self._calls: deque[Callable[[], object]] = deque()
        self._letters: deque[Callable[[], object]] = deque()
        self._frames = frames.made()
        self._readiness = Readiness(self._frames)
        self._using, self._process = Seat(), os.getpid()
        self._found: list[Socket] = []
        self._closed = self._again = self._resting = self._tick_soon = False
        self._ident: int | None = None
        self._time_lock = threading.RLock()  # a handle may be collected, and arm a timer, in the middle of that
        self._stopping = threading.Event()
        self._once, self._failures = Once(), Failures(log)
        self._wake_at = self._look_at = 0.0
        self._descriptors = DescriptorWatch(log)
        self.bad_messages = 0
        self.tap: Callable[[Route, bytes, bool], int] = straight_through
        """How many times a frame on a route goes on, out (True) or in (False); 0 drops it. Called by who is at the sockets, for tests."""
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 65536)
        self._router = sockets.made(self._context, zmq.ROUTER, keepalive_s)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._routes: dict[Socket, Route] = {}
        self._monitored: dict[Socket, Route] = {}
        self._door = Doorkeeper(self._context, keys) if keys is not None else None
        if self._door is not None:
            self._door.guard(self._router)
        try:
            self.port = sockets.bind(self._router, bind, setting)
        except ConfigError:
            self._close_sockets()
            raise
        for socket in (self._router, *(self._door.sockets if self._door is not None else ())):
            self._readiness.add(socket)
        self._thread = threading.Thread(target=self._run, name="kvcore-control", daemon=True)
        self.pulse = Pulse(self._thread)

    # --- from any thread

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def call(self, function: Callable[[], object]) -> None:
        """Have a function called on the control thread, in order of the calls. Never blocks."""
        self._calls.append(function)
        self.wake()

    def post(self, letter: Callable[[], object]) -> None:
        """Have a letter sent by the next ``settle``, or the control thread's next turn. It may be called on any thread."""
        self._letters.append(letter)

    def settle(self) -> None:
        """Send what was posted, if nobody is at the sockets; whoever is sends it before it leaves. Never blocks. Nothing in a fork."""
        try:
            for _ in range(2):  # what others post meanwhile, too, but not for ever
                if not self._letters or self._process != os.getpid() or not self._using.attempt(self._send_posted):
                    return
        except BaseException:  # of a signal handler: others rely on this thread to look once more
            self.wake()
            raise
        if self._letters:
            self.wake()

    def _send_posted(self) -> None:
        try:
            self._take(self._letters, MOST_LETTERS)
        finally:
            if left := [] if self._closed else self._readiness.left():
                self._found += left
                self.wake()

    def wake(self) -> None:
        """Have the loop take a turn soon."""
        if threading.get_ident() == self._ident and not self._resting:  # as it is where a handle is collected just before it sleeps
            self._again = True
        else:
            self._readiness.wake()

    def wake_by(self, when: float) -> None:
        """Have ``on_tick`` called at ``when`` at the latest."""
        if when < self._wake_at:
            with self._time_lock:
                self._wake_at = min(when, self._wake_at)
            self.wake()

    def tick_soon(self) -> None:
        """Have ``on_tick`` called in the next turn. From anywhere, a finalizer too."""
        self._tick_soon = True
        self.wake()

    def stop(self, timeout_s: float) -> bool:
        """Send what is queued, close all sockets and end the thread; True if it ended. Idempotent."""
        self._stopping.set()
        self.wake()
        if self._thread.ident is None:
            self._close_sockets()
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def calls(self) -> int:
        """Calls and letters that wait for the control thread."""
        return len(self._calls) + len(self._letters)

    @property
    def sockets(self) -> int:
        """Sockets that are open."""
        doors = len(self._door.sockets) if self._door is not None else 0
        return 0 if self._closed else 1 + len(self._routes) + len(self._monitored) + doors

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

    # --- with the sockets in use: ``send`` on any thread, the rest on the control thread only

    def dial(self, address: Address, curve: str = "") -> Route:
        """A new route to an address, whose instance has this public key; "" for none.

        Raises ``OSError`` if there is none to be had now, and ``IncompatiblePeerError`` if we cannot be let in, or it not by us.
        """
        if why := unlike(self.keys, curve):
            self._tell(address, why)
            raise IncompatiblePeerError(why)
        route: Route | None = None
        try:
            route = Route(sockets.made(self._context, zmq.DEALER, self._keepalive_s), address=str(address))
            if self._door is not None:
                route.monitor = self._door.introduce(route.socket, curve)
            route.socket.connect(address.zmq)
        except zmq.ZMQError as error:
            if route is not None:
                self._close(route)
            raise OSError(error.errno, error.strerror) from error
        self._routes[route.socket] = route
        self._readiness.add(route.socket)
        if route.monitor is not None:
            self._monitored[route.monitor] = route
            self._readiness.add(route.monitor)
        return route

    def hang_up(self, route: Route) -> None:
        """Close a dialled route; nothing for a route behind the ROUTER. Idempotent."""
        if route.identity is not None or route.closed:
            return
        route.closed = True
        self._readiness.drop(route.socket)
        del self._routes[route.socket]
        if route.monitor is not None:
            self._readiness.drop(route.monitor)
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
            self._readiness.use(route.socket)  # also where nothing can be sent
            try:
                if route.identity is not None:
                    self._frames.put(route.socket, route.identity, more=True)
                self._frames.put(route.socket, frame)
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
        with self._using:
            for calls in (self._letters, self._calls):
                self._take(calls, len(calls))
            self._close_sockets()

    def _turn(self) -> None:
        self._resting = self._again = False
        self.pulse.began()
        with self._using:
            found, self._found = self._found, []
            broken = self._serve(found)
            self._take(self._letters, MOST_CALLS)
            self._take(self._calls, MOST_CALLS)
            now = time.monotonic()
            if now >= self._look_at:
                self._look_at = now + IDLE_S
                self._descriptors.look(self._readiness.descriptor)
            if self._tick_soon or now >= self._wake_at:
                self._tick(now)
            self._take(self._letters, MOST_CALLS)
            self._found += self._readiness.left()
        if broken is not None:
            raise broken
        self.pulse.rests()
        self._resting = True
        at_once = self._found or self._letters or self._calls or self._again  # looked at with nobody at the sockets: see ``settle``
        found = self._readiness.wait(0 if at_once else max(0.0, self._wake_at - now))
        self._found += found

    def _tick(self, now: float) -> None:
        self._wake_at, self._tick_soon, next_s = math.inf, False, PAUSE_S  # what is armed from now on may come too late for the answer
        try:
            wanted = self._on_tick(now)
            next_s = IDLE_S if wanted is None else min(wanted - now, IDLE_S)
        except Exception:
            self._failures.note("tick", "the control thread could not do all that was due; it goes on, and tries again")
        with self._time_lock:
            self._wake_at = min(self._wake_at, now + next_s)

    def _serve(self, found: list[Socket]) -> Exception | None:
        """Take what has come; returns the error of a socket that could not be read, so that the others had their turn."""
        broken = None
        for socket in dict.fromkeys(found):
            if socket.closed:  # another one's frame may have had it
                continue
            try:
                if self._door is not None and socket in self._door.sockets:
                    self._door.serve(socket)
                    self._readiness.use(socket)
                elif socket in self._monitored:
                    self._turned_away(self._monitored[socket])
                else:
                    self._receive(socket)
            except Exception as error:
                self._readiness.use(socket)
                broken = error
        return broken

    def _turned_away(self, route: Route) -> None:
        if self._door is not None and route.monitor is not None and (why := self._door.turned_away(route.monitor)):
            self._tell(route.address, why)
            self.on_refused(route, why)

    def _tell(self, address: Address | str, why: str) -> None:
        """Log once why there is no way to an address: every room there will fail with it."""
        if self._once.first(f"{address} {why}"):
            log.warning("no way to %s: %s", address, why)

    def _take(self, calls: deque[Callable[[], object]], most: int) -> None:
        for _ in range(most):  # those made meanwhile too; then the sockets have their turn
            if not calls:
                return
            try:
                calls.popleft()()
            except Exception:
                self._failures.note("call", "a call at the sockets failed; the others go on")

    def _receive(self, socket: Socket) -> None:
        for _ in range(256):
            if socket.closed or not self._frames.readable(socket):
                return
            try:
                route = self._routes.get(socket) or Route(socket, self._frames.take(socket)[0])  # the ROUTER's first part says who
                (frame, more), number = self._frames.take(socket), 1
                while more:
                    (_, more), number = self._frames.take(socket), number + 1
            except zmq.Again:
                return
            if number > 1:
                self.note_bad(f"{number} frames where one is due")
                continue
            for _ in range(self.tap(route, frame, False)):
                self.take(route, frame)
        self._readiness.use(socket)  # other sockets and timers have their turn

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
        self._closed = True
        self._context.term()
        self._frames.close()
        self._readiness.close()


def _worth_a_line(number: int) -> bool:
    return number <= 10 or number % 1000 == 0


def straight_through(_route: Route, _frame: bytes, _outgoing: bool) -> int:
    """No tap."""
    return 1
