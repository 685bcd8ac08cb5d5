"""``kvcore doctor``: backends that work and backends that fail at every step, as made-up distributions, checked in real processes."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from kvcore.doctor.examination import Finding, examine
from kvcore.doctor.patient import Settings
from kvcore.installed import find_backend
from kvcore.progress import unwatched
from tests.commands import kvcore, one_line
from tests.made_backends import GREEDY, LYING, make_backend

WORKING = """
@hookimpl
def kvcore_open(self, options, context):
    os.write(1, b"the engine greets you")
    super().kvcore_open(options, context)

@hookimpl
def kvcore_facts(self):
    return [Fact("engine", "9.8"), Fact("libfabric", "missing", "apt-get install libfabric1")]
"""


def checked(root: Path, monkeypatch: pytest.MonkeyPatch, body: str, before: str = "", limit_s: float = 30.0) -> Finding:
    """What the doctor finds of a backend made from ``body``."""
    monkeypatch.syspath_prepend(make_backend(root, "odd", body, before))
    return examine(find_backend("odd"), Settings("odd@kvcore-odd", {}, "127.0.0.1", limit_s), unwatched)


def test_a_backend_that_works_is_ok_with_its_facts_and_a_clean_stdout(tmp_path: Path) -> None:
    done = kvcore("doctor", "good", "--json", path=make_backend(tmp_path, "good", WORKING))
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    (one,) = found["backends"]
    assert found["ok"] is one["ok"] is True
    assert (one["name"], one["distribution"], one["version"], one["backend_version"], one["problem"]) == (
        "good",
        "kvcore-good",
        "1.5",
        "1.0",
        "",
    )
    assert one["capabilities"]["memory"] == ["cpu"] and one["api_version"] == "1.0"
    assert one["facts"] == [
        {"name": "engine", "value": "9.8", "advice": ""},
        {"name": "libfabric", "value": "missing", "advice": "apt-get install libfabric1"},
    ]


def test_all_are_checked_and_one_that_does_not_work_fails_the_whole(tmp_path: Path) -> None:
    path = make_backend(tmp_path, "broken", before="import no_such_engine\n")
    done = kvcore("doctor", path=path)
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    (bad,) = [line for line in lines if line.startswith("FAILED")]
    (good,) = [line for line in lines if line.startswith("ok ")]
    assert "broken (kvcore-broken 1.5): " in bad and "No module named 'no_such_engine'" in bad and "reinstall" in bad
    assert "local (kvcore " in good and "moved a page between two processes" in good
    assert lines[-1].startswith("failed: 1 of ") and lines[-1].endswith("broken (kvcore-broken 1.5)")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("@hookimpl\ndef kvcore_open(self): raise OSError('no such device: mlx5_7')", ("did not start", "mlx5_7", "check its options")),
        (GREEDY, ("wrong bytes in region 0, the first at 0 of page 3, which was not to be written", "nothing but what a transfer names")),
        (LYING, ("the room ended with SUCCESS", "wrong bytes in region 0, the first at 0 of page 2", "DONE only when")),
        (
            "@hookimpl\ndef kvcore_transfer(self): os.kill(os.getpid(), signal.SIGSEGV); threading.Event().wait()",
            ("the prefill process has died (exit code -11, SIGSEGV, doing: pairing and moving a page)", "--debug"),
        ),
        (
            "@hookimpl\ndef kvcore_close(self): raise OSError('engine is busy')",
            ("did not close cleanly", "engine is busy", "the page was moved, but"),
        ),
        ("def kvcore_opne(self): pass", ("kvcore_opne", "did you mean 'kvcore_open'")),
    ],
    ids=["start", "a page too many", "lies", "crash", "close", "hook"],
)
def test_what_is_wrong_is_said_with_the_next_step(
    body: str, said: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = checked(tmp_path, monkeypatch, body)
    assert found.problem and all(words in found.problem for words in said), found.problem
    assert "\n" not in found.problem


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        ("kvcore_open", ("neither process has said anything for 6 s", "prefill: starting its engine and registering memory")),
        ("kvcore_connect", ("room 1 failed", "timeout")),
    ],
)
def test_a_backend_that_hangs_is_given_up(hook: str, said: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checked(tmp_path, monkeypatch, f"@hookimpl\ndef {hook}(self): threading.Event().wait()", limit_s=6.0)
    assert all(words in found.problem for words in said), found.problem
    assert found.seconds < 25.0


def test_facts_that_cannot_be_told_are_a_fact_and_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checked(tmp_path, monkeypatch, "@hookimpl\ndef kvcore_facts(self): raise KeyError('nic')")
    assert (found.problem, len(found.about.facts if found.about else ())) == ("", 1)
    assert found.about is not None
    assert "KeyError" in found.about.facts[0].value and "must fix kvcore_facts" in found.about.facts[0].advice


def test_facts_are_there_also_if_decode_would_be_first_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = "@hookimpl\ndef kvcore_facts(self): threading.Event().wait(2); return [Fact('engine', '9.8')]\n"
    found = checked(tmp_path, monkeypatch, late + "@hookimpl\ndef kvcore_open(self): raise OSError('no such device')")
    assert "no such device" in found.problem
    assert found.about is not None and [fact.value for fact in found.about.facts] == ["9.8"]


def test_whatever_a_backend_says_is_shown_in_printable_lines(tmp_path: Path) -> None:
    make_backend(
        tmp_path, "odd", r"@hookimpl" "\n" r"def kvcore_facts(self): return [Fact('a\nb', 'c\x1b[2J\ud800\u20ac' + 'd' * 3000, 'e')]"
    )
    make_backend(tmp_path, "bad", before=r"raise RuntimeError('bad \ud800 \x1b[2J \u20ac')" "\n")
    done = kvcore("doctor", path=tmp_path, PYTHONIOENCODING="latin-1")  # which has no euro sign
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert any(line.startswith("FAILED  bad (kvcore-bad 1.5): ") and "RuntimeError: bad [2J " in line for line in lines)
    (fact,) = [line for line in lines if line.startswith("        a b: c [2J ")]
    assert fact.endswith("ddd...; e") and fact.isprintable() and len(fact) < 400
    assert lines[-1].startswith("failed: 1 of ")


STUCK = r"""
@hookimpl
def kvcore_open(self):
    import ctypes
    os.write(2, b"stuck\n")
    ctypes.PyDLL(None).pause()
"""


def test_a_process_whose_engine_holds_the_gil_ends_with_its_driver(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvcore.cli", "doctor", "stuck", "--debug"]
    places = [str(make_backend(tmp_path, "stuck", STUCK)), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    driver = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    assert driver.stderr is not None
    try:
        said = (line for line in driver.stderr if line == "stuck\n")
        assert len(list(itertools.islice(said, 2))) == 2
        driver.kill()
        driver.communicate(timeout=10)  # the pipe ends when the last process that holds it has ended
    finally:
        with suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)


def test_options_reach_the_backend_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    file.write_text("frame_byte = 4096\n")
    done = kvcore("doctor", "local", "--options", str(file))
    assert (done.returncode, done.stderr) == (1, "")
    assert "no option 'frame_byte'" in done.stdout and "did you mean 'frame_bytes'" in done.stdout


def test_a_name_that_two_offer_is_a_conflict(tmp_path: Path) -> None:
    make_backend(tmp_path, "twice", before="raise RuntimeError('first')\n", distribution="kvcore-one")
    make_backend(tmp_path, "twice", before="raise RuntimeError('second')\n", distribution="kvcore-two")
    done = kvcore("doctor", "twice", path=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert one_line(done.stderr) and "twice@kvcore-one" in done.stderr and "twice@kvcore-two" in done.stderr


def test_debug_shows_the_traceback_of_the_process_that_failed(tmp_path: Path) -> None:
    done = kvcore("doctor", "broken", "--debug", path=make_backend(tmp_path, "broken", before="import no_such_engine\n"))
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr and "made_kvcore_broken.py" in done.stderr
    assert "Traceback" not in done.stdout
