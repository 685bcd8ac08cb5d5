"""Errors and the words all modules share: what people and programs read when something fails."""

from __future__ import annotations

import copy
import pickle

import msgspec
import pytest

from kvcore import errors
from kvcore.errors import KVCoreError, KVTransferError
from kvcore.states import MAX_ATTEMPT, MAX_REASON_BYTES, MAX_ROOM, FailureCode, KVPoll, Reason, RoomId, RoomKey

NAMES = {
    "BackendNotFoundError",
    "BackendLoadError",
    "BackendVersionError",
    "BackendConflictError",
    "BackendOptionsError",
    "RegistrationError",
    "ConfigError",
    "RoomError",
    "PageError",
    "IncompatiblePeerError",
    "KVTransferError",
}
CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, KVCoreError)]


def test_the_errors_are_those_of_the_documentation_and_have_one_base() -> None:
    assert {error.__name__ for error in CLASSES} == NAMES | {"KVCoreError"}
    assert issubclass(KVCoreError, Exception)


@pytest.mark.parametrize("error", CLASSES)
def test_every_error_says_what_it_is_for(error: type[KVCoreError]) -> None:
    assert error.__doc__


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.BackendOptionsError, errors.ConfigError),
        (errors.RoomError, ValueError),
        (errors.PageError, ValueError),
        (errors.BackendNotFoundError, LookupError),
    ],
)
def test_errors_can_be_caught_as_the_builtin_they_resemble(error: type[KVCoreError], builtin: type[Exception]) -> None:
    assert issubclass(error, builtin)


@pytest.mark.parametrize("error", [error for error in CLASSES if error is not KVTransferError])
def test_the_text_is_kept_as_given_and_survives_pickling(error: type[KVCoreError]) -> None:
    made = error("port 80 is taken; choose another")
    assert str(made) == "port 80 is taken; choose another"
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is error and str(again) == str(made)


FAILED = KVTransferError(RoomId(MAX_ROOM, 3), Reason(FailureCode.PEER_LOST, "peer silent for 15 s", "decode", 2))


def test_s5_a_transfer_error_names_room_reason_code_side_and_rank() -> None:
    assert (FAILED.room, FAILED.attempt, FAILED.reason) == (MAX_ROOM, 3, "peer silent for 15 s")
    assert (FAILED.code, FAILED.side, FAILED.rank) == (FailureCode.PEER_LOST, "decode", 2)
    assert str(FAILED) == f"room {MAX_ROOM}/3 failed: peer silent for 15 s (peer_lost, from decode rank 2)"


@pytest.mark.parametrize(
    "again", [pickle.loads(pickle.dumps(FAILED)), copy.copy(FAILED), copy.deepcopy(FAILED)], ids=["pickle", "copy", "deepcopy"]
)
def test_a_transfer_error_survives_pickling_and_copying(again: KVTransferError) -> None:
    assert type(again) is KVTransferError and again is not FAILED
    assert str(again) == str(FAILED)
    assert vars(again) == vars(FAILED)


def test_failed_is_the_least_state_so_that_ranks_reduce_by_minimum() -> None:
    assert [state.name for state in sorted(KVPoll)] == ["FAILED", "BOOTSTRAPPING", "WAITING_FOR_INPUT", "TRANSFERRING", "SUCCESS"]
    assert [int(state) for state in sorted(KVPoll)] == [0, 1, 2, 3, 4]
    assert {state for state in KVPoll if state.terminal} == {KVPoll.FAILED, KVPoll.SUCCESS}


def test_the_codes_are_those_of_the_documentation() -> None:
    names = "ABORTED REJECTED TIMEOUT PEER_LOST INCOMPATIBLE BACKEND BAD_PAGES NO_SUCH_ROOM RESOURCES SHUTDOWN INTERNAL"
    assert [code.name for code in FailureCode] == names.split()
    for code in FailureCode:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(code), type=FailureCode) is code


@pytest.mark.parametrize("text", ["", "plain", "ü" * 512, "x" * MAX_REASON_BYTES])
def test_a_reason_of_up_to_1_kib_travels_word_for_word(text: str) -> None:
    reason = Reason.of(FailureCode.ABORTED, text, "prefill", 1)
    assert reason.text == text
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(reason), type=Reason) == reason


@pytest.mark.parametrize("text", ["x" * 5000, "ü" * 600, "a" + "ü" * 600, "€" * 400, "🂡" * 300, "\ud800" * 2000])
def test_a_longer_reason_is_cut_between_characters(text: str) -> None:
    cut = Reason.of(FailureCode.ABORTED, text, "prefill").text
    size = len(cut.encode("utf-8"))
    assert MAX_REASON_BYTES - 4 < size <= MAX_REASON_BYTES
    assert text.startswith(cut) or set(cut) == {"?"}


@pytest.mark.parametrize("number", [0, 1, 2**31, 2**53 + 1, MAX_ROOM])
@pytest.mark.parametrize("attempt", [0, MAX_ATTEMPT])
def test_c37_a_room_comes_back_exactly_from_text_and_binary(number: int, attempt: int) -> None:
    room, key = RoomId(number, attempt), RoomKey("decode", number, attempt, 2**63 - 1)
    for codec in (msgspec.msgpack, msgspec.json):
        assert codec.decode(codec.encode(room), type=RoomId) == room
        assert codec.decode(codec.encode(key), type=RoomKey) == key
    assert str(room) == (f"{number}/{attempt}" if attempt else f"{number}")


def test_c37_the_bounds_of_a_room_are_those_of_signed_integers() -> None:
    assert (MAX_ROOM, MAX_ATTEMPT) == (2**63 - 1, 2**31 - 1)
