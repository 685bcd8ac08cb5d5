"""What ``kvcore doctor`` tells of NIXL on this host. Loads the library, and starts nothing."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from kvcore import BackendLoadError
from kvcore.hookspecs import Fact
from kvcore_nixl import native


def facts() -> list[Fact]:
    """The engine, its plugins with the libraries that some of them miss, and the transports that UCX has here."""
    try:
        library, version = native.load()
    except BackendLoadError as error:
        return [Fact("engine", "missing", str(error))]
    package = str(library.nixl_agent.__module__).partition(".")[0]
    site = Path(sys.modules[package].__file__ or "").parent.parent
    paths = [*site.glob(f".{package}*/plugins/libplugin_*.so"), *site.glob(f"{package}.libs/ucx/libuct_cuda.so*")]
    found = {path.name.partition(".")[0]: _problem(path) for path in sorted(paths)}
    return [
        Fact("engine", f"NIXL {version}"),
        Fact("plugins", ", ".join(name[10:] for name, problem in found.items() if name.startswith("libplugin_") and not problem)),
        Fact("transports", ", ".join(["tcp", "shared memory", *(f"rdma on {device}" for device in native.rdma_devices())])),
        *(Fact(name, problem, "install what is missing if you mean to use it") for name, problem in found.items() if problem),
    ]


def _problem(path: Path) -> str:
    """Why a shared library does not load; "" if it does."""
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        return str(error).replace("cannot open shared object file: No such file or directory", "missing")
    return ""
