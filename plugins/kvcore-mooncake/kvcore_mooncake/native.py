"""The Mooncake library: found, checked, loaded and started in an environment in which it behaves; and what its codes mean."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from kvcore import BackendLoadError, ConfigError
from kvcore.addresses import Address
from kvcore.hookspecs import Fact, OpenContext
from kvcore_mooncake.options import P2P, MooncakeOptions

WHEELS = ("-non-cuda", "", "-cuda13", "-rocm", "-npu", "-musa", "-efa", "-efa-cuda13", "-efa-non-cuda")
"""Ends of the names under which the library is published."""
OLDEST = (0, 3, 13)
"""From here on a TCP write is reported done when its bytes are in place (R6), and connections are reused."""
CALLS = (
    "initialize", "get_rpc_port", "batch_register_memory", "batch_unregister_memory", "register_memory", "unregister_memory",
    "send_probe", "transfer_submit_write", "transfer_check_status",
)  # fmt: skip
INSTALL = "pip install kvcore-mooncake[cpu] (or [cuda], [cuda13], [rocm], [npu], [efa])"
DEBIAN = {"libibverbs": "libibverbs1", "librdmacm": "librdmacm1", "libnuma": "libnuma1", "libcurl": "libcurl4"}
DRIVERS = {
    "libcuda": "CUDA",
    "libamdhip": "ROCm",
    "libhsa": "ROCm",
    "libascend": "CANN",
    "libhccl": "CANN",
    "libmusa": "MUSA",
    "libefa": "EFA",
}
CODES = {
    -1: "invalid argument", -2: "too many requests", -3: "not registered", -6: "no such device", -7: "overlaps other registered memory",
    -101: "its name is unknown", -102: "no connection", -103: "not an engine", -104: "refused", -200: "metadata", -202: "no device took it",
    -302: "memory",
}  # fmt: skip
RDMA_DEVICES = Path("/sys/class/infiniband")

_starting = threading.Lock()
_ours: dict[str, str] = {}
"""Variables that were set here, and not by the process itself."""


def load() -> tuple[ModuleType, str]:
    """The library's module, and the name and version it was installed as; ``BackendLoadError`` with what to do if it is not usable."""
    found = installed()
    label = " and ".join(f"{name} {version}" for name, version in found.items()) or "Mooncake of unknown version"
    try:
        library = importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise BackendLoadError(f"backend 'mooncake' cannot load {label} ({_one_line(error)}); {_remedy(error)}") from error
    missing = [name for name in CALLS if not hasattr(library.TransferEngine, name)]
    if missing or any(_numbers(version) < OLDEST for version in found.values()):
        what = f"{label} lacks {', '.join(missing)}" if missing else f"this is {label}"
        raise BackendLoadError(f"backend 'mooncake' needs Mooncake {'.'.join(map(str, OLDEST))} or newer, and {what}; upgrade: {INSTALL}")
    return library, label


def installed() -> dict[str, str]:
    """The library's distributions that are installed, and their versions. Two share one package, so that the last one prevails."""
    found = {}
    for end in WHEELS:
        try:
            found[f"mooncake-transfer-engine{end}"] = importlib.metadata.version(f"mooncake-transfer-engine{end}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _remedy(error: ImportError) -> str:
    """What to do about an import that failed."""
    library = re.match(r"(lib[^:\s]+): cannot open shared object file", str(error))
    if library is None:
        other = "uninstall what else is called mooncake, and " if error.name == "mooncake.engine" else ""
        return f"{other}install one: {INSTALL}"
    for start, package in DEBIAN.items():
        if library[1].startswith(start):
            return f"{library[1]} is in Debian's package {package}: apt install {package}"
    for start, driver in DRIVERS.items():
        if library[1].startswith(start):
            return f"{library[1]} is of {driver}: install {driver} in the version this wheel is made for, or another wheel: {INSTALL}"
    return f"install what has {library[1]}, or another wheel: {INSTALL}"


def memory_kinds(library: ModuleType) -> set[str]:
    """Kinds of memory that this build moves. What torch for ROCm calls cuda is in the hands of ROCm."""
    flags = {"SUPPORT_CUDA": {"cuda"}, "SUPPORT_HIP": {"cuda", "rocm"}}
    return {"cpu"}.union(*(kinds for flag, kinds in flags.items() if getattr(library, flag, False)))


def rdma_devices() -> list[str]:
    """RDMA devices of this host."""
    return sorted(entry.name for entry in RDMA_DEVICES.iterdir()) if RDMA_DEVICES.is_dir() else []


def start(library: ModuleType, options: MooncakeOptions, context: OpenContext) -> tuple[Any, str]:
    """An engine and the name that peers open it under. ``ConfigError`` if the process's environment forbids what the options ask for,
    ``BackendLoadError`` naming code and options if the engine refuses them."""
    address = Address(context.host, 1)
    host = f"[{address.host}]" if address.ipv6 else address.host
    with _starting:
        _prepare_environment(_wanted(options, address), context.logger)
        _check_environment(options)
        engine = library.TransferEngine()
        name = host if options.metadata_server == P2P else context.instance
        code = engine.initialize(name, options.metadata_server, options.protocol, ",".join(options.devices))
    if code:
        found = ", ".join(rdma_devices()) or "none"
        raise BackendLoadError(
            f"backend 'mooncake': the engine did not start with protocol {options.protocol!r}, metadata server {options.metadata_server!r} "
            f"and devices {list(options.devices)} ({meaning(code)}; RDMA devices here: {found}); correct these options, and see its own log"
        )
    return engine, f"{host}:{engine.get_rpc_port()}" if options.metadata_server == P2P else name


def _wanted(options: MooncakeOptions, address: Address) -> dict[str, str]:
    """Variables that this backend needs, under those that the options name."""
    wanted = {"MC_LOG_LEVEL": "ERROR"} | ({"MC_USE_IPV6": "1"} if address.ipv6 else {})
    if options.metadata_server != P2P:
        wanted["MC_TCP_BIND_ADDRESS"] = address.host
    if options.protocol == "tcp":
        wanted |= {
            "MC_FORCE_TCP": "1",  # where there is an RDMA device, the engine would take that instead
            "MC_TCP_ENABLE_CONNECTION_POOL": "1",  # else each descriptor is a connection, and a thousand of them take seconds
            "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
            "MC_TCP_LANES_PER_PEER": "4",
            "MC_TCP_PROGRESS_TIMEOUT_SEC": str(options.timeout_s),
            "MC_TCP_STATUS_TIMEOUT_SEC": str(options.timeout_s),
        }
    if options.protocol == "rdma":
        wanted["MC_FORCE_HCA"] = "1"  # without a device the engine would take TCP instead
    return wanted | options.environment


def _prepare_environment(wanted: Mapping[str, str], log: logging.Logger) -> None:
    """Set what is wanted, in place of what an earlier engine here wanted. What the process has set itself stays."""
    for name in set(_ours) - set(wanted):
        if _ours.pop(name) == os.environ.get(name):
            del os.environ[name]
    for name, value in wanted.items():
        present = os.environ.get(name)
        if present is None or present == _ours.get(name) != value:
            os.environ[name] = _ours[name] = value
        elif present != value:
            log.info("%s=%s of the process wins over %s", name, present, value)


def _check_environment(options: MooncakeOptions) -> None:
    if os.environ.get("MC_TCP_PROTO") == "1":
        raise ConfigError("MC_TCP_PROTO=1 has the engine report writes as done before their bytes are in place; unset it")
    if options.protocol == "rdma" and "MC_FORCE_TCP" in os.environ:
        raise ConfigError("MC_FORCE_TCP is set and protocol is 'rdma'; unset it, or choose protocol 'tcp'")


def number(variable: str, default: int, most: int) -> int:
    """What the engine makes of a variable of its environment."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() and 1 <= int(text) <= most else default


def lanes() -> int:
    """Connections that the engine keeps to a peer over TCP."""
    pooled = os.environ.get("MC_TCP_ENABLE_CONNECTION_POOL", "0").lower() not in ("0", "false", "no")
    return number("MC_TCP_LANES_PER_PEER", 4, 16) if pooled else 0


def meaning(code: int) -> str:
    """A code of the engine with what it says."""
    return f"code {code}: {CODES[code]}" if code in CODES else f"code {code}"


def facts() -> list[Fact]:
    """What of the library is installed, whether it can be loaded, and what it can use here. Never raises."""
    names = [f"{name} {version}" for name, version in installed().items()]
    several = "they share one package: uninstall all, and install one" if len(names) > 1 else ""
    found = [Fact("engine", ", ".join(names) or "not installed", several or ("" if names else INSTALL))]
    try:
        library, _ = load()
    except BackendLoadError as error:
        return [*found, Fact("library", "cannot be loaded", str(error))]
    devices = rdma_devices()
    transports = f"tcp, rdma ({', '.join(devices)})" if devices else "tcp"
    found.append(Fact("transports", transports, "" if devices else f"rdma needs a device in {RDMA_DEVICES}"))
    found.append(Fact("memory", ", ".join(sorted(memory_kinds(library)))))
    set_here = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("MC_") and name not in _ours]
    return [*found, Fact("environment", ", ".join(set_here) or "no MC_ variable is set")]
