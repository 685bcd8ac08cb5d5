"""Backends for commands that start processes: each a distribution of its own in a temporary folder, over the embedded backend."""

from __future__ import annotations

import textwrap
from pathlib import Path

HEAD = """
import os, signal, threading
from dataclasses import replace
from kvcore.backends.local import LocalBackend
from kvcore.hookspecs import DONE, Fact, hookimpl

class Backend(LocalBackend):
    @hookimpl
    def kvcore_backend_info(self):
        return replace(super().kvcore_backend_info(), name={name!r})
"""

LYING = """
    @hookimpl
    def kvcore_transfer(self, transfer):
        return DONE
"""

GREEDY = """
    @hookimpl
    def kvcore_transfer(self, transfer):
        return super().kvcore_transfer(replace(transfer, length=transfer.length * 2))
"""
"""Writes one page too many for each that it is asked for."""


def make_backend(root: Path, name: str, body: str = "", before: str = "", distribution: str = "") -> Path:
    """A distribution ``kvcore-<name>`` 1.5 with a backend that does what ``local`` does but for the hooks in ``body``; ``before`` is run
    when it is imported. Returns the folder for ``PYTHONPATH``."""
    distribution = distribution or f"kvcore-{name}"
    module = f"made_{distribution.replace('-', '_')}"
    info = root / f"{distribution.replace('-', '_')}-1.5.dist-info"
    info.mkdir(parents=True)
    (root / f"{module}.py").write_text(textwrap.dedent(before) + HEAD.format(name=name) + textwrap.indent(textwrap.dedent(body), "    "))
    (info / "METADATA").write_text(f"Name: {distribution}\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(f"[kvcore.backends]\n{name} = {module}:Backend\n")
    return root
