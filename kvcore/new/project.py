"""Writes a plugin project: the files of the example ``kvcore-shm``, under another name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from kvcore.errors import KVCoreError
from kvcore.installed import PUBLISHED, list_backends

MOST_LETTERS = 24
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
PARTS = (".github", ".gitignore", "CHANGELOG.md", "README.md", "kvcore_shm", "pyproject.toml", "tests")
"""What belongs to the example; the rest of its folder is what runs have left. The wheel of kvcore carries the same."""
OTHERS = {"conformance", *PUBLISHED}
"""What stands behind ``kvcore-`` in distributions that this project publishes."""


class ProjectError(KVCoreError):
    """A project cannot be written."""


def written(name: str, into: Path) -> Path:
    """Write the project ``kvcore-<name>`` into a folder; returns where it is. ``ProjectError`` for a name or a place that is taken."""
    for backend in list_backends():
        if backend.name == name:
            raise ProjectError(f"{backend} is installed already; choose another name, or uninstall that")
    if name in OTHERS:
        raise ProjectError(f"kvcore-{name} is a distribution of kvcore's own; choose another name")
    project = into / f"kvcore-{name}"
    if project.exists():
        raise ProjectError(f"{project} is there already; choose another name or --into another folder")
    files = {Path(_renamed(path.as_posix(), name)): _renamed(text, name) for path, text in _template()}
    try:
        for path, text in files.items():
            (project / path).parent.mkdir(parents=True, exist_ok=True)
            (project / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ProjectError(f"{project} cannot be written ({error.strerror}); choose another folder with --into") from error
    return project


def package(name: str) -> str:
    """The import name of a backend's distribution."""
    return f"kvcore_{name.replace('-', '_')}"


def _renamed(text: str, name: str) -> str:
    """The example's text or path with the names of another."""
    names = {"kvcore_shm": package(name), "Shm": "".join(word.capitalize() for word in name.split("-")), "shm": name}
    return re.sub("|".join(names), lambda found: names[found[0]], text)


def _template() -> Iterator[tuple[Path, str]]:
    """The example's files, with their paths in it: of the wheel, or of the checkout that is installed as it stands."""
    here = Path(__file__).resolve()
    places = (here.with_name("template"), here.parents[2] / "examples" / "kvcore-shm")
    root = next((place for place in places if (place / "pyproject.toml").exists()), None)
    if root is None:
        raise ProjectError(f"the example is not in {places[0]}; reinstall kvcore")
    for part in PARTS:
        for path in sorted((root / part).rglob("*")) if (root / part).is_dir() else [root / part]:
            if path.is_file() and path.suffix != ".pyc":
                yield path.relative_to(root), path.read_text(encoding="utf-8")
