"""The tests of the contract, a file a group. ``from kvcore_conformance.suite import *`` gives a test file all of them, and the fixtures."""

from __future__ import annotations

import pkgutil
from importlib import import_module


def __getattr__(name: str) -> list[str]:
    """``__all__``, which a star import asks for. In runs of the suite itself pytest loads a file at a time."""
    if name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    files = [f"{__name__}.{file.name}" for file in pkgutil.iter_modules(__path__) if file.name.startswith("test_")]
    found: dict[str, object] = {}
    for file in ("kvcore_conformance.fixtures", *files):
        found.update((name, value) for name, value in vars(import_module(file)).items() if _offered(name, value, file))
    globals().update(found, __all__=list(found))
    return list(found)


def _offered(name: str, value: object, file: str) -> bool:
    """Whether it is a test, or of the file's own, as its fixtures are."""
    return name.startswith(("test_", "Test")) or (not name.startswith("_") and getattr(value, "__module__", "") == file)
