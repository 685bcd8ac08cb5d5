"""Starts children and talks to them. Every call has a deadline, and a child is ended by its own pid, whatever state it is in."""

from __future__ import annotations

import json
import os
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvcore_conformance.report.model import Story
from kvcore_conformance.stage.waits import SOON_S

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
ANSWER_S = 20.0
"""How long a child may take for an answer, beyond the waiting that the command itself asks for."""
START_S = 30.0
"""And for its first, since an interpreter and an engine are imported before."""

LIMITS = {
    "bootstrap_s": 10.0, "input_s": 10.0, "transfer_s": 10.0, "ticket_s": 3.0, "liveness_s": 3.0, "quarantine_s": 7.0,
    "orphan_s": 0.4, "send_s": 2.0, "drain_s": 0.3,
}  # fmt: skip
"""Above what a busy machine takes for anything that a test waits for, and not much."""


@dataclass(frozen=True)
class PoolSpec:
    """A pool as the worker makes it."""

    name: str = "kv"
    pages: int = 32
    page_bytes: int = 256
    layers: int = 3
    page_size: int = 16
    dtype: str = "uint8"
    file: str = ""
    """Its memory is this file, as it is, instead of the worker's own: to be looked at while the worker stands still."""
    guard: int = 0
    """With a file: bytes before and after each layer that are not of the pool."""


class ChildError(Exception):
    """What a command raised in the child: its type's name and text."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text


@dataclass(frozen=True)
class Failure:
    """``handle.failure`` of a child."""

    text: str
    code: str
    side: str
    rank: int


class Child:
    """One worker process, and the manager in it once ``start`` was called."""

    def __init__(
        self, env: Mapping[str, str] | None = None, backend: str = "local", options: Mapping[str, Any] | None = None, namespace: str = ""
    ) -> None:
        """``namespace``: of the network, by the name that ``ip netns`` knows; else that of this process."""
        self.backend, self.options = backend, dict(options or {})
        """What ``start`` makes managers over."""
        within = ["ip", "netns", "exec", namespace] if namespace else []  # which becomes the worker, under the same process id
        self._process = subprocess.Popen(
            [*within, sys.executable, "-m", "kvcore_conformance.child.worker"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **ONE_THREAD, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._names = self._owed = 0  # owed: answers that were late, and may be taken for those of later calls
        self._buffer = b""
        self.took_s = 0.0
        """Seconds that the last call took in the child."""
        self.role = self.address = self.instance = self.admin = ""

    # --- the process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait(ANSWER_S)

    def freeze(self) -> None:
        """SIGSTOP, and wait until it has really stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """End it for good, however it is doing. Idempotent."""
        if self.running:
            self.kill()
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # what was still to be written to it
        self._process.stdout.close()

    # --- talking

    def call(self, on: str, do: str, *args: object, name: str = "", waits_s: float = 0.0, **kwargs: Any) -> Any:
        """Have the child do something with one of its objects; its result. Raises ``ChildError`` for what that raised."""
        command = {"on": on, "do": do, "args": args, "kwargs": kwargs, "as": name}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        self._owed += 1
        answer = json.loads(self._line(time.monotonic() + ANSWER_S + waits_s, f"{on}.{do}"))
        self._owed -= 1
        if "error" in answer:
            raise ChildError(answer["error"], answer["text"])
        self.took_s = answer["took_s"]
        return answer["value"]

    def _line(self, deadline: float, what: str) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            assert left > 0 and select.select([pipe], [], [], left)[0], f"child {self.pid} gave no answer to {what} in time"
            data = os.read(pipe, 65536)
            assert data, f"child {self.pid} ended during {what}"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def work(self, do: str, *args: object, waits_s: float = 0.0, **kwargs: Any) -> Any:
        """A method of the object ``worker``."""
        return self.call("worker", do, *args, waits_s=waits_s, **kwargs)

    # --- its manager

    def pretend(self, wire_version: str = "", major: int = 0, minor: int = 0, backend: str = "") -> None:
        """Have the next manager tell its peers another version of the backend's wire format or of the control protocol, or another
        backend, than it has."""
        self.work("pretend", major, minor, wire_version, backend)

    def start(self, role: str, pools: Sequence[PoolSpec] = (PoolSpec(),), waits_s: float = START_S, **config: Any) -> Child:
        """Make the manager: random memory on prefill, zeroed memory on decode. ``limits`` are put over ``LIMITS``."""
        over = {"backend": self.backend, "backend_options": self.options}
        config = {"role": role, **over, **config, "limits": {**LIMITS, **config.get("limits", {})}}
        seed = self.pid if role == "prefill" else 0
        self.role = role
        found = self.work("start", config, [vars(pool) for pool in pools], seed, waits_s=waits_s)
        self.address, self.instance, self.admin = found["address"], found["instance"], found["admin"]
        return self

    def stopped(self) -> bool:
        """Close the manager, so that another can be made; False, and the process is ended, if it cannot be used any more."""
        try:
            if self.running and not self._owed:
                self.thaw()
                self.work("stop", waits_s=LIMITS["drain_s"] + 5.0)
                return True
        except (AssertionError, OSError, ChildError):
            pass  # it is ended all the same
        self.end()
        return False

    def sender(self, room: int, attempt: int = 0) -> Handle:
        return self._handle("sender", room, attempt=attempt)

    def receiver(self, room: int, prefill: Child | str, attempt: int = 0) -> Handle:
        return self._handle("receiver", room, prefill if isinstance(prefill, str) else prefill.address, attempt=attempt)

    def _handle(self, do: str, room: int, *args: object, attempt: int) -> Handle:
        self._names += 1
        handle = Handle(self, f"handle {self._names}", room, attempt)
        self.call("manager", do, room, *args, attempt=attempt, name=handle.name)
        return handle

    def status(self, room: int, attempt: int = 0) -> str | None:
        """``manager.status``: what the shared store says."""
        found: str | None = self.call("manager", "status", room, attempt)
        return found

    def digest(self, pages: Sequence[int], pool: str = "kv") -> str:
        return str(self.work("digest", pool, list(pages)))

    def touched(self, pool: str = "kv") -> list[int]:
        found: list[int] = self.work("touched", pool)
        return found

    def open_gate(self, gate: str) -> None:
        self.call(gate, "open")

    def hold(self, room: int) -> None:
        """Hold back this process's next write of a room, see ``FaultPlan.hold``."""
        self.work("hold", room, f"hold {room}")

    def held_writes(self, room: int) -> int:
        """How many are held back now."""
        return int(self.call(f"hold {room}", "held"))

    def release(self, room: int) -> None:
        """Let them go."""
        self.call(f"hold {room}", "release")

    def fault(self, kind: str, name: str = "", **where: Any) -> None:
        """A fault of ``FaultPlan`` for this process's backend; what the method returns gets the name."""
        self.work("fault", kind, name, **where)

    def heal(self) -> None:
        """No more faults, and no more tap."""
        self.work("heal")

    def seize(self, seconds: float, times: int = 1) -> None:
        """Have its interpreter be busy with something else from about now on."""
        self.work("seize", seconds, times)

    def tap(self, do: str, message: str, outgoing: bool, **how: Any) -> None:
        """Drop, duplicate or delay control messages of a kind, such as ``Status``, see ``ControlTap``."""
        self.work("tap", do, message, outgoing, **how)

    def events(self, most: int = 50) -> list[str]:
        """The latest events of this process, one a line."""
        found: list[str] = self.work("events", most)
        return found

    def last_words(self, most: int = 50) -> Story:
        """Its latest events, or why it tells none; wakes it up for that."""
        try:
            if self.running:
                self.thaw()
            found = self.work("events", most, waits_s=SOON_S - ANSWER_S)
            assert isinstance(found, list), "it still answers something else"
        except (AssertionError, OSError, ValueError, ChildError) as error:
            found = [f"it tells nothing: {error}"]
        return Story(self.role or "unused", self.pid, found)

    def bad_messages(self, port: str) -> int:
        """How many messages to a port were not understood."""
        text: str = self.call("manager", "metrics_text")
        found = re.search(rf'^kvcore_bad_messages_total{{port="{port}"}} (\d+)$', text, re.MULTILINE)
        return int(found[1]) if found else 0

    def logged(self, text: str) -> list[str]:
        found: list[str] = self.work("logged", text)
        return found


class Handle:
    """A handle in a child."""

    def __init__(self, child: Child, name: str, room: int, attempt: int) -> None:
        self.child, self.name, self.room, self.attempt = child, name, room, attempt

    def _call(self, do: str, *args: object, waits_s: float = 0.0, **kwargs: Any) -> Any:
        return self.child.call(self.name, do, *args, waits_s=waits_s, **kwargs)

    def send(
        self,
        pages: Sequence[int] | dict[str, list[int]] = (),
        last: bool = False,
        gate: str | None = None,
        record: str = "",
        layer: int | None = None,
    ) -> None:
        named = pages if isinstance(pages, dict) else {"kv": list(pages)}
        self.child.work("send", self.name, named, last, gate, record, layer)

    def receive(self, pages: Sequence[int] | dict[str, list[int]] = (), prefix: int = 0) -> None:
        self._call("receive", pages if isinstance(pages, dict) else {"kv": list(pages)}, prefix)

    def poll(self) -> str:
        return str(self._call("poll"))

    def wait(self, timeout: float = SOON_S) -> str:
        return str(self._call("wait", timeout, waits_s=timeout))

    def until(self, *states: str, timeout: float = SOON_S) -> str:
        return str(self.child.work("until", self.name, states, timeout, waits_s=timeout))

    def abort(self, reason: str) -> None:
        self._call("abort", reason)

    def clear(self) -> None:
        self._call("clear")

    def safe(self, timeout: float = SOON_S) -> bool:
        """Whether its pages become release-safe in time."""
        return bool(self._call("wait_release_safe", timeout, waits_s=timeout))

    def safe_now(self) -> bool:
        return bool(self._call("is_release_safe"))

    @property
    def generation(self) -> int:
        return int(self._call("generation"))

    @property
    def unproven(self) -> bool:
        return bool(self._call("release_unproven"))

    @property
    def unpaired(self) -> bool:
        return bool(self._call("unpaired"))

    @property
    def record(self) -> str | None:
        found: str | None = self._call("record")
        return found

    @property
    def failure(self) -> Failure:
        found = self._call("failure")
        assert found is not None, f"{self.name} has not failed: {self.poll()}"
        return Failure(**found)


def error_of(call: Callable[[], object]) -> ChildError | None:
    """What a call raises in the child; None if it does not."""
    try:
        call()
    except ChildError as error:
        return error
    return None


def free_port() -> int:
    """A port that nobody listens on, below those the system gives out itself, so that no connection takes it before its user does."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
