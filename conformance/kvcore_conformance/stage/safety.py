"""When the pages of a room are safe, as tests ask it."""

from __future__ import annotations

from kvcore import Capabilities
from kvcore_conformance.stage.arena import SIDES, Room
from kvcore_conformance.stage.waits import SOON_S


def fenced(able: Capabilities, gone: bool) -> bool:
    """Whether pages that a lost writer could write come free by evidence (R4), which its death (``gone``) may be."""
    return able.fences_on_disconnect or (gone and able.needs_process_to_write)


def safe_sides(room: Room) -> tuple[bool, bool]:
    """Whether the sender's and the receiver's pages are safe now."""
    return room.sender.safe_now(), room.receiver.safe_now()


def become_safe(room: Room, *sides: str) -> None:
    """Pages become safe soon, and by proof."""
    for side in sides or SIDES:
        assert room.side(side).safe(), f"the {side} side's pages are not safe {SOON_S:g} s after the last ticket has ended"
        assert not room.side(side).unproven, f"the {side} side's pages were released without proof"
