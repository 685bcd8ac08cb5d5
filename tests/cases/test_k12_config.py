"""Loading plugins, registering memory and reading settings: what is wrong is told at the start, with the name of what is wrong."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from kvcore import KVManager, KVPoll, Pool, hookimpl
from kvcore.config import Config, Limits
from kvcore.errors import BackendLoadError, BackendNotFoundError, BackendOptionsError, ConfigError, KVCoreError, RegistrationError, shown
from kvcore.hookspecs import API_VERSION, REQUIRED, BackendInfo, NothingPosted, OpenContext, Transfer
from kvcore.registry import validated_options
from tests.fake_backends import BadStartBackend, MemoryBackend, install, running, start
from tests.helpers import BACKENDS, SOON_S, config, duo, ended, memory, number, own_threads, wait_until

ROLES = ("prefill", "decode")


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("KVCORE_"):
            monkeypatch.delenv(name)


def three_regions() -> Pool:
    return Pool.from_tensors("kv", [np.zeros((4, 64 * (n + 1)), np.uint8) for n in range(3)], page_size=16)


def told(error: BaseException, *words: str) -> None:
    """One of our errors, in one line, with these words."""
    assert isinstance(error, KVCoreError)
    for word in words:
        assert word in str(error)
    assert "\n" not in str(error)


def stopped(error_type: type[BaseException], role: str = "prefill", backend: str = "fake") -> BaseException:
    """Starting fails with one of our errors, in one line, and nothing is left running."""
    before = own_threads()
    with pytest.raises(error_type) as caught:
        KVManager(config(role, backend), [three_regions()])
    told(caught.value)
    wait_until(lambda: not own_threads() - before, what="no thread left")
    return caught.value


def stopped_tidily(fake: type[MemoryBackend], error_type: type[BaseException], role: str, *words: str) -> BaseException:
    """As ``stopped``, with these words; the engine is closed and no memory is registered with it."""
    error = stopped(error_type, role)
    told(error, *words)
    assert fake.made[-1].regions == [] and fake.made[-1].calls[-1] == "close"
    return error


# --- C97


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    ("name", "near"), [("moonkake", "mooncake"), ("nixxl", "nixl"), ("locl", "local"), ("MORI", ""), ("xyzzy", ""), ("", "")]
)
def test_c97_an_unknown_backend_name(name: str, near: str, role: str) -> None:
    """An unknown name is one short error with the known names, a near match and how to install it, before anything starts."""
    error = stopped(BackendNotFoundError, role, name)
    told(error, f"no backend {name!r} is installed", "installed are: ", "local", "to add one: ")
    assert f"did you mean {near!r}?" in str(error) if near else True
    assert len(str(error)) < 300


def made_of(hooks: dict[str, object]) -> type[MemoryBackend]:
    """A backend class that inherits none of its hooks."""
    return type("Partial", (), {name: value for name, value in hooks.items() if name not in ("__dict__", "__weakref__")})  # type: ignore[return-value]


@pytest.mark.parametrize("hook", sorted(REQUIRED))
def test_c97_a_plugin_without_a_required_piece(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that lacks a required hook is refused with the hook's name, before its engine is started."""
    fake = install(monkeypatch, made_of({name: value for name, value in vars(MemoryBackend).items() if name != hook}))
    told(stopped(BackendLoadError), "Partial", f"lacks the required hook {hook}", "kvcore.hookimpl")
    assert [backend.calls for backend in fake.made] == [[]]


@pytest.mark.parametrize(
    ("name", "mark", "words"),
    [
        ("kvcore_aborted", hookimpl, ["kvcore_aborted", "did you mean 'kvcore_abort'?"]),
        ("kvcore_aborted", lambda function: function, ["kvcore_aborted", "did you mean 'kvcore_abort'?"]),
        ("kvcore_progress", lambda function: function, ["kvcore_progress", "without a mark", "kvcore.hookimpl"]),
    ],
)
def test_c97_a_plugin_with_a_piece_that_would_never_be_called(
    name: str, mark: Callable[[Any], Any], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelt hook, or one without its mark, is refused with its name and the right one, before the engine is started."""
    fake = install(
        monkeypatch, type("Misspelt", (MemoryBackend,), {name: mark(lambda self, room: None) if mark is hookimpl else lambda self: None})
    )
    told(stopped(BackendLoadError), "Misspelt", *words)
    assert [backend.calls for backend in fake.made] == [[]]


# --- C98


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (-12, ["returned -12"]),
        (0, ["returned 0"]),
        (False, ["returned False"]),
        (OSError(12, "Cannot allocate\nmemory"), ["OSError", "12", "Cannot allocate memory"]),
        (MemoryError(), ["MemoryError"]),
        (SystemExit("driver gone"), ["SystemExit", "driver gone"]),
    ],
    ids=repr,
)
def test_c98_memory_that_is_not_registered_stops_the_start(
    role: str, bad: object, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of three buffers is not registered: the start fails with buffers, lengths and code, and the first is deregistered."""
    fake = install(monkeypatch, BadStartBackend)
    fake.at_second = bad
    buffers = ["region 0 (256 bytes at 0x", "region 1 (512 bytes at 0x", "region 2 (768 bytes at 0x"]
    error = stopped_tidily(fake, RegistrationError, role, "'fake'", "kvcore_register", *buffers, "cpu:0", "ulimit -l", *words)
    assert error.__cause__ is (bad if isinstance(bad, BaseException) else None)
    assert "unregister" in fake.made[0].calls
    fake.at_second = None  # what register returns when all is well
    with KVManager(config(role, "fake"), [three_regions()]):
        assert len(fake.made[1].regions) == 3


def test_c98_a_backends_own_account_of_it_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that names the buffer itself, and has undone what it did, has its error passed on word for word."""
    fake = install(monkeypatch, BadStartBackend)
    fake.at_second = RegistrationError("region 1 of 512 bytes: code -12; raise the limit")
    fake.tidy = True
    assert stopped_tidily(fake, RegistrationError, "prefill") is fake.at_second
    assert "unregister" not in fake.made[0].calls


def test_c98_many_buffers_are_not_all_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many buffers the error stays short."""
    fake = install(monkeypatch, BadStartBackend)
    fake.at_second = -1
    with pytest.raises(RegistrationError, match="and 6 more") as error:
        KVManager(config("prefill", "fake"), [Pool.from_tensors("kv", memory(2, layers=10), page_size=16)])
    assert len(str(error.value)) < 700


# --- C99


@pytest.mark.parametrize(
    ("error", "quiescent"),
    [(NothingPosted("register: code -12"), True), (OSError(12, "register: code -12"), False)],
    ids=["refused", "raised"],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_c99_registration_that_fails_at_first_use(backend: str, error: Exception, quiescent: bool) -> None:
    """A backend that registers when it is first used, and fails: that room fails on both sides with the cause, and all else goes on."""
    with duo(backend, quarantine_s=16.0) as both:
        sender, receiver = both.open()
        both.plan.raise_(error, room=sender.room)
        receiver.receive([1])
        sender.send([1], last=True)
        for handle in (sender, receiver):
            ended(handle, KVPoll.FAILED)
            assert handle.failure is not None and "register: code -12" in handle.failure.reason
            assert handle.wait_release_safe(SOON_S if quiescent else 0.0) is quiescent
        both.transfer([1, 2], [3, 4])
        assert both.prefill.healthy and both.decode.healthy


def test_c99_a_backend_of_its_own_that_fails_at_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with the failure in the backend itself; the next room over the same pair succeeds."""
    fake = install(monkeypatch, MemoryBackend)
    with running(fake) as (pair,):

        def first_use(transfer: Transfer) -> None:
            raise NothingPosted("memory cannot be registered: code -12")

        room = number()
        fake.made[0].answers[room] = first_use
        for handle in start(pair, 1, room):
            ended(handle, KVPoll.FAILED)
            assert handle.failure is not None and "code -12" in handle.failure.reason
            assert handle.wait_release_safe(SOON_S)
        sender, _ = start(pair, 2)
        ended(sender, KVPoll.SUCCESS)


# --- C100


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (-3, ["returned -3"]),
        (KeyError("MC_METADATA_SERVER"), ["KeyError", "MC_METADATA_SERVER"]),
        (OSError(19, "No such device"), ["OSError", "19", "No such device"]),
        (SystemExit(1), ["SystemExit"]),
    ],
    ids=repr,
)
def test_c100_an_engine_that_does_not_start(role: str, bad: object, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names plugin, call, code or cause (so also an unset variable), the addresses used and what to check."""
    fake = install(monkeypatch, BadStartBackend)
    fake.at_open = bad
    said = ["'fake'", "kvcore_open", f"{role} rank 0", "host '127.0.0.1'", "bind '127.0.0.1'", "environment variables", *words]
    error = stopped_tidily(fake, BackendLoadError, role, *said)
    assert error.__cause__ is (bad if isinstance(bad, BaseException) else None)


def test_c100_an_error_that_says_it_all_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that knows what is wrong has its error passed on as it is."""
    fake = install(monkeypatch, BadStartBackend)
    fake.at_open = ConfigError("cannot listen on port 80")
    assert stopped_tidily(fake, ConfigError, "decode") is fake.at_open


# --- C101


class Options(BaseModel):
    """Options of a backend, one of them a switch."""

    safe: bool = True


INFO = BackendInfo("made", "1", "1", API_VERSION, Options)
YES = ["1", "true", "True", "TRUE", "yes", "Yes", "on", "y", "t"]
NO = ["0", "false", "False", "FALSE", "no", "No", "off", "n", "f"]
NEITHER = ["", " true ", "2", "maybe", "none", "-1", "true;", "nope"]


@pytest.mark.parametrize("text", [*YES, *NO, *NEITHER])
def test_c101_text_for_true_and_false(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text for a switch means the same from the environment, from a file and from a dict; other text is refused with the setting's name."""
    file = tmp_path / "kvcore.toml"
    file.write_text(f'role = "both"\n[backend_options]\nsafe = "{text}"\n', encoding="utf-8")
    from_file, from_dict = Config.load(file).backend_options, Config(role="both", backend_options={"safe": text}).backend_options
    monkeypatch.setenv("KVCORE_BACKEND_OPTIONS__SAFE", text)
    for given in (Config.load(role="both").backend_options, from_file, from_dict):
        if text in YES or text in NO:
            options = validated_options(INFO, given)
            assert isinstance(options, Options) and options.safe is (text in YES)
            continue
        with pytest.raises(BackendOptionsError) as error:
            validated_options(INFO, given)
        told(error.value, "options of backend 'made'", "safe", "boolean", "None" if given["safe"] is None else text)


def test_c101_the_rule_is_documented() -> None:
    """The documentation names every text that is true, and every one that is false."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    rule = re.search(r"the texts (.*?) are true and (.*?) are false,\s+in capitals too", text)
    assert rule is not None
    assert [set(re.findall("`(.*?)`", part)) for part in rule.groups()] == [{word.lower() for word in words} for words in (YES, NO)]


# --- C102

LIMITS = {
    "bootstrap_s": 300,
    "input_s": 300,
    "transfer_s": 300,
    "ticket_s": 60,
    "liveness_s": 15,
    "quarantine_s": 600,
    "orphan_s": 30,
    "send_s": 5,
    "drain_s": 30,
}
BAD_SECONDS = ["5m", "0", "-1", "abc", "1e3", "", "nan", 0, -1, 0.0, -0.5, True, math.nan, math.inf, -math.inf, 10**400, [1], {}]
BAD_TEXT = ["5m", "0", "-1", "abc", "", "nan", "inf", "1e999", " 30", "1" + "0" * 400, "true"]


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("value", BAD_SECONDS, ids=lambda value: repr(value)[:12])
def test_c102_a_limit_that_is_no_number_of_seconds(name: str, value: object) -> None:
    """A limit that is no positive finite number is refused when the config is built, with setting, value and allowed form."""
    for build, setting in ((lambda: Limits(**{name: value}), name), (lambda: Config(role="both", limits={name: value}), f"limits.{name}")):
        with pytest.raises(ConfigError) as error:
            build()
        told(error.value, f"{setting}: must be a ", "number of seconds above 0", f"got {shown(value)}")


def test_c102_the_value_is_told_once() -> None:
    """The text names the value once."""
    with pytest.raises(ConfigError) as error:
        Limits(ticket_s="abc")
    assert str(error.value) == "Limits refused: ticket_s: must be a number of seconds above 0, got 'abc'"


@pytest.mark.parametrize("name", sorted(set(LIMITS) - {"quarantine_s"}))
def test_c102_only_the_quarantine_may_last_for_ever(name: str) -> None:
    """None means never, and only for the quarantine."""
    assert Limits(quarantine_s=None).quarantine_s is None
    with pytest.raises(ConfigError) as error:
        Limits(**{name: None})
    told(error.value, name, "None")


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize(("text", "seconds"), [("1e3", 1000.0), ("0.5", 0.5), ("30", 30.0), ("+2", 2.0)])
def test_c102_numbers_in_the_environment_are_seconds(name: str, text: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environment text that spells a number is that number of seconds."""
    limits = {"quarantine_s": None} if name != "quarantine_s" else {"ticket_s": 0.1, "liveness_s": 0.1}
    monkeypatch.setenv(f"KVCORE_LIMITS__{name.upper()}", text)
    value = getattr(Config.load(role="both", limits=limits).limits, name)
    assert value == seconds and type(value) is float


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("text", BAD_TEXT, ids=lambda text: text[:12])
def test_c102_other_text_in_the_environment(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other text is refused when the config is built, with the setting and the variable that it came from."""
    monkeypatch.setenv(f"KVCORE_LIMITS__{name.upper()}", text)
    with pytest.raises(ConfigError) as error:
        Config.load(role="both")
    told(error.value, f"limits.{name}: must be a ", "number of seconds above 0", f"(from KVCORE_LIMITS__{name.upper()})")


@pytest.mark.parametrize("value", ["5m", "0", "-1", "abc", "1e3", 0, -1, True, math.inf])
def test_c102_seconds_among_the_options_of_a_backend(value: object) -> None:
    """What is measured in seconds among a backend's options keeps the same rule, before the engine is started."""
    before = own_threads()
    with pytest.raises(BackendOptionsError) as error:
        KVManager(config("prefill", backend_options={"connect_s": value}), [three_regions()])
    told(error.value, "options of backend 'local'", "connect_s: must be a ", "number of seconds above 0", repr(value))
    assert own_threads() == before


# --- C103

LACKS = "module 'engine' has no attribute 'batch_write'"


class Outdated(MemoryBackend):
    """A plugin whose engine's library was changed under it; what that raises comes at ``moment``."""

    error: Exception = AttributeError(LACKS)
    moment = "open"

    def __init__(self) -> None:
        super().__init__()
        self.use_at("made")

    def use_at(self, moment: str) -> None:
        if moment == self.moment:
            raise self.error

    @hookimpl
    def kvcore_backend_info(self) -> BackendInfo:
        self.use_at("told")
        return BackendInfo("fake", "2.5", "1", API_VERSION)

    @hookimpl
    def kvcore_open(self, context: OpenContext) -> None:
        super().kvcore_open(context)
        self.use_at("open")

    @hookimpl
    def kvcore_register(self, regions: Any) -> None:
        self.use_at("register")


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("moment", ["made", "told", "open", "register"])
@pytest.mark.parametrize(
    "error", [AttributeError(LACKS), OSError("libengine.so: undefined symbol: batch_write"), ImportError(LACKS)], ids=repr
)
def test_c103_a_library_without_a_needed_call(role: str, moment: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin whose library lacks a call is refused at start, whenever it finds out: plugin, hook and the missing call are named."""
    fake = install(monkeypatch, type("Outdated", (Outdated,), {"error": error, "moment": moment}))
    found = stopped(RegistrationError if moment == "register" else BackendLoadError, role)
    told(found, "batch_write", type(error).__name__, {"made": "Outdated", "told": "kvcore_backend_info"}.get(moment, f"kvcore_{moment}"))
    assert found.__cause__ is error
    if moment == "open":
        told(found, "backend 'fake' 2.5 did not start")
    assert all(backend.calls in ([], ["open", "close"], ["open", "unregister", "close"]) for backend in fake.made)


@pytest.mark.parametrize("moment", ["made", "told", "open", "register"])
def test_c103_versions_that_the_plugin_names_are_passed_on(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plugin says itself of found version, needed version and missing call reaches the caller, whenever it says so."""
    text = "engine 0.2.1 lacks batch_write; backend 'fake' needs engine 0.3 or newer, upgrade it"
    install(monkeypatch, type("Outdated", (Outdated,), {"error": BackendLoadError(text), "moment": moment}))
    found = stopped(BackendLoadError)
    assert text in str(found)
    assert str(found) == text or isinstance(found.__cause__, BackendLoadError)
