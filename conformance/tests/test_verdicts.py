"""From checks to verdicts: what fails a rule, a level and a run, and what waivers can and cannot do."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from kvcore_conformance import Subject, __version__, verdicts
from kvcore_conformance.marks import home
from kvcore_conformance.report.markdown import facts
from kvcore_conformance.report.model import Check, Report, RuleResult
from kvcore_conformance.report.table import table
from kvcore_conformance.requirements import Rule, rules
from kvcore_conformance.verdicts import Run, judge
from kvcore_conformance.waivers import Waivers

import kvcore
from kvcore.errors import ConfigError

CONTRACT = Path(__file__).parents[2] / "docs" / "contract.md"
LATER, PAST = "2999-01-31", "2020-01-31"


class Accelerated(Subject):
    """Declares memory that no test moves."""

    @property
    def capabilities(self) -> kvcore.Capabilities:
        return kvcore.Capabilities(memory=frozenset({"cpu", "rocm", "cuda"}))


class NeverAgain(Subject):
    """A backend that cannot be opened again."""

    @property
    def capabilities(self) -> kvcore.Capabilities:
        return kvcore.Capabilities(reopens=False)


@pytest.fixture(autouse=True)
def _no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "_engine", lambda subject: "1.0")


def checks(**spoilt: Check) -> list[Check]:
    """One that holds for every rule, but for those named."""
    return [spoilt.get(name, held(name)) for name in rules()]


def held(name: str, level: str = "") -> Check:
    return Check(f"test_{name.lower()}_x", name, level or home(name), passed=True, ran=True)


def broken(name: str, level: str = "") -> Check:
    return Check(f"test_{name.lower()}_y", name, level or home(name), passed=False, ran=True, problem="E   it is broken")


def run(found: list[Check], waivers: Waivers | None = None, subject: Subject | None = None) -> Report:
    return judge(Run(subject or Subject("local"), found, "quick", 7, 1.5, waivers or Waivers()))


def of(report: Report, name: str) -> RuleResult:
    return next(rule for rule in report.rules if rule.id == name)


@pytest.fixture
def waived(tmp_path: Path) -> Callable[[str], Waivers]:
    """Waivers of a file with this text."""

    def read(text: str) -> Waivers:
        file = tmp_path / "waivers.toml"
        file.write_text(text, encoding="utf-8")
        return Waivers.read(file)

    return read


def waiver(name: str, expires: str = LATER) -> str:
    return f'[[waiver]]\nrule = "{name}"\nreason = "the engine comes to it in spring"\nexpires = {expires}\n'


# --- the rules


def test_the_rules_are_those_of_the_contract_word_for_word() -> None:
    text = CONTRACT.read_text(encoding="utf-8")
    found = re.findall(r'^- <a id="(\w+)"></a>\*\*(\w+)\*\* (.*?)(?=\n- <a |\n\n|\Z)', text, re.MULTILINE | re.DOTALL)
    assert [(anchor, name, " ".join(words.split())) for anchor, name, words in found] == [
        (rule.anchor, rule.id, rule.text) for rule in rules().values()
    ]


def test_no_capability_lifts_a_rule_of_states_abort_clear_and_release() -> None:
    fixed = [name for name in rules() if name[0] in "SAC" or name in ("R1", "R2", "R3", "R4", "R5")]
    assert [name for name in fixed if rules()[name].lifted_by or rules()[name].level != "MUST"] == []


def test_what_lifts_a_rule_is_a_declared_capability() -> None:
    for rule in rules().values():
        rule.lifted(kvcore.Capabilities())  # raises for a name that is none


# --- a run


def test_a_run_in_which_every_check_holds_holds() -> None:
    report = run(checks())
    assert report.holds and report.levels == ["Core", "Abort and Clear"] and report.faults == []
    assert report.counts() == {"passed": len(rules())}
    assert (report.about.contract, report.about.kit) == ("1.0", __version__)


def test_one_failed_check_of_several_fails_its_rule_and_no_other() -> None:
    report = run([*checks(), broken("A2"), held("A2")])
    assert [rule.id for rule in report.rules if rule.outcome != "passed"] == ["A2"]
    assert of(report, "A2").outcome == "failed" and [check.name for check in of(report, "A2").failed] == ["test_a2_y"]
    assert not report.holds and report.levels == ["Core"]


def test_a_rule_without_a_check_is_not_run_and_fails_the_run() -> None:
    report = run([check for check in checks() if check.rule != "T6"])
    assert of(report, "T6").outcome == "not run" and not report.holds and report.levels == []


def test_a_check_that_the_run_did_not_come_to_is_not_taken_for_passed() -> None:
    report = run([*checks(), Check("test_c1_late", "C1", home("C1"))])
    assert of(report, "C1").outcome == "not run" and not report.holds and report.levels == []


def test_a_check_of_a_rule_that_there_is_not_fails_the_run() -> None:
    report = run([*checks(), Check("test_z9", "Z9", "Core", passed=True, ran=True)])
    assert not report.holds and report.faults == ["test_z9 names rule Z9, which the contract does not have"]


def test_a_level_is_told_only_when_every_rule_in_it_holds_as_a_whole() -> None:
    faults = [held("P2", "Faults"), held("R3", "Faults")]
    assert run([*checks(), *faults]).levels == ["Core", "Abort and Clear", "Faults"]
    assert run([*checks(), *faults, broken("T7", "Faults")]).levels == ["Abort and Clear"]
    assert run([*checks(), *faults, broken("R4")]).levels == ["Core", "Faults"]
    assert run([*checks(), *faults, broken("R6", "Soak")]).levels == ["Core", "Faults"]


def test_no_level_is_told_of_a_run_that_left_a_check_out() -> None:
    assert run([*checks(), held("P2", "Faults"), Check("test_t7", "T7", "Faults")]).levels == []
    assert run([held("T7", "Faults")]).levels == []


def test_memory_that_is_declared_and_that_no_test_moves_is_told() -> None:
    report = run(checks(), subject=Accelerated("local"))
    assert report.holds and report.untested == ["cuda", "rocm"] and run(checks()).untested == []
    assert "  not tested: cuda memory, which is declared" in list(table(report))
    assert ("memory", "cpu; declared and not tested: cuda, rocm") in facts(report)


# --- rules that do not apply


def test_a_declared_capability_lifts_a_rule() -> None:
    report = run([check for check in checks() if check.rule != "B7"], subject=NeverAgain("local"))
    assert (of(report, "B7").outcome, of(report, "B7").why) == ("not applicable", "declared reopens=False")
    assert report.holds and "Core" in report.levels


def test_a_lifted_rule_fails_all_the_same_if_a_check_of_it_does(waived: Callable[[str], Waivers]) -> None:
    report = run(checks(B7=broken("B7")), subject=NeverAgain("local"))
    assert of(report, "B7").outcome == "failed" and not report.holds and report.levels == ["Abort and Clear"]
    assert of(run(checks(B7=broken("B7")), waived(waiver("B7")), NeverAgain("local")), "B7").outcome == "waived"


def test_a_lifted_rule_whose_check_was_left_out_is_not_run() -> None:
    report = run(checks(B7=Check("test_b7", "B7", "Core")), subject=NeverAgain("local"))
    assert of(report, "B7").outcome == "not run" and not report.holds and report.levels == []


def test_a_waiver_for_a_lifted_rule_is_to_be_removed(waived: Callable[[str], Waivers]) -> None:
    report = run(checks(), waived(waiver("B7")), NeverAgain("local"))
    assert report.faults == ["waiver for B7: the rule holds, or does not apply; remove it"] and not report.holds


def test_a_rule_that_should_hold_is_told_and_does_not_fail_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    softer: dict[str, Rule] = {**rules(), "B6": replace(rules()["B6"], level="SHOULD")}
    monkeypatch.setattr(verdicts, "rules", lambda: softer)
    report = run(checks(B6=broken("B6")))
    assert of(report, "B6").outcome == "failed" and of(report, "B6").requirement == "SHOULD"
    assert report.holds and "Core" not in report.levels


# --- waivers


def test_a_waived_rule_may_fail_but_costs_its_level(waived: Callable[[str], Waivers]) -> None:
    report = run(checks(C4=broken("C4")), waived(waiver("C4")))
    assert (of(report, "C4").outcome, of(report, "C4").why) == ("waived", f"the engine comes to it in spring (until {LATER})")
    assert report.holds and report.levels == ["Core"]


def test_a_waiver_does_not_stand_for_a_check(waived: Callable[[str], Waivers]) -> None:
    report = run([check for check in checks() if check.rule != "C4"], waived(waiver("C4")))
    assert of(report, "C4").outcome == "not run" and not report.holds


def test_a_waiver_of_one_rule_covers_no_other(waived: Callable[[str], Waivers]) -> None:
    report = run(checks(C4=broken("C4"), C5=broken("C5")), waived(waiver("C4")))
    assert of(report, "C5").outcome == "failed" and not report.holds


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (waiver("S1"), "waiver for S1: the rule holds, or does not apply; remove it"),
        (waiver("Z9"), "waiver for Z9: there is no such rule; remove it"),
        (waiver("C4", PAST), f"waiver for C4 expired on {PAST}; keep the rule, or agree on another date"),
    ],
    ids=["a rule that holds", "no such rule", "expired"],
)
def test_a_waiver_that_should_not_be_there_fails_the_run(waived: Callable[[str], Waivers], text: str, fault: str) -> None:
    report = run(checks(C4=broken("C4")), waived(text + waiver("C4") * ("C4" not in text)))
    assert report.faults == [fault] and not report.holds


def test_a_waiver_holds_on_its_last_day(waived: Callable[[str], Waivers]) -> None:
    day = datetime.date(2027, 1, 31)
    found = waived(waiver("C4", str(day)))
    assert found.faults(rules(), [], day) == []
    assert len(found.faults(rules(), [], day + datetime.timedelta(days=1))) == 1


@pytest.mark.parametrize(
    "text",
    [
        '[[waiver]]\nrule = "C4"\nexpires = 2027-01-31\n',
        '[[waiver]]\nrule = "C4"\nreason = "so it is"\n',
        '[[waiver]]\nrule = "C4"\nreason = " "\nexpires = 2027-01-31\n',
        '[[waiver]]\nrule = "C4"\nreason = "so it is"\nexpires = "2027-01-31"\n',
        '[[waiver]]\nrule = "C4"\nreason = "so it is"\nexpires = 2027-01-31T00:00:00\n',
        '[[waiver]]\nrule = ["C4"]\nreason = "so it is"\nexpires = 2027-01-31\n',
        '[[waiver]]\nrule = "C4"\nreason = "so it is"\nexpires = 2027-01-31\nlevel = "Core"\n',
        "waiver = 3\n",
        '[[waivers]]\nrule = "C4"\nreason = "so it is"\nexpires = 2027-01-31\n',
        waiver("C4") + waiver("C4", PAST),
        "[[waiver",
    ],
    ids=[
        "no reason", "no date", "empty reason", "text for a date", "a time", "a list", "more", "no tables", "misspelt", "twice", "no TOML",
    ],
)  # fmt: skip
def test_a_waivers_file_that_is_wrong_is_refused_in_a_line(waived: Callable[[str], Waivers], text: str) -> None:
    with pytest.raises(ConfigError, match=r"waivers file .* cannot be read .*; write \[\[waiver\]\] with rule, reason") as caught:
        waived(text)
    assert "\n" not in str(caught.value)
