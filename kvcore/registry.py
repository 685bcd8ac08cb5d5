"""Loading and checking backends (B1, B2).

Loading imports the one backend asked for. Everything that can be wrong with a backend is told here, before an engine is started, each
fault as its own error with the next step in it.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TypeVar

import pluggy
from pydantic import BaseModel, ValidationError

from kvcore.config import describe
from kvcore.errors import MOST_SHOWN, BackendLoadError, BackendOptionsError, BackendVersionError, cause, one_line, shown
from kvcore.hookspecs import API_VERSION, REQUIRED, BackendInfo, Capabilities, Fact, KVCoreSpec, hookimpl
from kvcore.installed import GROUP, InstalledBackend, find_backend, near
from kvcore.states import RoomKey

T = TypeVar("T")


def load_backend(name: str) -> type:
    """Import the backend called ``name`` (``name@distribution`` where two clash), only that one (B1), and check that this core can run it.

    For the check one instance is made and dropped; an instance opens nothing until ``kvcore_open``. Raises ``BackendNotFoundError``,
    ``BackendConflictError``, ``BackendLoadError`` or ``BackendVersionError``; each says the next step and chains its cause (B2).
    """
    chosen = find_backend(name)
    backend_class = _guarded(lambda: _import(chosen), f"{chosen} cannot be imported", f"try 'import {_module(chosen)}', or reinstall it")
    if not isinstance(backend_class, type):
        raise BackendLoadError(f"{chosen} is a {type(backend_class).__name__}, not a class; its entry point must name the backend's class")
    _, _, info = plugin_manager(backend_class)
    if info.name != chosen.name:
        raise BackendLoadError(f"{chosen} calls itself {shown(info.name)} in its BackendInfo; its author must give both one name")
    return backend_class


def plugin_manager(backend_class: type) -> tuple[pluggy.PluginManager, object, BackendInfo]:
    """A plugin manager of its own with one instance of the backend and the core's defaults for hooks it leaves out.

    Returns manager, instance and the instance's info. Raises ``BackendVersionError`` if it was written for other hooks than this core
    has, and ``BackendLoadError`` naming the hook if one is missing, unknown or not marked, or naming what its info lacks (B2).
    """
    label = one_line(f"backend class {backend_class.__module__}.{backend_class.__qualname__}")
    manager = pluggy.PluginManager("kvcore")
    backend = _guarded(backend_class, f"{label} cannot be instantiated", "it is made without arguments; its author must fix __init__")
    _guarded(lambda: manager.register(backend, "backend"), f"{label} cannot be registered", "its author must fix its hooks")
    info = _info(manager, backend, label)
    _check_version(info)
    # The specs come after the version, so that a hook of a newer core is an old core's fault and not an unknown name.
    _guarded(lambda: manager.add_hookspecs(KVCoreSpec), f"{label} has a hook that does not fit its specification", "correct its arguments")
    _check_hooks(manager, backend, label)
    _check_capabilities(info)
    manager.register(_Defaults(), "defaults")
    return manager, backend, info


def validated_options(info: BackendInfo, options: Mapping[str, object]) -> BaseModel:
    """The backend's options as its own model. Raises ``BackendOptionsError`` in one line naming key, value and what is allowed (B2).

    Unknown keys are refused also where the model would ignore them.
    """
    known = _option_names(info.options)
    unknown = sorted(set(options) - known) if info.options.model_config.get("extra") != "allow" else []
    if unknown:
        key = unknown[0]
        allowed = f"choose from {', '.join(sorted(known))}" if known else "it takes none, leave it out"
        raise BackendOptionsError(
            f"backend {shown(info.name)} has no option {shown(key)} (got {shown(options[key])}){near(key, known)}; {allowed}"
        )
    try:
        return info.options.model_validate(dict(options))
    except ValidationError as error:
        raise BackendOptionsError(describe(f"options of backend {shown(info.name)}", error)) from error
    except Exception as error:
        raise BackendOptionsError(
            f"options of backend {shown(info.name)} refused: {cause(error)}, got {shown(dict(options))}; correct them"
        ) from error


class _Defaults:
    """Results of the optional hooks that must not be None. Called last, so only if the backend has no answer."""

    @hookimpl(trylast=True)
    def kvcore_facts(self) -> list[Fact]:
        return []

    @hookimpl(trylast=True)
    def kvcore_disconnect(self) -> bool:
        return False

    @hookimpl(trylast=True)
    def kvcore_held_rooms(self) -> list[RoomKey]:
        return []


def _import(backend: InstalledBackend) -> object:
    return importlib.metadata.EntryPoint(backend.name, backend.entry_point, GROUP).load()


def _module(backend: InstalledBackend) -> str:
    return backend.entry_point.partition(":")[0].strip()


def _info(manager: pluggy.PluginManager, backend: object, label: str) -> BackendInfo:
    callers = {caller.name: caller for caller in manager.get_hookcallers(backend) or []}
    if "kvcore_backend_info" not in callers:
        raise BackendLoadError(f"{label} lacks the required hook kvcore_backend_info; add it, marked with kvcore.hookimpl")
    results = _guarded(callers["kvcore_backend_info"], f"{label} fails in kvcore_backend_info", "it must need no vendor library")
    info = results[0] if results else None
    if not isinstance(info, BackendInfo) or not _well_formed(info):
        raise BackendLoadError(
            f"{label} answers kvcore_backend_info with {shown(info)}; it must be a BackendInfo with every field of its type"
        )
    return info


def _well_formed(info: BackendInfo) -> bool:
    version = info.api_version
    return (
        isinstance(info.name, str)
        and isinstance(version, tuple)
        and [type(part) for part in version] == [int, int]
        and isinstance(info.options, type)
        and issubclass(info.options, BaseModel)
        and isinstance(info.capabilities, Capabilities)
    )


def _check_version(info: BackendInfo) -> None:
    (major, minor), (core_major, core_minor) = info.api_version, API_VERSION
    if major == core_major and minor <= core_minor:
        return
    older = f"the distribution of backend {shown(info.name)}" if major < core_major else "kvcore"
    raise BackendVersionError(
        f"backend {shown(info.name)} {one_line(info.version, MOST_SHOWN)} was written for hooks {major}.{minor} "
        f"and this core has {core_major}.{core_minor}; upgrade {older}"
    )


def _check_hooks(manager: pluggy.PluginManager, backend: object, label: str) -> None:
    specified = {name for name in dir(KVCoreSpec) if name.startswith("kvcore_")}
    for name in dir(type(backend)):
        if not name.startswith("kvcore_") or not callable(getattr(type(backend), name)):
            continue
        marked = manager.parse_hookimpl_opts(backend, name)
        if name not in specified and not (marked and (marked["specname"] or marked["optionalhook"])):
            raise BackendLoadError(f"{label} has {name}, which is not a hook{near(name, specified)}; correct its name")
        if marked is None:
            raise BackendLoadError(f"{label} has {name} without a mark, so it would never be called; mark it with kvcore.hookimpl")
    _guarded(manager.check_pending, f"{label} has an unknown hook", f"choose from {', '.join(sorted(specified))}")
    missing = sorted(name for name in REQUIRED if not getattr(manager.hook, name).get_hookimpls())
    if missing:
        raise BackendLoadError(f"{label} lacks the required hook {', '.join(missing)}; add it, marked with kvcore.hookimpl")


def _check_capabilities(info: BackendInfo) -> None:
    for field in fields(Capabilities):
        value, (fits, allowed) = getattr(info.capabilities, field.name), _DECLARED[field.type]
        if not fits(value):
            raise BackendLoadError(f"backend {shown(info.name)} declares {field.name}={shown(value)}; it must be {allowed}")
    if not info.capabilities.visible_on_done:
        raise BackendLoadError(
            f"backend {shown(info.name)} declares visible_on_done=False and this core cannot add visibility; "
            "it must report DONE only when the bytes are in place (R6)"
        )


def _counts(value: object) -> bool:
    return type(value) is int and value >= 1


MEMORY = ("cpu", "cuda", "rocm", "npu")
_DECLARED: Mapping[object, tuple[Callable[[object], bool], str]] = {
    "frozenset[str]": (lambda value: isinstance(value, frozenset) and set() < value <= set(MEMORY), f"a frozenset of {', '.join(MEMORY)}"),
    "bool": (lambda value: isinstance(value, bool), "True or False"),
    "int": (_counts, "an integer of at least 1"),
    "int | None": (lambda value: value is None or _counts(value), "an integer of at least 1, or None"),
    "Literal['flat', 'pages']": (lambda value: isinstance(value, str) and value in ("flat", "pages"), "'flat' or 'pages'"),
}
"""Which values a field of ``Capabilities`` may have, by its annotation."""


def _option_names(model: type[BaseModel]) -> set[str]:
    names = set(model.model_fields)
    for field in model.model_fields.values():
        names.update(alias for alias in (field.alias, field.validation_alias) if isinstance(alias, str))
    return names


def _guarded(call: Callable[[], T], failed: str, advice: str) -> T:
    """Run foreign code. Whatever it raises, an exit included, becomes a ``BackendLoadError`` in one line that chains it."""
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise BackendLoadError(f"{failed} ({cause(error)}); {advice}") from error
