"""What is said where the engine, its driver or CANN is missing, old or broken; each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ascend_pair import PROTOCOL
from kvcore_ascend import native
from kvcore_ascend.backend import AscendBackend
from kvcore_ascend.options import AscendOptions

import kvcore
from kvcore.registry import validated_options
from tests.commands import kvcore as command
from tests.helpers import ROOT

SCRIPT = """
import json, kvcore
from kvcore_ascend import native
facts = {fact.name: (fact.value, fact.advice) for fact in native.facts()}
try:
    native.load()
    said = ""
except kvcore.BackendLoadError as error:
    said = str(error)
print(json.dumps({"said": said, "facts": facts}))
"""
START = """
import sys, kvcore
from tests.helpers import manager, memory
try:
    manager("decode", memory(1), backend="ascend")
except kvcore.BackendLoadError as error:
    print(error, file=sys.stderr)
"""
ENGINE = "def set_log_level(level): pass\nclass TransferEngine:\n    " + " = ".join(native.CALLS) + " = None\n"


def run(code: str, *path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    places = os.pathsep.join([*map(str, path), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env, "PYTHONPATH": places},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def ask(folder: Path, engine: str, version: str = "1.3.0") -> tuple[str, dict[str, tuple[str, str]]]:
    """What is said with such a library installed."""
    (folder / "memfabric_hybrid.py").write_text(engine)
    info = folder / f"memfabric_hybrid-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: memfabric_hybrid\nVersion: {version}\n")
    done = run(SCRIPT, folder)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert "\n" not in told["said"]
    return told["said"], {name: (value, advice) for name, (value, advice) in told["facts"].items()}


@pytest.mark.parametrize("error", ["ImportError('libmf_smem.so: cannot open')", "OSError('bad ELF')", "ValueError('odd')"])
def test_b2_a_library_that_cannot_be_imported(tmp_path: Path, error: str) -> None:
    said, facts = ask(tmp_path, f"raise {error}")
    assert f"cannot load memfabric_hybrid ({error.partition('(')[0]}: " in said and f"install it: {native.INSTALL}" in said
    assert facts["engine"] == ("missing", said)


@pytest.mark.parametrize(
    ("engine", "version", "what"),
    [
        (ENGINE, "1.2.9", "this is 1.2.9; upgrade"),
        ("def set_log_level(level): pass", "1.3.0", "1.3.0, which lacks initialize, which"),
    ],
)
def test_b2_a_library_that_is_too_old_or_not_whole(tmp_path: Path, engine: str, version: str, what: str) -> None:
    said, _ = ask(tmp_path, engine, version)
    assert "needs memfabric_hybrid 1.3 or newer, and" in said and what in said


def test_b2_no_library_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "PACKAGE", "memfabric_of_nobody")
    with pytest.raises(kvcore.BackendLoadError, match=r"cannot load memfabric_of_nobody \(PackageNotFoundError: .*pip install"):
        native.load()
    assert native.facts()[0].value == "missing"


@pytest.mark.parametrize(
    ("variable", "value", "name"),
    [
        ("LD_PRELOAD", "", "driver: not in /usr/local/Ascend/driver/version.info, install the Ascend driver"),
        ("ASCEND_HOME_PATH", "", "ASCEND_HOME_PATH: not set, install CANN, and source its set_env.sh"),
        ("ASCEND_HOME_PATH", "/nowhere", "ASCEND_HOME_PATH: /nowhere without lib64/libascendcl.so, install CANN"),
        ("LD_LIBRARY_PATH", "", "libascend_hal.so: cannot open shared object file"),
    ],
)
def test_b2_what_is_missing_of_driver_and_cann_is_named_at_the_start(variable: str, value: str, name: str) -> None:
    done = run(START, **{variable: value})
    said = done.stderr.splitlines()[-1]
    assert said.startswith("backend 'ascend': no engine with protocol 'sdma', device 0 starts at 127.0.0.1 (code -") and name in said


@pytest.mark.parametrize(("variable", "fact"), [("ASCEND_HOME_PATH", "ASCEND_HOME_PATH"), ("LD_LIBRARY_PATH", "libascend_hal.so")])
def test_the_doctor_names_what_is_missing(variable: str, fact: str) -> None:
    done = command("doctor", "ascend", "--json", **{variable: ""})
    (found,) = json.loads(done.stdout)["backends"]
    assert done.returncode == 1 and "no engine with protocol 'sdma'" in found["problem"] and fact in found["problem"]
    facts = {one["name"]: (one["value"], one["advice"]) for one in found["facts"]}
    assert facts["engine"][0].startswith("memfabric 1.") and facts[fact][1]


def test_the_doctor_finds_the_engine_and_moves_a_page(tmp_path: Path) -> None:
    (options := tmp_path / "options.toml").write_text(f"protocol = {PROTOCOL!r}")
    done = command("doctor", "ascend", "--json", "--options", str(options))
    (found,) = json.loads(done.stdout)["backends"]
    assert done.returncode == 0 and found["ok"], found["problem"]
    facts = {fact["name"]: fact["value"] for fact in found["facts"]}
    assert facts["engine"].startswith("memfabric 1.") and facts["libascend_hal.so"] == "found"
    assert not [fact for fact in found["facts"] if fact["advice"]], "something is said to be missing, and yet it works"


def test_b3_sdma_does_not_take_host_memory() -> None:
    done = run(START.replace("BackendLoadError", "RegistrationError"), KV_MEMTYPE="0")
    said = done.stderr.splitlines()[-1]
    assert "could not register region 0 of" in said and "code -1" in said and "protocol 'sdma' takes npu memory" in said


def test_listing_names_it_and_choosing_and_checking_it_loads_no_memfabric() -> None:
    listed = json.loads(command("backends", "--json").stdout)["backends"]
    assert ("ascend", "kvcore-ascend") in {(one["name"], one["distribution"]) for one in listed}
    code = "import sys, kvcore; kvcore.load_backend('ascend'); assert 'memfabric_hybrid' not in sys.modules"
    assert run(code).returncode == 0


def test_b2_where_nothing_is_missing_the_options_are_named_and_the_engines_own_lines() -> None:
    said = native._not_started(AscendOptions(device=99), "at 127.0.0.1", -1)
    assert said.startswith("backend 'ascend': no engine with protocol 'sdma', device 99 starts at 127.0.0.1 (code -1: failed); check the")
    assert "options protocol and device, and see memfabric's own lines on stdout" in said and native.LOG in said


def test_b2_a_host_that_is_not_this_one_is_refused_at_once() -> None:
    began = time.monotonic()
    code = START.replace('backend="ascend"', 'backend="ascend", host="203.0.113.9"').replace("BackendLoadError", "ConfigError")
    said = run(code).stderr.splitlines()[-1]
    assert said.startswith("backend 'ascend' cannot listen on host '203.0.113.9'") and said.endswith("; give an address of this host")
    assert time.monotonic() - began < 30  # memfabric takes 54 s


def test_b2_a_nic_that_is_none_is_told_in_words() -> None:
    with pytest.raises(
        kvcore.errors.BackendOptionsError, match="nic: must be tcp://address:port of the network card, or empty, got 'eth0'"
    ):
        validated_options(AscendBackend().kvcore_backend_info(), {"nic": "eth0"})


@pytest.mark.parametrize("wrong", [{"protocol": "tcp"}, {"device": -1}, {"nic": "eth0"}, {"log_level": 4}, {"store": "tcp://a:1"}])
def test_b2_options_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(kvcore.errors.BackendOptionsError, match=next(iter(wrong))):
        validated_options(AscendBackend().kvcore_backend_info(), wrong)
