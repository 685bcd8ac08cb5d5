"""What the README and the documents say is true: code runs, commands exist, tables agree, links lead somewhere."""

from __future__ import annotations

import ast
import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import typer
from kvcore_conformance.stage.driver import free_port

import kvcore
from kvcore.backends.local import LocalOptions
from kvcore.cli import application
from kvcore.hookspecs import REQUIRED, Capabilities, Fact, KVCoreSpec, NoOptions
from kvcore.metrics import COUNTERS, GAUGES, SUMMARIES
from tests.helpers import ROOT, duo, ended, full_stores, memory

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAM_S = 60.0
PROGRAMS = dict(re.findall(r"<!-- (examples/\w+\.py) -->\n```python\n(.*?)```", README, re.DOTALL))


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    return [dedent(block) for block in re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)]


def play(name: str, **given: Any) -> dict[str, Any]:
    """Run the Python of a page, one block after the other; the names that it leaves."""
    names = {"kvcore": kvcore, **given}
    for block in blocks(page(name), "python"):
        exec(compile(block, name, "exec"), names)
    return names


def in_table(text: str, name: str) -> list[str]:
    """The cells of the table row that starts with a name in backquotes."""
    row = re.search(rf"^\| `{re.escape(name)}(?:\([^`]*\))?` \|(.*)\|$", text, re.MULTILINE)
    assert row is not None, f"no row for {name}"
    return [cell.strip() for cell in row[1].split("|")]


# --- the two programs


@pytest.mark.parametrize("name", ["examples/prefill.py", "examples/decode.py"])
def test_a_program_in_the_readme_is_the_example(name: str) -> None:
    assert PROGRAMS[name] == (ROOT / name).read_text(encoding="utf-8")
    assert len(PROGRAMS[name].splitlines()) <= 25


@pytest.mark.parametrize("first", ["examples/prefill.py", "examples/decode.py"])
def test_the_two_programs_run_and_the_bytes_are_equal(tmp_path: Path, first: str) -> None:
    second = next(name for name in PROGRAMS if name != first)
    port, started = str(free_port()), {}
    try:
        for name in (first, second):
            program = tmp_path / Path(name).name
            program.write_text(PROGRAMS[name], encoding="utf-8")
            started[name] = subprocess.Popen(
                [sys.executable, str(program), port],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        said = {name: process.communicate(timeout=PROGRAM_S) for name, process in started.items()}
    finally:
        for process in started.values():
            process.kill()
            process.wait()
    assert {name: (process.returncode, said[name][1]) for name, process in started.items()} == dict.fromkeys(PROGRAMS, (0, ""))
    assert "prefill: SUCCESS, 131072 bytes in 4 pages" in said["examples/prefill.py"][0]
    assert said["examples/decode.py"][0] == "decode: SUCCESS b'the first token'\ndecode: the bytes are equal\n"


# --- code in the documents


def test_every_page_with_code_is_played() -> None:
    with_code = {where.name for where in PAGES if blocks(where.read_text(encoding="utf-8"), "python")}
    played = set(re.findall(r'play\("([\w-]+\.md)"', Path(__file__).read_text(encoding="utf-8")))
    assert with_code == played | {"README.md"}


def test_the_code_about_rooms() -> None:
    with duo() as pair:
        names = play("rooms.md", prefill=pair.prefill, decode=pair.decode)
        names["sender"].send([1], last=True)
        names["receiver"].receive([2])
        ended(names["receiver"], kvcore.KVPoll.SUCCESS)


def test_the_code_about_ranks() -> None:
    names = play("ranks.md", tensors=[np.zeros((4, 16, 2, 128), np.uint8) for _ in range(31)])
    assert names["config"].topology.place.number == 1 and names["pool"].layers == tuple(range(31))


def test_the_code_about_failures(capsys: pytest.CaptureFixture[str]) -> None:
    level = logging.getLogger("kvcore").level
    try:
        with duo() as pair, pair.decode.receiver(7, pair.prefill.address) as receiver:
            receiver.abort("no more of it")
            play("failures.md", receiver=receiver)
    finally:
        logging.getLogger("kvcore").setLevel(level)
    line, code, reason = capsys.readouterr().out.splitlines()
    assert line == str(receiver.failure)
    assert code == f"{kvcore.FailureCode.ABORTED} decode 0"
    assert reason == "no more of it"


def test_the_code_about_release_safety() -> None:
    freed: list[int] = []
    with duo() as pair:
        sender, receiver = pair.open()
        receiver.receive([2])
        sender.send([1], last=True)
        ended(receiver, kvcore.KVPoll.SUCCESS)
        names = play("release-safety.md", handle=receiver, pages=[2], free_pages=freed.extend)
        sender.clear()
    assert freed == [2]
    assert names["limits"].quarantine_s is None


def test_the_code_about_choosing_a_backend() -> None:
    config = play("choosing-a-backend.md")["config"]
    with kvcore.KVManager(config, [kvcore.Pool.from_tensors("kv", memory(4), page_size=1)]) as manager:
        assert manager.healthy


def test_the_code_about_a_transformers_model() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # late releases of transformers have another name for an argument
        names = play("transformers.md")
    alone = names["model"].generate(names["torch"].tensor([names["prompt"]]), max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert names["tokens"].tolist() == alone.tolist()
    assert names["kv"].free_pages == 64
    assert names["mine"] != names["pages"]


def test_the_code_about_operating(capsys: pytest.CaptureFixture[str]) -> None:
    with duo() as pair, pair.prefill.sender(7):
        names = play("operating.md", manager=pair.prefill)
        sizes, story = capsys.readouterr().out.split("\n", 1)
        assert ast.literal_eval(sizes) == full_stores(pair.prefill)
        assert "BOOTSTRAPPING" in story
        pool = kvcore.Pool.from_tensors("kv", pair.source, page_size=16)
        with kvcore.KVManager(names["config"], [pool]) as manager:
            assert not manager.admin_address.endswith(":0")


def test_the_code_about_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file, secured), (shell, _, _) = (blocks(page("configuration.md"), language) for language in ("toml", "sh"))
    (tmp_path / "secured.toml").write_text(f'role = "decode"\n{secured}', encoding="utf-8")
    assert len(kvcore.Config.load(tmp_path / "secured.toml").security.curve_peers or ()) == 1
    (tmp_path / "kvcore.toml").write_text(file, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    config = play("configuration.md")["config"]
    assert (config.role, config.port, config.limits.transfer_s, config.backend_options) == ("decode", 7000, 60, {"frame_bytes": 262144})
    for setting in shell.split():
        monkeypatch.setenv(*setting.split("="))
    config = play("configuration.md")["config"]
    assert (config.limits.transfer_s, config.limits.quarantine_s) == (30, None)
    assert config.backend_options == {"frame_bytes": 262144, "connect_s": 2}


def test_the_code_about_writing_a_backend() -> None:
    names = play("writing-a-backend.md", MyOptions=NoOptions, Fact=Fact, native=SimpleNamespace(version=lambda: "1.0"))
    assert names["MyBackend"]().kvcore_backend_info().name == "mine"
    assert [type(fact) for fact in names["kvcore_facts"](None)] == [Fact] * 3


def test_every_mistake_in_the_guide_is_an_animal_of_the_zoo() -> None:
    zoo = (ROOT / "conformance" / "zoo" / "kvcore_zoo-0.1.0.dist-info" / "entry_points.txt").read_text(encoding="utf-8")
    named = set(re.findall(r"`(zoo-\w+)`", page("writing-a-backend.md")))
    assert named and sorted(name for name in named if f"\n{name} = " not in zoo) == []


# --- commands in the documents


def commands(text: str) -> list[str]:
    """What is written as a command: in backquotes, or as a line of a shell block."""
    lines = "\n".join(blocks(text, "sh")).splitlines()
    return [" ".join(command.replace("\\|", "|").split("#")[0].split()) for command in (*re.findall(r"`([^`\n]+)`", text), *lines)]


@pytest.mark.parametrize("where", PAGES, ids=lambda path: path.name)
def test_every_command_exists_with_its_options(where: Path) -> None:
    text = where.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in commands(text):
        name, *words = command.split() or [""]
        if name == "make" and words:
            assert re.search(rf"^{re.escape(words[0])}:", makefile, re.MULTILINE), command
        if name == "kvcore":
            known: Any = typer.main.get_command(application())
            while words and hasattr(known, "commands"):
                missing = set(words[0].split("|")) - known.commands.keys()
                assert not missing, command
                known = known.commands[words.pop(0).split("|")[0]]
            options = {option for parameter in known.params for option in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= options | {"--help"}, command


@pytest.mark.parametrize("where", PAGES, ids=lambda path: path.name)
def test_every_extra_and_every_file_named_exists(where: Path) -> None:
    text = where.read_text(encoding="utf-8")
    extras = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    named = {extra for found in re.findall(r"(?:kvcore|'\.)\[([a-z,]+)\]", text) for extra in found.split(",")}
    assert [extra for extra in named if f"\n{extra} = " not in extras] == []
    files = re.findall(r"`((?:kvcore|examples|tests|docs|plugins)/[\w/.-]+)`", text)
    assert [file for file in files if not (ROOT / file).exists()] == []


# --- what is said about the code


@pytest.mark.parametrize("where", PAGES, ids=lambda path: path.name)
def test_every_link_leads_to_a_file_and_a_heading_in_it(where: Path) -> None:
    for link, anchor in re.findall(r"\]\((?!https?://)([^)#]*)(?:#([^)]*))?\)", where.read_text(encoding="utf-8")):
        target = where.parent / link if link else where
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, f"{link}#{anchor}"


def test_every_public_name_is_in_the_reference() -> None:
    text = page("api.md") + page("writing-a-backend.md")
    assert [name for name in kvcore.__all__ if not re.search(rf"`[^`]*\b{name}\b", text)] == []


@pytest.mark.parametrize("name", kvcore.Limits.model_fields)
def test_every_limit_is_in_the_tables_with_its_default(name: str) -> None:
    default = f"{kvcore.Limits.model_fields[name].default:g}"
    assert in_table(README, name)[0] == default
    assert in_table(page("limits.md"), name)[0].split(",")[0] == default
    assert f"`{name}`" in "".join(in_table(page("configuration.md"), "limits"))


def test_every_setting_is_in_the_configuration() -> None:
    settings, _, options = page("configuration.md").partition("The options of `local`")
    for name, field in kvcore.Config.model_fields.items():
        default = in_table(settings, name)[0].strip("`")
        if isinstance(field.default, str | int):
            assert default == (f'"{field.default}"' if isinstance(field.default, str) else str(field.default)), name
    for name, field in LocalOptions.model_fields.items():
        assert float(in_table(options, name)[0]) == field.default
    for part in (kvcore.Topology, kvcore.Security):
        assert all(f"`{name}`" in settings for name in part.model_fields)


def test_the_file_of_options_for_the_bench_is_one() -> None:
    (text,) = blocks(page("performance.md"), "toml")
    given = msgspec.toml.decode(text)
    assert LocalOptions(**given).model_dump(include=set(given)) == given


def test_every_hook_and_capability_is_in_the_backends_page() -> None:
    text = page("writing-a-backend.md")
    hooks = {name for name in vars(KVCoreSpec) if name.startswith("kvcore_")} - {"kvcore_on_event"}
    assert {name for name in hooks if in_table(text, name)[0] == "yes"} == REQUIRED
    assert [name for name in Capabilities.__dataclass_fields__ if f"`{name}`" not in text] == []


def test_every_failure_code_and_state_is_explained() -> None:
    for code in kvcore.FailureCode:
        assert all(in_table(page("failures.md"), code.name)), code
    assert [state.name for state in kvcore.KVPoll if f"`{state.name}` ({state.value})" not in page("rooms.md")] == []


def test_every_metric_and_event_is_in_the_operators_page() -> None:
    text = page("operating.md")
    assert [name for name in {*COUNTERS, *SUMMARIES, *GAUGES} if not re.search(rf"^\| `{name}[`{{]", text, re.MULTILINE)] == []
    code = "".join((ROOT / "kvcore" / name).read_text(encoding="utf-8") for name in ("core.py", "peers.py"))
    events = set(re.findall(r'\.event\("(\w+)"', code))
    assert "status" in events
    assert [name for name in events if not in_table(text, name)] == []


def test_every_module_is_in_the_architecture() -> None:
    text = page("architecture.md")
    names = {path.stem for path in (ROOT / "kvcore").glob("*.py")} | {path.parent.name for path in (ROOT / "kvcore").glob("*/__init__.py")}
    assert sorted(name for name in names - {"__init__"} if f"`{name}" not in text) == []
