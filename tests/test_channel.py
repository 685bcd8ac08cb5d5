"""The control thread's sockets by themselves: bounds on what arrives, what is known of a route that is blocked; and the tap's memory."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from kvcore import control_tap
from kvcore.addresses import Address
from kvcore.channel import MOST_CALLS, MOST_LETTERS, Channel, Route
from kvcore.faults import ControlTap
from kvcore.seat import Seat
from kvcore.wire import MAX_LETTER_BYTES, Letter
from tests.helpers import duo, stays, wait_until
from tests.interrupts import everywhere


class Port:
    """A channel that keeps what comes, and how much of it came between two turns."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.routes: list[Route] = []
        self.turns: list[int] = []
        self.held = threading.Event()
        self.held.set()
        self.due_in_s: float | None = None
        self.broken = False
        self.channel = Channel(Address("127.0.0.1", 0), "port", 5.0, self.on_frame, self.on_tick)

    def on_frame(self, route: Route, frame: bytes) -> None:
        assert self.held.wait(10)
        self.frames.append(frame)
        self.routes.append(route)

    def on_tick(self, now: float) -> float | None:
        self.turns.append(len(self.frames))
        if self.broken:
            raise ValueError("an alarm that cannot be served")
        return None if self.due_in_s is None else now + self.due_in_s


@contextmanager
def listening() -> Iterator[Port]:
    port = Port()
    port.channel.start()
    try:
        yield port
    finally:
        port.held.set()
        assert port.channel.stop(5)


@contextmanager
def dealer(port: Port, high_water: int = 1000) -> Iterator[zmq.Socket[bytes]]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, high_water)
    socket.connect(f"tcp://127.0.0.1:{port.channel.port}")
    try:
        yield socket
    finally:
        socket.close()


@contextmanager
def watched(socket: zmq.Socket[bytes]) -> Iterator[zmq.Socket[bytes]]:
    """Where the ends of a socket's connections are told."""
    ends = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    try:
        yield ends
    finally:
        socket.disable_monitor()
        ends.close()


def on_control(channel: Channel, call: object) -> None:
    """Make a call on the control thread, and wait for it."""
    done = threading.Event()
    channel.call(lambda: (call(), done.set()))  # type: ignore[operator]
    assert done.wait(5)


def test_p5_a_frame_above_the_bound_closes_that_connection_only() -> None:
    with listening() as port, dealer(port) as bad, dealer(port) as good:
        for socket, name in ((bad, b"bad"), (good, b"good")):
            socket.send(name)
        wait_until(lambda: len(port.frames) == 2)
        with watched(bad) as ends, watched(good) as good_ends:
            bad.send(bytes(MAX_LETTER_BYTES + 1024 * 1024))
            assert ends.poll(10_000), "the connection goes on"
            assert recv_monitor_message(ends)["event"] == zmq.EVENT_DISCONNECTED
            good.send(bytes(MAX_LETTER_BYTES))
            wait_until(lambda: len(port.frames) == 3)
            assert len(port.frames[2]) == MAX_LETTER_BYTES and not good_ends.poll(0)


def test_c107_an_alarm_that_fails_stops_neither_letters_nor_other_alarms() -> None:
    with listening() as port, dealer(port) as peer:
        port.broken = True
        port.channel.wake_by(0.0)
        wait_until(lambda: len(port.turns) > 3, what="it is tried again")
        peer.send(b"served all the same")
        wait_until(lambda: port.frames == [b"served all the same"])
        port.broken = False
        seen = len(port.turns)
        port.channel.wake_by(time.monotonic() + 0.05)
        wait_until(lambda: len(port.turns) > seen)


def test_all_that_was_queued_is_done_before_the_end() -> None:
    done: list[int] = []
    with listening() as port:
        port.held.clear()
        port.channel.call(lambda: port.held.wait(10))
        for number in range(3 * MOST_CALLS + 1):
            port.channel.call(lambda number=number: done.append(number))  # type: ignore[misc]
    assert done == list(range(3 * MOST_CALLS + 1))


def test_a_peer_that_floods_leaves_other_work_its_turn() -> None:
    """At most 256 frames of one socket are taken before timers, calls and other sockets are looked at again."""
    with listening() as port, dealer(port, high_water=1) as flooding:
        port.due_in_s = 0.0
        port.channel.wake_by(0.0)
        port.held.clear()
        for number in range(3000):
            flooding.send(number.to_bytes(2, "big"))  # blocks, so that at the end nearly all of it is at the other side
        called: list[int] = []
        port.channel.call(lambda: called.append(len(port.frames)))
        port.held.set()
        wait_until(lambda: len(port.frames) == 3000)
        wait_until(lambda: port.turns[-1] == 3000)
        between = [later - sooner for sooner, later in zip(port.turns, port.turns[1:], strict=False)]
        assert max(between) <= 256 and called[0] <= 256
        assert port.frames == [number.to_bytes(2, "big") for number in range(3000)], "in order, none lost"


def test_a_frame_that_came_before_a_send_that_failed_is_read_at_once() -> None:
    """Any use of a socket takes away the sign that something has come, also one that fails."""
    with listening() as port, dealer(port) as known:
        known.send(b"hello")
        wait_until(lambda: port.routes)
        unknown = Route(port.routes[0].socket, b"nobody has this identity")

        def call() -> None:
            known.send(b"meanwhile")
            stays(lambda: len(port.frames) == 1, 0.05)  # it arrives
            port.channel.send(unknown, b"x", 1.0)

        on_control(port.channel, call)
        wait_until(lambda: port.frames == [b"hello", b"meanwhile"], 5)


def test_what_a_thread_posts_it_sends_itself_where_the_control_thread_sleeps_and_else_that_does() -> None:
    with listening() as port:
        by: list[str] = []
        on_control(port.channel, lambda: None)

        def settled() -> None:
            port.channel.post(lambda: by.append(threading.current_thread().name))
            port.channel.settle()

        def alone() -> bool:
            settled()
            return by[-1:] == [threading.current_thread().name]

        wait_until(alone, what="the control thread sleeps")
        port.held.clear()
        with dealer(port) as peer:
            peer.send(b"a frame that takes long")
            wait_until(lambda: not port.channel._using.attempt(lambda: None))
            by.clear()
            begun = time.monotonic()
            settled()
            assert by == [] and time.monotonic() - begun < 1, "and waits for nobody"
            port.held.set()
            wait_until(lambda: by == ["kvcore-control"], 0.5, "without a second")


def test_a_thread_that_posts_sends_only_so_many_and_leaves_the_rest_to_the_control_thread() -> None:
    with listening() as port:
        by: list[str] = []
        wait_until(lambda: port.turns and port.channel._resting, what="the control thread sleeps")
        for _ in range(5 * MOST_LETTERS):
            port.channel.post(lambda: by.append(threading.current_thread().name))
        port.channel.settle()
        wait_until(lambda: len(by) == 5 * MOST_LETTERS, 0.5)
        assert by.count(threading.current_thread().name) <= 2 * MOST_LETTERS


def test_what_a_thread_that_sends_finds_to_be_read_is_read_at_once() -> None:
    """Its use of the socket may have taken the sign away before the control thread woke by it, which here it never does."""
    with listening() as port, dealer(port) as peer:
        peer.send(b"hello")
        wait_until(lambda: port.routes)
        by: list[str] = []

        def letter() -> None:
            by.append(threading.current_thread().name)
            peer.send(b"meanwhile")
            stays(lambda: True, 0.05)
            port.channel.send(port.routes[0], b"answer", 1.0)

        def was_sent_here() -> bool:
            port.channel.post(letter)
            port.channel.settle()
            wait_until(lambda: len(port.frames) == len(by) + 1, 0.5)
            return by[-1] == threading.current_thread().name

        on_control(port.channel, lambda: port.channel._readiness._epoll.unregister(port.routes[0].socket.get(zmq.FD)))
        wait_until(was_sent_here, what="the control thread sleeps")


def test_frames_left_over_are_read_without_a_further_one() -> None:
    with listening() as port, dealer(port) as peer:
        port.held.clear()
        for number in range(1000):
            peer.send(number.to_bytes(2, "big"))
        port.held.set()
        wait_until(lambda: len(port.frames) == 1000, 5)


def test_what_a_signal_handler_raises_while_letters_are_sent_stops_nobody() -> None:
    """Neither those of others that rely on this thread to look once more, nor the control thread."""
    with listening() as port:
        sent, main = threading.Event(), threading.current_thread()

        def interrupted() -> None:
            if threading.current_thread() is main:
                other = threading.Thread(target=lambda: (port.channel.post(sent.set), port.channel.settle()))
                other.start()
                other.join(5)
                raise KeyboardInterrupt

        def was_interrupted() -> bool:
            port.channel.post(interrupted)
            try:
                port.channel.settle()
            except KeyboardInterrupt:
                return True
            return False

        wait_until(was_interrupted, what="the control thread sleeps")
        assert sent.wait(0.5)
        on_control(port.channel, lambda: None)


class Rude:
    """A lock at which a signal handler raises as soon as it is taken."""

    def __init__(self, lock: threading.RLock) -> None:  # type: ignore[valid-type]
        self._lock = lock

    def acquire(self, blocking: bool = True) -> bool:
        self._lock.acquire(blocking=blocking)  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    def release(self) -> None:
        self._lock.release()  # type: ignore[attr-defined]


def test_a_seat_is_free_again_whatever_a_signal_handler_raises_and_taken_for_one_within() -> None:
    seat, within = Seat(), list[bool]()

    def elsewhere() -> bool:
        with ThreadPoolExecutor(1) as other:
            return other.submit(seat.attempt, lambda: None).result(5)

    lock, seat._lock = seat._lock, Rude(seat._lock)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        seat.attempt(lambda: None)
    seat._lock = lock
    assert elsewhere()
    with pytest.raises(ZeroDivisionError):
        seat.attempt(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    assert elsewhere()
    assert seat.attempt(lambda: within.extend((seat.attempt(lambda: None), elsewhere()))) and within == [False, False]
    with seat:
        assert not elsewhere() and not seat.attempt(lambda: None) and not elsewhere()
    assert elsewhere()


def test_a_seat_is_free_again_wherever_a_signal_handler_raises() -> None:
    seat = Seat()
    with ThreadPoolExecutor(1) as other:
        for _ in everywhere(lambda: seat.attempt(lambda: None), ("call",)):
            assert other.submit(seat.attempt, lambda: None).result(5)


def test_send_s_a_route_knows_since_when_nothing_could_be_sent() -> None:
    with listening() as port, dealer(port) as known:
        known.send(b"hello")
        wait_until(lambda: port.routes)
        unknown = Route(port.routes[0].socket, b"nobody has this identity")
        on_control(port.channel, lambda: [port.channel.send(unknown, b"x", now) for now in (3.0, 7.0)])
        assert unknown.blocked_at == 3.0, "since the first that could not be sent"
        on_control(port.channel, lambda: port.channel.send(port.routes[0], b"x", 8.0))
        assert port.routes[0].blocked_at is None and known.poll(5000)
        unknown.identity = port.routes[0].identity
        on_control(port.channel, lambda: port.channel.send(unknown, b"y", 9.0))
        assert unknown.blocked_at is None, "it is over when one could be sent"


def test_send_s_a_dialled_route_is_blocked_when_its_queue_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore.sockets.HIGH_WATER", 5)
    routes: list[Route] = []
    with listening() as port:
        nobody = Address("127.0.0.1", unused_port())

        def flood() -> None:
            routes.append(port.channel.dial(nobody))
            for _ in range(20):
                port.channel.send(routes[0], b"x", 4.0)

        begun = time.monotonic()
        on_control(port.channel, flood)
        assert routes[0].blocked_at == 4.0 and time.monotonic() - begun < 2, "and nothing has waited for it"
        on_control(port.channel, lambda: port.channel.hang_up(routes[0]))
        on_control(port.channel, lambda: port.channel.hang_up(routes[0]))
        assert routes[0].closed and port.channel.sockets == 1


def unused_port() -> int:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with context.socket(zmq.ROUTER) as socket:
        return socket.bind_to_random_port("tcp://127.0.0.1")


def test_t7_a_frame_or_a_call_that_raises_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with listening() as port, dealer(port) as socket, caplog.at_level(logging.ERROR, "kvcore.channel"):
        port.channel.call(lambda: 1 // 0)
        on_control(port.channel, lambda: None)
        port.channel.tap = lambda route, frame, outgoing: 1 // 0 if frame == b"bad" else 1
        socket.send(b"bad")
        socket.send(b"good")
        wait_until(lambda: port.frames == [b"good"])
        assert not port.channel.pulse.trouble and "the others go on" in caplog.text and "goes on after an error" in caplog.text


def test_p5_bad_messages_are_counted_and_the_first_ten_and_one_in_a_thousand_logged(caplog: pytest.LogCaptureFixture) -> None:
    with listening() as port, caplog.at_level(logging.WARNING, "kvcore.channel"):
        on_control(port.channel, lambda: [port.channel.note_bad("odd" * 200) for _ in range(2500)])
        logged = [record.message for record in caplog.records]
        assert port.channel.bad_messages == 2500 and len(logged) == 12
        assert "number 10)" in logged[9] and "number 1000)" in logged[10] and "number 2000)" in logged[11]
        assert all(len(line) < 300 for line in logged)


@pytest.mark.parametrize("liveness_s", [98_304.0, 1e10, 1e300])
def test_p2_instances_pair_with_any_liveness_s(liveness_s: float) -> None:
    """It is also how soon the kernel looks after a connection, which it does at most every 32,767 s."""
    with duo(liveness_s=liveness_s, quarantine_s=None) as pair:
        pair.transfer([1], [2])


def test_the_tap_remembers_the_latest_letters_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_tap, "MOST_SEEN", 5)
    passed: list[tuple[Letter, bool]] = []
    with duo() as pair:
        pair.pair()
        with ControlTap(pair.decode) as tap:

            def note(letter: Letter, outgoing: bool) -> bool:
                passed.append((letter, outgoing))
                return False

            tap.drop(note)
            pair.transfer([1], [2])
            pair.transfer([2], [3])
        assert len(passed) > 5 and [tuple(seen) for seen in tap.seen] == passed[-5:]


def test_a_channel_that_never_started_stops_any_number_of_times() -> None:
    channel = Port().channel
    assert channel.stop(1) and channel.stop(1)
    read, write = os.pipe()  # numbers that its own pipe had
    try:
        assert channel.stop(1)
        os.write(write, b"x")
        assert os.read(read, 1) == b"x"
    finally:
        os.close(read)
        os.close(write)
