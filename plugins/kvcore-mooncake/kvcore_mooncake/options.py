"""What ``backend_options`` may say for ``backend="mooncake"``."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from kvcore.config import like

P2P = "P2PHANDSHAKE"  # Mooncake's name for having no metadata server: engines ask each other


class MooncakeOptions(BaseModel, extra="forbid", frozen=True):
    protocol: str = "tcp"
    """How bytes travel: ``tcp``, ``rdma``, or another that the installed build of Mooncake has. Equal on both sides."""
    metadata_server: Annotated[str, like(f"{P2P}|(etcd|https?)://.+", "etcd://host:2379, http://host:8080/metadata or https")] = P2P
    """Where engines find each other, such as ``etcd://host:2379``; by default they need none. Another scheme ends the process."""
    devices: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Network devices to use, such as ``mlx5_0``; empty: Mooncake chooses by topology. Without use for ``tcp``."""
    timeout_s: int = Field(600, ge=1, le=86400)
    """TCP: seconds without progress until the engine gives a write up, which is no proof of its end: it is best when that never comes."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables such as ``MC_GID_INDEX``, set before the engine starts. One that the process has already, wins and is logged."""
