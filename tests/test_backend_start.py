"""A backend whose engine or memory registration does not start: the error, and what is undone (B3, C98 to C100)."""

from __future__ import annotations

import numpy as np
import pytest

from kvcore import Config, KVManager, KVPoll, Pool
from kvcore.errors import BackendLoadError, ConfigError, KVCoreError, RegistrationError
from kvcore.hookspecs import NothingPosted, Transfer
from tests.fake_backends import (
    BadStartBackend,
    MemoryBackend,
    install,
    running,
    start,
)
from tests.helpers import SOON_S, ended, memory, number, own_threads, wait_until


def three_regions() -> Pool:
    return Pool.from_tensors("kv", [np.zeros((4, 64 * (n + 1)), np.uint8) for n in range(3)], page_size=16)


def refused(fake: type[BadStartBackend], error_type: type[BaseException], *words: str) -> BaseException:
    """Starting fails with an error in one line that has these words, and leaves nothing behind."""
    before = own_threads()
    with pytest.raises(error_type) as caught:
        KVManager(Config(role="prefill", backend="fake"), [three_regions()])
    assert isinstance(caught.value, KVCoreError)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    wait_until(lambda: not own_threads() - before)
    assert fake.made[0].regions == []
    assert fake.made[0].calls[-1] == "close"
    return caught.value


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (-12, ["returned -12"]),
        (False, ["returned False"]),
        (OSError(12, "Cannot allocate\nmemory"), ["OSError", "Cannot allocate memory"]),
        (SystemExit("driver gone"), ["SystemExit", "driver gone"]),
    ],
)
def test_c98_b3_memory_that_is_not_registered_stops_the_start(monkeypatch: pytest.MonkeyPatch, bad: object, words: list[str]) -> None:
    fake = install(monkeypatch, BadStartBackend)
    fake.at_second = bad
    error = refused(fake, RegistrationError, "'fake'", "region 1 (512 bytes at 0x", "region 2 (768 bytes", "cpu:0", "ulimit -l", *words)
    assert error.__cause__ is (bad if isinstance(bad, BaseException) else None)
    assert "unregister" in fake.made[0].calls


def test_c98_b3_a_backends_own_account_of_it_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, BadStartBackend)
    fake.at_second = RegistrationError("region 1 of 512 bytes: code -12; raise the limit")
    fake.tidy = True
    assert str(refused(fake, RegistrationError)) == str(fake.at_second)
    assert "unregister" not in fake.made[0].calls  # it has left nothing registered


def test_many_regions_are_not_all_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, BadStartBackend)
    fake.at_second = -1
    with pytest.raises(RegistrationError, match="and 6 more"):
        KVManager(Config(role="prefill", backend="fake"), [Pool.from_tensors("kv", memory(2, layers=10), page_size=16)])


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (-3, ["returned -3"]),
        (KeyError("MC_METADATA_SERVER"), ["KeyError", "MC_METADATA_SERVER"]),
        (SystemExit(1), ["SystemExit"]),
    ],
)
def test_c100_an_engine_that_does_not_start_is_named_with_call_code_and_addresses(
    monkeypatch: pytest.MonkeyPatch, bad: object, words: list[str]
) -> None:
    fake = install(monkeypatch, BadStartBackend)
    fake.at_open = bad
    error = refused(fake, BackendLoadError, "'fake'", "kvcore_open", "prefill rank 0", "host '127.0.0.1'", "environment", *words)
    assert error.__cause__ is (bad if isinstance(bad, BaseException) else None)


def test_c100_an_error_that_says_it_all_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, BadStartBackend)
    fake.at_open = ConfigError("cannot listen on port 80")
    assert refused(fake, ConfigError) is fake.at_open


def test_c99_a_backend_that_fails_at_first_use_fails_that_room_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, MemoryBackend)
    with running(fake) as (duo,):

        def first_use(transfer: Transfer) -> None:
            raise NothingPosted("memory cannot be registered: code -12")

        room = number()
        fake.made[0].answers[room] = first_use
        for handle in start(duo, 1, room):
            ended(handle, KVPoll.FAILED)
            assert handle.failure is not None and "code -12" in handle.failure.reason
            assert handle.wait_release_safe(SOON_S)
        sender, _ = start(duo, 2)
        ended(sender, KVPoll.SUCCESS)
