"""What is said late: not of a room that ended meanwhile, and otherwise a moment after it was first looked at."""

from __future__ import annotations

import math
import threading

import pytest

from kvcore.control_tap import ControlTap
from kvcore.late_words import LATE_S, LateWords
from kvcore.metrics import Meter
from kvcore.protocol import events as ev
from kvcore.protocol.messages import Status
from kvcore.protocol.sender_state import Life
from kvcore.room import Room
from kvcore.states import KVPoll, RoomId, RoomKey, Side
from tests.fake_backends import MemoryBackend, install, running
from tests.helpers import SOON_S, duo, ended, wait_until


class Stage:
    """Rooms by number, and what was said of them."""

    def __init__(self) -> None:
        self.rooms: dict[int, Room] = {}
        self.said: list[int] = []
        self.settled = 0
        self.late = LateWords(self.find, lambda word: self.said.append(word.message.room), self.settle)

    def find(self, side: Side, room: RoomId) -> Room | None:
        assert side == "prefill"
        return self.rooms.get(room.number)

    def settle(self) -> None:
        self.settled += 1

    def add(self, number: int, state: KVPoll = KVPoll.TRANSFERRING) -> None:
        self.rooms[number] = Room(RoomId(number), RoomKey("prefill", number, 0, 1), Life(1, state), Meter(0.0))
        self.late.add(ev.Send("decode-1", Status(number, 0, 1, 1, KVPoll.TRANSFERRING)))


def test_it_is_said_a_moment_after_it_was_first_looked_at() -> None:
    stage = Stage()
    stage.add(1)
    assert stage.late.tell(5.0) == 5.0 + LATE_S and not stage.said and len(stage.late) == 1
    stage.add(2)
    assert stage.late.tell(5.0 + LATE_S) == pytest.approx(5.0 + 2 * LATE_S)
    assert stage.said == [1] and len(stage.late) == 1 and stage.settled == 2
    assert stage.late.tell(9.0) == math.inf
    assert stage.said == [1, 2] and not len(stage.late)


def test_of_a_room_that_has_ended_or_is_gone_nothing_is_said() -> None:
    stage = Stage()
    for number, state in ((1, KVPoll.SUCCESS), (2, KVPoll.FAILED), (3, KVPoll.TRANSFERRING), (4, KVPoll.TRANSFERRING)):
        stage.add(number, state)
    del stage.rooms[3]
    stage.rooms[4] = Room(RoomId(4), RoomKey("prefill", 4, 0, 2), Life(2, KVPoll.BOOTSTRAPPING), Meter(0.0))  # cleared, and opened again
    assert stage.late.tell(5.0) == stage.late.tell(9.0) == math.inf
    assert not stage.said and not len(stage.late)


def test_of_two_threads_that_say_them_each_says_others() -> None:
    stage = Stage()
    for number in range(2000):
        stage.add(number)
    stage.late.tell(0.0)
    threads = [threading.Thread(target=stage.late.tell, args=(9.0,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    stage.late.tell(9.0)
    assert sorted(stage.said) == list(range(2000))


def test_decode_hears_of_a_transfer_that_goes_on_but_not_of_one_that_ends_as_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, MemoryBackend)
    with running(fake) as (pair,), ControlTap(pair.decode) as tap:

        def told() -> int:
            verdicts = [letter.body.state for letter, _ in tap.seen if isinstance(letter.body, Status)]
            return verdicts.count(KVPoll.TRANSFERRING)

        for _ in range(3):
            pair.transfer([1], [2])
        assert told() == 0
        fake.made[0].held.set()
        sender, receiver = pair.open()
        receiver.receive([3])
        sender.send([4], last=True)
        wait_until(lambda: receiver.poll() is KVPoll.TRANSFERRING)
        fake.made[0].held.clear()
        ended(receiver, KVPoll.SUCCESS)
        assert told() == 1


def test_also_of_a_room_without_tickets_it_is_said_before_the_control_thread_has_to(monkeypatch: pytest.MonkeyPatch) -> None:
    with duo() as pair:
        pair.pair()
        monkeypatch.setattr(pair.prefill._core._late, "tell", lambda _now: math.inf)  # as the control thread finds it
        sender, receiver = pair.open()
        receiver.receive([])
        sender.send([])
        wait_until(lambda: receiver.poll() is KVPoll.TRANSFERRING)
        sender.send([], last=True)
        ended(receiver, KVPoll.SUCCESS)


def test_where_the_progress_thread_says_nothing_the_control_thread_does_so_a_moment_after_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the turn after that, which is a second later."""
    fake = install(monkeypatch, MemoryBackend)
    with running(fake) as (pair,):
        core, found = pair.prefill._core, list[float | None]()
        monkeypatch.setattr(
            core._late, "_find", lambda *_: Room(RoomId(1), RoomKey("prefill", 1, 0, 1), Life(1, KVPoll.TRANSFERRING), Meter(0.0))
        )
        core._ledger.stop(SOON_S)
        core._late.add(ev.Send("nobody", Status(1, 0, 1, 1, KVPoll.TRANSFERRING)))
        core.on_control(lambda: found.append(core._tick(5.0)))
        wait_until(lambda: found)
        assert found == [5.0 + LATE_S]
