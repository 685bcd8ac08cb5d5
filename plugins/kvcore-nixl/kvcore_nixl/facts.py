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
    plugins = {path.stem.removeprefix("libplugin_"): _problem(path) for path in sorted(site.glob(f".{package}*/plugins/libplugin_*.so"))}
    gpu = next(map(_problem, site.glob(f"{package}.libs/ucx/libuct_cuda.so*")), "")
    rdma = ", ".join(native.rdma_devices())
    return [
        Fact("engine", f"NIXL {version}"),
        Fact("plugins", ", ".join(name for name, problem in plugins.items() if not problem)),
        *(Fact(f"plugin {name}", problem, "install it if you mean to use this plugin") for name, problem in plugins.items() if problem),
        Fact("transports of UCX", f"tcp, shared memory{f', rdma ({rdma})' if rdma else ''}"),
        *([Fact("GPU memory", gpu, "install the driver")] if gpu else []),
    ]


def _problem(path: Path) -> str:
    """Why a shared library does not load; "" if it does."""
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        return str(error).replace("cannot open shared object file: No such file or directory", "missing")
    return ""
