"""The floor of ``kvcore bench``: each way moves every byte, which the measurement compares."""

from __future__ import annotations

import json

import pytest
from kvcore_floors.mooncake import MooncakeFloor

from tests.commands import kvcore
from tests.helpers import ROOT

BANDWIDTH = ("bandwidth", "--page-bytes", "4096", "--room-bytes", "100000", "--repeats", "1")
ROOMS = ("rooms", "--page-bytes", "4096", "--rooms", "20", "--in-flight", "8", "--from", "open", "--repeats", "1")


@pytest.mark.parametrize(("arguments", "unit"), [(BANDWIDTH, "gb_per_s"), (ROOMS, "per_s")], ids=["bandwidth", "rooms"])
def test_every_way_of_mooncake_is_tried_beside_kvcore(arguments: tuple[str, ...], unit: str) -> None:
    done = kvcore("bench", *arguments, "--backend", "mooncake", "--json", "-")
    assert (done.returncode, done.stderr) == (0, "")
    (one,) = json.loads(done.stdout)["results"]
    tried = one["raw"][f"tried_{unit}"]
    assert tuple(tried) == MooncakeFloor.ways and min(tried.values()) > 0
    assert one["raw"]["way"] in tried and one["raw"]["kvcore_share"] > 0


def test_every_way_of_mooncake_is_in_the_documents_by_its_name() -> None:
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert [way for way in MooncakeFloor.ways if f"`{way}`" not in text] == []
