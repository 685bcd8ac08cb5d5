"""A system's prefill and decode, each a process that does what it is told: kvcore's, and SGLang's by the peer bench's own child."""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np

from benchmarks.beside.geometry import Geometry
from kvcore.progress import Watch
from kvcore.sides import SIDES, Link, Sides, ToolError
from kvcore.states import Side

System = Literal["sglang", "kvcore"]
PATIENCE_S = 300.0
MODULE = "bench_sglang"


@dataclass(frozen=True, slots=True)
class Case:
    """Over which engine, in which environment, and what a room is: ``config`` is the peer bench's name of that, ``tool`` where it is."""

    backend: str
    geometry: Geometry
    environment: Mapping[str, str] = field(default_factory=dict)
    config: str = ""
    tool: Path | None = None

    @property
    def engine(self) -> str:
        """The backend's name in kvcore: ``nixl-tcp`` is ``nixl`` in another environment."""
        return self.backend.partition("-")[0]


@dataclass(frozen=True, slots=True)
class _Settings:
    system: System
    case: Case
    port: int
    ends: dict[Side, Connection]


@dataclass(frozen=True, slots=True)
class _Ready:
    pid: int


@dataclass(frozen=True, slots=True)
class _Order:
    command: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Answer:
    value: Any


def tool(directory: Path) -> Any:
    """The peer bench's module. Raises ``ToolError`` if it is not there."""
    if not (directory / f"{MODULE}.py").is_file():
        raise ToolError(f"{directory} has no {MODULE}.py; give --peer-bench the folder of the peer bench")
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
    return importlib.import_module(MODULE)


class Pair:
    """Both processes of a system, running. A context manager; leaving it ends them. Commands are methods of the two children, and a child's
    failure is a ``ToolError``."""

    def __init__(self, system: System, case: Case, watch: Watch, debug: bool = False) -> None:
        self.system = system
        ends = dict(zip(SIDES, Pipe(), strict=True))
        settings = _Settings(system, case, _free_port(), ends)
        self._sides = Sides(f"beside-{system}", work, settings, PATIENCE_S, watch, debug)
        for end in ends.values():
            end.close()

    def __enter__(self) -> Pair:
        with ExitStack() as stack:
            stack.enter_context(self._sides)
            self._pids = [ready.pid for ready in self._sides.hear_both(_Ready).values()]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._stack:
            if kind is None:
                self._sides.close()

    def both(self, command: str, **arguments: Any) -> dict[Side, Any]:
        """Have both do it, prefill told first; their answers."""
        self._sides.tell_both(_Order(command, arguments))
        return {side: answer.value for side, answer in self._sides.hear_both(_Answer).items()}

    def one(self, side: Side, command: str, **arguments: Any) -> Any:
        """Have one do it; its answer."""
        self._sides.tell(side, _Order(command, arguments))
        return self._sides.hear(side, _Answer).value

    @contextmanager
    def still(self) -> Iterator[None]:
        """Both stand still meanwhile."""
        for pid in self._pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in self._pids:
                os.kill(pid, signal.SIGCONT)


class Systems:
    """The systems of a case, running. A context manager; leaving it ends them."""

    def __init__(self, case: Case, systems: Sequence[System], watch: Watch, debug: bool = False) -> None:
        self.case, self.names = case, tuple(systems)
        self._pairs: dict[System, Pair] = {}
        self._numbers = itertools.count(10_000, 1_000_000)
        self._watch, self._debug = watch, debug

    def __enter__(self) -> Systems:
        with ExitStack() as stack:
            for system in self.names:
                self._watch("starting", f"{system} over {self.case.backend}")
                with self._others_still(system):
                    self._pairs[system] = stack.enter_context(Pair(system, self.case, self._watch, self._debug))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, trace)

    @contextmanager
    def alone(self, system: System) -> Iterator[Pair]:
        """One of them, for a turn in which SGLang stands still if it is not it: over NIXL each of its processes keeps a core busy also when
        it has nothing to do. kvcore idles, which costs next to nothing, as is measured too."""
        with self._others_still(system):
            yield self._pairs[system]

    def base(self) -> int:
        """Number of the first of up to a million rooms that were not used yet."""
        return next(self._numbers)

    def _others_still(self, system: System) -> AbstractContextManager[None]:
        other = self._pairs.get("sglang")
        return nullcontext() if other is None or system == "sglang" else other.still()


class SGLangChild:
    """The peer bench's child, with what the comparison asks for beyond its own commands."""

    def __init__(self, side: Side, case: Case, port: int, end: Connection) -> None:
        assert case.tool is not None
        bench = tool(case.tool)
        role = "P" if side == "prefill" else "D"
        self._child = bench.Child(role, bench.BACKENDS[case.backend], bench.CONFIGS[case.config], port, end, dict(case.environment))
        self._geometry = case.geometry
        aux = tuple(self._child.meta.get_buf_infos()[2])
        if aux != case.geometry.aux:
            raise ToolError(
                f"SGLang's side records have {aux} bytes and kvcore's {case.geometry.aux}; set AUX in geometry.py to the former"
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._child, name)

    def close(self) -> None:
        """End as the peer bench does: at once."""
        os._exit(0)

    def wrong_pages(self, slots: int) -> int:
        """Pages of the first slots that are not as they were sent."""
        pool = self._geometry.pool
        return self._geometry.wrong_pages([tensor.numpy().reshape(pool, -1).view(np.uint8) for tensor in self._child.kv], slots)

    def cpu(self) -> float:
        """CPU seconds of this process so far."""
        return time.process_time()


def work(side: Side, settings: _Settings, link: Link) -> None:
    """One of a pair's processes."""
    case, end = settings.case, settings.ends.pop(side)
    for other in settings.ends.values():  # so that a wait for the other side ends with it
        other.close()
    os.environ.update(case.environment)
    if settings.system == "sglang":
        child: Any = SGLangChild(side, case, settings.port, end)
    else:
        from benchmarks.beside.child import KvcoreChild

        child = KvcoreChild(side, case.engine, case.geometry, end)
    link.tell(_Ready(os.getpid()))
    while isinstance(order := link.hear(object), _Order):
        link.tell(_Answer(getattr(child, order.command)(**order.arguments)))
    child.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
