"""Finds every container that an object reaches, so that a test can ask whether a store is hidden from ``stats``."""

from __future__ import annotations

import functools
import inspect
import logging
import queue
import sys
import types
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

OWN = ("kvcore", "tests")
"""Packages whose objects are looked into; an object of any other is one thing, and the way ends there."""
END = (str, bytes, int, float, complex, type, types.ModuleType, logging.Logger)
CONTAINERS = (Mapping, list, tuple, set, frozenset, deque, weakref.WeakSet)
Cache = functools._lru_cache_wrapper


def containers(roots: Mapping[str, object]) -> Counter[str]:
    """How many entries the containers at each path have. ``[]`` is any key or entry, so that those at like paths are summed up.

    A tuple or frozenset counts where it is an attribute: it may be replaced by a longer one, which is how a store of values grows.
    """
    found: Counter[str] = Counter()
    seen: dict[int, object] = {}
    ahead: deque[tuple[str, object, bool]] = deque((name, root, True) for name, root in roots.items())
    while ahead:
        path, thing, is_attribute = ahead.popleft()
        if thing is None or isinstance(thing, END) or id(thing) in seen:
            continue
        seen[id(thing)] = thing  # kept, so that no number is given out twice
        size = size_of(thing, is_attribute)
        if size is not None:
            found[path] += size
        held = not isinstance(thing, CONTAINERS)
        ahead.extend((path + part, other, held) for part, other in _steps(thing))
    return found


def module_stores() -> dict[str, object]:
    """The containers that modules and classes of kvcore hold, by name."""
    found: dict[str, object] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "kvcore":
            for owner, value in list(vars(module).items()):
                of_class = vars(value) if isinstance(value, type) and value.__module__ == name else {}
                found |= {f"{name}.{owner}.{key}": held for key, held in of_class.items()}
                found[f"{name}.{owner}"] = value
    return {name: value for name, value in found.items() if "__" not in name and size_of(value, False) is not None}


def size_of(thing: object, is_attribute: bool) -> int | None:
    """The entries of a container; None for what is none."""
    if isinstance(thing, Cache):
        return thing.cache_info().currsize
    if isinstance(thing, (queue.SimpleQueue, queue.Queue)):
        return thing.qsize()
    if isinstance(thing, (tuple, frozenset)):
        return len(thing) if is_attribute and not isinstance(getattr(thing, "_fields", None), tuple) else None
    return len(thing) if isinstance(thing, CONTAINERS) else None


def _steps(thing: Any) -> Iterator[tuple[str, object]]:
    """What a thing leads to, each with its part of the path."""
    if isinstance(thing, Mapping):
        for pair in _still(lambda: list(thing.items())):
            yield from (("[]", one) for one in pair)
    elif isinstance(thing, CONTAINERS):
        yield from (("[]", one) for one in _still(lambda: list(thing)))
    elif isinstance(thing, queue.Queue):
        yield "", thing.queue
    elif isinstance(thing, (types.FunctionType, Cache)):
        yield from _function(inspect.unwrap(thing))
    elif isinstance(thing, types.MethodType):
        yield from (("", thing.__self__), ("", thing.__func__))
    elif isinstance(thing, functools.partial):
        yield from (("", thing.func), ("()", thing.args), ("()", thing.keywords))
    elif isinstance(thing, weakref.ref):
        yield "", thing()
    if type(thing).__module__.partition(".")[0] in OWN:
        yield from ((f".{name}", value) for name, value in list(getattr(thing, "__dict__", {}).items()))
        yield from _slots(thing)


def _function(function: Any) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"().{name}", cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield from (("()", value) for value in (function.__defaults__, function.__kwdefaults__, function.__dict__))


def _slots(thing: object) -> Iterator[tuple[str, object]]:
    for owner in type(thing).__mro__:
        for name, member in vars(owner).items():
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield f".{name}", member.__get__(thing)
                except AttributeError:  # not set
                    continue


def _still(look: Callable[[], list[Any]]) -> list[Any]:
    """A copy of a container that other threads change."""
    for _ in range(1000):
        try:
            return look()
        except RuntimeError:  # it changed meanwhile
            continue
    raise AssertionError("a container never stands still")
