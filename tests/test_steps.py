"""``python -m benchmarks.steps``, which docs/performance.md has the figures of."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def test_it_carries_rooms_and_tells_what_one_takes() -> None:
    command = [sys.executable, "-m", "benchmarks.steps", "--rooms", "30"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=Path(__file__).parents[1])
    line = r"a room, both sides: (\d+) us of CPU time \(the least of 8 rounds of 30\), (\d+) calls of functions\n"
    found = re.fullmatch(line, told.stdout)
    assert found is not None, told
    assert int(found[1]) > 0 and int(found[2]) > 100
