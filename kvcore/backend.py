"""One manager's backend: chosen by name, checked, opened with its memory registered, and closed again."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import cast

from kvcore import addresses, registry
from kvcore.config import Config
from kvcore.errors import ConfigError
from kvcore.hookspecs import Hooks, OpenContext
from kvcore.memory import Region

log = logging.getLogger("kvcore.backend")


class Backend:
    """A loaded backend and the plugin manager it is registered with. Raises the errors of B2."""

    def __init__(self, name: str, options: Mapping[str, object]) -> None:
        self.plugins, self._plugin, self.info = registry.plugin_manager(registry.load_backend(name))
        self._options = registry.validated_options(self.info, options)
        self.hooks = cast(Hooks, self.plugins.hook)

    def open(self, config: Config, instance: str, regions: Sequence[Region]) -> None:
        """Start the engine and register all memory, or undo what was done and raise (B3). Slow thread."""
        kinds = {region.device.partition(":")[0] for region in regions}
        unfit = sorted(kinds - self.info.capabilities.memory)
        if unfit:
            able = sorted(self.info.capabilities.memory)
            raise ConfigError(f"backend {self.info.name!r} moves {able} memory and the pools lie in {unfit}; choose a backend for it")
        host = addresses.parse_host(config.host, "host")
        bind = addresses.parse_host(config.bind or config.host, "bind")
        logger = logging.getLogger(f"kvcore.backends.{self.info.name}")
        context = OpenContext(instance, config.role, config.topology.rank, host, bind, logger)
        try:
            self.hooks.kvcore_open(options=self._options, context=context)
            self.hooks.kvcore_register(regions=regions)
        except BaseException:
            self._close_engine()
            raise

    def close(self, regions: Sequence[Region]) -> None:
        """Unregister and stop the engine. Slow thread."""
        try:
            self.hooks.kvcore_unregister(regions=regions)
        except Exception:
            log.exception("backend %s did not unregister its memory; closing it", self.info.name)
        self._close_engine()

    def _close_engine(self) -> None:
        try:
            self.hooks.kvcore_close()
        except Exception:
            log.exception("backend %s did not close cleanly", self.info.name)
