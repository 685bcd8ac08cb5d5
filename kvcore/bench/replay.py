"""What prefill and decode do in ``bench trace``. Both open a request when it arrives, and give out pages in the order of arrival; a request
without pages waits. Pages lie scattered, as after long service. Between repeats the engine alone moves the same pages."""

from __future__ import annotations

import heapq
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import kvcore
from kvcore.bench.floor import Beside
from kvcore.bench.prefix_cache import Lease
from kvcore.bench.scheduler import Scheduler, Settings
from kvcore.bench.setup import WAIT_S, manager, orders
from kvcore.bench.trace_floor import DecodeTurns, Moved, PrefillTurns
from kvcore.bench.waiting import Opener
from kvcore.buffers import Buffer, memory_kinds
from kvcore.sides import Link, ToolError
from kvcore.states import KVPoll, Side

POOL = "kv"


class Prefill(Scheduler):
    """Sends a request's pages as soon as all are written and decode has said how many of them it has already. Pages of a prefix that an
    earlier request has written are there, once for all, and are not written again."""

    side = "prefill"

    def __init__(self, opener: Opener, mine: kvcore.KVManager, buffer: Buffer, settings: Settings, attempt: int) -> None:
        super().__init__(opener, mine, buffer, settings, attempt)
        self._waiting = deque[tuple[int, kvcore.Sender]]()
        self._writing = deque[tuple[int, kvcore.Sender, Lease, Future[float]]]()
        self._live: dict[kvcore.Sender, tuple[int, Lease]] = {}
        self._sent = set[kvcore.Sender]()
        self._ended: list[tuple[kvcore.Sender, Lease]] = []

    @property
    def left(self) -> int:
        return len(self._waiting) + len(self._writing) + len(self._live) + len(self._ended)

    @property
    def due_s(self) -> float:
        return 0.0 if self._writing or self._live or self._ended else float("inf")

    def open(self, number: int) -> None:
        sender = self.room(number)
        assert isinstance(sender, kvcore.Sender)
        self._waiting.append((number, sender))

    def step(self) -> None:
        senders = list(self._live)
        for sender, state in zip(senders, self.mine.poll_all(senders), strict=True):
            if state is KVPoll.WAITING_FOR_INPUT and sender not in self._sent:
                self._send(sender)
            elif state.terminal:
                sender.raise_for_failure()
                self._ended.append((sender, self._live.pop(sender)[1]))
                self._sent.discard(sender)
                sender.clear()
        self._ended = [(sender, lease) for sender, lease in self._ended if not self._released(sender, lease)]
        while self._waiting and self._place(*self._waiting[0]):
            self._waiting.popleft()
        while self._writing and self._writing[0][3].done():
            number, sender, lease, written = self._writing.popleft()
            self.played.complete_s[number] = written.result() - self._began
            self.cache.filled(lease)
            self._live[sender] = number, lease

    def _released(self, sender: kvcore.Sender, lease: Lease) -> bool:
        safe = sender.is_release_safe()
        if safe:
            self.cache.release(lease)
        return safe

    def _place(self, number: int, sender: kvcore.Sender) -> bool:
        lease = self.lease(number)
        if lease is None:
            return False
        missing, serials = lease.pages[lease.prefix :], self.serials(number)[lease.prefix :]
        written = self.aside.do(partial(self.content.write, self.buffer, missing, serials))
        self._writing.append((number, sender, lease, written))
        return True

    def _send(self, sender: kvcore.Sender) -> None:
        number, lease = self._live[sender]
        self.played.moved[number] = lease.pages[sender.prefix_pages[POOL] :]
        sender.send(self.played.moved[number], last=True)
        self._sent.add(sender)


@dataclass(order=True, slots=True)
class Held:
    """A request that decode decodes until then; what a real one would write of its output needs no pages here."""

    until_s: float
    number: int
    receiver: kvcore.Receiver = field(compare=False)
    lease: Lease = field(compare=False)
    compared: Future[float] = field(compare=False)


class Decode(Scheduler):
    """Takes what is missing of a request, and holds its pages while it would be decoded."""

    side = "decode"

    def __init__(self, opener: Opener, mine: kvcore.KVManager, buffer: Buffer, settings: Settings, attempt: int) -> None:
        super().__init__(opener, mine, buffer, settings, attempt)
        self._waiting = deque[tuple[int, kvcore.Receiver]]()
        self._live: dict[kvcore.Receiver, tuple[int, Lease]] = {}
        self._held: list[Held] = []

    @property
    def left(self) -> int:
        return len(self._waiting) + len(self._live) + len(self._held)

    @property
    def due_s(self) -> float:
        return 0.0 if self._live else self._held[0].until_s if self._held else float("inf")

    def open(self, number: int) -> None:
        receiver = self.room(number)
        assert isinstance(receiver, kvcore.Receiver)
        self._waiting.append((number, receiver))

    def step(self) -> None:
        receivers = list(self._live)
        for receiver, state in zip(receivers, self.mine.poll_all(receivers), strict=True):
            if state.terminal:
                receiver.raise_for_failure()
                self._arrived(receiver, *self._live.pop(receiver))
        while self._held and self._held[0].until_s <= self.now() and self._over(self._held[0]):
            self.cache.release(heapq.heappop(self._held).lease)
        while self._waiting and self._place(*self._waiting[0]):
            self._waiting.popleft()
        self._look_for_the_stuck()

    def _place(self, number: int, receiver: kvcore.Receiver) -> bool:
        lease = self.lease(number)
        if lease is None:
            return False
        self.played.moved[number] = lease.pages[lease.prefix :]
        receiver.receive(self.played.moved[number], prefix_pages=lease.prefix)
        self._live[receiver] = number, lease
        return True

    def _arrived(self, receiver: kvcore.Receiver, number: int, lease: Lease) -> None:
        self.played.complete_s[number] = self.now()
        receiver.clear()
        self.cache.filled(lease)
        compared = self.aside.do(partial(self.content.check, self.buffer, lease.pages, self.serials(number), self.setup))
        tokens_s = self.requests[number].output_tokens * self.parameters.token_ms / 1e3 / self.parameters.speed
        heapq.heappush(self._held, Held(self.now() + tokens_s, number, receiver, lease, compared))

    def _over(self, held: Held) -> bool:
        if not held.compared.done():
            return False
        held.compared.result()
        return held.receiver.is_release_safe()

    def _look_for_the_stuck(self) -> None:
        """The limits of rooms are as long as a trace may be; what has its pages on decode should not take that long."""
        receiver, (number, _) = next(iter(self._live.items()), (None, (0, None)))
        if receiver is not None and self.now() - self.played.placed_s[number] > self.setup.patience_s:
            raise ToolError(
                f"request {number + 1} is still {receiver.poll().name} {self.setup.patience_s:g} s after decode had pages for it; "
                f"try: kvcore doctor {self.setup.backend}"
            )


def work(side: Side, settings: Settings, link: Link) -> None:
    """One of the two processes."""
    setup, parameters, _ = settings
    buffer = Buffer(memory_kinds(setup.backend), parameters.pages, parameters.page_bytes)
    with manager(side, replace(setup, patience_s=WAIT_S), buffer, link) as mine:  # a request may wait long for pages
        try:
            _work(side, mine, buffer, settings, link)
        except Exception as error:  # before closing ends the other side's rooms, which would be heard of as the cause
            link.fail(error)
            raise


def _work(side: Side, mine: kvcore.KVManager, buffer: Buffer, settings: Settings, link: Link) -> None:
    kind, turns = (Prefill, PrefillTurns) if side == "prefill" else (Decode, DecodeTurns)
    opener, attempt = Opener(mine, side, link), count()
    opener.meet(settings[0])
    with Beside(side, settings[0], buffer, link) as beside:
        floor = turns(beside, buffer, settings)
        for go in orders(link):
            if go.way:
                link.tell(floor.take(go.way))
                continue
            buffer.clear()  # so that nothing is there, and the kernel has given all of the memory
            scheduler = kind(opener, mine, buffer, settings, next(attempt))
            scheduler.play(link)
            link.tell(scheduler.played)
            floor.follow(scheduler.played.moved, link.hear(Moved).pages)
