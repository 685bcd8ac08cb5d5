"""Prefill ranks that do not make up what a decode rank holds: the room fails on all of them, with the reason (T3, C88)."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest

from kvcore import FailureCode, KVManager, KVPoll, Latent, Pool, SideRecord, Topology
from tests.helpers import config, ended, number, stores_empty, wait_until


def test_a_side_record_is_of_no_layer() -> None:
    """It comes from the last stage, and layer 0 from the first."""
    with ExitStack() as stack:
        prefill: list[KVManager] = []
        for rank in range(2):
            place = Topology(pp_size=2, pp_rank=rank)
            settings = config("prefill", topology=place, bootstrap=prefill[0].address if prefill else None)
            prefill.append(stack.enter_context(KVManager(settings, [pool((rank,)), side()])))
        decode = stack.enter_context(KVManager(config("decode"), [pool((0, 1)), side()]))
        room = number()
        senders, receiver = [manager.sender(room) for manager in prefill], decode.receiver(room, prefill[0].address)
        receiver.receive({"kv": [1], "side": [2]})
        for layer, sender in enumerate(senders):
            sender.send({"kv": [1]}, layers=range(layer, layer + 1))
        wait_until(lambda: receiver.layers_ready() == {0, 1}, what="both layers, before the side record")
        for sender in senders:
            sender.send({"side": [0]}, last=True)
        ended(receiver, KVPoll.SUCCESS)


def side() -> Pool:
    return Pool.from_tensors("side", [np.zeros((4, 3), np.uint8)], page_size=2, layout=SideRecord())


def pool(layers: tuple[int, ...]) -> Pool:
    return Pool.from_tensors("kv", [np.zeros((4, 8), np.uint8) for _ in layers], page_size=2, layers=layers, layout=Latent())


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        (((0, 1), (1, 2)), "pool 'kv': prefill writes layer 1 more than once; give each layer to one prefill stage"),
        (((0,), (1,)), "pool 'kv': prefill writes layer 2 not at all; give each layer to one prefill stage"),
    ],
)
def test_t3_stages_that_do_not_have_each_layer_once_fail_the_room_on_all_ranks(stages: tuple[tuple[int, ...], ...], says: str) -> None:
    with ExitStack() as stack:
        prefill: list[KVManager] = []
        for rank, layers in enumerate(stages):
            place = Topology(pp_size=2, pp_rank=rank)
            settings = config("prefill", topology=place, bootstrap=prefill[0].address if prefill else None)
            prefill.append(stack.enter_context(KVManager(settings, [pool(layers)])))
        decode = stack.enter_context(KVManager(config("decode"), [pool((0, 1, 2))]))
        room = number()
        handles = [*(manager.sender(room) for manager in prefill), decode.receiver(room, prefill[0].address)]
        for handle in handles:
            ended(handle, KVPoll.FAILED)
            assert handle.failure is not None and handle.failure.code is FailureCode.INCOMPATIBLE
            assert handle.failure.reason.startswith(says) and handle.failure.side == "decode"
            handle.clear()
        for manager in (*prefill, decode):
            stores_empty(manager)


BRIEF = {"bootstrap_s": 0.5}


def test_s8_what_a_room_of_a_group_waited_for_is_said_on_both_sides() -> None:
    """A rank that has not registered; ranks of which none has opened the room; a mapping that there is none of."""
    with ExitStack() as stack:
        leader = stack.enter_context(KVManager(config("prefill", topology=Topology(tp_size=2), limits=BRIEF), [pool((0,))]))
        dp = stack.enter_context(KVManager(config("prefill", topology=Topology(dp_size=2)), [pool((0,))]))
        more = config("prefill", topology=Topology(dp_size=2, dp_rank=1), bootstrap=dp.address)
        stack.enter_context(KVManager(more, [pool((0,))]))
        decode = stack.enter_context(KVManager(config("decode", limits=BRIEF), [pool((0,))]))
        for handle, says in (
            (leader.sender(1), "waiting for a receiver to join (group not ready, 1 of 2 ranks registered; missing: 1)"),
            (
                decode.receiver(1, leader.address),
                f"(prefill {leader.address}: group not ready, 1 of 2 ranks registered; missing: 1)",
            ),
            (decode.receiver(2, dp.address), f"(prefill {dp.address}: no data-parallel rank has opened the room)"),
        ):
            ended(handle, KVPoll.FAILED)
            assert handle.failure is not None and says in handle.failure.reason, handle.failure
            handle.clear()


def test_t3_what_cannot_be_mapped_is_refused_when_decode_meets_the_leader() -> None:
    """Pools that are not stated, between unlike sizes: with the reason, and prefill's log has it too."""

    def opaque() -> Pool:
        return Pool.from_tensors("kv", [np.zeros((4, 8), np.uint8)], page_size=2)

    with ExitStack() as stack:
        leader = stack.enter_context(KVManager(config("prefill", topology=Topology(tp_size=2)), [opaque()]))
        other = config("prefill", topology=Topology(tp_size=2, tp_rank=1), bootstrap=leader.address)
        stack.enter_context(KVManager(other, [opaque()]))
        decode = stack.enter_context(KVManager(config("decode"), [opaque()]))
        with decode.receiver(1, leader.address) as receiver:
            ended(receiver, KVPoll.FAILED)
            assert receiver.failure is not None and receiver.failure.code is FailureCode.INCOMPATIBLE
            assert "pool 'kv': an opaque page needs tp sizes that are equal, and they are 2 and 1" in receiver.failure.reason
