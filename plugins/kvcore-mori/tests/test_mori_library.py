"""The library: missing, broken, too old; what it needs of the host; and what the doctor tells of both."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from kvcore_mori import native
from kvcore_mori.backend import MoriBackend
from kvcore_mori.options import MoriOptions

import kvcore
from kvcore import Pool
from kvcore.errors import BackendOptionsError
from kvcore.registry import validated_options
from tests.commands import kvcore as command
from tests.engine_nodes import python_path
from tests.helpers import ROOT, memory

SCRIPT = """
import json, sys
import kvcore
from kvcore_mori.backend import MoriBackend
from tests.engine_nodes import context
from tests.helpers import memory
pool = kvcore.Pool.from_tensors("kv", memory(1), page_size=1)
for fact in MoriBackend().kvcore_facts():
    print("fact:", fact.name, "|", fact.value, "|", fact.advice)
one = MoriBackend()
try:
    one.kvcore_open(one.kvcore_backend_info().options(**json.loads(sys.argv[1])), context("mori", "prefill", "one", pool))
    print("opened")
except kvcore.BackendLoadError as error:
    print("said:", error)
one.kvcore_close()
"""


def ask(options: str = "{}", **variables: str) -> tuple[str, dict[str, str]]:
    """What a process of such an environment says when it opens the backend, and the facts that need something done, with what."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, options],
        env={**os.environ, "PYTHONPATH": python_path(), **variables}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"it ended with {done.returncode}: {done.stderr}"
    facts = [line[6:].split(" | ") for line in done.stdout.splitlines() if line.startswith("fact: ")]
    said = [line for line in done.stdout.splitlines() if line.startswith(("said: ", "opened"))]
    return said[0].removeprefix("said: "), {name: f"{value}; {advice}" for name, value, advice in facts if advice.strip()}


def without(folder: Path, *names: str) -> str:
    """The search path of libraries with a copy of the shims' folders in which some libraries are not."""
    for entry in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")):
        for library in Path(entry).iterdir():
            if not library.name.startswith(names) and not (folder / library.name).exists():
                (folder / library.name).symlink_to(library)
    return str(folder)


# --- missing, broken, too old


def test_b2_no_mori_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", none)
    with pytest.raises(
        kvcore.BackendLoadError, match=r"cannot load mori \(PackageNotFoundError.*amd-mori.*; install it: pip install -U 'amd-mori"
    ) as caught:
        native.load()
    assert isinstance(caught.value.__cause__, metadata.PackageNotFoundError)
    (fact,) = MoriBackend().kvcore_facts()
    assert (fact.name, fact.value, fact.advice) == ("engine", "missing", native.INSTALL)


@pytest.mark.parametrize(
    ("library", "remedy"),
    [
        ("libpci.so.3", "Debian has libpci in libpci3: apt install libpci3"),
        ("libnuma.so.1", "apt install libnuma1"),
        ("libdrm_amdgpu.so.1", "apt install libdrm-amdgpu1"),
        ("libamdhip64.so.7", "it is part of ROCm 7 or of what mori was built with: install that, or have LD_LIBRARY_PATH name its folder"),
    ],
)
def test_b2_a_missing_library_is_named_with_what_brings_it(library: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ModuleType:
        raise ImportError(f"{library}: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(native.importlib, "import_module", missing)
    with pytest.raises(kvcore.BackendLoadError, match=rf"cannot load mori \(ImportError: {library}: cannot open.*; .*{remedy}"):
        native.load()


def test_b2_without_rocm_s_libraries_the_real_loader_says_which(tmp_path: Path) -> None:
    said, facts = ask(LD_LIBRARY_PATH=without(tmp_path, "libhsa-runtime64", "libamdhip64"))
    assert "cannot load mori (" in said and ".so" in said and "it is part of ROCm 7" in said
    assert facts["library"].startswith("cannot be loaded; backend 'mori' cannot load mori")


@pytest.mark.parametrize("kind", ["IOEngine", "IOEngineSession"])
def test_b2_a_library_that_lacks_a_call_is_too_old(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("mori.io")
    for name, calls in native.CALLS.items():
        fake.__dict__[name] = type(name, (), dict.fromkeys(calls[:-1] if name == kind else calls))
    monkeypatch.setitem(sys.modules, "mori.io", fake)
    monkeypatch.setattr(metadata, "version", lambda package: "1.1")
    lacks = native.CALLS[kind][-1]
    with pytest.raises(kvcore.BackendLoadError, match=rf"needs mori 1\.2\.4 or newer, and mori 1\.1 lacks {lacks}; upgrade: pip install"):
        native.load()


# --- what it needs of the host, where mori by itself ends the process or finds nothing


def test_b2_no_rdma_device_is_told_and_is_no_matter_for_xgmi() -> None:
    said, facts = ask(KV_SOFTVERBS_OFF="1")
    assert said.startswith("backend 'mori' needs rdma, and finds no device; ") and "ibv_devices" in said
    assert set(facts) == {"rdma"} and facts["rdma"].startswith("no device; apt install")
    assert ask('{"transport": "xgmi"}', KV_SOFTVERBS_OFF="1")[0] == "opened"


def test_b2_no_libibverbs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    library = native._library
    monkeypatch.setattr(native, "_library", lambda *names: None if names == native.VERBS else library(*names))
    _, rdma = native.needs()
    assert (rdma.name, rdma.value) == ("rdma", "no libibverbs.so.1") and rdma.advice.startswith("apt install libibverbs1")


def test_a_libibverbs_that_knows_no_list_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has none where the kernel has no RDMA, and must not be asked to free it."""
    answers = {"ibv_get_device_list": lambda number: None, "ibv_get_device_name": lambda device: b"x"}
    fake = type(
        "Verbs", (), {name: type(name, (), {"__call__": lambda self, *args, name=name: answers[name](*args)})() for name in answers}
    )
    monkeypatch.setattr(native, "_library", lambda *names: fake())
    assert native.rdma_devices() == []


def test_b2_no_rocm_smi_is_told_where_mori_would_exit(tmp_path: Path) -> None:
    said, facts = ask(LD_LIBRARY_PATH=without(tmp_path, "librocm_smi64"))
    assert said.startswith("backend 'mori' needs gpu, and finds no librocm_smi64; install ROCm's rocm-smi-lib")
    assert set(facts) == {"gpu"}


def test_b2_no_gpu_is_told_where_mori_would_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_gpus", lambda: 0)
    gpu, rdma = native.needs()
    assert (gpu.name, gpu.value) == ("gpu", "0 found") and "/dev/kfd" in gpu.advice
    assert rdma.advice == "" and rdma.value


def test_devices_are_those_of_libibverbs() -> None:
    assert native.rdma_devices() and all(isinstance(name, str) and name for name in native.rdma_devices())
    assert isinstance(native._library(*native.VERBS), ctypes.CDLL)


# --- options


@pytest.mark.parametrize(
    "options",
    [
        {"transport": "tcp"},
        {"transport": "fabric"},
        {"devices": ["a,b"]},
        {"devices": ["^a"]},
        {"devices": [""]},
        {"queue_pairs": 0},
        {"poll_mode": "sleep"},
        {"poll_mode": "event"},
        {"port": 1},
    ],
)
def test_b2_options_that_mori_would_end_the_process_over_or_does_not_have_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(BackendOptionsError, match=next(iter(options))):
        validated_options(MoriBackend().kvcore_backend_info(), options)


def test_a_name_that_is_none_is_told_in_words() -> None:
    with pytest.raises(BackendOptionsError, match=r"devices\.0: must be the name of an RDMA device, such as mlx5_0, got ''$"):
        validated_options(MoriBackend().kvcore_backend_info(), {"devices": [""]})


def test_defaults_are_options() -> None:
    assert validated_options(MoriBackend().kvcore_backend_info(), {}) == MoriOptions()


# --- what the doctor tells


def test_the_doctor_finds_the_engine_and_moves_a_page() -> None:
    done = command("doctor", "mori", "--json", "--timeout", "40")
    (found,) = json.loads(done.stdout)["backends"]
    assert done.returncode == 0 and found["ok"], found["problem"]
    facts = {fact["name"]: fact["value"] for fact in found["facts"]}
    assert facts["engine"] == f"mori {metadata.version('amd-mori')}" and facts["rdma"] == ", ".join(native.rdma_devices())


def test_the_doctor_names_the_missing_piece(tmp_path: Path) -> None:
    done = command("doctor", "mori", "--json", "--timeout", "40", LD_LIBRARY_PATH=without(tmp_path, "librocm_smi64"))
    (found,) = json.loads(done.stdout)["backends"]
    assert done.returncode == 1 and not found["ok"] and "librocm_smi64" in found["problem"]
    assert [fact["name"] for fact in found["facts"] if fact["advice"]] == ["gpu"]


def test_it_is_listed_and_chosen_also_without_its_engine(tmp_path: Path) -> None:
    path = without(tmp_path, "lib")
    done = command("backends", LD_LIBRARY_PATH=path)
    assert done.returncode == 0 and "mori" in done.stdout, done.stderr
    code = 'import sys, kvcore; kvcore.load_backend("mori"); assert "mori" not in sys.modules and "torch" not in sys.modules'
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "LD_LIBRARY_PATH": path}, timeout=60, check=True)
    said, _ = ask(LD_LIBRARY_PATH=path)
    assert said.startswith("backend 'mori' cannot load mori (")


def test_a_manager_says_why_it_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_gpus", lambda: None)
    with pytest.raises(kvcore.BackendLoadError, match="needs gpu, and finds no librocm_smi64"):
        kvcore.KVManager(kvcore.Config(role="prefill", backend="mori"), [Pool.from_tensors("kv", memory(4), page_size=16)])
