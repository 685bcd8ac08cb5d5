"""kvcore moves the KV cache of LLM requests from prefill to decode instances, through transports that are plugins.

What is public is imported when it is first used, so that ``import kvcore`` costs a program next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcore import faults as faults, hookspecs as hookspecs
    from kvcore.config import (
        Config as Config,
        Limits as Limits,
        Security as Security,
        Topology as Topology,
    )
    from kvcore.errors import (
        BackendConflictError as BackendConflictError,
        BackendLoadError as BackendLoadError,
        BackendNotFoundError as BackendNotFoundError,
        BackendOptionsError as BackendOptionsError,
        BackendVersionError as BackendVersionError,
        ConfigError as ConfigError,
        IncompatiblePeerError as IncompatiblePeerError,
        KVCoreError as KVCoreError,
        KVTransferError as KVTransferError,
        PageError as PageError,
        RegistrationError as RegistrationError,
        RoomError as RoomError,
    )
    from kvcore.handles import (
        Handle as Handle,
        Receiver as Receiver,
        Sender as Sender,
    )
    from kvcore.hookspecs import (
        API_VERSION as API_VERSION,
        BackendInfo as BackendInfo,
        Capabilities as Capabilities,
        Endpoint as Endpoint,
        NothingPosted as NothingPosted,
        TicketKind as TicketKind,
        TicketState as TicketState,
        Transfer as Transfer,
        hookimpl as hookimpl,
    )
    from kvcore.installed import list_backends as list_backends
    from kvcore.layouts import (
        Heads as Heads,
        Latent as Latent,
        Opaque as Opaque,
        SideRecord as SideRecord,
    )
    from kvcore.manager import KVManager as KVManager
    from kvcore.memory import (
        Pool as Pool,
        Region as Region,
    )
    from kvcore.metrics import TransferMetrics as TransferMetrics
    from kvcore.registry import load_backend as load_backend
    from kvcore.states import (
        FailureCode as FailureCode,
        KVPoll as KVPoll,
    )
    from kvcore.stats import ManagerStats as ManagerStats

__version__ = "0.1.0"

_NAMES = {
    "kvcore.config": (
        "Config",
        "Limits",
        "Security",
        "Topology",
    ),
    "kvcore.errors": (
        "BackendConflictError",
        "BackendLoadError",
        "BackendNotFoundError",
        "BackendOptionsError",
        "BackendVersionError",
        "ConfigError",
        "IncompatiblePeerError",
        "KVCoreError",
        "KVTransferError",
        "PageError",
        "RegistrationError",
        "RoomError",
    ),
    "kvcore.handles": (
        "Handle",
        "Receiver",
        "Sender",
    ),
    "kvcore.hookspecs": (
        "API_VERSION",
        "BackendInfo",
        "Capabilities",
        "Endpoint",
        "NothingPosted",
        "TicketKind",
        "TicketState",
        "Transfer",
        "hookimpl",
    ),
    "kvcore.installed": ("list_backends",),
    "kvcore.layouts": (
        "Heads",
        "Latent",
        "Opaque",
        "SideRecord",
    ),
    "kvcore.manager": ("KVManager",),
    "kvcore.memory": (
        "Pool",
        "Region",
    ),
    "kvcore.metrics": ("TransferMetrics",),
    "kvcore.registry": ("load_backend",),
    "kvcore.states": (
        "FailureCode",
        "KVPoll",
    ),
    "kvcore.stats": ("ManagerStats",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    """Import a public name on first use (PEP 562)."""
    if name in ("faults", "hookspecs"):
        return import_module(f"kvcore.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'kvcore' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
