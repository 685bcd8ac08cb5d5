"""How a fault is put into the protocol: a patch is the exact text of one module, found exactly once, and what replaces it."""

from __future__ import annotations

import inspect
import sys
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


def mutated(mutant: Mutant) -> Modules:
    """The modules with the mutant's patches; raises ValueError if a text is not found exactly once."""
    made: dict[str, ModuleType] = {}
    for name, shipped in SHIPPED.items():
        source = inspect.getsource(shipped)
        for patch in mutant.patches:
            if patch.module == name:
                if source.count(patch.old) != 1:
                    raise ValueError(f"{mutant.name}: {source.count(patch.old)} times in {name}.py: {patch.old!r}")
                source = source.replace(patch.old, patch.new)
        module = ModuleType(shipped.__name__)
        with mock.patch.dict(sys.modules, {**{f"kvcore.protocol.{key}": value for key, value in made.items()}, shipped.__name__: module}):
            exec(compile(source, f"<{mutant.name}: {name}.py>", "exec"), module.__dict__)
        made[name] = module
    return Modules(made["sender"], made["receiver"], made["sender_state"], made["receiver_state"])
