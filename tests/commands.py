"""The command ``kvcore`` as a person or a script runs it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

MOST_S = 60.0


def _environment(path: Path | None) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("KVCORE_", "FORCE_", "TTY_"))}
    places = [str(path)] if path is not None else []
    places += [environment["PYTHONPATH"]] if "PYTHONPATH" in environment else []
    return environment | {"PYTHONPATH": os.pathsep.join(places), "TERM": "xterm", "COLUMNS": "120"}


def kvcore(
    *arguments: str, path: Path | None = None, given: str | None = None, shell: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run it with stdout and stderr piped; what lies in ``path`` can be imported, ``given`` is in stdin, ``shell`` redirects."""
    command = ["sh", "-c", f'exec "$@" {shell}', "sh", sys.executable, "-m", "kvcore.cli", *arguments]
    environment = _environment(path) | variables
    return subprocess.run(command, capture_output=True, text=True, timeout=MOST_S, env=environment, check=False, input=given)


def watched(*arguments: str) -> tuple[int, str, str]:
    """Run it with stderr on a terminal; returns exit code, stdout, and what the terminal got."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "kvcore.cli", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True, env=_environment(None))
    os.close(theirs)
    seen = b""
    while part := _read(ours):
        seen += part
    os.close(ours)
    out, _ = process.communicate(timeout=MOST_S)
    return process.returncode, out, seen.decode(errors="replace")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # nobody has the other end any more
        return b""


def one_line(text: str) -> bool:
    """Whether stderr is one line of the command's."""
    return text.startswith("kvcore: ") and text.count("\n") == 1 and text.endswith("\n")
