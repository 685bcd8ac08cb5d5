"""Animals that put bytes where they must not be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvcore import TicketState
from kvcore.backends.local import Job
from kvcore_zoo.animal import Animal


class Sloppy(Animal):
    """A byte past the page: of many descriptors the last is one byte too long, where there is memory behind it."""

    name = "zoo-sloppy"

    def _send(self, job: Job) -> TicketState:
        length = job.transfer.length.copy()
        sizes = np.array([len(view) for _, view in self._memory], np.uint64)
        last = job.transfer.local_region[-1], job.transfer.local_offset[-1], job.transfer.remote_offset[-1]
        if length.size > 8 and max(last[1], last[2]) + length[-1] < sizes[last[0]]:
            length[-1] += np.uint64(1)
        job.transfer = replace(job.transfer, length=length)
        return super()._send(job)


class Edgy(Animal):
    """The very last page of a pool, where it travels alone, is written one page too low."""

    name = "zoo-edgy"

    def _send(self, job: Job) -> TicketState:
        sizes = np.array([len(view) for _, view in self._memory], np.uint64)
        ends = job.transfer.remote_offset + job.transfer.length == sizes[job.transfer.remote_region]
        ends &= job.transfer.length <= 8192
        if ends.any():
            offset = np.where(ends & (job.transfer.remote_offset >= job.transfer.length), job.transfer.remote_offset - job.transfer.length,
                              job.transfer.remote_offset)  # fmt: skip
            job.transfer = replace(job.transfer, remote_offset=offset)
        return super()._send(job)


class Narrow(Animal):
    """Of many descriptors the offsets are taken for 20 bits: right for small pools only."""

    name = "zoo-narrow"

    def _send(self, job: Job) -> TicketState:
        if job.transfer.length.size > 16:
            job.transfer = replace(job.transfer, local_offset=job.transfer.local_offset & np.uint64(0xFFFFF))
        return super()._send(job)


class Bytewise(Animal):
    """The peer's regions are taken for 8 bits: right up to 256 of them."""

    name = "zoo-bytewise"

    def _send(self, job: Job) -> TicketState:
        job.transfer = replace(job.transfer, remote_region=job.transfer.remote_region & np.int32(0xFF))
        return super()._send(job)


class Stubby(Animal):
    """Lengths are taken for 24 bits: right where no run of pages is above 16 MiB."""

    name = "zoo-stubby"

    def _send(self, job: Job) -> TicketState:
        job.transfer = replace(job.transfer, length=job.transfer.length & np.uint64(0xFFFFFF))
        return super()._send(job)


class Wrapping(Animal):
    """Offsets are taken for 32 bits: right below 4 GiB."""

    name = "zoo-wrapping"

    def _send(self, job: Job) -> TicketState:
        job.transfer = replace(job.transfer, remote_offset=job.transfer.remote_offset & np.uint64(0xFFFFFFFF))
        return super()._send(job)
