"""Pools that take another pool's pages (``pairs_with``): a host pool of decode in place of the one that prefill sends from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore import ConfigError, FailureCode, Heads, KVManager, KVPoll, PageError, Pool, Topology
from tests.helpers import BACKENDS, config, ended, memory, number, stores_empty

LAYERS, PAGE = 2, 32


class Pair:
    """A prefill with the pool ``kv``, and a decode with ``kv`` (or not) and a host pool for it."""

    def __init__(self, backend: str, device: bool = True, **host: Any) -> None:
        self.source, self.target, self.host = memory(8, LAYERS, PAGE, seed=1), memory(6, LAYERS, PAGE), memory(10, LAYERS, PAGE)
        kv = Pool.from_tensors("kv", self.source, page_size=2)
        pools = [Pool.from_tensors("kv", self.target, page_size=2)] if device else []
        pools.append(Pool.from_tensors("kv_host", self.host, **{"page_size": 2, "pairs_with": "kv", **host}))
        self.prefill = KVManager(config("prefill", backend), [kv])
        self.decode = KVManager(config("decode", backend), pools)

    def room(self) -> tuple[kvcore.Sender, kvcore.Receiver]:
        room = number()
        return self.prefill.sender(room), self.decode.receiver(room, self.prefill.address)

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(backend: str) -> Iterator[Pair]:
    made = Pair(backend)
    yield made
    made.close()


def test_pages_go_to_the_pool_that_lists_them(pair: Pair) -> None:
    for pool, arrays, other in (("kv_host", pair.host, pair.target), ("kv", pair.target, pair.host)):
        sender, receiver = pair.room()
        before = [array.copy() for array in other]
        with sender, receiver:
            receiver.receive({pool: [5, 0, 3]}, prefix_pages={pool: 2})
            sender.send([1, 7])
            sender.send([2], last=True)
            ended(receiver, KVPoll.SUCCESS)
            ended(sender, KVPoll.SUCCESS)
            assert sender.prefix_pages == {"kv": 2}
        assert all(np.array_equal(mine[[5, 0, 3]], theirs[[1, 7, 2]]) for mine, theirs in zip(arrays, pair.source, strict=True))
        assert all(np.array_equal(now, then) for now, then in zip(other, before, strict=True))
    for manager in (pair.prefill, pair.decode):
        stores_empty(manager)


def test_decode_may_have_the_host_pool_only(backend: str) -> None:
    pair = Pair(backend, device=False)
    sender, receiver = pair.room()
    with sender, receiver:
        receiver.receive([4])
        sender.send([6], last=True)
        ended(receiver, KVPoll.SUCCESS)
        assert all(np.array_equal(mine[4], theirs[6]) for mine, theirs in zip(pair.host, pair.source, strict=True))
    pair.close()


def test_of_two_pools_for_one_a_room_lists_one(pair: Pair) -> None:
    sender, receiver = pair.room()
    with sender, receiver:
        with pytest.raises(PageError, match=r"pools \['kv', 'kv_host'\] are both for the sender's 'kv'; list one of them"):
            receiver.receive({"kv": [1], "kv_host": [2]})
        receiver.receive({"kv_host": [2]})
        sender.send([1], last=True)
        ended(receiver, KVPoll.SUCCESS)


def test_a_host_pool_of_other_pages_is_refused() -> None:
    pair = Pair("local", page_size=4)
    sender, receiver = pair.room()
    with sender, receiver:
        ended(receiver, KVPoll.FAILED)
        assert receiver.failure is not None and receiver.failure.code is FailureCode.INCOMPATIBLE
        assert "pool 'kv' and 'kv_host': page_size is 2 here and 4 there" in receiver.failure.reason
    pair.close()


def test_a_pool_that_pairs_with_another_is_not_sent_from() -> None:
    kv, host = (Pool.from_tensors(name, memory(4, 1, 8), page_size=1, pairs_with=of) for name, of in (("kv", ""), ("host", "kv")))
    with KVManager(config("both"), [kv, host]) as manager, manager.sender(number()) as sender:
        with pytest.raises(PageError, match="pool 'host' only receives; send from 'kv'"):
            sender.send({"host": [1]})
        sender.send({"kv": [1]})
    for role in ("prefill", "both"):
        with pytest.raises(ConfigError, match=f"pool 'host' pairs with 'kv', which role '{role}' sends from; give it too"):
            KVManager(config(role), [host])


def test_pools_that_pair_with_themselves_or_in_a_chain_are_refused() -> None:
    def made(name: str, of: str) -> Pool:
        return Pool.from_tensors(name, memory(4, 1, 8), page_size=1, pairs_with=of)

    with pytest.raises(ConfigError, match="pairs_with is its own name"):
        made("kv", "kv")
    with pytest.raises(ConfigError, match="pairs_with 3 must be text"):
        made("kv", 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="pool 'c' pairs with 'b', which is not sent from"):
        KVManager(config("decode"), [made("b", "a"), made("c", "b")])


def test_heads_of_several_ranks_meet_in_a_host_pool() -> None:
    """Two prefill ranks with a head each."""
    heads = {"page_size": 2, "layout": Heads(2, 4)}
    target = np.zeros((6, 2, 2, 4), np.uint8)
    sources = [np.full((4, 2, 1, 4), 1 + rank, np.uint8) for rank in range(2)]
    prefill: list[KVManager] = []
    for rank, source in enumerate(sources):
        settings = config("prefill", topology=Topology(tp_size=2, tp_rank=rank), bootstrap=prefill[0].address if prefill else None)
        prefill.append(KVManager(settings, [Pool.from_tensors("kv", [source], **heads)]))  # type: ignore[arg-type]
    decode = KVManager(config("decode"), [Pool.from_tensors("host", [target], pairs_with="kv", **heads)])  # type: ignore[arg-type]
    room = number()
    senders = [manager.sender(room) for manager in prefill]
    with decode.receiver(room, prefill[0].address) as receiver:
        receiver.receive([5])
        for sender in senders:
            sender.send([3], last=True)
        ended(receiver, KVPoll.SUCCESS)
        assert (target[5, :, 0] == 1).all() and (target[5, :, 1] == 2).all() and not target[:5].any()
    for manager in (decode, *prefill):
        manager.close()
