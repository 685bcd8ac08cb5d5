"""Kind K7: every state ends by a limit, and who is merely busy is not taken for dead.

Where a case speaks of a lease it is the time for which prefill holds pages for a decode side that is heard. C67 is in ``test_ranks``.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest
from kvcore_conformance.stage.crew import Crew
from kvcore_conformance.stage.driver import Child, Handle as ChildHandle, PoolSpec

from kvcore import FailureCode, Handle, KVManager, KVPoll, KVTransferError, Receiver
from kvcore.faults import ControlTap
from kvcore.wire import Ping
from tests.helpers import BACKENDS, SOON_S, Duo, Events, duo, ended, limits, manager, meet, memory, number, stays, wait_until

PAGES = [3, 8, 1]
LAYERS, PAGE_BYTES = 3, 256
POOL = [PoolSpec(pages=32, page_bytes=PAGE_BYTES, layers=LAYERS)]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=BACKENDS)
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    crew = Crew(backend=request.param)
    try:
        yield crew
    finally:
        crew.end()


def failure_of(handle: Handle, timeout_s: float = SOON_S) -> KVTransferError:
    ended(handle, KVPoll.FAILED, timeout_s)
    assert handle.failure is not None
    return handle.failure


def works(prefill: Child, decode: KVManager) -> None:
    """A room with a child succeeds, and is cleared."""
    sender = prefill.sender(number())
    with decode.receiver(sender.room, prefill.address) as receiver:
        receiver.receive([5])
        sender.send([7], last=True)
        ended(receiver, KVPoll.SUCCESS, 2 * SOON_S)
        assert sender.wait() == "SUCCESS"
    sender.clear()


# --- C65: each state has its limit


def limit_case(case: str, pair: Duo) -> tuple[list[Handle], str]:
    """A room of which the first handle runs into the limit, and what its reason must say; both handles must be kept."""
    if case == "prefill bootstrap_s":
        return [pair.prefill.sender(number())], "a receiver to join"
    if case == "decode bootstrap_s":
        return [pair.decode.receiver(number(), pair.prefill.address)], "prefill rank 0 to open the room"
    sender, receiver = pair.open()
    if case == "prefill bootstrap_s after a join":
        return [sender, receiver], "a receiver has joined"
    if case == "decode input_s before receive":
        return [receiver, sender], "receive to be called"
    receiver.receive(PAGES)
    if case == "prefill input_s":
        return [sender, receiver], "the first chunk"
    if case == "decode input_s after receive":
        return [receiver, sender], "the sender's first chunk"
    sender.send(PAGES[:1])
    if case == "prefill transfer_s":
        return [sender, receiver], "the last chunk"
    return [receiver, sender], "the sender's last chunk"


CASES = [
    "prefill bootstrap_s", "prefill bootstrap_s after a join", "prefill input_s", "prefill transfer_s",
    "decode bootstrap_s", "decode input_s before receive", "decode input_s after receive", "decode transfer_s",
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_c65_s8_each_limit_fires_in_its_state_with_nobody_polling(backend: str, case: str) -> None:
    """The side under test has the short limit, the other a long one, and no handle is asked before the limit has passed."""
    name = next(word for word in case.split() if word.endswith("_s"))
    side = case.split()[0]
    with duo(backend, own={side: {name: 0.6}}, orphan_s=30.0) as pair:
        meet(pair)
        events = Events()
        (pair.prefill if side == "prefill" else pair.decode).add_observer(events)
        begun = time.monotonic()
        handles, waited_for = limit_case(case, pair)
        handle = handles[0]
        at = events.reached(handle, "FAILED")
        assert 0.55 < at - begun < 4
        failure = failure_of(handle)
        assert failure.code is FailureCode.TIMEOUT and failure.side == side
        assert f"{name} passed for room {handle.room}" in failure.reason and waited_for in failure.reason


# --- C66: a receiver that is never given its destination


@pytest.mark.parametrize("moment", ["prefill is there", "prefill comes later", "prefill never comes"])
def test_c66_a_receiver_without_a_destination_fails_and_the_peer_is_told(backend: str, moment: str) -> None:
    """Its clock starts when it is made, whatever the caller does or leaves undone after that."""
    with duo(backend, own={"decode": {"bootstrap_s": 2.0, "input_s": 0.4}}, orphan_s=5.0) as pair:
        pair.pair()
        room = number()
        begun = time.monotonic()
        sender = pair.prefill.sender(room) if moment == "prefill is there" else None
        receiver = pair.decode.receiver(room, pair.prefill.address)
        if moment == "prefill comes later":
            stays(lambda: receiver.poll() is KVPoll.BOOTSTRAPPING, 0.5)
            sender = pair.prefill.sender(room)
        failure = failure_of(receiver)
        assert time.monotonic() - begun < 2.0 + 3.0
        assert failure.code is FailureCode.TIMEOUT and failure.side == "decode"
        assert ("bootstrap_s" if sender is None else "receive to be called") in failure.reason
        if sender is None:  # told as soon as it opens the room
            sender = pair.prefill.sender(room)
        told = failure_of(sender, 3.0)
        assert (told.reason, told.code, told.side) == (failure.reason, failure.code, failure.side)
        assert sender.is_release_safe() and receiver.is_release_safe()
        sender.clear()
        receiver.clear()
        pair.stores_empty()


# --- C69: pages are held for who is heard, and no longer

LEASE_S = 1.0


def test_c69_pages_are_held_for_a_busy_decode_and_not_for_a_dead_one(crew: Crew) -> None:
    """Silence may last a second. Decode is busy for five and is heard now and then: what it then asks for is there. Then it is killed."""
    times = limits(liveness_s=LEASE_S, ticket_s=2.0, quarantine_s=4.0)
    source = memory(32, LAYERS, PAGE_BYTES, seed=7)
    with crew.lend(1) as (decode,), manager("prefill", source, backend=crew.backend, limits=times) as prefill:
        decode.start("decode", POOL, limits=times.model_dump())
        for last in (False, True):
            sender = prefill.sender(number())
            receiver = decode.receiver(sender.room, prefill.address)
            assert receiver.until("WAITING_FOR_INPUT", timeout=SOON_S) == "WAITING_FOR_INPUT"
            sender.send(PAGES, last=True)
            if last:
                break
            decode.seize(0.15, times=25)
            stays(lambda: not sender.poll().terminal and not sender.is_release_safe(), 5.0)  # noqa: B023
            receiver.receive(PAGES)
            ended(sender, KVPoll.SUCCESS)
            assert receiver.wait(SOON_S) == "SUCCESS"
            sender.clear()
            receiver.clear()
        decode.kill()
        killed = time.monotonic()
        assert failure_of(sender).code is FailureCode.PEER_LOST
        assert sender.wait_release_safe(SOON_S) and not sender.release_unproven
        assert time.monotonic() - killed < LEASE_S + 2.0


# --- C70: misses are counted before anybody is given up

SILENCE_S = 6.0


def test_c70_a_peer_whose_interpreter_is_busy_is_given_up_after_liveness_s_and_not_before(crew: Crew) -> None:
    """One prefill process holds its interpreter's lock for three seconds, then its pings are late or lost a while: no room fails. Then it
    holds it for longer than silence may last: its rooms fail, and only those; afterwards it works again."""
    times = limits(liveness_s=SILENCE_S, send_s=SILENCE_S, ticket_s=SILENCE_S, quarantine_s=3 * SILENCE_S)
    with (
        crew.lend(2) as (busy, other),
        manager("decode", memory(32, LAYERS, PAGE_BYTES), backend=crew.backend, limits=times) as decode,
    ):
        rooms: dict[Child, list[tuple[ChildHandle, Receiver]]] = {}
        for prefill in (busy, other):
            works(prefill.start("prefill", POOL, limits=times.model_dump()), decode)
            senders = [prefill.sender(number()) for _ in range(3)]
            rooms[prefill] = [(sender, decode.receiver(sender.room, prefill.address)) for sender in senders]
            for _, receiver in rooms[prefill][1:]:
                receiver.receive([1])
            rooms[prefill][2][0].send([4])
        every = [receiver for _, receiver in itertools.chain(*rooms.values())]
        states = [KVPoll.WAITING_FOR_INPUT, KVPoll.WAITING_FOR_INPUT, KVPoll.TRANSFERRING] * 2
        wait_until(lambda: [receiver.poll() for receiver in every] == states)
        busy.seize(3.0)
        stays(lambda: [receiver.poll() for receiver in every] == states, 3.5)
        with ControlTap(decode) as tap:
            lost = tap.drop(lambda letter, outgoing: isinstance(letter.body, Ping))
            stays(lambda: [receiver.poll() for receiver in every] == states, 2.2)
            assert lost.count >= 2, "several pings in a row"
        assert decode.stats().peers == 2
        busy.seize(SILENCE_S + 2.0)
        for _, receiver in rooms[busy]:
            failure = failure_of(receiver, SILENCE_S + SOON_S)
            assert failure.code is FailureCode.PEER_LOST and "silent for liveness_s" in failure.reason
        for (sender, receiver), pages in zip(rooms[other], ([], [2], []), strict=True):
            assert not receiver.poll().terminal
            receiver.receive([1]) if receiver.poll() is KVPoll.WAITING_FOR_INPUT and not pages else None
            sender.send(pages or ([2] if receiver is rooms[other][0][1] else []), last=True)
            ended(receiver, KVPoll.SUCCESS)
        works(busy, decode)
        for sender, receiver in itertools.chain(*rooms.values()):
            assert sender.wait(SOON_S) == ("SUCCESS" if receiver.poll() is KVPoll.SUCCESS else "FAILED")
            sender.clear()
            receiver.clear()


def test_c70_a_late_answer_and_lost_pings_cost_nothing() -> None:
    """The beat is a quarter of the limit: what is late by less, or lost less often, is made good by the next one."""
    with duo(liveness_s=2.0) as pair, ControlTap(pair.prefill) as tap:
        pair.pair()
        sender, receiver = pair.open()
        receiver.receive(PAGES)
        wait_until(lambda: sender.poll() is KVPoll.WAITING_FOR_INPUT)
        tap.delay(0.8)
        stays(lambda: not sender.poll().terminal and not receiver.poll().terminal, 2.5)
        passed = itertools.count()
        tap.drop(lambda letter, _outgoing: isinstance(letter.body, Ping) and bool(next(passed) % 3))
        stays(lambda: not sender.poll().terminal and not receiver.poll().terminal, 2.5)
        sender.send(PAGES, last=True)
        ended(receiver, KVPoll.SUCCESS)
        assert pair.prefill.stats().peers == pair.decode.stats().peers == 1
