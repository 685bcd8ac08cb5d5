"""Finding, loading and checking backends, with distributions made up in a temporary folder."""

from __future__ import annotations

import importlib
import logging
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcore.errors import (
    BackendConflictError,
    BackendLoadError,
    BackendNotFoundError,
    BackendVersionError,
    KVCoreError,
)
from kvcore.hookspecs import API_VERSION
from kvcore.installed import InstalledBackend, list_backends
from kvcore.registry import load_backend

BACKEND = """
    from kvcore.hookspecs import BackendInfo, hookimpl

    class Backend:
        @hookimpl
        def kvcore_backend_info(self):
            return BackendInfo({name!r}, "1", "1", {version!r})
        @hookimpl
        def kvcore_open(self, options, context): pass
        @hookimpl
        def kvcore_register(self, regions): pass
        @hookimpl
        def kvcore_endpoint(self): pass
        @hookimpl
        def kvcore_connect(self, peer): pass
        @hookimpl
        def kvcore_transfer(self, transfer): pass
        @hookimpl
        def kvcore_poll(self, tickets): return []
        @hookimpl
        def kvcore_close(self): pass
"""


Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a distribution with one module and its entry points on ``sys.path``; its modules are forgotten afterwards."""
    before = set(sys.modules)

    def make(
        name: str,
        *,
        distribution: str = "",
        source: str = BACKEND,
        api: tuple[int, int] = API_VERSION,
        entries: str | bytes = "",
        metadata: bytes | None = None,
        folder: str = "",
        version: str = "3.1",
        calls_itself: str = "",
    ) -> Path:
        distribution = distribution or f"kvcore-{name}"
        module = "faked_" + distribution.replace("-", "_").replace(".", "_")
        root = tmp_path / (folder or distribution)
        info = root / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        text = textwrap.dedent(source).format(name=calls_itself or name, version=api) if source is BACKEND else textwrap.dedent(source)
        (root / f"{module}.py").write_text(text)
        (info / "METADATA").write_bytes(metadata if metadata is not None else f"Name: {distribution}\nVersion: {version}\n".encode())
        entries = entries or f"[kvcore.backends]\n{name} = {module}:Backend\n"
        (info / "entry_points.txt").write_bytes(entries if isinstance(entries, bytes) else entries.encode())
        monkeypatch.syspath_prepend(root)
        importlib.invalidate_caches()
        return root

    yield make
    for module in set(sys.modules) - before:
        if module.startswith("faked_"):
            del sys.modules[module]


def told(error: BaseException, *words: str) -> None:
    """The text has every word and is one line."""
    assert isinstance(error, KVCoreError)
    for word in words:
        assert word in str(error)
    assert "\n" not in str(error)


def find(name: str) -> list[InstalledBackend]:
    return [backend for backend in list_backends() if backend.name == name]


def test_b1_listing_names_each_backend_and_imports_none(install: Install) -> None:
    install("alpha", source="raise SystemExit('imported')")
    install("beta", distribution="their.Backends")
    assert find("alpha") == [InstalledBackend("alpha", "kvcore-alpha", "3.1", "faked_kvcore_alpha:Backend")]
    assert find("beta")[0].distribution == "their.Backends"
    assert not [module for module in sys.modules if module.startswith("faked_")]
    assert list_backends() == sorted(list_backends())


def test_b1_loading_imports_that_backend_only(install: Install) -> None:
    install("alpha")
    install("beta", source="raise SystemExit('imported')")
    backend = load_backend("alpha")
    assert backend.__module__ == "faked_kvcore_alpha"
    assert backend is load_backend("alpha@kvcore-alpha") is load_backend("alpha@KVCore_Alpha")
    assert "faked_kvcore_beta" not in sys.modules


@pytest.mark.parametrize(
    "broken",
    [
        {"entries": "[kvcore.backends]\nno equals sign here\n"},
        {"entries": b"\xff\xfe\x00[kvcore.backends]\n\x80 = x\n"},
    ],
)
def test_b1_a_distribution_with_broken_entry_points_hides_no_other(
    install: Install, broken: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    install("alpha")
    install("beta", **broken)
    with caplog.at_level(logging.WARNING, "kvcore.installed"):
        assert len(find("alpha")) == 1
        assert load_backend("alpha").__module__ == "faked_kvcore_alpha"
    assert find("beta") == []
    assert "kvcore-beta" in caplog.text


@pytest.mark.parametrize("metadata", [b"", b"\xff\xfe\xfd", b"Version: 3.1\n", b"Name: kvcore-beta\n"])
def test_b1_a_distribution_without_name_or_version_is_listed_and_loads(install: Install, metadata: bytes) -> None:
    install("alpha")
    install("beta", metadata=metadata)
    assert len(find("alpha")) == 1
    assert "unknown" in (find("beta")[0].distribution, find("beta")[0].version)
    assert load_backend("beta").__module__ == "faked_kvcore_beta"


def test_b1_a_path_hook_that_raises_does_not_stop_the_list(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Finder:
        @staticmethod
        def find_spec(*_: object) -> None:
            return None

        @staticmethod
        def find_distributions(*_: object) -> None:
            raise RuntimeError("odd finder")

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    with caplog.at_level(logging.WARNING, "kvcore.installed"):
        assert isinstance(list_backends(), list)
    assert "odd finder" in caplog.text


def test_a_distribution_found_twice_on_the_path_is_no_conflict(install: Install) -> None:
    install("alpha", version="1.0", folder="old")
    install("alpha", distribution="KVCore_Alpha", version="2.0", folder="new")
    assert find("alpha") == [InstalledBackend("alpha", "KVCore_Alpha", "2.0", "faked_KVCore_Alpha:Backend")]
    assert load_backend("alpha").__module__ == "faked_KVCore_Alpha"


def test_c97_an_unknown_name_lists_the_known_ones_and_a_near_match(install: Install) -> None:
    install("alpha")
    with pytest.raises(BackendNotFoundError) as error:
        load_backend("alpho")
    told(error.value, "'alpho'", "did you mean 'alpha'?", "alpha", "install the distribution that offers it")


@pytest.mark.parametrize("name", ["", "@", "a b; rm -rf\n", "@kvcore-alpha", "ünïcode"])
def test_b2_odd_names_are_unknown_names(name: str) -> None:
    with pytest.raises(BackendNotFoundError) as error:
        load_backend(name)
    told(error.value)
    assert "rm -rf\n" not in str(error.value)


def test_b2_two_distributions_with_one_name_are_told_apart_by_distribution(install: Install) -> None:
    install("alpha", distribution="first")
    install("alpha", distribution="second")
    with pytest.raises(BackendConflictError) as error:
        load_backend("alpha")
    told(error.value, "alpha@first", "alpha@second", "uninstall")
    assert load_backend("alpha@second").__module__ == "faked_second"
    with pytest.raises(BackendNotFoundError) as missing:
        load_backend("alpha@third")
    told(missing.value, "'third'", "alpha@first", "alpha@second")


@pytest.mark.parametrize(
    ("source", "cause", "says"),
    [
        ("import module_that_is_not_there", ModuleNotFoundError, "module_that_is_not_there"),
        ("raise OSError('libfabric.so: cannot open\\n  shared object')", OSError, "libfabric.so: cannot open shared object"),
        ("raise SystemExit(3)", SystemExit, "3"),
        ("def broken(:", SyntaxError, "invalid syntax"),
        ("class BaseOnly(BaseException): pass\nraise BaseOnly()", BaseException, "BaseOnly"),
        ("Backends = 1", AttributeError, "Backend"),
    ],
)
def test_b2_a_backend_that_does_not_import_chains_the_cause(install: Install, source: str, cause: type[BaseException], says: str) -> None:
    install("alpha", source=source)
    with pytest.raises(BackendLoadError) as error:
        load_backend("alpha")
    told(error.value, "'alpha'", "kvcore-alpha 3.1", says, "import faked_kvcore_alpha")
    assert isinstance(error.value.__cause__, cause)


def test_an_interrupt_during_the_import_stays_an_interrupt(install: Install) -> None:
    install("alpha", source="raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_backend("alpha")


def test_b2_an_entry_point_that_is_no_class_is_refused(install: Install) -> None:
    install("alpha", source="Backend = 5")
    with pytest.raises(BackendLoadError) as error:
        load_backend("alpha")
    told(error.value, "'alpha'", "int", "class")


def test_b2_an_entry_point_that_is_no_reference_is_refused(install: Install) -> None:
    install("alpha", entries="[kvcore.backends]\nalpha = !!!\n")
    with pytest.raises(BackendLoadError) as error:
        load_backend("alpha")
    told(error.value, "'alpha'")


def test_b2_a_backend_must_call_itself_by_the_name_of_its_entry_point(install: Install) -> None:
    install("alpha", calls_itself="omega")
    with pytest.raises(BackendLoadError) as error:
        load_backend("alpha")
    told(error.value, "'alpha'", "'omega'")


def test_b2_a_backend_for_other_hooks_is_refused_when_loaded(install: Install) -> None:
    install("alpha", api=(API_VERSION[0], API_VERSION[1] + 1))
    with pytest.raises(BackendVersionError):
        load_backend("alpha")
