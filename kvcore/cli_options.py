"""Options that several commands have, and what they are read from."""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcore.errors import cause
from kvcore.sides import ToolError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MOST_S = 86_400.0


def seconds(value: float) -> float:
    """An option's callback instead of its ``min`` and ``max``, which let NaN pass."""
    if not math.isfinite(value) or not 1 <= value <= MOST_S:
        raise typer.BadParameter(f"{value:g} is not a number of seconds from 1 to {MOST_S:g}")
    return value


def positive(value: float) -> float:
    """An option's callback likewise, for what only has to be above 0."""
    if not math.isfinite(value) or value <= 0:
        raise typer.BadParameter(f"{value:g} is not a number above 0")
    return value


def _named(host: str) -> str:
    """A callback of ``--host``: what is not there is most often a variable of the shell that was not set."""
    if not host.strip():
        raise typer.BadParameter(f"{host!r} is no address; give one of this host, or the name of a network interface")
    return host


def _read_options(file: str) -> dict[str, Any]:
    """A backend's options from a TOML file, read once, since it may be a pipe. What cannot be read is wrong usage."""
    try:
        options = tomllib.loads(Path(file).read_text(encoding="utf-8"))
        json.dumps(options, default=str)  # they are to travel, which what is nested too deep cannot
    except OSError as error:
        raise typer.BadParameter(f"{file} cannot be read ({error.strerror})", param_hint="--options") from error
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{file} is not TOML ({cause(error)})", param_hint="--options") from error
    return options


def writable(path: Path | None) -> Path | None:
    """A callback of an option for a file to be written: what cannot be is wrong usage, and told before there is anything to lose. It is
    tried by what leaves nothing behind."""
    if path is None or str(path) == "-":
        return path
    if not path.parent.is_dir():
        raise typer.BadParameter(f"folder {str(path.parent)!r} does not exist")
    try:
        if _there(path) and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if not _as_it_is(path):
            with _beside(path):
                pass
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written ({error.strerror}); choose another file") from error
    return path


Backend = Annotated[str, typer.Option(metavar="NAME", help="The backend that moves the pages.")]
Options = Annotated[
    dict[str, Any] | None,
    typer.Option("--options", metavar="FILE", parser=_read_options, help="A TOML file: the backend's options."),
]
Host = Annotated[str, typer.Option(metavar="ADDRESS", callback=_named, help="Address of this host that both processes use.")]
Timeout = Annotated[float, typer.Option(callback=seconds, help=f"Seconds without a sign of life before giving up, 1 to {MOST_S:g}.")]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", dir_okay=False, callback=writable, help="Write one JSON object there; - prints it instead."),
]


def tell_json(path: Path | None, value: dict[str, Any], table: Sequence[str]) -> None:
    """Print the table, or where the file of ``--json`` is "-" the object; then write this to the file. Neither is lost with the other."""
    if str(path) == "-":
        return typer.echo(json.dumps(value, default=str))
    try:
        typer.echo("\n".join(table))
    finally:
        if path is not None:
            write(path, json.dumps(value, indent=2, default=str) + "\n", "--json")


def write(path: Path, text: str, option: str) -> None:
    """Write to the file of an option: all of it, or what the file held stays there."""
    try:
        if _as_it_is(path):
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
            return
        with _beside(path) as (part, target):
            part.write_text(text, encoding="utf-8", errors="backslashreplace")
            if target.exists():
                shutil.copymode(target, part)
            part.replace(target)
    except OSError as error:
        raise ToolError(f"{path} cannot be written ({error.strerror}); choose another file for {option}") from error


def _there(path: Path) -> bool:
    """``OSError`` for a name that no file can have."""
    with suppress(FileNotFoundError):
        path.stat()
        return True
    return False


def _as_it_is(path: Path) -> bool:
    """Whether nothing can take its place: it is no plain file, such as a pipe, or names one that is open, such as /dev/stdout, or its
    folder takes no other."""
    folder = Path(os.path.realpath(path.parent))
    fixed = str(folder) == "/dev" or folder.parts[1:2] == ("proc",) or not os.access(folder, os.W_OK)
    return path.exists() and (fixed or not path.is_file())


@contextmanager
def _beside(path: Path) -> Iterator[tuple[Path, Path]]:
    """A new file in the folder of the one that the path leads to, and this; the new one is gone afterwards, if it was not renamed."""
    target = Path(os.path.realpath(path))
    part = target.with_name(f".kvcore-{secrets.token_hex(8)}")
    part.touch(exist_ok=False)
    try:
        yield part, target
    finally:
        part.unlink(missing_ok=True)
