"""What the two processes of a check do: load the backend, start its engine, move a page, look at every byte, close."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import kvcore
from kvcore import registry
from kvcore.buffers import Buffer, Bytes, random_pages
from kvcore.errors import KVCoreError, cause, one_line
from kvcore.hookspecs import Fact
from kvcore.sides import Close, Link
from kvcore.states import Side

PAGES, PAGE_BYTES, LAYERS = 4, 16 * 1024, 2
SENT, RECEIVED = 1, 2
"""The page that is moved, and the one it is moved to."""
ROOM = 1


@dataclass(frozen=True, slots=True)
class Settings:
    """Which backend to check and how. ``limit_s``: seconds for any one step."""

    backend: str
    options: dict[str, Any]
    host: str
    limit_s: float
    debug: bool = False


@dataclass(frozen=True, slots=True)
class About:
    """From prefill: what the backend says of itself, in plain values."""

    version: str
    wire_version: str
    api_version: str
    capabilities: dict[str, Any]
    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class Known:
    """To decode: prefill has told of itself, so that no failure comes before that."""


@dataclass(frozen=True, slots=True)
class Address:
    """From prefill, passed on to decode: where prefill is."""

    text: str


@dataclass(frozen=True, slots=True)
class Moved:
    """From both: the page was moved, and on decode every byte is as it should be."""


@dataclass(frozen=True, slots=True)
class Leave:
    """To both, when both have moved the page: close the manager."""


@dataclass(frozen=True, slots=True)
class Closed:
    """From both: the manager was closed; ``errors`` are those that kvcore has logged."""

    errors: tuple[str, ...]


def work(side: Side, settings: Settings, link: Link) -> None:
    """One side of a check."""
    errors = _Errors()
    logging.getLogger("kvcore").addHandler(errors)
    link.progress("importing the backend")
    backend_class = kvcore.load_backend(settings.backend)
    plugins, _, info = registry.plugin_manager(backend_class)
    if side == "prefill":
        link.progress("asking for facts about its engine")
        link.tell(_about(info, plugins.hook.kvcore_facts))
    else:
        link.progress("waiting for prefill's facts")
        link.hear(Known)
    link.progress("allocating memory")
    buffers = [Buffer(info.capabilities.memory, PAGES, PAGE_BYTES) for _ in range(LAYERS)]
    pool = kvcore.Pool.from_tensors("kv", [buffer.tensor for buffer in buffers], page_size=1)
    link.progress("starting its engine and registering memory")
    manager = kvcore.KVManager(_config(side, settings), [pool])
    try:
        (_send if side == "prefill" else _receive)(manager, buffers, settings.limit_s, link)
    except Exception as error:
        link.fail(error)  # before closing, which a sick engine may not survive
        return
    link.hear(Leave)
    link.progress("closing its engine")
    manager.close()
    link.tell(Closed(tuple(errors.lines)))
    link.hear(Close)


def _send(manager: kvcore.KVManager, buffers: list[Buffer], limit_s: float, link: Link) -> None:
    for layer, buffer in enumerate(buffers):
        buffer.write(_content(layer))
    link.tell(Address(manager.address))
    link.progress("pairing and moving a page")
    with manager.sender(ROOM) as sender:
        sender.send([SENT], last=True)
        _succeed(sender, limit_s)
    link.tell(Moved())


def _receive(manager: kvcore.KVManager, buffers: list[Buffer], limit_s: float, link: Link) -> None:
    link.progress("waiting for prefill")
    prefill = link.hear(Address).text
    link.progress("pairing and moving a page")
    with manager.receiver(ROOM, prefill=prefill) as receiver:
        receiver.receive([RECEIVED])
        _succeed(receiver, limit_s)
        _check(buffers)
    link.tell(Moved())


def _succeed(handle: kvcore.Handle, limit_s: float) -> None:
    handle.wait(limit_s)
    handle.raise_for_failure()
    if not handle.poll().terminal:
        raise KVCoreError(f"room {ROOM} is still {handle.poll().name} after {limit_s:g} s; see with --debug what the backend is doing")


def _check(buffers: list[Buffer]) -> None:
    """The page has arrived, every byte of it, and nothing else was written (R6, T2)."""
    for layer, buffer in enumerate(buffers):
        found, expected = buffer.read(), np.zeros((PAGES, PAGE_BYTES), np.uint8)
        expected[RECEIVED] = _content(layer)[SENT]
        wrong = np.argwhere(found != expected)
        if not len(wrong):
            continue
        page, at = map(int, wrong[0])
        where = f"{len(wrong)} wrong bytes in region {layer}, the first at {at} of page {page}"
        if page == RECEIVED:
            raise KVCoreError(f"the room ended with SUCCESS and has {where}; the backend must report DONE only when all bytes are in place")
        raise KVCoreError(f"{where}, which was not to be written; the backend must write nothing but what a transfer names")


def _content(layer: int) -> Bytes:
    return random_pages(layer, PAGES, PAGE_BYTES)


def _config(side: Side, settings: Settings) -> kvcore.Config:
    """Limits under the driver's, so that a room that does not end says why before the driver gives up."""
    limit_s = settings.limit_s / 2
    limits = kvcore.Limits(
        bootstrap_s=limit_s, input_s=limit_s, transfer_s=limit_s, ticket_s=limit_s, quarantine_s=None, orphan_s=limit_s, drain_s=1.0
    )
    return kvcore.Config(role=side, backend=settings.backend, backend_options=settings.options, host=settings.host, limits=limits)


def _about(info: kvcore.BackendInfo, facts: Any) -> About:
    able = {name: sorted(value) if isinstance(value, frozenset) else value for name, value in asdict(info.capabilities).items()}
    api_version = ".".join(map(str, info.api_version))
    return About(one_line(info.version), one_line(info.wire_version), api_version, able, tuple(_asked(facts)))


def _asked(facts: Any) -> list[Fact]:
    """The backend's facts in plain text; that it cannot tell them is one."""
    try:
        return [Fact(str(fact.name), str(fact.value), str(fact.advice)) for fact in facts()]
    except BaseException as error:
        return [Fact("facts", f"kvcore_facts raised {cause(error)}", "its author must fix kvcore_facts")]


class _Errors(logging.Handler):
    """Collects what kvcore logs as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line of a record."""
        error = record.exc_info[1] if record.exc_info else None
        self.lines.append(record.getMessage() + (f" ({cause(error)})" if error is not None else ""))
