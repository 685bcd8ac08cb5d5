"""What all animals share: the ``local`` backend under another name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from kvcore import BackendInfo, hookimpl
from kvcore.backends.local import LocalBackend


class Animal(LocalBackend):
    """A healthy one. ``able`` replaces declared capabilities."""

    name: ClassVar[str] = "zoo-healthy"
    able: ClassVar[dict[str, Any]] = {}

    @hookimpl
    def kvcore_backend_info(self) -> BackendInfo:
        """As local, under its own name."""
        info = super().kvcore_backend_info()
        return replace(info, name=self.name, capabilities=replace(info.capabilities, **self.able))
