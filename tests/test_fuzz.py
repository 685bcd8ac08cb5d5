"""Bad bytes for every port and every message (P5). ``python -m benchmarks.fuzz`` sends millions; here are some, and those once found."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

import msgspec
import pytest

from benchmarks.fuzz.letters import ENDERS, Life, Scene, dice_for, frame, letter, readable
from benchmarks.fuzz.mutate import mutated
from benchmarks.fuzz.run import Report, attack
from kvcore.peers import Peers
from kvcore.wire import Body, Letter
from tests.test_peers import introduction

SEED = 8


def scene() -> Scene:
    found = Scene.of(introduction("decode-1"), b"there", "prefill-1", (b"cos\nsystem\n.",))
    found.lives = [Life(1, 0, 2, 3)]
    return found


def well(report: Report, messages: int) -> None:
    assert report.wrong == []
    assert report.messages == messages and report.good_rooms >= 2
    assert all(report.bad[port] for port in ("prefill control", "decode control"))


def test_p5_bad_messages_leave_two_managers_as_they_were() -> None:
    well(attack("inside", SEED, range(20_000), batch=10_000), 20_000)


def test_p5_bad_messages_to_all_ports_of_two_processes_leave_them_as_they_were() -> None:
    report = attack("sockets", SEED, range(5000), batch=2500, stretch=200)
    well(report, 5000)
    assert set(report.ports) == {
        "prefill control", "decode control", "bootstrap", "prefill admin", "decode admin", "prefill data", "decode data"
    }  # fmt: skip
    assert report.bad["prefill bootstrap_port"] and report.bad["prefill admin"] and report.bad["decode admin"]


@pytest.mark.slow
def test_p5_two_million_bad_messages() -> None:
    well(attack("inside", SEED, range(1_500_000)), 1_500_000)
    well(attack("sockets", SEED, range(500_000)), 500_000)


def test_what_a_bad_message_broke_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(peers: Peers, *_: object) -> None:
        raise KeyError("nobody thought of that")

    monkeypatch.setattr(Peers, "_on_foreign", stumble)
    found = attack("inside", SEED, range(2000), batch=2000)
    assert any("exceptions" in text for text in found.wrong)


# --- the messages


def test_the_ith_message_is_made_from_its_number_and_half_are_valid_with_one_field_wrong() -> None:
    about = scene()
    made = [frame(SEED, index, about) for index in range(4000)]
    assert made == [frame(SEED, index, about) for index in range(4000)]
    kinds = Counter(kind for kind, _ in made)
    assert 0.45 < kinds["one field wrong"] / len(made) < 0.55 and len(kinds) == 8
    assert all(readable(data) for kind, data in made if kind == "valid")
    unreadable = sum(not readable(data) for kind, data in made if kind == "one field wrong")
    assert 0.3 < unreadable / kinds["one field wrong"] < 0.8, "some get past the decoder, and not all"


def test_every_type_of_letter_is_built_and_each_of_its_fields_made_wrong() -> None:
    about, built = scene(), set[str]()
    wrong: set[tuple[str, str]] = set()
    for index in range(20_000):
        dice = dice_for(SEED, index)
        good = letter(dice, about)
        kind = type(msgspec.convert(good, Letter).body).__name__
        built.add(kind)
        body: Any = mutated(dice, good).get("body")
        if isinstance(body, dict):
            changed = [name for name, value in good["body"].items() if name not in body or body[name] is not value]
            wrong |= {(kind, name) for name in changed}
    assert built == {body.__name__ for body in get_args(Body)}
    fields = {(body.__name__, name) for body in get_args(Body) if body not in ENDERS for name in body.__struct_fields__}
    assert fields <= wrong, fields - wrong
