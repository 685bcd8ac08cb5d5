"""What a user may set in ``backend_options``."""

from __future__ import annotations

from pydantic import BaseModel, Field


class ShmOptions(BaseModel, extra="forbid", frozen=True):
    """How large a mailbox is."""

    slots: int = Field(16, ge=1, le=256)
    """Transfers that may be under way from one peer to another, each of up to 256 KiB."""
