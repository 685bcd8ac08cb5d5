"""The command: both systems in turns, as a table or as one JSON object."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import kvcore
from benchmarks.beside import ends, rooms, table
from benchmarks.beside.geometry import Geometry
from benchmarks.beside.pairs import Case, tool
from kvcore.errors import KVCoreError
from kvcore.progress import progress

SYSTEMS = ("sglang", "kvcore")
DISTRIBUTIONS = ("sglang", "nixl-cu12", "nixl-cu13", "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
TABLES: dict[str, Callable[[list[Any]], Iterator[str]]] = {
    "rooms": table.table,
    "abort": ends.aborts_table,
    "leak": ends.leaks_table,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit code."""
    given = _parser().parse_args(arguments)
    try:
        parameters, results, lines = _measure(given)
    except KVCoreError as error:
        print(f"beside: {error}", file=sys.stderr)
        if given.debug:
            print(getattr(error, "trace", ""), file=sys.stderr)
        return 1
    print("\n".join(lines))
    if given.json is not None:
        named = {name: getattr(given, name) for name in ("suite", "backends", "configs", "systems", "rooms")}
        found = {
            "versions": {"kvcore": kvcore.__version__} | dict(_versions()),
            "machine": {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()},
            "parameters": asdict(parameters) | named,
            "results": [asdict(result) for result in results],
        }
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def _measure(given: argparse.Namespace) -> tuple[rooms.Parameters, list[Any], Iterator[str]]:
    directory = given.peer_bench.resolve()
    bench = tool(directory)
    parameters = rooms.Parameters(tuple(given.windows), given.repeats, given.seconds, given.poll_us)
    results: list[Any] = []
    with progress() as watch:
        for backend in given.backends:
            for config in given.configs:
                environment = dict(bench.BACKENDS[backend]["env"])
                case = Case(backend, Geometry.of(bench.CONFIGS[config]), environment, config, directory)
                if given.suite == "rooms":
                    results += rooms.measure(case, given.systems, parameters, watch, given.debug)
                elif given.suite == "abort":
                    limited = replace(case, environment=environment | ends.LIMIT)
                    results += ends.aborts(limited, given.systems, watch, given.debug)
                else:
                    results += ends.leaks(case, given.systems, given.rooms, watch, given.debug)
    return parameters, results, TABLES[given.suite](results)


def _versions() -> Iterator[tuple[str, str]]:
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beside", description="kvcore beside SGLang, over the same engines.")
    parser.add_argument("--peer-bench", type=Path, required=True, metavar="DIR", help="folder of the peer bench")
    parser.add_argument("--suite", choices=tuple(TABLES), default="rooms", help="what is measured (default: rooms)")
    parser.add_argument("--backends", type=_words, default=["nixl", "mooncake"], help="the peer bench's names (default: nixl,mooncake)")
    parser.add_argument("--configs", type=_words, default=["ctl", "tiny"], help="the peer bench's names (default: ctl,tiny)")
    parser.add_argument("--windows", type=_numbers, default=[1, 64], help="rooms in flight (default: 1,64)")
    parser.add_argument("--repeats", type=int, default=5, help="of everything (default: 5)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn (default: 1)")
    parser.add_argument("--poll-us", type=float, default=50.0, help="between two turns of the loop (default: 50)")
    parser.add_argument("--rooms", type=int, default=10_000, help="of the suite leak (default: 10000)")
    parser.add_argument("--systems", type=_words, default=list(SYSTEMS), help="which (default: sglang,kvcore)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one JSON object there as well")
    parser.add_argument("--debug", action="store_true", help="show what the processes write, and where it went wrong")
    return parser


def _words(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
