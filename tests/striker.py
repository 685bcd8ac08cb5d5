"""Threads that do whatever can be done to rooms, beside one another, and check what each of them sees."""

from __future__ import annotations

import itertools
import random
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from kvcore import Handle, KVPoll, PageError, RoomError, Sender
from tests.hammer import (
    ALIKE,
    BOTH,
    LONGEST_S,
    MOST_PAGES,
    NO_RECEIVER,
    NO_SENDER,
    PAGE_BYTES,
    PLAIN,
    RACED,
    REJECTED,
    Memory,
    Slot,
    Use,
    record_of,
    release,
)
from tests.helpers import Duo

SEED, THREADS, ROOMS = 4711, 8, 2000
ABREAST, HOT, STAY_S = 250, 25, 1.2
"""Rooms that are hammered at a time, those of them that get half of all calls, and how long until half of them give way to others."""
HAUNTED = "by the handle of an earlier use"


@contextmanager
def may_refuse(kind: type[Exception], text: str) -> Iterator[None]:
    """For a call that another thread may have made before."""
    try:
        yield
    except kind as error:
        if text not in str(error):
            raise


class Hammer:
    """The threads, what they do to the rooms, and what went wrong."""

    def __init__(self, pair: Duo) -> None:
        self.pair = pair
        self.memory = Memory(pair)
        self.slots = [Slot(number) for number in range(ROOMS)]
        self.retired: deque[Use] = deque()
        self.attempts = itertools.count(1)
        self.lock = threading.Lock()
        self.done: Counter[str] = Counter()
        self.errors: list[str] = []
        self.calm, self.stop = threading.Event(), threading.Event()
        self.began = time.monotonic()
        self.threads = [threading.Thread(target=self._run, args=(number,), name=f"hammer-{number}") for number in range(THREADS)]

    def _run(self, number: int) -> None:
        try:
            one = Striker(self, number)
            while not self.calm.is_set():
                one.strike()
                self.calm.wait(0.003)  # lets the threads of the core have their turn
            one.sweep()
            while not self.stop.is_set():
                one.strike()
                self.stop.wait(0.003)
        except BaseException:
            self.errors.append(traceback.format_exc())
            self.calm.set()
            self.stop.set()

    @property
    def first(self) -> int:
        """The first of the rooms that are hammered now."""
        return int((time.monotonic() - self.began) / STAY_S) * ABREAST // 2


class Striker:
    """One thread: picks a room, and does something to it."""

    def __init__(self, hammer: Hammer, number: int) -> None:
        self._hammer, self._number = hammer, number
        self._pair = hammer.pair
        self._random = random.Random(f"{SEED}.{number}")
        self._bytes = np.random.default_rng(SEED + number)
        self._seen: dict[tuple[str, int], KVPoll] = {}
        self._done: Counter[str] = Counter()
        self._acts: list[tuple[Callable[[Slot, Use], object], float]] = [
            (self._open, 60), (self._send, 40), (self._receive, 40), (self._poll, 40), (self._look, 4), (self._wait, 4),
            (self._haunt, 3), (self._abort, 1), (self._clear, 0.5), (self._reject, 10),
        ]  # fmt: skip

    def strike(self) -> None:
        which = self._random.randrange(self._random.choice([HOT, ABREAST]))
        slot = self._hammer.slots[(self._hammer.first + which) % ROOMS]
        acts, weights = zip(*self._acts, strict=True)
        for act in self._random.choices(acts, weights, k=6):
            use = slot.use
            if use is None or use.over:
                self._next_use(slot)
            else:
                act(slot, use)
        self._release()
        self._count()

    def sweep(self) -> None:
        """Touch every room, and complete what is not."""
        for slot in self._random.sample(self._hammer.slots, ROOMS):
            if slot.use is None:
                self._next_use(slot)
            for act in (self._open, self._receive, self._send, self._send, self._poll, self._look):
                if slot.use is not None and not self._hammer.errors:
                    act(slot, slot.use)
        self._count()

    def _count(self) -> None:
        with self._hammer.lock:
            self._hammer.done.update(self._done)
        self._done.clear()

    # --- opening

    def _next_use(self, slot: Slot) -> None:
        if (slot.use is not None and self._hammer.calm.is_set()) or not slot.lock.acquire(blocking=False):
            return
        with ExitStack() as leaving:
            leaving.callback(slot.lock.release)
            old = slot.use
            if old is not None and not old.over:
                return
            pages = self._hammer.memory.take(self._random.randint(0, MOST_PAGES))
            if pages is None:
                return
            attempt, first = self._which_attempt(old)
            use = self._use(slot.number, attempt, *pages)
            self._open_side(slot, use, {NO_RECEIVER: "prefill", REJECTED: "prefill", NO_SENDER: "decode"}.get(use.kind, first))
            slot.use, slot.old = use, old
            if old is not None:
                self._hammer.retired.append(old)

    def _which_attempt(self, old: Use | None) -> tuple[int, str]:
        """The next attempt, or the same one again where C4 allows it; and the side to open first."""
        side = self._random.choice(["prefill", "decode"])
        if old is None or old.kind not in BOTH or self._random.random() < 0.5:
            return next(self._hammer.attempts), side
        assert old.sender is not None and old.receiver is not None
        unpaired = [name for name, handle in (("prefill", old.sender), ("decode", old.receiver)) if handle.unpaired]
        if len(unpaired) == 2:  # allowed within orphan_s only
            return next(self._hammer.attempts), side
        self._done["same attempt"] += 1
        return old.attempt, unpaired[0] if unpaired else side

    def _use(self, room: int, attempt: int, mine: list[int], theirs: list[int]) -> Use:
        kind = self._random.choices(range(6), [40, 20, 30, 3, 3, 3])[0]
        sent = [self._bytes.integers(1, 256, (len(mine), PAGE_BYTES), np.uint8) for _ in self._pair.source]
        for layer, filled in zip(self._pair.source, sent, strict=True):
            if kind == ALIKE:
                filled[:] = filled[:1]
            layer[mine] = filled
        cut = self._random.randint(0, len(mine))
        chunks = [mine[:cut], mine[cut:]] if kind == PLAIN else [[page] for page in mine]
        return Use(room, attempt, kind, mine, theirs, sent, deque(chunks), time.monotonic())

    def _open(self, slot: Slot, use: Use) -> None:
        with use.turn:
            if use is slot.use and not use.complete:
                self._open_side(slot, use, "prefill" if use.sender is None else "decode")

    def _open_side(self, slot: Slot, use: Use, side: str) -> None:
        use.opened = time.monotonic()
        if side == "prefill":
            use.sender = self._pair.prefill.sender(use.room, use.attempt)
        else:
            use.receiver = self._pair.decode.receiver(use.room, self._pair.prefill.address, attempt=use.attempt)
        self._touch(slot, side, "open")

    # --- what is done to a use that lives, or lived when it was looked up

    def _send(self, slot: Slot, use: Use) -> None:
        sender = use.sender
        if sender is None or use.kind == REJECTED:
            return
        hand_over = {PLAIN: self._send_next, RACED: self._send_all}.get(use.kind, self._send_any)
        hand_over(use, sender)
        self._touch(slot, "prefill", "send")

    def _send_next(self, use: Use, sender: Sender) -> None:
        with use.turn:
            if use.chunks:
                chunk = use.chunks.popleft()
                last = not use.chunks
                sender.send(chunk, last=last, record=record_of(use) if last else b"")

    def _send_all(self, use: Use, sender: Sender) -> None:
        with may_refuse(PageError, "the last chunk was handed over already"):
            sender.send(use.mine, last=True, record=record_of(use))

    def _send_any(self, use: Use, sender: Sender) -> None:
        try:
            chunk = use.chunks.popleft()
        except IndexError:
            if use.handed == len(use.mine):
                with may_refuse(PageError, "the last chunk was handed over already"):
                    sender.send([], last=True, record=record_of(use))
            return
        sender.send(chunk)
        with use.turn:
            use.handed += 1

    def _receive(self, slot: Slot, use: Use) -> None:
        receiver = use.receiver
        if receiver is None or (use.received and use.kind != RACED):
            return
        with may_refuse(PageError, "receive was called already"):
            receiver.receive(use.theirs)
        use.received = True
        self._touch(slot, "decode", "receive")

    def _poll(self, slot: Slot, use: Use) -> None:
        for handle in use.handles:
            self._state(handle)
            self._touch(slot, "prefill" if handle is use.sender else "decode", "poll")
            assert handle.poll().terminal or time.monotonic() - use.opened < LONGEST_S, f"{handle} is stuck"

    def _state(self, handle: Handle) -> KVPoll:
        """S1, as this thread sees it."""
        key, state = (type(handle).__name__, handle.generation), handle.poll()
        before = self._seen.get(key, KVPoll.BOOTSTRAPPING)
        assert state is before or (not before.terminal and (state is KVPoll.FAILED or state > before)), f"{handle} was {before.name}"
        self._seen[key] = state
        return state

    def _look(self, slot: Slot, use: Use) -> None:
        pair = self._pair
        for side, handle, manager in (("prefill", use.sender, pair.prefill), ("decode", use.receiver, pair.decode)):
            manager.status(use.room, use.attempt)
            if slot.number % 16 == 0:  # writes dozens of lines
                assert str(use.room) in manager.explain(use.room, use.attempt, wait_s=0)
            self._touch(slot, side, "look")
            if handle is not None:
                state = self._state(handle)
                assert (handle.failure is not None) or state is not KVPoll.FAILED
                assert handle.metrics.pages <= len(use.mine) and (handle.is_release_safe() or side in use.kept)
        if use.sender is not None:
            assert set(use.sender.prefix_pages.values()) <= {0}

    def _wait(self, slot: Slot, use: Use) -> None:
        handle = self._random.choice(use.handles)
        handle.wait(0.002) if self._random.random() < 0.5 else handle.wait_release_safe(0.002)
        self._done["wait"] += 1

    def _abort(self, slot: Slot, use: Use) -> None:
        handle = self._random.choice(use.handles)
        handle.abort("hammered")
        assert self._state(handle).terminal
        self._touch(slot, "prefill" if handle is use.sender else "decode", "abort")

    def _clear(self, slot: Slot, use: Use) -> None:
        handle = self._random.choice(use.handles)
        handle.clear()
        assert self._state(handle).terminal
        self._touch(slot, "prefill" if handle is use.sender else "decode", "clear")

    def _reject(self, slot: Slot, use: Use) -> None:
        if use.kind == REJECTED:
            with may_refuse(RoomError, "is live on the decode side"):  # as another thread rejects it just now
                self._pair.decode.reject(use.room, "hammered", self._pair.prefill.address, attempt=use.attempt)
            self._touch(slot, "decode", "reject")

    def _haunt(self, slot: Slot, use: Use) -> None:
        """C2, C4: a handle of an earlier use touches nothing of this one, also where it has the same attempt."""
        old = slot.old
        for handle in old.handles if old is not None else ():
            before = self._state(handle)
            handle.abort(HAUNTED)
            handle.clear()
            assert self._state(handle) is before and before.terminal
            self._done["haunt"] += 1
        for handle in use.handles:
            assert handle.failure is None or handle.failure.reason != HAUNTED, f"{handle} was ended by the handle of an earlier use"

    def _touch(self, slot: Slot, side: str, what: str) -> None:
        slot.touched[side].add(self._number)
        self._done[what] += 1

    # --- afterwards

    def _release(self) -> None:
        """Take back the pages of a use that is over, on each side as soon as they are safe there."""
        for _ in range(1):
            try:
                use = self._hammer.retired.popleft()
            except IndexError:
                return
            if not release(self._hammer.memory, use):
                self._hammer.retired.append(use)
                self._done["not safe yet"] += 1
                continue
            for handle in use.handles:
                assert handle.is_release_safe() and self._state(handle).terminal
                if self._random.random() < 0.9:  # of others the handle is collected
                    handle.clear()
            self._done["released"] += 1
            self._done[f"{use.receiver.poll().name if use.receiver else 'no receiver'}"] += 1
