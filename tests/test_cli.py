"""The command line: what stands in stdout and stderr, exit codes, progress for who watches, and what is imported."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from kvcore.bench.waiting import SETTLE_S
from kvcore.buffers import Buffer, random_pages
from kvcore.cli_options import tell_json
from kvcore.sides import ToolError
from tests.commands import kvcore, one_line, watched
from tests.made_backends import make_backend

FALL = """
from kvcore.bootstrap_client import Registrar
from kvcore.doctor import patient
start = Registrar.start

def fall(self):
    start(self)
    self._http.stop()
"""
LONELY = """
@hookimpl
def kvcore_open(self, options, context):
    if context.side == "prefill":
        Registrar.start = fall
        patient._succeed = lambda handle, limit_s: handle.wait(limit_s)
    super().kvcore_open(options, context)
"""
"""A backend whose prefill side loses its bootstrap service, and says nothing of its own room, so that decode is heard."""
QUICK = ("bench", "idle", "--rooms", "3", "--window", "1", "--repeats", "1")


# --- what is installed


def test_backends_are_listed_without_importing_any(tmp_path: Path) -> None:
    path = make_backend(tmp_path, "loud", before=f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    done = kvcore("backends", "--json", path=path)
    assert (done.returncode, done.stderr) == (0, "")
    found = {one["name"]: one for one in json.loads(done.stdout)["backends"]}
    assert found["loud"] == {"name": "loud", "distribution": "kvcore-loud", "version": "1.5", "entry_point": "made_kvcore_loud:Backend"}
    assert found["local"]["distribution"] == "kvcore"
    lines = kvcore("backends", path=path).stdout.splitlines()
    assert lines[0].split() == ["name", "distribution", "version"]
    assert ["loud", "kvcore-loud", "1.5"] in [line.split() for line in lines[1:]]
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize("arguments", [["--help"], ["backends"], ["bench", "rooms", "--help"]])
def test_what_measures_nothing_imports_nothing_heavy(arguments: list[str]) -> None:
    code = f"import sys; from kvcore import cli; code = cli.run({arguments!r}); print(sorted(sys.modules), file=sys.stderr); sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0
    modules = {name.strip("' ") for name in done.stderr.strip("[]\n").split(",")}
    assert "kvcore.cli" in modules
    assert not modules & {"numpy", "pluggy", "zmq", "torch", "rich.progress", "kvcore.config", "kvcore.manager"}


# --- exit codes


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Missing command"),
        (["nothing"], "nothing"),
        (["bench"], "see kvcore bench --help"),
        (["bench", "speed"], "speed"),
        (["doctor", "--what"], "--what"),
        (["doctor", "--timeout", "nan"], "--timeout"),
        (["doctor", "--options", "/dev/null"], "name it"),
        (["doctor", "local", "--options", "/no/such/file"], "/no/such/file"),
        (["bench", "rooms", "--backend"], "--backend"),
        (["bench", "rooms", "--in-flight", "0"], "--in-flight"),
        (["bench", "rooms", "--rooms", "1000000", "--page-bytes", "1000000"], "above"),
        (["bench", "bandwidth", "--page-bytes", "much"], "--page-bytes"),
        (["bench", "idle", "--window", "9", "--timeout", "5"], "not below"),
        (["bench", "kill", "--liveness", "9", "--timeout", "5"], "not below"),
        (["bench", "rooms", "--from", "send"], "--from"),
        (["bench", "plan", "--json", "/no/such/folder/file"], "/no/such/folder"),
        (["demo", "--prompts", "/no/such/file"], "/no/such/file"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: list[str], said: str) -> None:
    done = kvcore(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert one_line(done.stderr) and said in done.stderr and re.search(r"; see kvcore( \w+)* --help$", done.stderr)


def test_a_bootstrap_service_that_is_down_fails_in_one_line_with_its_address(tmp_path: Path) -> None:
    """It goes when prefill has just registered there; decode, which asks it for prefill's ranks, says what was answered."""
    done = kvcore("doctor", "lonely", "--timeout", "6", path=make_backend(tmp_path, "lonely", LONELY, before=FALL))
    assert (done.returncode, done.stderr) == (1, "")
    (failed,) = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert re.search(r"decode: room 1 failed.*bootstrap_s passed.*127\.0\.0\.1:\d+.*", failed), failed


@pytest.mark.parametrize("command", [("doctor", "lokal"), ("bench", "rooms", "--backend", "lokal"), ("demo", "--backend", "lokal")])
def test_an_unknown_backend_fails_with_a_near_match(command: tuple[str, ...]) -> None:
    done = kvcore(*command)
    assert (done.returncode, done.stdout) == (1, "")
    assert one_line(done.stderr) and "did you mean 'local'" in done.stderr and "install the distribution that offers it" in done.stderr


def test_a_port_that_is_taken_fails_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (tmp_path / "options.toml").write_text(f"port = {port}\n")
        done = kvcore("bench", "rooms", "--options", str(tmp_path / "options.toml"))
    assert (done.returncode, done.stdout) == (1, "")
    assert one_line(done.stderr) and f"port {port}" in done.stderr and "in use" in done.stderr


def test_an_address_that_is_not_this_hosts_fails_in_one_line() -> None:
    done = kvcore("bench", "rooms", "--host", "192.0.2.1")
    assert (done.returncode, done.stdout) == (1, "")
    assert one_line(done.stderr) and "192.0.2.1" in done.stderr


def test_tracebacks_are_shown_with_debug_only(tmp_path: Path) -> None:
    (tmp_path / "options.toml").write_text("frame_bytes = 1\n")
    command = ("bench", "idle", "--options", str(tmp_path / "options.toml"))
    assert one_line(kvcore(*command).stderr)
    shown = kvcore("--debug", *command)
    assert (shown.returncode, shown.stdout) == (1, "")
    assert "Traceback (most recent call last)" in shown.stderr and "BackendOptionsError" in shown.stderr


def test_options_that_are_not_toml_are_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "options.toml").write_text("frame_bytes: 4096\n")
    done = kvcore("bench", "rooms", "--options", str(tmp_path / "options.toml"))
    assert (done.returncode, done.stdout) == (2, "")
    assert one_line(done.stderr) and "is not TOML" in done.stderr


def test_options_are_read_once_so_they_may_come_through_a_pipe() -> None:
    done = kvcore("bench", "idle", "--options", "/dev/stdin", given="frame_byte = 4096\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert one_line(done.stderr) and "no option 'frame_byte' (got 4096)" in done.stderr


@pytest.mark.parametrize("text", ["a = " + "[" * 100_000 + "]" * 100_000, ".".join("a" * 5000) + " = 1", "a = " + "1" * 5000])
def test_options_that_no_process_could_be_given_are_wrong_usage(text: str) -> None:
    done = kvcore("bench", "idle", "--options", "/dev/stdin", given=text)
    assert (done.returncode, done.stdout) == (2, "")
    assert one_line(done.stderr) and "/dev/stdin is not TOML" in done.stderr and len(done.stderr) < 500


def test_dates_among_the_options_stand_in_json_as_text(tmp_path: Path) -> None:
    tell_json(tmp_path / "a.json", {"options": {"since": date(2024, 5, 1)}}, ["table"])
    assert json.loads((tmp_path / "a.json").read_text()) == {"options": {"since": "2024-05-01"}}


@pytest.mark.parametrize(
    ("shell", "arguments", "code"),
    [
        ("2>&-", ("backends",), 0),
        ("2>&-", ("backends", "--what"), 2),
        ("2>&-", (*QUICK, "--host", "192.0.2.1", "--debug"), 1),
        ("0<&- 1>&- 2>&-", QUICK, 0),
    ],
)
def test_streams_that_are_closed_change_nothing_else(shell: str, arguments: tuple[str, ...], code: int) -> None:
    done = kvcore(*arguments, shell=shell)
    assert (done.returncode, done.stderr) == (code, "")
    assert bool(done.stdout) == (arguments == ("backends",))


@pytest.mark.parametrize("arguments", [("backends",), ("bench", "plan", "--repeats", "1"), ("bench", "schema"), ("--help",)])
def test_an_output_that_is_full_is_one_line_that_says_so(arguments: tuple[str, ...]) -> None:
    done = kvcore(*arguments, shell=">/dev/full")
    said = "kvcore: the output cannot be written (No space left on device); send it to another file, or make room\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_an_interrupt_while_the_command_line_is_imported_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    done = kvcore("backends", path=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "kvcore: interrupted\n")


def test_an_interrupt_ends_the_command_and_its_processes() -> None:
    undone = ["env", "--default-signal=INT"]  # a shell has its background jobs ignore it
    command = [*undone, sys.executable, "-m", "kvcore.cli", "bench", "idle", "--rooms", "1", "--window", "100", "--debug"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    assert any("kvcore-bench-prefill" in line for line in process.stderr)  # which logs what it does
    os.killpg(process.pid, signal.SIGINT)
    out, rest = process.communicate(timeout=20)  # the pipes end when the last process that holds them has ended
    assert (process.returncode, out) == (130, "")
    assert rest.splitlines()[-1] == "kvcore: interrupted"
    assert "KeyboardInterrupt" not in rest  # its processes are ended by it, not by the terminal


# --- progress


def test_who_watches_sees_progress_and_the_result_stays_apart() -> None:
    code, out, seen = watched(*QUICK)
    assert code == 0
    assert "measuring: 3 waiting rooms" in seen and "prefill: opening 3 rooms" in seen
    assert out.startswith("waiting rooms") and "\x1b" not in out
    assert "waiting rooms   window" not in seen


def test_no_progress_where_stderr_is_piped_and_json_goes_to_its_file(tmp_path: Path) -> None:
    began = time.monotonic()
    done = kvcore("bench", "idle", "--rooms", "3", "--window", "1", "--repeats", "2", "--json", str(tmp_path / "idle.json"))
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - began > 2 * 2 + SETTLE_S, "all windows were waited for"
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["waiting", "0", "3"]
    assert "\x1b" not in done.stdout
    found = json.loads((tmp_path / "idle.json").read_text())
    assert (found["command"], [one["rooms"] for one in found["results"]]) == ("bench idle", [0, 3])
    assert all(0 <= one[side] < 100 for one in found["results"] for side in ("prefill_cpu_percent", "decode_cpu_percent"))


# --- memory


def test_random_pages_are_the_same_everywhere_and_unlike_each_other() -> None:
    pages = random_pages(3, 8, 64)
    assert np.array_equal(pages, random_pages(3, 8, 64))
    assert len({page.tobytes() for page in (*pages, *random_pages(4, 8, 64))}) == 16


def test_a_kind_of_memory_that_is_not_here_is_refused_in_one_line() -> None:
    with pytest.raises(ToolError, match=r"moves \['other'\] memory, and torch gives none here") as refused:
        Buffer(frozenset({"other"}), 1, 1)
    assert "\n" not in str(refused.value)


def test_memory_of_torch_is_written_cleared_and_read_like_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore.buffers.TORCH_DEVICES", {"other": "cpu"})
    content = random_pages(1, 4, 32)
    for kind in ("cpu", "other"):
        buffer = Buffer(frozenset({kind}), 4, 32)
        assert not buffer.read().any()
        buffer.write(content)
        assert np.array_equal(buffer.read(), content)
        buffer.clear()
        assert not buffer.read().any()
        buffer.put(np.array([3, 1]), content[:2])
        assert np.array_equal(buffer.take(np.array([1, 3, 0])), [content[1], content[0], np.zeros(32)])
