"""The command ``kvcore``. Errors are one line on stderr; exit codes: 0 done, 1 the thing asked for failed, 2 usage, 130 interrupted."""

# Without deferred annotations: typer evaluates those of the options below, and is imported in a function, to say so where it is missing.
import errno
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from kvcore import __version__

if TYPE_CHECKING:
    import typer

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""How writing to stdout fails, which says itself neither that nor to what; files name themselves."""


def main() -> None:
    """Entry point of the command line."""
    _ready_streams()
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. ``--debug`` may stand anywhere and shows logs and tracebacks."""
    debug = "--debug" in arguments
    words = ["--debug"] * debug + [word for word in arguments if word != "--debug"]
    try:
        return _run(words, debug)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)


def _run(words: list[str], debug: bool) -> int:
    try:
        import typer
    except ImportError as error:
        return _fail(f"the command line needs {error.name}, which is not installed; run: pip install 'kvcore[cli]'", FAILED)
    try:
        result = application()(words, prog_name="kvcore", standalone_mode=False)
    except typer.Abort:
        result = INTERRUPTED
    except Exception as error:
        if isinstance(error, _usage_error()):
            return _fail(f"{error.format_message().rstrip('.')}; see {_command(error)} --help", USAGE)
        if debug:
            sys.stderr.write(getattr(error, "trace", "") or traceback.format_exc())
        if isinstance(error, OSError) and error.errno in UNWRITTEN and error.filename is None:
            return _fail(f"the output cannot be written ({error.strerror}); send it to another file, or make room", FAILED)
        return _fail(error, FAILED)
    if result == INTERRUPTED:  # as releases of typer that return it
        raise KeyboardInterrupt
    return result if isinstance(result, int) else DONE


def application() -> "typer.Typer":
    """All commands. Each lives with the part it belongs to; a command finds in ``context.obj`` whether ``--debug`` was given."""
    import typer

    from kvcore.bench.command import bench
    from kvcore.demo.command import demo
    from kvcore.doctor.command import backends, doctor
    from kvcore.explain import explain
    from kvcore.new.command import new

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    def show_version(wanted: bool) -> None:
        if wanted:
            typer.echo(f"kvcore {__version__}")
            raise typer.Exit

    @app.callback()
    def kvcore(
        context: typer.Context,
        debug: Annotated[bool, typer.Option("--debug", help="Show logs, and the tracebacks of errors. May stand anywhere.")] = False,
        version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")] = False,
    ) -> None:
        """Move the KV cache of requests from prefill to decode instances."""
        context.obj = debug

    @app.command()
    def keys(
        file: Annotated[str, typer.Argument(metavar="FILE", help="A new file, for security.curve_secret_file.")],
    ) -> None:
        """Make a pair of curve keys: the secret one goes to a new file, the public one is printed."""
        from kvcore.access import new_keys

        typer.echo(new_keys(file))

    for command in (backends, doctor, demo, explain, new):
        app.command()(command)
    app.add_typer(bench)
    return app


def _usage_error() -> Any:
    """The base class of errors of usage, which is click's, or in later releases of typer its own."""
    import typer

    return typer.BadParameter.__bases__[0]


def _command(error: Any) -> str:
    """The command that was used wrongly, as it is called."""
    return error.ctx.command_path if error.ctx is not None else "kvcore"


def _fail(what: object, code: int) -> int:
    from kvcore.errors import one_line

    sys.stderr.write(f"kvcore: {one_line(what) or type(what).__name__}\n")
    return code


def _ready_streams() -> None:
    """A closed stream leads nowhere, or the next file opened would take its number; what a stream cannot encode is escaped."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
        elif isinstance(stream, io.TextIOWrapper) and mode == "w":
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
