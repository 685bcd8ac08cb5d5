"""Whether a process on this host is still there: the evidence that R4 asks for."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path

from kvcore.wire import Process


def this_process() -> Process:
    """This process, as one on the same host can look it up."""
    return Process(_host(), os.getpid(), _started(os.getpid()))


def known_gone(process: Process) -> bool:
    """True only if the process ran on this host, in this process namespace, and is no more. Silence is not knowledge."""
    return process.host == _host() and process.started != "" and _started(process.pid) != process.started


@functools.cache
def _host() -> str:
    """Names the running kernel and the process namespace; a restarted host is another one."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"unknown/{socket.gethostname()}/{os.getpid()}"


def _started(pid: int) -> str:
    """When a process was started, in clock ticks since boot; "" if there is none (a zombie counts as gone)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]
