"""The events thread: what observers see, one by one and guarded, so that none disturbs a room (C105)."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import cast

import pluggy

from kvcore.errors import MOST_CAUSE, ConfigError, KVCoreError, one_line
from kvcore.hookspecs import Event, Hooks
from kvcore.logs import Failures

log = logging.getLogger("kvcore.observers")

MOST_WAITING = 10_000


class Interposer:
    """Base of observers that call the backend themselves, as fault injection does. One serves one manager."""

    _hooks: Hooks | None = None

    @property
    def hooks(self) -> Hooks:
        """The manager's hooks; raises ``KVCoreError`` before ``add_observer``."""
        if self._hooks is None:
            raise KVCoreError(f"{type(self).__name__} serves no manager yet; give it to add_observer first")
        return self._hooks

    def attach(self, hooks: Hooks) -> None:
        """Take the hooks of the manager that this was given to; raises ``KVCoreError`` for a second one."""
        if self._hooks is not None:
            raise KVCoreError(f"this {type(self).__name__} serves a manager already; make another for each manager")
        self._hooks = hooks


class Observers:
    """A bounded queue of events and the thread that delivers them; the oldest is dropped when nobody keeps up."""

    def __init__(self, manager: pluggy.PluginManager) -> None:
        self._manager = manager
        self._events: deque[Event] = deque(maxlen=MOST_WAITING)
        self._bell = threading.Event()
        self._stopping = False
        self._failures = Failures(log)
        self.watched = False
        """Whether anybody is told of events."""
        self._thread = threading.Thread(target=self._run, name="kvcore-events", daemon=True)

    def add(self, plugin: object) -> None:
        """Register an object with hook implementations or wrappers; raises ``ConfigError`` for what cannot be one."""
        if isinstance(plugin, Interposer):
            plugin.attach(cast(Hooks, self._manager.hook))
        if self._manager.is_registered(plugin):
            raise ConfigError(f"observer {type(plugin).__name__} was added before; add each object once")
        try:
            self._manager.register(plugin)
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            if self._manager.is_registered(plugin):
                self._manager.unregister(plugin)
            raise ConfigError(f"observer {type(plugin).__name__} is refused: {one_line(error, MOST_CAUSE)}; correct its hooks") from error
        if not self.watched and self._manager.hook.kvcore_on_event.get_hookimpls():
            self.watched = True
            self._thread.start()

    def tell(self, event: Event) -> None:
        """Queue an event, if anybody watches. Never blocks."""
        if self.watched:
            self._events.append(event)
            self._bell.set()

    def stop(self, timeout_s: float) -> None:
        """Deliver what is queued and end the thread."""
        self._stopping = True
        self._bell.set()
        if self.watched and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def running(self) -> list[threading.Thread]:
        """The thread, unless it has ended."""
        return [self._thread] if self._thread.is_alive() else []

    def __len__(self) -> int:
        return len(self._events)

    def _run(self) -> None:
        while True:
            self._bell.wait()
            self._bell.clear()
            while self._events:
                self._deliver(self._events.popleft())
            if self._stopping:
                return

    def _deliver(self, event: Event) -> None:
        for implementation in self._manager.hook.kvcore_on_event.get_hookimpls():
            try:
                implementation.function(event) if "event" in implementation.argnames else implementation.function()
            except BaseException:
                name = implementation.plugin_name
                self._failures.note(name, f"observer {name} failed on {event.name}; the others are told")
