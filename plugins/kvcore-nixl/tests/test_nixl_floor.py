"""The floor of ``kvcore bench``: each way moves every byte, which the measurement compares; over TCP, and over shared memory."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading

import numpy as np
import pytest
from kvcore_floors.nixl import WAYS, NixlFloor
from kvcore_nixl.options import NixlOptions

import kvcore
from benchmarks.beside.alone import transfer
from kvcore.hookspecs import OpenContext, Peer
from kvcore.planner import Layout
from tests.commands import kvcore as command
from tests.helpers import ROOT

BANDWIDTH = ("bandwidth", "--page-bytes", "4096", "--room-bytes", "100000", "--repeats", "1")
ROOMS = ("rooms", "--page-bytes", "4096", "--rooms", "20", "--in-flight", "8", "--from", "open", "--repeats", "1")


@pytest.mark.parametrize(("arguments", "unit", "over"), [(BANDWIDTH, "gb_per_s", "tcp"), (ROOMS, "per_s", "")], ids=["bandwidth", "rooms"])
def test_every_way_of_nixl_is_tried_beside_kvcore(
    arguments: tuple[str, ...], unit: str, over: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if over:
        monkeypatch.setenv("UCX_TLS", over)
    done = command("bench", *arguments, "--backend", "nixl", "--json", "-")
    assert (done.returncode, done.stderr) == (0, "")
    (one,) = json.loads(done.stdout)["results"]
    tried = one["raw"][f"tried_{unit}"]
    assert tuple(tried) == tuple(WAYS) and min(tried.values()) > 0
    assert one["raw"]["way"] in tried and one["raw"]["kvcore_share"] > 0


def test_every_way_of_nixl_is_in_the_documents_by_its_name() -> None:
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert [way for way in WAYS if f"`{way}`" not in text] == []


def test_a_rooms_letters_and_its_transfer_are_measured_without_a_room() -> None:
    command = [sys.executable, "-m", "benchmarks.skeleton", "--rooms", "300", "--in-flight", "1", "16"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    lines = [line for line in done.stdout.splitlines() if " rooms/s" in line]
    assert done.returncode == 0 and [line.partition(" in ")[0] for line in lines] == ["1", "16"], done.stdout + done.stderr


class Side:
    """A floor over the pages of one pool of two tensors."""

    def __init__(self, side: str) -> None:
        self.tensors = [np.zeros((8, 64), np.uint8) for _ in range(2)]
        pool = kvcore.Pool.from_tensors("kv", self.tensors, page_size=1)
        context = OpenContext(side, side, 0, "127.0.0.1", "127.0.0.1", logging.getLogger("test"), (pool.geometry,))  # type: ignore[arg-type]
        self.floor = NixlFloor()
        self.peer = Peer(side, self.floor.open(NixlOptions(), context, pool.regions), pool.regions, (pool.geometry,))


@pytest.mark.parametrize("way", WAYS)
def test_a_transfer_is_of_all_tensors_of_its_pool(way: str) -> None:
    mine, theirs = Side("prefill"), Side("decode")
    for number, tensor in enumerate(mine.tensors):
        tensor[:] = np.arange(8, dtype=np.uint8)[:, None] + 100 * number + 1
    mine.floor.connect(theirs.peer)
    stop = threading.Event()
    server = threading.Thread(target=theirs.floor.serve, args=(stop,), daemon=True)
    server.start()
    here, there = np.array([5, 1, 2]), np.array([0, 7, 3])
    sides = (Layout.of(one.peer.pools, one.peer.regions) for one in (mine, theirs))
    mine.floor.prepare(way, [transfer(theirs.peer, *sides, "kv", here, there)], 1)()
    stop.set()
    server.join()
    for one, other in zip(mine.tensors, theirs.tensors, strict=True):
        assert (other[there] == one[here]).all() and not other[[1, 2, 4, 5, 6]].any()
    for each in (mine, theirs):
        each.floor.close()
