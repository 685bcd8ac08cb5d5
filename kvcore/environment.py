"""Variables that an engine's library reads from its process: set for it, in place of what an earlier manager set, and of nothing else."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import msgspec

from kvcore.errors import BackendOptionsError, ConfigError, cause, shown
from kvcore.hookspecs import Fact


def set_variables(backend: str, wanted: Mapping[str, str], log: logging.Logger) -> None:
    """Have exactly these variables set for a backend. One that the process has set itself wins, and is logged.

    What was set is noted in a variable of its own, so that a later manager may set it anew, also in a process that inherits it. Raises
    ``ConfigError`` if somebody else wrote there, and ``BackendOptionsError`` for what no process can have set; then nothing is changed.
    """
    for name, value in wanted.items():
        if flaw := _flaw(name, value):
            raise BackendOptionsError(f"options of backend {backend!r} refused: environment: {flaw}; correct it")
    note = f"{backend.upper()}_SET_BY_KVCORE"  # and no KVCORE_…, which are settings
    noted = os.environ.get(note, "{}")
    try:
        ours = msgspec.json.decode(noted, type=dict[str, str])
    except ValueError as error:
        raise ConfigError(f"{note}={shown(noted)} is not what kvcore notes there ({cause(error)}); unset it") from error
    for name in set(ours) - set(wanted):
        if ours.pop(name) == os.environ.get(name):
            del os.environ[name]
    for name, value in wanted.items():
        present = os.environ.get(name)
        if present is None or present == ours.get(name) != value:
            os.environ[name] = ours[name] = value
        elif present != value:
            log.info("%s=%s of the process wins over %s", name, present, value)
    os.environ[note] = msgspec.json.encode(ours).decode()


def variables(*prefixes: str) -> list[Fact]:
    """The variables of this process whose names begin so, as a fact for the doctor; none if there are none."""
    found = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(prefixes)]
    return [Fact("environment", ", ".join(found))] if found else []


def _flaw(name: str, value: str) -> str:
    if not name or "=" in name or not _can_be_set(name):
        return f"{shown(name)} is no variable's name"
    return "" if _can_be_set(value) else f"{name} cannot be {shown(value)}"


def _can_be_set(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False
