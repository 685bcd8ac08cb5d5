"""The test of the long test: a soak over a backend that loses bytes, or writes too many, says so and ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.made_backends import GREEDY, LYING, make_backend

ENDS_S = 100.0


@pytest.mark.parametrize(
    ("body", "seen"), [(LYING, "not all of its bytes are there (R6)"), (GREEDY, "bytes have changed that nobody may write")]
)
def test_a_soak_sees_what_a_backend_does_wrong(tmp_path: Path, body: str, seen: str) -> None:
    made = make_backend(tmp_path, "bad", body)
    command = [sys.executable, "-m", "benchmarks.soak", "--backend", "bad", "--minutes", "1", "--seed", "5"]
    path = os.pathsep.join([str(made), os.environ.get("PYTHONPATH", ""), str(ROOT / "conformance")])
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=ENDS_S, check=False
    )
    found = json.loads(done.stdout)
    assert done.returncode == 1 and not found["held"], done.stderr
    assert any(seen in text for text in found["wrong"]), found["wrong"]
