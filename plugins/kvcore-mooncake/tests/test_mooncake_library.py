"""What is said of a Mooncake that is missing, broken, old or doubled; with fakes, each in a process of its own."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kvcore_mooncake import native
from kvcore_mooncake.backend import MooncakeBackend
from kvcore_mooncake.options import P2P, MooncakeOptions

from kvcore import BackendLoadError
from kvcore.errors import BackendOptionsError
from kvcore.registry import validated_options
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
        ("libnuma.so.1", "Debian has it in libnuma1: apt install libnuma1"),
        ("libcurl.so.4", "Debian has it in libcurl4: apt install libcurl4"),
        (
            "libcudart.so.12",
            "it comes with the driver that this wheel is made for: install that; or uninstall the wheel, then pip install './plugins/",
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
    assert "cannot load Mooncake" in said and f"; install it: {native.INSTALL}" in said and "uninstall" not in said
    assert facts == {"engine": ("missing", native.INSTALL)}


@pytest.mark.parametrize(
    ("engine", "found", "what"),
    [
        (ENGINE, {"mooncake-transfer-engine": "0.3.12.post1"}, "mooncake-transfer-engine 0.3.12.post1; upgrade"),
        ("class TransferEngine:\n    pass", GOOD, "non-cuda 0.3.13, which lacks batch_register_memory, which lacks"),
        (ENGINE, {"mooncake": "0.0.1"}, "mooncake 0.0.1; upgrade"),  # another package of that name
        (ENGINE, {"mooncake-transfer-engine": "None"}, "mooncake-transfer-engine None; upgrade"),  # what it says without a version
        ("", GOOD, "non-cuda 0.3.13, which lacks batch_register_memory, which lacks"),
    ],
)
def test_b2_a_library_that_is_too_old_or_not_whole(tmp_path: Path, engine: str, found: dict[str, str], what: str) -> None:
    said, _ = ask(tmp_path, engine, found)
    assert "needs Mooncake 0.3.13 or newer" in said and what in said


@pytest.mark.parametrize("error", ["OSError('bad ELF')", "SystemError('broken')", "ValueError('odd')"])
def test_b2_a_library_that_cannot_be_imported(tmp_path: Path, error: str) -> None:
    said, facts = ask(tmp_path, f"raise {error}", GOOD)
    assert f"cannot load mooncake-transfer-engine-non-cuda 0.3.13 ({error.partition('(')[0]}: " in said
    assert "uninstall what there is of it, and install it: pip install" in said
    assert facts["library"] == ("cannot be loaded", said)


def test_facts_never_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> dict[str, str]:
        raise TypeError("a distribution without a name")

    monkeypatch.setattr(native, "installed", broken)
    assert [(fact.name, fact.advice) for fact in native.facts()] == [("library", "a distribution without a name")]
    with pytest.raises(BackendLoadError, match="cannot load Mooncake .TypeError: a distribution without a name.*uninstall"):
        native.load()


def test_what_a_good_library_can_do_is_told(tmp_path: Path) -> None:
    said, facts = ask(tmp_path, ENGINE + "SUPPORT_HIP = True\n", {**GOOD, "mooncake-transfer-engine-rocm": "0.4.0"})
    assert said == ""
    assert facts["engine"][1] == "they share one package: uninstall all, and install one"
    assert facts["memory"] == ("cpu, cuda, rocm", "")
    assert facts["transports"][0].startswith("tcp") and "hip" in facts["transports"][0]


# --- what it is started with


@pytest.mark.parametrize(
    ("options", "host", "found", "absent"),
    [
        ({}, "127.0.0.1", {"MC_FORCE_TCP": "1"}, {"MC_FORCE_HCA", "MC_USE_IPV6", "MC_TCP_BIND_ADDRESS"}),
        ({"protocol": "rdma"}, "127.0.0.1", {"MC_FORCE_HCA": "1"}, {"MC_FORCE_TCP"}),
        ({"protocol": "efa"}, "::1", {"MC_USE_IPV6": "1"}, {"MC_FORCE_TCP", "MC_FORCE_HCA"}),
        (
            {"metadata_server": "http://a:1/b", "environment": {"MC_X": "y"}},
            "10.0.0.7",
            {"MC_TCP_BIND_ADDRESS": "10.0.0.7", "MC_X": "y"},
            set(),
        ),
    ],
)
def test_r6_what_tcp_needs_is_set_for_every_protocol(options: dict[str, Any], host: str, found: dict[str, str], absent: set[str]) -> None:
    wanted = native._wanted(MooncakeOptions(timeout_s=77, **options), host)
    assert not absent & set(wanted)
    assert wanted.items() >= {**native.NEEDED, **dict.fromkeys(native.TIMEOUTS, "77"), **found}.items()


@pytest.mark.parametrize(
    ("flags", "devices", "options", "said"),
    [
        ("", [], {"protocol": "bogus"}, "finds no protocol 'bogus', only protocol 'tcp'; correct that option"),
        ("", [], {"protocol": "rdma"}, "finds no protocol 'rdma', only protocol 'tcp'; correct"),
        ("", ["mlx5_0"], {"protocol": "hip"}, "finds no protocol 'hip', only protocol 'tcp', protocol 'rdma', device 'mlx5_0'; correct"),
        ("", ["mlx5_0"], {"protocol": "mlx5_0"}, "finds no protocol 'mlx5_0', only"),
        (
            "",
            ["mlx5_0"],
            {"protocol": "rdma", "devices": ("mlx5_0", "mlx5_1")},
            "finds no device 'mlx5_1', only .*device 'mlx5_0'; correct",
        ),
        ("SUPPORT_EFA", ["efa_0"], {"protocol": "rdma"}, "finds no protocol 'rdma', only protocol 'tcp', protocol 'efa',"),
        ("", ["mlx5_0"], {"protocol": "rdma", "devices": ("mlx5_0",)}, ""),
        ("SUPPORT_EFA", ["efa_0"], {"protocol": "efa"}, ""),
        ("SUPPORT_HIP", [], {"protocol": "hip"}, ""),
        ("", [], {"devices": ("eth0",)}, ""),
    ],
)
def test_a_protocol_or_a_device_that_is_not_here_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str, devices: list[str], options: dict[str, Any], said: str
) -> None:
    for name in devices:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(native, "RDMA_DEVICES", tmp_path)
    library = ModuleType("engine")
    vars(library).update({"SUPPORT_HIP": False, "SUPPORT_EFA": False} | dict.fromkeys(flags.split(), True))
    with pytest.raises(BackendOptionsError, match=said) if said else nullcontext():
        native._check(MooncakeOptions(**options), library)


@pytest.mark.parametrize(
    "server", ["redis://127.0.0.1:1", "file:///tmp/x", "ETCD://127.0.0.1:1", "127.0.0.1:2379", "http://", P2P + "x", ""]
)
def test_b2_a_metadata_server_that_would_end_the_process_is_refused(server: str) -> None:
    with pytest.raises(BackendOptionsError, match=f"metadata_server: must be etcd://host:2379, http://.* or https, got {server!r}$"):
        validated_options(MooncakeBackend().kvcore_backend_info(), {"metadata_server": server})


def test_b2_a_device_without_a_name_is_refused() -> None:
    with pytest.raises(BackendOptionsError, match="devices.1: string should have at least 1 character"):
        validated_options(MooncakeBackend().kvcore_backend_info(), {"devices": ["mlx5_0", ""]})


@pytest.mark.parametrize("server", [P2P, "etcd://a:2379", "http://a:1/b", "https://a/b"])
def test_a_metadata_server_that_mooncake_knows_is_taken(server: str) -> None:
    assert MooncakeOptions(metadata_server=server).metadata_server == server


TAKEN = """
import sys, kvcore
from kvcore_mooncake import native
from kvcore_mooncake.options import MooncakeOptions
from tests.engine_nodes import context
from tests.helpers import memory
try:
    native.start(MooncakeOptions(), context("mooncake", "prefill", "one", kvcore.Pool.from_tensors("kv", memory(1), page_size=1)))
except kvcore.BackendLoadError as error:
    print(error)
"""


def test_b2_ports_that_are_all_taken_are_named() -> None:
    with two_ports() as (low, high):
        path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
        ports = {"MC_MIN_RPC_PORT": str(low), "MC_MAX_RPC_PORT": str(high)}
        command = [sys.executable, "-c", TAKEN]
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path, **ports}, capture_output=True, text=True, timeout=60, check=False
        )
    assert re.match(r"backend 'mooncake': no engine .*\(code -1\); .* ports of 15000 to 17000, .*MC_MIN_RPC_PORT", done.stdout), done.stderr


@contextmanager
def two_ports() -> Iterator[tuple[int, int]]:
    """Two neighbours that are taken, of those that Mooncake lets one name."""
    for low in range(18000, 30000, 2):
        with ExitStack() as stack:
            try:
                for port in (low, low + 1):
                    stack.enter_context(socket.create_server(("", port)))
            except OSError:
                continue
            yield low, low + 1
            return
    raise AssertionError("no two ports are free")


def test_the_doctor_finds_the_engine_and_moves_a_page() -> None:
    done = kvcore("doctor", "mooncake", "--json")
    (found,) = json.loads(done.stdout)["backends"]
    assert done.returncode == 0 and found["ok"], found["problem"]
    facts = {fact["name"]: fact["value"] for fact in found["facts"]}
    assert facts["engine"].startswith("mooncake-transfer-engine") and "tcp" in facts["transports"]
