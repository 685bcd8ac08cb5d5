"""What ``kvcore bench`` tells: the JSON Schema of its reports, the page with plots, and what is computed when two are compared."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from xml.etree import ElementTree

import jsonschema
import msgspec
import pytest
import typer

from kvcore import cli
from kvcore.bench import compare, kill, plan
from kvcore.bench.catalog import MEASUREMENTS
from kvcore.bench.command import bench
from kvcore.bench.page import page
from kvcore.bench.report import Figure, Report, figures, read, report, schema
from kvcore.bench.setup import Setup
from kvcore.progress import unwatched
from tests.commands import kvcore, one_line
from tests.made_backends import make_backend

QUICK = {
    "bench rooms": ("--rooms", "12", "--repeats", "2", "--page-bytes", "512", "--in-flight", "1", "--in-flight", "4"),
    "bench bandwidth": ("--page-bytes", "4096", "--page-bytes", "65536", "--room-bytes", "131072", "--repeats", "2"),
    "bench abort": ("--rooms", "10", "--repeats", "2"),
    "bench idle": ("--rooms", "3", "--window", "1", "--repeats", "2"),
    "bench trace": ("examples/trace.jsonl", "--requests", "8", "--repeats", "2", "--speed", "100"),
    "bench plan": ("--repeats", "2"),
}
KILL = kill.Parameters(rooms=1, liveness_s=1.0, repeats=1, signals=("SIGKILL",))
"""That one takes long by the command, which lets both sides fall silent too."""
MEASURED = (*QUICK, "bench kill")
PLOTS = {
    "bench rooms": ["Distribution of latency", "Rooms a second", "A room beside the wire", "CPU"],
    "bench bandwidth": ["Throughput, pages scattered", "CPU"],
    "bench abort": ["Distribution of time"],
    "bench idle": ["CPU"],
    "bench kill": ["Each case"],
    "bench trace": ["Distribution of queueing and transfer and total", "CPU"],
    "bench plan": ["Each case"],
}
UNITS = {
    r"gb_per_s$": r"GB \(10\^9 bytes\) a second",
    r"_per_s$": "a second",
    r"s_per_gib$": r"a GiB \(2\^30 bytes\), in seconds",
    r"_gib$": r"GiB \(2\^30 bytes\)",
    r"(^|_)us_": "microseconds",
    r"(^|_)ms(_|$)": "milliseconds",
    r"_s$|^seconds$": "seconds",
    r"percent$": "percent",
    r"share$": "1 for all",
    r"bytes": "bytes",
    r"pages": "pages",
    r"tokens": "tokens",
    r"rooms": "rooms",
}
"""What the description of a field says whose name has this in it, the first that fits."""
TELLING = ("compare", "schema")
"""Commands that measure nothing."""
HOSTILE = """<script>alert("1")</script> $x_1$ & 'it' </svg><img src=x onerror=y> #010200"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The file of every measurement's report, with its page beside it."""
    folder = tmp_path_factory.mktemp("reports")

    def run(command: str) -> Path:
        path = folder / f"{command}.json"
        done = kvcore(*command.split(), *QUICK[command], "--json", str(path), "--html", str(path.with_suffix(".html")))
        missed = command == "bench plan" and "targets missed: " in done.stderr
        assert one_line(done.stderr) if missed else (done.stderr, done.returncode) == ("", 0), done
        return path

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(QUICK, pool.map(run, QUICK), strict=True))
    return found | {"bench kill": write_kill(folder / "bench kill.json")}


def write_kill(path: Path) -> Path:
    setup = Setup("local")
    results = kill.measure(setup, KILL, unwatched)
    found = report("bench kill", setup, KILL, results)
    path.with_suffix(".html").write_text(page(found, [*kill.table(results)]))
    path.write_text(json.dumps(asdict(found)))
    return path


def loaded(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that the command ends with."""
    assert cli.run(["bench", *map(str, arguments)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and one_line(err)
    return err


# --- the schema


def test_every_command_that_measures_is_in_the_catalog() -> None:
    group = typer.main.get_command(bench)
    commands = {f"bench {name}" for name in group.commands} - {f"bench {name}" for name in TELLING}  # type: ignore[attr-defined]
    assert commands == set(MEASUREMENTS) == set(MEASURED)


def test_the_schema_is_printed_and_is_one() -> None:
    done = kvcore("bench", "schema")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == schema()
    jsonschema.Draft202012Validator.check_schema(schema())


def test_every_field_of_the_schema_says_what_it_is_and_in_which_unit() -> None:
    said = {
        (kind, name): field.get("description", "") for kind, one in schema()["$defs"].items() for name, field in one["properties"].items()
    }
    assert [field for field, text in said.items() if not re.fullmatch(r"\S[^\n]*\.", text)] == []
    for (kind, name), text in said.items():
        words = next((words for unit, words in UNITS.items() if re.search(unit, name)), "") if not name.endswith("_each") else ""
        assert re.search(words, text, re.IGNORECASE), (kind, name, text)


@pytest.mark.parametrize("command", MEASURED)
def test_what_is_written_is_as_the_schema_says(command: str, written: dict[str, Path]) -> None:
    found = loaded(written[command])
    jsonschema.validate(found, schema())
    one = found["results"][0]
    spoils: list[dict[str, Any]] = [
        {"schema": 2},
        {"command": "bench speed"},
        {"machine": {}},
        {"parameters": {}},
        {"results": [{name: value for name, value in one.items() if name != list(one)[-1]}]},
    ]
    for spoil in spoils:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**found, **spoil}, schema())


@pytest.mark.parametrize("command", MEASURED)
def test_each_result_has_a_name_of_its_own_and_every_repeat(command: str, written: dict[str, Path]) -> None:
    told = read(written[command])
    names = [MEASUREMENTS[command].name(result) for result in told.results]
    assert len(set(names)) == len(names) and all(names)
    repeats = told.parameters.get("repeats")
    every = [each for result in told.results for one in lists(result) for each in one]
    assert all(len(one) == repeats for one in every if one) if repeats is not None else not every
    for result in told.results:
        assert any(figure.each for figure in figures(result)) == (repeats is not None)


def lists(result: Mapping[str, Any]) -> list[list[list[float]]]:
    within = [inner for value in result.values() if isinstance(value, Mapping) for inner in lists(value)]
    return [[value for name, value in result.items() if name.endswith("_each")], *within]


# --- the floors beside


def test_the_bare_machine_stands_beside_what_was_measured(written: dict[str, Path]) -> None:
    for command in ("bench rooms", "bench bandwidth"):
        for result in loaded(written[command])["results"]:
            bare = result["bare"]
            assert 0 < bare["round_trip_ms"] < 100 and 0 < bare["letters_ms"] < 100 and bare["copy_gb_per_s"] > 0.01
            assert len(bare["round_trip_ms_each"]) == len(bare["copy_gb_per_s_each"]) == 2


def test_a_room_alone_is_told_as_a_multiple_of_what_the_wire_takes(written: dict[str, Path]) -> None:
    for result in loaded(written["bench rooms"])["results"]:
        alone = result["in_flight"] == 1
        assert (result["latency_over_wire"] is not None) == (result["raw"]["transfer_ms"] is not None) == alone
        if alone:
            messages = {"open": 4, "receive": 2}[result["measured_from"]]
            mine, raw, trips = result["latency_ms_median_each"], result["raw"]["transfer_ms_each"], result["bare"]["round_trip_ms_each"]
            expected = [room / (transfer + messages * trip / 2) for room, transfer, trip in zip(mine, raw, trips, strict=True)]
            assert result["latency_over_wire_each"] == pytest.approx(expected, rel=1e-3) and min(expected) > 1


# --- the page


class Seen(HTMLParser):
    """Tags with their attributes, and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def drawings(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(each) for each in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def texts(drawing: ElementTree.Element) -> list[str]:
    return ["".join(each.itertext()) for each in drawing.iter() if each.tag.endswith("}text")]


@pytest.mark.parametrize("command", MEASURED)
def test_a_page_has_what_was_measured_and_its_plots(command: str, written: dict[str, Path]) -> None:
    told, text = read(written[command]), written[command].with_suffix(".html").read_text()
    seen = Seen(text)
    assert [title for drawing in drawings(text) for title in texts(drawing) if title in PLOTS[command]] == PLOTS[command]
    said = " ".join(seen.texts)
    for each in (command, MEASUREMENTS[command].what, told.machine.processor, told.versions["kvcore"], told.taken):
        assert each in said
    assert all(MEASUREMENTS[command].name(result) in said for result in told.results)
    assert not re.search(r"mathdefault|#0102[0-9a-f]{2}", text) and "var(--text)" in text and "prefers-color-scheme: dark" in text


@pytest.mark.parametrize("command", MEASURED)
def test_a_page_explains_its_words(command: str, written: dict[str, Path]) -> None:
    told, said = read(written[command]), " ".join(Seen(written[command].with_suffix(".html").read_text()).texts)
    assert said.index("A room is one hand-off of one request") < said.index(MEASUREMENTS[command].what)
    words = {"live rooms": "live (", "poll_all": "poll_all, ", "target ms": "chunk's pages, which"}
    words |= {code: f"{code}, the" for result in told.results for code in result.get("codes", ())}
    assert [word for word, meaning in words.items() if word in said and meaning not in said] == []


@pytest.mark.parametrize("command", MEASURED)
def test_a_page_explains_what_stands_on_it_and_no_more(command: str, written: dict[str, Path]) -> None:
    told = read(written[command])
    floors = {
        "raw": "is the engine of the backend used directly",
        "bare": "is a message of 200 bytes",
        "latency_over_wire": "over the wire (",
    }
    none = [{**result, **dict.fromkeys(floors.keys() & result.keys())} for result in told.results]
    several = replace(told, results=none, parameters=told.parameters | {"topology": "p2d1"})
    for one in (told, replace(told, results=none), several):
        said = " ".join(Seen(page(one, [])).texts)
        for field, words in floors.items():
            assert (words in said) is any(result.get(field) is not None for result in one.results)
        assert not re.search(r"(whole|prefill|decode) process\b", said)
        assert ("Of several ranks a side" in said) is (one is several)
        assert ("Neither the engine alone nor the bare machine" in said) is (one is several and "bare" in told.results[0])


@pytest.mark.parametrize("command", MEASURED)
def test_a_page_says_of_what_repeats_its_figures_are(command: str, written: dict[str, Path]) -> None:
    told, said = read(written[command]), " ".join(Seen(written[command].with_suffix(".html").read_text()).texts)
    pooled = {
        figure.name for result in told.results for figure in figures(result) if re.search(r"p99|max", figure.name) and not figure.each
    }
    assert ("of all repeats together" in said) is bool(pooled)
    assert "median least most" not in " ".join(said.split()), "not every figure is one"


def test_a_page_shows_what_grows_with_the_rooms_that_wait(written: dict[str, Path]) -> None:
    told, growth = read(written["bench rooms"]), ["Latency beside rooms that wait", "CPU time beside rooms that wait"]
    beside = [{**result, "waiting": waiting} for waiting in (1000, 10) for result in told.results]
    assert not [drawing for drawing in drawings(page(told, [])) if set(growth) & set(texts(drawing))]
    found = {text: drawing for drawing in drawings(page(replace(told, results=beside), [])) for text in texts(drawing)}
    cases = {"from open, 1 in flight", "from open, 4 in flight", "from receive, 1 in flight", "from receive, 4 in flight"}
    for title, unit in zip(growth, ("milliseconds, median", "us a room, both sides"), strict=True):
        assert {*cases, unit, "10", "1000"} <= set(texts(found[title]))
        lines = [path.get("d", "") for path in found[title].iter() if "stroke-width: 2;" in path.get("style", "")]
        assert len(lines) >= len(cases)
        for line in lines:
            along = [float(x) for x in re.findall(r"[ML] (\S+)", line)]
            assert len(along) == 2 and along == sorted(along), "from few rooms to many"


@pytest.mark.parametrize("command", MEASURED)
def test_a_page_needs_nothing_else(command: str, written: dict[str, Path]) -> None:
    seen = Seen(written[command].with_suffix(".html").read_text())
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(seen.tags)
    led = [value or "" for name, value in seen.attributes if name.endswith("href") or name in ("src", "srcset", "action")]
    assert all(value.startswith("#") for value in led)
    assert all("url(" not in (value or "").replace("url(#", "") and not name.startswith("on") for name, value in seen.attributes)


def test_a_page_shows_names_and_options_as_they_are(written: dict[str, Path]) -> None:
    told = read(written["bench abort"])
    hostile = replace(
        told,
        backend=HOSTILE,
        parameters={HOSTILE: HOSTILE, "options": {HOSTILE: [HOSTILE]}},
        results=[{**result, "aborted_by": HOSTILE} for result in told.results],
    )
    text = page(hostile, [HOSTILE])
    seen, calm = Seen(text), Seen(page(told, [""]))
    assert set(seen.tags) == set(calm.tags)
    (drawing,) = drawings(text)
    assert any(HOSTILE.replace("#010200", "")[:30] in each and "$x_1$" in each for each in texts(drawing))
    assert sum(HOSTILE in each for each in seen.texts) >= 4


def test_a_page_can_be_had_of_results_without_a_floor_and_with_one_repeat(written: dict[str, Path]) -> None:
    for command, missing in (("bench rooms", "latency_over_wire"), ("bench bandwidth", "bare")):
        told = read(written[command])
        bare = [{**result, "raw": None, missing: None} for result in told.results]
        assert "A room beside the wire" not in page(replace(told, results=bare), [])


def test_a_page_without_matplotlib_is_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    monkeypatch.setattr(plan, "measure", lambda parameters: pytest.fail("it is told before anything is measured"))
    assert "pip install 'kvcore[html]'" in refusal(capsys, "plan", "--html", tmp_path / "page.html")


@pytest.mark.parametrize(("bad", "good"), [("--html", "--json"), ("--json", "--html")])
def test_what_was_measured_is_told_though_a_file_of_it_cannot_be_written(
    bad: str, good: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = plan.Case(8, 2, scattered=True, cut=4, target_ms=1000.0)
    monkeypatch.setattr(plan, "measure", lambda parameters: [plan.Result(case, 0.5, (0.5,))])
    assert cli.run(["bench", "plan", bad, "/dev/full", good, str(tmp_path / "good")]) == 1
    out, err = capsys.readouterr()
    assert "8 scattered pages" in out and one_line(err) and f"choose another file for {bad}" in err
    assert (tmp_path / "good").stat().st_size


@pytest.mark.parametrize("option", ["--html", "--json"])
def test_a_report_that_cannot_be_written_leaves_the_one_before(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = plan.Case(8, 2, scattered=True, cut=4, target_ms=1000.0)
    monkeypatch.setattr(plan, "measure", lambda parameters: [plan.Result(case, 0.5, (0.5,))])
    before, link = tmp_path / "report", tmp_path / "link"
    before.write_text("before")
    before.chmod(0o640)
    link.symlink_to(before)

    def cut_off(path: Path, text: str, **_: object) -> None:
        path.write_bytes(text[:9].encode())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", cut_off)
        assert cli.run(["bench", "plan", option, str(link)]) == 1
    out, err = capsys.readouterr()
    assert "8 scattered pages" in out and one_line(err) and f"choose another file for {option}" in err
    assert before.read_text() == "before" and {*tmp_path.iterdir()} == {before, link}
    assert cli.run(["bench", "plan", option, str(link)]) == 0
    assert "8 scattered pages" in before.read_text() or json.loads(before.read_text())["results"]
    assert link.is_symlink() and before.stat().st_mode & 0o777 == 0o640 and {*tmp_path.iterdir()} == {before, link}


@pytest.mark.parametrize("given", ["/dev/stdout", "/proc/self/fd/1", "fifo"])
def test_what_is_no_plain_file_is_written_to_as_it_is(given: str, tmp_path: Path) -> None:
    path, out = Path(given) if given != "fifo" else tmp_path / "fifo", tmp_path / "out"
    out.touch()
    before = out.stat().st_ino
    if given == "fifo":
        os.mkfifo(path)
    reader = os.open(path if given == "fifo" else out, os.O_RDONLY | os.O_NONBLOCK)
    try:
        done = kvcore("bench", "plan", "--repeats", "1", "--json", str(path), shell=f"> {out}")
        text = os.read(reader, 1 << 16).decode()
    finally:
        os.close(reader)
    assert done.returncode in (0, 1) and json.loads(text[text.index("{") :])["command"] == "bench plan"
    assert out.stat().st_ino == before and {*tmp_path.iterdir()} == {out, *([path] if given == "fifo" else [])}


def test_a_file_that_may_be_written_is_where_its_folder_takes_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = plan.Case(8, 2, scattered=True, cut=4, target_ms=1000.0)
    monkeypatch.setattr(plan, "measure", lambda parameters: [plan.Result(case, 0.5, (0.5,))])
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    monkeypatch.setattr(Path, "touch", Mock(side_effect=PermissionError(errno.EACCES, os.strerror(errno.EACCES))))
    (tmp_path / "report").write_text("before")
    assert cli.run(["bench", "plan", "--json", str(tmp_path / "report")]) == 0
    assert json.loads((tmp_path / "report").read_text())["results"]


@pytest.mark.parametrize("option", ["--html", "--json"])
@pytest.mark.parametrize("where", ["/proc/x.json", "locked", "read-only", "x" * 300])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    where: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "measure", lambda _: pytest.fail("it is told before anything is measured"))
    monkeypatch.chdir(tmp_path)
    Path("read-only").write_text("before")
    if where == "locked":
        monkeypatch.setattr(Path, "touch", Mock(side_effect=PermissionError(errno.EACCES, os.strerror(errno.EACCES))))
    if where == "read-only":  # who runs the tests may be one to whom all is allowed
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "read-only" or mode != os.W_OK)
    assert cli.run(["bench", "plan", option, where]) == 2
    out, err = capsys.readouterr()
    assert out == "" and one_line(err) and f"{where} cannot be written (" in err and "choose another file" in err
    assert [each.name for each in tmp_path.iterdir()] == ["read-only"] and Path("read-only").read_text() == "before"


@pytest.mark.parametrize("command", ["plan", "idle"])
def test_files_that_would_lose_what_was_measured_are_wrong_usage(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(f"kvcore.bench.{command}.measure", lambda *_: pytest.fail("it is told before anything is measured"))
    monkeypatch.chdir(tmp_path)
    for arguments, said in {
        ("--html", "-"): "name a file",
        ("--json", "x", "--html", f"{tmp_path}/x"): "is the file of --json too",
    }.items():
        assert cli.run(["bench", command, *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == "" and one_line(err) and said in err


# --- two reports


def changed(path: Path, name: str, **changes: Any) -> Path:
    """A report beside this one with other fields."""
    other = path.with_name(f"{name}.json")
    other.write_text(json.dumps({**loaded(path), **changes}))
    return other


@pytest.mark.parametrize("command", MEASURED)
def test_a_report_compared_with_itself_is_alike_in_everything(command: str, written: dict[str, Path]) -> None:
    found = compare.compare(written[command], written[command])
    assert (found.differences, found.missing, found.compared) == ((), (), command)
    every = [each for case in found.results for each in case.ratios]
    assert every and len(found.results) == len(loaded(written[command])["results"])
    for each in every:
        assert each.ratio in (1.0, None) and each.verdict in ("alike", "unknown")
    jsonschema.validate(json.loads(msgspec.json.encode(found)), schema())


def test_what_differs_is_told_and_figures_are_told_as_ratios(written: dict[str, Path]) -> None:
    path = written["bench rooms"]
    was = loaded(path)
    results = [{**one, "rooms_per_s": 10.0, "rooms_per_s_each": [8.0, 8.0, 10.0, 12.0, 12.0]} for one in was["results"]]
    slower = changed(path, "slower", results=results)
    results = [{**one, "rooms_per_s": 20.0, "rooms_per_s_each": [20.0] * 5} for one in results]
    results[0]["raw"] = {**results[0]["raw"], "way": "another"}
    faster = changed(
        path, "faster", results=results[:-1], parameters={**was["parameters"], "rooms": 99}, machine={**was["machine"], "cores": 3}
    )
    done = kvcore("bench", "compare", str(slower), str(faster))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"differs: parameters.rooms: {was['parameters']['rooms']} in A, 99 in B" in done.stdout
    assert f"differs: machine.cores: {was['machine']['cores']} in A, 3 in B" in done.stdout
    assert "raw.way: sendmsg in A, another in B" in done.stdout
    assert done.stdout.count("(only in A)") == 1
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("rooms_per_s ")]
    assert lines == [["rooms_per_s", "10", "20", "2.000", "(1.667", "to", "2.500)", "better"]] * (len(was["results"]) - 1)
    again = kvcore("bench", "compare", str(slower), str(faster), "--json", "-")
    jsonschema.validate(json.loads(again.stdout), schema())


@pytest.mark.parametrize(
    ("name", "a", "b", "verdict"),
    [
        ("rooms_per_s", (10.0, 10.0, 11.0, 12.0, 12.0), (20.0, 20.0, 21.0, 22.0, 22.0), "better"),
        ("rooms_per_s", (20.0, 20.0, 21.0, 22.0, 22.0), (10.0, 10.0, 11.0, 12.0, 12.0), "worse"),
        ("raw.kvcore_share", (0.2,) * 5, (0.3,) * 5, "better"),
        ("latency_ms_median", (10.0, 10.0, 11.0, 12.0, 12.0), (20.0, 20.0, 21.0, 22.0, 22.0), "worse"),
        ("cpu_us_per_step", (2.0,) * 5, (1.0,) * 5, "better"),
        ("rooms_per_s", (10.0, 10.0, 11.0, 20.0, 20.0), (9.0, 9.0, 12.0, 21.0, 21.0), "alike"),
        ("rooms_per_s", (10.0,) * 4, (20.0,) * 9, "unknown"),
        ("rooms_per_s", (10.0,) * 9, (20.0,) * 4, "unknown"),
        ("rooms_per_s", (10.0,), (20.0, 21.0), "unknown"),
        ("rooms_per_s", (), (), "unknown"),
    ],
)
def test_a_figure_is_better_or_worse_only_beyond_its_spread(name: str, a: tuple[float, ...], b: tuple[float, ...], verdict: str) -> None:
    found = compare.ratio(Figure(name, 2.0, a), Figure(name, 3.0, b))
    assert (found.ratio, found.verdict) == (1.5, verdict)
    assert (found.low is None) == (found.high is None) == (min(len(a), len(b)) < 2)


def test_the_spread_of_a_ratio_is_that_of_the_medians() -> None:
    many = tuple(float(value) for value in range(95, 106))
    found = compare.ratio(Figure("x_ms", 100.0, many), Figure("x_ms", 200.0, (*(2 * value for value in many[:-1]), 9000.0)))
    assert found.low is not None and found.high is not None
    assert 1.9 < found.low < 2 < found.high < 2.15  # of all pairs the most is 95


def test_nothing_over_nothing_has_no_ratio() -> None:
    found = compare.ratio(Figure("x_ms", 0.0, (0.0, 0.0)), Figure("x_ms", 3.0, (3.0, 3.0)))
    assert (found.ratio, found.low, found.high, found.verdict) == (None, None, None, "unknown")


def test_a_comparison_of_few_repeats_says_from_how_many_on_it_judges(written: dict[str, Path]) -> None:
    path = str(written["bench bandwidth"])
    done = kvcore("bench", "compare", path, path)
    assert "better or worse is said from 5 repeats of both on" in done.stdout and "alike" not in done.stdout


def test_two_traces_are_told_apart_and_folders_are_nobodys_business(written: dict[str, Path]) -> None:
    path = written["bench trace"]
    assert loaded(path)["parameters"]["trace"] == "trace.jsonl"
    results = [{**one, "trace_digest": "another"} for one in loaded(path)["results"]]
    found = compare.compare(path, changed(path, "another trace", results=results))
    assert [each.what for each in found.differences] == [f"{found.results[0].name}: trace_digest"]


def test_what_cannot_be_compared_is_refused_in_one_line(
    written: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rooms, idle = written["bench rooms"], written["bench idle"]
    results = [{**one, "in_flight": 77} for one in loaded(rooms)["results"]]
    for other, said in {
        idle: "give two files of the same command",
        changed(rooms, "later", schema=2): "bench rooms under schema 2, which this version does not know; use the kvcore that wrote it",
        changed(rooms, "speed", command="bench speed"): "bench speed under schema 1",
        tmp_path / "missing": "cannot be read",
        changed(rooms, "other", results=results): "give two files with a case that both have",
        changed(rooms, "empty", results=[]): "holds no result; measure again",
        changed(rooms, "comparison", command="bench compare"): "is a comparison, not a measurement",
    }.items():
        assert said in refusal(capsys, "compare", rooms, other)
    for text in (b"\xff", b"{}", b"[" * 100_000, b'{"schema": "1"}'):
        other = tmp_path / "other"
        other.write_bytes(text)
        assert "is not what kvcore bench writes with --json" in refusal(capsys, "compare", other, rooms)


def test_figures_are_numbers_that_are_not_counts() -> None:
    result = {"in_flight": 1, "a_ms": 1.5, "a_ms_each": [1.0, 2.0], "verified": 7, "n": 3, "n_each": [3, 3], "way": "x", "none": None}
    found = [*figures({**result, "raw": {"b_per_s": 2.0, "tried_per_s": {"x": 1.0}}}, {"in_flight"})]
    assert found == [Figure("a_ms", 1.5, (1.0, 2.0)), Figure("n", 3, (3, 3)), Figure("raw.b_per_s", 2.0, ())]
    assert [each.higher for each in found] == [False, False, True]


def test_versions_of_what_is_beneath_are_those_that_a_plugin_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_backend(tmp_path, "named")
    with (tmp_path / "kvcore_named-1.5.dist-info" / "METADATA").open("a") as file:
        file.write("Requires-Dist: kvcore<9,>=0.1\nRequires-Dist: msgspec>=0.18; extra == 'cpu'\nRequires-Dist: no-such-engine>=1\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = report("bench kill", Setup("named"), KILL, []).versions
    assert (found["distribution"], found["backend"], found["msgspec"]) == ("kvcore-named", "1.5", msgspec.__version__)
    assert {*found} == {"kvcore", "distribution", "backend", "numpy", "pyzmq", "msgspec"}


def test_a_report_is_read_as_it_was_written(written: dict[str, Path]) -> None:
    for path in written.values():
        assert msgspec.convert(loaded(path), Report) == read(path)
