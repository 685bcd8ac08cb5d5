"""What ``backend_options`` may say for ``backend="mori"``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from kvcore.config import like


class MoriOptions(BaseModel, extra="forbid", frozen=True):
    """Options of the mori backend; each default is mori's own."""

    transport: Literal["rdma", "xgmi"] = "rdma"
    """How bytes travel: ``xgmi`` moves GPU memory between GPUs of one host, and nothing else. Equal on both sides."""
    devices: tuple[Annotated[str, like(r"[^\s,^]+", "the name of an RDMA device, such as mlx5_0")], ...] = ()
    """RDMA devices to use, such as ``mlx5_0``; empty: mori chooses by topology."""
    queue_pairs: int = Field(1, ge=1, le=64)
    """RDMA: queue pairs that a transfer is spread over."""
    workers: int = Field(1, ge=1, le=64)
    """RDMA: threads that post large transfers in parallel, at most one for each queue pair; 1: the caller posts."""
    poll_mode: Literal["polling"] = "polling"
    """RDMA: how mori's thread looks for completions. Its other mode, events, closes what is not its own, see README."""
    post_batch_size: int | None = Field(None, ge=1, le=8192)
    """RDMA: work requests posted at once; None: as many as a queue pair's share of a transfer is."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables such as ``MORI_IB_GID_INDEX``, set before the engine starts. One that the process has already, wins and is logged."""
