"""The floors under a measurement: what the bare machine takes, and the engine alone one transfer at a time."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvcore.bench.bare import TRIPS, Bare, Caller, Echo, bare, copy, over
from kvcore.bench.setup import Measured, Setup
from kvcore.bench.socket_floor import SocketFloor
from kvcore.buffers import Buffer, random_pages
from kvcore.hookspecs import OpenContext, Peer, Transfer
from kvcore.memory import Region
from kvcore.sides import ToolError
from kvcore.states import RoomKey
from tests.helpers import number

CPU = frozenset({"cpu"})


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "lo"])
def test_a_message_goes_there_and_back_and_each_is_timed(host: str) -> None:
    setup, stop = Setup("local", host=host), threading.Event()
    echo = Echo(setup)
    server = threading.Thread(target=echo.serve, args=(stop,))
    server.start()
    caller = Caller(echo.address, setup)
    try:
        measured = caller.measure()
    finally:
        stop.set()
        server.join(10)
        caller.close()
        echo.close()
    assert not server.is_alive()
    assert len(measured.latencies_s) == 2 * TRIPS and min(measured.latencies_s) > 0
    assert sum(measured.latencies_s) <= measured.seconds


def test_a_message_that_is_not_answered_ends_the_measurement() -> None:
    setup = Setup("local", patience_s=0.05)
    echo = Echo(setup)  # that nobody serves
    caller = Caller(echo.address, setup)
    try:
        with pytest.raises(ToolError, match=rf"decode's process does not answer at {echo.address}; try another --host"):
            caller.measure()
    finally:
        caller.close()
        echo.close()


@pytest.mark.parametrize("places", [[2, 0, 3, 1], [3, 1]], ids=["all", "some"])
def test_a_copy_has_each_page_where_it_belongs_and_leaves_others_alone(places: list[int]) -> None:
    pages, into = random_pages(1, 8, 100), Buffer(CPU, 4, 100)
    sources = np.array([7, 7, 0, 5][: len(places)])
    measured = copy(pages, sources, into, np.array(places))
    assert measured.seconds > 0
    expected = np.zeros((4, 100), np.uint8)
    expected[places] = pages[sources]
    assert np.array_equal(into.read(), expected)


def call(trip: float, letters: float) -> Measured:
    return Measured(1.0, 1.0, (trip,) * TRIPS + (letters,) * TRIPS)


def test_figures_of_the_bare_machine_are_medians_of_its_turns() -> None:
    found = bare([call(0.001, 0.002), call(0.004, 0.008), call(0.002, 0.003)], (0.5, 0.25, 1.0), 10**9)
    assert found == Bare(2.0, (1.0, 4.0, 2.0), 3.0, (2.0, 8.0, 3.0), 2.0, (2.0, 4.0, 1.0))
    assert str(found).strip() == "bare machine: a round trip 2000 us, of two letters 3000 us, a copy of the pages 2 GB/s"
    alone = bare([call(0.001, 0.002)], (), 5)
    assert alone == Bare(1.0, (1.0,), 2.0, (2.0,), None, ()) and "copy" not in str(alone)


def test_what_the_wire_takes_is_the_transfer_and_the_messages_of_the_same_turn() -> None:
    machine = Bare(0.3, (0.2, 0.4), 0.5, (0.5, 0.5), None, ())
    assert over((1.0, 3.0), (0.6, 0.7), 4, machine) == pytest.approx((1.0, 2.0))
    assert over((0.8, 2.2), (0.6, 0.7), 2, machine) == pytest.approx((1.0, 2.0))
    assert over((1.0, 3.0), (), 4, machine) == ()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_the_floor_of_local_serves_as_many_writes_as_come_and_stops_when_told(host: str) -> None:
    buffers = {side: Buffer(CPU, 4, 8) for side in ("prefill", "decode")}
    buffers["prefill"].write(random_pages(3, 4, 8))
    floors, endpoints = {}, {}
    for side, buffer in buffers.items():
        floors[side] = SocketFloor()
        region = Region(buffer.tensor.ctypes.data, buffer.tensor.nbytes)
        context = OpenContext(side, side, 0, host, host, None)  # type: ignore[arg-type]
        endpoints[side] = floors[side].open(None, context, [region])  # type: ignore[arg-type]
    floors["prefill"].connect(Peer("decode", endpoints["decode"], (), ()))  # type: ignore[arg-type]
    stop = threading.Event()
    server = threading.Thread(target=floors["decode"].serve, args=(stop,))
    server.start()
    try:
        for page in range(4):
            floors["prefill"].prepare("sendmsg", [transfer(8 * page, 8)], 1)()
            assert np.array_equal(buffers["decode"].read()[page], buffers["prefill"].read()[page])
    finally:
        stop.set()
        server.join(10)
        for floor in floors.values():
            floor.close()
    assert not server.is_alive()


def transfer(offset: int, length: int) -> Transfer:
    rows = [np.array([value], np.uint64) for value in (0, 0, offset, offset, length)]
    base = np.zeros(1, np.uint64)
    return Transfer(RoomKey("prefill", number(), 0, 1), "decode", *rows, base, base)
