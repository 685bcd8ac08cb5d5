"""The command ``kvcore new``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from kvcore.new.project import MOST_LETTERS, NAME, package, written


def _name(value: str) -> str:
    if not NAME.fullmatch(value) or len(value) > MOST_LETTERS:
        raise typer.BadParameter(
            f"{value[:99]!r} is no name for a backend; it has lower case letters, digits and single dashes between them, begins with a "
            f"letter, and is not longer than {MOST_LETTERS}"
        )
    return value


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", callback=_name, help="The backend's name, such as my-engine.")],
    into: Annotated[Path, typer.Option(metavar="DIR", exists=True, file_okay=False, help="The folder to put it into.")] = Path(),
) -> None:
    """Write a plugin project kvcore-NAME: package, tests, and a workflow that runs the conformance kit.

    It works as written, over shared memory of one host. Put your engine in the place of its mailbox.
    """
    project = written(name, into)
    typer.echo(f"wrote {project}: a backend {name!r} that works as it is, over shared memory")
    typer.echo(f"next:  cd {shlex.quote(str(project))}; pip install -e '.[test]'; pytest  (the kit: pip install ./conformance of kvcore)")
    typer.echo(f"then:  put your engine in the place of {package(name)}/mailbox.py, with docs/writing-a-backend.md of kvcore at hand")
