"""Who is let in at the control port where it has curve keys, and what becomes of those who are not. Used on the control thread only."""

from __future__ import annotations

import logging
import time

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from kvcore.access import CurveKeys
from kvcore.logs import Once

log = logging.getLogger("kvcore.channel")

ZAP = "inproc://zeromq.zap.01"
DOMAIN = b"kvcore"
MOST_AT_ONCE = 256
Socket = zmq.Socket[bytes]

_WRONG_START = "a connection that did not get as far as its curve key: it has none, or knows another public key than that of this instance"


class Doorkeeper:
    """Answers libzmq, which asks for each connection whether its key is allowed (ZAP, ZeroMQ's RFC 27); logs who is refused once each."""

    def __init__(self, context: zmq.Context[Socket], keys: CurveKeys) -> None:
        self._context, self._keys = context, keys
        self._once = Once()
        self._monitors = 0
        self.refused = 0
        """Connections that were not let in."""
        self.latest = ""
        """What the latest of them showed, and when."""
        self.latest_at = 0.0
        self._asked = self._own(zmq.REP)
        self._asked.bind(ZAP)
        self._failed: Socket

    def guard(self, router: Socket) -> None:
        """Have a socket, not bound yet, take only whom this lets in."""
        self._show(router)
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._failed = self.watch(router, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)

    def introduce(self, dealer: Socket, server: str) -> Socket:
        """Have a socket, not connected yet, show our key and insist on the server's; returns where ``turned_away`` hears of it."""
        self._show(dealer)
        dealer.setsockopt(zmq.CURVE_SERVERKEY, server.encode())
        return self.watch(dealer, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH)

    def watch(self, socket: Socket, events: int) -> Socket:
        """Where these events of a socket arrive. It must always be read, and never fill up: libzmq waits for it."""
        self._monitors += 1
        where = f"inproc://kvcore.monitor.{self._monitors}"
        socket.monitor(where, events)
        ends = self._own(zmq.PAIR)
        ends.connect(where)
        return ends

    @property
    def sockets(self) -> tuple[Socket, Socket]:
        """Those that are to be polled, and given to ``serve``."""
        return self._asked, self._failed

    def serve(self, ready: Socket) -> None:
        """One of ``sockets`` has something to say."""
        for _ in range(MOST_AT_ONCE):
            try:
                frames = ready.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            if ready is self._asked:
                self._answer(frames)
            else:
                self._refuse(_WRONG_START)

    def turned_away(self, monitor: Socket) -> str:
        """Why the other side does not let a dialled socket in, which libzmq then gives up; "" if it has not said so."""
        why = ""
        while True:
            try:
                event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.ZMQError:
                return why
            refused = f"it does not let in this instance's curve key {self._keys.public}; add it to security.curve_peers there"
            why = refused if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH else "it has no curve keys any more; set security.curve_secret there"

    def close(self) -> None:
        """Close both sockets."""
        for socket in self.sockets:
            socket.close()

    def _answer(self, frames: list[bytes]) -> None:
        version, request, _, address, _, _, *credentials = frames
        key = z85.encode(credentials[0]).decode() if len(credentials) == 1 and len(credentials[0]) == 32 else ""
        allowed = key in self._keys.allowed
        self._asked.send_multipart([version, request, *((b"200", b"OK") if allowed else (b"400", b"not allowed")), b"", b""])
        if not allowed:
            self._refuse(f"curve key {key} from {address.decode('ascii', 'replace')}, which is not in security.curve_peers", key)

    def _refuse(self, what: str, key: str = "") -> None:
        self.refused, self.latest, self.latest_at = self.refused + 1, what, time.monotonic()
        if self._once.first(key or what):
            log.warning("the control port refused %s; said once, and counted as kvcore_refused_peers_total", what)

    def _show(self, socket: Socket) -> None:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret.encode())

    def _own(self, kind: int) -> Socket:
        socket: Socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        return socket
