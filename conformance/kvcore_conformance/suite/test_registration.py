"""B: how a backend is found, loaded, opened, given its memory and closed, and what is said where that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import kvcore
from kvcore import Capabilities
from kvcore.hookspecs import API_VERSION
from kvcore.registry import MEMORY
from kvcore_conformance.marks import full, rule
from kvcore_conformance.stage.arena import LIMITS, POOLS, Pair, number
from kvcore_conformance.stage.bare import Bare, beside, engines
from kvcore_conformance.stage.crew import Crew
from kvcore_conformance.stage.driver import Child, ChildError, error_of
from kvcore_conformance.stage.footprint import Footprint, lastly
from kvcore_conformance.subject import Subject

FRESH = """
import importlib, json, sys, sysconfig
import kvcore, kvcore.core, kvcore.backends, msgspec, numpy, pydantic, zmq  # what the core needs itself
opened = []
sys.addaudithook(lambda event, details: opened.append(str(details[0])) if event == "ctypes.dlopen" and details[0] else None)
modules = lambda: {one.entry_point.partition(":")[0] for one in kvcore.list_backends()}
compiled = lambda: {
    name for name, module in list(sys.modules.items())
    if str(getattr(module, "__file__", "")).endswith((".so", ".pyd"))
    and not module.__file__.startswith(sysconfig.get_path("stdlib") + "/lib-dynload")
}
listed = sorted(modules() & set(sys.modules))
before, chosen = compiled(), sys.argv[1]
opened.clear()
importlib.import_module(next(one.entry_point.partition(":")[0] for one in kvcore.list_backends() if one.name == chosen.partition("@")[0]))
itself = modules() & set(sys.modules)  # it may be made from another
kvcore.load_backend(chosen)().kvcore_backend_info()
print(json.dumps({
    "listed": listed, "others": sorted((modules() - itself) & set(sys.modules)), "compiled": sorted(compiled() - before), "opened": opened,
}))
"""
FRESH_S = 20.0
NO_MEMORY = (1 << 20, 0, "cpu")
"""Address, bytes and device: there is nothing at it, and of that nothing."""

MOST_KIB = 32 * 1024
"""What a life may take for itself, such as caches; less is seen by those who look at many rooms (B4)."""


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], None]:
    """Offers a backend as if a distribution of it were installed: (backend, distribution, the module's text)."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def offer(name: str, distribution: str, text: str) -> None:
        module = f"kvcore_kit_{distribution}"
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(text), encoding="utf-8")
        info = tmp_path / f"{distribution}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[kvcore.backends]\n{name} = {module}:Made\n", encoding="utf-8")

    return offer


# --- B1


@rule("B1")
def test_b1_nothing_but_the_chosen_backend_is_imported(kvcore_subject: Subject) -> None:
    """Listing imports none, and neither loading a backend nor asking for its info loads the library of its engine."""
    done = subprocess.run(
        [sys.executable, "-c", FRESH, kvcore_subject.backend], capture_output=True, text=True, timeout=FRESH_S, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **kvcore_subject.env},
    )  # fmt: skip
    assert done.returncode == 0, f"loading the backend in a process of its own failed: {done.stderr[-2000:]}"
    found = json.loads(done.stdout)
    assert not found["listed"], f"listing backends imported {found['listed']}"
    assert not found["others"], f"loading backend {kvcore_subject.backend!r} imported others: {found['others']}"
    assert not found["compiled"], f"importing the backend imports compiled modules, before its engine is opened: {found['compiled']}"
    assert not found["opened"], f"importing the backend opens libraries, before its engine is: {found['opened']}"


@rule("B1")
def test_b1_listing_never_raises(offered: Callable[[str, str, str], None], tmp_path: Path) -> None:
    """Not for backends that cannot be imported, nor for distributions whose metadata cannot be read."""
    offered("kitbroken", "kitlist", "raise SystemExit(3)")
    torn = tmp_path / "kittorn-1.0.dist-info"
    torn.mkdir()
    (torn / "entry_points.txt").write_bytes(b"[kvcore.backends\n\xff\xfe = = =\n")
    names = [one.name for one in kvcore.list_backends()]
    assert "kitbroken" in names and "local" in names, f"listed are {names}"
    assert "kvcore_kit_kitlist" not in sys.modules, "listing imported a backend"


# --- B2


@rule("B2")
def test_b2_what_is_not_installed_is_told_with_the_next_step(kvcore_subject: Subject) -> None:
    wrong = kvcore_subject.backend.partition("@")[0] + "x"
    with pytest.raises(kvcore.BackendNotFoundError) as caught:
        kvcore.load_backend(wrong)
    text = str(caught.value)
    assert wrong in text and kvcore_subject.backend.partition("@")[0] in text and "install" in text, f"it says {text!r}"


@rule("B2")
def test_b2_what_cannot_be_imported_is_told_with_its_cause(offered: Callable[[str, str, str], None]) -> None:
    offered("kitimport", "kitimport", "import a_library_that_is_not_there")
    with pytest.raises(kvcore.BackendLoadError) as caught:
        kvcore.load_backend("kitimport")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError), f"the original error is not chained: {caught.value.__cause__!r}"
    assert "a_library_that_is_not_there" in str(caught.value), f"it says {caught.value}"


@rule("B2")
def test_b2_hooks_of_another_version_are_told_with_both(offered: Callable[[str, str, str], None]) -> None:
    newer = (API_VERSION[0] + 1, 0)
    offered("kitnewer", "kitnewer", f"""
        import kvcore
        class Made:
            @kvcore.hookimpl
            def kvcore_backend_info(self):
                return kvcore.BackendInfo("kitnewer", "1.0", wire_version="1", api_version={newer})
    """)  # fmt: skip
    with pytest.raises(kvcore.BackendVersionError) as caught:
        kvcore.load_backend("kitnewer")
    text = str(caught.value)
    for version in (newer, API_VERSION):
        assert f"{version[0]}.{version[1]}" in text, f"it says {text!r}"
    assert "upgrade kvcore" in text, f"it says {text!r}"


@rule("B2")
def test_b2_two_offers_of_one_name_are_both_named(offered: Callable[[str, str, str], None]) -> None:
    for distribution in ("kitone", "kittwo"):
        offered("kitclash", distribution, "")
    with pytest.raises(kvcore.BackendConflictError) as caught:
        kvcore.load_backend("kitclash")
    text = str(caught.value)
    assert "kitclash@kitone" in text and "kitclash@kittwo" in text, f"it says {text!r}"


@rule("B2")
def test_b2_wrong_options_of_the_backend_are_refused(crew: Crew, kvcore_subject: Subject) -> None:
    with crew.lend(1) as (child,), pytest.raises(ChildError) as caught:
        child.start("decode", POOLS, backend_options={**kvcore_subject.options, "no_such_option": 1})
    assert caught.value.kind == "BackendOptionsError", f"an unknown option was refused with {caught.value}"
    assert "no_such_option" in caught.value.text, f"it says {caught.value.text!r}"


# --- B3


@rule("B3")
def test_b3_a_failed_registration_stops_the_start_and_is_undone(pair: Pair, crew: Crew, able: Capabilities) -> None:
    """The error names regions, sizes, code and causes; and then the same process can start and move pages."""
    with crew.lend(1) as (child,):
        child.work("make", "sabotage:Sabotage", "sabotage", backend=child.backend)
        child.call("sabotage", "registration")
        with pytest.raises(ChildError) as caught:
            child.start("prefill", POOLS, limits=LIMITS)
        child.call("sabotage", "over")
        assert caught.value.kind == "RegistrationError", f"it failed with {caught.value}"
        for part in (f"{POOLS[0].pages * POOLS[0].page_bytes} bytes", "13", "the engine says no", "ulimit"):
            assert part in caught.value.text, f"the error does not say {part!r}: {caught.value.text}"
        if able.reopens:
            child.start("prefill", POOLS, limits=LIMITS)
            moves_to(pair, child)


def moves_to(pair: Pair, prefill: Child) -> None:
    """Pages of another prefill process reach the pair's decode process."""
    mine, theirs = [3, 4, 9], [9, 1, 2]
    sender = prefill.sender(number())
    receiver = pair.decode.receiver(sender.room, prefill)
    receiver.receive(theirs)
    sender.send(mine, last=True)
    found = receiver.wait(), sender.wait()
    assert found == ("SUCCESS", "SUCCESS"), f"receiver and sender ended as {found}"
    assert pair.decode.digest(theirs) == prefill.digest(mine), "the pages that arrived are not those that were sent"
    sender.clear()
    receiver.clear()


@rule("B3")
def test_b3_memory_of_a_kind_that_is_not_declared_is_refused(crew: Crew, able: Capabilities) -> None:
    with crew.lend(1) as (child,):
        child.work("make", "sabotage:Sabotage", "sabotage", backend=child.backend)
        config = {"role": "decode", "backend": child.backend, "backend_options": child.options}
        for kind in sorted(set(MEMORY) - able.memory):
            with pytest.raises(ChildError) as caught:
                child.call("sabotage", "start_on", f"{kind}:0", config, [vars(pool) for pool in POOLS])
            assert caught.value.kind == "ConfigError", f"{kind} memory was refused with {caught.value}"
            assert kind in caught.value.text, f"the error does not name {kind!r}: {caught.value.text}"


@rule("B3")
def test_b3_memory_that_is_refused_is_refused_when_it_is_registered(bare: Bare, crew: Crew) -> None:
    """Not when a peer first needs it, and none of it stays registered. An engine may take whatever it can write to, so no memory must
    be refused."""
    with engines(crew, "prefill") as (engine,):
        engine.do("open")
        error = error_of(lambda: engine.do("register", NO_MEMORY))
        assert error is None or error.kind == "RegistrationError", f"no memory at all was refused with {error}"
        if error is None:
            late = error_of(engine.peer)
            assert late is None, f"what is wrong with the memory was told only when the endpoint was asked for: {late}"
            return
        again = error_of(lambda: engine.do("register"))
        assert again is None, f"after memory that it refused the engine does not take what is good: {again}"
        other = Bare(engine, bare.decode)
        other.fresh()
        other.join()
        bare.decode.do("disconnect", engine.instance)


# --- B7


@rule("B7")
def test_b7_a_closed_backend_can_be_opened_again(bare: Bare, able: Capabilities) -> None:
    """Or says that it cannot. To close once more is harmless, and no life leaves more than the one before."""
    for engine in (bare.prefill, bare.decode):
        for what in ("unregister", "close", "close"):
            engine.do(what)
    if able.reopens:
        both = (bare.prefill, bare.decode)
        held = [Footprint.of(engine.child.pid).plus(0, 0, MOST_KIB) for engine in both]
        reopened(bare)
        for engine in both:
            engine.do("unregister")
            engine.do("close")
        for engine, most in zip(both, held, strict=True):
            above = lastly(lambda pid=engine.child.pid, most=most: Footprint.of(pid).exceeds(most))  # type: ignore[misc]
            assert not above, f"closed for the second time {engine.side} holds more than for the first (resident in KiB): {above}"
        reopened(bare)
        return
    with pytest.raises(ChildError) as caught:
        bare.prefill.do("open")
    assert caught.value.kind != "TimeoutError", f"an engine that does not reopen did not say so: {caught.value}"
    for engine in (bare.prefill, bare.decode):
        engine.child.end()


def reopened(bare: Bare) -> None:
    """Open both engines, and move a page."""
    bare.fresh()
    bare.prefill.start()
    bare.decode.start()
    bare.join()


# --- T7


@rule("T7")
@pytest.mark.parametrize("side", ["prefill", pytest.param("decode", marks=full)])
def test_t7_another_engine_of_the_process_takes_nothing_along_when_it_is_closed(bare: Bare, side: str) -> None:
    """As when a process has two managers. An engine of which a process can have one only refuses to be opened, and no more than that."""
    with beside(bare.prefill if side == "prefill" else bare.decode) as other:
        error = error_of(lambda: other.do("open"))
        assert error is None or error.kind != "TimeoutError", f"to open a second engine in a process has not ended: {error}"
        if error is None:
            other.do("register")
            two = Bare(other, bare.decode) if side == "prefill" else Bare(bare.prefill, other)
            two.fresh()
            two.join()
            bare.fresh()
            bare.moves({"kv": ([5], [6])})
    bare.fresh()
    bare.moves({"kv": ([7], [8])})
    if error is None:
        (bare.decode if side == "prefill" else bare.prefill).do("disconnect", other.instance)
