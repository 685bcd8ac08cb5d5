"""Variables set for an engine: what the process has set wins, what an earlier manager set does not, and settings are none of them."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest

from kvcore import Config, ConfigError
from kvcore.environment import set_variables, variables
from kvcore.errors import BackendOptionsError
from kvcore.hookspecs import Fact

log = logging.getLogger("kvcore.test")
CHILD = """
import logging, os
from kvcore.environment import set_variables
set_variables("mine", {"X_A": "2"}, logging.getLogger())
print(os.environ["X_A"])
"""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found = {"X_PROCESS": "1", "X_SAME": "s"}
    monkeypatch.setattr(os, "environ", found)
    return found


def test_what_the_process_has_set_wins_and_is_told(environment: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        set_variables("mine", {"X_PROCESS": "2", "X_SAME": "s", "X_NEW": "n"}, log)
    environment.pop("PYTEST_CURRENT_TEST", None)  # pytest's own, by and by
    assert environment == {"X_PROCESS": "1", "X_SAME": "s", "X_NEW": "n", "MINE_SET_BY_KVCORE": '{"X_NEW":"n"}'}
    assert caplog.messages == ["X_PROCESS=1 of the process wins over 2"]


def test_what_an_earlier_manager_set_is_set_anew_or_removed(environment: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    set_variables("mine", {"X_NEW": "1", "X_OLD": "1", "X_CHANGED": "1"}, log)
    environment["X_CHANGED"] = "by hand"
    with caplog.at_level(logging.INFO):
        set_variables("mine", {"X_NEW": "2"}, log)
    environment.pop("PYTEST_CURRENT_TEST", None)  # pytest's own, by and by
    assert environment == {
        "X_PROCESS": "1", "X_SAME": "s", "X_NEW": "2", "X_CHANGED": "by hand", "MINE_SET_BY_KVCORE": '{"X_NEW":"2"}',
    }  # fmt: skip
    assert not caplog.messages


def test_another_backends_variables_are_left_alone(environment: dict[str, str]) -> None:
    set_variables("mine", {"X_MINE": "1"}, log)
    set_variables("yours", {"X_YOURS": "1"}, log)
    set_variables("yours", {}, log)
    assert environment["X_MINE"] == "1" and "X_YOURS" not in environment


def test_a_process_that_inherits_them_may_set_them_anew() -> None:
    inherited = os.environ | {"X_A": "1", "MINE_SET_BY_KVCORE": json.dumps({"X_A": "1"})}
    done = subprocess.run([sys.executable, "-c", CHILD], env=inherited, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "2\n"


@pytest.mark.parametrize("noted", ["", "odd", "[1]", '{"X": 1}', "null", "{"])
def test_b2_a_note_that_is_not_ours_is_named(environment: dict[str, str], noted: str) -> None:
    environment["MINE_SET_BY_KVCORE"] = noted
    with pytest.raises(ConfigError, match="^MINE_SET_BY_KVCORE=.* is not what kvcore notes there .*; unset it$"):
        set_variables("mine", {}, log)


@pytest.mark.parametrize(
    ("wanted", "flaw"),
    [
        ({"": "x"}, "'' is no variable's name"),
        ({"A=B": "x"}, "'A=B' is no variable's name"),
        ({"A\0": "x"}, "'A\\x00' is no variable's name"),
        ({"\ud800": "x"}, "'\\ud800' is no variable's name"),
        ({"A": "x\0"}, "A cannot be 'x\\x00'"),
        ({"A": "\ud800"}, "A cannot be '\\ud800'"),
    ],
)
def test_b2_what_no_process_can_have_set_is_named_and_nothing_is_changed(
    environment: dict[str, str], wanted: dict[str, str], flaw: str
) -> None:
    with pytest.raises(BackendOptionsError) as error:
        set_variables("mine", {"X_NEW": "1"} | wanted, log)
    assert str(error.value) == f"options of backend 'mine' refused: environment: {flaw}; correct it"
    assert "X_NEW" not in environment and "MINE_SET_BY_KVCORE" not in environment


def test_variables_are_a_fact_if_there_are_any(environment: dict[str, str]) -> None:
    assert variables("X_") == [Fact("environment", "X_PROCESS=1, X_SAME=s")]
    assert variables("X_S", "Y_") == [Fact("environment", "X_SAME=s")] and variables("Y_") == []


def test_settings_are_still_loaded_after_it(environment: dict[str, str]) -> None:
    set_variables("mine", {"X_NEW": "1"}, log)
    assert Config.load(role="decode").role == "decode"
