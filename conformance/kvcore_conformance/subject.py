"""What is put to the test: a backend by name, with its options and environment."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcore.errors import ConfigError, one_line

if TYPE_CHECKING:
    from kvcore import BackendInfo, Capabilities

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Subject:
    """A backend, the options its managers get on either side, and variables of the environment that its processes need."""

    backend: str
    options: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def capabilities(self) -> Capabilities:
        """What it says that its engine can do."""
        return self._info().capabilities

    def check(self) -> None:
        """Raises an error of kvcore, with the next step in it, for a backend or options that no manager would take."""
        from kvcore.registry import validated_options

        validated_options(self._info(), self.options)

    def _info(self) -> BackendInfo:
        from kvcore.registry import load_backend, plugin_manager  # slow to import, and this module is in every run of pytest

        return plugin_manager(load_backend(self.backend))[2]


def options_from(file: Path) -> dict[str, Any]:
    """A backend's options from a TOML or JSON file; raises ``ConfigError`` naming the file."""
    try:
        text = file.read_text(encoding="utf-8")
        found = json.loads(text) if file.suffix.lower() == ".json" else tomllib.loads(text)
        json.dumps(found, default=str)  # they are to travel, which what is nested too deep cannot
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"options file {str(file)!r} cannot be read ({one_line(error)}); pass a TOML or JSON file") from error
    if not isinstance(found, dict):
        raise ConfigError(f"options file {str(file)!r} holds no table of options; pass one")
    return found
