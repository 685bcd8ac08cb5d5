"""The hooks, one by one, over TCP and shared memory within this process."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kvcore_nixl import backend, native
from kvcore_nixl.backend import Agent, Job
from nixl_pair import BIG, Calls, Node, pair

import kvcore
from benchmarks.fuzz.endpoints import spoiled
from kvcore.hookspecs import DONE, PENDING, RETRY, Endpoint
from tests.engine_nodes import resources, settles, within
from tests.helpers import SOON_S, duo, memory, wait_until

SCATTERED = ([9, 3, 50, 20, 7], [1, 40, 2, 30, 8])
RUN = (list(range(10, 30)), list(range(20, 40)))
NEW = 0xEE


@pytest.mark.parametrize("entries", [0, 1 << 20])
def test_t1_scattered_pages_and_runs_arrive_from_prepared_lists_or_descriptors(
    transport: str, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch, "make_prepped_xfer", "initialize_xfer")
    with pair(prepared_entries=entries) as both:
        for (mine, theirs), prepared in ((SCATTERED, entries > 0), (RUN, False)):
            calls.made.clear()
            assert both.ended(both.post(mine, theirs)) == DONE
            assert both.equal(mine, theirs)
            assert dict(calls.made) == {"make_prepped_xfer" if prepared else "initialize_xfer": 1}
        untouched = sorted({*range(64)} - {*SCATTERED[1], *RUN[1]})
        assert not any(array[untouched].any() for array in both.decode.arrays)


def test_prepared_lists_stay_within_what_the_option_allows_over_all_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, "make_prepped_xfer")
    with pair(prepared_entries=5 * 64) as both:  # a list is of 64 pages in 2 regions: two lists fit, and no third
        late = Node("decode", "late", memory(64, 2, 4096))
        both.others.append(late)
        both.prefill.backend.kvcore_connect(late.peer())
        assert both.ended(both.post(*SCATTERED, to=late), late) == DONE
        assert calls.made["make_prepped_xfer"] == 1  # the pair's own first page
        assert all(np.array_equal(a[SCATTERED[0]], b[SCATTERED[1]]) for a, b in zip(both.prefill.arrays, late.arrays, strict=True))
        both.prefill.backend.kvcore_disconnect(both.decode.name)
        both.prefill.backend.kvcore_disconnect(late.name)
        both.prefill.backend.kvcore_connect(late.peer())  # now there is room for it
        assert both.ended(both.post(*SCATTERED, to=late), late) == DONE
        assert calls.made["make_prepped_xfer"] == 2


@pytest.mark.parametrize("thread", [False, True])
def test_r3_after_close_no_byte_of_a_write_in_flight_leaves_the_source(tcp: None, thread: bool) -> None:
    with pair(**BIG, progress_thread=thread) as both:
        if thread:
            both.decode.close()  # its thread would take everything in
            both.decode = Node("decode", "still", both.decode.arrays)
            both.others.append(both.decode)
            both.prefill.backend.kvcore_connect(both.decode.peer())
            wait_until(lambda: both.ended(both.post([0], [0])) == DONE)
        both.in_flight()
        began = time.monotonic()
        both.prefill.close()
        assert time.monotonic() - began < 2.0
        both.prefill.fill(NEW)
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            both.decode.backend.kvcore_progress()
        assert not any((array == NEW).all(axis=1).any() for array in both.decode.arrays)
        assert any(not array.all() for array in both.decode.arrays), "all of it was written before the close: nothing was tested"


def test_r3_close_says_so_if_the_agent_goes_on(tcp: None) -> None:
    with pair(**BIG) as both:
        kept = both.in_flight().handle
        with pytest.raises(RuntimeError, match="keep the memory"):
            both.prefill.backend.kvcore_close()
        with pytest.raises(RuntimeError, match="keep the memory"):
            both.prefill.backend.kvcore_close()
        del kept


def test_a_request_that_nobody_asks_for_is_kept_until_it_has_ended(tcp: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, "release_xfer_handle")
    with pair(**BIG) as both:
        calls.made.clear()
        both.in_flight()
        one = both.prefill.backend
        for _ in range(5):
            one.kvcore_progress()
        assert calls.made["release_xfer_handle"] == 0
        wait_until(lambda: both.drive(0.01) or calls.made["release_xfer_handle"] == 1)
        assert both.equal(range(256), range(256))


def test_r4_a_disconnect_in_flight_proves_nothing_and_unloads_the_peer_in_the_end(tcp: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "LEAVE_S", 0.1)
    calls = Calls(monkeypatch, "remove_remote_agent", "release_dlist_handle")
    with pair(**BIG) as both:
        job, one = both.in_flight(), both.prefill.backend
        assert one.kvcore_disconnect(both.decode.name) is False
        refused = both.post([1], [1])
        assert refused.kind.value == "failed" and refused.quiescent and refused.peer_broken  # type: ignore[union-attr]
        assert not calls.made
        assert both.ended(job) == DONE
        assert both.equal(range(256), range(256))
        assert dict(calls.made) == {"remove_remote_agent": 1, "release_dlist_handle": 1}
        assert one.kvcore_disconnect(both.decode.name) is True


@pytest.mark.parametrize("left", [False, True])
def test_a_peer_that_pairs_anew_in_flight_keeps_its_writes(tcp: None, left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "LEAVE_S", 0.1)
    with pair(**BIG) as both:
        job = both.in_flight()
        if left:
            both.prefill.backend.kvcore_disconnect(both.decode.name)
        both.prefill.backend.kvcore_connect(both.decode.peer())
        assert both.state(job) is PENDING
        again = both.post([5], [5])
        assert both.ended(job) == both.ended(again) == DONE
        assert both.equal(range(256), range(256))


def test_r4_a_peer_that_left_is_unloaded_only_after_its_last_write(tcp: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "LEAVE_S", 0.1)
    calls = Calls(monkeypatch, "remove_remote_agent")
    held: list[object] = []
    agent = native.load()[0].nixl_agent
    original = agent.check_xfer_state
    monkeypatch.setattr(agent, "check_xfer_state", lambda self, handle: "PROC" if handle in held else original(self, handle))
    with pair(**BIG) as both:
        first, last = both.in_flight(), both.post([5], [5])
        assert isinstance(last, Job)
        held.append(last.handle)
        assert both.prefill.backend.kvcore_disconnect(both.decode.name) is False
        assert both.ended(first) == DONE
        assert calls.made["remove_remote_agent"] == 0
        held.clear()
        assert both.ended(last) == DONE
        assert calls.made["remove_remote_agent"] == 1


def test_r4_a_disconnect_waits_for_what_is_about_to_end(tcp: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "LEAVE_S", 20.0)
    with pair(**BIG) as both:
        job, peer = both.in_flight(), both.prefill.backend._peers[both.decode.name]
        ended = threading.Event()

        def take_in() -> None:
            wait_until(lambda: peer.leaving)
            while not ended.is_set():
                both.decode.backend.kvcore_progress()

        taking = threading.Thread(target=take_in)
        taking.start()
        try:
            assert both.prefill.backend.kvcore_disconnect(both.decode.name) is True
        finally:
            ended.set()
            taking.join(20.0)
        assert job.state == DONE and both.equal(range(256), range(256))


def test_a_peer_that_comes_back_with_other_memory_waits_for_its_writes(tcp: None) -> None:
    with pair(**BIG) as both:
        job, decode = both.in_flight(), both.decode.backend
        more = np.zeros(4096, np.uint8)
        decode._registered.append(decode._agent.register_memory([(more.ctypes.data, more.nbytes, 0, "")], "DRAM"))
        with pytest.raises(ConnectionError, match="writes to peer decode-.* as it was before have not ended; have it pair again later"):
            both.prefill.backend.kvcore_connect(both.decode.peer())
        assert both.ended(job) == DONE
        both.prefill.backend.kvcore_connect(both.decode.peer())
        assert both.ended(both.post([3], [1])) == DONE


@pytest.mark.parametrize("entries", [0, 1 << 20])
def test_a_peer_that_nixl_has_forgotten_is_broken_and_pairs_anew(entries: int) -> None:
    with pair(prepared_entries=entries) as both:
        one = both.prefill.backend
        one._agent.remove_remote_agent(both.decode.name)
        lost = both.post(*SCATTERED)
        assert (lost.kind.value, lost.quiescent, lost.peer_broken) == ("failed", True, True)  # type: ignore[union-attr]
        one.kvcore_connect(both.decode.peer())
        assert both.ended(both.post(*SCATTERED)) == DONE


def test_r4_a_broken_peer_has_its_writes_failed_and_comes_back(transport: str) -> None:
    with pair(**BIG) as both:
        job = both.in_flight() if transport == "tcp" else None
        both.decode.close()
        if job is None:
            wait_until(lambda: (found := both.ended(both.post([1], [1]))).peer_broken or found == DONE)
        else:
            lost = both.ended(job)
            assert (lost.kind.value, lost.quiescent, lost.peer_broken) == ("failed", False, True), lost
            assert both.post([1], [1]).quiescent  # type: ignore[union-attr]
        assert both.prefill.backend.kvcore_disconnect(both.decode.name) is True
        both.decode = Node("decode", both.decode.name, both.decode.arrays)
        both.others.append(both.decode)
        both.prefill.backend.kvcore_connect(both.decode.peer())
        both.decode.fill(0)
        assert both.ended(both.post([3, 1], [1, 2])) == DONE
        assert both.equal([3, 1], [1, 2])


def test_a_broken_peer_is_loaded_anew_also_without_a_disconnect(tcp: None) -> None:
    with pair(**BIG) as both:
        job = both.in_flight()
        both.decode.close()
        assert both.ended(job).peer_broken
        both.decode = Node("decode", both.decode.name, both.decode.arrays)
        both.others.append(both.decode)
        both.prefill.backend.kvcore_connect(both.decode.peer())
        assert both.ended(both.post([3], [1])) == DONE


@pytest.mark.parametrize("side", ["decode", "both"])
def test_r4_a_side_that_is_written_to_never_says_that_a_peer_is_fenced(side: str) -> None:
    with pair(side="both") as both:
        node = Node(side, "one", memory(64, 2, 4096))
        both.others.append(node)
        node.backend.kvcore_connect(both.decode.peer())
        assert node.backend.kvcore_disconnect(both.decode.name) is False
        assert node.backend.kvcore_disconnect("nobody") is False


@pytest.mark.parametrize("bad", ["cut short", "a bit", "another's", "empty"])
def test_bad_metadata_is_refused_and_the_known_peer_works_on(bad: str) -> None:
    with pair() as both:
        other = Node("decode", "other", memory(64, 2, 4096))
        both.others.append(other)
        peer = both.decode.peer()
        data = peer.endpoint.data
        spoilt = {"cut short": data[:-9], "a bit": data[:-9] + b"?" + data[-8:], "another's": other.peer().endpoint.data, "empty": b""}[bad]
        with pytest.raises(ConnectionError, match=f"{peer.id} sent NIXL metadata that is damaged, or another's; have it pair again"):
            both.prefill.backend.kvcore_connect(dataclasses.replace(peer, endpoint=Endpoint(spoilt)))
        assert both.ended(both.post([3], [1])) == DONE
        assert both.equal([3], [1])


def test_p5_metadata_changed_in_any_way_never_reaches_nixl() -> None:
    """2,000 endpoints changed on their way are refused for their digest. One that is made up whole may pass it: such a peer lies."""
    with pair() as both:
        peer, refused = both.decode.peer(), 0
        for index in range(2000):
            changed = dataclasses.replace(peer, endpoint=Endpoint(spoiled(8, index, peer.endpoint.data)))
            with pytest.raises(ConnectionError, match="sent NIXL metadata that is damaged, or another's"):
                both.prefill.backend.kvcore_connect(changed)
            refused += 1
        assert refused == 2000
        assert both.ended(both.post([3], [1])) == DONE
        assert both.equal([3], [1])


def test_a_stranger_that_names_another_peer_does_no_harm_to_that_one() -> None:
    with pair() as both:
        one, peer = both.prefill.backend, both.decode.peer()
        metadata = peer.endpoint.data[32:]
        for name, spoken in (("evil", metadata[:-1]), ("evil", metadata), (peer.id[:-1], metadata), (f"{peer.id}|", metadata)):
            lie = Endpoint(hashlib.sha256(name.encode() + spoken).digest() + spoken)
            with pytest.raises(ConnectionError, match="sent NIXL metadata that is damaged, or another's"):
                one.kvcore_connect(dataclasses.replace(peer, id=name, endpoint=lie))
        assert both.ended(both.post([3], [1])) == DONE
        assert one.kvcore_disconnect(peer.id) is True
        one.kvcore_connect(peer)
        assert both.ended(both.post([4], [2])) == DONE


@pytest.mark.parametrize(("files", "warned"), [(1023, True), (1024, False), (-1, False)])
def test_few_open_files_are_warned_of(files: int, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(backend.resource, "getrlimit", lambda which: (files, -1))
    with caplog.at_level(logging.WARNING):
        Node("prefill", "one", memory(4, 1, 4096)).close()
    assert [message.partition(":")[0] for message in caplog.messages] == [f"{files} open files are few"] * warned


def test_t7_what_fails_before_the_post_is_quiescent(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair(prepared_entries=0) as both:
        wrong = dataclasses.replace(both.transfer([3], [1]), remote_base=np.array([4096, 4096], np.uint64))  # which nobody registered
        found = both.prefill.backend.kvcore_transfer(wrong, may_wait=True)
        assert (found.kind.value, found.quiescent, found.peer_broken) == ("failed", True, False)  # type: ignore[union-attr]
        assert "NotFound" in found.reason  # type: ignore[union-attr]
        assert both.ended(both.post([3], [1])) == DONE


def test_b3_a_region_that_is_refused_is_named_and_none_stays_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, "register_memory", "deregister_memory")
    with pair() as both:
        one, good = both.prefill.backend, both.prefill.pool.regions
        one.kvcore_unregister(good)
        calls.made.clear()
        nowhere = dataclasses.replace(good[1], ptr=0)
        with pytest.raises(kvcore.RegistrationError, match=r"at 0x0 on .* DRAM memory \(nixlBackendError.*ulimit -l"):
            one.kvcore_register([good[0], nowhere])
        assert dict(calls.made) == {"register_memory": 2, "deregister_memory": 1}
        one.kvcore_register(good)
        assert both.ended(both.post([3], [1])) == DONE


def test_a_pool_of_two_kinds_of_memory_is_refused() -> None:
    with pair() as both:
        one, (first, second) = both.prefill.backend, both.prefill.pool.regions
        with pytest.raises(kvcore.ConfigError, match="pool 'kv' lies in both host and device memory; make two pools of it"):
            one.kvcore_register([first, dataclasses.replace(second, device="cuda:1")])
        both.others.append(other := Node("decode", "other", memory(64, 2, 4096)))
        mixed = dataclasses.replace(other.peer(), regions=(first, dataclasses.replace(second, device="cuda:1")))
        with pytest.raises(ConnectionError, match="other cannot be loaded .*pool 'kv' lies in both"):
            one.kvcore_connect(mixed)
        with pytest.raises(kvcore.RegistrationError, match="VRAM memory"):  # all of one kind, but there is no GPU
            one.kvcore_register([dataclasses.replace(region, device="cuda:0") for region in (first, second)])
        one.kvcore_register([first, second])


def test_device_numbers_are_those_of_the_regions() -> None:
    with pair() as both:
        (first, second), pools = both.prefill.pool.regions, (both.prefill.pool.geometry,)
        for devices, kind, numbers in (
            (("cpu", "cpu"), "DRAM", [0, 0]),
            (("cuda:1", "cuda:3"), "VRAM", [1, 3]),
            (("cuda", "rocm:2"), "VRAM", [0, 2]),
        ):
            places = [dataclasses.replace(region, device=device) for region, device in zip((first, second), devices, strict=True)]
            found = Agent.of(pools, places)
            assert (found.kinds, found.devices.tolist()) == ([kind] * 2, numbers)


@pytest.mark.parametrize("hook", ["register", "connect"])
def test_b3_an_error_that_somebody_keeps_does_not_keep_the_agent(hook: str) -> None:
    with pair() as both:
        Node("prefill", "first", memory(4, 2, 4096)).close()  # has the library make what it keeps
        before = resources()
        node = Node("prefill", "one", memory(4, 2, 4096))
        node.backend.kvcore_unregister(node.pool.regions)
        elsewhere = [dataclasses.replace(region, device="cuda:0") for region in node.pool.regions]
        unknown = tuple(dataclasses.replace(region, ptr=4096) for region in both.decode.pool.regions)
        refused: Callable[[], None] = {
            "register": lambda: node.backend.kvcore_register(elsewhere),
            "connect": lambda: node.backend.kvcore_connect(dataclasses.replace(both.decode.peer(), regions=unknown)),
        }[hook]
        with pytest.raises((kvcore.RegistrationError, ConnectionError), match="NIXL_ERR") as kept:
            refused()
        node.close()  # which would say that the agent goes on
        wait_until(lambda: both.drive(0.01) or within(before))
        assert kept.value.__cause__ is not None


def test_b7_a_closed_backend_opens_again() -> None:
    with pair() as both:
        node = both.prefill
        node.close()
        node.close()
        both.others.append(again := Node("prefill", node.name, node.arrays))
        again.backend.kvcore_connect(both.decode.peer())
        both.prefill = again
        assert both.ended(both.post([3], [1])) == DONE


def test_hooks_of_the_progress_thread_do_not_wait_for_a_post(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, end = threading.Event(), threading.Event()
    with pair() as both:
        agent = native.load()[0].nixl_agent
        original = agent.transfer

        def slow(*args: object) -> object:
            begun.set()
            assert end.wait(10.0)
            return original(*args)

        monkeypatch.setattr(agent, "transfer", slow)
        job = Job("x", None)
        posting = threading.Thread(target=both.post, args=([1], [1]))
        posting.start()
        try:
            assert begun.wait(10.0)
            began = time.monotonic()
            both.prefill.backend.kvcore_progress()
            assert both.prefill.backend.kvcore_poll([job, job]) == [PENDING, PENDING]
            assert time.monotonic() - began < 1.0
        finally:
            end.set()
            posting.join(10.0)


def test_peers_come_and_go_and_leave_nothing(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, "add_remote_agent", "remove_remote_agent", "prep_xfer_dlist", "release_dlist_handle")
    with pair() as both:
        most = (0, 0)
        for number in range(20):
            node = Node("decode", f"guest-{number}", memory(64, 2, 4096))
            both.prefill.backend.kvcore_connect(node.peer())
            assert both.ended(both.post([3], [1], to=node), node) == DONE
            node.close()
            assert both.prefill.backend.kvcore_disconnect(node.name) is True
            most = max(most, resources()) if number < 3 else most
        settles(most)
    assert calls.made["add_remote_agent"] == calls.made["remove_remote_agent"] == 21
    assert calls.made["prep_xfer_dlist"] == calls.made["release_dlist_handle"]


@pytest.mark.parametrize("number", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_managers_opened_and_closed_leave_nothing(transport: str, number: int) -> None:
    most, megabytes = (0, 0), []
    for count in range(number):
        with duo("nixl") as both:
            both.transfer([1, 2, 5], [3, 4, 9])
        most = max(most, resources()) if count < 2 else most
        megabytes.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20)
    settles(most)
    assert megabytes[-1] - megabytes[number // 5] < 20, megabytes


def test_b6_a_call_that_may_not_wait_tries_again_where_another_is_at_the_agent() -> None:
    with pair() as both:
        own, transfer, found = both.prefill.backend, both.transfer([1], [2]), []
        with own._lock:
            thread = threading.Thread(target=lambda: found.append(own.kvcore_transfer(transfer, may_wait=False)))
            thread.start()
            thread.join(SOON_S)
            assert found == [RETRY]
        assert both.ended(own.kvcore_transfer(transfer, may_wait=False)) == DONE
