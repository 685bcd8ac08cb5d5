"""One manager's backend: chosen by name, checked, opened with its memory registered, and closed again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

from kvcore import addresses, registry
from kvcore.config import Config
from kvcore.errors import MOST_SHOWN, BackendLoadError, ConfigError, KVCoreError, RegistrationError, cause, one_line, shown
from kvcore.exclusive import OneAtATime
from kvcore.hookspecs import Hooks, OpenContext
from kvcore.memory import PoolGeometry, Region

log = logging.getLogger("kvcore.backend")

MOST_LISTED = 4
"""Regions written out in an error; of more only the first ones."""


class Backend:
    """A loaded backend and the plugin manager it is registered with. Raises the errors of B2."""

    def __init__(self, name: str, options: Mapping[str, object]) -> None:
        self.plugins, _, self.info = registry.plugin_manager(registry.load_backend(name))
        self._options = registry.validated_options(self.info, options)
        hooks = cast(Hooks, self.plugins.hook)
        self.hooks = cast(Hooks, OneAtATime(hooks)) if self.info.capabilities.exclusive else hooks

    def open(self, config: Config, instance: str, pools: tuple[PoolGeometry, ...], regions: Sequence[Region]) -> None:
        """Start the engine and register all memory, or undo what was done and raise (B3). Slow thread."""
        kinds = {region.device.partition(":")[0] for region in regions}
        unfit = sorted(kinds - self.info.capabilities.memory)
        if unfit:
            able = sorted(self.info.capabilities.memory)
            raise ConfigError(
                f"backend {shown(self.info.name)} moves {able} memory and the pools lie in {shown(unfit)}; choose a backend for it"
            )
        host = addresses.parse_host(config.host, "host")
        bind = addresses.parse_host(config.bind or config.host, "bind")
        logger = logging.getLogger(f"kvcore.backends.{self.info.name}")
        context = OpenContext(instance, config.role, config.topology.place.number, host, bind, logger, pools)
        try:
            self._start(context)
            self._register(regions)
        except BaseException:
            self._close_engine()
            raise
        self._tell_lacks(config.limits.quarantine_s)

    def _tell_lacks(self, quarantine_s: float | None) -> None:
        """Say once what pages will wait for that other engines would free at once."""
        name, able = self.info.name, self.info.capabilities
        if not able.cancel:
            log.info("backend %s cannot cancel: pages of aborted rooms wait until the copies in flight have ended", name)
        if not (able.fences_on_disconnect or able.needs_process_to_write):
            limit = "None: until this instance ends" if quarantine_s is None else f"{quarantine_s:g} s"
            log.info("backend %s cannot fence: pages that a lost peer may still write wait for quarantine_s (%s)", name, limit)

    def _start(self, context: OpenContext) -> None:
        fault = _fault(self.hooks.kvcore_open, options=self._options, context=context)
        if fault is not None:
            raise BackendLoadError(
                f"backend {shown(self.info.name)} {one_line(self.info.version, MOST_SHOWN)} did not start "
                f"as {context.side} rank {context.rank} on host {context.host!r}, bind {context.bind!r}: kvcore_open {fault.text}; "
                "check its options, these addresses, and the devices and environment variables that its engine needs"
            ) from fault.error

    def _register(self, regions: Sequence[Region]) -> None:
        fault = _fault(self.hooks.kvcore_register, regions=regions)
        if fault is not None:
            self._unregister(regions)
            raise RegistrationError(self._unregistered(regions, fault.text)) from fault.error

    def _unregistered(self, regions: Sequence[Region], what: str) -> str:
        listed = [f"region {n} ({r.nbytes} bytes at {r.ptr:#x} on {r.device})" for n, r in enumerate(regions[:MOST_LISTED])]
        more = f" and {len(regions) - MOST_LISTED} more" if len(regions) > MOST_LISTED else ""
        return (
            f"backend {shown(self.info.name)} could not register {', '.join(listed)}{more}: kvcore_register {what}; usual causes: "
            "the limit of locked memory (ulimit -l), a missing driver, memory of a kind or an allocator that the engine does not take"
        )

    def close(self, regions: Sequence[Region]) -> bool:
        """Unregister and stop the engine; True if it has stopped, so that no transfer of it runs any more (R3). Slow thread."""
        self._unregister(regions)
        return self._close_engine()

    def _unregister(self, regions: Sequence[Region]) -> None:
        try:
            self.hooks.kvcore_unregister(regions=regions)
        except BaseException:
            log.exception("backend %s did not unregister its memory; closing it", self.info.name)

    def _close_engine(self) -> bool:
        try:
            self.hooks.kvcore_close()
        except BaseException:
            log.exception("backend %s did not close cleanly", self.info.name)
            return False
        return True


class _Fault(NamedTuple):
    text: str
    error: BaseException | None = None


def _fault(hook: Callable[..., object], **arguments: object) -> _Fault | None:
    """What a hook did that should just have returned. Errors of kvcore pass: they say all of it themselves."""
    try:
        answer = hook(**arguments)
    except KVCoreError:
        raise
    except BaseException as error:
        return _Fault(f"raised {cause(error)}", error)
    return None if answer is None else _Fault(f"returned {shown(answer)} instead of None")
