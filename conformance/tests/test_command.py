"""The command and the pytest plugin as an author of a backend runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvcore_conformance import __version__, command
from kvcore_conformance.report.model import BUDGET_S, Check, Report, RuleResult, read
from kvcore_conformance.report.write import FILES
from kvcore_conformance.subject import options_from

MOST_S = 90.0
"""The longest that a run of some tests may take."""
PLUGIN = ("-p", "kvcore_conformance.plugin")
TWO_RULES = """
    from kvcore_conformance import suite, verdicts
    suite.__all__ = []
    known = verdicts.rules()
    verdicts.rules = lambda: {name: known[name] for name in ("S1", "A2")}
"""
"""A conftest for which the contract is no longer than the tests beside it."""
S1 = """
    import pytest
    from kvcore_conformance.marks import rule

    @rule("S1")
    def test_s1_holds():
        pass
"""

A2 = S1.replace("S1", "A2").replace("s1", "a2")


@dataclass(frozen=True)
class Ran:
    """A run of pytest in a folder of an author."""

    code: int
    out: str
    folder: Path

    @property
    def report(self) -> Report:
        return read(self.folder / "out" / "report.json")

    def rule(self, name: str) -> RuleResult:
        return next(rule for rule in self.report.rules if rule.id == name)

    def check(self, name: str) -> Check:
        return next(check for rule in self.report.rules for check in rule.checks if check.name.endswith(name))


def subject_to(arguments: list[str], folder: Path, within: float = MOST_S) -> Ran:
    places = [str(Path(command.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places)), "COLUMNS": "200"}
    ran = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=within, check=False
    )
    return Ran(ran.returncode, ran.stdout + ran.stderr, folder)


def run(folder: Path, *arguments: str, **files: str) -> Ran:
    """pytest over these files, with a report; nothing of this project's own set-up applies."""
    folder.joinpath("pytest.ini").write_text("[pytest]\nfilterwarnings = error\n", encoding="utf-8")
    for name, text in files.items():
        indent = re.match(r"\n?( *)", text)
        assert indent is not None
        folder.joinpath(f"{name}.py").write_text(re.sub(f"^{indent[1]}", "", text, flags=re.MULTILINE), encoding="utf-8")
    return subject_to(["-m", "pytest", *PLUGIN, "-p", "no:cacheprovider", "--kvcore-report=out", *arguments], folder)


# --- the command


@pytest.mark.parametrize(("code", "exit_code"), [(0, 0), (1, 1), (2, 1), (3, 1), (4, 2), (5, 2)])
def test_exit_codes_are_0_1_and_2(monkeypatch: pytest.MonkeyPatch, code: int, exit_code: int) -> None:
    monkeypatch.setattr(pytest, "main", lambda words: pytest.ExitCode(code))
    assert command.run(["--backend", "local"]) == exit_code


def test_what_the_command_does_not_know_is_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[str] = []
    monkeypatch.setattr(pytest, "main", lambda words: seen.__iadd__(words) and pytest.ExitCode.OK)
    command.run(["--backend", "local", "--profile", "quick", "-k", "s1 or a2", "-x", "--seed", "5", "--report", str(tmp_path)])
    assert seen[seen.index("-k") + 1] == "s1 or a2" and "-x" in seen
    expected = {"--kvcore-backend=local", "--kvcore-profile=quick", "--kvcore-seed=5", f"--kvcore-report={tmp_path}"}
    assert expected <= set(seen) and f"--junitxml={tmp_path / 'junit.xml'}" in seen


@pytest.mark.parametrize(
    ("arguments", "text", "says"),
    [
        (["--backend", "lokal"], "", "no backend 'lokal' is installed; did you mean 'local'"),
        (["--backend", "local", "--options", "FILE"], "port = ", "options file .* cannot be read"),
        (["--backend", "local", "--options", "FILE"], "prot = 1", "has no option 'prot'"),
        (["--backend", "local", "--options", "none.toml"], "", "options file 'none.toml' cannot be read"),
        (["--backend", "local", "--waivers", "FILE"], "[[waiver]]\nrule = 'A2'", "waivers file .* cannot be read"),
        (
            ["--backend", "local", "--waivers", "FILE"],
            "[waiver]\nrule = 'A2'",
            "'rule' is no waiver of rule, reason and expires",
        ),
        (["--backend", "local", "--waivers", "FILE"], "[[waiver]]\nrule='A2'\nreason=''\nexpires=2999-01-01", "waiver for 'A2' has no"),
        (["--backend", "local", "--waivers", "none.toml"], "", "waivers file 'none.toml' cannot be read"),
        (["--backend", "local", "--report", "FILE"], "", "a report cannot be written into '.*file.toml'"),
        (["--backend", "local", "--report", "/proc/report"], "", "a report cannot be written into '/proc/report'"),
        (["--backend", "local", "--options", "FILE"], f"port = {'[' * 100_000}", "options file .* cannot be read"),
        (["--backend", "local", "--waivers", "FILE"], f"waiver = {'[' * 100_000}", "waivers file .* cannot be read"),
    ],
    ids=[
        "backend",
        "options",
        "an option",
        "no options",
        "waivers",
        "a table",
        "no reason",
        "no waivers",
        "a file",
        "no folder",
        "deep options",
        "deep waivers",
    ],
)
def test_a_wrong_call_ends_with_2_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str, says: str
) -> None:
    file = tmp_path / "file.toml"
    file.write_text(text, encoding="utf-8")
    assert command.run([str(file) if word == "FILE" else word for word in arguments]) == 2
    error = capsys.readouterr().err
    assert re.match(f"kvcore-conformance: .*{says}", error) and error.count("\n") == 1


def test_options_are_json_by_their_suffix_however_it_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("options.json", "options.JSON"):
        (tmp_path / name).write_text('{"port": 0}', encoding="utf-8")
        assert options_from(tmp_path / name) == {"port": 0}
    (tmp_path / "deep.json").write_text("[" * 100_000, encoding="utf-8")
    assert command.run(["--backend", "local", "--options", str(tmp_path / "deep.json")]) == 2
    error = capsys.readouterr().err
    assert "deep.json' cannot be read" in error and error.count("\n") == 1


def test_a_folder_in_the_place_of_a_report_s_file_is_a_wrong_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (*FILES, "junit.xml"):
        (tmp_path / name / name).mkdir(parents=True)
        assert command.run(["--backend", "local", "--report", str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert re.match("kvcore-conformance: a report cannot be written into", error) and error.count("\n") == 1


def test_a_wrong_call_leaves_an_earlier_report_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest, "main", lambda words: pytest.ExitCode.USAGE_ERROR)
    (tmp_path / "badge.svg").write_text("green", encoding="utf-8")
    assert command.run(["--backend", "local", "--report", str(tmp_path)]) == 2
    assert [(file.name, file.read_text(encoding="utf-8")) for file in tmp_path.iterdir()] == [("badge.svg", "green")]


@pytest.mark.parametrize("soak", ["-3", "nan", "inf", "long"])
def test_a_soak_of_no_such_time_is_a_wrong_call(capsys: pytest.CaptureFixture[str], soak: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.run(["--backend", "local", f"--soak={soak}"])
    assert f"'{soak}' is no number of minutes" in capsys.readouterr().err


@pytest.mark.parametrize("soak", ["-3", "nan", "inf", "long"])
def test_nor_is_it_one_for_the_plugin(tmp_path: Path, soak: str) -> None:
    ran = run(tmp_path, f"--kvcore-soak={soak}", test_s=S1)
    assert ran.code == pytest.ExitCode.USAGE_ERROR and f"'{soak}' is no number of minutes" in ran.out


def test_the_version_and_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    for word, says in (("--version", f"kvcore-conformance {__version__}"), ("--help", "--waivers FILE")):
        with pytest.raises(SystemExit, match="0"):
            command.run([word])
        assert says in capsys.readouterr().out


def test_a_run_of_the_command_reports_in_every_form(tmp_path: Path) -> None:
    arguments = ["--backend", "local", "--profile", "quick", "--report", "out", "--seed", "99", "-k", "test_s4_poll"]
    ran = subject_to(["-m", "kvcore_conformance.command", *arguments], tmp_path)
    assert ran.code == 1, "most rules were not run"
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "badge.svg", "junit.xml", "report.html", "report.json", "report.md",
    ]  # fmt: skip
    assert ran.rule("S4").outcome == "passed" and ran.rule("S1").outcome == "not run" and ran.report.seed == 99
    assert ran.report.levels == [] and "DOES NOT HOLD: 1 passed, " in ran.out
    cases = list(ElementTree.parse(tmp_path / "out" / "junit.xml").iter("testcase"))
    assert cases and all("test_s4" in case.attrib["name"] for case in cases)
    assert {(one.attrib["name"], one.attrib["value"]) for case in cases for one in case.iter("property")} == {("rule", "S4")}
    listed = subject_to(["-m", "kvcore_conformance.command", "--backend", "local", "--profile", "quick", "--collect-only"], tmp_path)
    names = {line.rpartition("/")[2] for line in listed.out.splitlines() if "::" in line}
    assert {check.name for rule in ran.report.rules for check in rule.checks} == names, "it tells of each test of the profile"


@pytest.mark.slow
@pytest.mark.parametrize("profile", BUDGET_S)
def test_a_profile_keeps_to_its_budget(tmp_path: Path, profile: str) -> None:
    words = ["-m", "kvcore_conformance.command", "--backend", "local", "--profile", profile, "--report", "out"]
    ran = subject_to(words, tmp_path, within=3 * BUDGET_S[profile])
    assert ran.code == 0 and ran.report.spent <= BUDGET_S[profile], ran.out[-2000:]


def test_a_selection_without_tests_is_a_wrong_call(tmp_path: Path) -> None:
    ran = subject_to(["-m", "kvcore_conformance.command", "--backend", "local", "-k", "no_such_test"], tmp_path)
    assert ran.code == 2


# --- the plugin, in runs that are not of the suite


def test_without_tests_of_the_suite_the_plugin_does_and_imports_nothing(tmp_path: Path) -> None:
    ran = run(
        tmp_path,
        test_other="""
    import sys

    def test_other():
        slow = {"numpy", "pydantic", "zmq", "hypothesis.strategies", "kvcore.registry", "kvcore_conformance.record"}
        assert not slow & set(sys.modules)
    """,
    )
    assert ran.code == 0 and "contract" not in ran.out and not (tmp_path / "out").exists()


def test_a_wrong_waivers_file_does_not_matter_then(tmp_path: Path) -> None:
    assert run(tmp_path, "--kvcore-waivers=none.toml", test_other="def test_other(): pass").code == 0


# --- the plugin, with tests of a contract of two rules


def test_a_run_in_which_every_rule_holds_ends_with_0(tmp_path: Path) -> None:
    ran = run(tmp_path, conftest=TWO_RULES, test_s=S1, test_a=S1.replace("S1", "A2").replace("s1", "a2"))
    assert ran.code == 0 and ran.report.holds and ran.report.levels == ["Core", "Abort and Clear"]


def test_a_test_that_does_not_pass_fails_its_rule_however_it_does_so(tmp_path: Path) -> None:
    bad = """
    import pytest
    from kvcore_conformance.marks import rule

    @pytest.fixture
    def breaks():
        raise OSError("no engine")

    @pytest.fixture
    def breaks_late():
        yield
        raise OSError("not closed")

    @rule("A2")
    def test_a2_skips():
        pytest.skip("not today")

    @rule("A2")
    @pytest.mark.skip
    def test_a2_is_skipped():
        pass

    @rule("A2")
    @pytest.mark.xfail
    def test_a2_is_expected_to_fail():
        assert False

    @rule("A2")
    def test_a2_is_not_set_up(breaks):
        pass

    @rule("A2")
    def test_a2_ends_badly(breaks_late):
        pass

    @rule("A2")
    def test_a2_fails():
        assert False, "because of this"

    @rule("A2")
    def test_a2_holds():
        pass
    """
    ran = run(tmp_path, conftest=TWO_RULES, test_s=S1, test_bad=bad)
    found = {check.name.partition("::")[2].removeprefix("test_a2_"): check.passed for check in ran.rule("A2").checks}
    assert found == {
        "skips": False, "is_skipped": False, "is_expected_to_fail": False, "is_not_set_up": False, "ends_badly": False,
        "fails": False, "holds": True,
    }  # fmt: skip
    assert ran.code == 1 and ran.rule("S1").outcome == "passed" and ran.report.levels == ["Core"]
    assert ran.check("test_a2_fails").headline == "AssertionError: because of this"
    assert "not today" in ran.check("test_a2_skips").problem and "not closed" in ran.check("test_a2_ends_badly").problem


def test_skips_alone_fail_the_run(tmp_path: Path) -> None:
    ran = run(
        tmp_path, conftest=TWO_RULES, test_s=S1, test_a=S1.replace("S1", "A2").replace("s1", "a2").replace("pass", "pytest.skip('x')")
    )
    assert ran.code == 1 and ran.rule("A2").outcome == "failed" and "1 passed, 1 skipped" in ran.out


def test_a_waived_failure_ends_with_0_but_other_failures_count(tmp_path: Path) -> None:
    tmp_path.joinpath("waivers.toml").write_text('[[waiver]]\nrule = "A2"\nreason = "later"\nexpires = 2999-01-01\n', encoding="utf-8")
    bad = S1.replace("S1", "A2").replace("s1", "a2").replace("pass", "assert False")
    files = {"conftest": TWO_RULES, "test_s": S1, "test_bad": bad}
    ran = run(tmp_path, "--kvcore-waivers=waivers.toml", **files)
    assert ran.code == 0 and ran.rule("A2").outcome == "waived" and ran.report.levels == ["Core"]
    assert run(tmp_path, "--kvcore-waivers=waivers.toml", **files, test_own="def test_own(): assert False").code == 1


DIES = S1.replace("S1", "A2").replace("s1", "a2").replace("pass", "import os; os.kill(os.getpid(), 15)")


def test_a_run_that_is_ended_leaves_no_report_of_an_earlier_one(tmp_path: Path) -> None:
    files = {"conftest": TWO_RULES, "test_s": S1, "test_a": A2}
    assert run(tmp_path, "--junitxml=out/junit.xml", **files).code == 0
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == sorted((*FILES, "junit.xml"))
    assert run(tmp_path, "--junitxml=out/junit.xml", **{**files, "test_a": DIES}).code == -15
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=pytest.mark.slow) for name in FILES), "junit.xml"])
def test_a_report_that_cannot_be_written_fails_the_run_and_leaves_the_verdict(tmp_path: Path, name: str) -> None:
    full = A2.replace("pass", f"import os; os.symlink('/dev/full', 'out/{name}')")
    ran = run(tmp_path, "--junitxml=out/junit.xml", conftest=TWO_RULES, test_s=S1, test_a=full)
    assert ran.code == 1 and "Traceback" not in ran.out and "INTERNALERROR" not in ran.out
    assert re.search(r"holds: 2 passed.*could not be written.*No space left", ran.out, re.DOTALL), ran.out
    left = {file.name for file in (tmp_path / "out").iterdir()}
    assert left == ({"junit.xml"} if name != "junit.xml" else {"junit.xml", *FILES}), left


def test_tests_that_a_run_does_not_come_to_are_not_run(tmp_path: Path) -> None:
    more = S1.replace("S1", "A2").replace("s1", "a2").replace("pass", "raise KeyboardInterrupt")
    ran = run(tmp_path, conftest=TWO_RULES, test_1=more, test_2=S1)
    assert ran.code == 2 and [ran.rule(name).outcome for name in ("A2", "S1")] == ["not run", "not run"]


TWO_OF_A2 = A2 + A2.partition("\n\n")[2].replace("holds", "holds_too").join(("\n\n", "\n"))


@pytest.mark.parametrize(
    "arguments", [("-k", "not holds_too"), ("--deselect", "test_a.py::test_a2_holds_too")], ids=["by a word", "by name"]
)
def test_tests_that_are_left_out_are_not_run(tmp_path: Path, arguments: tuple[str, str]) -> None:
    ran = run(tmp_path, *arguments, conftest=TWO_RULES, test_s=S1, test_a=TWO_OF_A2)
    assert ran.code == 1 and ran.report.levels == [] and ran.rule("S1").outcome == "passed"
    assert (ran.rule("A2").outcome, ran.rule("A2").why) == ("not run", "not all tests of it were run")
    assert not ran.check("test_a2_holds_too").ran and ran.check("test_a2_holds").passed


def test_tests_of_the_suite_that_are_not_even_collected_are_not_run(tmp_path: Path) -> None:
    ran = run(tmp_path, test_s=S1)
    assert ran.code == 1 and {rule.outcome for rule in ran.report.rules} == {"not run"}, "S1 has more tests than this one"
    assert ran.check("test_s1_holds").passed and "test_states.py::test_s1_" in " ".join(check.name for check in ran.rule("S1").checks)


def test_a_wrong_waivers_file_is_a_wrong_call(tmp_path: Path) -> None:
    ran = run(tmp_path, "--kvcore-waivers=none.toml", test_s=S1)
    assert ran.code == pytest.ExitCode.USAGE_ERROR and "waivers file" in ran.out and "Traceback" not in ran.out


@pytest.mark.parametrize("subject", ["'nope'", "'local', {'prot': 1}"], ids=["backend", "option"])
def test_a_subject_that_cannot_be_is_a_wrong_call_too(tmp_path: Path, subject: str) -> None:
    own = f"""
        import pytest
        from kvcore_conformance import Subject
        from kvcore_conformance.marks import rule

        @pytest.fixture(scope="session")
        def kvcore_subject():
            yield Subject({subject})

        @rule("S1")
        def test_s1_holds(kvcore_subject):
            pass
    """
    ran = run(tmp_path, test_own=own)
    assert ran.code == pytest.ExitCode.USAGE_ERROR and "Traceback" not in ran.out and "the transfer contract" not in ran.out
    assert "no backend 'nope' is installed" in ran.out or "has no option 'prot'" in ran.out


def test_the_suite_is_not_spread_over_processes(tmp_path: Path) -> None:
    ran = run(tmp_path, "-n", "1", test_s=S1)
    assert ran.code == 1 and "leave out -n" in ran.out


# --- the suite in a file of one's own

OWN = """
    import pytest
    from kvcore_conformance import Subject
    from kvcore_conformance.stage.arena import paired
    from kvcore_conformance.marks import rule
    from kvcore_conformance.suite import *

    @pytest.fixture(scope="session")
    def kvcore_subject():
        return Subject("local@kvcore", options={"port": 0})

    @rule("A2")
    def test_a2_of_mine(pair):
        pair.at("in flight").sender.abort("on purpose")
        assert False, "no"

    @rule("P2")
    def test_p2_of_mine(crew):
        with paired(crew) as pair:
            pair.prefill.freeze()
            pair.decode.kill()
            assert False, "no"

    @rule("P3")
    def test_p3_of_mine(pair, crew):
        with crew.lend(1) as (odd,):
            odd.start("decode")
            assert False, "no"

    @rule("B4")
    def test_b4_of_mine(bare):
        assert False, "no"
"""


def test_a_star_import_brings_the_suite_with_a_subject_of_ones_own(tmp_path: Path) -> None:
    ran = run(tmp_path, "-k", "test_s4_poll or of_mine", test_own=OWN)
    assert ran.code == 1 and ran.rule("S4").outcome == "passed" and ran.report.about.backend == "local@kvcore"
    assert {check.name.partition("::")[0] for check in ran.rule("S4").checks} == {"test_own.py"}
    standing, own = ran.check("test_a2_of_mine").stories, ran.check("test_p2_of_mine").stories
    assert [story.role for story in standing] == ["prefill", "decode"]
    assert all("on purpose" in story.events[-1] for story in standing) and all(len(story.events) <= 50 for story in standing)
    assert " paired " in " ".join(own[0].events), "a process that stands still is woken to tell what it saw"
    assert [story.role for story in own] == ["prefill", "decode"] and own[1].events[0].startswith("it tells nothing")
    assert [story.role for story in ran.check("test_p3_of_mine").stories] == ["prefill", "decode", "decode"]
    engines = ran.check("test_b4_of_mine").stories
    assert [story.role for story in engines] == ["prefill", "decode"]
    assert all(" kvcore_connect " in " ".join(story.events) for story in engines)
    assert re.search(r"A2 failed\. .*seed \d+.*the last events of prefill .* and decode .*on purpose", ran.out, re.DOTALL)


def test_a_star_import_brings_all_of_the_suite(tmp_path: Path) -> None:
    what = ["--collect-only", "-q", "--kvcore-profile=full", "--kvcore-soak=1"]
    found = run(tmp_path, *what, test_own="from kvcore_conformance.suite import *")
    suite = run(tmp_path, *what, "--pyargs", "kvcore_conformance.suite")
    names = [sorted(line.partition("::")[2] for line in ran.out.splitlines() if "::" in line) for ran in (found, suite)]
    assert names[0] == names[1] and len(names[0]) > 50
    assert len(set(names[0])) == len(names[0]), "two tests of one name: a star import would leave one out"
    files = Path(command.__file__).parent.glob("suite/test_*.py")
    assert [file.name for file in files if "pytestmark" in file.read_text(encoding="utf-8")] == [], "a file's mark does not come along"
