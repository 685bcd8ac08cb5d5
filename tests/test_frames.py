"""Frames in and out of sockets: the same by pyzmq's own calls and by those that keep the interpreter."""

from __future__ import annotations

import contextlib
import ctypes.util
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from kvcore import frames
from kvcore.sockets import Socket
from tests.helpers import wait_until

BOTH = pytest.mark.parametrize("calls", [frames.Frames(), frames.made()], ids=["pyzmq", "keeping"])


@pytest.fixture
def pair() -> Iterator[tuple[Socket, Socket]]:
    context: zmq.Context[Socket] = zmq.Context()
    one, two = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    one.bind("inproc://pair")
    two.connect("inproc://pair")
    yield one, two
    one.close()
    two.close()
    context.term()


def test_the_quicker_calls_are_there() -> None:
    assert isinstance(frames.made(), frames.KeepingFrames), "pyzmq's wheels show libzmq's functions"


def test_a_library_that_hides_them_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[zmq.backend.Socket.__module__], "__file__", ctypes.util.find_library("c"))
    assert type(frames.made()) is frames.Frames
    monkeypatch.setattr(sys.modules[zmq.backend.Socket.__module__], "__file__", "/no/such/library.so")
    assert type(frames.made()) is frames.Frames


def test_the_interpreter_is_kept(pair: tuple[Socket, Socket]) -> None:
    one, two = pair
    calls, turns, over, interval = frames.made(), 0, threading.Event(), sys.getswitchinterval()

    def wait_for_a_turn() -> None:
        nonlocal turns
        while not over.is_set():
            turns += 1
            time.sleep(0)

    other = threading.Thread(target=wait_for_a_turn)
    sys.setswitchinterval(60)  # so that nobody has to let go
    try:
        other.start()
        wait_until(lambda: turns > 0)
        before = turns
        for _ in range(300):
            calls.put(one, b"head", more=True)
            calls.put(one, b"frame")
            assert calls.readable(two)
            calls.take(two)
            calls.take(two)
        assert turns == before
    finally:
        over.set()
        sys.setswitchinterval(interval)
        other.join(10)


@BOTH
@pytest.mark.parametrize("size", [0, 1, 33, 4096, frames.LARGE, frames.LARGE + 1, 3_000_000])
def test_frames_arrive_as_they_were(calls: frames.Frames, pair: tuple[Socket, Socket], size: int) -> None:
    one, two = pair
    sent = bytes(i * i % 251 for i in range(min(size, 5000))).ljust(size, b"\0")
    for _ in range(3):  # what a large one held is given back, and the next one finds its place
        assert not calls.readable(two)
        calls.put(one, b"\0head", more=True)
        calls.put(one, sent)
        assert calls.readable(two)
        assert calls.take(two) == (b"\0head", True)
        assert calls.take(two) == (sent, False)


@BOTH
def test_nothing_is_waited_for(calls: frames.Frames, pair: tuple[Socket, Socket]) -> None:
    one, two = pair
    with pytest.raises(zmq.Again):
        calls.take(two)
    with contextlib.suppress(zmq.Again):
        while True:
            calls.put(one, b"full")
    assert calls.take(two) == (b"full", False)


@BOTH
def test_signals_change_nothing(calls: frames.Frames, pair: tuple[Socket, Socket]) -> None:
    one, two = pair
    signals, until = 0, time.monotonic() + 5

    def handle(*_: object) -> None:
        nonlocal signals
        signals += 1
        with contextlib.suppress(FileNotFoundError):
            os.stat("/no/such/file")  # an errno of its own

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
        while signals < 3000 and time.monotonic() < until:
            assert not calls.readable(two)
            with pytest.raises(zmq.Again):
                calls.take(two)
            calls.put(one, b"x")
            assert calls.readable(two)
            assert calls.take(two) == (b"x", False)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@BOTH
def test_a_closed_socket_is_told(calls: frames.Frames, pair: tuple[Socket, Socket]) -> None:
    for end in pair:
        end.close()
    for use in (lambda: calls.put(pair[0], b"x"), lambda: calls.take(pair[1]), lambda: calls.readable(pair[1])):
        with pytest.raises(zmq.ZMQError) as told:
            use()
        assert told.value.errno == zmq.ENOTSOCK and not isinstance(told.value, zmq.Again)


@BOTH
def test_close_gives_back_what_was_taken_last(calls: frames.Frames, pair: tuple[Socket, Socket]) -> None:
    one, two = pair
    calls.put(one, b"x" * 1000)
    calls.take(two)
    calls.close()
    calls.close()
    calls.put(one, b"y")
    assert calls.take(two) == (b"y", False), "and it may be used again"
