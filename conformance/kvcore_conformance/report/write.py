"""Writes a report into a folder, in every form. JUnit XML is written by pytest itself."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import msgspec

from kvcore.errors import ConfigError, cause
from kvcore_conformance.report.badge import badge
from kvcore_conformance.report.html import page
from kvcore_conformance.report.markdown import markdown
from kvcore_conformance.report.model import Report

FILES = ("report.json", "report.md", "report.html", "badge.svg")
JUNIT = "junit.xml"


def writable(folder: Path, *more: str) -> None:
    """Make the folder of a report; raises ``ConfigError`` if one cannot be written there, or a file more. What is there stays as it is."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in (folder / name for name in (*FILES, *more)):
            new = not file.exists()
            file.open("a").close()
            if new:
                file.unlink()
    except OSError as error:
        raise ConfigError(f"a report cannot be written into {str(folder)!r} ({cause(error)}); name another folder") from error


def prepare(folder: Path) -> None:
    """Make the folder, without the report of an earlier run: what ends this one early must not leave that as if it were of it."""
    writable(folder)
    try:
        for name in (*FILES, JUNIT):
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"an earlier report cannot be removed from {str(folder)!r} ({cause(error)}); name another folder") from error


def write(report: Report, folder: Path) -> None:
    """All files but JUnit's into a folder that is prepared: all, or none and ``ConfigError``."""
    text_of_json = json.dumps(msgspec.to_builtins(report), indent=2, ensure_ascii=False) + "\n"
    texts = dict(zip(FILES, (text_of_json, markdown(report), page(report), badge(report)), strict=True))
    try:
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8", errors="replace")  # what a backend says may be no text at all
    except OSError as error:
        for name in FILES:
            with suppress(OSError):
                (folder / name).unlink(missing_ok=True)
        told = f"the report could not be written into {str(folder)!r} ({cause(error)})"
        raise ConfigError(f"{told}; make room there, or name another folder, and run it again") from error
