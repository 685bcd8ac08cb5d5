"""The Mooncake library: found, checked, loaded and started in an environment in which it behaves; and what its codes mean."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import json
import logging
import os
import re
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from kvcore.addresses import Address
from kvcore.errors import BackendLoadError, ConfigError, cause
from kvcore.hookspecs import Fact, OpenContext
from kvcore_mooncake.options import P2P, MooncakeOptions

OLDEST = [0, 3, 13]  # since then a TCP write is done when its bytes are in place (R6), and connections are used again
CALLS = ("batch_register_memory", "batch_unregister_memory", "send_probe", "transfer_submit_write", "transfer_check_status")
INSTALL = "pip install kvcore-mooncake[cpu] (or [cuda], [cuda13], [rocm], [npu], [efa])"
DEBIAN = {"libibverbs": "libibverbs1", "librdmacm": "librdmacm1", "libnuma": "libnuma1", "libcurl": "libcurl4"}
MEMORY = {"SUPPORT_CUDA": ("cuda",), "SUPPORT_HIP": ("cuda", "rocm")}
CODES = {-1: "invalid argument", -3: "not registered", -7: "overlaps what is registered", -101: "unknown name", -102: "no connection"}
NEEDED = {"MC_TCP_ENABLE_CONNECTION_POOL": "1", "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535", "MC_TCP_PROTO": "2"}
OURS = "KVCORE_MOONCAKE_SET"  # variables that were set here, also if a process inherits them
TIMEOUTS = ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC")
RDMA_DEVICES = Path("/sys/class/infiniband")

_starting = threading.Lock()


def load() -> tuple[ModuleType, str]:
    """The library's module, and the name and version it was installed as; ``BackendLoadError`` with what to do if it is not usable."""
    found = installed()
    label = " and ".join(f"{name} {version}" for name, version in found.items()) or "Mooncake"
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # read when the library is loaded
    try:
        library = importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise BackendLoadError(f"backend 'mooncake' cannot load {label} ({cause(error)}); {_remedy(str(error))}") from error
    lacks = "".join(f", which lacks {name}" for name in CALLS if not hasattr(library.TransferEngine, name))
    if lacks or any(list(map(int, re.findall(r"\d+", version)[:3])) < OLDEST for version in found.values()):
        raise BackendLoadError(f"backend 'mooncake' needs Mooncake 0.3.13 or newer, and this is {label}{lacks}; upgrade: {INSTALL}")
    return library, label


@functools.cache
def installed() -> dict[str, str]:
    """The distributions that have the library, and their versions. Its wheels share one package, so of several the last one prevails."""
    found = importlib.metadata.packages_distributions().get("mooncake", [])
    return {name: importlib.metadata.version(name) for name in sorted(set(found))}


def _remedy(error: str) -> str:
    """What to do about an import that failed."""
    for library, package in DEBIAN.items():
        if f"{library}.so" in error:
            return f"Debian has it in {package}: apt install {package}"
    if "cannot open shared object file" in error:
        return f"it comes with the driver that this wheel is made for: install that, or another wheel: {INSTALL}"
    return f"install one of its wheels: {INSTALL}"


def memory_kinds(library: ModuleType) -> set[str]:
    """Kinds of memory that this build moves. What torch for ROCm calls cuda is in the hands of ROCm."""
    return {"cpu"}.union(*(kinds for flag, kinds in MEMORY.items() if getattr(library, flag, False)))


def rdma_devices() -> str:
    """RDMA devices of this host, "" for none."""
    return ", ".join(sorted(entry.name for entry in RDMA_DEVICES.iterdir())) if RDMA_DEVICES.is_dir() else ""


def start(options: MooncakeOptions, context: OpenContext) -> tuple[ModuleType, Any, str]:
    """The library, an engine, and the name that peers open it under. Raises ``BackendLoadError`` or ``ConfigError`` saying what hinders."""
    host, alone = str(Address(context.host, 1)).removesuffix(":1"), options.metadata_server == P2P
    with _starting:
        _prepare_environment(_wanted(options, context.host), context.logger)
        library, version = load()
        engine = library.TransferEngine()
        code = engine.initialize(host if alone else context.instance, options.metadata_server, options.protocol, ",".join(options.devices))
    if code:
        asked, devices = options.model_dump(exclude={"environment"}), rdma_devices() or "no RDMA device"
        raise BackendLoadError(f"backend 'mooncake': no engine starts with {asked} (code {code}; here is {devices}); correct these options")
    session = f"{host}:{engine.get_rpc_port()}" if alone else context.instance
    context.logger.info("%s with protocol %s as %s", version, options.protocol, session)
    return library, engine, session


def _wanted(options: MooncakeOptions, host: str) -> dict[str, str]:
    """Variables that this backend needs, under those that the options name."""
    address = {} if options.metadata_server == P2P else {"MC_TCP_BIND_ADDRESS": host}
    wanted = address | ({"MC_USE_IPV6": "1"} if ":" in host else {})
    if options.protocol == "tcp":  # without the first, an RDMA device would be taken where there is one
        wanted |= {"MC_FORCE_TCP": "1"} | NEEDED | dict.fromkeys(TIMEOUTS, str(options.timeout_s))
    if options.protocol == "rdma":  # without it, TCP would be taken where there is no device
        wanted["MC_FORCE_HCA"] = "1"
    return wanted | options.environment


def _prepare_environment(wanted: dict[str, str], log: logging.Logger) -> None:
    """Set what is wanted, in place of what an earlier engine here wanted. What the process has set itself stays, or is an error."""
    ours: dict[str, str] = json.loads(os.environ.get(OURS, "{}"))
    for name in set(ours) - set(wanted):
        if ours.pop(name) == os.environ.get(name):
            del os.environ[name]
    for name, value in wanted.items():
        present = os.environ.get(name)
        if present is None or present == ours.get(name) != value:
            os.environ[name] = ours[name] = value
        elif present != value:
            log.info("%s=%s of the process wins over %s", name, present, value)
    os.environ[OURS] = json.dumps(ours)
    for name, value in NEEDED.items():
        if os.environ.get(name, value) != value:
            raise ConfigError(f"{name}={os.environ[name]} has writes stall, fail, or called done before their bytes are in place; unset it")
    if "MC_FORCE_TCP" in os.environ and "MC_FORCE_HCA" in os.environ:
        raise ConfigError("MC_FORCE_TCP and MC_FORCE_HCA (protocol 'rdma') exclude each other; unset one, or choose the other protocol")


def meaning(code: int) -> str:
    """A code of the engine with what it says."""
    return f"code {code}: {CODES.get(code, 'see its own log')}"


def facts() -> list[Fact]:
    """What of the library is installed, whether it can be loaded, and what it can use here. Never raises."""
    names = [f"{name} {version}" for name, version in installed().items()]
    advice = INSTALL if not names else "they share one package: uninstall all, and install one" if len(names) > 1 else ""
    found = [Fact("engine", ", ".join(names) or "not installed", advice)]
    try:
        kinds = ", ".join(sorted(memory_kinds(load()[0])))
    except BackendLoadError as error:
        return [*found, Fact("library", "cannot be loaded", str(error))]
    devices = rdma_devices()
    rdma = Fact("transports", f"tcp, rdma ({devices})") if devices else Fact("transports", "tcp", f"rdma needs a device in {RDMA_DEVICES}")
    variables = ", ".join(f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("MC_"))
    return [*found, Fact("memory", kinds), rdma, Fact("environment", variables)]
