"""The command: how many messages, which seed, or which one alone."""

from __future__ import annotations

import argparse
import json
import sys

from benchmarks.fuzz.run import STRETCH, WEIGHTS, Damage, attack


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Run, and print one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description="Bad bytes for every port and every message.")
    parser.add_argument("--messages", type=int, default=1_500_000, help="given to managers of this process, past their sockets")
    parser.add_argument("--sockets", type=int, default=500_000, help="sent to all ports of two other processes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch", type=int, default=10_000, help="messages between two good rooms")
    parser.add_argument("--minutes", type=float, help="stop each of the two ways after so long")
    parser.add_argument("--only", type=int, help="send this message alone: both ways, and to every port")
    given = parser.parse_args()
    ways = (("inside", given.messages), ("sockets", given.sockets))
    found, failed = [], False
    for way, count in ways:
        alone = given.only is not None
        indices = [given.only] * sum(WEIGHTS) if alone else range(count)
        if not indices:
            continue
        try:
            report = attack(way, given.seed, indices, given.batch, 1 if alone else STRETCH, minutes=given.minutes, say=_tell).plain()
        except Damage as damage:
            report = {"way": way, "seed": given.seed, "wrong": [str(damage)]}
        found.append(report)
        failed = failed or bool(report["wrong"])
    print(json.dumps({"seed": given.seed, "runs": found}, indent=2))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
