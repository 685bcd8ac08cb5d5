"""What the control thread sleeps by: sockets that can be read, and whoever wakes it.

The descriptor of a ZeroMQ socket shows only that something happened since the socket was last used, and any use takes that sign away. So
whoever has used one has it looked at once more before the thread sleeps (``use``, ``left``).
"""

from __future__ import annotations

import os
import select
import threading

import zmq

from kvcore.frames import Frames
from kvcore.sockets import Socket


class Readiness:
    """``wake`` is for any thread, ``wait`` for the one that sleeps, all else for who may use the sockets."""

    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        self._epoll = select.epoll()
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._epoll.register(self._read, select.EPOLLIN)
        self._sockets: dict[int, Socket] = {}
        self._used: set[Socket] = set()
        self._woken = False
        self._lock = threading.RLock()  # a handle may be collected, and wake this, in the middle of a wake

    @property
    def descriptor(self) -> int:
        """One that is open."""
        return self._read

    def add(self, socket: Socket) -> None:
        """Wait for a socket from now on."""
        descriptor = int(socket.get(zmq.FD))
        self._sockets[descriptor] = socket
        self._epoll.register(descriptor, select.EPOLLIN)
        self._used.add(socket)

    def drop(self, socket: Socket) -> None:
        """Wait no more for a socket, which is still open."""
        descriptor = int(socket.get(zmq.FD))
        self._epoll.unregister(descriptor)
        del self._sockets[descriptor]
        self._used.discard(socket)

    def use(self, socket: Socket) -> None:
        """A socket is sent on, whether that works or not, or was not read to its end."""
        self._used.add(socket)

    def left(self) -> list[Socket]:
        """Those used since the last time that can be read."""
        if not self._used:
            return []
        used, self._used = self._used, set()
        return [socket for socket in used if not socket.closed and self._may_be_read(socket)]

    def _may_be_read(self, socket: Socket) -> bool:
        try:
            return self._frames.readable(socket)
        except zmq.ZMQError:  # whoever reads it will see why
            return True

    def wait(self, timeout_s: float) -> list[Socket]:
        """Sockets that something happened to, as soon as there are any, it is woken, or so many seconds have passed."""
        found = []
        for descriptor, _ in self._epoll.poll(timeout_s):
            if descriptor == self._read:
                os.read(self._read, 4096)
                self._woken = False  # after the read: a wake in between is served by the turn that follows
            else:
                found.append(self._sockets[descriptor])
        return found

    def wake(self) -> None:
        """End the sleep, or the next one. Never blocks; also from a signal handler or a finalizer."""
        if self._woken:
            return
        with self._lock:
            if self._epoll.closed:
                return  # the number of the pipe may be another file's by now
            self._woken = True
            try:
                os.write(self._write, b"\0")
            except OSError:  # full: it is awake
                return

    def close(self) -> None:
        """Give the descriptors back. All wakes after it do nothing. Idempotent."""
        with self._lock:
            if self._epoll.closed:
                return
            self._epoll.close()
            os.close(self._read)
            os.close(self._write)
