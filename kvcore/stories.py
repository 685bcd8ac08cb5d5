"""A room's story from both sides: what is known here, and what the other instances answer that took part in it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Protocol

from kvcore.errors import one_line
from kvcore.states import RoomId
from kvcore.wire import MAX_STORY, Explain, Story

ANSWERS_PER_S = 20
"""Questions of others that are answered with a story; further ones only with word of this."""


NO_ANSWER = "did not answer in time; ask at its own admin port"
BUSY = f"more than {ANSWERS_PER_S} questions came in a second; ask again"
GONE = "not connected any more; ask at its own admin port"
MAX_LINE, MOST_LINES = 2048, 2000


class Home(Protocol):
    """What stories need of the core. ``ask`` is called on the control thread, the others anywhere."""

    @property
    def closed(self) -> bool: ...
    def story(self, room: int, attempt: int) -> str: ...
    def met(self, room: RoomId) -> set[str]: ...
    def ask(self, instance: str, question: Explain) -> bool: ...
    def on_control(self, call: Callable[[], object]) -> None: ...


class Asked:
    """A room that is being asked about: what is known here, who was asked, and each answer; "" while it is waited for."""

    def __init__(self, own: str) -> None:
        self._own = own
        self.answers: dict[str, str] = {}
        self.complete: Future[None] = Future()

    def see(self) -> None:
        """Look whether all have answered."""
        if all(self.answers.values()) and not self.complete.done():
            self.complete.set_result(None)

    def text(self) -> str:
        """The story so far."""
        return self._own + "".join(f"{instance}: {text or NO_ANSWER}\n" for instance, text in list(self.answers.items()))


class Stories:
    """Asks and answers. What is kept is one entry for each that is being asked."""

    def __init__(self, home: Home, clock: Callable[[], float] = time.monotonic) -> None:
        self._home, self._clock = home, clock
        self._numbers = itertools.count(1)
        self._asked: dict[int, Asked] = {}
        self._second = self._answered = 0

    def __len__(self) -> int:
        return len(self._asked)

    # --- from any thread

    @contextmanager
    def asking(self, room: RoomId) -> Iterator[Asked]:
        """Ask the other instances about a room; ``complete`` of what is given is done when all have answered."""
        number, asked = next(self._numbers), Asked(self._home.story(room.number, room.attempt))
        self._asked[number] = asked
        self._home.on_control(lambda: self._ask(number, room))
        try:
            yield asked
        finally:
            del self._asked[number]

    def tell(self, room: RoomId, wait_s: float) -> str:
        """What is known of a room here and at the other instances, for whose answers it waits up to ``wait_s`` seconds; 0 asks nobody."""
        if wait_s <= 0 or self._home.closed:
            return self._home.story(room.number, room.attempt)
        with self.asking(room) as asked:
            wait((asked.complete,), wait_s)
        return asked.text()

    # --- on the control thread

    def _ask(self, number: int, room: RoomId) -> None:
        asked = self._asked.get(number)
        if asked is None:
            return
        for instance in sorted(self._home.met(room)):
            asked.answers[instance] = "" if self._home.ask(instance, Explain(number, room.number, room.attempt)) else GONE
        asked.see()

    def answer(self, question: Explain) -> Story:
        """What is known here of a room that a peer asks about."""
        second = int(self._clock())
        self._answered = self._answered + 1 if second == self._second else 1
        self._second = second
        if self._answered > ANSWERS_PER_S:
            return Story(question.question, BUSY)
        return Story(question.question, self._home.story(question.room, question.attempt)[-MAX_STORY:])

    def told(self, instance: str, story: Story) -> None:
        """A peer has answered."""
        asked = self._asked.get(story.question)
        if asked is not None and asked.answers.get(instance) == "":
            lines = [f"  {one_line(line, MAX_LINE)}" for line in story.text.splitlines()[:MOST_LINES] if line.strip()]
            asked.answers[instance] = "\n".join(["", *lines]) if lines else NO_ANSWER
            asked.see()
