"""Animals without a fault, which do no more than is asked of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from kvcore import Endpoint, Region, hookimpl
from kvcore.hookspecs import Peer
from kvcore_zoo.animal import Animal


class Frugal(Animal):
    """Takes few descriptors and few bytes in a transfer."""

    name = "zoo-frugal"
    able: ClassVar[dict[str, Any]] = {"max_bytes": 1000, "max_descriptors": 3}


class Literal(Animal):
    """Cannot unregister what is not registered, and reads of an endpoint what it needs."""

    name = "zoo-literal"
    registered = False

    @hookimpl
    def kvcore_register(self, regions: Sequence[Region]) -> None:
        self.registered = True
        super().kvcore_register(regions)

    @hookimpl
    def kvcore_unregister(self, regions: Sequence[Region]) -> None:
        if not self.registered:
            raise KeyError("not registered")
        self.registered = False

    @hookimpl
    def kvcore_connect(self, peer: Peer) -> None:
        whole, found, _ = peer.endpoint.data.partition(b"]")
        super().kvcore_connect(replace(peer, endpoint=Endpoint(whole + found)))
