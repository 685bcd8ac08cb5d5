"""The check of one backend, seen from outside its two processes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from kvcore.doctor.patient import About, Address, Closed, Known, Leave, Moved, Settings, work
from kvcore.installed import InstalledBackend
from kvcore.progress import Watch
from kvcore.sides import Sides, ToolError


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of one backend. ``problem`` says what is wrong and what to do, "" if it works; ``about`` is None if it was
    not loaded."""

    backend: InstalledBackend
    problem: str
    about: About | None
    seconds: float
    trace: str = ""

    def as_json(self) -> dict[str, Any]:
        """Plain values for ``--json``."""
        about = self.about
        facts = about.facts if about is not None else ()
        return {
            "name": self.backend.name,
            "distribution": self.backend.distribution,
            "version": self.backend.version,
            "ok": not self.problem,
            "problem": self.problem,
            "seconds": round(self.seconds, 3),
            "backend_version": about.version if about is not None else None,
            "wire_version": about.wire_version if about is not None else None,
            "api_version": about.api_version if about is not None else None,
            "capabilities": about.capabilities if about is not None else None,
            "facts": [{"name": fact.name, "value": fact.value, "advice": fact.advice} for fact in facts],
        }


def examine(backend: InstalledBackend, settings: Settings, watch: Watch) -> Finding:
    """Check one backend; never raises for what is wrong with it, and never takes longer than a few times ``settings.limit_s``."""
    began = time.monotonic()
    about: About | None = None
    problem = trace = ""
    try:
        with Sides("doctor", work, settings, settings.limit_s, watch, settings.debug) as sides:
            about = sides.hear("prefill", About)
            sides.tell("decode", Known())
            sides.tell("decode", sides.hear("prefill", Address))
            sides.hear_both(Moved)
            sides.tell_both(Leave())
            closed = sides.hear_both(Closed)
            sides.close()
        logged = [f"{side}: {line}" for side, end in closed.items() for line in end.errors]
        if logged:
            problem = f"the page was moved, but kvcore logged errors: {'; '.join(logged)}; run again with --debug"
    except ToolError as error:
        problem, trace = str(error), error.trace
    return Finding(backend, problem, about, time.monotonic() - began, trace)
