"""What a backend is given of a chunk: descriptors, and for one that takes pages, the pages of one pool at a time."""

from __future__ import annotations

import numpy as np
import pytest

from kvcore import KVManager, Pool
from kvcore.hookspecs import Transfer
from kvcore.states import KVPoll
from tests.fake_backends import MemoryBackend, install
from tests.helpers import config, ended, memory, number

LAYERS, PAGE = 2, 64


def moved(monkeypatch: pytest.MonkeyPatch, **able: object) -> list[Transfer]:
    """The transfers of one room: pages 3, 5, 6 of ``kv`` to 9, 1, 2, and page 4 of ``aux`` to 0."""
    fake = install(monkeypatch, MemoryBackend, **able)
    source, target = memory(16, LAYERS, PAGE, seed=1), memory(16, LAYERS, PAGE)
    aux, landed = memory(8, 1, 16, seed=2), memory(8, 1, 16)

    def start(role: str, kv: object, side: object) -> KVManager:
        return KVManager(
            config(role, backend="fake"), [Pool.from_tensors("kv", kv, page_size=16), Pool.from_tensors("aux", side, page_size=1)]
        )

    with start("prefill", source, aux) as prefill, start("decode", target, landed) as decode:
        room = number()
        with prefill.sender(room) as sender, decode.receiver(room, prefill.address) as receiver:
            receiver.receive({"kv": [9, 1, 2], "aux": [0]})
            sender.send({"kv": [3, 5, 6], "aux": [4]}, last=True)
            ended(sender, KVPoll.SUCCESS)
            ended(receiver, KVPoll.SUCCESS)
            assert all(np.array_equal(a[[5, 6, 3]], b[[1, 2, 9]]) for a, b in zip(source, target, strict=True))
            assert np.array_equal(aux[0][4], landed[0][0])
    transfers: list[Transfer] = fake.made[0].transfers
    return transfers


def pages(transfer: Transfer) -> tuple[str, list[int], list[int]]:
    mine, theirs = transfer.local_pages, transfer.remote_pages
    return transfer.pool, [] if mine is None else mine.tolist(), [] if theirs is None else theirs.tolist()


def test_flat_descriptors_name_no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    (transfer,) = moved(monkeypatch)
    assert pages(transfer) == ("", [], [])
    assert transfer.length.size == 2 * LAYERS + 1


def test_pages_come_pool_by_pool_as_they_lie_in_the_memory_written_with_their_merged_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    kv, aux = moved(monkeypatch, descriptors="pages")
    assert pages(kv) == ("kv", [5, 6, 3], [1, 2, 9])
    assert sorted(kv.length.tolist()) == [PAGE, PAGE, 2 * PAGE, 2 * PAGE]
    assert pages(aux) == ("aux", [4], [0])


@pytest.mark.parametrize("limit", [{"max_bytes": 2 * LAYERS * PAGE}, {"max_descriptors": 2 * LAYERS}, {"max_bytes": 3 * LAYERS * PAGE - 1}])
def test_a_limit_cuts_between_pages_that_go_as_they_lie_in_the_memory_written(
    monkeypatch: pytest.MonkeyPatch, limit: dict[str, int]
) -> None:
    first, second, _ = moved(monkeypatch, descriptors="pages", **limit)
    assert [pages(first), pages(second)] == [("kv", [5, 6], [1, 2]), ("kv", [3], [9])]


def test_a_page_above_the_limit_comes_as_descriptors_only(monkeypatch: pytest.MonkeyPatch) -> None:
    transfers = moved(monkeypatch, descriptors="pages", max_bytes=PAGE)
    assert [pages(one) for one in transfers[:-1]] == [("", [], [])] * (3 * LAYERS)
    assert pages(transfers[-1]) == ("aux", [4], [0])


def test_limits_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    for one in moved(monkeypatch, descriptors="pages", max_bytes=200, max_descriptors=3):
        assert one.nbytes <= 200 and one.length.size <= 3
