"""The report: one model in many forms, each of which says what failed, and none of which lets a backend's text do harm."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import jsonschema
import msgspec
import pytest
from kvcore_conformance.report.badge import badge
from kvcore_conformance.report.events import interleaved
from kvcore_conformance.report.html import page
from kvcore_conformance.report.markdown import markdown
from kvcore_conformance.report.model import About, Check, Report, RuleResult, Story, read, schema_text
from kvcore_conformance.report.table import table
from kvcore_conformance.report.write import write

from kvcore.errors import ConfigError

SCHEMA = Path(__file__).parents[1] / "report-1.0.schema.json"
HOSTILE = "<script>alert('|')</script> ``` & \"quoted\" \x00 \udcff"
STORIES = [
    Story("prefill", 11, ["10.5000 status prefill room 7.0 state=FAILED reason=lost", "10.9000 cleared prefill room 7.0"]),
    Story(
        "decode", 12, ["10.2000 status decode room 7.0 state=TRANSFERRING reason=", "10.7000 late decode room 7.0", "a line without a time"]
    ),
]


def rule(name: str, outcome: str = "passed", group: str = "abort", why: str = "", checks: list[Check] | None = None) -> RuleResult:
    text = f"The text of `{name}` is | *plain*."
    return RuleResult(name, "MUST", group, name.lower(), text, outcome, why, checks or [])  # type: ignore[arg-type]


def report(*rules: RuleResult, levels: tuple[str, ...] = (), faults: tuple[str, ...] = (), engine: str = "nixl 1.5.1") -> Report:
    holds = not faults and all(one.outcome not in ("failed", "not run") for one in rules)
    about = About("mine", "kvcore-mine", "0.3.0", engine, "1.0", "0.1.0", "0.1.0", "3.12.1", "Linux")
    return Report(about, "quick", 4711, "2026-01-31T12:00:00+00:00", 3.25, holds, list(levels), list(faults), list(rules))


def failing() -> Report:
    broken = Check("test_abort.py::test_a2_x[in flight]", "A2", "Abort and Clear", False, True, 0.5, f"where\nE   found {HOSTILE}", STORIES)
    return report(
        rule("S1", group="states", checks=[Check("test_states.py::test_s1_x", "S1", "Core", True, True, 0.25)]),
        rule("A2", "failed", checks=[broken]),
        rule("A3", "not run", why="no test of this run checks it"),
        rule("A4", "waived", why="until the engine can (until 2027-01-31)"),
        rule("B7", "not applicable", "backends", "declared reopens=False"),
        faults=("waiver for S1: the rule holds; remove it",),
    )


# --- JSON


def test_the_published_schema_is_that_of_the_model() -> None:
    hint = 'python -c "from kvcore_conformance.report.model import *; print(schema_text())"'
    assert SCHEMA.read_text(encoding="utf-8") == schema_text() + "\n", f"write {SCHEMA.name} anew: {hint}"


def test_a_report_is_valid_and_a_wrong_one_is_not(tmp_path: Path) -> None:
    schema = json.loads(SCHEMA.read_bytes())
    jsonschema.Draft202012Validator.check_schema(schema)
    write(report(rule("A2")), tmp_path)
    found = json.loads((tmp_path / "report.json").read_bytes())
    jsonschema.validate(found, schema)
    wrong: list[dict[str, object]] = [{"rules": [{**found["rules"][0], "outcome": "skipped"}]}, {"seed": "4711"}, {"about": {}}]
    for spoil in wrong:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**found, **spoil}, schema)


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    write(failing(), tmp_path)
    again = read(tmp_path / "report.json")
    assert again.rules[0] == failing().rules[0] and again.counts() == failing().counts()


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"about": 1}'])
def test_what_is_no_report_is_refused_in_a_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "report.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="is no report of a run") as caught:
        read(file)
    assert "\n" not in str(caught.value)


def test_a_report_of_another_schema_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(report(), schema_version="2.0")))
    with pytest.raises(ConfigError, match="schema version 2.0, and this kit knows 1.0"):
        read(file)


# --- events


def test_events_of_both_processes_stand_in_the_order_of_time() -> None:
    lines = [(line.clock, line.role, line.text.split()[0]) for line in interleaved(STORIES)]
    assert lines == [
        ("-0.700", "decode", "status"),
        ("-0.400", "prefill", "status"),
        ("-0.200", "decode", "late"),
        ("", "decode", "a"),
        ("-0.000", "prefill", "cleared"),
    ]


def test_a_process_that_tells_nothing_stands_last() -> None:
    lines = interleaved([Story("decode", 1, ["it tells nothing: it is gone"]), Story("prefill", 2, ["1.0 status x"])])
    assert [line.role for line in lines] == ["prefill", "decode"]


# --- the terminal


def test_the_table_tells_of_a_failed_rule_its_text_its_seed_and_the_events() -> None:
    text = "\n".join(table(failing()))
    assert "A2 failed. The text of `A2`" in text and "test_a2_x[in flight] (0.5 s): found <script>" in text
    assert "seed 4711" in text and text.index("late decode") < text.index("cleared prefill")
    assert "waived (until the engine can (until 2027-01-31)): A4" in text
    assert "not applicable (declared reopens=False): B7" in text and "not run (no test of this run checks it): A3" in text
    assert "fault: waiver for S1" in text and "DOES NOT HOLD: 1 passed, 1 failed, 1 not applicable, 1 waived, 1 not run" in text


def test_the_table_of_a_good_run_is_short() -> None:
    lines = list(table(report(rule("S1", group="states"), rule("A2"), levels=("Core",))))
    assert len(lines) == 4
    assert lines[-1] == "holds: 2 passed; levels: Core (quick); seed 4711; 3.2 s (quick: 3.2 s; local may take 20 s)"


# --- Markdown


def test_markdown_has_every_rule_and_the_failures() -> None:
    text = markdown(failing())
    rows = [line for line in text.splitlines() if re.match(r"\| [A-Z]\d ", line)]
    assert [row.split()[1] for row in rows] == ["S1", "A2", "A3", "A4", "B7"]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 6 for row in rows), "a bar in a text must not end its cell"
    assert "| A2 | **failed** | 1 | 0.50 |" in text and "- waiver for S1" in text
    fences = re.findall("^`+", text, re.MULTILINE)
    assert fences == ["````", "````", "```", "```"], "a fence is longer than any in its text"


# --- HTML


class Reader(HTMLParser):
    """Checks that tags are closed in order; collects them, and the text."""

    EMPTY = ("meta",)

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"{tag} is closed within {self.open}"

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_well_formed_and_shows_what_failed_at_once() -> None:
    found = Reader(page(failing()))
    assert found.open == []
    rules = {attributes["id"]: attributes for tag, attributes in found.tags if tag == "details" and "id" in attributes}
    assert list(rules) == ["S1", "A2", "A3", "A4", "B7"]
    assert [name for name, attributes in rules.items() if "open" in attributes] == ["A2"]
    assert ("a", {"href": "#A2"}) in found.tags
    assert '-k "test_a2_x" and the seed 4711' in found.text and found.text.index("late decode") < found.text.index("cleared prefill")


def test_the_page_needs_nothing_from_anywhere_and_runs_nothing() -> None:
    text = page(failing())
    names = {tag for tag, _ in Reader(text).tags}
    assert not names & {"script", "link", "img", "iframe", "object", "svg", "base", "form"}
    assert "http" not in re.sub("http-equiv", "", text) and "url(" not in text and "@import" not in text
    assert "default-src 'none'" in text


def test_text_of_a_backend_is_shown_and_not_taken_for_markup(tmp_path: Path) -> None:
    bad = report(rule("A2", "failed", group=HOSTILE[:8], why=HOSTILE, checks=[Check(HOSTILE, "A2", HOSTILE, False, True, 0.0, HOSTILE)]))
    bad.about.backend = bad.about.engine = HOSTILE
    bad.levels = [HOSTILE.replace("\x00", "")]
    bad.holds = True
    write(bad, tmp_path)
    found = Reader((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert found.open == [] and "script" not in {tag for tag, _ in found.tags} and found.text.count("<script>alert") > 5
    ElementTree.fromstring((tmp_path / "badge.svg").read_bytes())
    assert "quoted" in read(tmp_path / "report.json").about.engine


# --- the badge


@pytest.mark.parametrize(
    ("found", "words", "colour"),
    [
        (report(rule("A2"), levels=("Core", "Abort and Clear")), "Core, Abort and Clear (quick)", "#2e7d32"),
        (report(rule("A2", "failed"), levels=("Core",)), "fails", "#b3261e"),
        (report(rule("A2", "waived"), levels=("Core",)), "Core (quick)", "#8a6d00"),
        (report(rule("A2", "waived")), "holds, with waivers (quick)", "#8a6d00"),
        (report(rule("A2", "not run")), "fails", "#b3261e"),
    ],
)
def test_the_badge_says_which_levels_hold(found: Report, words: str, colour: str) -> None:
    image = ElementTree.fromstring(badge(found))
    name = "{http://www.w3.org/2000/svg}"
    assert [text.text for text in image.iter(f"{name}text")] == ["kvcore contract 1.0", words]
    assert image.attrib["aria-label"] == f"kvcore contract 1.0: {words}" and colour in badge(found)
