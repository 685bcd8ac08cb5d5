"""Variables set for an engine: what the process has set wins, what an earlier manager set does not, and settings are none of them."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest

from kvcore import Config, ConfigError
from kvcore.environment import set_variables

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


def test_settings_are_still_loaded_after_it(environment: dict[str, str]) -> None:
    set_variables("mine", {"X_NEW": "1"}, log)
    assert Config.load(role="decode").role == "decode"
