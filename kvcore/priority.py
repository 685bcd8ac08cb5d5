"""How the system runs our threads beside those of the serving engine."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


def background(run: Callable[[], object], name: str) -> threading.Thread:
    """A daemon thread that, when it is woken, waits for a processor and puts nobody aside who runs; so do threads that it starts.

    Who runs holds the interpreter most of the time, or is the engine's scheduler; a thread that takes the processor from it only to wait
    for the interpreter costs two switches for nothing. Where a processor is free nothing changes (``SCHED_BATCH``, sched(7)).
    """

    def stand_back_and_run() -> None:
        _stand_back()
        run()

    return threading.Thread(target=stand_back_and_run, name=name, daemon=True)


def _stand_back() -> None:
    """Nothing where a policy was chosen already, or the system does not let us."""
    try:
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except (AttributeError, OSError):  # not Linux, or not allowed
        pass
