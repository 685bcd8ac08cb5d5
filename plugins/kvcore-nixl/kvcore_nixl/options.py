"""What ``backend_options`` may say for ``backend="nixl"``."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field


class NixlOptions(BaseModel, extra="forbid", frozen=True):
    """Options of the NIXL backend; each default suits UCX."""

    plugin: str = "UCX"
    """The NIXL plugin that moves the bytes, by the name that NIXL lists it under."""
    plugin_options: dict[str, str] = Field(default_factory=dict)
    """Parameters given to the plugin as they are, such as ``ucx_error_handling_mode``; they win over the options below."""
    devices: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """UCX: network devices to use, such as ``mlx5_0:1`` or ``eth0``; empty: UCX chooses."""
    workers: int = Field(1, ge=1, le=64)
    """UCX: number of workers, which share the connections to peers."""
    threads: int = Field(0, ge=0, le=64)
    """UCX: threads that post large transfers in parallel; 0: the caller's."""
    progress_thread: bool = False
    """Have NIXL drive itself by a thread of its own, which costs a whole core; otherwise the core's progress thread drives it."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables such as ``UCX_TLS``, set before the library is loaded. One that the process has already, wins and is logged."""
    prepared_entries: int = Field(1 << 24, ge=0)
    """Most entries (pages times regions) of all descriptor lists together; pools of later peers have none, and cost more per transfer."""
