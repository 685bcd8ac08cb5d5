"""The mutation run: each of the core's known faults is put into a copy of the tree, and the quick kit must fail over it; where it does
not, the core's other tests must. ``make mutation`` prints one line a fault, and what it came to.

The faults are some of ``tests/model/mutants.py`` and ``tests/protocol/mutants.py``, spread over both; the tests that were written for them
are left out.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.model import mutants as of_the_model
from tests.protocol import mutants as of_the_protocol
from tests.protocol.mutation import Patch

ROOT = Path(__file__).resolve().parents[2]
OWN_TESTS = ("tests/protocol/test_mutants.py", "tests/model/test_mutants.py")
KIT = ("-m", "kvcore_conformance.command", "--backend", "local", "--profile", "quick", "-x")
PYTEST = ("-m", "pytest", "-x", "-q", "--timeout", "60")
OF_THE_PROTOCOL = (("tests/test_rooms.py", "tests/protocol", *(f"--ignore={path}" for path in OWN_TESTS)),)
OF_THE_REST = (
    tuple(f"tests/test_{name}.py" for name in ("ledger", "rooms", "manager", "lanes", "tickets", "workers")),
    ("tests/model/test_machine.py",),
)
"""The core's tests of what a fault is in, the quick ones first."""
LIMIT_S = 600.0
LEAST, MOST_S = 0.9, 1800
CHOSEN = 42
AT_ONCE = 2


class Mutant(Protocol):
    """What the two lists have in common."""

    @property
    def name(self) -> str: ...
    @property
    def patches(self) -> Sequence[Patch]: ...


@dataclass(frozen=True)
class Verdict:
    """By what a fault was caught: the kit, the core's tests, or nothing; and the first test that failed."""

    name: str
    module: str
    by: str
    first: str
    seconds: float


def mutants() -> list[Mutant]:
    """Those of the run."""
    every = [*of_the_model.MUTANTS, *of_the_protocol.MUTANTS]
    return [every[number * len(every) // CHOSEN] for number in range(CHOSEN)]


def run(chosen: Sequence[Mutant]) -> Iterator[Verdict]:
    """Try them, ``AT_ONCE`` at a time: the kit waits more than it works."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from pool.map(lambda mutant: _try(mutant.name, mutant.patches), chosen)


def _try(name: str, patches: Sequence[Patch]) -> Verdict:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvcore-mutant-") as folder:
        tree = Path(folder)
        _copy(tree)
        for patch in patches:
            _apply(tree, patch)
        by, first = "nothing", ""
        modules = [tree / "kvcore" / "protocol" / f"{patch.module}.py" for patch in patches]
        parts = OF_THE_PROTOCOL if any(module.exists() for module in modules) else OF_THE_REST
        for by_whom, command in (("kit", KIT), *(("core", (*PYTEST, *part)) for part in parts)):
            if first := _first_failure(tree, command):
                by = by_whom
                break
    return Verdict(name, patches[0].module if patches else "", by, first, time.monotonic() - began)


def _copy(tree: Path) -> None:
    """All that git knows of, so that a test fails in the copy for the fault alone."""
    listed = subprocess.run(("git", "ls-files", "-z"), cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name, follow_symlinks=False)
    subprocess.run(("git", "init", "-q"), cwd=tree, check=True)
    subprocess.run(("git", "add", "-A"), cwd=tree, check=True)


def _apply(tree: Path, patch: Patch) -> None:
    places = [path for folder in ("kvcore", "kvcore/protocol") if (path := tree / folder / f"{patch.module}.py").exists()]
    text = places[0].read_text(encoding="utf-8")
    if text.count(patch.old) != 1:
        raise ValueError(f"{text.count(patch.old)} times in {places[0].name}: {patch.old!r}")
    places[0].write_text(text.replace(patch.old, patch.new), encoding="utf-8")


def _first_failure(tree: Path, command: Sequence[str]) -> str:
    """The first line that names a failed test, or the end of the output if it fails without one; "" if all pass."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tree, tree / "conformance"))), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run([sys.executable, *command], cwd=tree, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no end within {LIMIT_S:g} s"
    if done.returncode == 0:
        return ""
    failed = re.findall(r"^(?:FAILED|ERROR) \S+::.*", done.stdout, re.MULTILINE)
    return failed[0].split(" - ")[0] if failed else (done.stdout + done.stderr)[-300:]


def main() -> None:
    """Run all, and print a table; before that the tree as it is, in which nothing may fail."""
    sound = _try("no fault", ())  # the protocol's exploration apart, which looks at nothing but its modules
    print(f"{sound.by:<8} {sound.seconds:6.1f} s  {sound.name}: {sound.first}", flush=True)
    if sound.by != "nothing":
        sys.exit("the copy fails without a fault; correct that first")
    began, found = time.monotonic(), []
    for verdict in run(mutants()):
        found.append(verdict)
        print(f"{verdict.by:<8} {verdict.seconds:6.1f} s  {verdict.module:<15} {verdict.name}: {verdict.first}", flush=True)
    caught = sum(verdict.by != "nothing" for verdict in found)
    by_kit = sum(verdict.by == "kit" for verdict in found)
    seconds = time.monotonic() - began
    print(f"{caught} of {len(found)} caught, {by_kit} by the kit, in {seconds:.0f} s")
    sys.exit(caught < LEAST * len(found) or seconds > MOST_S)


if __name__ == "__main__":
    main()
