"""kvcore beside SGLang, without SGLang: kvcore's child over ``local``, the turns of both, and what is computed of them."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from benchmarks.beside import __main__ as command, ends, rooms
from benchmarks.beside.geometry import AUX, Geometry
from benchmarks.beside.pairs import Case, Systems
from benchmarks.beside.rooms import FLOORS, PEER, PEER_THREAD, RawTurn, Spread, Turn
from benchmarks.beside.table import table
from kvcore.progress import unwatched
from kvcore.sides import ToolError
from tests.helpers import wait_until
from tests.made_backends import LYING, make_backend
from tests.peer_bench import BENCH, make_floored, make_peer_bench

SMALL = Geometry(tensors=3, item=64, pages=2, pool=32, scatter=True)
BRIEF = rooms.Parameters(windows=(1, 4), repeats=2, seconds=0.01)


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """As few rooms, and as little time, as there can be."""
    monkeypatch.setattr(rooms, "LEAST", 8)
    monkeypatch.setattr(rooms, "RAW_ROOMS", 5)
    monkeypatch.setattr(rooms, "IDLE_S", 0.05)
    monkeypatch.setattr(ends, "WARM_UP", 8)
    monkeypatch.setattr(ends, "ABORTS", {"recv_wait": 3, "recv_inflight": 2, "send_inflight": 2, "send_wait": 2})


# --- the processes


def test_both_systems_are_measured_in_turns_and_written_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(make_floored(tmp_path / "floored"))
    directory, file = make_peer_bench(tmp_path / "bench"), tmp_path / "found.json"
    small = ("--configs", "small", "--windows", "1,4", "--repeats", "2", "--seconds", "0.01")
    assert command.main(["--peer-bench", str(directory), "--backends", "floored", *small, "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "kvcore over SGLang: rooms/s" in shown and "within 20%" in shown and "SGLang 99.0 + 99.0" in shown
    found = json.loads(file.read_text())["results"]
    assert [(one["config"], one["in_flight"], one["room_bytes"]) for one in found] == [("small", 1, 384), ("small", 4, 384)]
    for one in found:
        assert list(one["turns"]) == ["sglang", "kvcore"] and list(one["raw"]) == [PEER, PEER_THREAD, FLOORS]
        assert {len(turns) for turns in one["turns"].values()} == {2} and set(one["descriptors"].values()) == {6}
        assert [turn["p50_ms"] for turn in one["turns"]["sglang"]] == [2.0, 2.0]
        for turn in one["turns"]["kvcore"]:
            assert turn["rooms"] >= 8 and 0 < turn["p50_ms"] <= turn["p99_ms"]
            assert turn["rooms_per_s"] > 0 and turn["prefill_cpu_us"] > 0 and turn["decode_cpu_us"] > 0
        assert len(one["raw_agreement"]) == 2 and one["ratios"].keys() >= {"cpu_us_above_raw", "sglang_rate_over_raw"}


def test_sglang_stands_still_while_kvcore_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(directory := make_peer_bench(tmp_path / "bench"))
    monkeypatch.syspath_prepend(make_backend(tmp_path, "floored"))
    with Systems(Case("floored", SMALL, {}, "small", directory), ["sglang", "kvcore"], unwatched) as running:
        for system, states in (("kvcore", "T"), ("sglang", "RS")):
            with running.alone(system):  # type: ignore[arg-type]
                pids = [process.pid for process in multiprocessing.active_children() if "sglang" in process.name]
                assert len(pids) == 2
                wait_until(lambda pids=pids, states=states: all(state(pid) in states for pid in pids))
    assert multiprocessing.active_children() == []


def state(pid: int | None) -> str:
    """Of a process, one letter, as the kernel has it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_aborts_of_both_sides_are_seen_by_the_other() -> None:
    found = {each.kind: each for each in ends.aborts(Case("local", SMALL, config="small"), ["kvcore"], unwatched)}
    assert found["recv_wait"].states == {"FAILED": 3} and found["send_wait"].states == {"FAILED": 2}
    assert len(found["recv_wait"].seen_ms) == len(found["recv_wait"].released_ms) == 3 and found["recv_wait"].seen_ms[0] > 0
    for kind in ("recv_inflight", "send_inflight"):  # too late for some
        assert sum(found[kind].states.values()) == 2 and set(found[kind].states) <= {"FAILED", "SUCCESS"}
    assert len(list(ends.aborts_table(list(found.values())))) == 5


def test_what_rooms_leave_that_have_ended_in_every_way_is_told_by_store() -> None:
    (found,) = ends.leaks(Case("local", SMALL), ["kvcore"], 16, unwatched)
    assert found.stuck == {"prefill": 0, "decode": 0} and found.rooms == 16
    for grew in found.grew.values():
        before, after = grew["flight_record"]
        assert 0 < before < after
    assert "local, kvcore: 16 rooms" in "\n".join(ends.leaks_table([found]))


# --- what goes wrong


def test_wrong_bytes_end_the_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(make_backend(tmp_path, "lying", LYING))
    with pytest.raises(ToolError, match="kvcore: 6 pages of 1 slots have arrived with wrong bytes"):
        rooms.measure(Case("lying", SMALL), ["kvcore"], BRIEF, unwatched)
    assert multiprocessing.active_children() == []


def test_a_folder_without_the_peer_bench_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--peer-bench", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"beside: {tmp_path} has no bench_sglang.py; give --peer-bench the folder of the peer bench\n"


def test_other_side_records_than_sglangs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(directory := make_peer_bench(tmp_path / "bench"))
    (directory / "bench_sglang.py").write_text(BENCH.replace("floored", "local").replace("list(AUX)", "[8, *AUX]"))
    with pytest.raises(ToolError, match=r"SGLang's side records have \(8, 64, .* set AUX in geometry\.py to the former"):
        rooms.measure(Case("local", SMALL, {}, "small", directory), ["sglang"], BRIEF, unwatched)
    assert multiprocessing.active_children() == []


# --- what is computed


@pytest.mark.parametrize("scatter", [False, True])
def test_pages_may_come_from_any_slot_but_must_all_be_of_one(scatter: bool) -> None:
    geometry = dataclasses.replace(SMALL, scatter=scatter)
    arrays, aux = geometry.zeros()
    assert [array.shape for array in arrays] == [(32, 64)] * 3 and [array.shape[1] for array in aux] == list(AUX)
    assert all(array.ctypes.data % 64 == 0 for array in (*arrays, *aux))
    assert geometry.wrong_pages(arrays, 4) == 4 * 2 * 3
    for slot, source in enumerate((2, 0, 1, 3)):
        for tensor, array in enumerate(arrays):
            array[geometry.listed(slot, "decode")] = geometry.source(tensor)[geometry.listed(source, "prefill")]
    assert geometry.wrong_pages(arrays, 4) == 0
    arrays[2][geometry.listed(1, "decode")[1], 5] ^= 1
    assert geometry.wrong_pages(arrays, 4) == 1
    arrays[1][geometry.listed(3, "decode")] = geometry.source(1)[geometry.listed(0, "prefill")]
    assert geometry.wrong_pages(arrays, 4) == 1 + 2


def test_slots_lie_apart_and_scattered_pages_are_no_neighbours() -> None:
    for side in ("prefill", "decode"):
        listed = np.concatenate([SMALL.listed(slot, side) for slot in range(16)])  # type: ignore[arg-type]
        assert sorted(listed) == list(range(32)) and SMALL.listed(16, side).tolist() == listed[:2].tolist()  # type: ignore[arg-type]
    assert SMALL.listed(0, "prefill").tolist() != SMALL.listed(0, "decode").tolist()


def turn(rate: float, ms: float, cpu: float) -> Turn:
    return Turn(rate, cpu, cpu, 10, 0.0, ms, 2 * ms)


def alone(us: float, cpu: float) -> RawTurn:
    return RawTurn(1e6 / us, cpu, 0.0, us, 2 * us)


def test_ratios_are_of_turns_beside_each_other_and_their_spread_is_told() -> None:
    turns = {"kvcore": (turn(40, 1, 30), turn(90, 2, 30)), "sglang": (turn(10, 4, 130), turn(30, 4, 210))}
    raw = {FLOORS: (alone(50, 20), alone(60, 20)), PEER: (alone(48, 0), alone(90, 0)), PEER_THREAD: (alone(1e5, 0), alone(1e4, 0))}
    found = rooms.ratios(turns, raw)
    assert found["rooms_per_s"] == Spread(3.5, 3.0, 4.0) and found["p50_ms"] == Spread(0.375, 0.25, 0.5)
    assert found["cpu_us"].max == pytest.approx(60 / 260)
    assert found["cpu_us_above_raw"] == Spread(pytest.approx((40 / 240 + 40 / 400) / 2), pytest.approx(0.1), pytest.approx(40 / 240))
    assert found["kvcore_rate_over_raw"] == Spread(2.45, pytest.approx(0.9), 4.0) and found["sglang_rate_over_raw"].max == 1.0
    assert rooms.agreement(raw) == pytest.approx((50 / 48, 50 / 48)) and rooms.agreement({FLOORS: raw[FLOORS]}) == ()


@pytest.mark.parametrize(("us", "agrees"), [(100, True), (119, True), (81, True), (79, False), (121, False)])
def test_the_two_measurements_of_the_engine_alone_must_agree(us: float, agrees: bool) -> None:
    raw = {PEER: (alone(100, 1), alone(180, 1)), FLOORS: (alone(150, 1), alone(us, 1))}
    found = rooms.Result("nixl", "ctl", 1, 1024, {PEER: 2, FLOORS: 2}, {}, raw, {}, {}, rooms.agreement(raw))
    assert found.raw_agrees is agrees and ("DO NOT AGREE" in "\n".join(table([found]))) is not agrees


def test_large_rooms_are_measured_few_at_a_time() -> None:
    large = Geometry(tensors=64, item=65536, pages=64, pool=128, scatter=True)
    bench = rooms.Bench(Systems(Case("local", large), ["kvcore"], unwatched), rooms.Parameters(windows=(1, 2, 64)))
    assert large.large and not SMALL.large and bench.windows == [1, 2]
    assert (Case("nixl-tcp", SMALL).engine, Case("nixl", SMALL).engine) == ("nixl", "nixl")
