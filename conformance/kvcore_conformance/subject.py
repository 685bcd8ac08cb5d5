"""What is put to the test: a backend by name, with its options and environment."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcore import Capabilities
from kvcore.errors import ConfigError, one_line
from kvcore.registry import load_backend, plugin_manager

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
        return plugin_manager(load_backend(self.backend))[2].capabilities


def options_from(file: Path) -> dict[str, Any]:
    """A backend's options from a TOML or JSON file; raises ``ConfigError`` naming the file."""
    try:
        text = file.read_text(encoding="utf-8")
        found = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"options file {str(file)!r} cannot be read ({one_line(error)}); pass a TOML or JSON file") from error
    if not isinstance(found, dict):
        raise ConfigError(f"options file {str(file)!r} holds no table of options; pass one")
    return found
