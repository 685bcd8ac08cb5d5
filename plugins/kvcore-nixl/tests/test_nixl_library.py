"""The library: missing, broken, too old; its environment, its log, its plugins; and what the doctor tells of it."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from kvcore_nixl import native
from kvcore_nixl.backend import NixlBackend
from kvcore_nixl.options import NixlOptions
from nixl_pair import Node, pair

import kvcore
from kvcore.hookspecs import DONE
from tests.commands import kvcore as command
from tests.helpers import ROOT, memory

log = logging.getLogger("tests.nixl")


def node(**options: object) -> Node:
    return Node("prefill", "one", memory(4, 1, 4096), **options)


# --- missing, broken, too old


def test_b2_no_library_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in native.PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    with pytest.raises(kvcore.BackendLoadError, match=r"finds no NIXL library \(nixl: .*nixl_cu13: .*pip install -U nixl-cu13") as caught:
        native.load()
    assert isinstance(caught.value.__cause__, ImportError)


def test_b2_a_library_that_lacks_a_shared_library_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in native.PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "nixl_cu12")
    (tmp_path / "nixl_cu12.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(kvcore.BackendLoadError, match=r"nixl_cu12: ImportError: libcudart\.so\.12: cannot open"):
        native.load()


@pytest.mark.parametrize("left", [(), native.CALLS[:-1]])
def test_b2_a_library_that_lacks_a_call_is_too_old(left: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("nixl")
    if left:
        fake.__dict__["nixl_agent"] = type("nixl_agent", (), {**dict.fromkeys(left), "__module__": "nixl._api"})
    monkeypatch.setitem(sys.modules, "nixl", fake)
    monkeypatch.setattr(metadata, "version", lambda package: f"0.9 of {package}")
    with pytest.raises(kvcore.BackendLoadError, match=r"needs NIXL 1\.5 or newer, and NIXL 0\.9 of nixl .*lacks .*get_new_notifs; upgrade"):
        native.load()


def test_of_several_variants_one_that_works_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)  # type: ignore[arg-type]
    _, version = native.load()
    assert "(nixl-" in version and version[0].isdigit()


# --- its environment


@pytest.mark.parametrize("devices", [[], ["mlx5_0"]])
def test_the_rdma_module_is_left_out_only_where_there_is_no_device(
    devices: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for device in devices:
        (tmp_path / device).mkdir()
    monkeypatch.setattr(native, "RDMA_DEVICES", tmp_path)
    monkeypatch.setattr(native.os, "environ", found := {"UCX_TLS": "tcp"})
    native.prepare_environment({"UCX_LOG_LEVEL": "error"}, log)
    set_here = ({} if devices else {"UCX_MODULES": "^ib"}) | {"UCX_LOG_LEVEL": "error"}
    assert found == {"UCX_TLS": "tcp", "NIXL_SET_BY_KVCORE": json.dumps(set_here, separators=(",", ":"))} | set_here


LOOKED_AT = """
from kvcore_nixl import native
native.facts()
mapped = open("/proc/self/maps").read()
assert "libplugin_UCX" in mapped and "libuct_ib" not in mapped
"""


def test_to_look_at_the_library_does_not_load_what_would_crash_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the system has libraries that UCX's RDMA modules need (ibverbs-providers)."""
    for name in ("UCX_MODULES", "NIXL_SET_BY_KVCORE"):
        monkeypatch.delenv(name, raising=False)
    ended = subprocess.run([sys.executable, "-c", LOOKED_AT], cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, b""), ended.stderr.decode()


QUIET = """
import logging, sys
from kvcore_nixl import native
logging.basicConfig(level="WARNING", stream=sys.stderr, format="log: %(message)s")
library, _ = native.load()
library.nixl_agent("one", library.nixl_agent_config(backends=[]))
logging.getLogger().setLevel("INFO")
library.nixl_agent("two", library.nixl_agent_config(backends=[]))
assert logging.raiseExceptions
"""


def test_the_librarys_log_goes_where_the_programs_goes() -> None:
    ended = subprocess.run([sys.executable, "-c", QUIET], cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, b""), ended.stderr.decode()
    assert ended.stderr.decode().strip() == "log: Initialized NIXL agent: two"


# --- plugins and options


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"plugin": "POSIX"}, r"plugin 'POSIX' with \{\} did not start, or reaches no other agent"),
        ({"plugin": "GDS"}, r"plugin 'GDS' .*did not start"),
    ],
)
def test_a_plugin_that_moves_no_memory_between_processes_is_refused(options: dict[str, str], says: str) -> None:
    with pytest.raises(kvcore.BackendLoadError, match=says + r".*NIXL has .*POSIX, UCX: choose one that .* between processes, as UCX"):
        node(**options)


def test_b2_a_plugin_that_nixl_does_not_have_is_a_wrong_option() -> None:
    with pytest.raises(kvcore.BackendOptionsError, match=r"plugin 'NOPE' .*NotFound.*NIXL has .*POSIX, UCX: choose one"):
        node(plugin="NOPE")


@pytest.mark.parametrize("devices", [("nope0",), ("lo", "nope0:1")])
def test_a_device_that_is_not_here_is_refused(devices: tuple[str, ...]) -> None:
    here = ", ".join(name for _, name in socket.if_nameindex())
    with pytest.raises(kvcore.BackendOptionsError, match=f"no network device is called {devices[-1]}; devices may name .*{here}"):
        node(devices=devices)


def test_a_device_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 character"):
        NixlOptions(devices=("lo", ""))


def test_a_network_interface_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    with pair(devices=("lo",)) as both:
        assert both.ended(both.post([3], [1])) == DONE


def test_an_agent_whose_metadata_has_another_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.load()[0].nixl_agent, "get_agent_metadata", lambda agent: b"nixlSerDes2|")
    with pytest.raises(kvcore.BackendLoadError, match="ValueError: its metadata does not begin with its name"):
        node()


def test_options_reach_the_plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[tuple[str, dict[str, str]]] = []
    library, _ = native.load()
    original = library.nixl_agent.create_backend

    def create_backend(self: object, name: str, parameters: dict[str, str]) -> None:
        given.append((name, parameters))
        original(self, name, parameters)

    monkeypatch.setattr(library.nixl_agent, "create_backend", create_backend)
    with pair(workers=2, threads=2, progress_thread=True, plugin_options={"num_workers": "3"}) as both:
        assert both.ended(both.post([3], [1])) == DONE
    assert given[0] == ("UCX", {"num_workers": "3", "num_threads": "2"})
    options = NixlOptions(devices=("mlx5_0:1", "mlx5_1:1"), plugin_options={"a": "b"})
    agent = SimpleNamespace(create_backend=lambda *args: given.append(args), get_agent_metadata=lambda: native.head("one"))
    configs: list[dict[str, object]] = []
    fake = SimpleNamespace(
        nixl_agent=lambda name, config: configs.append(config) or agent,
        nixl_agent_config=lambda **settings: settings,
        nixl_thread_sync_t=library.nixl_thread_sync_t,
    )
    for device in ("mlx5_0", "mlx5_1"):
        (tmp_path / device).mkdir()
    monkeypatch.setattr(native, "RDMA_DEVICES", tmp_path)
    native.new_agent(fake, "one", options)
    strict = library.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT  # two threads of the core share an agent
    assert configs == [{"enable_prog_thread": False, "backends": [], "sync_mode": strict}]
    monkeypatch.setattr(native, "RDMA_DEVICES", tmp_path / "none")  # which only UCX is asked about
    native.new_agent(fake, "one", options.model_copy(update={"plugin": "OTHER"}))
    assert given[-2:] == [("UCX", {"ucx_devices": "mlx5_0:1,mlx5_1:1", "num_workers": "1", "a": "b"}), ("OTHER", {"a": "b"})]


# --- what the doctor tells


def test_facts_name_engine_plugins_and_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    found = {fact.name: fact for fact in NixlBackend().kvcore_facts()}
    assert found["engine"].value.startswith("NIXL 1.") and "(nixl-" in found["engine"].value
    assert "UCX" in found["plugins"].value.split(", ")
    assert found["transports"].value.startswith("tcp, shared memory")
    for name, fact in found.items():
        assert not name.startswith("lib") or (fact.value and fact.advice)


def test_the_doctor_finds_the_engine_and_moves_a_page_over_what_ucx_tls_says() -> None:
    done = command("doctor", "nixl", "--json", UCX_TLS="tcp")
    (found,) = json.loads(done.stdout)["backends"]
    assert done.returncode == 0 and found["ok"], found["problem"]
    facts = {fact["name"]: fact["value"] for fact in found["facts"]}
    assert facts["engine"].startswith("NIXL 1.") and facts["transports"] == "as UCX_TLS says: tcp"


def test_facts_name_the_variables_of_the_process_and_not_what_is_set_for_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UCX_MODULES", "NIXL_SET_BY_KVCORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UCX_TLS", "tcp")
    (told,) = [fact.value for fact in native.facts() if fact.name == "environment"]
    assert "UCX_TLS=tcp" in told and "UCX_MODULES" not in told


def test_facts_of_a_missing_engine_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in native.PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    (fact,) = NixlBackend().kvcore_facts()
    assert (fact.name, fact.value) == ("engine", "missing") and "pip install" in fact.advice


LOADS = """
import sys, kvcore
kvcore.load_backend("nixl")
assert not {"nixl", *native.PACKAGES} & {*sys.modules}
"""


def test_choosing_and_checking_it_loads_no_nixl() -> None:
    code = LOADS.replace("native.PACKAGES", repr(native.PACKAGES))
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=True)
