"""A trigger for each place in kvcore that raises one of its errors, and how such places are found in the source."""

from __future__ import annotations

import ast
import functools
import logging
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from aiohttp import web
from pydantic import BaseModel, field_validator

import kvcore
from kvcore import Config, KVManager, Limits, Pool, Region, addresses, errors, handles, hookimpl, installed, interfaces, registry
from kvcore.access import new_keys
from kvcore.backends.local import LocalBackend
from kvcore.bench import trace, trace_file
from kvcore.bench.scheduler import Parameters
from kvcore.bench.setup import Setup
from kvcore.bootstrap import RankInfo
from kvcore.bootstrap_client import Registrar
from kvcore.bootstrap_service import RankTable
from kvcore.control_tap import ControlTap
from kvcore.environment import set_variables
from kvcore.errors import (
    BackendConflictError,
    BackendLoadError,
    BackendNotFoundError,
    BackendOptionsError,
    BackendVersionError,
    ConfigError,
    IncompatiblePeerError,
    KVCoreError,
    KVTransferError,
    PageError,
    RegistrationError,
    RoomError,
)
from kvcore.faults import FaultPlan
from kvcore.hookspecs import API_VERSION, BackendInfo, Capabilities
from kvcore.http import HttpThread
from kvcore.installed import InstalledBackend
from kvcore.interfaces import placed
from kvcore.layouts import Heads
from kvcore.memory import PoolGeometry, check_distinct
from kvcore.planner import Descriptors, Layout, Plan, check, check_listed, split
from kvcore.progress import unwatched
from kvcore.states import FailureCode, Reason, RoomId
from tests.fake_backends import BadStartBackend, MemoryBackend, install
from tests.helpers import Duo, config, duo, memory, number
from tests.secured import Pair

ROOT = Path(kvcore.__file__).resolve().parent

# --- the places


@dataclass(frozen=True)
class Site:
    """A statement that raises one of our errors."""

    module: str
    """Path below kvcore."""
    first: int
    last: int
    """Its lines."""

    def __str__(self) -> str:
        return f"kvcore/{self.module}:{self.first}"


@functools.cache
def modules() -> list[tuple[str, ast.Module]]:
    """The source of kvcore: path below it, and syntax tree."""
    return [(path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(ROOT.rglob("*.py"))]


def error_names() -> set[str]:
    """The error classes of kvcore, those that tools derive included."""
    names = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, KVCoreError)}
    classes = [node for _, tree in modules() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return names | {node.name for node in classes if names & {_name(base) for base in node.bases}}


def sites() -> list[Site]:
    """All places that raise one of our errors: a class called, or a function called that returns one."""
    names, found = error_names(), []
    for module, tree in modules():
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        makers = {function.name for function in functions if function.returns is not None and _name(function.returns) in names}
        raises = [node for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
        found += [
            Site(module, node.lineno, node.end_lineno or node.lineno)
            for node in raises
            if isinstance(node.exc, ast.Call) and _name(node.exc.func) in names | makers
        ]
    return sorted(found, key=str)


def templates() -> list[tuple[str, str]]:
    """Where a text of one of our errors is written, and the text with {} for what is filled in."""
    names, found = error_names(), []
    for module, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _name(node.func) in names and node.args:
                text = _template(node.args[0])
                if text is not None:
                    found.append((f"kvcore/{module}:{node.lineno}", text))
    return found


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _template(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if not isinstance(node, ast.JoinedStr):
        return None
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)


def raised_at(error: BaseException, known: Sequence[Site]) -> set[Site]:
    """The sites at which an error, and what it chains, was raised."""
    found: set[Site] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        one = chain.pop()
        if one is None:
            continue
        chain += [one.__cause__, one.__context__]
        frames = traceback.extract_tb(one.__traceback__)
        if not frames or ROOT not in Path(frames[-1].filename).resolve().parents:
            continue
        module, line = Path(frames[-1].filename).resolve().relative_to(ROOT).as_posix(), frames[-1].lineno or 0
        found |= {site for site in known if site.module == module and site.first <= line <= site.last}
    return found


# --- what the triggers use


@dataclass
class Tools:
    """What triggers share: running managers, a folder, a port that is taken; ``patch`` is undone after each of them."""

    stack: ExitStack
    folder: Path
    pair: Duo
    both: KVManager
    """A manager with both roles and two pools."""
    busy: int
    patch: pytest.MonkeyPatch = field(default_factory=pytest.MonkeyPatch)

    def start(self, role: str = "prefill", pools: Sequence[Pool] | Pool | None = None, **settings: Any) -> None:
        """Make a manager that cannot start."""
        made = [Pool.from_tensors("kv", memory(4), page_size=16)] if pools is None else pools
        with KVManager(config(role, **settings), made):  # type: ignore[arg-type]
            pass

    def start_badly(self, **bad: object) -> None:
        """Make a manager over a backend that does not start."""
        fake = install(self.patch, BadStartBackend)
        for name, value in bad.items():
            setattr(fake, name, value)
        self.start(backend="fake")

    def sender(self) -> kvcore.Sender:
        return self.stack.enter_context(self.pair.prefill.sender(number()))

    def receiver(self) -> kvcore.Receiver:
        return self.stack.enter_context(self.pair.decode.receiver(number(), self.pair.prefill.address))

    def file(self, text: str) -> Path:
        path = self.folder / "kvcore.toml"
        path.write_text(text, encoding="utf-8")
        return path

    def offer(self, *offers: InstalledBackend) -> None:
        """Have these backends, and no others, installed."""
        self.patch.setattr(installed, "list_backends", lambda: list(offers))

    def load(self, entry_point: str) -> None:
        """Load a backend of this entry point."""
        self.offer(InstalledBackend("mine", "kvcore-mine", "1.0", entry_point))
        registry.load_backend("mine")


@contextmanager
def tools(folder: Path) -> Iterator[Tools]:
    with ExitStack() as stack:
        busy = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        two = [Pool.from_tensors(name, memory(4), page_size=16) for name in ("kv", "aux")]
        pair = stack.enter_context(duo())
        yield Tools(
            stack, folder, pair, stack.enter_context(KVManager(config("both", admin="127.0.0.1:0"), two)), int(busy.getsockname()[1])
        )


class Backend(MemoryBackend):
    """A backend whose hooks a test replaces."""

    made = []  # noqa: RUF012


class Named:
    """A backend that calls itself otherwise than its entry point."""

    made: list[Any] = []  # noqa: RUF012

    @hookimpl
    def kvcore_backend_info(self) -> BackendInfo:
        return BackendInfo("yours", "1", "1", API_VERSION)


for _hook, _value in vars(MemoryBackend).items():
    if _hook.startswith("kvcore_") and _hook != "kvcore_backend_info":
        setattr(Named, _hook, _value)


def offer(distribution: str) -> InstalledBackend:
    return InstalledBackend("x", distribution, "1", "m:C")


def backend(**hooks: object) -> type:
    return type("Made", (Backend,), hooks)


def informed(**changes: Any) -> type:
    facts: dict[str, Any] = {"name": "made", "version": "2.5", "wire_version": "1", "api_version": API_VERSION} | changes
    return backend(kvcore_backend_info=hookimpl(lambda self: BackendInfo(**facts)))


class Options(BaseModel):
    port: int = 0

    @field_validator("port")
    @classmethod
    def _port(cls, value: int) -> int:
        return {80: value}[value]


OPTIONS = BackendInfo("made", "1", "1", API_VERSION, Options)


def geometry(name: str = "kv", page_bytes: tuple[int, ...] = (4,), page_size: int = 16) -> PoolGeometry:
    numbers = tuple(range(len(page_bytes)))
    return PoolGeometry(name, 8, page_size, "uint8", page_bytes, numbers, tuple("" for _ in numbers))


def layout(one: PoolGeometry | None = None) -> Layout:
    one = one or geometry()
    return Layout.of([one], [Region(4096, 8 * size) for size in one.page_bytes])


def planned(mine: Any, theirs: Any, pool: str = "kv", remote: PoolGeometry | None = None) -> None:
    check(layout(), layout(remote), {pool: (np.array(mine), np.array(theirs))})


def pool(regions: Sequence[Region] = (Region(4096, 64),), num_pages: int = 4, **options: Any) -> Pool:
    return Pool(options.pop("name", "kv"), regions, num_pages=num_pages, **{"page_size": 16, **options})


def tensors(*made: Any, **options: Any) -> Pool:
    return Pool.from_tensors("kv", made, **{"page_size": 16, **options})


def paged(**options: Any) -> Any:
    """A paged KV of a small model; the library is imported when it is used first."""
    from transformers import LlamaConfig

    from kvcore.integrations.transformers import PagedKV

    model = LlamaConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    return PagedKV(options.pop("model", model), **{"num_pages": 4, "page_size": 4, **options})


def send_layers_apart(t: Tools) -> None:
    sender = t.sender()
    sender.send([1], layers=range(1))
    sender.send([2])


def with_host() -> KVManager:
    return KVManager(config("both"), [pool_of_arrays(), Pool.from_tensors("host", memory(4), page_size=16, pairs_with="kv")])


def send_from_host(t: Tools) -> None:
    with with_host() as manager, manager.sender(1) as sender:
        sender.send({"host": [1]})


def receive_twofold(t: Tools) -> None:
    with with_host() as manager, manager.receiver(1, "127.0.0.1:9") as receiver:
        receiver.receive({"kv": [1], "host": [2]})


def sliding() -> Any:
    from transformers import MistralConfig

    return MistralConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, sliding_window=8)


def layers(tokens: int = 4, number_of: int = 2, dtype: str = "float32", head_dim: int = 4) -> list[tuple[Any, Any]]:
    import torch

    made = torch.zeros((1, 2, tokens, head_dim), dtype=getattr(torch, dtype))
    return [(made, made)] * number_of


def traced(tokens: int, ids: list[int]) -> str:
    """A line of a trace."""
    return f'{{"timestamp": 0, "input_length": {tokens}, "output_length": 1, "hash_ids": {ids}}}'


def bare_interface(t: Tools) -> None:
    for find in ("_interface_ipv4", "_interface_ipv6"):
        t.patch.setattr(interfaces, find, lambda name: None)
    placed("", "lo")


def read_only() -> Any:
    array = np.zeros((4, 8))
    array.flags.writeable = False
    return array


def torch_view() -> Any:
    import torch

    return torch.zeros((8, 4)).T


def registered(t: Tools, address: str, http: HttpThread, limit_s: float = 0.2) -> None:
    info = RankInfo(0, 1, "127.0.0.1:9", "prefill-1", 1, "local")
    Registrar(http, addresses.parse(address, "bootstrap"), info, limit_s=limit_s).start()


def running_http(t: Tools) -> HttpThread:
    http = HttpThread()
    t.stack.callback(http.stop)
    http.start()
    return http


def unresolved(t: Tools) -> None:
    t.patch.setattr(socket, "getaddrinfo", _no_name)
    HttpThread().serve(web.Application(), "nowhere", 80, "admin")


def _no_name(*_: object, **__: object) -> None:
    raise socket.gaierror(-2, "Name or service not known")


def numbered_wire(t: Tools) -> None:
    install(t.patch, informed(wire_version=1))
    t.start(backend="fake")


def closed(t: Tools) -> None:
    with KVManager(config("prefill"), [pool_of_arrays()]) as manager:
        pass
    manager.sender(1)


def pool_of_arrays() -> Pool:
    return Pool.from_tensors("kv", memory(4), page_size=16)


def open_twice(t: Tools) -> None:
    t.pair.prefill.sender(t.sender().room)


def add_twice(t: Tools) -> None:
    observer = object()
    for _ in range(2):
        t.pair.prefill.add_observer(observer)


def send_after_last(t: Tools) -> None:
    sender = t.sender()
    for _ in range(2):
        sender.send([1], last=True)


def receive_twice(t: Tools) -> None:
    receiver = t.receiver()
    for _ in range(2):
        receiver.receive([1])


def too_many_pages(t: Tools) -> None:
    t.patch.setattr(handles, "MAX_LISTED", 2)
    t.receiver().receive([1, 2, 3])


def tap_twice(t: Tools) -> None:
    with ControlTap(t.pair.decode):
        ControlTap(t.pair.decode)


def inject_to_nobody(t: Tools) -> None:
    with ControlTap(t.pair.decode) as tap:
        tap.inject(b"?", peer="prefill-9")


def conflicting_variables(t: Tools) -> None:
    t.patch.setenv("KVCORE_LIMITS", "5")
    t.patch.setenv("KVCORE_LIMITS__INPUT_S", "5")
    Config.load(role="both")


def wrong_variable(t: Tools) -> None:
    t.patch.setenv("KVCORE_LIMITS__INPUT_S", "5m")
    Config.load(role="both")


def without_curve(t: Tools) -> None:
    t.patch.setattr(zmq, "has", lambda what: False)
    t.start(security=Pair.fresh().with_peers())


def certified(t: Tools) -> kvcore.Security:
    file = str(t.file("nothing"))
    return kvcore.Security(tls_cert=file, tls_key=file, tls_ca=file)


class Misspelt:
    @hookimpl
    def kvcore_on_evnt(self, event: object) -> None: ...


class WrongArgument:
    @hookimpl
    def kvcore_on_event(self, evnt: object) -> None: ...


# --- the table


@dataclass(frozen=True)
class Case:
    """What raises an error, which one, what its text must name, and what it chains."""

    what: str
    act: Callable[[Tools], object]
    error: type[KVCoreError]
    words: tuple[str, ...]
    cause: type[BaseException] | None = None


def odd_note(t: Tools) -> None:
    t.patch.setenv("MINE_SET_BY_KVCORE", "odd")
    set_variables("mine", {}, logging.getLogger())


def failed(code: FailureCode) -> Case:
    reason = Reason(code, "why it\nfailed", "decode", 2)

    def act(_: Tools) -> None:
        raise KVTransferError(RoomId(7, 1), reason)

    return Case(f"failed room, {code.value}", act, KVTransferError, ("room 7/1", "why it failed", code.value, "decode rank 2"))


def _open_within(both: KVManager) -> None:
    """As a finalizer or a signal handler does that comes in the middle of a call."""
    table = both._core.table
    table._stepping = True
    try:
        both.sender(2**50)
    finally:
        table._stepping = False


CASES = [
    Case("note of variables", odd_note, ConfigError, ("MINE_SET_BY_KVCORE", "'odd'", "unset it"), ValueError),
    Case("variable that can be none", lambda t: set_variables("mine", {"A=B": "x"}, logging.getLogger()), BackendOptionsError,
         ("'mine'", "environment", "'A=B'")),
    Case("host that is another's", lambda t: addresses.own_address("mine", "192.0.2.1"), ConfigError, ("'mine'", "'192.0.2.1'", "address"),
         OSError),
    Case("address that is no text", lambda t: addresses.parse(5, "admin"), ConfigError, ("admin", "5", "host:port")),  # type: ignore[arg-type]
    Case("address without port", lambda t: addresses.parse("nowhere", "admin"), ConfigError, ("admin", "'nowhere'", "no port number")),
    Case("port out of range", lambda t: addresses.parse("a:70000", "admin"), ConfigError, ("admin", "'a:70000'", "70000")),
    Case("IPv6 without brackets", lambda t: addresses.parse("::1:80", "admin"), ConfigError, ("admin", "'::1:80'", "brackets")),
    Case("host that is no text", lambda t: addresses.parse_host(5, "bind"), ConfigError, ("bind", "5")),  # type: ignore[arg-type]
    Case("host that is none", lambda t: addresses.parse_host("a b", "bind"), ConfigError, ("bind", "'a b'", "host name")),
    Case("IPv4 that is none", lambda t: addresses.parse_host("1.2.3.4.5", "bind"), ConfigError, ("bind", "'1.2.3.4.5'"), ValueError),
    Case("IPv6 that is none", lambda t: addresses.parse_host("fe80::zz", "bind"), ConfigError, ("bind", "'fe80::zz'"), ValueError),
    Case("scope that is none", lambda t: addresses.parse_host("fe80::1%", "bind"), ConfigError, ("bind", "'fe80::1%'", "interface")),
    Case("host that is nothing here", lambda t: placed("nowhere.invalid", ""), ConfigError, ("host", "'nowhere.invalid'", "lo"), OSError),
    Case("interface without an address", bare_interface, ConfigError, ("bind", "'lo'", "name another")),
    Case("memory of another kind", lambda t: t.start(pools=[pool([Region(4096, 64, "npu:0")])]), ConfigError, ("'local'", "cpu", "npu")),
    Case("engine that raises", lambda t: t.start_badly(at_open=KeyError("MC_ADDR")), BackendLoadError,
         ("'fake'", "kvcore_open", "MC_ADDR", "127.0.0.1"), KeyError),
    Case("engine that returns a code", lambda t: t.start_badly(at_open=-3), BackendLoadError, ("'fake'", "kvcore_open", "-3")),
    Case("memory not registered", lambda t: t.start_badly(at_second=OSError(12, "no\nmemory")), RegistrationError,
         ("'fake'", "kvcore_register", "region 1 (", "no memory"), OSError),
    Case("data port taken", lambda t: t.start(backend_options={"port": t.busy}), ConfigError, ("local", "{busy}", "port"), OSError),
    Case("memory that local does not take", lambda t: LocalBackend().kvcore_register([Region(4096, 64, "cuda:0")]), RegistrationError,
         ("local", "0x1000", "64", "cuda:0")),
    Case("control port taken", lambda t: t.start(port=t.busy), ConfigError, ("port", "{busy}", "127.0.0.1"), zmq.ZMQError),
    Case("bootstrap port taken", lambda t: t.start(bootstrap_port=t.busy), ConfigError, ("bootstrap_port", "{busy}"), OSError),
    Case("admin port taken", lambda t: t.start("decode", admin=f"127.0.0.1:{t.busy}"), ConfigError, ("admin", "{busy}"), OSError),
    Case("address of another host", lambda t: t.start("decode", admin="192.0.2.1:0"), ConfigError, ("admin", "192.0.2.1"), OSError),
    Case("name that is not resolved", unresolved, ConfigError, ("admin", "nowhere:80"), socket.gaierror),
    Case("rank outside its group", lambda t: RankInfo(3, 2, "a:80", "i", 1, "local"), ConfigError, ("rank 3", "0 .. 1")),
    Case("rank at another place", lambda t: RankInfo(1, 2, "a:80", "i", 1, "local"), ConfigError, ("rank 1 of 2", "0 of 1")),
    Case("rank at a wildcard", lambda t: RankInfo(0, 1, "0.0.0.0:80", "i", 1, "local"), ConfigError, ("control", "0.0.0.0:80")),
    Case("group of no rank", lambda t: RankTable(0), ConfigError, ("0", "1024")),
    Case("registration that is refused", lambda t: registered(t, t.pair.prefill.address, running_http(t)), ConfigError,
         ("rank 0", "{prefill}", "409"), TimeoutError),
    Case("registration at another service", lambda t: registered(t, t.both.admin_address, running_http(t)), ConfigError,
         ("rank 0", "answered 404")),
    Case("registration without HTTP", lambda t: registered(t, "127.0.0.1:9", HttpThread()), ConfigError, ("rank 0", "127.0.0.1:9"),
         BaseException),
    Case("config file that is not there", lambda t: Config.load(t.folder / "none.toml"), ConfigError, ("none.toml",), OSError),
    Case("config file that is no TOML", lambda t: Config.load(t.file("port = ")), ConfigError, ("kvcore.toml",), ValueError),
    Case("config file that is nested too deep", lambda t: Config.load(t.file(".".join("a" * 5000) + " = 1")), ConfigError, ("nested",),
         RecursionError),
    Case("limit that is none", lambda t: Limits(ticket_s="5m"), ConfigError, ("ticket_s", "'5m'"), ValueError),  # type: ignore[arg-type]
    Case("settings that contradict", lambda t: Limits(quarantine_s=10), ConfigError, ("quarantine_s (10)", "75"), ValueError),
    Case("setting that is none", lambda t: Config(role="both", rol=1), ConfigError, ("rol", "1"), ValueError),  # type: ignore[call-arg]
    Case("setting that is missing", lambda t: Config(), ConfigError, ("role",), ValueError),  # type: ignore[call-arg]
    Case("setting of a kind", lambda t: Config(role="none"), ConfigError, ("role", "'none'", "'prefill'"), ValueError),  # type: ignore[arg-type]
    Case("wildcard as host", lambda t: Config(role="both", host="0.0.0.0"), ConfigError, ("host", "'0.0.0.0'"), ValueError),
    Case("backend not allowed", lambda t: Config(role="both", security={"backends": ["mori"]}), ConfigError, ("'local'", "mori"),  # type: ignore[arg-type]
         ValueError),
    Case("backend that is not asked over TLS", lambda t: Config(role="prefill", security=kvcore.Security(tls_ca="a")), ConfigError,
         ("security.tls_ca", "tls_cert"), ValueError),
    Case("secret that is shown nowhere", lambda t: kvcore.Security(token="short"), ConfigError, ("token", "16"), ValueError),  # type: ignore[arg-type]
    Case("key file that is not there", lambda t: t.start(security=kvcore.Security(curve_secret_file="/none/key")), ConfigError,
         ("security.curve_secret_file /none/key", "No such file"), OSError),
    Case("token file that holds none", lambda t: t.start(security=kvcore.Security(token_file=str(t.file("a")))), ConfigError,
         ("security.token_file", "kvcore.toml", "16")),
    Case("key that no curve has", lambda t: t.start(security=kvcore.Security(curve_secret="#" * 40)), ConfigError,  # type: ignore[arg-type]
         ("security.curve_secret", "40 characters"), zmq.ZMQError),
    Case("public key that no curve has", lambda t: t.start(security=Pair.fresh().with_peers(Pair("#" * 40, ""))), ConfigError,
         ("security.curve_peers",), Exception),
    Case("peer with a key, and none here", lambda t: t.pair.decode.control.dial(addresses.Address("a", 1), Pair.fresh().public),
         IncompatiblePeerError, ("curve keys", "security.curve_secret")),
    Case("pyzmq without CURVE", without_curve, ConfigError, ("security.curve_secret", "pyzmq")),
    Case("certificate that is none", lambda t: t.start(security=certified(t)), ConfigError, ("tls_cert", "kvcore.toml"), OSError),
    Case("authority that is none", lambda t: t.start("decode", security=kvcore.Security(tls_ca="/none")), ConfigError,
         ("security.tls_ca /none",), OSError),
    Case("file of keys that is there", lambda t: new_keys(str(t.file("a"))), ConfigError, ("kvcore.toml", "File exists"), OSError),
    Case("variable that is wrong", wrong_variable, ConfigError, ("limits.input_s", "'5m'", "(from KVCORE_LIMITS__INPUT_S)"), ValueError),
    Case("file that is wrong", lambda t: Config.load(t.file("role = 1")), ConfigError, ("role", "1", "kvcore.toml)"), ValueError),
    Case("variables that contradict", conflicting_variables, ConfigError, ("KVCORE_LIMITS__INPUT_S",)),
    Case("tap on a tap", tap_twice, KVCoreError, ("control plane",)),
    Case("letter to nobody", inject_to_nobody, KVCoreError, ("prefill-9",)),
    Case("pools that are one pool", lambda t: t.start(pools=pool_of_arrays()), ConfigError, ("pools",)),
    Case("no pools", lambda t: t.start(pools=[]), ConfigError, ("pools", "[]")),
    Case("pools of one name", lambda t: t.start(pools=[pool_of_arrays(), pool_of_arrays()]), ConfigError, ("'kv', 'kv'",)),
    Case("instance that no peer can read", numbered_wire, ConfigError, ("'made'", "wire_version"), ValueError),
    Case("config that is none", lambda t: KVManager(None, [pool_of_arrays()]), ConfigError, ("config", "None", "kvcore.Config")),  # type: ignore[arg-type]
    Case("fault narrowed by nothing known", lambda t: FaultPlan().fail(rom=7), ConfigError, ("'rom'", "room")),  # type: ignore[call-arg]
    Case("fault of the call before the first", lambda t: FaultPlan().fail(nth=0), ConfigError, ("nth", "0", "1")),
    Case("fault of too large a share", lambda t: FaultPlan().fail(rate=5), ConfigError, ("rate", "5", "from 0 to 1")),
    Case("fault that cannot be raised", lambda t: FaultPlan().raise_("boom"), ConfigError, ("error", "'boom'")),  # type: ignore[arg-type]
    Case("fault that a hook cannot have", lambda t: FaultPlan().fail(hook="kvcore_open"), ConfigError, ("'kvcore_open'",)),
    Case("pools not named", lambda t: t.both.sender(number()).send([1]), PageError, ("'aux'", "'kv'", "room ")),
    Case("pool that is none, sent", lambda t: t.sender().send({"kw": [1]}), PageError, ("'kw'", "'kv'", "room ")),
    Case("layers that are no range", lambda t: t.sender().send([1], layers=[0]), PageError, ("room ", "[0]", "range")),  # type: ignore[arg-type]
    Case("layer that is none", lambda t: t.sender().send([1], layers=range(7, 8)), PageError, ("room ", "range(7, 8)", "(0, 1)")),
    Case("layers that stand apart", send_layers_apart, PageError, ("room ", "[0, 1]")),
    Case("pool that only receives, sent", send_from_host, PageError, ("room ", "'host'", "'kv'")),
    Case("two pools for one", receive_twofold, PageError, ("room ", "'host'", "'kv'")),
    Case("record before the end", lambda t: t.sender().send([1], record=b"x"), PageError, ("room ", "record")),
    Case("ready that cannot be asked", lambda t: t.sender().send([1], ready=5), PageError, ("room ", "int")),  # type: ignore[arg-type]
    Case("chunk after the last", send_after_last, PageError, ("room ", "last chunk")),
    Case("record of text", lambda t: t.sender().send([], True, record="x"), PageError, ("room ", "str"), TypeError),  # type: ignore[arg-type]
    Case("record too long", lambda t: t.sender().send([], True, record=bytes(65537)), PageError, ("room ", "65537", "65536")),
    Case("destination too long", too_many_pages, PageError, ("room ", "3 pages", "2")),
    Case("second receive", receive_twice, PageError, ("room ", "receive")),
    Case("prefix of no pool", lambda t: t.receiver().receive([], {"kw": 1}), PageError, ("room ", "'kw'", "'kv'")),
    Case("prefix that is no number", lambda t: t.receiver().receive([], -1), PageError, ("room ", "'kv'", "-1")),
    Case("side of another manager", lambda t: t.pair.decode.sender(number()), RoomError, ("room ", "'decode'", "prefill")),
    Case("room at a closed manager", closed, RoomError, ("room 1", "closing")),
    Case("room that is live", open_twice, RoomError, ("room ", "prefill", "live")),
    Case("rank that does not exist", lambda t: t.pair.decode.receiver(1, "a:1", dp_rank=-1), RoomError, ("room 1", "dp_rank", "-1")),
    Case("side that is none", lambda t: t.both.rooms("left"), RoomError, ("'left'", "'prefill'")),  # type: ignore[arg-type]
    Case("room opened within a step", lambda t: _open_within(t.both), RoomError, ("in the middle of another call",)),
    Case("explain that waits oddly", lambda t: t.both.explain(7, wait_s=-1), RoomError, ("wait_s is -1",)),
    Case("side not said", lambda t: t.both.rooms(), RoomError, ("both sides",)),
    Case("room that is no number", lambda t: t.pair.prefill.sender("7"), RoomError, ("room '7'", "0 .. 2**63-1")),  # type: ignore[arg-type]
    Case("attempt out of range", lambda t: t.pair.prefill.sender(7, -1), RoomError, ("attempt -1", "0 .. 2**31-1")),
    Case("layers not named one by one", lambda t: tensors(np.zeros((4, 8)), layers=[0, 1]), ConfigError, ("'kv'", "2 layers", "1 tensors")),
    Case("layer out of range", lambda t: pool([Region(4096, 64, layer=-1)]), ConfigError, ("'kv'", "region 0", "-1")),
    Case("heads of no dimension", lambda t: Heads(8, 0), ConfigError, ("dim", "0")),
    Case("heads in no order", lambda t: Heads(8, 1, "layer"), ConfigError, ("order", "'layer'", "'token'")),  # type: ignore[arg-type]
    Case("bootstrap of a decode", lambda t: Config(role="decode", bootstrap="a:1"), ConfigError, ("bootstrap", "'a:1'"), ValueError),
    Case("layout that is none", lambda t: pool(layout="heads"), ConfigError, ("'kv'", "'heads'", "kvcore.Heads")),
    Case("pool paired with itself", lambda t: pool(pairs_with="kv"), ConfigError, ("'kv'", "pairs_with")),
    Case("pools paired in a chain", lambda t: t.start("decode", [pool(name=name, pairs_with=of) for name, of in ("ba", "cb")]), ConfigError,
         ("'b'", "'c'")),
    Case("pool paired with none", lambda t: t.start("prefill", [pool(pairs_with="a")]), ConfigError, ("'kv'", "'a'", "'prefill'")),
    Case("heads not shared out evenly", lambda t: t.start(pools=[pool(layout=Heads(3, 1))]), ConfigError, ("'kv'", "region 0", "3 heads"),
         ValueError),
    Case("heads that no ranks share out", lambda t: paged(tp_size=3), ConfigError, ("'kv'", "2 heads", "tp 3"), ValueError),
    Case("too many pages", lambda t: pool([Region(4096, 2**31)], 2**31), ConfigError, ("'kv'", str(2**31))),
    Case("dtype that is no text", lambda t: pool(dtype=5), ConfigError, ("'kv'", "5")),
    Case("pool without a region", lambda t: pool([]), ConfigError, ("'kv'", "0 regions")),
    Case("region of no whole pages", lambda t: pool([Region(4096, 65)]), ConfigError, ("'kv'", "region 0", "65 bytes", "4 pages")),
    Case("region at no address", lambda t: pool([Region(0, 64)]), ConfigError, ("'kv'", "region 0", "0x0", "64 bytes")),
    Case("regions that are none", lambda t: pool(None), ConfigError, ("'kv'", "regions", "None")),  # type: ignore[arg-type]
    Case("region that is none", lambda t: pool([(4096, 64)]), ConfigError, ("'kv'", "region 0", "(4096, 64)")),  # type: ignore[list-item]
    Case("region on no text", lambda t: pool([Region(4096, 64, 5)]), ConfigError, ("'kv'", "region 0", "5")),  # type: ignore[arg-type]
    Case("region at a text", lambda t: pool([Region("a", 64)]), ConfigError, ("'kv'", "region 0", "str"), TypeError),  # type: ignore[arg-type]
    Case("pages that are no number", lambda t: pool(num_pages=0), ConfigError, ("'kv'", "num_pages", "0")),
    Case("no tensors", lambda t: tensors(), ConfigError, ("'kv'",)),
    Case("tensors of unlike length", lambda t: tensors(np.zeros((4, 8)), np.zeros((5, 8))), ConfigError, ("'kv'", "tensor 1", "5", "4")),
    Case("tensors of unlike dtype", lambda t: tensors(np.zeros((4, 8)), np.zeros((4, 8), np.int8)), ConfigError,
         ("'kv'", "tensor 1", "int8", "float64")),
    Case("rows of what", lambda t: tensors(np.zeros((4, 8)), rows="x"), ConfigError, ("'kv'", "rows", "'x'")),
    Case("rows of no whole pages", lambda t: tensors(np.zeros((63, 8)), rows="token"), ConfigError, ("'kv'", "63", "16")),
    Case("tensor without an axis", lambda t: tensors(np.zeros(())), ConfigError, ("'kv'", "tensor 0")),
    Case("tensor that is none", lambda t: tensors([1, 2]), ConfigError, ("'kv'", "tensor 0", "list")),
    Case("tensor of objects", lambda t: tensors(np.zeros((4, 8), object)), ConfigError, ("'kv'", "tensor 0")),
    Case("array that is read only", lambda t: tensors(read_only()), ConfigError, ("'kv'", "tensor 0")),
    Case("tensor that is a view", lambda t: tensors(torch_view()), ConfigError, ("'kv'", "tensor 0")),
    Case("page that is none", lambda t: t.sender().send([32]), PageError, ("'kv'", "32", "0 .. 31")),
    Case("page listed twice", lambda t: check_distinct("kv", np.array([3, 1, 3]), 8), PageError, ("'kv'", "3", "8 pages")),
    Case("no list of pages", lambda t: t.sender().send(5), PageError, ("'kv'", "int"), TypeError),  # type: ignore[arg-type]
    Case("table of pages", lambda t: t.sender().send([[1]]), PageError, ("'kv'", "(1, 1)")),
    Case("page that is no integer", lambda t: t.sender().send([1.5]), PageError, ("'kv'", "1.5", "0 .. 31")),
    Case("plan without a manager", lambda t: FaultPlan().hooks, KVCoreError, ("FaultPlan",)),
    Case("plan for two managers", lambda t: t.pair.decode.add_observer(t.pair.plan), KVCoreError, ("FaultPlan",)),
    Case("observer added twice", add_twice, ConfigError, ("observer object",)),
    Case("observer of no event", lambda t: t.pair.prefill.add_observer(Misspelt()), ConfigError, ("Misspelt", "kvcore_on_evnt"), Exception),
    Case("observer of another argument", lambda t: t.pair.prefill.add_observer(WrongArgument()), ConfigError, ("WrongArgument", "evnt"),
         Exception),
    Case("pool that is none, planned", lambda t: planned([1], [1], "kw"), PageError, ("'kw'", "'kv'")),
    Case("pool listed for another", lambda t: check_listed(layout(), {"kv": ("aux", np.array([1]))}), PageError, ("'kv'", "'aux'")),
    Case("pages of another type", lambda t: planned([1.0], [1]), PageError, ("'kv'", "float64", "int64")),
    Case("lists of unlike length", lambda t: planned([1, 2], [1]), PageError, ("'kv'", "2 local", "1 remote")),
    Case("regions not listed", lambda t: Layout.of([geometry()], []), IncompatiblePeerError, ("0 regions", "1")),
    Case("pool listed twice", lambda t: Layout.of([geometry()] * 2, [Region(4096, 32)] * 2), IncompatiblePeerError, ("'kv'",)),
    Case("region of other length", lambda t: Layout.of([geometry()], [Region(4096, 31)]), IncompatiblePeerError,
         ("'kv'", "region 0", "31", "8 pages of 4")),
    Case("region beyond 64 bits", lambda t: Layout.of([geometry()], [Region(2**64 - 8, 32)]), IncompatiblePeerError,
         ("'kv'", "region 0", "0xfffffffffffffff8", "32 bytes")),
    Case("batch of nothing", lambda t: list(split(Plan(Descriptors.empty(0)), 0, None)), ConfigError, ("max_descriptors", "0")),
    Case("backend that is not installed", lambda t: t.start(backend="locl"), BackendNotFoundError,
         ("'locl'", "'local'", "install the distribution")),
    Case("backend that is no name", lambda t: registry.load_backend(None), BackendNotFoundError, ("None", "'local'")),  # type: ignore[arg-type]
    Case("backend of two distributions", lambda t: (t.offer(offer("one"), offer("two")), registry.load_backend("x")), BackendConflictError,
         ("'x'", "x@one", "x@two")),
    Case("backend of another distribution", lambda t: (t.offer(offer("one")), registry.load_backend("x@two")),
         BackendNotFoundError, ("'x'", "'two'", "x@one")),
    Case("backend that does not import", lambda t: t.load("kvcore_nowhere:C"), BackendLoadError,
         ("'mine'", "kvcore-mine 1.0", "kvcore_nowhere"), ImportError),
    Case("backend that is no class", lambda t: t.load("tests.error_table:backend"), BackendLoadError, ("'mine'", "function")),
    Case("backend of another name", lambda t: t.load("tests.error_table:Named"), BackendLoadError, ("'mine'", "'yours'")),
    Case("backend for newer hooks", lambda t: registry.plugin_manager(informed(api_version=(1, 99))), BackendVersionError,
         ("'made'", "1.99", f"{API_VERSION[0]}.{API_VERSION[1]}", "upgrade kvcore")),
    Case("backend without info", lambda t: registry.plugin_manager(type("Bare", (), {})), BackendLoadError,
         ("Bare", "kvcore_backend_info")),
    Case("backend with wrong info", lambda t: registry.plugin_manager(informed(name=5)), BackendLoadError,
         ("Made", "BackendInfo", "name=5")),
    Case("backend without a hook", lambda t: registry.plugin_manager(type("Bare", (), {"kvcore_backend_info": Named.kvcore_backend_info})),
         BackendLoadError, ("Bare", "kvcore_open", "kvcore_poll")),
    Case("backend with a hook that is none", lambda t: registry.plugin_manager(backend(kvcore_abrt=hookimpl(lambda self: None))),
         BackendLoadError, ("Made", "kvcore_abrt", "'kvcore_abort'")),
    Case("backend with a hook not marked", lambda t: registry.plugin_manager(backend(kvcore_progress=lambda self: None)), BackendLoadError,
         ("Made", "kvcore_progress")),
    Case("backend with a wrong argument", lambda t: registry.plugin_manager(backend(kvcore_poll=hookimpl(lambda self, x: []))),
         BackendLoadError, ("Made", "kvcore_poll", "x"), Exception),
    Case("backend that cannot be made", lambda t: registry.plugin_manager(backend(__init__=lambda self, x: None)), BackendLoadError,
         ("Made", "TypeError"), TypeError),
    Case("backend without visibility", lambda t: registry.plugin_manager(informed(capabilities=Capabilities(visible_on_done=False))),
         BackendLoadError, ("'made'", "visible_on_done=False")),
    Case("backend that declares nonsense", lambda t: registry.plugin_manager(informed(capabilities=Capabilities(max_bytes=0))),
         BackendLoadError, ("'made'", "max_bytes=0")),
    Case("backend of other descriptors", lambda t: registry.plugin_manager(informed(capabilities=Capabilities(descriptors="rows"))),  # type: ignore[arg-type]
         BackendLoadError, ("'made'", "'rows'")),
    Case("option that is none", lambda t: registry.validated_options(OPTIONS, {"prot": 5}), BackendOptionsError,
         ("'made'", "'prot'", "5", "port")),
    Case("option where none is", lambda t: registry.validated_options(BackendInfo("bare", "1", "1", API_VERSION), {"port": 5}),
         BackendOptionsError, ("'bare'", "'port'", "5")),
    Case("option that is wrong", lambda t: registry.validated_options(OPTIONS, {"port": "many"}), BackendOptionsError,
         ("'made'", "port", "'many'"), ValueError),
    Case("option that breaks the model", lambda t: registry.validated_options(OPTIONS, {"port": 5}), BackendOptionsError,
         ("'made'", "KeyError", "5"), KeyError),
    Case("paged pool of nothing", lambda t: paged(num_pages=0), ConfigError, ("'kv'", "num_pages", "0")),
    Case("model with windows", lambda t: paged(model=sliding()), ConfigError, ("'mistral'", "layer 0", "DynamicSlidingWindowLayer")),
    Case("more pages than are free", lambda t: paged().allocate(5), PageError, ("'kv'", "5", "4")),
    Case("page freed that is not taken", lambda t: paged().free([1]), PageError, ("'kv'", "page 1")),
    Case("tokens beyond the pages", lambda t: paged().read([0], 5), PageError, ("'kv'", "0 .. 5", "1 pages of 4")),
    Case("cache of other layers", lambda t: paged().write(layers(number_of=1), [0], 0, 4), PageError, ("'kv'", "1 layers", "2")),
    Case("cache of other shape", lambda t: paged().write(layers(head_dim=3), [0], 0, 4), PageError,
         ("'kv'", "K of layer 0", "[1, 2, 4, 3]")),
    Case("cache of other dtype", lambda t: paged().write(layers(dtype="float64"), [0], 0, 4), PageError, ("'kv'", "float64", "float32")),
    Case("trace that is a folder", lambda t: trace_file.read(t.folder, 1), ConfigError, ("trace ", "cannot be read", "timestamp"), OSError),
    Case("trace of nothing", lambda t: trace_file.read(t.file("\n"), 1), ConfigError, ("kvcore.toml", "no request", "hash_ids")),
    Case("trace that is no JSON", lambda t: trace_file.read(t.file("\n{"), 1), ConfigError, ("line 2", "truncated"), ValueError),
    Case("trace without a field", lambda t: trace_file.read(t.file("{}"), 1), ConfigError, ("line 1", "`timestamp`"), ValueError),
    Case("trace of one long line", lambda t: trace_file.read(t.file(" " * 2**21), 1), ConfigError, ("line 1", "1048576 bytes")),
    Case("trace with blocks missing", lambda t: trace_file.read(t.file(traced(513, [1])), 1), ConfigError, ("line 1", "1 hash_ids", "513")),
    Case("trace with blocks too many", lambda t: trace_file.read(t.file(traced(512, [1, 2])), 1), ConfigError, ("2 hash_ids", "give 1,")),
    Case("trace with a block twice", lambda t: trace_file.read(t.file(traced(1025, [1, 7, 7])), 1), ConfigError, ("line 1", "id 7")),
    Case("trace without an end", lambda t: trace_file.read(t.file("\n" * (10**6 + 1)), 1), ConfigError, ("1000000 lines", "give a part")),
    Case("request that no memory holds", lambda t: trace.play(Setup("local"), Parameters(Path("a"), memory_bytes=1 << 14),
         trace_file.read(t.file(traced(65, [1])), 1), unwatched), ConfigError, ("request 1", "2 pages", "has 1", "--memory 32768")),
    Case("cache that is too short", lambda t: paged().write(layers(tokens=3), [0], 0, 4), PageError, ("'kv'", "3 tokens of 4")),
    *map(failed, FailureCode),
]  # fmt: skip
