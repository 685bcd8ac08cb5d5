"""The NIXL library: found, checked and loaded, with an environment in which it behaves; what its errors mean, and what a doctor sees."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import logging
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from kvcore.environment import set_variables, variables
from kvcore.errors import BackendLoadError, BackendOptionsError, cause
from kvcore.hookspecs import Fact
from kvcore_nixl.options import NixlOptions

PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12", "nixl_rocm")  # a chooser, and the variants of the library that it chooses among
CALLS = (
    "create_backend", "register_memory", "deregister_memory", "get_agent_metadata", "add_remote_agent", "remove_remote_agent",
    "check_remote_metadata", "get_xfer_descs", "prep_xfer_dlist", "release_dlist_handle", "initialize_xfer", "make_prepped_xfer",
    "transfer", "check_xfer_state", "release_xfer_handle", "get_new_notifs",
)  # fmt: skip
INSTALL = "pip install -U nixl-cu13 (or nixl-cu12); either runs without CUDA too"
NOT_LOADED = "run one NIXL on both sides; or it ran out of open files once, and accepts nobody: raise ulimit -n there and restart it"
LOST = "nixlRemoteDisconnectError"  # the connection to a peer is broken, and stays so until the peer is loaded anew
RDMA_DEVICES = Path("/sys/class/infiniband")


def rdma_devices() -> list[str]:
    """The host's."""
    return sorted(path.name for path in RDMA_DEVICES.iterdir()) if RDMA_DEVICES.is_dir() else []


def prepare_environment(wanted: dict[str, str], log: logging.Logger) -> None:
    """Set what the library reads when loaded, unless it is set. Without RDMA devices UCX's module for them would only crash the exit."""
    set_variables("nixl", ({} if rdma_devices() else {"UCX_MODULES": "^ib"}) | wanted, log)


def load() -> tuple[Any, str]:
    """The library's module and version; ``BackendLoadError`` if there is none, or one that lacks a call."""
    as_set, library = logging.raiseExceptions, _import()
    log, logging.raiseExceptions = logging.getLogger("nixl"), as_set  # the latter is not the library's to change
    log.setLevel(log.level if "NIXL_LOG_LEVEL" in os.environ else logging.NOTSET)
    log.propagate, log.handlers = True, [one for one in log.handlers if getattr(one, "stream", None) is not sys.stdout]  # of results
    agent = getattr(library, "nixl_agent", None)
    package = getattr(agent, "__module__", library.__name__).partition(".")[0].replace("_", "-")
    try:
        version = f"{importlib.metadata.version(package)} ({package})"
    except importlib.metadata.PackageNotFoundError:
        version = f"of unknown version ({package})"
    if missing := [name for name in CALLS if not hasattr(agent, name)]:
        raise BackendLoadError(f"backend 'nixl' needs NIXL 1.5 or newer, and NIXL {version} lacks {', '.join(missing)}; upgrade: {INSTALL}")
    return library, version


def _import() -> Any:
    tried = []
    for name in PACKAGES:
        try:
            return importlib.import_module(name)
        except Exception as error:
            tried.append(f"{name}: {cause(error)}")
            last = error
    raise BackendLoadError(f"backend 'nixl' finds no NIXL library ({'; '.join(tried)}); install it: {INSTALL}") from last


def new_agent(library: Any, name: str, options: NixlOptions) -> Any:
    """An agent with its plugin; ``BackendOptionsError`` if that, or a device, is not here, ``BackendLoadError`` if it does not start."""
    here = [*rdma_devices(), *(interface for _, interface in socket.if_nameindex())]
    if options.plugin == "UCX" and (unknown := [name for name in options.devices if name.partition(":")[0] not in here]):
        raise BackendOptionsError(f"backend 'nixl': no network device is called {', '.join(unknown)}; devices may name {', '.join(here)}")
    strict = library.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    agent = library.nixl_agent(name, library.nixl_agent_config(enable_prog_thread=options.progress_thread, backends=[], sync_mode=strict))
    named = {"ucx_devices": ",".join(options.devices), "num_workers": str(options.workers), "num_threads": str(options.threads or "")}
    parameters = {name: value for name, value in named.items() if value and options.plugin == "UCX"} | options.plugin_options
    try:
        agent.create_backend(options.plugin, parameters)
        if not agent.get_agent_metadata().startswith(head(name)):  # and a plugin for storage has none
            raise ValueError("its metadata does not begin with its name")
    except Exception as error:
        raise (BackendLoadError if options.plugin in agent.get_plugin_list() else BackendOptionsError)(
            f"backend 'nixl': plugin {options.plugin!r} with {parameters} did not start, or reaches no other agent ({told(error)}); NIXL "
            f"has {', '.join(sorted(agent.get_plugin_list()))}: choose one that moves memory between processes, as UCX, or correct options"
        ) from error
    return agent


def head(name: str) -> bytes:
    """How an agent's metadata begins: with the name that the library files it under."""
    return b"nixlSerDes|Agent" + len(name).to_bytes(8, "little") + name.encode() + b"|"


def told(error: Exception) -> str:
    """An error of the library in one line. While somebody keeps the error, it shall not keep the agent, which its frames refer to."""
    traceback.clear_frames(error.__traceback__)
    return cause(error)


def facts() -> list[Fact]:
    """The engine, its plugins with the libraries that some of them miss, and the transports that UCX has here. Starts nothing."""
    as_set = variables("UCX_", "NIXL_")
    prepare_environment({}, logging.getLogger(__name__))  # UCX reads its part of it when one of its libraries is loaded
    try:
        library, version = load()
    except BackendLoadError as error:
        return [Fact("engine", "missing", str(error))]
    package = str(library.nixl_agent.__module__).partition(".")[0]
    site = Path(sys.modules[package].__file__ or "").parent.parent
    paths = [*site.glob(f".{package}*/plugins/libplugin_*.so"), *site.glob(f"{package}.libs/ucx/libuct_cuda.so*")]
    found = {path.name.partition(".")[0]: _problem(path) for path in sorted(paths)}
    usual = ["tcp", "shared memory", *(f"rdma on {device}" for device in rdma_devices())]
    return [
        Fact("engine", f"NIXL {version}"),
        Fact("plugins", ", ".join(name[10:] for name, problem in found.items() if name.startswith("libplugin_") and not problem)),
        Fact("transports", f"as UCX_TLS says: {os.environ['UCX_TLS']}" if "UCX_TLS" in os.environ else ", ".join(usual)),
        *(Fact(name, problem, "install what is missing if you mean to use it") for name, problem in found.items() if problem),
        *as_set,
    ]


def _problem(path: Path) -> str:
    """Why a shared library does not load; "" if it does."""
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        return str(error).replace("cannot open shared object file: No such file or directory", "missing")
    return ""
