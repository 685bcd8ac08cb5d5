"""The examples run as a user would start them, and print what they should. ``test_readme`` runs the two that stand in the README."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from kvcore_conformance.stage.driver import free_port

from tests.helpers import ROOT

RUN_S = 90.0
"""For importing torch twice on a machine that does something else; the examples themselves take about a second."""


@contextmanager
def started(name: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """An example on its way, ended with all its processes if it is still running afterwards."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""},  # or lines of two processes get mixed
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def said(process: subprocess.Popen[str]) -> list[str]:
    """The lines that an example has printed, once it has ended well."""
    out, errors = process.communicate(timeout=RUN_S)
    assert process.returncode == 0, errors
    return out.splitlines()


def test_two_processes_succeed_abort_and_reject() -> None:
    with started("two_processes.py", "both", str(free_port())) as example:
        lines = said(example)
    assert sorted(lines) == [
        "decode: room 1 SUCCESS, record b'first token: 42'",
        "decode: room 2 FAILED at once; pages free again: True",
        "decode: the bytes are equal",
        "prefill: room 1 SUCCESS, 8192 bytes",
        "prefill: room 2 FAILED, aborted by decode: the user went away",
        "prefill: room 3 FAILED, rejected by decode: no pages left today",
    ]


def test_two_processes_do_not_wait_for_a_side_that_has_failed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, started("two_processes.py", "both", str(silent.getsockname()[1])) as example:
        out, errors = example.communicate(timeout=RUN_S)  # decode alone would look for prefill for a minute more
    assert (example.returncode, out) == (1, "") and "bootstrap_port" in errors


def test_two_prefill_ranks_and_a_decode_rank_hand_over_layer_by_layer() -> None:
    with started("many_ranks.py", "all", str(free_port())) as example:
        lines = said(example)
    assert sorted(lines) == [
        "decode: SUCCESS, layers [0, 1, 2, 3]",
        "decode: the bytes are equal",
        "prefill rank 0: SUCCESS, 196608 bytes",
        "prefill rank 1: SUCCESS, 196608 bytes",
    ]


def test_the_scheduler_uses_pages_again_and_gets_all_of_them_back() -> None:
    with started("scheduler_loop.py") as example:
        *rooms, arrived, free = said(example)
    ended = [re.fullmatch(r"(\w+): room (\d) (\w+) with pages \[([\d, ]*)\](.*)", line) for line in rooms]
    assert sorted((end[1], end[2], end[3]) for end in ended if end) == [
        (side, str(room), "FAILED" if room == 4 else "SUCCESS") for side in ("decode", "prefill") for room in range(6)
    ]
    assert [end[5] for end in ended if end and end[3] == "FAILED"] == [": the user went away"] * 2
    assert arrived == "5 rooms arrived, all right: True"
    assert free == "pages free again: 8 and 8 of 8"


def test_the_observer_sees_states_transfers_and_peers() -> None:
    with started("observer.py") as example:
        text = "\n".join(said(example))
    for line in (
        "prefill: status room 1 {'state': 'SUCCESS', 'reason': ''}",
        "decode: status room 1 {'state': 'SUCCESS', 'reason': ''}",
        "prefill: chunk 1 of room 1, 1536 bytes",
        "status room 2 {'state': 'FAILED', 'reason': 'not wanted any more (aborted, from decode rank 0)'}",
        "FAILED: not wanted any more (aborted, from decode rank 0)",  # in the history that explain gives
        "prefill: paired {'peer': 'decode-",
        "'kvcore_bytes_total': 1536",
    ):
        assert line in text, text


@pytest.mark.slow
def test_a_model_goes_on_in_another_process() -> None:
    port = str(free_port())
    with ExitStack() as stack:
        sides = [stack.enter_context(started("transformers_handoff.py", side, port)) for side in ("prefill", "decode")]
        sent, received = map(said, sides)
    assert re.fullmatch(r"prefill: 98304 bytes in 6 pages moved, first token \d+", "\n".join(sent))
    assert received[-1] == "decode: one process alone generates the same"


def test_every_example_is_named_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in (ROOT / "examples").glob("*.py") if f"examples/{path.name}" not in readme] == []
