"""The mori library: found, checked and loaded, and an engine started only where that does not end the process; what a doctor sees."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import os
import resource
import socket
import traceback
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvcore import Region
from kvcore.addresses import own_address
from kvcore.environment import set_variables, variables
from kvcore.errors import BackendLoadError, BackendOptionsError, RegistrationError, cause, one_line, shown
from kvcore.hookspecs import Fact, OpenContext
from kvcore.memory import PoolGeometry
from kvcore_mori.options import MoriOptions

T = TypeVar("T")

CALLS = {
    "IOEngine": (
        "create_backend", "register_remote_engine", "deregister_remote_engine", "register_memory", "deregister_memory", "create_session",
    ),
    "IOEngineSession": ("allocate_transfer_uid", "batch_write", "alive"),
}  # fmt: skip
INSTALL = "pip install -U 'amd-mori>=1.2.4,<2' (Python 3.10 to 3.12, beside ROCm 7 and torch)"
DEBIAN = {"libibverbs": "libibverbs1", "libpci": "libpci3", "libdrm_amdgpu": "libdrm-amdgpu1", "libnuma": "libnuma1"}
VERBS, SMI = ("libibverbs.so", "libibverbs.so.1"), ("librocm_smi64.so", "librocm_smi64.so.1", "/opt/rocm/lib/librocm_smi64.so.1")
STATUS, CAP_IPC_LOCK = Path("/proc/self/status"), 14
REFUSED = "usual causes: the limit of locked memory (ulimit -l), a GPU whose memory the card does not reach (peer memory, dma-buf)"


def load() -> tuple[Any, str]:
    """The library's module and version; ``BackendLoadError`` if there is none, or one that lacks a call."""
    try:
        version = importlib.metadata.version("amd-mori")
        library = importlib.import_module("mori.io")
    except Exception as error:
        raise BackendLoadError(f"backend 'mori' cannot load mori ({cause(error)}); {_remedy(error)}") from error
    if lacks := [name for kind, names in CALLS.items() for name in names if not hasattr(getattr(library, kind, None), name)]:
        raise BackendLoadError(f"backend 'mori' needs mori 1.2.4 or newer, and mori {version} lacks {', '.join(lacks)}; upgrade: {INSTALL}")
    return library, version


def _remedy(error: Exception) -> str:
    library = str(error).partition(".so")[0]
    if library in DEBIAN:
        return f"Debian has {library} in {DEBIAN[library]}: apt install {DEBIAN[library]}"
    if "cannot open shared object file" in str(error):
        return "it is part of ROCm 7 or of what mori was built with: install that, or have LD_LIBRARY_PATH name its folder"
    return f"install it: {INSTALL}"


def start(options: MoriOptions, context: OpenContext) -> tuple[Any, Any]:
    """The library and an engine with its transport; ``BackendLoadError`` or ``ConfigError`` where mori finds nothing, or would exit."""
    devices = {"MORI_RDMA_DEVICES": ",".join(options.devices)} if options.devices else {}
    set_variables("mori", {"MORI_IO_LOG_LEVEL": "error", **devices, **options.environment}, context.logger)
    library, version = load()
    host, here = own_address("mori", context.host, socket.AF_INET), rdma_devices()  # mori gives it to peers, and exits if it is not here
    if absent := [name for name in options.devices if name not in here]:
        raise BackendOptionsError(
            f"backend 'mori': no RDMA device is called {', '.join(absent)}; devices may name {', '.join(here) or 'none'}"
        )
    if missing := next((one for one in needs() if one.advice and (one.name != "rdma" or options.transport == "rdma")), None):
        raise BackendLoadError(f"backend 'mori' needs {missing.name}, and finds {missing.value}; {missing.advice}")
    engine = library.IOEngine(f"{context.instance}/{uuid.uuid4().hex}", library.IOEngineConfig(host=host, port=0))
    config = library.RdmaBackendConfig(
        qp_per_transfer=options.queue_pairs, post_batch_size=options.post_batch_size or -1, num_worker_threads=options.workers,
        poll_cq_mode=getattr(library.PollCqMode, options.poll_mode.upper()), enable_notification=False,
    )  # fmt: skip
    try:
        engine.create_backend(getattr(library.BackendType, options.transport.upper()), config if options.transport == "rdma" else None)
    except Exception as error:
        remedy = f"of {', '.join(here)} bring a port up (ibv_devinfo), and see that MORI_RDMA_DEVICES names one of them or is unset"
        raise BackendLoadError(f"backend 'mori': {options.transport} does not start ({told(error)}); {remedy}") from error
    context.logger.info("mori %s with %s at %s:%d", version, options.transport, host, engine.get_engine_desc().port)
    return library, engine


def told(error: Exception) -> str:
    """An error of mori's in one line. While somebody keeps the error, it shall not keep the engine, which its frames refer to."""
    traceback.clear_frames(error.__traceback__)
    return cause(error)


def renamed(kind: type[T], packed: bytes, owner: str, key: str) -> T:
    """A descriptor of a peer's, filed under a key of this side's choice; ``ValueError`` if it is none, or another's."""
    try:
        first, *rest = msgspec.msgpack.decode(packed, type=list)
        found: Any = kind.unpack(msgspec.msgpack.encode([key, *rest]))  # type: ignore[attr-defined]
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{len(packed)} bytes are no {kind.__name__} of this mori ({cause(error)})") from error
    if not str(first).startswith(f"{owner}/") or key not in (getattr(found, "key", ""), getattr(found, "engine_key", "")):
        raise ValueError(f"a {kind.__name__} of {shown(first)} is another's")
    return found  # type: ignore[no-any-return]


def check_fit(pools: Sequence[PoolGeometry], regions: Sequence[Region], options: MoriOptions) -> None:
    """``RegistrationError`` for memory that the transport does not move, or that the kernel will not lock: mori would exit over that."""
    names = (pool.name for pool in pools for _ in pool.page_bytes)
    hosts = [name for name, one in zip(names, regions, strict=True) if one.device.startswith("cpu")]
    if hosts and options.transport == "xgmi":
        told = f"pool {hosts[0]!r} lies in host memory, and xgmi moves GPU memory only; choose transport 'rdma'"
        raise RegistrationError(f"backend 'mori': {told}")
    limit, total = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], sum(one.nbytes for one in regions)
    status = dict(line.split(":", 1) for line in STATUS.read_text(errors="replace").splitlines())
    if 0 <= limit < total and not int(status["CapEff"], 16) >> CAP_IPC_LOCK & 1:
        among = f"{total} bytes of {len(regions)} regions, the largest of {max(one.nbytes for one in regions)}"
        raise RegistrationError(f"backend 'mori': {among}, are more than the {limit} that may be locked; raise that (ulimit -l)")


def rdma_devices() -> list[str]:
    """The host's, as libibverbs lists them."""
    if (verbs := _library(*VERBS)) is None:
        return []
    verbs.ibv_get_device_list.restype, verbs.ibv_get_device_name.restype = ctypes.POINTER(ctypes.c_void_p), ctypes.c_char_p
    number = ctypes.c_int(0)
    devices = verbs.ibv_get_device_list(ctypes.byref(number))
    names = sorted(verbs.ibv_get_device_name(ctypes.c_void_p(devices[n])).decode() for n in range(number.value))
    if devices:  # none at all where the kernel has no RDMA
        verbs.ibv_free_device_list(devices)
    return names


def _gpus() -> int | None:
    """How many GPUs ROCm's management library finds; None without that library."""
    if (smi := _library(*filter(None, (os.environ.get("MORI_ROCM_SMI_PATH"), *SMI)))) is None:
        return None
    number = ctypes.c_uint32(0)
    return 0 if smi.rsmi_init(ctypes.c_uint64(0)) or smi.rsmi_num_monitor_devices(ctypes.byref(number)) else number.value


def _library(*names: str) -> ctypes.CDLL | None:
    for name in names:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    return None


def needs() -> list[Fact]:
    """What mori needs of this host beside its own libraries; with an advice where it is missing, and mori would exit or find nothing."""
    gpus, devices = _gpus(), rdma_devices()
    gpu = Fact("gpu", f"{gpus} found", "" if gpus else "let the amdgpu driver see one (/dev/kfd): else mori ends the process")
    if gpus is None:
        gpu = Fact("gpu", "no librocm_smi64", "install ROCm's rocm-smi-lib, or set MORI_ROCM_SMI_PATH to it: else mori ends the process")
    found = ", ".join(devices) or ("no device" if _library(*VERBS) else "no libibverbs.so.1")
    card = "apt install libibverbs1 ibverbs-providers; see ibv_devices; or use transport 'xgmi' for GPU memory within a host"
    return [gpu, Fact("rdma", found, "" if devices else card)]


def facts() -> list[Fact]:
    """The engine, what hinders its library, what it needs of the host, and the variables that it reads. Starts nothing."""
    found = []
    try:
        found.append(Fact("engine", f"mori {importlib.metadata.version('amd-mori')}"))
        load()
    except importlib.metadata.PackageNotFoundError:
        return [Fact("engine", "missing", INSTALL)]
    except BackendLoadError as error:
        found.append(Fact("library", "cannot be loaded", one_line(error)))
    return [*found, *needs(), *variables("MORI_")]
