"""What a signal handler of the program's may do to a call: raise, wherever the interpreter looks for signals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any


class Interrupt(BaseException):
    """What the handler raises."""


def interrupted(call: Callable[[], object], number: int, events: Collection[str], files: Collection[str] = ()) -> bool:
    """Make a call, and raise in it at the ``number``-th event, from 0: a ``call`` of a Python function, or a ``line``. ``files``: only
    in those whose path ends so; else in all. Whether it was raised; False once the call has fewer."""
    left = number

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if event in events and (not files or frame.f_code.co_filename.endswith(tuple(files))):
            left -= 1
            if left == -1:
                raise Interrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        pass
    finally:
        sys.settrace(before)
    return left < 0


def everywhere(call: Callable[[], object], events: Collection[str], files: Collection[str] = ()) -> Iterator[int]:
    """Make a call again and again, each time interrupted one event later, until it is not any more; gives how many there were before."""
    number = 0
    while interrupted(call, number, events, files):
        yield number
        number += 1
    assert number, "nothing was interrupted"
