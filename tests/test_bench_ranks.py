"""``kvcore bench … --topology``: every command with several ranks a side, what their figures come to, and what is refused."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import jsonschema
import numpy as np
import pytest

import kvcore
from kvcore import KVPoll, cli
from kvcore.bench import abort, bandwidth, compare, idle, kill, memory, rooms
from kvcore.bench.loop import Pace, all_ended, carry
from kvcore.bench.page import page
from kvcore.bench.ranks import Ranks
from kvcore.bench.report import read, report, schema
from kvcore.bench.setup import GIB, Measured, Setup, buffer_for, content, pool, together
from kvcore.buffers import random_pages
from kvcore.progress import unwatched
from kvcore.sides import SIDES, ToolError
from tests.commands import kvcore as command, one_line
from tests.made_backends import make_backend

UNLIKE = ("p2d1", "p1d2")
LYING_TO_THE_SECOND_RANK = """
@hookimpl
def kvcore_transfer(self, transfer):
    return DONE if transfer.local_offset[0] % 512 else super().kvcore_transfer(transfer)
"""


def setup(topology: str) -> Setup:
    return Setup("local", patience_s=30.0, topology=topology)


@pytest.fixture(autouse=True)
def processes_end() -> Iterable[None]:
    yield
    assert multiprocessing.active_children() == []


# --- every command


@pytest.mark.parametrize("topology", [*UNLIKE, "p2d2", "p3d2"])
def test_rooms_are_carried_on_all_ranks(topology: str) -> None:
    parameters = rooms.Parameters(rooms=10, in_flight=(1, 4), page_bytes=768, repeats=1, waiting=(2,))
    found = rooms.measure(setup(topology), parameters, unwatched)
    assert [(one.in_flight, one.measured_from) for one in found] == [(1, "open"), (1, "receive"), (4, "open"), (4, "receive")]
    for one in found:
        assert (one.rooms_verified, len(one.latency_ms_percentiles), one.raw, one.bare, one.latency_over_wire) == (
            20,
            101,
            None,
            None,
            None,
        )
        assert 0 < one.latency_ms_median <= one.latency_ms_max
        assert one.rooms_per_s > 0 and one.prefill_cpu_us_per_room > 0 and one.decode_cpu_us_per_room > 0


@pytest.mark.parametrize("topology", UNLIKE)
def test_bandwidth_is_that_of_all_ranks(topology: str) -> None:
    found = bandwidth.measure(setup(topology), bandwidth.Parameters((4096, 1 << 16), 1 << 18, 1), unwatched)
    assert [(one.page_bytes, one.pages, one.bytes_verified, one.raw, one.bare) for one in found] == [
        (4096, 64, 2 << 18, None, None),
        (1 << 16, 4, 2 << 18, None, None),
    ]
    assert all(one.gb_per_s > 0 and one.prefill_cpu_s_per_gib > 0 and one.decode_cpu_s_per_gib > 0 for one in found)


@pytest.mark.parametrize("topology", UNLIKE)
def test_aborts_are_timed_until_every_rank_of_the_other_side_knows(topology: str) -> None:
    found = abort.measure(setup(topology), abort.Parameters(rooms=8, repeats=2), unwatched)
    assert [(one.aborted_by, one.rooms) for one in found] == [("prefill", 8), ("decode", 8)]
    assert all(0 < one.median_ms <= one.max_ms < 5e3 for one in found)


@pytest.mark.parametrize("topology", UNLIKE)
def test_a_side_that_is_lost_is_lost_with_all_its_ranks(topology: str, monkeypatch: pytest.MonkeyPatch) -> None:
    struck, strike = list[int](), os.kill
    monkeypatch.setattr("kvcore.sides.os.kill", lambda pid, sign: (struck.append(pid), strike(pid, sign)))
    parameters = kill.Parameters(rooms=2, liveness_s=1.0, repeats=1, signals=("SIGKILL",))
    found = kill.measure(setup(topology), parameters, unwatched)
    assert [(one.struck, one.stage) for one in found] == [(side, stage) for side in SIDES for stage in kill.STAGES]
    assert all(one.codes == {"PEER_LOST": 2} and 0 < one.median_s <= one.max_s for one in found)
    assert len(set(struck)) == 3  # both sides, once each


@pytest.mark.parametrize("topology", UNLIKE)
def test_waiting_costs_what_all_ranks_take(topology: str) -> None:
    nothing, some = idle.measure(setup(topology), idle.Parameters(rooms=20, window_s=0.2, repeats=2), unwatched)
    assert (nothing.rooms, some.rooms, len(some.prefill_cpu_percent_each)) == (0, 20, 2)
    assert some.prefill_poll_all_ms is not None and some.decode_bytes_per_room is not None


def test_each_rank_of_decode_compares_its_bytes(tmp_path: Path) -> None:
    make_backend(tmp_path, "halflying", LYING_TO_THE_SECOND_RANK)
    for arguments in (("rooms", "--rooms", "5", "--page-bytes", "512"), ("bandwidth", "--page-bytes", "512", "--room-bytes", "2048")):
        done = command("bench", *arguments, "--backend", "halflying", "--topology", "p1d2", path=tmp_path)
        assert (done.returncode, done.stdout) == (1, "")
        assert one_line(done.stderr) and "decode 1: " in done.stderr and "pages have arrived with wrong bytes" in done.stderr


# --- what is told


def test_the_topology_is_told_everywhere(tmp_path: Path) -> None:
    quick = ("--rooms", "6", "--repeats", "1", "--in-flight", "1")
    path, alone = tmp_path / "ranks.json", tmp_path / "alone.json"
    done = command("bench", "rooms", *quick, "--topology", "p2d1", "--json", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("no engine alone and no bare machine beside it: ") and "p1d1 only" in done.stdout
    written = json.loads(path.read_text())
    assert written["parameters"]["topology"] == "p2d1"
    jsonschema.validate(written, schema())
    text = page(read(path), [])
    assert "<dt>topology</dt><dd>p2d1</dd>" in text and "of several ranks" in text.lower()
    alone.write_text(json.dumps(written | {"parameters": written["parameters"] | {"topology": "p1d1"}}))
    assert "of several ranks" not in page(read(alone), []).lower()
    (difference,) = compare.compare(alone, path).differences
    assert (difference.what, difference.a, difference.b) == ("parameters.topology", "p1d1", "p2d1")
    parameters = {name: value for name, value in written["parameters"].items() if name != "topology"}
    alone.write_text(json.dumps(written | {"parameters": parameters}))  # as before there were several
    assert compare.compare(alone, path).differences == (difference,)


@pytest.mark.parametrize(
    ("module", "parameters"),
    [(abort, abort.Parameters()), (kill, kill.Parameters()), (idle, idle.Parameters())],
    ids=["abort", "kill", "idle"],
)
def test_reports_of_all_commands_name_it(module: Any, parameters: Any) -> None:
    name = module.__name__.rpartition(".")[2]
    assert asdict(report(f"bench {name}", setup("p4d2"), parameters, []))["parameters"]["topology"] == "p4d2"


# --- processes that fail


@pytest.mark.parametrize(
    ("topology", "first", "sign", "said"),
    [
        ("p2d1", "prefill 0", signal.SIGKILL, r"the prefill 0 process has died \(exit code -9, SIGKILL, doing: 0 waiting rooms\)"),
        ("p1d2", "prefill", signal.SIGKILL, r"the prefill process has died \(exit code -9, SIGKILL, doing: 0 waiting rooms\)"),
        ("p2d1", "", signal.SIGSTOP, "no process has said anything for 8 s .prefill 0: .*; prefill 1: .*; decode: "),
    ],
)
def test_each_of_several_processes_has_a_name_of_its_own(topology: str, first: str, sign: signal.Signals, said: str) -> None:
    def strike(row: str, text: str) -> None:
        if row == "measuring":
            for process in multiprocessing.active_children():
                if not first or process.name == f"kvcore-bench-{first}":
                    os.kill(process.pid or 0, sign)

    with pytest.raises(ToolError, match=said):
        idle.measure(replace(setup(topology), patience_s=8.0), idle.Parameters(1, 30.0), strike)
    assert multiprocessing.active_children() == []


# --- what is computed


def test_ranks_are_named_and_hold_their_heads() -> None:
    assert (str(Ranks.named("p4d2")), Ranks.named("p64d1"), str(Ranks())) == ("p4d2", Ranks(64, 1), "p1d1")
    assert [Ranks(*each).heads for each in ((1, 1), (4, 2), (3, 2), (1, 8))] == [1, 4, 6, 8]
    assert [Ranks(3, 2).heads_of("decode", rank) for rank in (0, 1)] == [range(3), range(3, 6)]
    assert [Ranks(3, 2).heads_of("prefill", rank) for rank in (0, 1, 2)] == [range(2), range(2, 4), range(4, 6)]


def test_pages_of_all_ranks_together_are_the_same_on_both_sides() -> None:
    both = [np.concatenate([content(side, rank, setup("p3d2"), 5, 12) for rank in range(Ranks(3, 2).of(side))], axis=1) for side in SIDES]
    assert np.array_equal(*both) and both[0].shape == (5, 12)
    assert np.unique(both[0].reshape(5, 6, 2), axis=1).shape == (5, 6, 2)  # each head has its own
    assert np.array_equal(content("decode", 0, setup("p1d1"), 5, 12), random_pages(1, 5, 12))
    for side, layout, nbytes in (("prefill", kvcore.Heads(6, 2), 4), ("decode", kvcore.Heads(6, 2), 6)):
        found = pool(buffer_for(side, setup("p3d2"), 5, 12), side, setup("p3d2"))  # type: ignore[arg-type]
        assert (found.geometry.layout, found.geometry.page_bytes) == (layout, (nbytes,))
    assert pool(buffer_for("decode", setup("p1d1"), 5, 12), "decode", setup("p1d1")).geometry.layout == kvcore.Opaque()


def test_a_room_is_over_with_its_slowest_rank_and_cpu_time_is_that_of_all() -> None:
    first = Measured(5.0, 0.5, (1.0, 1.0), 100.0, (100.0, 102.0))
    second = Measured(4.5, 0.25, (0.5, 2.0), 100.25, (100.25, 102.5))
    found = together({("prefill", 0): Measured(1.0, 2.0), ("decode", 0): first, ("decode", 1): second})
    assert found["prefill"] == Measured(1.0, 2.0)
    assert found["decode"] == Measured(5.0, 0.75, (1.0, 2.5), 100.0, (100.0, 102.0))


def test_of_a_side_that_is_lost_the_last_rank_counts() -> None:
    ranks = [kill.Ends((1.0, 3.0), ("PEER_LOST", "BACKEND"), "first"), kill.Ends((2.0, 2.5), ("TIMEOUT", "PEER_LOST"), "second")]
    assert kill.last(ranks) == kill.Ends((2.0, 3.0), ("TIMEOUT", "BACKEND"), "first")


def test_of_waiting_ranks_cpu_time_and_memory_are_added_up() -> None:
    ranks = [idle.Seen((1.0, 2.0), (0.5, 0.25), 100.0), idle.Seen((3.0, 1.0), (0.25, 1.0), 50.0)]
    assert idle.of_side(ranks) == idle.Seen((4.0, 3.0), (0.5, 1.0), 150.0)
    assert idle.of_side([idle.Seen((1.0,), (), None)] * 2) == idle.Seen((2.0,), (), None)


@pytest.mark.parametrize("at_once", [1, 3])
def test_no_rank_begins_a_room_before_others_have_come_as_far(at_once: int) -> None:
    ended, begun = all_ended(2), list[int]()

    def begin(number: int) -> kvcore.Handle:
        begun.append(number)
        assert len(begun) - ended[1] <= at_once
        return Mock(spec=kvcore.Receiver)

    def poll_all(handles: Sequence[kvcore.Handle]) -> list[KVPoll]:
        if not handles and ended[1] < ended[0]:  # this rank has nothing left that it may do
            ended[1] += 1
        return [KVPoll.SUCCESS] * len(handles)

    manager = cast(kvcore.KVManager, Mock(poll_all=poll_all))
    took, began = carry(manager, setup("p1d2"), range(7), at_once, begin, Pace(ended, 0))
    assert (begun, len(took), ended[0]) == ([*range(7)], 7, 7)
    assert began == sorted(began)


# --- what is refused


@pytest.mark.parametrize(
    "text", ["", "p1", "p4", "4x2", "p0d1", "p1d0", "p-1d1", "p1d65", "p1d1 ", "P1D1", "p1d2p1", "p1.0d1", "p٣d1", "p9999999999d1"]
)
def test_what_is_no_topology_is_wrong_usage(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("rooms", "bandwidth", "abort", "idle", "kill"):
        assert cli.run(["bench", name, "--topology", text]) == 2
        out, err = capsys.readouterr()
        assert out == "" and one_line(err)
        assert f"{text!r} is not pNdM with N prefill and M decode ranks, each from 1 to 64, such as p4d2" in err


@pytest.mark.parametrize("arguments", [("rooms",), ("bandwidth", "--page-bytes", "6", "--page-bytes", "4096")])
def test_pages_that_the_ranks_cannot_share_out_are_wrong_usage(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", *arguments, "--topology", "p3d2"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and one_line(err) and "cannot be shared out over the ranks of p3d2; give a multiple of 6" in err


@pytest.mark.parametrize("arguments", [("plan",), ("trace", "examples/trace.jsonl")])
def test_commands_of_one_process_a_side_have_no_topology(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", *arguments, "--topology", "p2d1"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and one_line(err) and "No such option: --topology" in err


def test_more_ranks_take_more_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(memory, "available", lambda: GIB)
    memory.afford("--rooms", 0, rooms=50_000)
    measured: Callable[..., Any] = lambda *_: pytest.fail("it is told before anything is measured")  # noqa: E731
    monkeypatch.setattr(abort, "measure", measured)
    for topology, count in (("p4d2", "50000"), ("p32d1", "1")):
        assert cli.run(["bench", "abort", "--rooms", count, "--topology", topology]) == 2
        out, err = capsys.readouterr()
        assert not out and one_line(err) and "GiB of memory on both sides together" in err
