"""What ``kvcore doctor`` tells of NIXL on this host. Loads the library, and starts nothing."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from kvcore import BackendLoadError
from kvcore.hookspecs import Fact
from kvcore_nixl import native

GPU_MODULE = "libuct_cuda"
"""The part of UCX that moves GPU memory."""


def facts() -> list[Fact]:
    """The engine, its plugins with the libraries that some of them miss, and the transports that UCX can use here."""
    os.environ.setdefault("UCX_MODULES", "^ib")  # nothing is started here
    try:
        library, version = native.load()
    except BackendLoadError as error:
        return [Fact("engine", "missing", str(error))]
    libraries = _libraries(str(library.nixl_agent.__module__).partition(".")[0])
    problems = {name: problem for name, path in libraries.items() if (problem := _problem(path))}
    plugins = {name.removeprefix("libplugin_"): problems.get(name, "") for name in libraries if name.startswith("libplugin_")}
    found = [Fact("engine", f"NIXL {version}"), Fact("plugins", ", ".join(name for name, problem in plugins.items() if not problem))]
    broken = [f"{name} ({problem})" for name, problem in plugins.items() if problem]
    if broken:
        found.append(Fact("plugins that do not load", ", ".join(broken), "install what they miss if you mean to use one"))
    return [*found, _transports(problems.get(GPU_MODULE, "") if GPU_MODULE in libraries else "not in this wheel")]


def _transports(no_gpu: str) -> Fact:
    devices = native.rdma_devices()
    gpu = "no GPU memory" if no_gpu else "GPU memory"
    rdma = f"rdma ({', '.join(devices)})" if devices else "no rdma"
    advice = f"GPU memory: {no_gpu}" if no_gpu else ""
    return Fact("UCX transports", f"tcp, shared memory, {rdma}, {gpu}", advice)


def _libraries(package: str) -> dict[str, Path]:
    """NIXL's plugins, and the GPU module of its UCX, by name."""
    site = Path(native.importlib.import_module(package).__file__ or "").parent.parent
    paths = [*site.glob(f".{package}*/plugins/libplugin_*.so"), *site.glob(f"{package}.libs/ucx/{GPU_MODULE}.so*")]
    return {path.name.partition(".")[0]: path for path in sorted(paths)}


def _problem(path: Path) -> str:
    """Why a shared library does not load; "" if it does."""
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        return str(error).partition(": cannot open")[0] + " is missing" if "cannot open" in str(error) else str(error)
    return ""
