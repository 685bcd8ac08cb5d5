"""The backend under two managers of one process. That it keeps the contract is shown in ``test_contract``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kvcore import BackendOptionsError, Config, KVManager, KVPoll, Pool, Region, RegistrationError, load_backend

from kvcore_shm.backend import ShmBackend
from kvcore_shm.mailbox import ROW, SLOT_BYTES

SOON_S = 10.0


def manager(role: str, memory: np.ndarray[Any, np.dtype[np.uint8]], **options: int) -> KVManager:
    config = Config(role=role, backend="shm", backend_options=options)
    return KVManager(config, [Pool.from_tensors("kv", [memory], page_size=1)])


def test_it_is_installed_under_its_name() -> None:
    assert load_backend("shm") is ShmBackend


@pytest.mark.parametrize("slots", [1, 16])
def test_pages_larger_than_a_slot_and_more_than_there_are_slots(slots: int) -> None:
    source = np.random.default_rng(1).integers(0, 256, (8, SLOT_BYTES + 100), np.uint8)
    target = np.zeros_like(source)
    with manager("prefill", source, slots=slots) as prefill, manager("decode", target) as decode:
        sender, receiver = prefill.sender(1), decode.receiver(1, prefill.address)
        receiver.receive(range(8))
        sender.send(range(7, -1, -1), last=True)
        for handle in (receiver, sender):
            assert handle.wait(SOON_S) is KVPoll.SUCCESS, handle.failure
            handle.clear()
    assert (target == source[::-1]).all()


def test_one_instance_may_be_both_sides() -> None:
    memories = [np.full((2, 64), value, np.uint8) for value in (1, 2)]
    with manager("both", memories[0]) as one, manager("both", memories[1]) as two:
        for room, (here, there) in enumerate([(one, two), (two, one)]):
            with here.sender(room) as sender, there.receiver(room, here.address) as receiver:
                receiver.receive([room])
                sender.send([room], last=True)
                assert receiver.wait(SOON_S) is KVPoll.SUCCESS, receiver.failure
    assert [memory[:, 0].tolist() for memory in memories] == [[1, 2], [1, 2]]


@pytest.mark.parametrize("slots", [0, 257, "many"])
def test_options_are_checked(slots: Any) -> None:
    with pytest.raises(BackendOptionsError, match="slots"):
        manager("prefill", np.zeros((1, 64), np.uint8), slots=slots)


def test_memory_is_registered_as_a_whole_or_not_at_all() -> None:
    backend, memory = ShmBackend(), np.zeros(64, np.uint8)
    good = Region(memory.ctypes.data, memory.nbytes)
    with pytest.raises(RegistrationError, match="cuda:0"):
        backend.kvcore_register([good, Region(1 << 20, 64, "cuda:0")])
    assert backend._memory == []


@pytest.mark.parametrize("row", [(1, 0, 1), (-1, 0, 1), (0, 64, 1), (0, 60, 5), (0, 2**64 - 1, 2), (0, 0, 65)])
def test_rows_that_lead_out_of_the_memory_are_refused(row: tuple[int, int, int]) -> None:
    backend, memory = ShmBackend(), np.zeros(64, np.uint8)
    backend.kvcore_register([Region(memory.ctypes.data, memory.nbytes)])
    payload = np.ones(SLOT_BYTES, np.uint8)
    assert not backend._put(np.array([(0, 0, 8), row], ROW), payload)
    assert not memory.any()
    assert backend._put(np.array([(0, 56, 8)], ROW), payload)
    assert memory.tolist() == [0] * 56 + [1] * 8
