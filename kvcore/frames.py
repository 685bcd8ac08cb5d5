"""Frames in and out of ZeroMQ's sockets, by calls that keep the interpreter.

pyzmq lets go of it in each call. Whichever thread waits for it is woken then, on another core, and mostly finds it taken again: with three
busy threads that was a fifth of a room's CPU time. No call here waits for anything, so nobody has to wait for one.
"""

from __future__ import annotations

import ctypes
import errno
import sys
from typing import Any

import zmq

from kvcore.sockets import Socket

EVENTS, READABLE, NOBLOCK, MORE_COMES = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
LARGE = 65_536
"""Bytes of a frame whose memory libzmq gets back at once, and not with the next frame."""


class Frames:
    """What is done with the sockets of one owner, by one thread at a time, with pyzmq's own calls. Each raises ``zmq.ZMQError``, and
    ``zmq.Again`` where it would have to wait."""

    def put(self, socket: Socket, frame: bytes, more: bool = False) -> None:
        """Send a frame; ``more``: of the same message as the next."""
        socket.send(frame, MORE_COMES if more else NOBLOCK)

    def take(self, socket: Socket) -> tuple[bytes, bool]:
        """The next frame that has come, and whether there are more of its message."""
        part = socket.recv(NOBLOCK, copy=False)
        return part.bytes, bool(part.more)

    def readable(self, socket: Socket) -> bool:
        """Whether there is something to take."""
        return bool(int(socket.get(EVENTS)) & READABLE)

    def close(self) -> None:
        """Give back what is held. Idempotent; nothing is taken any more."""


class KeepingFrames(Frames):
    """The same with libzmq's functions of a ``library``, called with the interpreter kept. ``AttributeError`` if it does not show them.

    What a signal cuts short is done once more, as by pyzmq. The ``library`` keeps the errno of a call (``use_errno``), since the program's
    signal handler may run before anybody asks for it.
    """

    def __init__(self, library: ctypes.PyDLL) -> None:
        pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        self._send = _function(library, "zmq_send", integer, pointer, ctypes.c_char_p, size, integer)
        self._option = _function(library, "zmq_getsockopt", integer, pointer, integer, pointer, pointer)
        self._receive = _function(library, "zmq_msg_recv", integer, pointer, pointer, integer)
        self._data = _function(library, "zmq_msg_data", pointer, pointer)
        self._more = _function(library, "zmq_msg_more", integer, pointer)
        self._begin = _function(library, "zmq_msg_init", integer, pointer)
        self._end = _function(library, "zmq_msg_close", integer, pointer)
        self._copy = _function(ctypes.pythonapi, "PyBytes_FromStringAndSize", ctypes.py_object, pointer, ctypes.c_ssize_t)
        self._value, self._value_bytes = integer(), size(ctypes.sizeof(integer))
        self._value_at, self._value_bytes_at = ctypes.addressof(self._value), ctypes.addressof(self._value_bytes)
        self._message = (ctypes.c_uint64 * 8)()  # a ``zmq_msg_t``
        self._message_at = ctypes.addressof(self._message)
        self._begin(self._message_at)

    def put(self, socket: Socket, frame: bytes, more: bool = False) -> None:
        while self._send(socket.underlying, frame, len(frame), MORE_COMES if more else NOBLOCK) < 0:
            _failed()

    def take(self, socket: Socket) -> tuple[bytes, bool]:
        message = self._message_at
        while (size := self._receive(message, socket.underlying, NOBLOCK)) < 0:
            _failed()
        frame, more = self._copy(self._data(message), size), bool(self._more(message))
        if size > LARGE:
            self.close()
        return frame, more

    def readable(self, socket: Socket) -> bool:
        while self._option(socket.underlying, EVENTS, self._value_at, self._value_bytes_at) < 0:
            _failed()
        return bool(self._value.value & READABLE)

    def close(self) -> None:
        self._end(self._message_at)
        self._begin(self._message_at)


def _failed() -> None:
    """Raise why the last call failed; nothing where it was cut short."""
    number = ctypes.get_errno()
    if number != errno.EINTR:
        raise zmq.Again(number) if number == errno.EAGAIN else zmq.ZMQError(number)


def _function(library: ctypes.PyDLL, name: str, result: Any, *arguments: Any) -> Any:
    function = library[name]  # one of our own, whatever others make of theirs
    function.restype, function.argtypes = result, arguments
    return function


def made() -> Frames:
    """The quicker ones, where pyzmq's extension leads to libzmq's functions; one into which libzmq was built may hide them."""
    try:
        return KeepingFrames(ctypes.PyDLL(sys.modules[zmq.backend.Socket.__module__].__file__, use_errno=True))
    except (AttributeError, OSError):
        return Frames()
