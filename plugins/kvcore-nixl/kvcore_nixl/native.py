"""The NIXL library: found, checked and loaded, with an environment in which it behaves; and what its errors mean."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from kvcore import BackendLoadError
from kvcore_nixl.options import NixlOptions

MODULES = ("nixl_cu13", "nixl_cu12", "nixl_rocm")
"""The library's own packages, one per variant; ``nixl`` is a chooser among them."""
CALLS = (
    "create_backend", "register_memory", "deregister_memory", "get_agent_metadata", "add_remote_agent", "remove_remote_agent",
    "get_xfer_descs", "prep_xfer_dlist", "release_dlist_handle", "initialize_xfer", "make_prepped_xfer", "transfer", "check_xfer_state",
    "release_xfer_handle", "get_new_notifs",
)  # fmt: skip
INSTALL = "pip install kvcore-nixl[cu12] (or [cu13]); it needs torch, and runs without CUDA too"
RDMA_DEVICES = Path("/sys/class/infiniband")


def prepare_environment(wanted: dict[str, str], log: logging.Logger) -> None:
    """Set what the library reads when it is loaded; what the process has already stays.

    Where there is no RDMA device, UCX's InfiniBand module is left out: it only crashes the interpreter when that exits.
    """
    found = RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())
    for name, value in ({} if found else {"UCX_MODULES": "^ib"} | wanted).items():
        present = os.environ.setdefault(name, value)
        if present != value:
            log.info("%s=%s of the process wins over %s", name, present, value)


def load() -> tuple[ModuleType, str]:
    """The library's module and version; ``BackendLoadError`` if there is none, or one that lacks a call."""
    library = _import()
    version = _version(library)
    missing = [name for name in CALLS if not hasattr(library.nixl_agent, name)]
    if missing:
        raise BackendLoadError(f"backend 'nixl' needs NIXL 1.5 or newer, and {version} lacks {', '.join(missing)}; upgrade: {INSTALL}")
    return library, version


def _import() -> ModuleType:
    tried = []
    for name in ("nixl", *MODULES):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            tried.append(f"{name}: {' '.join(str(error).split())}")
            last = error
    raise BackendLoadError(f"backend 'nixl' finds no NIXL library ({'; '.join(tried)}); install one: {INSTALL}") from last


def _version(library: ModuleType) -> str:
    """The version of the distribution that holds the agent's class."""
    package = str(library.nixl_agent.__module__).partition(".")[0]
    try:
        return importlib.metadata.version(package.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def new_agent(library: ModuleType, name: str, options: NixlOptions) -> Any:
    """An agent with its plugin started; ``BackendLoadError`` naming the plugin and those that NIXL has."""
    strict = library.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    config = library.nixl_agent_config(enable_prog_thread=options.progress_thread, backends=[], sync_mode=strict)
    parameters = plugin_parameters(options)
    agent = library.nixl_agent(name, config)
    try:
        agent.create_backend(options.plugin, parameters)
    except Exception as error:
        raise BackendLoadError(
            f"backend 'nixl': plugin {options.plugin!r} with {parameters} did not start ({told(error)}); "
            f"NIXL has {', '.join(sorted(agent.get_plugin_list()))}: choose one of them, or correct devices and plugin_options"
        ) from error
    return agent


def plugin_parameters(options: NixlOptions) -> dict[str, str]:
    """What the plugin is started with. Those of UCX are named by options; any other plugin takes ``plugin_options`` only."""
    if options.plugin != "UCX":
        return dict(options.plugin_options)
    named = {"ucx_devices": ",".join(options.devices), "num_workers": str(options.workers), "num_threads": str(options.threads)}
    return {name: value for name, value in named.items() if value not in ("", "0")} | options.plugin_options


def told(error: Exception) -> str:
    """An error of the library in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def lost(error: Exception) -> bool:
    """Whether the library says that the connection to a peer is broken; it stays so until the peer is loaded anew."""
    return type(error).__name__ == "nixlRemoteDisconnectError"


def text(name: str | bytes) -> str:
    """An agent's name, which some calls give as bytes."""
    return name.decode(errors="replace") if isinstance(name, bytes) else name
