"""kvcore moves the KV cache of LLM requests from prefill to decode instances, through transports that are plugins."""

from kvcore.config import Config, Limits, Security, Topology
from kvcore.errors import (
    BackendConflictError,
    BackendLoadError,
    BackendNotFoundError,
    BackendOptionsError,
    BackendVersionError,
    ConfigError,
    IncompatiblePeerError,
    KVCoreError,
    KVTransferError,
    PageError,
    RegistrationError,
    RoomError,
)
from kvcore.handles import Handle, Receiver, Sender
from kvcore.hookspecs import (
    API_VERSION,
    BackendInfo,
    Capabilities,
    Endpoint,
    NothingPosted,
    TicketKind,
    TicketState,
    Transfer,
    hookimpl,
)
from kvcore.manager import KVManager
from kvcore.memory import Pool, Region
from kvcore.metrics import TransferMetrics
from kvcore.registry import list_backends, load_backend
from kvcore.states import FailureCode, KVPoll
from kvcore.stats import ManagerStats

__version__ = "0.1.0"

__all__ = [
    "API_VERSION",
    "BackendConflictError",
    "BackendInfo",
    "BackendLoadError",
    "BackendNotFoundError",
    "BackendOptionsError",
    "BackendVersionError",
    "Capabilities",
    "Config",
    "ConfigError",
    "Endpoint",
    "FailureCode",
    "Handle",
    "IncompatiblePeerError",
    "KVCoreError",
    "KVManager",
    "KVPoll",
    "KVTransferError",
    "Limits",
    "ManagerStats",
    "NothingPosted",
    "PageError",
    "Pool",
    "Receiver",
    "Region",
    "RegistrationError",
    "RoomError",
    "Security",
    "Sender",
    "TicketKind",
    "TicketState",
    "Topology",
    "Transfer",
    "TransferMetrics",
    "hookimpl",
    "list_backends",
    "load_backend",
]
