"""What a command is doing, on stderr while a person watches; nothing where stderr is piped. Results go to stdout and not through here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Watch = Callable[[str, str], None]
"""Told the name of a row and what is being done there now."""


def unwatched(row: str, text: str) -> None:
    """The ``Watch`` of nobody."""


@contextmanager
def progress() -> Iterator[Watch]:
    """A row for each name it is told of, with a spinner and the time it has taken; all gone when the context ends."""
    if not sys.stderr.isatty():
        yield unwatched
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        rows = {}

        def watch(row: str, text: str) -> None:
            if row not in rows:
                rows[row] = bar.add_task("", total=None)
            bar.update(rows[row], description=f"{row}: {text}")

        yield watch
