"""How the control plane's sockets are made: the options that all of them have, and the port where peers dial in."""

from __future__ import annotations

import zmq

from kvcore.addresses import Address
from kvcore.errors import ConfigError
from kvcore.wire import MAX_LETTER_BYTES

Socket = zmq.Socket[bytes]

HIGH_WATER = 10_000
MOST_KEEPALIVE_S = 32_767
"""More than this Linux refuses, and the connection with it."""
LINGER_MS = 100
"""How long a closed socket may still send what it has."""


def made(context: zmq.Context[Socket], kind: int, keepalive_s: float) -> Socket:
    """A socket; of a connection that says nothing, the kernel finds out after ``keepalive_s`` and a few such times more."""
    socket: Socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_LETTER_BYTES)
    # The kernel closes connections to hosts that are gone. No ZMTP heartbeats: libzmq 4.3 aborts the whole process when one is due
    # on a broken connection whose letters are not read fast enough.
    every_s = max(1, round(min(keepalive_s, MOST_KEEPALIVE_S)))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, every_s)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, every_s)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    return socket


def bind(socket: Socket, to: Address, setting: str) -> int:
    """Listen there, port 0 for any; the port. ``ConfigError`` that names the setting."""
    try:
        socket.bind(f"{Address(to.host, to.port).zmq}" if to.port else Address(to.host, 0).zmq.removesuffix(":0") + ":*")
    except zmq.ZMQError as error:
        raise ConfigError(f"{setting}: cannot listen on {to} ({error.strerror}); free the port, or set another (0 = any)") from error
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return int(endpoint.rstrip(b"\0").rpartition(b":")[2])
