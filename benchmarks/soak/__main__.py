"""``python -m benchmarks.soak --minutes N``: prints a summary in JSON; exit code 0 only if nothing was lost and nothing has grown."""

from __future__ import annotations

import argparse
import json
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from kvcore_conformance.minutes import minutes
from kvcore_conformance.subject import options_from

from benchmarks.soak.run import Soak


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="A long mixed load with faults, judged at its end.")
    parser.add_argument("--minutes", type=minutes, default=3.0, help="how long (default: 3)")
    parser.add_argument("--backend", default="local", help="over which backend (default: local)")
    parser.add_argument("--options", type=Path, metavar="FILE", help="its options, TOML or JSON")
    parser.add_argument("--seed", type=int, help="of what is drawn at random")
    kept = "threads and file descriptors that the engine is known to keep of each peer it has met"
    parser.add_argument("--kept", type=int, nargs=2, default=(0, 0), metavar=("THREADS", "FILES"), help=kept)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary here as well")
    chosen = parser.parse_args(arguments)
    seed = secrets.randbelow(2**32) if chosen.seed is None else chosen.seed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no process is left, least of all one that stands still
    soak = Soak(chosen.backend, options_from(chosen.options) if chosen.options else {}, seed, tuple(chosen.kept))
    soak.run(chosen.minutes)
    text = json.dumps(soak.summary(), indent=1)
    print(text)
    if chosen.json is not None:
        chosen.json.write_text(text + "\n", encoding="utf-8")
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
