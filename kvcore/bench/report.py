"""The JSON object that every measurement writes, with the same fields whatever is measured; read again, and its JSON Schema."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_type_hints

import msgspec

import kvcore
from kvcore.bench.catalog import MEASUREMENTS
from kvcore.bench.fields import told
from kvcore.bench.ranks import ALONE
from kvcore.bench.setup import GIB, Setup
from kvcore.errors import one_line
from kvcore.installed import find_backend
from kvcore.sides import ToolError

SCHEMA: Final = 1
"""Raised when a field goes or changes its meaning; fields may be added under the same number."""
SETTINGS = ("options", "host", "topology")
"""Of a ``Setup``, what is told with the parameters."""
DIALECT = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True, slots=True)
class Machine:
    """What it was measured on."""

    cores: Annotated[int, told("CPU cores that may be used.")]
    architecture: Annotated[str, told("The kind of processor, such as x86_64.")]
    python: Annotated[str, told("The version of Python.")]
    processor: Annotated[str, told("The processor's name.")]
    system: Annotated[str, told("The kernel and its release.")]
    memory_gib: Annotated[float, told("Memory of the machine, in GiB (2^30 bytes).")]


@dataclass(frozen=True, slots=True)
class Report:
    """What a measurement writes."""

    schema: Annotated[int, told("Of this form; raised when a field goes or changes its meaning.")]
    command: Annotated[str, told("The command that measured.")]
    backend: Annotated[str | None, told("The backend that moved the pages; null where none had a part in it.")]
    versions: Annotated[
        dict[str, str],
        told("Of kvcore, numpy, pyzmq, all that a plugin names, and the backend; distribution is the name of what offers this."),
    ]
    machine: Annotated[Machine, told("What it was measured on.")]
    taken: Annotated[str, told("When it was written, in UTC, as in ISO 8601.")]
    parameters: Annotated[dict[str, Any], told("All that was set of what figures may depend on, so without --timeout.")]
    results: Annotated[list[dict[str, Any]], told("One of each case that was measured.")]


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a result: its median and, if it was repeated, that of ``each`` repeat. ``higher``: whether more is better."""

    name: str
    value: float
    each: tuple[float, ...]

    @property
    def higher(self) -> bool:
        """Whether more is better; the unit stands at the end of the name."""
        return self.name.endswith(("_per_s", "_share", "goodput"))


def report(command: str, setup: Setup | None, parameters: Any, results: Sequence[Any]) -> Report:
    """Parameters and results are dataclasses; numbers are rounded to six digits after the point, and files
    are named without their folder. Without a ``setup`` no backend had a part
    in it."""
    versions = _beneath("kvcore") | {"kvcore": kvcore.__version__}
    given = {name: value.name if isinstance(value, Path) else value for name, value in asdict(parameters).items()}
    if setup is not None:
        installed = find_backend(setup.backend)
        versions = _beneath(installed.distribution) | versions | {"distribution": installed.distribution, "backend": installed.version}
        given |= {name: getattr(setup, name) for name in SETTINGS}
    return Report(
        schema=SCHEMA,
        command=command,
        backend=setup.backend if setup is not None else None,
        versions=versions,
        machine=machine(),
        taken=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        parameters=given,
        results=[_rounded(asdict(result)) for result in results],
    )


def machine() -> Machine:
    """This one."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    system = f"{platform.system()} {platform.release()}"
    cores = len(os.sched_getaffinity(0))
    return Machine(cores, platform.machine(), platform.python_version(), _processor(), system, round(memory / GIB, 1))


def read(path: Path) -> Report:
    """What a measurement wrote with ``--json``; raises ``ToolError`` if that is not what the file holds."""
    try:
        written = path.read_bytes()
        if _command(written) == "bench compare":
            raise ToolError(f"{path} is a comparison, not a measurement; name two files that measurements have written with --json")
        found = msgspec.json.decode(written, type=Report)
    except OSError as error:
        raise ToolError(f"{path} cannot be read ({error.strerror}); name a file that kvcore bench has written with --json") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ToolError(
            f"{path} is not what kvcore bench writes with --json ({one_line(error)}); name a file that it has written"
        ) from error
    if found.schema != SCHEMA or found.command not in MEASUREMENTS:
        what = f"{one_line(found.command)} under schema {found.schema}"
        raise ToolError(f"{path} has {what}, which this version does not know; use the kvcore that wrote it")
    if found.backend is not None:
        found.parameters.setdefault("topology", str(ALONE))  # there was no other before it was written
    if not found.results:
        raise ToolError(f"{path} holds no result; measure again, and write it with --json")
    return found


def _command(written: bytes) -> object:
    """What a JSON object names as its command."""
    found = msgspec.json.decode(written)
    return found.get("command") if isinstance(found, dict) else None


def figures(result: Mapping[str, Any], names: Iterable[str] = (), prefix: str = "") -> Iterator[Figure]:
    """All figures of a result, those within it as ``raw.<name>``: numbers that are not whole, and whole ones that were repeated. ``names``
    are left out."""
    for name, value in result.items():
        each = tuple(result.get(f"{name}_each") or ())
        if name in names or name.startswith("tried_"):
            continue
        if isinstance(value, Mapping):
            yield from figures(value, prefix=f"{prefix}{name}.")
        elif isinstance(value, float) or (isinstance(value, int) and each):
            yield Figure(prefix + name, value, each)


def schema() -> dict[str, Any]:
    """JSON Schema of what every measurement writes, and of a comparison."""
    from kvcore.bench.compare import Comparison

    kinds = [*(_kind(command) for command in MEASUREMENTS), Comparison]
    references, components = msgspec.json.schema_components(kinds)
    for each in components.values():
        each["required"] = list(each["properties"])  # what has a default is written too
        for name, one in each["properties"].items():
            one.pop("default", None)
            if name.endswith("_each"):
                one["description"] = f"{name.removesuffix('_each')} of each repeat; empty where that is null."
    return {"$schema": DIALECT, "title": "What kvcore bench writes with --json", "anyOf": list(references), "$defs": components}


def _kind(command: str) -> type[Any]:
    """A report of this command, with its parameters and results spelled out."""
    measurement, name = MEASUREMENTS[command], command.replace(" ", "_")
    given = get_type_hints(measurement.parameters, include_extras=True)
    if command != "bench plan":
        setup = get_type_hints(Setup, include_extras=True)
        given |= {field: setup[field] for field in SETTINGS}
    spelled = {
        "schema": Literal[1],
        "command": Literal[command],
        "parameters": msgspec.defstruct(f"{name}_parameters", [(field, _as_written(kind)) for field, kind in given.items()]),
        "results": list[measurement.result],  # type: ignore[name-defined]
    }
    told = get_type_hints(Report, include_extras=True)
    told |= {field: Annotated[(kind, *told[field].__metadata__)] for field, kind in spelled.items()}
    return msgspec.defstruct(name, [*told.items()])


def _as_written(kind: Any) -> Any:
    """The type of a parameter, which has a file by its name."""
    return Annotated[(str, *kind.__metadata__)] if kind.__origin__ is Path else kind


def _beneath(distribution: str) -> dict[str, str]:
    """Versions of what counts beneath a measurement: of a plugin all that it names, so its engine too."""
    names = ["numpy", "pyzmq"]
    found = {}
    with suppress(metadata.PackageNotFoundError):
        if distribution != "kvcore":
            names += [re.split(r"[^\w.-]", each, maxsplit=1)[0] for each in metadata.requires(distribution) or ()]
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor()


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [_rounded(each) for each in value]
    return round(value, 6) if isinstance(value, float) else value
