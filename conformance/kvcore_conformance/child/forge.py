"""A peer that names other pages than its receiver listed: what arrives here as a room's destination is replaced on the way (T2)."""

from __future__ import annotations

import msgspec
import numpy as np

import kvcore
from kvcore.faults import ControlTap
from kvcore.protocol.messages import Destination, PoolPages
from kvcore.wire import Letter


class Forge:
    """Stands on a prefill manager's control port."""

    def __init__(self, manager: kvcore.KVManager) -> None:
        self._tap = ControlTap(manager)

    def close(self) -> None:
        """Let everything through again."""
        self._tap.close()

    def destination(self, room: int, pool: str, pages: list[int]) -> None:
        """Have every destination of a room name these pages instead."""
        forged = np.array(pages, "<i4").tobytes()

        def replaced(letter: Letter, outgoing: bool) -> bool:
            if outgoing or not isinstance(letter.body, Destination) or letter.body.room != room:
                return False
            named = tuple(PoolPages(one.pool, forged if one.pool == pool else one.pages, one.prefix) for one in letter.body.pages)
            self._tap.inject(msgspec.structs.replace(letter, body=msgspec.structs.replace(letter.body, pages=named)))
            return True

        self._tap.drop(replaced)
