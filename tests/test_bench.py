"""``kvcore bench``: what is computed from the clocks, what is written, and that wrong bytes, rooms and processes are noticed."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvcore import cli
from kvcore.bench import abort, bandwidth, floor, idle, kill, memory, plan, rooms, trace
from kvcore.bench.bare import Bare
from kvcore.bench.report import machine
from kvcore.bench.scheduler import Parameters as Played
from kvcore.bench.setup import GIB, Measured, Setup
from kvcore.bench.socket_floor import SocketFloor
from kvcore.progress import Watch
from kvcore.sides import ToolError
from tests.commands import kvcore, one_line
from tests.helpers import ROOT
from tests.made_backends import LYING, make_backend

FIELDS = ["schema", "command", "backend", "versions", "machine", "taken", "parameters", "results"]
BARE = Bare(0.1, (0.1,), 0.2, (0.2,), None, ())
TWO_WAYS = """
import threading
from kvcore.bench.socket_floor import SocketFloor

class Floor(SocketFloor):
    ways = ("late", "prompt", "later")

    def prepare(self, way, transfers, at_once):
        def move(move=super().prepare(way, transfers, at_once)):
            threading.Event().wait({"prompt": 0.0, "late": 0.1, "later": 0.2}[way])
            move()

        return move
"""
IDLE = """
from kvcore.bench.socket_floor import SocketFloor

class Floor(SocketFloor):
    def connect(self, peer): pass
    def prepare(self, way, transfers, at_once): return lambda: None
    def serve(self, stop): stop.wait()
"""


def make_floor(root: Path, source: str) -> Path:
    """A backend called ``floored`` whose distribution offers this floor."""
    make_backend(root, "floored")
    (root / "made_floor.py").write_text(source)
    with (root / "kvcore_floored-1.5.dist-info" / "entry_points.txt").open("a") as file:
        file.write("[kvcore.bench]\nfloored = made_floor:Floor\n")
    return root


def run(*arguments: str, path: Path | None = None) -> dict[str, object]:
    """What a measurement prints as JSON."""
    done = kvcore("bench", *arguments, "--json", "-", path=path)
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, object] = json.loads(done.stdout)
    assert list(found) == FIELDS
    return found


def test_rooms_are_measured_at_every_number_in_flight() -> None:
    found = run("rooms", "--rooms", "24", "--repeats", "2", "--page-bytes", "512", "--in-flight", "1", "--in-flight", "8", "--waiting", "3")
    assert (found["schema"], found["command"], found["backend"]) == (1, "bench rooms", "local")
    assert found["versions"]["distribution"] == "kvcore" and found["machine"]["cores"] >= 1  # type: ignore[index]
    assert found["parameters"] == {
        "rooms": 24, "in_flight": [1, 8], "page_bytes": 512, "repeats": 2, "measured_from": ["open", "receive"], "waiting": [3],
        "options": {}, "host": "127.0.0.1", "topology": "p1d1",
    }  # fmt: skip
    cases = [(clock, 3, in_flight) for in_flight in (1, 8) for clock in ("open", "receive")]
    for one, (clock, waiting, in_flight) in zip(found["results"], cases, strict=True):  # type: ignore[arg-type]
        assert (one["measured_from"], one["waiting"]) == (clock, waiting)
        assert (one["in_flight"], one["rooms_verified"], len(one["rooms_per_s_each"])) == (in_flight, 72, 2)
        assert 0 < one["latency_ms_median"] <= one["latency_ms_p90"] <= one["latency_ms_p99"] <= one["latency_ms_max"]
        assert one["rooms_per_s"] > 0 and one["prefill_cpu_us_per_room"] > 0 and one["decode_cpu_us_per_room"] > 0
        raw = one["raw"]
        assert (raw["way"], len(raw["transfers_per_s_each"])) == ("sendmsg", 2)
        assert raw["transfers_per_s"] > one["rooms_per_s"] and raw["kvcore_share"] < 1


def test_bandwidth_is_measured_for_every_size() -> None:
    found = run("bandwidth", "--page-bytes", "4096", "--page-bytes", "100001", "--room-bytes", "70000", "--repeats", "1")
    small, large = found["results"]  # type: ignore[misc]
    assert (small["page_bytes"], small["pages"], small["room_bytes"], small["bytes_verified"]) == (4096, 17, 69632, 2 * 69632)
    assert (large["pages"], large["room_bytes"]) == (1, 100001)  # one page at least
    for one in (small, large, small["raw"], large["raw"]):
        assert one["gb_per_s"] > 0 and one["prefill_cpu_s_per_gib"] > 0 and one["decode_cpu_s_per_gib"] > 0
    assert {small["order"], large["order"]} == {"scattered"} and small["raw"]["way"] == "sendmsg"


def test_bandwidth_is_measured_beside_the_fastest_way_of_the_engine_alone(tmp_path: Path) -> None:
    arguments = ("bandwidth", "--backend", "floored", "--page-bytes", "4096", "--room-bytes", "70000", "--repeats", "2")
    (one,) = run(*arguments, "--order", "contiguous", path=make_floor(tmp_path, TWO_WAYS))["results"]  # type: ignore[misc]
    assert (one["order"], one["raw"]["way"], len(one["raw"]["gb_per_s_each"])) == ("contiguous", "prompt", 2)
    tried = one["raw"]["tried_gb_per_s"]
    assert list(tried) == ["late", "prompt", "later"] and tried["later"] < 70000 / 0.2e9


def test_a_backend_that_offers_no_floor_is_measured_by_itself(tmp_path: Path) -> None:
    path = make_backend(tmp_path, "plain")
    found = run("bandwidth", "--backend", "plain", "--page-bytes", "4096", "--room-bytes", "8192", "--repeats", "1", path=path)
    assert [one["raw"] for one in found["results"]] == [None]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("backend", "said"), [("plain", True), ("local", False)])
def test_a_table_says_why_there_is_no_engine_alone_in_it(backend: str, said: bool, tmp_path: Path) -> None:
    arguments = ("rooms", "--backend", backend, "--rooms", "4", "--in-flight", "1", "--repeats", "1")
    done = kvcore("bench", *arguments, path=make_backend(tmp_path, "plain"))
    assert (done.returncode, done.stderr) == (0, "")
    last = done.stdout.splitlines()[-1]
    assert (last.startswith("no engine alone beside it: no floor of plain is installed") and "kvcore-floors" in last) is said


def test_the_planner_is_measured_and_a_missed_target_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = plan.Case(8, 2, scattered=True, cut=4, target_ms=1000.0)
    (quick,) = plan.measure(plan.Parameters(repeats=3), [case])
    assert 0 < quick.median_ms < 1000.0
    for missed in (False, True):
        monkeypatch.setattr(plan, "measure", lambda parameters, missed=missed: [plan.Result(case, 1000.5 if missed else 0.5)])
        assert cli.run(["bench", "plan"]) == int(missed)
        out, err = capsys.readouterr()
        assert "8 scattered pages x 2 regions, batches of 4" in out and ("MISSED" in out) is missed
        assert ("targets missed: 8 scattered pages x 2 regions, batches of 4 took 1e+03 ms" in err and one_line(err)) is missed


# --- what is computed


def test_no_room_number_is_used_twice_and_the_first_of_each_case_warms_up() -> None:
    parameters = rooms.Parameters(rooms=10, in_flight=(1, 4, 1), repeats=2, measured_from=("open", "receive"), waiting=(100, 10))
    found = rooms.batches(parameters)
    cases = [(case.waiting, case.in_flight, case.measured_from) for case in found]
    assert cases == [(waiting, in_flight, clock) for waiting in (10, 100) for in_flight in (1, 4) for clock in ("open", "receive")]
    for planned in found.values():
        assert ["warming up" in batch.note for batch in planned] == [True, False, False]
    numbers = [number for planned in found.values() for batch in planned for group in batch.groups for number in group]
    assert len(numbers) == len(set(numbers)) == 240


def test_what_is_opened_before_is_measured_in_groups_that_never_wait_long() -> None:
    def groups(*case: object) -> list[int]:
        return [len(group) for group in rooms.Batch(rooms.Case(*case), 1, 1000, "").groups]  # type: ignore[arg-type]

    assert groups("open", 0, 64) == [1000]
    assert groups("receive", 0, 1) == [32] * 31 + [8]
    assert groups("receive", 0, 64) == [256] * 3 + [232]


def test_rates_are_medians_and_latencies_are_those_of_all_rooms() -> None:
    parameters = rooms.Parameters(rooms=100, repeats=3)
    waits = tuple(number / 1000 for number in range(1, 101))
    repeats = [
        {"prefill": Measured(9.0, cpu, ()), "decode": Measured(seconds, 2 * cpu, waits)}
        for seconds, cpu in ((1.0, 0.01), (4.0, 0.03), (2.0, 0.02))
    ]
    found = rooms.result(rooms.Case("receive", 9, 7), parameters, repeats, BARE)  # type: ignore[arg-type]
    assert (found.measured_from, found.waiting) == ("receive", 9)
    assert (found.in_flight, found.rooms_per_s, found.rooms_per_s_each) == (7, 50.0, (100.0, 25.0, 50.0))
    assert found.latency_ms_median == pytest.approx(50.5) and found.latency_ms_max == pytest.approx(100.0)
    assert found.latency_ms_p90 == pytest.approx(90.1) and found.latency_ms_p99 == pytest.approx(99.01)
    assert (found.prefill_cpu_us_per_room, found.decode_cpu_us_per_room) == (pytest.approx(200.0), pytest.approx(400.0))
    assert found.rooms_verified == 400
    assert f"{'7':>9} {'receive':>9} {'50':>9}" in "\n".join(rooms.table([found]))
    parts = [{"prefill": Measured(1.0, 0.1), "decode": Measured(2.0, 0.2, (number,))} for number in (0.5, 0.25)]
    whole = rooms.total(parts)  # type: ignore[arg-type]
    assert whole == {"prefill": Measured(2.0, 0.2), "decode": Measured(4.0, 0.4, (0.5, 0.25))}


def test_kvcores_share_of_the_engine_alone_is_that_of_turns_side_by_side() -> None:
    alone = floor.Figures("fast", {"slow": 1.0, "fast": 9.0}, (10.0, 100.0, 40.0), {"prefill": (1.0, 3.0, 2.0), "decode": (4.0, 6.0, 5.0)})
    repeats = [{"prefill": Measured(1.0, 1.0), "decode": Measured(1 / rate, 1.0)} for rate in (9.0, 80.0, 20.0)]
    found = bandwidth.result(10**9, bandwidth.Parameters((10**9,), 10**9), repeats, BARE, alone)  # type: ignore[arg-type]
    assert found.raw is not None and (found.raw.way, found.raw.tried_gb_per_s) == ("fast", alone.tried)
    assert (found.raw.gb_per_s, found.raw.gb_per_s_each) == (40.0, alone.rates)
    assert (found.raw.prefill_cpu_s_per_gib, found.raw.decode_cpu_s_per_gib) == pytest.approx((2 * GIB / 1e9, 5 * GIB / 1e9))
    assert found.raw.decode_cpu_s_per_gib_each == pytest.approx([each * GIB / 1e9 for each in (4, 6, 5)])
    shares = (found.raw.kvcore_share, found.raw.kvcore_share_each)
    assert shares == (pytest.approx(0.8), pytest.approx((0.9, 0.8, 0.5)))  # of the medians it would be 0.5
    assert "engine alone: fast" in "\n".join(bandwidth.table([found])) and "kvcore: 80% of it" in "\n".join(bandwidth.table([found]))


def test_bandwidth_counts_the_bytes_of_the_pages_that_are_moved() -> None:
    parameters = bandwidth.Parameters(page_bytes=(1 << 20,), room_bytes=(1 << 20) + 5, repeats=2)
    repeats = [{"prefill": Measured(0.1, 0.5), "decode": Measured(seconds, 0.25)} for seconds in (0.001, 0.003)]
    found = bandwidth.result(1 << 20, parameters, repeats, BARE)  # type: ignore[arg-type]
    assert found.raw is None
    assert (found.pages, found.room_bytes, found.bytes_verified) == (1, 1 << 20, 3 << 20)
    assert found.gb_per_s == pytest.approx(((1 << 20) / 1e6 + (1 << 20) / 3e6) / 2)
    assert (found.prefill_cpu_s_per_gib, found.decode_cpu_s_per_gib) == (0.5 * GIB / (1 << 20), 0.25 * GIB / (1 << 20))
    assert "a room has as many whole pages as go into --room-bytes" in "\n".join(bandwidth.table([found]))
    slow = replace(found, gb_per_s=0.00123, gb_per_s_each=(0.000456, 0.00199))
    assert " 0.00123 0.000456  0.00199 " in "\n".join(bandwidth.table([slow]))


def test_no_more_rooms_are_in_flight_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[rooms.Parameters]()

    def measure(setup: Setup, parameters: rooms.Parameters, watch: Watch) -> list[rooms.Result]:
        seen.append(parameters)
        raise ToolError("that is all")

    monkeypatch.setattr(rooms, "measure", measure)
    for given in ((), ("--in-flight", "99", "--in-flight", "3")):
        cli.run(["bench", "rooms", "--rooms", "7", *given])
    assert [one.in_flight for one in seen] == [(1, 7), (7, 3)]


def test_scattered_pages_are_all_pages_in_another_order_on_each_side() -> None:
    one, two = bandwidth.listed("scattered", "prefill", 500), bandwidth.listed("scattered", "decode", 500)
    assert sorted(one) == sorted(two) == list(range(500))
    neighbours = sum(one[1:] - one[:-1] == 1) + sum(two[1:] - two[:-1] == 1)
    assert neighbours < 20


# --- what goes wrong


@pytest.mark.parametrize(
    "arguments", [("rooms", "--rooms", "10", "--repeats", "1"), ("bandwidth", "--page-bytes", "4096")], ids=["rooms", "bandwidth"]
)
def test_bytes_that_did_not_arrive_fail_the_measurement(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = kvcore("bench", *arguments, "--backend", "lying", path=make_backend(tmp_path, "lying", LYING))
    assert (done.returncode, done.stdout) == (1, "")
    assert one_line(done.stderr) and "pages have arrived with wrong bytes; try: kvcore doctor lying" in done.stderr


def test_bytes_that_the_engine_alone_did_not_move_fail_the_measurement_too(tmp_path: Path) -> None:
    arguments = ("bandwidth", "--backend", "floored", "--page-bytes", "4096", "--room-bytes", "70000")
    done = kvcore("bench", *arguments, path=make_floor(tmp_path, IDLE))
    assert (done.returncode, done.stdout) == (1, "")
    assert one_line(done.stderr) and "17 of 17 pages have arrived with wrong bytes" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("rooms", "--page-bytes", "100000000", "--rooms", "10"), "--page-bytes"),  # prefill has 256 pages in any case
        (("rooms", "--waiting", "100000"), "--page-bytes"),
        (("bandwidth", "--room-bytes", "10000000000"), "--room-bytes"),
        (("bandwidth", "--page-bytes", "64", "--page-bytes", "10000000000"), "--room-bytes"),
        (("bandwidth", "--page-bytes", "1"), "--room-bytes"),
        (("idle", "--rooms", "1000000"), "--rooms"),
        (("abort", "--rooms", "1000000"), "--rooms"),
        (("kill", "--rooms", "100000"), "--rooms"),
        (("trace", str(ROOT / "examples" / "trace.jsonl"), "--memory", "10000000000"), "--memory"),
        (("trace", str(ROOT / "examples" / "trace.jsonl"), "--page-bytes", "1"), "--memory"),
    ],
)
def test_what_does_not_fit_into_memory_is_refused_before_it_begins(
    arguments: tuple[str, ...], option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "available", lambda: GIB)
    assert cli.run(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out and one_line(err) and "GiB of memory on both sides together, and of the 1.0 GiB available at most 75% may" in err
    assert option in err


@pytest.mark.parametrize("there", [None, GIB])
def test_what_fits_into_memory_or_cannot_be_told_is_let_through(there: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: there)
    memory.afford("--rooms", GIB * 3 // 4 if there else 1 << 60)


def test_available_memory_is_some_of_the_machines() -> None:
    there = memory.available()
    assert there is None or 0 < there < machine().memory_gib * 1.1 * GIB


def test_rooms_are_measured_over_ipv6_too() -> None:
    run("rooms", "--rooms", "4", "--in-flight", "1", "--repeats", "1", "--host", "::1")


@pytest.mark.parametrize("host", ["", " "])
def test_a_host_that_is_none_is_wrong_usage(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "rooms", "--host", host]) == 2
    out, err = capsys.readouterr()
    assert not out and one_line(err) and f"'--host': {host!r} is no address" in err


def test_the_ways_of_the_floor_are_in_the_documents_by_their_names() -> None:
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert [way for way in SocketFloor.ways if f"`{way}`" not in text] == []


def test_a_room_that_fails_fails_the_measurement(tmp_path: Path) -> None:
    refusing = "@hookimpl\ndef kvcore_transfer(self): raise OSError('link down')\n"
    done = kvcore("bench", "rooms", "--backend", "refusing", path=make_backend(tmp_path, "refusing", refusing))
    assert (done.returncode, done.stdout) == (1, "")
    assert one_line(done.stderr) and "room " in done.stderr and "link down" in done.stderr


def test_aborts_of_either_side_are_timed() -> None:
    found = run("abort", "--rooms", "20", "--repeats", "2")
    results = found["results"]
    assert isinstance(results, list) and [one["aborted_by"] for one in results] == ["prefill", "decode"]
    for one in results:
        assert one["rooms"] == 20 and 0 < one["median_ms"] <= one["p99_ms"] <= one["max_ms"]


def test_rooms_whose_other_side_is_killed_or_falls_silent_are_timed_until_they_fail() -> None:
    found = kill.measure(Setup("local"), kill.Parameters(rooms=3, liveness_s=1.0, repeats=1), lambda row, text: None)
    assert [(one.signal, one.struck, one.stage) for one in found] == [
        (sign, side, stage)
        for sign in ("SIGKILL", "SIGSTOP")
        for side in ("prefill", "decode")
        for stage in ("joined", "published", "transferring")
    ]
    for one in found:
        assert (one.rooms, one.codes, len(one.median_s_each)) == (3, {"PEER_LOST": 3}, 1)
        assert f"{one.struck}-" in one.reason  # the instance that was lost
        assert 0 < one.median_s <= one.p99_s <= one.max_s
        assert one.over_limit_s == (None if one.signal == "SIGKILL" else pytest.approx(one.max_s - 1.0))
        if one.signal == "SIGSTOP":
            assert "silent for liveness_s (1 s)" in one.reason and one.median_s > 0.5
    assert multiprocessing.active_children() == []


def test_times_until_rooms_fail_are_those_of_their_stage() -> None:
    parameters = kill.Parameters(rooms=2, liveness_s=2.0)
    repeats = [
        (10.0, kill.Ends((11.0, 11.1, 12.0, 12.2, 13.0, 13.0), ("PEER_LOST",) * 5 + ("BACKEND",), "gone")),
        (20.0, kill.Ends((21.0, 21.1, 22.4, 22.6, 23.0, 23.0), ("PEER_LOST",) * 6, "silent")),
    ]
    found = kill.result("decode", "SIGKILL", 1, parameters, repeats)
    assert (found.struck, found.stage, found.codes, found.reason) == ("decode", "published", {"PEER_LOST": 4}, "gone")
    assert found.median_s_each == (pytest.approx(2.1), pytest.approx(2.5))
    assert (found.median_s, found.max_s, found.over_limit_s) == (pytest.approx(2.3), pytest.approx(2.6), None)
    silent = kill.result("decode", "SIGSTOP", 1, parameters, repeats)
    assert silent.over_limit_s == pytest.approx(0.6)
    last = kill.result("decode", "SIGKILL", 2, parameters, repeats)
    assert last.codes == {"PEER_LOST": 3, "BACKEND": 1}
    assert "3 PEER_LOST, 1 BACKEND" in "\n".join(kill.table([found, last]))


def test_waiting_costs_cpu_time_memory_and_looks_on_both_sides() -> None:
    found = idle.measure(Setup("local"), idle.Parameters(rooms=150, window_s=0.2, repeats=3), lambda row, text: None)
    assert [one.rooms for one in found] == [0, 150]
    for one in found:
        assert len(one.prefill_cpu_percent_each) == len(one.decode_cpu_percent_each) == 3
        assert one.prefill_cpu_percent == sorted(one.prefill_cpu_percent_each)[1] >= 0
    nothing, many = found
    assert (nothing.prefill_poll_all_ms, nothing.decode_poll_all_ms_each, nothing.decode_bytes_per_room) == (None, (), None)
    for polls in (many.prefill_poll_all_ms_each, many.decode_poll_all_ms_each):
        assert len(polls) == 3 and all(0 < each < 100 for each in polls)
    assert many.prefill_bytes_per_room is not None and many.decode_bytes_per_room is not None
    assert len("\n".join(idle.table(found)).splitlines()) == 3


def test_a_room_that_does_not_wait_fails_the_measurement_of_waiting(tmp_path: Path) -> None:
    failing = "@hookimpl\ndef kvcore_endpoint(self): raise OSError('link down')\n"
    done = kvcore("bench", "idle", "--backend", "failing", path=make_backend(tmp_path, "failing", failing))
    assert (done.returncode, done.stdout) == (1, "")
    assert one_line(done.stderr) and "link down" in done.stderr


def test_rooms_that_cannot_meet_fail_the_measurement_of_aborts(tmp_path: Path) -> None:
    failing = "@hookimpl\ndef kvcore_endpoint(self): raise OSError('link down')\n"
    done = kvcore("bench", "abort", "--backend", "failing", path=make_backend(tmp_path, "failing", failing))
    assert (done.returncode, done.stdout) == (1, "")
    assert one_line(done.stderr) and "link down" in done.stderr


DYING: dict[str, tuple[Callable[[Watch], object], str]] = {
    "rooms": (lambda watch: rooms.measure(Setup("local"), rooms.Parameters(in_flight=(2,)), watch), "2 in flight, from open, warming up"),
    "bandwidth": (
        lambda watch: bandwidth.measure(Setup("local"), bandwidth.Parameters(page_bytes=(4096,)), watch),
        "scattered pages of 4096 bytes, warming up",
    ),
    "abort": (lambda watch: abort.measure(Setup("local"), abort.Parameters(), watch), "aborts by prefill, 1 of 3"),
    "kill": (lambda watch: kill.measure(Setup("local"), kill.Parameters(), watch), "SIGKILL to prefill, 1 of 3"),
    "idle": (
        lambda watch: idle.measure(Setup("local"), idle.Parameters(1, 30.0), watch),
        "(0 waiting|opening 0|window 1 of 3).*",
    ),
    "trace": (lambda watch: trace.measure(Setup("local"), Played(ROOT / "examples" / "trace.jsonl", 8, 100.0), watch), "warming up"),
}
"""Measurements, and what they are doing when they have begun."""


@pytest.mark.parametrize("command", DYING)
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_process_that_dies_ends_the_measurement_which_says_what_it_did(side: str, command: str) -> None:
    def strike(row: str, text: str) -> None:
        if row == "measuring":
            for process in multiprocessing.active_children():
                if process.name == f"kvcore-bench-{side}":
                    process.kill()

    measure, doing = DYING[command]
    said = rf"the {side} process has died \(exit code -9, SIGKILL, doing: {doing}\); by the kernel for want of memory"
    with pytest.raises(ToolError, match=said):
        measure(strike)
    assert multiprocessing.active_children() == []
