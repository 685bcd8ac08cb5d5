"""A tap on one manager's control messages, for tests: sees, drops, duplicates, delays and injects letters, either way."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Protocol

import msgspec

from kvcore.channel import Channel, Route, straight_through
from kvcore.errors import MOST_SHOWN, KVCoreError, one_line
from kvcore.fault_rules import MOST_DELAY_S, number, whole
from kvcore.wire import Letter, decode

MOST_SEEN = 10_000

Which = Callable[[Letter, bool], bool]
"""Whether a letter is meant; the second argument says whether it goes out."""


class Seen(NamedTuple):
    """A letter that passed the tap, also one that was then dropped."""

    letter: Letter
    outgoing: bool


class Tapped(Protocol):
    """What a tap needs of a manager."""

    @property
    def control(self) -> Channel: ...


def every(_letter: Letter, _outgoing: bool) -> bool:
    """Means every letter."""
    return True


@dataclass(eq=False, slots=True)
class TapRule:
    """What is done to the letters that are meant: how often they go on at once, and after how long once more."""

    which: Which
    copies: int = 0
    later_s: float | None = None
    times: int | None = None
    count: int = 0
    """How many letters it was applied to."""
    over: bool = False

    def stop(self) -> None:
        """Apply it to no further letter."""
        self.over = True

    def takes(self, letter: Letter, outgoing: bool) -> bool:
        """Whether it applies to this letter; counts it."""
        if self.over or (self.times is not None and self.count >= self.times) or not self.which(letter, outgoing):
            return False
        self.count += 1
        return True


class ControlTap:
    """A context manager around one manager's control plane; leaving it removes the tap, and letters still delayed are dropped.

    Of several rules that mean a letter, the one made first applies. ``times`` limits a rule to so many letters. What cannot be
    decoded passes unseen. Raises ``KVCoreError`` if the manager is tapped already.
    """

    def __init__(self, manager: Tapped) -> None:
        self._channel = manager.control
        self._rules: list[TapRule] = []
        self._seen: deque[Seen] = deque(maxlen=MOST_SEEN)
        self._routes: dict[str, Route] = {}
        self._late: list[tuple[float, int, Route, bytes, bool]] = []
        self._numbers = itertools.count()
        self._bell = threading.Condition()
        self._over = False
        self._clock: threading.Thread | None = None
        if self._channel.tap is not straight_through:
            raise KVCoreError("this manager's control plane is tapped already; close that tap first")
        self._channel.tap = self._on_frame

    @property
    def seen(self) -> list[Seen]:
        """The latest letters that passed, oldest first; at most 10,000."""
        return list(self._seen)

    def drop(self, which: Which = every, times: int | None = None) -> TapRule:
        """Lose letters."""
        return self._add(TapRule(which, 0, None, times))

    def duplicate(self, which: Which = every, times: int | None = None, copies: int = 2) -> TapRule:
        """Pass letters on ``copies`` times."""
        return self._add(TapRule(which, copies, None, times))

    def delay(self, seconds: float, which: Which = every, times: int | None = None, copies: int = 0) -> TapRule:
        """Pass letters on after ``seconds``, overtaken by later ones; and ``copies`` times at once."""
        if self._clock is None:
            self._clock = threading.Thread(target=self._deliver, name="kvcore-tap", daemon=True)
            self._clock.start()
        return self._add(TapRule(which, copies, seconds, times))

    def inject(self, what: Letter | bytes, *, outgoing: bool = False, peer: str = "") -> None:
        """Have a letter, or any bytes, arrive here (or go out). ``peer``: the other instance, for bytes; default: the latest seen.

        Raises ``KVCoreError`` if nothing has passed between the two yet.
        """
        if isinstance(what, Letter):
            peer = peer or (what.to if outgoing else what.source)
        frame = msgspec.msgpack.encode(what) if isinstance(what, Letter) else what
        route = self._routes.get(peer) if peer else next(reversed(self._routes.values()), None)
        if route is None:
            whom = one_line(peer, MOST_SHOWN) or "anybody"
            raise KVCoreError(f"no letter from or to {whom} has passed the tap yet; let the two pair first")
        self._pass_on(route, frame, outgoing)

    def close(self) -> None:
        """Remove the tap. Idempotent."""
        if self._over:
            return
        self._channel.tap = straight_through
        with self._bell:
            self._over = True
            self._bell.notify()
        if self._clock is not None:
            self._clock.join()

    def __enter__(self) -> ControlTap:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _add(self, rule: TapRule) -> TapRule:
        whole("times", rule.times, 0)
        whole("copies", rule.copies, 0)
        if rule.later_s is not None:
            number("seconds", rule.later_s, MOST_DELAY_S)
        self._rules.append(rule)
        return rule

    def _on_frame(self, route: Route, frame: bytes, outgoing: bool) -> int:
        try:
            letter = decode(frame)
        except ValueError:
            return 1
        self._seen.append(Seen(letter, outgoing))
        peer = letter.to if outgoing else letter.source
        self._routes = {**{name: known for name, known in self._routes.items() if name != peer}, peer: route}  # read by other threads
        rule = next((rule for rule in self._rules if rule.takes(letter, outgoing)), None)
        if rule is None:
            return 1
        if rule.later_s is not None:
            with self._bell:
                heapq.heappush(self._late, (time.monotonic() + rule.later_s, next(self._numbers), route, frame, outgoing))
                self._bell.notify()
        return rule.copies

    def _pass_on(self, route: Route, frame: bytes, outgoing: bool) -> None:
        if outgoing:
            self._channel.call(lambda: self._channel.pass_on(route, frame, time.monotonic()))
        else:
            self._channel.call(lambda: self._channel.take(route, frame))

    def _deliver(self) -> None:
        with self._bell:
            while not self._over:
                left = self._late[0][0] - time.monotonic() if self._late else None
                if left is None or left > 0:
                    self._bell.wait(left)
                else:
                    _, _, route, frame, outgoing = heapq.heappop(self._late)
                    self._pass_on(route, frame, outgoing)
