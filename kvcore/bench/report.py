"""The JSON object that every measurement writes, with the same fields whatever is measured."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import kvcore
from kvcore.bench.setup import Setup
from kvcore.installed import find_backend

SCHEMA = 1


def report(command: str, setup: Setup | None, parameters: Any, results: Sequence[Any]) -> dict[str, Any]:
    """``schema, command, backend, versions, machine, parameters, results``. Parameters and results are dataclasses; numbers are rounded
    to six digits after the point. Without a ``setup`` no backend had a part in it."""
    versions = {"kvcore": kvcore.__version__}
    given = asdict(parameters)
    if setup is not None:
        installed = find_backend(setup.backend)
        versions |= {"distribution": installed.distribution, "backend": installed.version}
        given |= {"options": setup.options, "host": setup.host}
    return {
        "schema": SCHEMA,
        "command": command,
        "backend": setup.backend if setup is not None else None,
        "versions": versions,
        "machine": {"cores": len(os.sched_getaffinity(0)), "architecture": platform.machine(), "python": platform.python_version()},
        "parameters": given,
        "results": [_rounded(asdict(result)) for result in results],
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [_rounded(each) for each in value]
    return round(value, 6) if isinstance(value, float) else value
