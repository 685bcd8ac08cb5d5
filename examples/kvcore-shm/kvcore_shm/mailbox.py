"""A mailbox: memory that a writer shares with a reader, and a socket on which they say what is in it.

The memory is slots of ``SLOT_BYTES``. The writer copies bytes into a free slot and sends a note: the slot's number, and rows that say
where in the reader's regions the bytes go, one after the other. The reader puts them there and answers; then the slot is free again. Both
the memory and the sockets go with the processes that hold them: there are no files, and when the reader has closed its end, or died, the
writer reads the end of the connection and knows that nothing more will be put anywhere.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import hashlib
import hmac
import mmap
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from kvcore.states import RoomKey

SLOT_BYTES, MOST_ROWS = 256 << 10, 256
ROW = np.dtype([("region", "<i4"), ("offset", "<u8"), ("length", "<u8")])
NOTE_BYTES, ANSWER_BYTES, HELLO_BYTES = 4 + MOST_ROWS * ROW.itemsize, 5, 1024
TOKEN_BYTES, CONNECT_S, TURN_NOTES, MOST_WAITING = 16, 5.0, 8, 1024

Bytes = npt.NDArray[np.uint8]
Put = Callable[[npt.NDArray[np.void], Bytes], bool]
"""Puts a slot's bytes where its rows say; whether all of them lead into memory, else it puts none."""


class End(enum.Enum):
    """What became of a letter."""

    OPEN = "not taken yet"
    TAKEN = "every byte is in place"
    REFUSED = "its rows lead out of the reader's memory; nothing was written"
    LOST = "the reader has closed the mailbox, and takes nothing more"


@dataclass(slots=True, eq=False)
class Letter:
    """What lies in a slot."""

    room: RoomKey
    peer: str
    box: Outbox
    slot: int
    end: End = End.OPEN


class Outbox:
    """The writer's end."""

    def __init__(self, token: bytes, sock: socket.socket, slots: Bytes) -> None:
        self.token, self._sock, self._slots = token, sock, slots
        self._letters: dict[int, Letter | None] = {}  # by slot, until answered; None: nobody asks any more

    @classmethod
    def hand_in(cls, token: bytes, me: str, reader: str, slots: int) -> Outbox:
        """Make a mailbox and hand it in at the door that ``token`` leads to; ``OSError`` if there is none."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fd = os.memfd_create("kvcore-mailbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            sock.settimeout(CONNECT_S)
            sock.connect(_address(token))
            os.ftruncate(fd, slots * SLOT_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            memory = _slots(fd, mmap.PROT_READ | mmap.PROT_WRITE)
            socket.send_fds(sock, [token + f"{me}\n{reader}".encode()], [fd])
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        finally:
            os.close(fd)
        return cls(token, sock, memory)

    def post(self, room: RoomKey, peer: str, rows: npt.NDArray[np.void], pieces: Sequence[Bytes]) -> Letter | None:
        """Put copies of the pieces into a slot; None if all are taken."""
        self.read()  # also what nobody asks for any more makes place
        slot = next((one for one in range(len(self._slots)) if one not in self._letters), None)
        if slot is None:
            return None
        end = 0
        for piece in pieces:
            self._slots[slot, end : end + piece.size] = piece
            end += piece.size
        try:
            self._sock.send(slot.to_bytes(4, "little") + rows.tobytes())
        except BlockingIOError:  # the socket is full of notes: nothing was sent
            return None
        self._letters[slot] = letter = Letter(room, peer, self, slot)
        return letter

    def read(self) -> None:
        """Tell the letters what the reader has answered."""
        while (answer := _receive(self._sock, ANSWER_BYTES)) is not None:
            ended = [int.from_bytes(answer[:4], "little")] if answer else list(self._letters)
            for slot in ended:
                if letter := self._letters.pop(slot, None):
                    letter.end = (End.TAKEN if answer[4] else End.REFUSED) if answer else End.LOST
            if not answer:
                return

    def forget(self, letter: Letter) -> None:
        """Nobody asks for this letter any more. Its slot stays taken until it is answered."""
        if self._letters.get(letter.slot) is letter:
            self._letters[letter.slot] = None

    def closed(self) -> bool:
        """Whether the reader has closed it."""
        return _over(self._sock)

    def close(self) -> None:
        """Let go of the memory. What the reader has not taken, it may still take."""
        self._sock.close()
        self._letters, self._slots = {}, self._slots[:0].copy()

    __del__ = close  # with the last letter that is asked for, if it was not closed before


class Inbox:
    """The reader's end."""

    def __init__(self, sock: socket.socket, slots: Bytes) -> None:
        self._sock, self._slots = sock, slots

    def take(self, put: Put) -> None:
        """Put into memory what lies in the slots, a few at a time, so that this is short (B6)."""
        for _ in range(TURN_NOTES):
            if not (note := _receive(self._sock, NOTE_BYTES)):
                return
            slot, table = int.from_bytes(note[:4], "little"), note[4:]
            good = slot < len(self._slots) and len(table) % ROW.itemsize == 0 and put(np.frombuffer(table, ROW), self._slots[slot])
            with contextlib.suppress(OSError):  # the writer is gone
                self._sock.send(note[:4] + bytes([good]))

    def over(self) -> bool:
        """Whether the writer has closed it, and everything was taken."""
        return _over(self._sock)

    def close(self) -> None:
        """Take nothing more."""
        self._sock.close()


class Door:
    """Where writers hand in new mailboxes. The token is what they must know; the address follows from it."""

    def __init__(self, reader: str) -> None:
        self._reader = reader
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._callers: list[socket.socket] = []  # who has connected and said nothing yet
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        self._sock.bind(_address(self.token))
        self._sock.listen(MOST_WAITING)

    def arrivals(self) -> Iterator[tuple[str, Inbox]]:
        """New mailboxes, each with its writer's name. What is none is dropped."""
        with contextlib.suppress(OSError):  # nobody else waits
            while len(self._callers) < MOST_WAITING:
                self._callers.append(self._sock.accept()[0])
                self._callers[-1].setblocking(False)
        for caller in list(self._callers):
            try:
                hello, fds, _, _ = socket.recv_fds(caller, HELLO_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                continue
            except OSError:
                hello, fds = b"", []
            self._callers.remove(caller)
            slots = self._shown(hello, fds)
            writer, _, reader = hello[TOKEN_BYTES:].decode(errors="replace").partition("\n")
            if slots is None or reader != self._reader:  # one for somebody else must not replace the one of that writer that is for us
                caller.close()
            else:
                yield writer, Inbox(caller, slots)

    def close(self) -> None:
        """Nobody is let in any more."""
        for sock in (self._sock, *self._callers):
            sock.close()

    def _shown(self, hello: bytes, fds: list[int]) -> Bytes | None:
        """The memory that came with a hello, if that shows the token. Memory that could shrink would end a process that reads it."""
        try:
            if hmac.compare_digest(hello[:TOKEN_BYTES], self.token) and fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                return _slots(fds[0], mmap.PROT_READ)
        except (OSError, ValueError, IndexError):  # no memory
            pass
        finally:
            for fd in fds:
                os.close(fd)
        return None


def _address(token: bytes) -> bytes:
    """In the abstract namespace: not a file."""
    return b"\0kvcore-mailbox-" + hashlib.sha256(token).hexdigest()[:32].encode()


def _slots(fd: int, protection: int) -> Bytes:
    """The memory behind a descriptor, of shape ``(slots, SLOT_BYTES)``; it has a descriptor of its own as long as it is referred to."""
    return np.frombuffer(mmap.mmap(fd, 0, prot=protection), np.uint8).reshape(-1, SLOT_BYTES)


def _receive(sock: socket.socket, most: int) -> bytes | None:
    """A message; b"" once the other side has closed, None if there is none now."""
    try:
        return sock.recv(most)
    except OSError:  # none yet, or news of a reset, after which the messages that came before it can be read
        return None


def _over(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except OSError:
        return False
