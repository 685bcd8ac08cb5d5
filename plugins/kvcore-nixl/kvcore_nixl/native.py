"""The NIXL library: found, checked and loaded, with an environment in which it behaves; and what its errors mean."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import sys
from pathlib import Path
from typing import Any

from kvcore import BackendLoadError
from kvcore_nixl.options import NixlOptions

PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12", "nixl_rocm")  # a chooser, and the variants of the library that it chooses among
CALLS = (
    "create_backend", "register_memory", "deregister_memory", "get_agent_metadata", "add_remote_agent", "remove_remote_agent",
    "get_xfer_descs", "prep_xfer_dlist", "release_dlist_handle", "initialize_xfer", "make_prepped_xfer", "transfer", "check_xfer_state",
    "release_xfer_handle", "get_new_notifs",
)  # fmt: skip
INSTALL = "pip install kvcore-nixl[cu13] (or [cu12]); either runs without CUDA too"
RDMA_DEVICES = Path("/sys/class/infiniband")


def rdma_devices() -> list[str]:
    """The host's."""
    return sorted(path.name for path in RDMA_DEVICES.iterdir()) if RDMA_DEVICES.is_dir() else []


def prepare_environment(wanted: dict[str, str], log: logging.Logger) -> None:
    """Set what the library reads when it is loaded; what the process has already stays.

    Where there is no RDMA device, UCX's InfiniBand module is left out: it only crashes the interpreter when that exits.
    """
    for name, value in (({} if rdma_devices() else {"UCX_MODULES": "^ib"}) | wanted).items():
        present = os.environ.setdefault(name, value)
        if present != value:
            log.info("%s=%s of the process wins over %s", name, present, value)


def load() -> tuple[Any, str]:
    """The library's module and version; ``BackendLoadError`` if there is none, or one that lacks a call."""
    as_set = logging.raiseExceptions
    library, log = _import(), logging.getLogger("nixl")
    logging.raiseExceptions = as_set  # which is not the library's to change
    log.handlers = [one for one in log.handlers if getattr(one, "stream", None) is not sys.stdout]  # where the program's results go
    log.setLevel(log.level if "NIXL_LOG_LEVEL" in os.environ else logging.NOTSET)
    log.propagate = True  # to where the program's log goes
    agent = getattr(library, "nixl_agent", None)
    package = getattr(agent, "__module__", library.__name__).partition(".")[0].replace("_", "-")
    try:
        version = f"{importlib.metadata.version(package)} ({package})"
    except importlib.metadata.PackageNotFoundError:
        version = f"of unknown version ({package})"
    missing = [name for name in CALLS if not hasattr(agent, name)]
    if missing:
        raise BackendLoadError(f"backend 'nixl' needs NIXL 1.5 or newer, and NIXL {version} lacks {', '.join(missing)}; upgrade: {INSTALL}")
    return library, version


def _import() -> Any:
    tried = []
    for name in PACKAGES:
        try:
            return importlib.import_module(name)
        except Exception as error:
            tried.append(f"{name}: {told(error)}")
            last = error
    raise BackendLoadError(f"backend 'nixl' finds no NIXL library ({'; '.join(tried)}); install one: {INSTALL}") from last


def new_agent(library: Any, name: str, options: NixlOptions) -> Any:
    """An agent with its plugin started; ``BackendLoadError`` naming the plugin and those that NIXL has."""
    strict = library.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    agent = library.nixl_agent(name, library.nixl_agent_config(enable_prog_thread=options.progress_thread, backends=[], sync_mode=strict))
    named = {"ucx_devices": ",".join(options.devices), "num_workers": str(options.workers), "num_threads": str(options.threads or "")}
    parameters = {name: value for name, value in named.items() if value and options.plugin == "UCX"} | options.plugin_options
    try:
        agent.create_backend(options.plugin, parameters)
        agent.get_agent_metadata()  # which a plugin for storage has none of
    except Exception as error:
        raise BackendLoadError(
            f"backend 'nixl': plugin {options.plugin!r} with {parameters} did not start, or reaches no other agent ({told(error)}); "
            f"NIXL has {', '.join(sorted(agent.get_plugin_list()))}: choose one that moves memory, or correct devices and plugin_options"
        ) from error
    return agent


def told(error: Exception) -> str:
    """An error of the library in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def lost(error: Exception) -> bool:
    """Whether the library says that the connection to a peer is broken; it stays so until the peer is loaded anew."""
    return type(error).__name__ == "nixlRemoteDisconnectError"
