"""Generate stand-ins for functions that exist only where the vendor's software is installed (test-only).

    gen_stubs.py libraries OUT LIB.so [LIB.so ...]
        For every shared library that the given ones need and the system does not have, build a stand-in
        of the same name in OUT. It defines exactly the symbols (with their versions) that the given
        libraries import from it: functions return 0, data objects are zeroes.

    gen_stubs.py functions NAMES.txt OBJECT.o > stubs.c
        Print C functions that trace their name and return 0, for every name that OBJECT.o lacks.

x86-64 only (the stand-ins are assembled). Needs binutils and gcc.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

DATA_OBJECT_BYTES = 1024  # generous: a copy relocation or vtable access must stay inside the object


def output_of(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@dataclass
class Imports:
    """What a set of shared libraries wants from the outside."""

    undefined: dict[str, tuple[str, str]] = field(default_factory=dict)  # symbol -> (version, objdump flags)
    defined: set[str] = field(default_factory=set)
    needed: set[str] = field(default_factory=set)  # library names
    library_of_version: dict[str, str] = field(default_factory=dict)  # symbol version -> library that provides it


def read_imports(libraries: Iterable[str]) -> Imports:
    imports = Imports()
    for library in libraries:
        for line in output_of("objdump", "-T", library).splitlines():
            match = re.match(r"^[0-9a-f]+ (.{7}) (\S+)\s+[0-9a-f]+\s+(\(?\S+\)?)?\s+(\S+)$", line)
            if not match:
                continue
            flags, section, version, name = match.groups()
            if section == "*UND*":
                imports.undefined[name] = ((version or "").strip("()"), flags)
            else:
                imports.defined.add(name)

        headers = output_of("objdump", "-p", library)
        for line in headers.splitlines():
            words = line.split()
            if words[:1] == ["NEEDED"]:
                imports.needed.add(words[1])

        provider = None
        for line in headers[headers.find("Version References") :].splitlines():
            if match := re.match(r"\s+required from (\S+):", line):
                provider = match.group(1)
            elif (match := re.match(r"\s+0x\S+ 0x\S+ \d+ (\S+)", line)) and provider:
                imports.library_of_version[match.group(1)] = provider
    return imports


def system_libraries() -> dict[str, str]:
    """Name -> path of the libraries that the dynamic loader finds by itself."""
    found: dict[str, str] = {}
    path = os.environ.get("PATH", "") + ":/sbin:/usr/sbin"  # ldconfig is often only on root's path
    cache = subprocess.run(["ldconfig", "-p"], check=True, capture_output=True, text=True, env={**os.environ, "PATH": path}).stdout
    for line in cache.splitlines():
        if match := re.match(r"\s+(\S+) \(.*x86-64.*\) => (\S+)", line):
            found.setdefault(match.group(1), match.group(2))
    return found


def exported_symbols(library: str) -> set[str]:
    lines = output_of("nm", "-D", "--defined-only", library).splitlines()
    return {re.sub(r"@.*", "", line.split()[-1]) for line in lines if line.strip()}


def owner_of(symbol: str, version: str, missing: Sequence[str], library_of_version: dict[str, str]) -> str | None:
    """The missing library that should define the symbol, or None if that cannot be told."""
    if library_of_version.get(version) in missing:
        return library_of_version[version]
    # gRPC and protobuf do not version their symbols: go by the C++ namespace.
    if "6google8protobuf" in symbol:
        return next((name for name in missing if "protobuf" in name), None)
    if "4grpc" in symbol or "9grpc_impl" in symbol or symbol.startswith(("grpc_", "gpr_")):
        return next((name for name in missing if "grpc++" in name), None)
    return None


def is_data_object(symbol: str, flags: str) -> bool:
    # An undefined symbol carries no reliable type, so vtables, type infos and the known globals of
    # protobuf are told by name.
    return (
        symbol.startswith(("_ZTV", "_ZTI", "_ZTS")) or "O" in flags or symbol.endswith(("instance_E", "empty_string", "g_glip", "unknown_"))
    )


def assembly_of(symbol: str, flags: str) -> str:
    if is_data_object(symbol, flags):
        return (
            f".data\n.balign 64\n.globl {symbol}\n.type {symbol},@object\n"
            f".size {symbol},{DATA_OBJECT_BYTES}\n{symbol}:\n .zero {DATA_OBJECT_BYTES}\n"
        )
    return f".text\n.globl {symbol}\n.type {symbol},@function\n{symbol}:\n xorl %eax,%eax\n ret\n"


def build_stand_in(out: str, library: str, symbols: Iterable[tuple[str, str, str]]) -> None:
    source = os.path.join(out, library + ".stub.s")
    with open(source, "w") as file:
        file.write('.section .note.GNU-stack,"",@progbits\n')  # keep the stack non-executable
        for symbol, _, flags in symbols:
            file.write(assembly_of(symbol, flags))
    command = ["gcc", "-shared", "-nostdlib", "-o", os.path.join(out, library), f"-Wl,-soname,{library}", source]

    by_version: defaultdict[str, list[str]] = defaultdict(list)
    for symbol, version, _ in symbols:
        if version and version != "Base":
            by_version[version].append(symbol)
    version_script = os.path.join(out, library + ".map")
    if by_version:
        with open(version_script, "w") as file:
            for version, names in by_version.items():
                file.write(f"{version} {{ global: {'; '.join(names)}; }};\n")
        command.append(f"-Wl,--version-script={version_script}")

    subprocess.check_call(command)
    for intermediate in (source, version_script):
        if os.path.exists(intermediate):
            os.remove(intermediate)


def generate_libraries(out: str, libraries: Sequence[str]) -> None:
    imports = read_imports(libraries)
    system = system_libraries()
    own = {os.path.basename(library) for library in libraries}
    missing = sorted(name for name in imports.needed if name not in system and name not in own)

    provided = set(imports.defined)
    for name in imports.needed & system.keys():
        provided |= exported_symbols(system[name])

    symbols_of: defaultdict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for symbol, (version, flags) in imports.undefined.items():
        if symbol in provided or "w" in flags:  # weak symbols may stay undefined
            continue
        library = owner_of(symbol, version, missing, imports.library_of_version)
        if library:  # the rest are Python's own symbols: the interpreter provides them
            symbols_of[library].append((symbol, version, flags))

    os.makedirs(out, exist_ok=True)
    for library in missing:
        build_stand_in(out, library, symbols_of[library])
        print(f"  {library}: {len(symbols_of[library])} symbols")


def generate_functions(names_file: str, object_file: str) -> None:
    lines = output_of("nm", "--defined-only", "--extern-only", object_file).splitlines()
    present = {line.split()[-1] for line in lines if line.strip()}
    print("void kv_trace(const char *name);")
    with open(names_file) as file:
        names = [line.strip() for line in file if line.strip() and not line.startswith("#")]
    for name in names:
        if name not in present:
            print(f'int {name}() {{ kv_trace("{name}"); return 0; }}')


def main(arguments: Sequence[str]) -> None:
    if len(arguments) >= 3 and arguments[0] == "libraries":
        generate_libraries(arguments[1], arguments[2:])
    elif len(arguments) == 3 and arguments[0] == "functions":
        generate_functions(arguments[1], arguments[2])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
