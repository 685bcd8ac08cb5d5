"""Starts the two processes, hears them, and compares what they say. Knows nothing of models; never waits without bound."""

from __future__ import annotations

import importlib.util
import multiprocessing
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import TypeVar

from kvcore.demo.messages import (
    Begin,
    Close,
    DemoError,
    Ended,
    Expected,
    Failed,
    Generated,
    Message,
    Progress,
    Ready,
    Settings,
    Side,
    Stores,
)
from kvcore.demo.report import PromptResult, Report
from kvcore.demo.worker import main

STOP_S = 2.0
SIDES: tuple[Side, Side] = ("prefill", "decode")

T = TypeVar("T")
Watch = Callable[[Side, str], None]


def run_demo(settings: Settings, watch: Watch) -> Report:
    """Run the whole demo; ``watch`` is told what each side is doing. Raises ``DemoError`` if a process fails, dies or falls silent."""
    for library in ("torch", "transformers"):
        if importlib.util.find_spec(library) is None:
            raise DemoError(f"the demo needs {library}, which is not installed; run: pip install kvcore[transformers]")
    with Workers(settings, watch) as workers:
        ready = workers.hear("prefill", Ready)
        workers.tell("decode", Begin(ready.address, ready.lengths))
        expected = [workers.hear("prefill", Expected) for _ in ready.lengths]
        generated = [workers.hear("decode", Generated) for _ in ready.lengths]
        ended = {side: workers.hear(side, Ended) for side in SIDES}
        stores = {side: workers.hear(side, Stores).sizes for side in SIDES}
        for side in SIDES:
            workers.tell(side, Close())
        workers.join()
    prompts = [PromptResult(*fields) for fields in zip(ready.texts, ready.lengths, expected, generated, strict=True)]
    return Report(settings, tuple(prompts), ended, stores)


class Workers:
    """One process a side, each at the end of a pipe. Leaving the context ends them."""

    def __init__(self, settings: Settings, watch: Watch) -> None:
        self._patience_s = settings.patience_s
        self._watch = watch
        self._processes: dict[Side, SpawnProcess] = {}
        self._pipes: dict[Side, Connection] = {}
        self._inbox: dict[Side, deque[Message]] = {side: deque() for side in SIDES}
        for side in SIDES:
            self._start(side, settings)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.join(STOP_S)
            if process.is_alive():
                process.kill()
                process.join(STOP_S)

    def tell(self, side: Side, message: Message) -> None:
        """Send a message to a side; raises ``DemoError`` if it has died."""
        try:
            self._pipes[side].send(message)
        except OSError as error:
            raise self._died(side) from error

    def hear(self, side: Side, kind: type[T]) -> T:
        """The next message of a side; raises ``DemoError`` as soon as either side fails or dies, or if both fall silent."""
        while not self._inbox[side]:
            self._listen()
        message = self._inbox[side].popleft()
        if not isinstance(message, kind):
            raise DemoError(f"expected {kind.__name__} from {side}, got {type(message).__name__}; this is a fault of the demo")
        return message

    def join(self) -> None:
        """Wait until both processes have ended by themselves, and without error."""
        deadline = time.monotonic() + self._patience_s
        for side, process in self._processes.items():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                raise DemoError(f"the {side} process does not end after all its rooms were cleared; run again with --debug")
            while self._pipes[side].poll():
                if not self._take(side):
                    break
            if process.exitcode:
                raise self._died(side)

    def _start(self, side: Side, settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        process = context.Process(target=main, args=(side, settings, theirs), name=f"kvcore-demo-{side}", daemon=True)
        with _interrupts_ignored():
            process.start()
        theirs.close()  # so that the pipe ends when the process does
        self._processes[side], self._pipes[side] = process, mine

    def _listen(self) -> None:
        sides = {pipe: side for side, pipe in self._pipes.items()}
        heard = wait(list(sides), timeout=self._patience_s)
        if not heard:
            raise DemoError(f"neither process has said anything for {self._patience_s:g} s; run again with --debug or a longer --timeout")
        for pipe in heard:
            side = sides[pipe]  # type: ignore[index]
            if not self._take(side):
                raise self._died(side)

    def _take(self, side: Side) -> bool:
        """File one message; False if there will be no more."""
        try:
            message: Message = self._pipes[side].recv()
        except (EOFError, OSError):
            return False
        if isinstance(message, Failed):
            raise DemoError(f"{side}: {message.text}", message.trace)
        if isinstance(message, Progress):
            self._watch(side, message.text)
        else:
            self._inbox[side].append(message)
        return True

    def _died(self, side: Side) -> DemoError:
        process = self._processes[side]
        process.join(STOP_S)
        return DemoError(f"the {side} process has died (exit code {process.exitcode}); run again with --debug to see what it last did")


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """A process started meanwhile ignores Ctrl-C for life: the driver gets it too, and ends its workers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
