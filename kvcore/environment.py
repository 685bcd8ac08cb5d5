"""Variables that an engine's library reads from its process: set for it, in place of what an earlier manager set, and of nothing else."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import msgspec

from kvcore.errors import ConfigError, cause, shown


def set_variables(backend: str, wanted: Mapping[str, str], log: logging.Logger) -> None:
    """Have exactly these variables set for a backend. One that the process has set itself wins, and is logged.

    What was set is noted in a variable of its own, so that a later manager may set it anew, also in a process that inherits it. Raises
    ``ConfigError`` if somebody else wrote there.
    """
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
