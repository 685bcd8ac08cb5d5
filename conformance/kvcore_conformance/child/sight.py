"""In a child: looks at memory the very instant that a room has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import kvcore

EVERY = 509
"""One byte of so many is looked at, so that a look is over before much more can arrive."""
GIVEN_UP_S = 20.0


class Sight:
    """A thread that polls a receiver until it has ended, and then looks for bytes of its pages that nothing has been written to."""

    def __init__(self, handle: kvcore.Handle, arrays: Sequence[np.ndarray[Any, Any]], pages: Sequence[int], blank: int) -> None:
        self._handle, self._blank = handle, blank
        self._rows = [array[page] for array in arrays for page in pages]
        self.blanks: int | None = None
        """How many there were; None before the end."""
        threading.Thread(target=self._look, name="sight", daemon=True).start()

    def _look(self) -> None:
        deadline = time.monotonic() + GIVEN_UP_S
        while not self._handle.poll().terminal and time.monotonic() < deadline:
            time.sleep(0)  # the next look is to be at once, and the threads looked at need their turn
        self.blanks = sum(int(np.count_nonzero(row[::-EVERY] == self._blank)) for row in reversed(self._rows))
