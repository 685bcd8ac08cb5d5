"""The mailbox alone, both ends in one process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
from kvcore.states import RoomKey

from kvcore_shm import mailbox
from kvcore_shm.mailbox import ROW, Bytes, Door, End, Inbox, Letter, Outbox

SLOTS = 2
ROOM = RoomKey("prefill", 1, 0, 1)


@dataclass
class Pair:
    """A mailbox, and what was taken out of it."""

    door: Door
    outbox: Outbox
    inbox: Inbox
    taken: list[bytes] = field(default_factory=list)

    def post(self, data: bytes) -> Letter | None:
        rows = np.array([(0, 0, len(data))], ROW)
        return self.outbox.post(ROOM, "decode-1", rows, [np.frombuffer(data, np.uint8)])

    def take(self) -> None:
        self.inbox.take(self.put)

    def put(self, rows: npt.NDArray[np.void], payload: Bytes) -> bool:
        self.taken.append(payload[: int(rows["length"][0])].tobytes())
        return self.taken[-1] != b"wrong"


@pytest.fixture
def pair() -> Iterator[Pair]:
    door = Door("decode-1")
    outbox = Outbox.hand_in(door.token, "prefill-1", "decode-1", SLOTS)
    ((name, inbox),) = door.arrivals()
    assert name == "prefill-1"
    yield Pair(door, outbox, inbox)
    for end in (door, outbox, inbox):
        end.close()


def test_bytes_arrive_in_order_and_their_end_is_told(pair: Pair) -> None:
    letters = [pair.post(b"one"), pair.post(b"wrong")]
    pair.outbox.read()
    assert [letter and letter.end for letter in letters] == [End.OPEN] * 2
    pair.take()
    pair.outbox.read()
    assert pair.taken == [b"one", b"wrong"]
    assert [letter and letter.end for letter in letters] == [End.TAKEN, End.REFUSED]


def test_a_full_mailbox_takes_no_more_until_its_reader_has_answered(pair: Pair) -> None:
    letters = [pair.post(b"one"), pair.post(b"two")]
    assert pair.post(b"three") is None
    for letter in letters:
        assert letter is not None
        pair.outbox.forget(letter)
    assert pair.post(b"three") is None, "what nobody asks for is still in its slot"
    pair.take()
    assert pair.post(b"three") is not None


def test_a_writer_learns_that_the_reader_takes_nothing_more(pair: Pair) -> None:
    letter = pair.post(b"one")
    assert letter is not None and not pair.outbox.closed()
    pair.inbox.close()
    pair.outbox.read()
    pair.outbox.read()  # the first may be told of a reset
    assert letter.end is End.LOST and pair.outbox.closed() and pair.taken == []


def test_a_reader_takes_what_a_writer_left_before_it_was_gone(pair: Pair) -> None:
    pair.post(b"one")
    pair.outbox.close()
    assert not pair.inbox.over()
    pair.take()
    assert pair.taken == [b"one"] and pair.inbox.over()


def test_there_is_no_door_where_a_token_does_not_lead(pair: Pair) -> None:
    with pytest.raises(OSError):
        Outbox.hand_in(b"no token", "prefill-1", "decode-1", SLOTS)
    pair.door.close()
    with pytest.raises(OSError):
        Outbox.hand_in(pair.door.token, "prefill-1", "decode-1", SLOTS)


def test_a_mailbox_for_another_reader_is_dropped(pair: Pair) -> None:
    box = Outbox.hand_in(pair.door.token, "prefill-1", "decode-2", SLOTS)
    assert list(pair.door.arrivals()) == [] and box.closed()


@pytest.mark.parametrize("said", ["nothing", "no token", "no memory", "a file", "memory that may shrink"])
def test_what_is_no_mailbox_is_dropped(pair: Pair, said: str) -> None:
    shrinks = os.memfd_create("shrinks")
    os.ftruncate(shrinks, mailbox.SLOT_BYTES)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger, open(os.devnull) as file:
        stranger.connect(mailbox._address(pair.door.token))
        if said in ("no token", "no memory"):
            stranger.send(b"hello" if said == "no token" else pair.door.token)
        elif said != "nothing":
            socket.send_fds(stranger, [pair.door.token + b"me\ndecode-1"], [file.fileno() if said == "a file" else shrinks])
        assert list(pair.door.arrivals()) == []
    os.close(shrinks)
    assert list(pair.door.arrivals()) == []


def test_no_descriptor_is_left(pair: Pair) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        box = Outbox.hand_in(pair.door.token, "prefill-2", "decode-1", SLOTS)
        ((_, inbox),) = pair.door.arrivals()
        inbox.close()
        del box, inbox
    assert len(os.listdir("/proc/self/fd")) == before
