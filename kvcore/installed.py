"""Which backends are installed: the entry points of the group ``kvcore.backends``, read from metadata alone (B1, B2)."""

from __future__ import annotations

import difflib
import importlib.metadata
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass

from kvcore.errors import MOST_SHOWN, BackendConflictError, BackendNotFoundError, cause, one_line, shown

GROUP = "kvcore.backends"
PUBLISHED = ("ascend", "mooncake", "mori", "nixl")
"""Names of this project's own plugins, each in a distribution ``kvcore-<name>``: near matches even where none is installed."""

log = logging.getLogger("kvcore.installed")


@dataclass(frozen=True, slots=True, order=True)
class InstalledBackend:
    """One entry point of the group: what it offers and who offers it. ``entry_point`` is ``module:class``; nothing is imported."""

    name: str
    distribution: str
    version: str
    entry_point: str

    def __str__(self) -> str:
        return f"backend {shown(self.name)} of {one_line(self.distribution, MOST_SHOWN)} {one_line(self.version, MOST_SHOWN)}"


def list_backends() -> list[InstalledBackend]:
    """All installed backends, sorted by name and distribution. Imports none and never raises (B1).

    A distribution whose entry points cannot be read is logged and left out. Of a distribution that stands on ``sys.path`` twice the
    first counts, as it does for imports.
    """
    found: dict[tuple[str, str], InstalledBackend] = {}
    try:
        for distribution in importlib.metadata.distributions():
            for backend in _offered(distribution):
                found.setdefault((backend.name, _canonical(backend.distribution)), backend)
    except Exception as error:  # a foreign path hook may raise anything
        log.warning("the list of installed distributions ends early (%s); backends may be missing from it", cause(error))
    return sorted(found.values())


def find_backend(wanted: str) -> InstalledBackend:
    """The installed backend called ``name`` or ``name@distribution``. Imports nothing.

    Raises ``BackendNotFoundError``, with a near match, or ``BackendConflictError`` if more than one distribution offers it (B2).
    """
    if not isinstance(wanted, str):
        raise BackendNotFoundError(f"a backend is chosen by its name, got {shown(wanted)}; pass text such as 'local'")
    name, _, distribution = wanted.partition("@")
    installed = list_backends()
    named = [backend for backend in installed if backend.name == name]
    chosen = [backend for backend in named if not distribution or _canonical(backend.distribution) == _canonical(distribution)]
    offers = ", ".join(f"{backend.name}@{backend.distribution}" for backend in named)
    if len(chosen) == 1:
        return chosen[0]
    if chosen:
        raise BackendConflictError(
            f"backend {shown(name)} is offered by more than one distribution; choose one of {offers}, or uninstall one"
        )
    if named:
        raise BackendNotFoundError(f"backend {shown(name)} is not offered by distribution {shown(distribution)}; choose from {offers}")
    known = {backend.name for backend in installed}
    raise BackendNotFoundError(
        f"no backend {shown(name)} is installed{near(name, known.union(PUBLISHED) - {name})}; "
        f"installed are: {', '.join(sorted(known)) or 'none'}; to add one: {_how_to_add(name)}"
    )


def _how_to_add(name: str) -> str:
    """For a name that nobody may have taken no package is proposed: anybody could take it."""
    return f"pip install kvcore-{name}" if name in PUBLISHED else "install the distribution that offers it"


def _offered(distribution: importlib.metadata.Distribution) -> list[InstalledBackend]:
    try:
        entries = tuple(distribution.entry_points.select(group=GROUP))
    except Exception as error:  # one broken distribution must not hide the others
        name = _field(lambda: distribution.metadata["Name"])
        log.warning("entry points of distribution %s cannot be read (%s); reinstall it to have its backends listed", name, cause(error))
        return []
    if not entries:
        return []
    name, version = _field(lambda: distribution.metadata["Name"]), _field(lambda: distribution.version)
    return [InstalledBackend(entry.name, name, version, entry.value) for entry in entries]


def _field(read: Callable[[], str | None]) -> str:
    try:
        return read() or "unknown"
    except Exception:  # metadata may be missing or of any shape
        return "unknown"


def near(name: str, known: set[str]) -> str:
    """A hint at the most similar name, to be appended to an error; "" if none is similar."""
    matches = difflib.get_close_matches(name[:MOST_SHOWN], sorted(known), 1)
    return f"; did you mean {shown(matches[0])}?" if matches else ""


def _canonical(name: str) -> str:
    """A distribution's name as indices compare it."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
