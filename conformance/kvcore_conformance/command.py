"""The command ``kvcore-conformance``: runs the suite over one backend. Exit codes: 0 every rule holds, 1 one does not, 2 usage."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvcore.errors import KVCoreError, one_line
from kvcore_conformance import __version__
from kvcore_conformance.minutes import minutes
from kvcore_conformance.report.write import JUNIT, writable
from kvcore_conformance.subject import Subject, options_from
from kvcore_conformance.waivers import Waivers

PLUGIN = "kvcore_conformance.plugin"
SUITE = "kvcore_conformance.suite"
TIMEOUT_S = 120
EXIT: dict[int, int] = {pytest.ExitCode.OK: 0, pytest.ExitCode.USAGE_ERROR: 2, pytest.ExitCode.NO_TESTS_COLLECTED: 2}
"""What is neither, such as a run that was interrupted, has not shown that the contract is kept."""


def main() -> None:
    """Entry point of the command line."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run it and return the exit code."""
    chosen, more = _parser().parse_known_args(arguments)
    try:
        Subject(chosen.backend, options_from(chosen.options) if chosen.options is not None else {}).check()
        Waivers.read(chosen.waivers)
        if chosen.report is not None:
            writable(chosen.report, JUNIT)  # pytest itself would fail at the end
    except KVCoreError as error:
        sys.stderr.write(f"kvcore-conformance: {one_line(error)}\n")
        return 2
    ini = Path(__file__).with_name("suite.ini")
    words = ["-p", PLUGIN, "-p", "no:xdist", "-p", "no:cacheprovider", "-q", f"--timeout={TIMEOUT_S}"]
    words += ["-c", str(ini), f"--rootdir={Path(__file__).parent}"]
    words += [f"--kvcore-backend={chosen.backend}", f"--kvcore-profile={chosen.profile}", f"--kvcore-soak={chosen.soak}"]
    for name in ("options", "report", "waivers", "seed"):
        if (value := getattr(chosen, name)) is not None:
            words.append(f"--kvcore-{name}={value.absolute() if isinstance(value, Path) else value}")
    if chosen.report is not None:
        words.append(f"--junitxml={chosen.report.absolute() / JUNIT}")
    return EXIT.get(int(pytest.main([*words, *more, "--pyargs", SUITE])), 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvcore-conformance",
        description="Hold a backend to the transfer contract. What is not known here is passed on to pytest, such as -k or -x.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvcore-conformance {__version__}")
    parser.add_argument("--backend", required=True, metavar="NAME", help="the name it is installed under")
    parser.add_argument("--options", type=Path, metavar="FILE", help="its options, TOML or JSON")
    parser.add_argument("--profile", choices=("quick", "full"), default="full", help="quick: every rule once (default: full)")
    parser.add_argument("--report", type=Path, metavar="DIR", help="write the report here")
    parser.add_argument("--waivers", type=Path, metavar="FILE", help="rules that may fail, each with rule, reason and expires")
    parser.add_argument("--soak", type=minutes, default=0.0, metavar="MINUTES", help="a mixed load for so long as well")
    parser.add_argument("--seed", type=int, metavar="N", help="of what is drawn at random; a failure prints it")
    return parser


if __name__ == "__main__":
    main()
