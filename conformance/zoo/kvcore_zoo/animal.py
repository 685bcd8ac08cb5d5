"""What all animals share: the ``local`` backend under another name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from kvcore import BackendInfo, hookimpl
from kvcore.backends.local import LocalBackend
from kvcore.states import RoomKey


class Animal(LocalBackend):
    """A healthy one. ``able`` replaces declared capabilities."""

    name: ClassVar[str] = "zoo-healthy"
    able: ClassVar[dict[str, Any]] = {}

    @hookimpl
    def kvcore_backend_info(self) -> BackendInfo:
        """As local, under its own name."""
        info = super().kvcore_backend_info()
        return replace(info, name=self.name, capabilities=replace(info.capabilities, **self.able))

    @hookimpl
    def kvcore_clear(self, room: RoomKey) -> None:
        """As local, whose own goes through ``kvcore_abort``, which an animal may have spoilt."""
        jobs = [job for job in list(self._jobs) if job.transfer.room == room]
        LocalBackend.kvcore_abort(self, room, jobs)
        self._jobs.difference_update(jobs)
