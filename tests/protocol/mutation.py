"""How a fault is put into the protocol: a patch is the exact text of one module, found exactly once, and what replaces it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from unittest import mock

from kvcore.protocol import receiver, receiver_state, sender, sender_state, sender_turn
from tests.protocol.world import Modules, Scope

SHIPPED: dict[str, ModuleType] = {
    "sender_state": sender_state,
    "receiver_state": receiver_state,
    "sender_turn": sender_turn,
    "sender": sender,
    "receiver": receiver,
}


@dataclass(frozen=True)
class Patch:
    """A change of one module's text."""

    module: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """A fault: what it is, how it is made, where it shows, and which rules may name it."""

    name: str
    patches: tuple[Patch, ...]
    scope: Scope
    rules: frozenset[str]


def patched(name: str, patches: Iterable[Patch], shipped: Mapping[str, ModuleType]) -> dict[str, ModuleType]:
    """Modules made anew from their patched sources, in that order, each in place of the shipped one for those behind it.

    Raises ValueError if a patch's text is not found exactly once.
    """
    made: dict[str, ModuleType] = {}
    for key, original in shipped.items():
        source = inspect.getsource(original)
        for patch in patches:
            if patch.module == key:
                if source.count(patch.old) != 1:
                    raise ValueError(f"{name}: {source.count(patch.old)} times in {key}.py: {patch.old!r}")
                source = source.replace(patch.old, patch.new)
        module = made[key] = ModuleType(original.__name__)
        with mock.patch.dict(sys.modules, {shipped[other].__name__: new for other, new in made.items()}):
            exec(compile(source, f"<{name}: {key}.py>", "exec"), module.__dict__)
    return made


def mutated(mutant: Mutant) -> Modules:
    """The modules with the mutant's patches; raises ValueError if a text is not found exactly once."""
    made = patched(mutant.name, mutant.patches, SHIPPED)
    return Modules(made["sender"], made["receiver"], made["sender_state"], made["receiver_state"])
