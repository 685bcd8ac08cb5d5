"""Writes a report into a folder, in every form. JUnit XML is written by pytest itself."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from kvcore_conformance.report.badge import badge
from kvcore_conformance.report.html import page
from kvcore_conformance.report.markdown import markdown
from kvcore_conformance.report.model import Report


def write(report: Report, folder: Path) -> None:
    """``report.json``, ``report.md``, ``report.html`` and ``badge.svg``; makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    forms = {
        "report.json": json.dumps(msgspec.to_builtins(report), indent=2, ensure_ascii=False) + "\n",
        "report.md": markdown(report),
        "report.html": page(report),
        "badge.svg": badge(report),
    }
    for name, text in forms.items():
        (folder / name).write_text(text, encoding="utf-8", errors="replace")  # what a backend says may be no text at all
