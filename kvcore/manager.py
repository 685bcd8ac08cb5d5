"""The manager: one instance's public face. It opens rooms and answers questions; ``core`` runs the parts behind it."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TypeVar

from kvcore import addresses
from kvcore.channel import Channel
from kvcore.config import Config
from kvcore.core import Core
from kvcore.errors import ConfigError, KVCoreError, RoomError, shown
from kvcore.handles import Handle, Receiver, Sender
from kvcore.layouts import MAX_RANKS
from kvcore.memory import Pool
from kvcore.protocol import events as ev
from kvcore.room import NOWHERE, PrefillGroup, Room, room_id
from kvcore.states import FailureCode, KVPoll, Reason, RoomId, Side
from kvcore.stats import ManagerStats

H = TypeVar("H", bound=Handle)

log = logging.getLogger("kvcore.manager")

EXIT_S = 0.5
"""How long transfers may still go on where a process ends and a manager was not closed."""


def _close_at_exit(core: Core, process: int) -> None:
    """An engine that still writes while the interpreter is taken down may crash it."""
    if process == os.getpid():
        log.warning("%s was not closed; closing it, since its process ends", core.instance)
        core.close(min(EXIT_S, core.config.limits.drain_s))


class KVManager:
    """One instance of one side (or both): its rooms, peers, backend and control plane. A context manager; leaving it closes it.

    Raises ``ConfigError``, a ``Backend…Error`` or ``RegistrationError`` if it cannot start, with nothing left running.
    """

    def __init__(self, config: Config, pools: Sequence[Pool]) -> None:
        if not isinstance(config, Config):
            raise ConfigError(f"config is {shown(config)}; pass a kvcore.Config")
        self._process = os.getpid()
        self._core = Core(config, pools)
        self._at_exit = functools.partial(_close_at_exit, self._core, self._process)
        atexit.register(self._at_exit)

    @property
    def config(self) -> Config:
        """The settings it runs with."""
        return self._core.config

    @property
    def instance(self) -> str:
        """The unique id of this run."""
        return self._core.instance

    @property
    def address(self) -> str:
        """``host:port``: on prefill what decode instances name in ``receiver``; on decode its control port."""
        return self._core.address

    @property
    def admin_address(self) -> str:
        """``host:port`` of the admin port; "" without one."""
        return self._core.admin_address

    def sender(self, room: int, attempt: int = 0) -> Sender:
        """Open a room on the prefill side. Raises ``RoomError`` for a bad number, or one that is live here (C6)."""
        name = room_id(room, attempt)
        return self._held("prefill", name, lambda: Sender(self._core, self._open("prefill", name)))

    def receiver(self, room: int, prefill: str, dp_rank: int | None = None, attempt: int = 0) -> Receiver:
        """Open a room on the decode side; ``prefill`` is the prefill manager's ``address``.

        ``dp_rank``: which of prefill's data-parallel ranks has the room; None: whichever opens it.
        Raises ``RoomError`` for a bad number, or one that is live here (C6), and ``ConfigError`` for what is no address.
        """
        name = room_id(room, attempt)
        return self._held("decode", name, lambda: Receiver(self._core, self._open_receiver(name, prefill, dp_rank)))

    def reject(self, room: int, reason: str, prefill: str, attempt: int = 0, dp_rank: int | None = None) -> None:
        """Turn a request down before any receiver exists (A8): prefill's room fails at once with this reason.

        Raises ``RoomError`` for a bad number, or if a receiver of that room is live here; ``ConfigError`` for what is no address.
        """
        why = Reason.of(FailureCode.REJECTED, reason, "decode", self._core.rank)
        record = self._open_receiver(room_id(room, attempt), prefill, dp_rank)
        self._core.table.apply("decode", record.id, ev.Fail(record.key.generation, why))
        self._core.table.clear(record)

    def _held(self, side: Side, room: RoomId, make: Callable[[], H]) -> H:
        """A new room's handle. Where a signal handler raises before the caller has it, the room goes again."""
        before = self._core.table.generation
        try:
            return make()
        except KVCoreError:
            raise
        except BaseException:
            record = self._core.table.get(side, room)
            if record is not None and record.key.generation > before:
                self._core.table.clear(record)
            raise

    def _open(self, side: Side, room: RoomId, group: PrefillGroup = NOWHERE) -> Room:
        if self.config.role not in (side, "both"):
            raise RoomError(f"room {room}: this manager's role is {self.config.role!r}; open its {side} side on a manager of that role")
        record = None if self._core.overview.closing else self._core.table.open(side, room, group)
        if self._core.overview.closing:  # looked at again: nobody would end a room opened behind the back of ``close``
            if record is not None:
                self._core.table.clear(record)
            raise RoomError(f"room {room}: this manager is closing and takes no new rooms; use another instance")
        if record is None:
            raise RoomError(f"room {room} is live on the {side} side here; clear it first, or open it with another attempt")
        return record

    def _open_receiver(self, room: RoomId, prefill: str, dp_rank: int | None) -> Room:
        if dp_rank is not None and (isinstance(dp_rank, bool) or not isinstance(dp_rank, int) or not 0 <= dp_rank < MAX_RANKS):
            raise RoomError(f"room {room}: dp_rank is {shown(dp_rank)}; pass the number of prefill's data-parallel rank, or None")
        return self._open("decode", room, PrefillGroup(str(addresses.parse(prefill, "prefill")), dp_rank))

    def status(self, room: int, attempt: int = 0, side: Side | None = None) -> KVPoll | None:
        """The state of a stored room; None if there is none. ``side`` is needed only with role "both"."""
        record = self._core.table.get(self._side(side), room_id(room, attempt))
        return record.status if record is not None else None

    def rooms(self, side: Side | None = None) -> Mapping[RoomId, KVPoll]:
        """All stored rooms and their states; of one side with role "both"."""
        chosen = self._side(side)
        return {room: record.status for this, room, _, record in self._core.table.states() if this == chosen and record is not None}

    def poll_all(self, handles: Iterable[Handle]) -> list[KVPoll]:
        """The states of many handles, in order."""
        return [handle.poll() for handle in handles]

    def explain(self, room: int, attempt: int = 0, side: Side | None = None, wait_s: float = 1.0) -> str:
        """What happened to a room, on both sides, also for a while after it was cleared, and what is kept for it.

        The only call that waits for other instances, up to ``wait_s`` seconds; with 0 it says what is known here. ``side``: only that.
        """
        name = room_id(room, attempt)
        if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 <= wait_s < threading.TIMEOUT_MAX:
            raise RoomError(f"room {name}: wait_s is {shown(wait_s)}; pass seconds, 0 to ask no other instance")
        if side is not None:
            return self._core.table.explain(self._side(side), name)
        return self._core.stories.tell(name, wait_s)

    def _side(self, side: Side | None) -> Side:
        role = self.config.role
        if side is not None and (not isinstance(side, str) or side not in ("prefill", "decode")):
            raise RoomError(f"side {shown(side)} is none; pass 'prefill' or 'decode'")
        if side is None and role == "both":
            raise RoomError("this manager has both sides; say side='prefill' or side='decode'")
        return side or ("prefill" if role == "prefill" else "decode")

    # --- operators

    def add_observer(self, plugin: object) -> None:
        """Register an object with hook implementations: events, or wrappers around any hook of the backend."""
        self._core.observers.add(plugin)

    @property
    def control(self) -> Channel:
        """The control plane's sockets, for ``faults.ControlTap``."""
        return self._core.channel

    def stats(self) -> ManagerStats:
        """What this manager holds now."""
        return self._core.overview.stats()

    def metrics_text(self) -> str:
        """All metrics in the Prometheus text format."""
        return self._core.overview.metrics_text()

    @property
    def troubles(self) -> list[str]:
        """Why this instance cannot serve rooms as it should, a line each; empty while it is well: its threads turn, not too
        many workers of a blocking backend are stuck, not too many pages wait for proof, and it is not closing."""
        return self._core.overview.troubles()

    @property
    def healthy(self) -> bool:
        """Whether there are no ``troubles``."""
        return not self.troubles

    def close(self) -> None:
        """Take no new rooms, let transfers end for ``drain_s``, abort the rest, tell the peers, stop everything. Idempotent."""
        if self._process != os.getpid():  # a child of it has none of its threads, which are the parent's to stop
            return log.warning("%s is of process %d, and is not closed in its child %d", self.instance, self._process, os.getpid())
        self._core.close(self.config.limits.drain_s)
        atexit.unregister(self._at_exit)

    def __enter__(self) -> KVManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
