"""The Mooncake library: found, checked, loaded and started in an environment in which it behaves; and what its codes mean."""

from __future__ import annotations

import functools
import logging
import os
import re
import threading
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from kvcore.addresses import Address
from kvcore.environment import set_variables, variables
from kvcore.errors import BackendLoadError, BackendOptionsError, ConfigError, cause, one_line
from kvcore.hookspecs import Fact, OpenContext
from kvcore_mooncake.options import P2P, MooncakeOptions

OLDEST = [0, 3, 13]  # since then a TCP write is done when its bytes are in place (R6), and connections are used again
CALLS = ("batch_register_memory", "batch_unregister_memory", "send_probe", "transfer_submit_write", "transfer_check_status")
BUILD = "pip install './plugins/kvcore-mooncake[{}]' in a checkout of kvcore"
INSTALL = BUILD.format("cpu") + " (or [cuda], [cuda13], [rocm], [npu], [efa])"
DEBIAN = {"libibverbs": "libibverbs1", "librdmacm": "librdmacm1", "libnuma": "libnuma1", "libcurl": "libcurl4"}
MEMORY = {"SUPPORT_CUDA": ("cuda",), "SUPPORT_HIP": ("cuda", "rocm")}
PROTOCOLS = {"SUPPORT_HIP": "hip", "SUPPORT_MNNVL": "nvlink", "SUPPORT_INTRA_NVLINK": "nvlink_intra", "SUPPORT_MUSA": "musa"}
CODES = {-1: "invalid argument", -3: "not registered", -7: "overlaps what is registered", -101: "unknown name", -102: "no connection"}
NEEDED = {"MC_TCP_ENABLE_CONNECTION_POOL": "1", "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535", "MC_TCP_PROTO": "2"}
TIMEOUTS = ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC")
RDMA_DEVICES = Path("/sys/class/infiniband")

_starting = threading.Lock()


def load() -> tuple[ModuleType, str]:
    """The library's module, and the name and version it was installed as; ``BackendLoadError`` with what to do if it is not usable."""
    label = "Mooncake"
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # read when the library is loaded
    try:
        found = installed()
        label = " and ".join(f"{name} {version}" for name, version in found.items()) or label
        library = import_module("mooncake.engine")
    except Exception as error:
        raise BackendLoadError(f"backend 'mooncake' cannot load {label} ({cause(error)}); {_remedy(str(error))}") from error
    lacks = "".join(f", which lacks {name}" for name in CALLS if not hasattr(getattr(library, "TransferEngine", None), name))
    if lacks or any(list(map(int, re.findall(r"\d+", version)[:3])) < OLDEST for version in found.values()):
        raise BackendLoadError(f"backend 'mooncake' needs Mooncake 0.3.13 or newer, and this is {label}{lacks}; upgrade: {INSTALL}")
    return library, label


@functools.cache
def installed() -> dict[str, str]:
    """The distributions that have the library, and their versions. Its wheels share one package, so of several the last one prevails."""
    return {name: str(metadata.version(name)) for name in sorted(set(metadata.packages_distributions().get("mooncake", [])))}


def _remedy(error: str) -> str:
    if package := next((package for library, package in DEBIAN.items() if f"{library}.so" in error), ""):
        return f"Debian has it in {package}: apt install {package}"
    if "cannot open shared object file" in error:
        return f"it comes with the driver that this wheel is made for: install that; or uninstall the wheel, then {INSTALL}"
    return ("" if error == "No module named 'mooncake'" else "uninstall what there is of it, and ") + f"install it: {INSTALL}"


def able(library: ModuleType) -> tuple[set[str], list[str], list[str]]:
    """Kinds of memory that this build moves; its protocols that can be used here, any other being TCP to the engine; RDMA devices.
    What torch for ROCm calls cuda is in the hands of ROCm. A build for EFA has that in place of RDMA."""
    has = {flag for flag in vars(library) if flag.startswith("SUPPORT_") and getattr(library, flag)}
    devices = sorted(os.listdir(RDMA_DEVICES)) if RDMA_DEVICES.is_dir() else []
    wide = ["efa" if "SUPPORT_EFA" in has else "rdma"] if devices else []
    protocols = ["tcp", *wide, *(name for flag, name in PROTOCOLS.items() if flag in has)]
    return {"cpu"}.union(*(kinds for flag, kinds in MEMORY.items() if flag in has)), protocols, devices


def start(options: MooncakeOptions, context: OpenContext) -> tuple[ModuleType, Any, str]:
    """The library, an engine, and the name that peers open it under. Raises ``BackendLoadError`` or ``ConfigError`` saying what hinders."""
    host, alone = str(Address(context.host, 1)).removesuffix(":1"), options.metadata_server == P2P
    with _starting:
        _prepare_environment(_wanted(options, context.host), context.logger)
        library, version = load()
        _check(options, library)
        engine = library.TransferEngine()
        code = engine.initialize(host if alone else context.instance, options.metadata_server, options.protocol, ",".join(options.devices))
    if code:
        told = f"no engine starts with {options.model_dump(exclude={'environment'})} (code {code}); correct these options, or free ports"
        raise BackendLoadError(f"backend 'mooncake': {told} of 15000 to 17000, or of what MC_MIN_RPC_PORT and MC_MAX_RPC_PORT say instead")
    session = f"{host}:{engine.get_rpc_port()}" if alone else context.instance
    context.logger.info("%s with protocol %s as %s", version, options.protocol, session)
    return library, engine, session


def _check(options: MooncakeOptions, library: ModuleType) -> None:
    """``BackendOptionsError`` for a protocol, or devices, that are not here: the engine would do without."""
    _, protocols, devices = able(library)
    asked = [f"protocol {options.protocol!r}", *(f"device {name!r}" for name in options.devices if options.protocol != "tcp")]
    found = [*(f"protocol {name!r}" for name in protocols), *(f"device {name!r}" for name in devices)]
    if absent := ", ".join(one for one in asked if one not in found):
        raise BackendOptionsError(f"backend 'mooncake' finds no {absent}, only {', '.join(found)}; correct that option, or see its README")


def _wanted(options: MooncakeOptions, host: str) -> dict[str, str]:
    """Variables that this backend needs, under those that the options name. Any protocol may come down to TCP."""
    force = {"tcp": {"MC_FORCE_TCP": "1"}, "rdma": {"MC_FORCE_HCA": "1"}}.get(options.protocol, {})  # else Mooncake takes what it finds
    address = ({} if options.metadata_server == P2P else {"MC_TCP_BIND_ADDRESS": host}) | ({"MC_USE_IPV6": "1"} if ":" in host else {})
    return force | address | NEEDED | dict.fromkeys(TIMEOUTS, str(options.timeout_s)) | options.environment


def _prepare_environment(wanted: dict[str, str], log: logging.Logger) -> None:
    """Set what is wanted. What the process has set itself stays, or is an error."""
    set_variables("mooncake", wanted, log)
    if wrong := " and ".join(f"{name}={os.environ[name]}" for name, value in NEEDED.items() if os.environ[name] != value):
        raise ConfigError(f"with {wrong} writes stall, fail, or are called done before their bytes are in place; unset it")
    if "MC_FORCE_TCP" in os.environ and "MC_FORCE_HCA" in os.environ:
        raise ConfigError("MC_FORCE_TCP and MC_FORCE_HCA (protocol 'rdma') exclude each other; unset one, or choose the other protocol")


def meaning(code: int) -> str:
    """A code of the engine with what it says."""
    return f"code {code}: {CODES.get(code, 'see its own log')}"


def facts() -> list[Fact]:
    """What of the library is installed, whether it can be loaded, and what it can use here. Never raises."""
    found, told = [], variables("MC_")  # those of the process, before it is loaded
    try:
        names = [f"{name} {version}" for name, version in installed().items()]
        advice = INSTALL if not names else "they share one package: uninstall all, and install one" if len(names) > 1 else ""
        found.append(Fact("engine", ", ".join(names) or "missing", advice))
        memory, protocols, devices = able(load()[0])
    except Exception as error:
        return found if found and not names else [*found, Fact("library", "cannot be loaded", one_line(error))]
    here = f"{', '.join(protocols)} ({', '.join(devices) or 'no RDMA device'})"
    transports = Fact("transports", here, "" if devices else f"rdma needs a device in {RDMA_DEVICES}")
    return [*found, Fact("memory", ", ".join(sorted(memory))), transports, *told]
