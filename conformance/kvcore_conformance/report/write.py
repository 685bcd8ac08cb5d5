"""Writes a report into a folder, in every form. JUnit XML is written by pytest itself."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from kvcore.errors import ConfigError, cause
from kvcore_conformance.report.badge import badge
from kvcore_conformance.report.html import page
from kvcore_conformance.report.markdown import markdown
from kvcore_conformance.report.model import Report

FILES = ("report.json", "report.md", "report.html", "badge.svg")


def prepare(folder: Path) -> None:
    """Make the folder of a report; raises ``ConfigError`` if one cannot be written there, before there is one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (folder / name).open("a").close()
    except OSError as error:
        raise ConfigError(f"a report cannot be written into {str(folder)!r} ({cause(error)}); name another folder") from error


def write(report: Report, folder: Path) -> None:
    """All files but JUnit's into a folder that is prepared."""
    text_of_json = json.dumps(msgspec.to_builtins(report), indent=2, ensure_ascii=False) + "\n"
    for name, text in zip(FILES, (text_of_json, markdown(report), page(report), badge(report)), strict=True):
        (folder / name).write_text(text, encoding="utf-8", errors="replace")  # what a backend says may be no text at all
