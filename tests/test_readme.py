"""What the README and the documents say is true: the programs run, the tables agree with the code, the links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvcore
from kvcore.backends.local import LocalOptions
from kvcore.hookspecs import REQUIRED, Capabilities, KVCoreSpec
from tests.processes.driver import ROOT, free_port

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAM_S = 60.0
PROGRAMS = dict(re.findall(r"<!-- (examples/\w+\.py) -->\n```python\n(.*?)```", README, re.DOTALL))


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


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


# --- what is said about the code


@pytest.mark.parametrize("where", PAGES, ids=lambda path: path.name)
def test_every_link_leads_to_a_file(where: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)", where.read_text(encoding="utf-8"))
    assert [link for link in links if not (where.parent / link).exists()] == []


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


def test_every_hook_and_capability_is_in_the_backends_page() -> None:
    text = page("backends.md")
    hooks = {name for name in vars(KVCoreSpec) if name.startswith("kvcore_")} - {"kvcore_on_event"}
    assert {name for name in hooks if in_table(text, name)[0] == "yes"} == REQUIRED
    assert [name for name in Capabilities.__dataclass_fields__ if f"`{name}`" not in text] == []


def test_every_failure_code_and_state_is_in_the_rooms_page() -> None:
    text = page("rooms.md")
    assert [code.name for code in kvcore.FailureCode if f"`{code.name}`" not in text] == []
    assert [state.name for state in kvcore.KVPoll if f"`{state.name}` ({state.value})" not in text] == []


def test_every_module_is_in_the_architecture() -> None:
    text = page("architecture.md")
    names = {path.stem for path in (ROOT / "kvcore").glob("*.py")} | {path.parent.name for path in (ROOT / "kvcore").glob("*/__init__.py")}
    assert sorted(name for name in names - {"__init__"} if f"`{name}" not in text) == []
