"""Two engines of the subject without managers, each in its process, and the memory of both under the oracle's eyes."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvcore import Capabilities
from kvcore_conformance.stage.arena import POOLS, number, shared
from kvcore_conformance.stage.crew import Crew
from kvcore_conformance.stage.driver import Child, ChildError, PoolSpec
from kvcore_conformance.stage.oracle import Memory, moved
from kvcore_conformance.stage.waits import SOON_S, until

Lists = Mapping[str, tuple[Sequence[int], Sequence[int]]]
"""Pages of a transfer: mine and theirs of each pool."""
State = tuple[str, bool, str]
"""Of a transfer that was posted: its kind, whether it is called quiescent, and why."""

PROMPT_S = 0.001
"""What a hook on the progress thread may take (B6)."""
TINY = "tiny"
"""A pool of more pages than a transfer may have descriptors."""
MOST_DESCRIPTORS = 4096
"""So many are tried over backends that set no limit, or one that is above it."""
MOST_BYTES = 64 << 20
"""So many bytes are tried over backends whose limit is above it."""
MOST_TRANSFERS = 1000
"""So many a room of a whole pool may be, to end long before its limits."""
TINY_BYTES = 8
"""Of a page of ``TINY``."""

_names = itertools.count(1)


class Engine:
    """An engine in a child, see ``kvcore_conformance.child.engine``."""

    def __init__(self, child: Child, side: str, memory: Memory, instance: str = "") -> None:
        self.child, self.side, self.memory = child, side, memory
        child.role = side
        self.instance = instance or f"{side}-{child.pid}-{next(_names)}"
        self._name = f"engine {next(_names)}"
        pools = [vars(spec) for spec in memory.specs]
        child.work(
            "make",
            "engine:Engine",
            self._name,
            backend=child.backend,
            options=child.options,
            side=side,
            instance=self.instance,
            pools=pools,
        )

    def do(self, what: str, *args: Any, waits_s: float = 0.0, **kwargs: Any) -> Any:
        """Call a method of it."""
        return self.child.call(self._name, what, *args, waits_s=waits_s, **kwargs)

    def start(self) -> None:
        """Open it and register its memory."""
        self.do("open")
        self.do("register")

    def peer(self) -> dict[str, Any]:
        """How others reach it now."""
        found: dict[str, Any] = self.do("peer")
        return found

    def post(self, name: str, room: int, to: str, pages: Lists, **how: Any) -> int:
        """Post a batch; the number of its transfers."""
        plain = {pool: [list(mine), list(theirs)] for pool, (mine, theirs) in pages.items()}
        return int(self.do("post", name, room, to, plain, **how))

    def ends(self, name: str, timeout: float = SOON_S) -> list[State]:
        """Wait until each transfer of a batch has ended, and tell how."""
        ended = self.do("wait", name, timeout, waits_s=timeout)
        states = self.states(name)
        assert ended, f"batch {name!r} has not ended after {timeout:g} s: {brief(states)}"
        return states

    def states(self, name: str) -> list[State]:
        """The state of each transfer of a batch."""
        return [(kind, quiescent, reason) for kind, quiescent, reason in self.do("states", name)]

    def held(self) -> list[int]:
        """Rooms that the backend holds something for."""
        found: list[int] = self.do("held")
        return found


@dataclass
class Bare:
    """A prefill engine that is connected to a decode engine."""

    prefill: Engine
    decode: Engine

    @property
    def to(self) -> str:
        return self.decode.instance

    def fresh(self) -> None:
        """New random pages at the source, and nothing at the target."""
        self.prefill.memory.poke(number())
        self.decode.memory.wipe()

    def join(self) -> None:
        """Connect both, prefill first as the core does, and move a page."""
        mine, its = self.prefill.peer(), self.decode.peer()
        self.prefill.do("connect", its)
        self.decode.do("connect", mine)
        self.moves({"kv": ([0], [1])})
        self.fresh()

    def expect(self, pages: Lists) -> None:
        """The oracle expects what a transfer moves."""
        moved(
            self.prefill.memory, self.decode.memory,
            {pool: mine for pool, (mine, _) in pages.items()}, {pool: theirs for pool, (_, theirs) in pages.items()},
        )  # fmt: skip

    def intact(self) -> None:
        """Every byte of both sides is what it must be; in the end, since that it is so at once is a rule of its own (R6)."""
        self.decode.memory.gets_right()
        self.prefill.memory.intact()
        self.decode.memory.intact()

    def moves(self, pages: Lists, **how: Any) -> int:
        """A batch from beginning to end, all of it right; the number of its transfers."""
        room = number()
        self.expect(pages)
        parts = self.prefill.post(f"plain {room}", room, self.to, pages, **how)
        states = self.prefill.ends(f"plain {room}")
        assert {kind for kind, _, _ in states} == {"done"}, f"a plain transfer ended as {brief(states)}"
        self.intact()
        self.prefill.do("clear", room)
        return parts

    def written(self) -> list[int]:
        """Use the target's pages anew, and tell which are written to although no batch of ``kv`` is asked for."""
        self.decode.memory.wipe()
        for _ in range(3):
            self.prefill.post("aside", room := number(), self.to, {"aux": ([1], [2])})
            self.prefill.ends("aside")
            self.prefill.do("clear", room)
        return self.decode.memory.changed("kv")

    def rests(self) -> None:
        """Wait until nothing is written any more."""
        until(lambda: not self.written(), "nothing is written any more")
        self.fresh()

    @property
    def well(self) -> bool:
        """Whether both processes still serve."""
        return self.prefill.child.running and self.decode.child.running


@contextmanager
def bare_pair(crew: Crew, pools: Sequence[PoolSpec]) -> Iterator[Bare]:
    """Two engines, started and connected; closed with the context."""
    with engines(crew, "prefill", "decode", pools=pools) as (prefill, decode):
        pair = Bare(prefill, decode)
        pair.fresh()
        prefill.start()
        decode.start()
        pair.join()
        yield pair


def descriptors(able: Capabilities) -> int:
    """How many descriptors of a tiny page a transfer must be able to have."""
    most = min(able.max_descriptors or MOST_DESCRIPTORS, MOST_DESCRIPTORS)
    return min(most, max(1, able.max_bytes // TINY_BYTES)) if able.max_bytes else most


def in_one(able: Capabilities, most_descriptors: int, nbytes: int) -> bool:
    """Whether a chunk of so much is one transfer."""
    return most_descriptors <= (able.max_descriptors or most_descriptors) and nbytes <= (able.max_bytes or nbytes)


def bearable(pools: Sequence[PoolSpec], able: Capabilities) -> list[PoolSpec]:
    """Pools with smaller pages where all of one would be very many transfers."""
    if able.max_bytes is None:
        return list(pools)
    most = MOST_TRANSFERS * able.max_bytes
    return [replace(pool, page_bytes=min(pool.page_bytes, max(1, most // pool.pages))) for pool in pools]


class Kept:
    """Two engines that are kept from test to test, as long as they are well."""

    def __init__(self, crew: Crew, able: Capabilities) -> None:
        self._crew, self._stack = crew, ExitStack()
        self._pools = (*POOLS, PoolSpec(TINY, 2 * descriptors(able), page_bytes=TINY_BYTES, layers=1))
        self._pair: Bare | None = None

    def take(self) -> Bare:
        """The engines with new memory; others if the last test has spoilt them."""
        if self._pair is not None and not self._pair.well:
            self.drop()
        if self._pair is None:
            self._pair = self._stack.enter_context(bare_pair(self._crew, self._pools))
        self._pair.fresh()
        return self._pair

    def drop(self) -> None:
        """End them."""
        self._pair = None
        self._stack.close()


@contextmanager
def engines(crew: Crew, *sides: str, pools: Sequence[PoolSpec] = POOLS, instances: Sequence[str] = ()) -> Iterator[list[Engine]]:
    """Engines that are not open yet, each with memory of its own; closed with the context."""
    with tempfile.TemporaryDirectory(prefix="kvcore-", dir=shared()) as folder, crew.lend(len(sides)) as children, ExitStack() as stack:
        found = []
        for n, (side, child) in enumerate(zip(sides, children, strict=True)):
            place = Path(folder, str(n))
            place.mkdir()
            memory = Memory(place, pools)
            found.append(Engine(child, side, memory, instances[n] if instances else ""))
            stack.callback(_end, found[-1])
        yield found


@contextmanager
def beside(engine: Engine) -> Iterator[Engine]:
    """Another engine of a side in its process, not open yet; closed with the context."""
    with tempfile.TemporaryDirectory(prefix="kvcore-", dir=shared()) as folder:
        other = Engine(engine.child, engine.side, Memory(Path(folder), POOLS))
        try:
            yield other
        finally:
            _end(other)


def _end(engine: Engine) -> None:
    """End an engine; the process too if it cannot be ended, since another would meet what is left of it."""
    if not engine.child.running:
        return
    try:
        engine.do("end", waits_s=SOON_S)
    except (AssertionError, ChildError, OSError):
        engine.child.end()


def brief(states: Sequence[State]) -> dict[str, int]:
    """States of many transfers, counted."""
    shown = [kind if kind != "failed" else f"failed{', quiescent' if quiescent else ''} ({reason})" for kind, quiescent, reason in states]
    return {one: shown.count(one) for one in sorted(set(shown))}
