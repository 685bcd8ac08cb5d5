"""The memfabric library: found, checked, loaded, started and stopped; what its codes mean, and what a doctor sees."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
import random
import re
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcore.addresses import Address, own_address
from kvcore.environment import set_variables, variables
from kvcore.errors import BackendLoadError, cause, one_line
from kvcore.hookspecs import Fact, OpenContext
from kvcore.memory import Region
from kvcore_ascend.options import ERRORS, AscendOptions

PACKAGE = "memfabric_hybrid"
OLDEST = [1, 3]  # before that all engines needed one store, served by somebody
INSTALL = "pip install 'memfabric_hybrid>=1.3,<2'"
CALLS = ("initialize", "unInitialize", "get_rpc_port", "batch_register_memory", "unregister_memory", "batch_transfer_sync_write")
MEMORY = {"sdma": "npu", "host_rdma": "cpu", "device_rdma": "npu", "device_urma": "npu", "device_uboe": "npu"}
ROLES = {"prefill": ("Prefill",), "decode": ("Decode",), "both": ("Prefill", "Decode")}
"""The engines of a side. One writes to engines of the other role, and only a "Decode" serves the store that others find it by."""
DONE, LOST_SIGHT, REFUSED = 0, -2, -2000
CODES = {
    -1: "failed",
    LOST_SIGHT: "an address was not understood",
    -6: "a library is missing",
    REFUSED: "invalid argument, nothing was begun",
}
BLOCK = 2 << 20
"""What memfabric rounds registered memory to."""
LOG = "memfabric's own lines on stdout (all with the option log_level=0) and in /var/log/memfabric_hybrid"
DRIVER = ("/usr/local/Ascend/driver/version.info", "/etc/ascend_install.info")
CANN = "install CANN, and source its set_env.sh"
LIBRARIES = {
    "libascend_hal.so": "install the Ascend driver, and add its lib64/driver to LD_LIBRARY_PATH", "libruntime.so": CANN, "libra.so": CANN,
    "libtsdclient.so": CANN, "libdcmi.so": "install the Ascend driver", "libhccl.so": CANN,
}  # fmt: skip
RDMA_LIBRARIES = {
    "libboundscheck.so": "add the folder lib of the package memfabric_hybrid to LD_LIBRARY_PATH",
    "libibverbs.so": "apt install libibverbs-dev, or link libibverbs.so to libibverbs.so.1",
}
PORTS, RANKS = range(12000, 32000), 64  # where a nic's ports may begin; what the highest rank of an engine adds to them

_taken = threading.Lock()


def load() -> tuple[Any, str]:
    """The library's module and version; ``BackendLoadError`` if there is none, or one that lacks a call."""
    try:
        version = importlib.metadata.version(PACKAGE)
        library = importlib.import_module(PACKAGE)
        library.set_log_level(ERRORS)
    except Exception as error:
        raise BackendLoadError(f"backend 'ascend' cannot load {PACKAGE} ({cause(error)}); install it: {INSTALL}") from error
    engine = getattr(library, "TransferEngine", None)
    lacks = "".join(f", which lacks {name}" for name in CALLS if not hasattr(engine, name))
    if lacks or [int(part) for part in re.findall(r"\d+", version)[:2]] < OLDEST:
        raise BackendLoadError(f"backend 'ascend' needs {PACKAGE} 1.3 or newer, and this is {version}{lacks}; upgrade: {INSTALL}")
    return library, version


def start(options: AscendOptions, context: OpenContext) -> tuple[list[Any], str]:
    """The side's engines, and the session that peers write to, "" if none does. ``BackendLoadError`` with what is missing."""
    if not _taken.acquire(blocking=False):
        told = "memfabric has one engine in a process, and another manager has it, or its engine has not ended"
        raise BackendLoadError(f"backend 'ascend': {told}; close that manager first, or use another process")
    engines: list[Any] = []
    try:
        set_variables("ascend", options.environment, context.logger)
        library, version = load()
        library.set_log_level(options.log_level)
        # memfabric resolves no names, and looks for a minute for an address that is not here.
        host = str(Address(own_address("ascend", context.host), 0)).removesuffix(":0")
        for role in ROLES[context.side]:
            engine = library.TransferEngine()
            operation = getattr(library.TransDataOpType, options.protocol.upper())
            nic = options.nic or (_free_nic(host) if options.protocol == "host_rdma" else "")
            if code := engine.initialize("", f"{host}:0", role, options.device, operation, "Decode", nic):
                raise BackendLoadError(_not_started(options, f"at {host} {nic}".rstrip(), code))
            engines.append(engine)
        session = f"{host}:{engine.get_rpc_port()}" if role == "Decode" else ""  # known only now
        context.logger.info("memfabric %s with protocol %s as %s", version, options.protocol, session or "a writer")
        return engines, session
    except BaseException:
        stop(engines)
        raise


def stop(engines: Sequence[Any]) -> None:
    """End the engines of this process, which takes seconds, and for ever if a peer stands still."""
    for engine in engines:
        engine.unInitialize()
    _taken.release()


def _free_nic(host: str) -> str:
    """A place for host_rdma: engines of one host that begin at the same port take it from each other."""
    for port in random.sample(PORTS, 100):
        try:
            for each in (port, port + RANKS):
                with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                    probe.bind((host.strip("[]"), each))
        except OSError:
            continue
        return f"tcp://{host}:{port}"
    raise BackendLoadError(f"backend 'ascend' finds no free port on {host}; free some, or give the option nic")


def _not_started(options: AscendOptions, where: str, code: int) -> str:
    lacks = "; ".join(f"{fact.name}: {fact.value}, {fact.advice}" for fact in _needs(options.protocol) if fact.advice)
    remedy = f"here {lacks}" if lacks else f"check the options protocol and device, and see {LOG}"
    asked = f"protocol {options.protocol!r}, device {options.device}"
    return f"backend 'ascend': no engine with {asked} starts {where} ({meaning(code)}); {remedy}"


def blocks(regions: Sequence[Region]) -> list[tuple[int, int]]:
    """The memory that these regions lie in, as memfabric rounds it: start and bytes, and none of it twice."""
    found: list[tuple[int, int]] = []
    for region in sorted(regions, key=lambda one: one.ptr):
        start, end = region.ptr // BLOCK * BLOCK, -(-(region.ptr + region.nbytes) // BLOCK) * BLOCK
        if found and start < sum(found[-1]):
            start, last = found.pop()
            end = max(end, start + last)
        found.append((start, end - start))
    return found


def meaning(code: int) -> str:
    """A code of the engine with what it says."""
    return f"code {code}: {CODES.get(code, 'unknown')}"


def facts() -> list[Fact]:
    """The library found, and what of driver, CANN and libraries it will need. Starts nothing."""
    try:
        found = [Fact("engine", f"memfabric {load()[1]}")]
    except BackendLoadError as error:
        found = [Fact("engine", "missing", str(error))]
    return found + _needs("host_rdma") + variables("MF_", "ASCEND_MF_", "ASCEND_RT_")


def _needs(protocol: str) -> list[Fact]:
    """What the engine looks for when it starts, in its order."""
    driver = next((path for path in DRIVER if os.access(path, os.R_OK)), "")
    home, acl = os.environ.get("ASCEND_HOME_PATH", ""), "lib64/libascendcl.so"
    told = "not set" if not home else home if Path(home, acl).exists() else f"{home} without {acl}"
    wanted = LIBRARIES | (RDMA_LIBRARIES if protocol == "host_rdma" else {})
    return [
        Fact("driver", driver or f"not in {DRIVER[0]}", "" if driver else "install the Ascend driver"),
        Fact("ASCEND_HOME_PATH", told, "" if told == home else CANN),
        *(Fact(name, problem or "found", problem and advice) for name, advice in wanted.items() for problem in [_problem(name)]),
    ]


def _problem(library: str) -> str:
    """Why a shared library does not load; "" if it does."""
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return one_line(error).removeprefix(f"{library}: ")
    return ""
