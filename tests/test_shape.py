"""The shape of the code: small files, imports that point one way, and an import that costs next to nothing."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import kvcore
from kvcore.hookspecs import REQUIRED, Hooks, KVCoreSpec

ROOT = Path(kvcore.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py"))
MOST_LINES = 400
MOST_IMPORT_S = 0.4

LAYERS = [
    ("states",),
    (
        "errors",
        "installed",
        "addresses",
        "config",
        "access",
        "memory",
        "stats",
        "metrics",
        "timers",
        "bell",
        "seat",
        "pulse",
        "slow",
        "workers",
        "logs",
        "descriptors",
    ),
    ("protocol", "planner", "page_lists", "hookspecs", "wire", "bootstrap", "http", "environment"),
    ("exclusive", "fast_hooks", "registry", "backends", "backend", "observers", "process", "compat", "flight", "stories"),
    ("sockets",),
    (
        "doorkeeper",
        "frames",
        "readiness",
        "channel",
        "closing",
        "bootstrap_client",
        "bootstrap_service",
        "http_io",
        "fault_rules",
        "control_tap",
        "faults",
    ),
    ("room", "alarms"),
    ("rooms", "aloud", "late_words", "pairing", "peers"),
    ("tickets", "pace", "ledger", "routes", "handles"),
    ("overview", "admin"),
    ("core",),
    ("manager",),
]
"""The parts of the core from the bottom up; what stands higher may import what stands lower, never the other way."""

STRANGERS = {
    "handles": {"manager", "core", "ledger", "tickets", "peers", "routes", "channel", "backend", "hookspecs"},
    "rooms": {"handles", "ledger", "peers", "channel", "planner", "hookspecs", "wire"},
    "ledger": {"handles", "peers", "routes", "channel", "wire", "backend"},
    "peers": {"handles", "rooms", "ledger", "routes", "registry", "backend"},
    "channel": {"rooms", "peers", "protocol", "hookspecs"},
    "backends": {"manager", "core", "handles", "rooms", "ledger", "peers", "channel", "wire", "protocol"},
    "planner": {"protocol", "hookspecs", "wire"},
}
"""Who does not know whom, so that no part reaches around its neighbour."""

OPTIONAL = (
    "kvcore.integrations", "kvcore.cli", "kvcore.cli_options", "kvcore.explain", "kvcore.progress", "kvcore.sides", "kvcore.buffers",
    "kvcore.demo", "kvcore.doctor", "kvcore.bench", "kvcore.new",
)  # fmt: skip
"""Parts behind extras: only they may import these, and nothing of the core imports them."""
EXTRAS = {"torch", "transformers", "typer", "rich", "matplotlib", "gguf", "accelerate"}
LAZY = {"aiohttp"}
"""Imported when a server or request starts, by the one module for it."""


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """What is imported when the module is: not within functions, and not for type checkers only."""
    yield from _imports(ast.parse(path.read_text(encoding="utf-8")).body)


def _imports(body: Sequence[ast.AST]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (_module(f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imports(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            for part in ("body", "orelse", "handlers", "finalbody"):
                yield from _imports(getattr(node, part, []))
        elif isinstance(node, ast.ExceptHandler):
            yield from _imports(node.body)


def _module(name: str) -> str:
    """The module that ``from a import b`` takes its name from: ``a.b`` if that is one, else ``a``."""
    parent = name.rpartition(".")[0]
    place = ROOT.parent.joinpath(*name.split("."))
    return name if place.is_dir() or place.with_suffix(".py").exists() else parent


GRAPH = {name_of(path): {name for name in imports(path) if name.startswith("kvcore")} for path in FILES}


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_file_has_more_than_400_lines(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MOST_LINES, f"{path.name} has {lines} lines; give a part of its work to a file of its own"


def test_every_module_is_read() -> None:
    assert {"kvcore.manager", "kvcore.protocol.sender", "kvcore.backends.local", "kvcore"} <= set(GRAPH)
    assert "kvcore.ledger" in GRAPH["kvcore.core"] and "kvcore.core" in GRAPH["kvcore.manager"]


def test_imports_have_no_circle() -> None:
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " imports ".join((*trail[trail.index(module) :], module))
        if module in done:
            return
        for other in sorted(GRAPH.get(module, ())):
            if other != module:
                visit(other, (*trail, module))
        done.add(module)

    for module in GRAPH:
        visit(module, ())


def part(module: str) -> str:
    """The part of the core that a module belongs to."""
    return module.split(".")[1] if "." in module else ""


def test_imports_point_down() -> None:
    height = {name: number for number, names in enumerate(LAYERS) for name in names}
    wrong = [
        f"{module} imports {other}"
        for module, others in GRAPH.items()
        for other in others
        if height.get(part(other), -1) > height.get(part(module), len(LAYERS))
    ]
    assert not wrong, wrong


def test_no_part_reaches_around_its_neighbour() -> None:
    wrong = [
        f"{module} imports {other}"
        for module, others in GRAPH.items()
        for other in others
        if part(other) in STRANGERS.get(part(module), ())
    ]
    assert not wrong, wrong


def test_the_protocol_imports_nothing_of_the_runtime() -> None:
    allowed = {"kvcore.states", "kvcore.protocol"}
    for module, others in GRAPH.items():
        if within(module, ("kvcore.protocol",)):
            assert all(other in allowed or within(other, ("kvcore.protocol",)) for other in others), f"{module}: {others}"
    banned = {"threading", "socket", "zmq", "time", "asyncio", "queue", "logging", "os", "random"}
    for path in (ROOT / "protocol").glob("*.py"):
        assert not banned & {name.partition(".")[0] for name in imports(path)}, path.name


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_extras_are_imported_by_the_parts_that_need_them_only(path: Path) -> None:
    name, found = name_of(path), {module.partition(".")[0] for module in imports(path)}
    if not within(name, OPTIONAL):
        assert not found & EXTRAS
        assert not [module for module in imports(path) if within(module, OPTIONAL)], "the core imports an optional part"
    if name != "kvcore.http_io":
        assert not found & LAZY


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_module_of_the_core_prints_or_looks_for_attributes_of_its_own_objects(path: Path) -> None:
    if within(name_of(path), ("kvcore.demo", "kvcore.cli")):
        return
    calls = {
        node.func.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & {"print", "hasattr", "eval", "exec"}


def test_importing_kvcore_costs_next_to_nothing() -> None:
    best = min(_import_seconds() for _ in range(5))
    assert best < MOST_IMPORT_S, f"import kvcore takes {best:.2f} s"


def _import_seconds() -> float:
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", "import kvcore"], check=True, cwd=ROOT.parent, timeout=30)
    return time.monotonic() - begun


def test_importing_kvcore_and_all_its_public_names_imports_no_extra() -> None:
    code = (
        "import sys, kvcore\n"
        "for name in kvcore.__all__: getattr(kvcore, name)\n"
        "import kvcore.faults\n"
        "names = {name.partition('.')[0] for name in sys.modules}\n"
        f"assert not names & {EXTRAS | LAZY!r}, names & {EXTRAS | LAZY!r}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


def test_the_public_names_are_there_and_documented() -> None:
    assert set(kvcore.__all__) <= set(dir(kvcore))
    for name in kvcore.__all__:
        value = getattr(kvcore, name)
        assert not inspect.isclass(value) or value.__doc__, name
    for module in (path for path in FILES):
        assert ast.get_docstring(ast.parse(module.read_text())), f"{name_of(module)} has no docstring"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        kvcore.nonsense  # noqa: B018


# --- hooks


def hooks_of(spec: type) -> dict[str, inspect.Signature]:
    return {name: inspect.signature(value) for name, value in vars(spec).items() if name.startswith("kvcore_")}


def test_the_typed_hooks_equal_the_specifications() -> None:
    specified, typed = hooks_of(KVCoreSpec), hooks_of(Hooks)
    assert specified.keys() == typed.keys()
    for name, signature in specified.items():
        mine = typed[name]
        assert [(each.name, each.annotation) for each in signature.parameters.values()] == [
            (each.name, each.annotation) for each in mine.parameters.values()
        ], name
        assert signature.return_annotation == mine.return_annotation, name
        assert all(each.kind is each.KEYWORD_ONLY for each in list(mine.parameters.values())[1:]), f"{name} is called by keyword"
        assert all(each.default is each.empty for each in signature.parameters.values()), f"{name}: no defaults in hooks"


def test_every_hook_says_whether_it_is_required() -> None:
    for name in hooks_of(KVCoreSpec):
        text = inspect.getdoc(getattr(KVCoreSpec, name)) or ""
        assert ("Required." in text) == (name in REQUIRED), name
    assert hooks_of(KVCoreSpec).keys() >= REQUIRED
