"""The environment in which the real engines run on the shims that ``build.sh OUT`` made, for processes to be started in (test-only).

    eval "$(python environment.py mori OUT)"        # or sdma, host_rdma: Ascend's ways to move bytes

The loader reads its variables when a process starts, so they do nothing for one that runs.
"""

from __future__ import annotations

import importlib.util
import os
import random
import shlex
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

ENGINES = ("mori", "sdma", "host_rdma")
MEMORY_TYPE = {"sdma": "8", "host_rdma": "0"}
"""What the fake driver calls every address: SDMA registers device memory, HOST_RDMA host memory."""
STAND_IN = Path(__file__).resolve().parent / "stand-in"
"""Holds a torch, which mori imports."""
BASE_PORTS = range(12000, 32000)
SENDER = 64
"""Ranks of senders begin about here; an engine listens at the port of its nic plus its rank."""


def changes(engine: str, shims: Path, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables to set."""
    shims = shims.resolve()
    if engine == "mori":
        torch = {} if importlib.util.find_spec("torch") else {"PYTHONPATH": _prepended(base, "PYTHONPATH", STAND_IN)}
        return torch | {"LD_LIBRARY_PATH": _prepended(base, "LD_LIBRARY_PATH", shims / "mori", shims / "verbs")}
    spec = importlib.util.find_spec("memfabric_hybrid")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("memfabric_hybrid is not installed")
    home, own = shims / "ascend" / "home", Path(spec.submodule_search_locations[0]) / "lib"  # one library of the wheel needs its neighbours
    return {
        "KV_SHIM_ROOT": str(shims / "ascend" / "root"),
        "KV_MEMTYPE": MEMORY_TYPE[engine],
        "ASCEND_HOME_PATH": str(home),
        "LD_PRELOAD": _prepended(base, "LD_PRELOAD", shims / "ascend" / "libpath_redirect.so"),
        "LD_LIBRARY_PATH": _prepended(base, "LD_LIBRARY_PATH", home / "lib64", shims / "verbs", own),
    }


def free_nic() -> str:
    """A ``nic`` for HOST_RDMA of a process's own: with the default, two receivers on one host take each other's port."""
    for port in random.sample(BASE_PORTS, 100):
        try:
            for each in (port, port + SENDER):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", each))
        except OSError:
            continue
        return f"tcp://127.0.0.1:{port}"
    raise RuntimeError("no free port")


def _prepended(base: Mapping[str, str], variable: str, *entries: Path) -> str:
    return ":".join([*map(str, entries), *filter(None, [base.get(variable)])])


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ENGINES:
        sys.exit(f"usage: environment.py {'|'.join(ENGINES)} OUT")
    for name, value in changes(sys.argv[1], Path(sys.argv[2])).items():
        print(f"export {name}={shlex.quote(value)}")
