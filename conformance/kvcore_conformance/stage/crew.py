"""Lends children to tests, and ends them when all is over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvcore_conformance.report.model import Story
from kvcore_conformance.stage.driver import Child

SPARE = 2
"""Children of a crew that are started ahead."""


class Crew:
    """Lends children. One that comes back alive closes its manager and is lent again, since starting an interpreter is slow; and some are
    started before anybody asks."""

    def __init__(self, env: Mapping[str, str] | None = None, backend: str = "local", options: Mapping[str, Any] | None = None) -> None:
        self._env, self.backend, self._options = env, backend, options
        self.reopens = True  # in one process; else a child is lent once
        self._all: list[Child] = []
        self._idle: list[Child] = []
        self.lent: list[Child] = []
        """Those that are lent now."""
        self.told: list[Story] = []
        """The last words of those whose borrower failed."""

    @contextmanager
    def lend(self, number: int) -> Iterator[list[Child]]:
        """Children without a manager; what happens to them is the borrower's business."""
        lent = [self._idle.pop(0) if self._idle else self._new() for _ in range(number)]
        self._idle += [self._new() for _ in range(SPARE - len(self._idle))]
        self.lent += lent
        try:
            with self.telling(lent):
                yield lent
        finally:
            self.lent = [child for child in self.lent if child not in lent]
            for child in () if self.reopens else lent:
                child.end()
            self._idle += [child for child in lent if child.stopped()]

    @contextmanager
    def telling(self, children: Sequence[Child]) -> Iterator[None]:
        """Keep the last words of children, lent or not, if their borrower fails."""
        try:
            yield
        except BaseException:
            self.told += [child.last_words() for child in children]
            raise

    def _new(self) -> Child:
        self._all.append(Child(self._env, self.backend, self._options))
        return self._all[-1]

    def end(self) -> None:
        """End all children, also those that are lent."""
        for child in self._all:
            child.end()
