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
BODIES = {"lying": LYING, "greedy": GREEDY}
SEEN = {"lying": "not all of its bytes are there (R6)", "greedy": "bytes have changed that nobody may write"}


@pytest.mark.parametrize("kind", BODIES)
def test_a_soak_sees_what_a_backend_does_wrong(tmp_path: Path, kind: str) -> None:
    made = make_backend(tmp_path, kind, BODIES[kind])
    command = [sys.executable, "-m", "benchmarks.soak", "--backend", kind, "--minutes", "1", "--seed", "5"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(made), os.environ.get("PYTHONPATH", ""), str(ROOT / "conformance")])}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=ENDS_S, check=False)
    found = json.loads(done.stdout)
    assert done.returncode == 1 and not found["held"], done.stderr
    assert any(SEEN[kind] in text for text in found["wrong"]), found["wrong"]
