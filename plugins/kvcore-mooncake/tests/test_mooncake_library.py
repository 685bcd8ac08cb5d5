"""What is said of a Mooncake that is missing, broken, old or doubled; with fakes, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvcore_mooncake import native

from tests.commands import kvcore
from tests.helpers import ROOT

SCRIPT = """
import importlib.metadata, json, sys
found = json.loads(sys.argv[1])
if found is not None:
    importlib.metadata.packages_distributions = lambda: {"mooncake": list(found)}
    importlib.metadata.version = found.__getitem__
import kvcore
from kvcore_mooncake import native
from kvcore_mooncake.backend import MooncakeBackend
facts = [(fact.name, fact.value, fact.advice) for fact in MooncakeBackend().kvcore_facts()]
try:
    native.load()
    said = ""
except kvcore.BackendLoadError as error:
    said = str(error)
    assert error.__cause__ is not None or "lacks" in said or "newer" in said
print(json.dumps({"said": said, "facts": facts}))
"""
ENGINE = "class TransferEngine:\n    " + " = ".join(native.CALLS) + " = None\n"
GOOD = {"mooncake-transfer-engine-non-cuda": "0.3.13"}


def ask(folder: Path, engine: str, found: dict[str, str] | None) -> tuple[str, dict[str, tuple[str, str]]]:
    """What is said with such a module ``mooncake.engine`` and such distributions installed; None: those that are."""
    package = folder / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "engine.py").write_text(engine)
    path = os.pathsep.join([str(folder), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(found)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert "\n" not in told["said"]
    return told["said"], {name: (value, advice) for name, value, advice in told["facts"]}


def missing(library: str) -> str:
    return f'raise ImportError("{library}: cannot open shared object file: No such file or directory")'


@pytest.mark.parametrize(
    ("library", "remedy"),
    [
        ("libibverbs.so.1", "Debian has it in libibverbs1: apt install libibverbs1"),
        ("librdmacm.so.1", "Debian has it in librdmacm1: apt install librdmacm1"),
        (
            "libcudart.so.12",
            "it comes with the driver that this wheel is made for: install that, or another wheel: pip install kvcore-moon",
        ),
    ],
)
def test_b2_a_missing_library_is_named_with_what_brings_it(tmp_path: Path, library: str, remedy: str) -> None:
    said, facts = ask(tmp_path, missing(library), {"mooncake-transfer-engine": "0.3.13.post1"})
    assert "cannot load mooncake-transfer-engine 0.3.13.post1" in said and f"{library}: cannot open" in said and remedy in said
    assert facts["engine"] == ("mooncake-transfer-engine 0.3.13.post1", "")
    assert facts["library"] == ("cannot be loaded", said)


def test_b2_no_mooncake_at_all(tmp_path: Path) -> None:
    said, facts = ask(tmp_path, "raise ModuleNotFoundError(\"No module named 'mooncake'\")", {})
    assert "cannot load Mooncake" in said and "install one of its wheels: pip install kvcore-mooncake[cpu] (or [cuda]" in said
    assert facts["engine"] == ("not installed", native.INSTALL)


@pytest.mark.parametrize(
    ("engine", "found", "what"),
    [
        (ENGINE, {"mooncake-transfer-engine": "0.3.12.post1"}, "mooncake-transfer-engine 0.3.12.post1; upgrade"),
        ("class TransferEngine:\n    pass", GOOD, "non-cuda 0.3.13, which lacks batch_register_memory, which lacks"),
        (ENGINE, {"mooncake": "0.0.1"}, "mooncake 0.0.1; upgrade"),  # another package of that name
    ],
)
def test_b2_a_library_that_is_too_old(tmp_path: Path, engine: str, found: dict[str, str], what: str) -> None:
    said, _ = ask(tmp_path, engine, found)
    assert "needs Mooncake 0.3.13 or newer" in said and what in said


def test_what_a_good_library_can_do_is_told(tmp_path: Path) -> None:
    said, facts = ask(tmp_path, ENGINE + "SUPPORT_HIP = True\n", {**GOOD, "mooncake-transfer-engine-rocm": "0.4.0"})
    assert said == ""
    assert facts["engine"][1] == "they share one package: uninstall all, and install one"
    assert facts["memory"] == ("cpu, cuda, rocm", "")
    assert facts["transports"][0].startswith("tcp")


def test_the_doctor_finds_the_engine_and_moves_a_page() -> None:
    done = kvcore("doctor", "mooncake", "--json")
    (found,) = json.loads(done.stdout)["backends"]
    assert done.returncode == 0 and found["ok"], found["problem"]
    facts = {fact["name"]: fact["value"] for fact in found["facts"]}
    assert facts["engine"].startswith("mooncake-transfer-engine") and "tcp" in facts["transports"]
