"""A child process with one manager in it: reads a command a line (JSON) on stdin, answers a line on stdout.

A command calls a method, or reads an attribute, of a named object: ``{"on": name, "do": attribute, "args": [], "kwargs": {}, "as": name}``.
The object ``worker`` is there from the start and makes the manager, which is then the object ``manager``; handles get the names that
``as`` gives them. The answer is ``{"value": ..., "took_s": seconds}`` or ``{"error": type, "text": text}``.
"""

from __future__ import annotations

import builtins
import ctypes
import hashlib
import importlib
import json
import logging
import os
import sys
import threading
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

import kvcore
import kvcore.http_io  # which a manager imports when it starts: here it is done ahead of that
from kvcore.faults import ControlTap, FaultPlan
from kvcore.hookspecs import Event
from kvcore.registry import plugin_manager
from kvcore_conformance.child.crowd import Stall, Watch, together
from kvcore_conformance.child.pretence import pretending
from kvcore_conformance.child.sight import Sight

STEP_S = 0.001
SEIZE_AFTER_S = 0.05


class Gate:
    """What a chunk waits for before it is read; opened by a command."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def query(self) -> bool:
        return self.event.is_set()

    def open(self) -> None:
        self.event.set()


class Log(logging.Handler):
    """Keeps the last lines that the library logged, and counts all."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: deque[str] = deque(maxlen=2000)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1
        self.lines.append(f"{record.levelname} {record.name}: {record.getMessage()}")
        if record.exc_info:
            self.lines.append(logging.Formatter().formatException(record.exc_info))


class Story:
    """An observer that keeps what happened, one line an event."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=500)

    @kvcore.hookimpl
    def kvcore_on_event(self, event: Event) -> None:
        """One event."""
        room = f"{event.room.side} room {event.room.number}.{event.room.attempt}" if event.room else "-"
        details = " ".join(f"{name}={value}" for name, value in event.details.items())
        self.note(f"{event.name} {room} {details}")

    def note(self, text: str) -> None:
        """One line, with the time."""
        self.lines.append(f"{time.monotonic():.4f} {text}".rstrip())


class Worker:
    """The object ``worker``: what a test needs besides the public surface of a manager and its handles."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {"worker": self}
        self._arrays: dict[str, list[np.ndarray[Any, Any]]] = {}
        self._log, self._story = Log(), Story()
        self.note = self._story.note
        self._pretence = ExitStack()
        logging.getLogger("kvcore").addHandler(self._log)
        logging.getLogger("kvcore").setLevel(logging.INFO)

    def start(self, config: dict[str, Any], pools: list[dict[str, Any]], seed: int = 0) -> dict[str, str]:
        """Make the manager. ``pools``: name, pages, page_bytes, layers, page_size, dtype, file. Memory of no file is random with a seed,
        else zero."""
        manager = kvcore.KVManager(kvcore.Config(**config), [self.pool(**pool, seed=seed) for pool in pools])
        self.objects["manager"] = manager
        manager.add_observer(self._story)
        return {"address": manager.address, "instance": manager.instance, "admin": manager.admin_address}

    def make(self, what: str, name: str, **how: Any) -> None:
        """An object of a class of this package, ``module:Class``, which is given this worker."""
        module, _, kind = what.partition(":")
        self.objects[name] = getattr(importlib.import_module(f"kvcore_conformance.child.{module}"), kind)(self, **how)

    def pool(
        self, name: str, pages: int, page_bytes: int, layers: int, page_size: int, dtype: str, file: str, guard: int, seed: int
    ) -> kvcore.Pool:
        """A pool as ``start`` makes it."""
        random = np.random.default_rng(seed)
        shape = (pages, page_bytes)
        if file:
            whole = np.asarray(np.memmap(file, np.uint8, "r+", 0, (layers, guard + pages * page_bytes + guard)))
            arrays = [layer[guard : guard + pages * page_bytes].reshape(shape) for layer in whole]
        else:
            arrays = [random.integers(1, 255, shape, np.uint8) if seed else np.zeros(shape, np.uint8) for _ in range(layers)]
        self._arrays[name] = arrays
        return kvcore.Pool.from_tensors(name, [array.view(dtype) for array in arrays], page_size=page_size)

    def engine(self, backend: str) -> str:
        """What a backend's facts say of its engine; "" if they say nothing."""
        hooks = plugin_manager(kvcore.load_backend(backend))[0].hook
        return next((fact.value for fact in hooks.kvcore_facts() or () if fact.name == "engine"), "")

    def stop(self) -> None:
        """Close the manager and drop everything of it."""
        self.heal()
        if "manager" in self.objects:
            self.objects["manager"].close()
        self.objects = {"worker": self}
        self._arrays.clear()
        self._log.lines.clear()
        self._story.lines.clear()
        self._pretence.close()

    def pretend(self, major: int = 0, minor: int = 0, wire_version: str = "", backend: str = "", **claims: Any) -> None:
        """Tell peers so, from the next ``start`` on and until ``stop``, see ``pretending``."""
        self._pretence.enter_context(pretending(major=major, minor=minor, wire_version=wire_version, backend=backend, **claims))

    def digest(self, pool: str, pages: list[int]) -> str:
        """A digest of pages, in order, of all layers."""
        found = hashlib.sha256()
        for array in self._arrays[pool]:
            found.update(array[pages].tobytes())
        return found.hexdigest()

    def touched(self, pool: str) -> list[int]:
        """Pages that are not all zero."""
        return sorted({int(page) for array in self._arrays[pool] for page in np.flatnonzero(array.any(axis=1))})

    def wipe(self) -> None:
        """Zero all memory."""
        for arrays in self._arrays.values():
            for array in arrays:
                array[:] = 0

    def reuse(self, on: str, pool: str, value: int, stranger: int) -> None:
        """From a thread: the instant that a handle's pages are release-safe, fill the pool with a value. Strangers among its bytes are
        counted before, unless the stranger is 0."""
        handle, arrays = self.objects[on], self._arrays[pool]
        self.objects[f"reuse {on}"] = found = list[int]()

        def work() -> None:
            handle.wait_release_safe()
            strangers = sum(int(np.count_nonzero(array == stranger)) for array in arrays) if stranger else 0
            for array in arrays:
                array[:] = value
            found.append(strangers)

        threading.Thread(target=work, name=f"reuse {on}", daemon=True).start()

    def reused(self, on: str) -> int | None:
        """How many strangers ``reuse`` counted; None as long as the pages are not safe."""
        return next(iter(self.objects[f"reuse {on}"]), None)

    def sight(self, on: str, pool: str, pages: list[int], blank: int, name: str) -> None:
        """The instant that a receiver has ended, count bytes of its pages that are still blank, see ``Sight``."""
        self.objects[name] = Sight(self.objects[on], self._arrays[pool], pages, blank)

    def send(self, on: str, pages: dict[str, list[int]], last: bool, gate: str | None, record: str, layer: int | None) -> None:
        """``send`` of a sender, with a gate as its ready object if one is named, and of one layer if that is."""
        ready = self.objects.setdefault(gate, Gate()) if gate else None
        layers = range(layer, layer + 1) if layer is not None else None
        self.objects[on].send(pages, last=last, ready=ready, record=record.encode(), layers=layers)

    def look(self, handles: list[str]) -> list[list[Any]]:
        """Of each handle its state, and whether its pages are release-safe."""
        return [[self.objects[name].poll().name, self.objects[name].is_release_safe()] for name in handles]

    def hold(self, room: int, name: str) -> None:
        """Hold back the next write of a room until the hold is released: it is in flight, and lands late."""
        self.fault("hold", name, room=room, times=1)

    def fault(self, kind: str, name: str, **where: Any) -> None:
        """A method of the manager's ``FaultPlan``; an ``error`` is the name of a built-in exception."""
        if "plan" not in self.objects:
            self.objects["plan"] = FaultPlan()
            self.objects["manager"].add_observer(self.objects["plan"])
        if "error" in where:
            where["error"] = getattr(builtins, where["error"])
        self.objects[name or "fault"] = getattr(self.objects["plan"], kind)(**where)

    def tap(self, do: str, message: str, outgoing: bool, **how: Any) -> None:
        """A rule of a ``ControlTap`` on the manager, for messages of a type that go out or come in."""
        if "tap" not in self.objects:
            self.objects["tap"] = ControlTap(self.objects["manager"])
        how["which"] = lambda letter, out: out is outgoing and type(letter.body).__name__ == message
        getattr(self.objects["tap"], do)(**how)

    def aid(self, what: str, name: str) -> None:
        """Make one of the kit's classes, ``module:Class``, for the manager and under a name; as "tap" it is closed by ``heal``."""
        module, _, kind = what.partition(":")
        self.objects[name] = getattr(importlib.import_module(f"kvcore_conformance.child.{module}"), kind)(self.objects["manager"])

    def drop(self, on: str) -> None:
        """Forget a handle, so that it is garbage-collected."""
        del self.objects[on]

    def heal(self) -> None:
        """No more faults, nothing stuck, and no more tap."""
        if "tap" in self.objects:
            self.objects.pop("tap").close()
        if "stall" in self.objects:
            self.objects["stall"].release()
        if "plan" in self.objects:
            self.objects["plan"].heal()

    def watch(self, on: str, name: str) -> None:
        """Have threads look at a handle's room without pause; the name is theirs, see ``Watch``."""
        self.objects[name] = Watch(self.objects["manager"], self.objects[on])

    def aborted(self, on: str, reason: str) -> list[str]:
        """Abort with a handle: what it polls the instant that the call returns, and what the shared store says."""
        handle, manager = self.objects[on], self.objects["manager"]
        handle.abort(reason)
        state, stored = handle.poll(), manager.status(handle.room, handle.attempt)
        return [state.name, stored.name if stored is not None else "gone"]

    def together(self, calls: list[tuple[str, str, list[Any]]]) -> dict[str, object]:
        """Calls of methods, each (object, method, arguments), at one moment from as many threads, see ``together``."""
        return together([partial(getattr(self.objects[on], do), *args) for on, do, args in calls])

    def stall(self, room: int) -> None:
        """Have the engine get stuck inside the next hook that is about a room, until ``release`` of the object ``stall``."""
        if "stall" not in self.objects:
            self.objects["stall"] = Stall()
            self.objects["manager"].add_observer(self.objects["stall"])
        self.objects["stall"].room(room)

    def events(self, most: int) -> list[str]:
        """The latest events and log lines of the manager."""
        return list(self._story.lines)[-most:]

    def open_many(self, do: str, first: int, number: int, *args: str) -> None:
        """Open many rooms, one side of each; every other receiver publishes a destination."""
        manager = self.objects["manager"]
        self.objects["many"] = handles = [getattr(manager, do)(room, *args) for room in range(first, first + number)]
        for receiver in handles[::2] if do == "receiver" else ():
            receiver.receive([0])

    def poll_many(self) -> list[int]:
        """The states of all of these."""
        return list(map(int, self.objects["manager"].poll_all(self.objects["many"])))

    def seize(self, seconds: float, times: int) -> None:
        """Keep the interpreter's lock for so long, after a moment, and so often; meanwhile no Python runs in this process."""

        def work() -> None:
            for _ in range(times):
                threading.Event().wait(SEIZE_AFTER_S)  # the answer to this very call goes out before
                ctypes.PyDLL(None).usleep(int(seconds * 1e6))

        threading.Thread(target=work, name="seize", daemon=True).start()

    def cpu_s(self) -> float:
        """CPU seconds of this process so far."""
        return time.process_time()

    def until(self, on: str, states: list[str], timeout: float) -> str:
        """Wait until a handle has one of the states; returns the state it has then."""
        deadline = time.monotonic() + timeout
        while self.objects[on].poll().name not in states and time.monotonic() < deadline:
            threading.Event().wait(STEP_S)
        return str(self.objects[on].poll().name)

    def held(self) -> dict[str, int]:
        """The stores of rooms that are not empty (C7)."""
        stats = self.objects["manager"].stats()
        return {name: stats.stores[name] for name in stats.room_stores if stats.stores[name]}

    def stats(self) -> dict[str, Any]:
        """All of ``stats``."""
        return asdict(self.objects["manager"].stats())

    def log_lines(self) -> int:
        """How many lines the library has logged in this process."""
        return self._log.count

    def logged(self, text: str) -> list[str]:
        """The log's lines that contain a text."""
        return [line for line in self._log.lines if text in line]


def plain(value: object) -> object:
    """A result as JSON has it; what has no form there becomes None, such as a handle that was just named."""
    if isinstance(value, kvcore.KVPoll):
        return value.name
    if isinstance(value, kvcore.KVTransferError):
        return {"text": value.reason, "code": value.code.value, "side": value.side, "rank": value.rank}
    if isinstance(value, bytes):
        return value.decode()
    if value is None or isinstance(value, bool | int | float | str | list | dict):
        return value
    return None


def serve(objects: dict[str, Any], command: dict[str, Any]) -> dict[str, object]:
    """Carry out one command."""
    began = time.monotonic()
    try:
        value = getattr(objects[command["on"]], command["do"])
        if callable(value):
            value = value(*command["args"], **command["kwargs"])
        took = time.monotonic() - began
        if command["as"]:
            objects[command["as"]] = value
        return {"value": plain(value), "took_s": took}
    except BaseException as error:  # a hook may raise an exit
        return {"error": type(error).__name__, "text": str(error)}


def main() -> None:
    """Serve until stdin ends. Answers have stdout to themselves: what an engine prints goes to stderr."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        worker = Worker()
        for line in sys.stdin:
            print(json.dumps(serve(worker.objects, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
