"""Processes of two sides, each at the end of a pipe: in these the demo, the doctor and the benchmarks run their managers.

The driver holds ``Sides``, a process holds a ``Link``. No wait is without bound: the driver gives up when both processes fall silent or
one dies, and a process ends with its driver, whatever it is doing.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Generic, TypeVar

from kvcore.errors import KVCoreError, one_line
from kvcore.progress import Watch
from kvcore.states import Side

STOP_S = 2.0
PR_SET_PDEATHSIG = 1
SIDES: tuple[Side, Side] = ("prefill", "decode")
Place = tuple[Side, int]
"""A side, and which of its processes."""

S = TypeVar("S")
T = TypeVar("T")


class ToolError(KVCoreError):
    """A command could not go on. ``trace`` is the traceback of the process in which it went wrong, if there is one."""

    def __init__(self, text: str, trace: str = "") -> None:
        super().__init__(text)
        self.trace = trace


@dataclass(frozen=True, slots=True)
class Progress:
    """From a process: what it is about to do, for a person who watches, and for the error if it never gets there."""

    text: str


@dataclass(frozen=True, slots=True)
class Failed:
    """From a process: why it cannot go on, in one line, and its traceback."""

    text: str
    trace: str


@dataclass(frozen=True, slots=True)
class Close:
    """To both: all is said, end."""


class Link:
    """A process's end of its pipe to the driver. No wait on it outlasts the driver. ``rank``: of the processes of its side."""

    def __init__(self, connection: Connection, rank: int = 0) -> None:
        self._connection, self.rank = connection, rank

    def tell(self, message: object) -> None:
        """Send a message."""
        self._connection.send(message)

    def progress(self, text: str) -> None:
        """Send word of what is being done."""
        self.tell(Progress(text))

    def fail(self, error: BaseException) -> None:
        """Send word that it cannot go on; must be called while the error is handled."""
        with suppress(OSError):  # the driver may be gone
            self.tell(Failed(one_line(error) or type(error).__name__, traceback.format_exc()))

    def hear(self, kind: type[T]) -> T:
        """The next message, which must be of this kind."""
        message = self._connection.recv()
        if not isinstance(message, kind):
            raise ToolError(f"expected {kind.__name__} from the driver, got {type(message).__name__}; this is a fault of kvcore, report it")
        return message


Work = Callable[[Side, S, Link], None]
"""What a process does: a function of a module, its settings can be pickled, and it ends by hearing ``Close``."""


class Sides(Generic[S]):
    """The driver's end: a process a side, called ``kvcore-<command>-<side>``, with its rank if the side has several, that runs ``work``.
    Leaving the context ends all.

    ``patience_s``: seconds without a word from any before giving up. ``watch`` is told what each side is doing. ``ranks``: processes of
    each side, of which the first, rank 0, is meant where no rank is named.
    """

    def __init__(
        self,
        command: str,
        work: Work[S],
        settings: S,
        patience_s: float,
        watch: Watch,
        debug: bool = False,
        ranks: tuple[int, int] = (1, 1),
    ) -> None:
        self._patience_s = patience_s
        self._watch = watch
        self._alone = {side: count == 1 for side, count in zip(SIDES, ranks, strict=True)}
        self._all: list[Place] = [(side, rank) for side, count in zip(SIDES, ranks, strict=True) for rank in range(count)]
        self._doing: dict[Place, str] = dict.fromkeys(self._all, "starting")
        self._processes: dict[Place, SpawnProcess] = {}
        self._pipes: dict[Place, Connection] = {}
        self._struck: list[tuple[SpawnProcess, Connection]] = []
        self._inbox: dict[Place, deque[object]] = {place: deque() for place in self._all}
        for place in self._all:
            self._start(command, work, place, settings, debug)

    def named(self, place: Place) -> str:
        """A process as people know it."""
        side, rank = place
        return side if self._alone[side] else f"{side} {rank}"

    def begin(self, row: str, text: str) -> None:
        """Say what all are about to do: to who watches, and for the error if one never gets there."""
        self._doing = dict.fromkeys(self._all, text)
        self._watch(row, text)

    @property
    def places(self) -> Sequence[Place]:
        """All processes that take part, prefill's first."""
        return tuple(self._all)

    def __enter__(self) -> Sides[S]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process, _ in self._struck:
            process.kill()
            process.join(STOP_S)
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.join(STOP_S)
            if process.is_alive():
                process.kill()
                process.join(STOP_S)

    def tell(self, side: Side, message: object, rank: int = 0) -> None:
        """Send a message to a process; raises ``ToolError`` if it has died."""
        try:
            self._pipes[side, rank].send(message)
        except OSError as error:
            raise self._died((side, rank)) from error

    def tell_both(self, message: object) -> None:
        """Send a message to all, prefill first."""
        for side, rank in self._all:
            self.tell(side, message, rank)

    def tell_side(self, side: Side, message: object) -> None:
        """Send a message to all processes of a side."""
        for rank in self._ranks(side):
            self.tell(side, message, rank)

    def hear(self, side: Side, kind: type[T], rank: int = 0) -> T:
        """The next message of a process; raises ``ToolError`` as soon as any process fails or dies, or if all fall silent."""
        while not self._inbox[side, rank]:
            self._listen()
        message = self._inbox[side, rank].popleft()
        if not isinstance(message, kind):
            who = self.named((side, rank))
            raise ToolError(f"expected {kind.__name__} from {who}, got {type(message).__name__}; this is a fault of kvcore, report it")
        return message

    def hear_both(self, kind: type[T]) -> dict[Side, T]:
        """The next message of each side's first process."""
        return {side: self.hear(side, kind) for side in SIDES}

    def hear_side(self, side: Side, kind: type[T]) -> list[T]:
        """The next message of each process of a side."""
        return [self.hear(side, kind, rank) for rank in self._ranks(side)]

    def hear_all(self, kind: type[T]) -> dict[Place, T]:
        """The next message of each process."""
        return {(side, rank): self.hear(side, kind, rank) for side, rank in self._all}

    def strike(self, side: Side, sign: signal.Signals) -> float:
        """Send a side's processes SIGKILL, as a crash is, or SIGSTOP, which makes them fall silent. They have no part in what follows, and
        what becomes of them is no error. Returns when that was, on the monotonic clock, which all processes of the machine share."""
        places = [(side, rank) for rank in self._ranks(side)]
        struck = [self._processes.pop(place) for place in places]
        self._struck += zip(struck, [self._pipes.pop(place) for place in places], strict=True)
        self._all = [place for place in self._all if place not in places]
        at = time.monotonic()
        for process in struck:
            if process.pid is not None:
                os.kill(process.pid, sign)
        return at

    def close(self) -> None:
        """Have all processes end by themselves, and wait until they have, without error."""
        self.tell_both(Close())
        deadline = time.monotonic() + self._patience_s
        for place, process in self._processes.items():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                raise ToolError(f"the {self.named(place)} process does not end after all its work was done; run again with --debug")
            while self._pipes[place].poll() and self._take(place):
                pass
            if process.exitcode:
                raise self._died(place)

    def _ranks(self, side: Side) -> list[int]:
        return [rank for each, rank in self._all if each == side]

    def _start(self, command: str, work: Work[S], place: Place, settings: S, debug: bool) -> None:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        name = f"kvcore-{command}-{self.named(place)}"
        process = context.Process(target=_main, args=(work, place, settings, theirs, debug), name=name, daemon=True)
        with _interrupts_ignored():
            process.start()
        theirs.close()  # so that the pipe ends when the process does
        self._processes[place], self._pipes[place] = process, mine

    def _listen(self) -> None:
        places = {pipe: place for place, pipe in self._pipes.items()}
        heard = wait(list(places), timeout=self._patience_s)
        if not heard:
            doing = "; ".join(f"{self.named(place)}: {self._doing[place]}" for place in self._all)
            none = "neither" if len(self._all) == 2 else "no"
            raise ToolError(
                f"{none} process has said anything for {self._patience_s:g} s ({doing}); run again with --debug or a longer --timeout"
            )
        for pipe in heard:
            place = places[pipe]  # type: ignore[index]
            if not self._take(place):
                raise self._died(place)

    def _take(self, place: Place) -> bool:
        """File one message; False if there will be no more."""
        try:
            message = self._pipes[place].recv()
        except (EOFError, OSError):
            return False
        if isinstance(message, Failed):
            raise ToolError(f"{self.named(place)}: {message.text}", message.trace)
        if isinstance(message, Progress):
            self._doing[place] = message.text
            self._watch(self.named(place), message.text)
        else:
            self._inbox[place].append(message)
        return True

    def _died(self, place: Place) -> ToolError:
        process = self._processes[place]
        process.join(STOP_S)
        killed = "by the kernel for want of memory, if nobody else sent it; " if process.exitcode == -signal.SIGKILL else ""
        return ToolError(
            f"the {self.named(place)} process has died ({_ending(process.exitcode)}, doing: {self._doing[place]}); {killed}"
            "run again with --debug to see what it last said"
        )


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"exit code {code}, {signal.Signals(-code).name}"
    return f"exit code {code}"


def _main(work: Work[S], place: Place, settings: S, connection: Connection, debug: bool) -> None:
    """Entry point of a process."""
    if sys.platform == "linux":  # by the kernel too, since an engine's call may keep the GIL from the thread below
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_end_with_driver, name="kvcore-driver-watch", daemon=True).start()
    _leave_output_to_driver(debug)
    link = Link(connection, place[1])
    try:
        work(place[0], settings, link)
    except Exception as error:
        link.fail(error)


def _end_with_driver() -> None:
    """The rooms of a process without a driver are nobody's, whatever it is waiting for."""
    driver = multiprocessing.parent_process()
    if driver is not None:
        wait([driver.sentinel])
        os._exit(1)


def _leave_output_to_driver(debug: bool) -> None:
    """What libraries write, also those in C, is shown with ``debug`` only, and never in stdout, where the driver's result goes."""
    if debug:
        os.dup2(2, 1)
        logging.basicConfig(level=logging.INFO, format="%(processName)s %(name)s %(levelname)s %(message)s")
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    os.close(nowhere)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """A process started meanwhile ignores Ctrl-C for life: the driver gets it too, and ends its processes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
