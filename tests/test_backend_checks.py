"""What a backend class and its options must be before an engine is started: hooks, info, version, capabilities, defaults."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvcore.errors import BackendLoadError, BackendOptionsError, BackendVersionError, KVCoreError
from kvcore.hookspecs import API_VERSION, REQUIRED, BackendInfo, Capabilities, Hooks, KVCoreSpec, hookimpl
from kvcore.registry import plugin_manager, validated_options


class Full:
    """A backend with every required hook; tests take from it or add to it."""

    @hookimpl
    def kvcore_backend_info(self) -> BackendInfo:
        return BackendInfo("full", "2.5", "1", API_VERSION)

    @hookimpl
    def kvcore_open(self, options: object, context: object) -> None: ...
    @hookimpl
    def kvcore_register(self, regions: object) -> None: ...
    @hookimpl
    def kvcore_endpoint(self) -> None: ...
    @hookimpl
    def kvcore_connect(self, peer: object) -> None: ...
    @hookimpl
    def kvcore_transfer(self, transfer: object) -> int:
        return 7

    @hookimpl
    def kvcore_poll(self, tickets: object) -> list[object]:
        return []

    @hookimpl
    def kvcore_close(self) -> None: ...


def told(error: BaseException, *words: str) -> None:
    """The text has every word and is one line."""
    assert isinstance(error, KVCoreError)
    for word in words:
        assert word in str(error)
    assert "\n" not in str(error)


def test_the_hooks_that_the_core_calls_are_those_that_are_specified() -> None:
    specified = {name: inspect.signature(value) for name, value in vars(KVCoreSpec).items() if name.startswith("kvcore_")}
    called = {name: inspect.signature(value) for name, value in vars(Hooks).items() if name.startswith("kvcore_")}
    assert specified.keys() == called.keys() and specified.keys() >= REQUIRED
    for name, signature in specified.items():
        assert called[name].return_annotation == signature.return_annotation
        assert [(p.name, p.annotation) for p in called[name].parameters.values()] == [
            (p.name, p.annotation) for p in signature.parameters.values()
        ]


def backend_with(**hooks: object) -> type:
    return type("Made", (Full,), hooks)


def informing(**fields: Any) -> type:
    values: dict[str, Any] = {"name": "made", "version": "2.5", "wire_version": "1", "api_version": API_VERSION, **fields}
    return backend_with(kvcore_backend_info=hookimpl(lambda self: BackendInfo(**values)))


MAJOR, MINOR = API_VERSION


@pytest.mark.parametrize(
    ("api", "upgrade"),
    [
        ((MAJOR + 1, 0), "upgrade kvcore"),
        ((MAJOR, MINOR + 1), "upgrade kvcore"),
        ((MAJOR - 1, 9), "upgrade the distribution of backend 'made'"),
    ],
)
def test_b2_another_version_of_the_hooks_says_which_side_to_upgrade(api: tuple[int, int], upgrade: str) -> None:
    with pytest.raises(BackendVersionError) as error:
        plugin_manager(informing(api_version=api))
    told(error.value, f"{api[0]}.{api[1]}", f"{MAJOR}.{MINOR}", upgrade)


def test_b2_a_newer_hook_is_a_version_error_and_not_an_unknown_name() -> None:
    newer = informing(api_version=(MAJOR, MINOR + 1))
    newer.kvcore_read = hookimpl(lambda self: None)
    newer.kvcore_poll = hookimpl(lambda self, tickets, deadline: None)
    with pytest.raises(BackendVersionError):
        plugin_manager(newer)


def test_a_hook_under_another_method_name_is_accepted_and_its_unknown_name_is_not() -> None:
    good = backend_with(kvcore_drop=hookimpl(specname="kvcore_clear")(lambda self, room: None))
    assert plugin_manager(good)[2].name == "full"
    with pytest.raises(BackendLoadError) as error:
        plugin_manager(backend_with(drop=hookimpl(specname="kvcore_clearr")(lambda self, room: None)))
    told(error.value, "kvcore_clearr")


def test_an_argument_that_the_hook_does_not_have_is_refused() -> None:
    with pytest.raises(BackendLoadError) as error:
        plugin_manager(backend_with(kvcore_poll=hookimpl(lambda self, tickts: [])))
    told(error.value, "kvcore_poll", "tickts")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"capabilities": Capabilities(visible_on_done=False)}, "cannot add visibility"),
        ({"capabilities": Capabilities(max_bytes=0)}, "max_bytes=0"),
        ({"capabilities": Capabilities(max_descriptors=-1)}, "max_descriptors=-1"),
        ({"capabilities": Capabilities(parallel=0)}, "parallel=0"),
        ({"capabilities": Capabilities(descriptors="rows")}, "descriptors='rows'"),
        ({"capabilities": Capabilities(max_bytes=True)}, "max_bytes=True"),
        ({"capabilities": Capabilities(parallel=None)}, "parallel=None"),  # type: ignore[arg-type]
        ({"capabilities": Capabilities(max_descriptors=2.0)}, "max_descriptors=2.0"),  # type: ignore[arg-type]
        ({"capabilities": Capabilities(memory={"cpu"})}, "memory={'cpu'}; it must be a frozenset of cpu, cuda, rocm, npu"),  # type: ignore[arg-type]
        ({"capabilities": Capabilities(memory=frozenset({"gpu"}))}, "memory=frozenset({'gpu'})"),
        ({"capabilities": Capabilities(memory=frozenset())}, "memory=frozenset()"),
        ({"capabilities": Capabilities(blocking=1)}, "blocking=1; it must be True or False"),  # type: ignore[arg-type]
        ({"capabilities": Capabilities(exclusive="no")}, "exclusive='no'"),  # type: ignore[arg-type]
        ({"capabilities": None}, "BackendInfo"),
        ({"options": dict}, "BackendInfo"),
        ({"api_version": "1.0"}, "BackendInfo"),
        ({"api_version": (1,)}, "BackendInfo"),
        ({"name": None}, "BackendInfo"),
    ],
)
def test_r6_b2_an_info_this_core_cannot_work_with_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(BackendLoadError) as error:
        plugin_manager(informing(**fields))
    told(error.value, says)


def test_b2_a_backend_that_fails_before_it_is_opened_chains_the_cause() -> None:
    def fail(*_: object) -> None:
        raise OSError("no\ndevice")

    for hooks in ({"__init__": fail}, {"kvcore_backend_info": hookimpl(lambda self: fail())}):
        with pytest.raises(BackendLoadError) as error:
            plugin_manager(backend_with(**hooks))
        told(error.value, "OSError: no device")
        assert isinstance(error.value.__cause__, OSError)
    with pytest.raises(BackendLoadError, match="BackendInfo"):
        plugin_manager(backend_with(kvcore_backend_info=hookimpl(lambda self: None)))


def test_each_manager_has_its_own_instance_and_the_hooks_reach_it() -> None:
    manager, backend, info = plugin_manager(Full)
    other, second, _ = plugin_manager(Full)
    assert type(backend) is type(second) is Full and backend is not second and manager is not other
    assert info == BackendInfo("full", "2.5", "1", API_VERSION)
    assert manager.hook.kvcore_backend_info() == info
    assert manager.hook.kvcore_transfer(transfer=None, may_wait=True) == 7


def test_optional_hooks_have_defaults_that_give_way_to_the_backends_own() -> None:
    hook = plugin_manager(Full)[0].hook
    assert hook.kvcore_disconnect(peer="p") is False
    assert hook.kvcore_held_rooms() == []
    assert hook.kvcore_abort(room=None, tickets=[]) is None
    assert hook.kvcore_clear(room=None) is hook.kvcore_progress() is hook.kvcore_unregister(regions=[]) is None

    for mark in (hookimpl, hookimpl(trylast=True)):
        own = backend_with(kvcore_disconnect=mark(lambda self, peer: True), kvcore_held_rooms=mark(lambda self: ["room"]))
        hook = plugin_manager(own)[0].hook
        assert hook.kvcore_disconnect(peer="p") is True
        assert hook.kvcore_held_rooms() == ["room"]

    silent = plugin_manager(backend_with(kvcore_disconnect=hookimpl(lambda self, peer: None)))[0].hook
    assert silent.kvcore_disconnect(peer="p") is False


class Options(BaseModel):
    """An options model of a third party that neither forbids unknown keys nor is strict."""

    port: int = Field(0, ge=0, le=65535, alias="tcp_port")
    safe: bool = True
    frame: int = 4096

    model_config = ConfigDict(populate_by_name=True)

    @field_validator("frame")
    @classmethod
    def _power(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("must be a power of two\nsuch as 4096")
        return value

    @field_validator("safe")
    @classmethod
    def _safe(cls, value: bool) -> bool:
        if not value and cls.__name__ == "Broken":
            raise KeyError("safe")
        return value


class Broken(Options): ...


INFO = BackendInfo("made", "1", "1", API_VERSION, Options)


def test_options_become_the_backends_own_model() -> None:
    options = validated_options(INFO, {"tcp_port": 5, "frame": 64})
    assert type(options) is Options and options.port == 5 and options.frame == 64
    assert validated_options(INFO, {"port": 6}).port == 6
    assert validated_options(BackendInfo("none", "1", "1", API_VERSION), {}).model_dump() == {}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prot": 5}, ("'prot'", "5", "did you mean 'port'?", "frame, port, safe, tcp_port")),
        ({"port": 65536}, ("port", "65536", "65535")),
        ({"tcp_port": "many"}, ("tcp_port", "'many'", "integer")),
        ({"frame": 5000}, ("frame", "5000", "power of two such as 4096")),
        ({"safe": "maybe"}, ("safe", "'maybe'", "boolean")),
    ],
)
def test_b2_wrong_options_name_key_value_and_what_is_allowed(options: dict[str, object], says: tuple[str, ...]) -> None:
    with pytest.raises(BackendOptionsError) as error:
        validated_options(INFO, options)
    told(error.value, "'made'", *says)


def test_b2_a_backend_without_options_says_so() -> None:
    with pytest.raises(BackendOptionsError) as error:
        validated_options(BackendInfo("none", "1", "1", API_VERSION), {"port": 1})
    told(error.value, "'none'", "'port'", "takes none")


def test_b2_a_validator_that_breaks_is_still_an_options_error() -> None:
    with pytest.raises(BackendOptionsError) as error:
        validated_options(BackendInfo("made", "1", "1", API_VERSION, Broken), {"safe": False})
    told(error.value, "KeyError", "safe")
    assert isinstance(error.value.__cause__, KeyError)
