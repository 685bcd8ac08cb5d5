"""What one run is called, and whether a process on this host is still there: the evidence that R4 asks for."""

from __future__ import annotations

import functools
import os
import secrets
import socket
from pathlib import Path

from kvcore.wire import Process


def instance_id(role: str) -> str:
    """A name for one run of a manager: 64 bits of the system's own, so that processes forked from one do not draw alike."""
    return f"{role}-{secrets.token_hex(8)}"


def this_process() -> Process:
    """This process, as one on the same host can look it up."""
    return Process(_host(), os.getpid(), _started(os.getpid()) or "")


def known_gone(process: Process) -> bool:
    """True only if the process ran on this host, in this process namespace, and is no more. Silence is not knowledge."""
    if process.host != _host() or not process.started:
        return False
    return _started(process.pid) not in (process.started, None)


@functools.cache
def _host() -> str:
    """Names the running kernel and the process namespace; a restarted host is another one."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"unknown/{socket.gethostname()}/{os.getpid()}"


def _started(pid: int) -> str | None:
    """When a process was started, in clock ticks since boot; "" if there is none (a zombie counts as gone); None: cannot be known now."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return "" if _no_such(pid) else None  # /proc may hide the processes of others
    except OSError:  # such as no file descriptor left
        return None
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]


def _no_such(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # sends nothing
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False
