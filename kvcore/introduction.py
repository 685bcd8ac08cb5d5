"""What an instance tells of itself when it pairs, checked before anything is started."""

from __future__ import annotations

import time
from collections.abc import Mapping

from kvcore import mapping
from kvcore.config import Config
from kvcore.errors import MOST_CAUSE, ConfigError, one_line, shown
from kvcore.hookspecs import BackendInfo
from kvcore.memory import Pool
from kvcore.process import this_process
from kvcore.wire import VERSION, Hello, Introduction, RegionInfo, checked


def introduction(config: Config, instance: str, pools: Mapping[str, Pool], backend: BackendInfo) -> Introduction:
    """The words; ``ConfigError`` if pools and topology do not fit each other, or cannot be told."""
    for pool in pools.values():
        if config.role != "decode" and pool.source not in pools:
            raise ConfigError(f"pool {pool.name!r} pairs with {pool.source!r}, which role {config.role!r} sends from; give it too")
        try:
            mapping.check_rank(pool.geometry, config.topology.place)
        except ValueError as error:
            raise ConfigError(f"pool {pool.name!r}: {error}; correct topology, layout or the tensors") from error
    limits = config.limits
    regions = tuple(RegionInfo.of(region) for pool in pools.values() for region in pool.regions)
    me = Introduction(
        VERSION, instance, time.time_ns(), config.role, config.topology.place, backend.name, backend.wire_version,
        tuple(pool.geometry for pool in pools.values()), regions, limits.liveness_s, limits.ticket_s, limits.quarantine_s,
        limits.orphan_s, this_process(),
    )  # fmt: skip
    try:
        checked(instance, "", Hello(0, me, b""))
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"pools and backend {shown(backend.name)} cannot be described to a peer ({one_line(error, MOST_CAUSE)}); correct them"
        ) from error
    return me
