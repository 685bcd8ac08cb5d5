"""Writes a report into a folder, in every form."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvcore_conformance.report.model import Report


def write(report: Report, folder: Path) -> None:
    """``report.json`` and the rest; makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
