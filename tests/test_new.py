"""``kvcore new``: what it writes is a plugin that works, and names nothing of the example that it was made from."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from kvcore.new.project import PARTS
from tests.commands import kvcore, one_line
from tests.helpers import ROOT
from tests.made_backends import make_backend

EXAMPLE = ROOT / "examples" / "kvcore-shm"
MOST_S = 900.0
NAMES = ["ab", "my-engine2", "shmoo", "a-name-as-long-as-may-be"]


def new(name: str, into: Path) -> Path:
    """The project, written."""
    done = kvcore("new", name, "--into", str(into))
    assert (done.returncode, done.stderr) == (0, "")
    project = into / f"kvcore-{name}"
    assert str(project) in done.stdout
    return project


def texts(project: Path) -> dict[str, str]:
    """Every file of a project, by its path."""
    return {str(path.relative_to(project)): path.read_text(encoding="utf-8") for path in project.rglob("*") if path.is_file()}


def tracked() -> list[str]:
    """The example's files, without what runs have left there."""
    return run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=EXAMPLE).splitlines()


def run(*command: str | Path, cwd: Path) -> str:
    """What a command prints that ends well."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("KVCORE_", "PYTHON", "PYTEST_"))}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=MOST_S, check=False
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    return done.stdout


# --- what is written


@pytest.mark.parametrize("name", NAMES)
def test_a_project_names_itself_and_nothing_of_the_example(tmp_path: Path, name: str) -> None:
    files = texts(new(name, tmp_path))
    package = f"kvcore_{name.replace('-', '_')}"
    assert {f"{package}/backend.py", f"{package}/py.typed", "tests/test_contract.py", ".gitignore"} <= set(files)
    everything = "\n".join([*files, *files.values()])
    assert not re.search("shm", everything.replace(name, "").replace(package, "").replace("Shmoo", ""), re.IGNORECASE)
    assert f'\n{name} = "{package}.backend:' in files["pyproject.toml"] and f'name = "kvcore-{name}"' in files["pyproject.toml"]
    assert f"run: kvcore-conformance --backend {name} --report report/\n" in files[".github/workflows/conformance.yml"]


@pytest.mark.parametrize("name", NAMES)
def test_a_project_is_clean(tmp_path: Path, name: str) -> None:
    project = new(name, tmp_path)
    for check in (("check",), ("format", "--check")):
        run(sys.executable, "-m", "ruff", *check, "--no-cache", ".", cwd=project)


def test_the_wheel_carries_the_files_of_the_example() -> None:
    """All that are under version control are written, and all that are written are in the wheel."""
    assert {path.split("/")[0] for path in tracked()} == set(PARTS)
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    forced = re.findall(r'^"examples/kvcore-shm/([\w./-]+)" = "kvcore/new/template/\1"$', settings, re.MULTILINE)
    assert sorted(forced) == sorted(PARTS)


# --- what is refused


@pytest.mark.parametrize("name", ["Mine", "my_engine", "2fast", "a--b", "a-", "", "ü", "../up", "x" * 25])
def test_a_name_that_is_none_is_wrong_usage(tmp_path: Path, name: str) -> None:
    done = kvcore("new", "--into", str(tmp_path), "--", name)
    assert (done.returncode, done.stdout) == (2, "")
    assert one_line(done.stderr) and "lower case letters" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    done = kvcore("new", "mine", "--into", str(tmp_path / "nowhere"))
    assert done.returncode == 2 and one_line(done.stderr) and "nowhere" in done.stderr


@pytest.mark.parametrize(("name", "said"), [("local", "of kvcore"), ("loud", "kvcore-loud"), ("conformance", "own"), ("mori", "own")])
def test_a_name_that_is_taken_fails(tmp_path: Path, name: str, said: str) -> None:
    done = kvcore("new", name, "--into", str(tmp_path), path=make_backend(tmp_path / "path", "loud"))
    assert (done.returncode, done.stdout) == (1, "")
    assert one_line(done.stderr) and said in done.stderr and "choose another name" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["path"]


def test_a_project_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "kvcore-mine").mkdir()
    done = kvcore("new", "mine", "--into", str(tmp_path))
    assert done.returncode == 1 and one_line(done.stderr) and "is there already" in done.stderr
    assert list((tmp_path / "kvcore-mine").iterdir()) == []


def test_a_place_that_cannot_be_written_fails_in_one_line() -> None:
    done = kvcore("new", "mine", "--into", "/proc")
    assert done.returncode == 1 and one_line(done.stderr) and "/proc/kvcore-mine cannot be written" in done.stderr


# --- what it is worth


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels of kvcore and of the kit, as a third party gets them."""
    folder = tmp_path_factory.mktemp("wheels")
    for source in (ROOT, ROOT / "conformance"):
        run(sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "--wheel-dir", folder, source, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def python(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with these, and nothing of the checkout."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    run(folder / "bin" / "python", "-m", "pip", "--quiet", "install", *wheels.glob("*.whl"), "typer", "rich", cwd=folder)
    return folder / "bin" / "python"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shm", "another-one"])
def test_a_project_passes_its_tests_and_the_kit_from_its_wheel(tmp_path: Path, python: Path, name: str) -> None:
    """``shm`` gives the example itself, which is so tested as a third party's. Its tests are the kit's too, in the quick profile."""
    run(python.with_name("kvcore"), "new", name, "--into", tmp_path, cwd=tmp_path)
    project = tmp_path / f"kvcore-{name}"
    if name == "shm":
        assert texts(project) == {path: (EXAMPLE / path).read_text(encoding="utf-8") for path in tracked()}
    run(python, "-m", "pip", "--quiet", "wheel", "--no-deps", "--wheel-dir", tmp_path, project, cwd=tmp_path)
    run(python, "-m", "pip", "--quiet", "install", "--no-deps", *tmp_path.glob("*.whl"), cwd=tmp_path)
    shutil.rmtree(project / f"kvcore_{name.replace('-', '_')}")  # from here on it is the wheel's
    run(python.with_name("pytest"), cwd=project)


@pytest.mark.slow
def test_the_guides_first_commands_lead_to_a_report(tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (ROOT / "docs" / "writing-a-backend.md").read_text(encoding="utf-8")
    (commands,) = re.findall(r"^```sh\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    monkeypatch.setenv("PATH", str(python.parent), prepend=os.pathsep)
    run("bash", "-ec", commands, cwd=tmp_path)
    assert {"badge.svg", "report.html", "report.json"} <= set(os.listdir(tmp_path / "kvcore-my-engine" / "report"))
