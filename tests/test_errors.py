"""Errors and the words all modules share: what people and programs read when something fails."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

import kvcore
from kvcore import errors
from kvcore.errors import KVCoreError, KVTransferError
from kvcore.faults import FaultPlan
from kvcore.states import MAX_ATTEMPT, MAX_REASON_BYTES, MAX_ROOM, FailureCode, KVPoll, Reason, RoomId, RoomKey
from tests.error_table import CASES, Case, Site, raised_at, sites, templates, tools
from tests.helpers import Duo, duo, number

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
    start = f"room {MAX_ROOM}/3 failed: peer silent for 15 s (peer_lost, from decode rank 2); "
    assert str(FAILED) == start + errors.NEXT_STEP[FailureCode.PEER_LOST]


@pytest.mark.parametrize(
    "again", [pickle.loads(pickle.dumps(FAILED)), copy.copy(FAILED), copy.deepcopy(FAILED)], ids=["pickle", "copy", "deepcopy"]
)
def test_a_transfer_error_survives_pickling_and_copying(again: KVTransferError) -> None:
    assert type(again) is KVTransferError and again is not FAILED
    assert str(again) == str(FAILED)
    assert vars(again) == vars(FAILED)


# --- every text: what happened, to what, what to do next, in one line

STEPS = "add|allocate|answer|build|check|choose|clear|close|correct|declare|encode|free|give|leave|let|list|make|mark|name|open|pass|"
STEPS += "publish|put|raise|reinstall|rename|report|run|say|see|send|set|shorten|split|start|take|try|uninstall|unset|upgrade|use|write"
NEXT_STEP = re.compile(rf"[;,] [^;]*\b({STEPS})\b|\b(must|should) be\b|; .*\bmust\b|usual causes: |pip install |try: kvcore")
"""A clause that tells a person to do something, or says what is allowed."""

TOOLS = ("bench/", "demo/", "doctor/", "new/", "buffers.py", "cli.py", "cli_options.py", "explain.py", "progress.py", "sides.py")
"""Commands run in processes of their own, and their own tests have them fail there. Here their texts are read, see below."""
PASSED_ON = {"{}: {}"}
"""Texts that pass on the text of an error from another process."""


def flaws(text: str) -> list[str]:
    """What is wrong with a text, apart from what it says."""
    found = {
        "not one printable line": not text.isprintable(),
        "ends like a sentence, which the others do not": text.endswith((".", ";", ":", " ", "!")),
        "empty": not text.strip(),
        "blanks at the start or doubled": text != text.strip() or "  " in text,
        "longer than anybody reads": len(text) > 900,
        "no next step": NEXT_STEP.search(text) is None,
    }
    return [flaw for flaw, there in found.items() if there]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, BaseException | None]:
    """What each case of the table raised, and what the tools in it looked like to its text."""
    found: dict[str, BaseException | None] = {}
    with tools(tmp_path_factory.mktemp("errors")) as shared:
        for case in CASES:
            with pytest.MonkeyPatch.context() as shared.patch:
                found[case.what] = raised(lambda case=case: case.act(shared))  # type: ignore[misc]
        names = {"busy": str(shared.busy), "prefill": shared.pair.prefill.address}
    WORDS.update(names)
    return found


@pytest.fixture(scope="module")
def tools_pair() -> Iterator[Duo]:
    with duo() as pair:
        yield pair


WORDS: dict[str, str] = {}
"""What stands for {busy} and {prefill} among the words of a case."""


def raised(act: Callable[[], object]) -> BaseException | None:
    try:
        act()
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_each_error_names_what_happened_to_what_and_the_next_step(case: Case, outcomes: dict[str, BaseException | None]) -> None:
    error = outcomes[case.what]
    assert type(error) is case.error
    text = str(error)
    assert flaws(text) == [], text
    for word in case.words:
        assert word.format(**WORDS) in text
    if case.cause is None:
        assert error.__cause__ is None
    else:
        assert isinstance(error.__cause__, case.cause)


class Unshown:
    """Neither ``str`` nor ``repr`` of it can be had."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


AWKWARD: dict[str, Any] = {
    "array": np.zeros((40, 40)),
    "long text": "x" * 2_000_000,
    "unprintable text": "a\nb\x1b[2J\ud800",
    "huge number": 10**10_000,
    "unshown": Unshown(),
}
"""Values that no error may echo as they are."""

GIVEN: dict[str, Callable[[Duo, Any], object]] = {
    "room": lambda pair, value: pair.prefill.sender(value),
    "attempt": lambda pair, value: pair.prefill.sender(1, value),
    "prefill": lambda pair, value: pair.decode.receiver(1, value),
    "dp_rank": lambda pair, value: pair.decode.receiver(1, "a:1", dp_rank=value),
    "side": lambda pair, value: pair.prefill.rooms(value),
    "prefix pages": lambda pair, value: pair.decode.receiver(number(), pair.prefill.address).receive([], value),
    "page": lambda pair, value: pair.prefill.sender(number()).send([value]),
    "pool of pages": lambda pair, value: pair.prefill.sender(number()).send({str(type(value)) + str(value)[:200]: []}),
    "backend": lambda pair, value: kvcore.load_backend(value),
    "config": lambda pair, value: kvcore.KVManager(value, []),
    "pools": lambda pair, value: kvcore.KVManager(pair.prefill.config, value),
    "name of a pool": lambda pair, value: kvcore.Pool(value, [], num_pages=1, page_size=1),
    "page size": lambda pair, value: kvcore.KVManager(
        pair.prefill.config, [kvcore.Pool("kv", [kvcore.Region(1, 1)], num_pages=1, page_size=value)]
    ),
    "region": lambda pair, value: kvcore.Pool("kv", [value], num_pages=1, page_size=1),
    "device": lambda pair, value: kvcore.Pool("kv", [kvcore.Region(1, 1, value, part=5)], num_pages=1, page_size=1),  # type: ignore[arg-type]
    "tensor": lambda pair, value: kvcore.Pool.from_tensors("kv", [value, value], page_size=16, rows=value),
    "limit": lambda pair, value: kvcore.Limits(ticket_s=value),
    "setting": lambda pair, value: kvcore.Config(role=value),
    "hook of a fault": lambda pair, value: FaultPlan().fail(hook=str(type(value)) if isinstance(value, np.ndarray) else value),
    "times of a fault": lambda pair, value: FaultPlan().fail(times=-value if isinstance(value, int) else value),
    "delay": lambda pair, value: FaultPlan().delay(value),
}


@pytest.mark.parametrize("value", AWKWARD.values(), ids=AWKWARD.keys())
def test_whatever_is_given_the_error_is_one_line_of_bounded_length(value: Any, tools_pair: Duo) -> None:
    for what, give in GIVEN.items():
        if what == "pool of pages" and not isinstance(value, str):
            continue
        with pytest.raises(KVCoreError) as error:
            give(tools_pair, value)
        assert flaws(str(error.value).rstrip(". ")) == [], f"{what}: {error.value}"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "'a'"),
        (np.eye(2), "array([[1., 0.], [0., 1.]])"),
        ("x" * 5000, "'" + "x" * 96 + "..."),
        (Unshown(), "<Unshown that cannot be shown as text>"),
        (10**10_000, "<int that cannot be shown as text>"),
    ],
    ids=["text", "array", "long", "unshown", "huge"],
)
def test_a_value_is_shown_in_one_short_line(value: object, text: str) -> None:
    assert errors.shown(value) == text


@pytest.mark.parametrize(
    ("text", "line"), [("a\n  b\x1bc\ud800", "a b c"), ("x" * 30, "x" * 17 + "..."), ("", ""), (" " * 99 + "x", "...")]
)
def test_a_foreign_text_becomes_one_printable_line(text: str, line: str) -> None:
    assert errors.one_line(text, 20) == line
    assert errors.cause(OSError("a\nb")) == "OSError: a b" and errors.cause(OSError()) == "OSError"
    assert errors.cause(OSError(Unshown())) == "OSError: <OSError that cannot be shown as text>"


def test_an_error_about_many_settings_names_the_first_and_counts_the_others() -> None:
    with pytest.raises(errors.ConfigError) as error:
        kvcore.Config(role="both", **{f"setting{n}": n for n in range(500)})  # type: ignore[arg-type]
    assert "setting7" in str(error.value) and "and 492 more" in str(error.value) and flaws(str(error.value)) == []


def test_each_error_class_is_in_the_table() -> None:
    assert {case.error.__name__ for case in CASES} == NAMES | {"KVCoreError"}
    assert len({case.what for case in CASES}) == len(CASES)


def test_each_place_that_raises_an_error_is_triggered(outcomes: dict[str, BaseException | None]) -> None:
    known = sites()
    assert len(known) > 100
    reached: set[Site] = set()
    for error in outcomes.values():
        assert error is not None
        reached |= raised_at(error, known)
    missed = [str(site) for site in known if site not in reached and not site.module.startswith(TOOLS)]
    assert missed == [], "add a case to tests/error_table.py"


def test_each_text_in_the_source_has_a_next_step() -> None:
    """Also those of tools. A step that is filled in is seen where the table triggers it."""
    read = [(where, text) for where, text in templates() if text not in PASSED_ON and not text.endswith("; {}")]
    assert len(read) > 100
    assert [(where, text, flaws(text)) for where, text in read if flaws(text)] == []


@pytest.mark.parametrize("text", ["it broke", "port 80 is taken.", "port 80 is taken\n; choose another", "port 80; it is taken", ""])
def test_a_text_that_falls_short_is_found(text: str) -> None:
    assert flaws(text)


def test_each_code_of_a_failed_room_has_a_next_step() -> None:
    assert set(errors.NEXT_STEP) == set(FailureCode)


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
