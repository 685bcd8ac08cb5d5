"""What ``backend_options`` may say for ``backend="ascend"``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from kvcore.config import like

ERRORS = 3  # the highest of memfabric's levels; its own traces are written all the same


class AscendOptions(BaseModel, extra="forbid", frozen=True):
    """Options of the Ascend backend; the same ones suit both sides."""

    protocol: Literal["sdma", "host_rdma", "device_rdma", "device_urma", "device_uboe"] = "sdma"
    """How bytes travel, by memfabric's name for it. Equal on both sides."""
    device: int = Field(0, ge=0)
    """The NPU of this process, as ``ASCEND_RT_VISIBLE_DEVICES`` numbers them."""
    nic: Annotated[str, like(r"(tcp://.+:\d{1,5})?", "tcp://address:port of the network card, or empty")] = ""
    """host_rdma: ``tcp://address:port`` of the network card, and the first port to listen on; empty: ``host`` and a free port."""
    log_level: int = Field(ERRORS, ge=0, le=ERRORS)
    """What memfabric writes to stdout: 0 everything, 3 errors. Its traces come with each."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables such as ``MF_CONFIG_STORE_PORT_START``, set before the engine starts. One the process has already, wins."""
