"""T4: a chunk is read when its ready event has fired, and not before."""

from __future__ import annotations

import pytest

from kvcore_conformance.marks import full, rule
from kvcore_conformance.stage.arena import Pair, Room, number


def others_move(pair: Pair, room: Room) -> None:
    """A chunk of another room, given later than the room's, moves: what was not to wait has been read."""
    other = pair.open()
    other.mine, other.theirs = {"aux": [1]}, {"aux": [2]}
    pair.expect(other)
    other.receive()
    other.send()
    other.ends("SUCCESS")
    other.clear()
    assert room.sender.poll() == "TRANSFERRING", f"a room that waits for its ready event is {room.sender.poll()}: {room.reasons()}"


def waiting(pair: Pair) -> tuple[Room, str]:
    """A room whose only chunk waits for a gate, and the gate's name."""
    room = pair.open()
    gate = f"gate {room.number}"
    room.receive()
    room.send(gate=gate)
    assert room.receiver.until("TRANSFERRING", "SUCCESS", "FAILED") == "TRANSFERRING"
    return room, gate


@rule("T4")
def test_t4_a_chunk_is_not_read_before_its_ready_event(pair: Pair) -> None:
    """The source is filled only while the chunk waits, and what arrives is that."""
    room, gate = waiting(pair)
    others_move(pair, room)
    pair.intact()
    expected = pair.target.pages("aux")[:, [2]].copy()
    pair.source.poke(number())
    pair.expect(room)
    pair.target.expect("aux", [2], expected)
    pair.prefill.open_gate(gate)
    room.ends("SUCCESS")
    pair.intact()
    room.clear()


@rule("T4")
def test_t4_only_the_chunk_with_the_event_waits(pair: Pair) -> None:
    """The last of three chunks waits, and the first two arrive."""
    room = pair.open()
    room.mine, room.theirs = {"kv": [1, 2, 3]}, {"kv": [11, 22, 33]}
    room.receive()
    room.sender.send({"kv": [1]}, gate="open gate")
    room.sender.send({"kv": [2]})
    room.sender.send({"kv": [3]}, last=True, gate=f"gate {room.number}")
    pair.prefill.open_gate("open gate")
    others_move(pair, room)
    pair.source.poke(number())
    pair.expect(room)
    for page in (11, 22):
        pair.target.accept("kv", [page])
    pair.target.accept("aux", [2])
    pair.prefill.open_gate(f"gate {room.number}")
    room.ends("SUCCESS")
    pair.intact()
    assert pair.target.changed("kv") == [11, 22, 33]
    room.clear()


@rule("T4")
@pytest.mark.parametrize("side", ["prefill", pytest.param("decode", marks=full)])
def test_t4_abort_ends_the_wait(pair: Pair, side: str) -> None:
    room, gate = waiting(pair)
    room.side(side).abort("not wanted any more")
    room.ends("FAILED")
    safe = room.sender.safe(), room.receiver.safe()
    assert safe == (True, True), f"nothing was read yet, and sender's and receiver's pages are safe: {safe}"
    pair.prefill.open_gate(gate)
    pair.transfer({"aux": [3]}, {"aux": [4]})
    room.clear()
