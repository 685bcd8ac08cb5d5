"""The NIXL library: found, checked and loaded, with an environment in which it behaves; and what its errors mean."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from kvcore import BackendLoadError
from kvcore_nixl.options import NixlOptions

VARIANTS = ("nixl_cu13", "nixl_cu12", "nixl_rocm")
"""The library's own packages; ``nixl`` is a chooser among them."""
CALLS = (
    "create_backend", "register_memory", "deregister_memory", "get_agent_metadata", "add_remote_agent", "remove_remote_agent",
    "get_xfer_descs", "prep_xfer_dlist", "release_dlist_handle", "initialize_xfer", "make_prepped_xfer", "transfer", "check_xfer_state",
    "release_xfer_handle", "get_new_notifs",
)  # fmt: skip
INSTALL = "pip install kvcore-nixl[cu13] (or [cu12]); either runs without CUDA too"
RDMA_DEVICES = Path("/sys/class/infiniband")


def rdma_devices() -> list[str]:
    """The host's RDMA devices."""
    return sorted(path.name for path in RDMA_DEVICES.iterdir()) if RDMA_DEVICES.is_dir() else []


def prepare_environment(wanted: dict[str, str], log: logging.Logger) -> None:
    """Set what the library reads when it is loaded; what the process has already stays.

    Where there is no RDMA device, UCX's InfiniBand module is left out: it only crashes the interpreter when that exits.
    """
    for name, value in (({} if rdma_devices() else {"UCX_MODULES": "^ib"}) | wanted).items():
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
    tried, as_set = [], logging.raiseExceptions
    for name in ("nixl", *VARIANTS):
        try:
            library = importlib.import_module(name)
        except Exception as error:
            tried.append(f"{name}: {told(error)}")
            last = error
            continue
        logging.raiseExceptions = as_set  # which is not the library's to change
        _redirect_log(logging.getLogger("nixl"))
        return library
    raise BackendLoadError(f"backend 'nixl' finds no NIXL library ({'; '.join(tried)}); install one: {INSTALL}") from last


def _redirect_log(log: logging.Logger) -> None:
    """Have the library's log go where the program's goes; by itself it goes to stdout, among the program's results."""
    for handler in [one for one in log.handlers if isinstance(one, logging.StreamHandler) and one.stream is sys.stdout]:
        log.removeHandler(handler)
        log.propagate = True


def _version(library: ModuleType) -> str:
    """The version of the distribution that holds the agent's class."""
    package = str(library.nixl_agent.__module__).partition(".")[0].replace("_", "-")
    try:
        return f"{importlib.metadata.version(package)} ({package})"
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def new_agent(library: ModuleType, name: str, options: NixlOptions) -> Any:
    """An agent with its plugin started; ``BackendLoadError`` naming the plugin and those that NIXL has."""
    strict = library.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    agent = library.nixl_agent(name, library.nixl_agent_config(enable_prog_thread=options.progress_thread, backends=[], sync_mode=strict))
    parameters = plugin_parameters(options)
    try:
        agent.create_backend(options.plugin, parameters)
        agent.get_agent_metadata()  # which a plugin for storage has none of
    except Exception as error:
        raise BackendLoadError(
            f"backend 'nixl': plugin {options.plugin!r} with {parameters} did not start, or cannot reach another agent ({told(error)}); "
            f"NIXL has {', '.join(sorted(agent.get_plugin_list()))}: choose one that moves memory, or correct devices and plugin_options"
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
