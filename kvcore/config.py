"""What a manager is started with. Everything is checked when the config is built, never in the middle of a request."""

from __future__ import annotations

import logging
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError, model_validator
from pydantic_core import ErrorDetails

from kvcore import addresses
from kvcore.errors import MOST_CAUSE, MOST_SHOWN, ConfigError, cause, one_line, shown
from kvcore.layouts import Place

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

log = logging.getLogger("kvcore.config")


def _seconds(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"must be a number of seconds above 0, got {shown(value)}")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not math.isfinite(seconds) or seconds <= 0:
        raise ValueError(f"must be a finite number of seconds above 0, got {shown(value)}")
    return seconds


Seconds = Annotated[float, BeforeValidator(_seconds)]


def like(pattern: str, form: str) -> AfterValidator:
    """For the type of a text: that all of it matches ``pattern``, of which an error says ``form``, for people."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"must be {form}")
        return text

    return AfterValidator(check)


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)  # an input may be a secret

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(describe(type(self).__name__, error)) from error


def describe(what: str, error: ValidationError, places: Mapping[str, str] = MappingProxyType({})) -> str:
    """One line for a pydantic error: each wrong setting with the value it had and what is allowed.

    ``places`` maps full names of settings to where their values came from, which is told too.
    """
    parts = []
    for name, item in _wrong(error):
        message = _ADVICE.get(item["type"]) or one_line(item["msg"].removeprefix("Value error, "), MOST_CAUSE)
        whole = item["type"] == "value_error" and isinstance(item["input"], (dict, BaseModel))
        told = item["type"] == "missing" or whole or shown(item["input"]) in message
        value = "" if told else f", got {display(f'{what}.{name}', item['input'])}"
        subject = f"{one_line(name, MOST_SHOWN)}: " if name else ""
        parts.append(f"{subject}{message[:1].lower()}{message[1:]}{value}{_origins(name, message, places)}")
    more = f"; and {len(parts) - MOST_LISTED} more" if len(parts) > MOST_LISTED else ""
    return f"{what} refused: " + "; ".join(parts[:MOST_LISTED]) + more


MOST_LISTED = 8
"""Settings that one error names; of more it gives the number."""
_ADVICE = {
    "missing": "required and not set, set it",
    "extra_forbidden": "there is no such setting, correct its name or remove it",
    "tuple_type": 'must be a list, such as ["a", "b"]',
}


_PRIVATE = re.compile("secur|secret|token|curve|passw|key", re.IGNORECASE)


def display(name: str, value: object) -> str:
    """The value of a setting as logs and errors quote it; not if the setting's name, or one in a table, says that it may be a secret."""
    private = _PRIVATE.search(name) or (isinstance(value, Mapping) and _PRIVATE.search(one_line(value)))
    return "a value that is not shown" if private else shown(value)


def _wrong(error: ValidationError, prefix: tuple[int | str, ...] = ()) -> Iterator[tuple[str, ErrorDetails]]:
    """What is wrong by the full name of the setting, nested models included; "" if only the settings together are."""
    for item in error.errors():
        path = (*prefix, *item["loc"])
        inner = item.get("ctx", {}).get("error")
        if isinstance(inner, ConfigError) and isinstance(inner.__cause__, ValidationError):
            yield from _wrong(inner.__cause__, path)
        else:
            yield ".".join(map(str, path)), item


def _origins(name: str, message: str, places: Mapping[str, str]) -> str:
    """Where a setting came from; of a table, where those settings in it came from that the message is about."""
    found = [place for full, place in places.items() if full == name or (_parent(full) == name and _leaf(full) in message.split())]
    return f" (from {', '.join(found)})" if found else ""


def _parent(full: str) -> str:
    return full.rpartition(".")[0]


def _leaf(full: str) -> str:
    return full.rpartition(".")[2]


class Limits(_Model):
    """Seconds after which something is given up; floats above 0. What each covers is in ``docs/limits.md``."""

    bootstrap_s: Seconds = 300.0
    """While a room is BOOTSTRAPPING; then it is FAILED."""
    input_s: Seconds = 300.0
    """While a room is WAITING_FOR_INPUT, restarted by ``receive``; then it is FAILED."""
    transfer_s: Seconds = 300.0
    """While a room is TRANSFERRING; then it is FAILED and its tickets stay in the ledger."""
    ticket_s: Seconds = 60.0
    """One ticket, from its start; then the room is FAILED and the ticket is kept and quarantined."""
    liveness_s: Seconds = 15.0
    """Silence of a peer; then the peer is lost."""
    quarantine_s: Seconds | None = 600.0
    """Pages without proof of quiescence; then they are released as unproven (R3). None: never."""
    orphan_s: Seconds = 30.0
    """What is held for a room nobody here has opened, and a last word that is not acknowledged."""
    send_s: Seconds = 5.0
    """One control message that cannot be sent; then the peer is lost."""
    drain_s: Seconds = 30.0
    """``close``: how long rooms that are TRANSFERRING may still end by themselves; then all that live are aborted."""

    @model_validator(mode="after")
    def _quarantine_covers_tickets(self) -> Limits:
        if self.quarantine_s is not None and self.quarantine_s <= self.liveness_s + self.ticket_s:
            raise ValueError(
                f"quarantine_s ({self.quarantine_s:g}) must be above liveness_s + ticket_s "
                f"({self.liveness_s + self.ticket_s:g}); raise it or lower the others"
            )
        return self


Count = Annotated[int, Field(ge=1, strict=True)]
Index = Annotated[int, Field(ge=0, strict=True)]


class Topology(_Model):
    """Sizes of an instance's tensor, pipeline and data-parallel groups, and this rank's place in them. One manager is one rank."""

    tp_size: Count = 1
    tp_rank: Index = 0
    pp_size: Count = 1
    pp_rank: Index = 0
    dp_size: Count = 1
    dp_rank: Index = 0

    @model_validator(mode="after")
    def _is_a_place(self) -> Topology:
        Place(**self.model_dump())
        return self

    @property
    def place(self) -> Place:
        """The same as it travels."""
        return Place(self.tp_size, self.tp_rank, self.pp_size, self.pp_rank, self.dp_size, self.dp_rank)


KEY = r"[0-9A-Za-z.:+=^!/*?&<>()\[\]{}@%$#-]{40}"
KEY_FORM = "a curve key of 40 characters (Z85), such as kvcore keys makes"
BEARER = r"[!-~]{16,512}"
BEARER_FORM = "16 to 512 printable ASCII characters without blanks"


def _secret(pattern: str, form: str) -> AfterValidator:
    def check(value: SecretStr) -> SecretStr:
        if not re.fullmatch(pattern, value.get_secret_value()):
            raise ValueError(f"must be {form}")
        return value

    return AfterValidator(check)


class Security(_Model):
    """Who may talk to an instance, and which backends it may have; by default anybody who reaches it, and any. See ``SECURITY.md``.

    Secrets are never shown: not in ``repr``, errors or logs. Files are read when a manager starts.
    """

    backends: tuple[str, ...] | None = None
    """The names that ``Config.backend`` may have; None: any that is installed."""
    curve_secret: Annotated[SecretStr, _secret(KEY, KEY_FORM)] | None = None
    """This instance's secret key: the control port then takes, and dials, peers with allowed keys only, encrypted (CURVE)."""
    curve_secret_file: str | None = None
    """A file that holds it, instead."""
    curve_peers: tuple[Annotated[str, like(KEY, KEY_FORM)], ...] | None = None
    """Public keys that are allowed besides this instance's own; None: its own only, as where all instances share one pair."""
    token: Annotated[SecretStr, _secret(BEARER, BEARER_FORM)] | None = None
    """What every request to the bootstrap and admin ports must bear, ``/health`` excepted, and what is shown to those of others."""
    token_file: str | None = None
    """A file that holds it, instead."""
    tls_cert: str | None = None
    """A PEM file with the certificate (chain) that the bootstrap and admin ports show: they then speak HTTPS only."""
    tls_key: str | None = None
    """A PEM file with its private key, not encrypted."""
    tls_ca: str | None = None
    """A PEM file with the authorities that certificates of bootstrap services must be signed by: they are then asked over HTTPS only."""

    @model_validator(mode="after")
    def _is_whole(self) -> Security:
        if self.curve_secret is not None and self.curve_secret_file is not None:
            raise ValueError("curve_secret and curve_secret_file are both set; leave one out")
        if self.token is not None and self.token_file is not None:
            raise ValueError("token and token_file are both set; leave one out")
        if self.curve_peers is not None and self.curve_secret is None and self.curve_secret_file is None:
            raise ValueError("curve_peers is set, and this instance has no key; set curve_secret or curve_secret_file too")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together; set both or neither")
        if self.tls_cert is not None and self.tls_ca is None:
            raise ValueError("tls_cert is set without tls_ca, by which instances know one another's certificates; set it too")
        return self


Port = Annotated[int, Field(ge=0, le=65535, strict=True)]


class Config(_Model):
    """Settings of one manager. See ``docs/configuration.md`` for each."""

    role: Literal["prefill", "decode", "both"]
    backend: str = "local"
    backend_options: dict[str, Any] = Field(default_factory=dict)
    host: str = "127.0.0.1"
    bind: str = ""
    port: Port = 0
    bootstrap_port: Port = 0
    bootstrap: str | None = None
    admin: str | None = None
    topology: Topology = Topology()
    limits: Limits = Limits()
    security: Security = Security()

    @model_validator(mode="after")
    def _checks(self) -> Config:
        if self.host in ("0.0.0.0", "::", "[::]", "*"):
            raise ValueError(
                f"host {shown(self.host)} is a wildcard that peers cannot reach; give an address, and use bind for the wildcard"
            )
        if self.admin is not None:
            addresses.parse(self.admin, "admin", any_port=True)
        if self.bootstrap is not None:
            addresses.parse(self.bootstrap, "bootstrap")
            if self.role == "decode" or self.topology.place.number == 0:
                raise ValueError(
                    f"bootstrap is {shown(self.bootstrap)}, which only further ranks of a prefill group have; leave it out, since "
                    f"{'decode names an address with each room' if self.role == 'decode' else 'rank 0 serves its group itself'}"
                )
        if self.bootstrap is None and self.role != "decode" and self.topology.place.number:
            raise ValueError(
                f"rank {self.topology.place.number} of {self.topology.place.total} has no bootstrap; "
                "give it the address of its group's rank 0, which serves it"
            )
        if self.role != "decode" and self.bootstrap is None and self.security.tls_ca is not None and self.security.tls_cert is None:
            raise ValueError(
                "security.tls_ca is set, and the bootstrap service here has no certificate; set security.tls_cert and tls_key too"
            )
        allowed = self.security.backends
        if allowed is not None and self.backend.partition("@")[0] not in allowed:
            raise ValueError(
                f"backend {shown(self.backend)} is not among security.backends {shown(list(allowed))}; add it or choose another"
            )
        return self

    @classmethod
    def load(cls, path: str | Path | None = None, **overrides: Any) -> Config:
        """Read a TOML file, then ``KVCORE_*`` environment variables, then keyword overrides; the later wins.

        Nested settings are tables in the file and joined with two underscores in the environment
        (``KVCORE_LIMITS__TRANSFER_S=30``). A value given twice is logged with the place that won.
        """
        merged: dict[str, Any] = {}
        origin: dict[str, str] = {}
        try:
            for place, values in ((str(path), _from_file(path)), ("environment", _from_environment()), ("argument", overrides)):
                _merge(merged, values, place, origin, "")
        except RecursionError as error:
            raise ConfigError("settings are nested deeper than can be followed; correct the file, variable or argument") from error
        try:
            return cls(**merged)
        except ConfigError as error:
            if not isinstance(error.__cause__, ValidationError):
                raise
            raise ConfigError(describe(cls.__name__, error.__cause__, _told(origin))) from error.__cause__


def _told(origin: Mapping[str, str]) -> dict[str, str]:
    """Where settings came from as a person looks for it: a file, or the variable by its name; not those given as arguments."""
    variables = {full: f"KVCORE_{full.upper().replace('.', '__')}" for full, place in origin.items() if place == "environment"}
    return {full: variables.get(full, place) for full, place in origin.items() if place != "argument"}


def _from_file(path: str | Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) else cause(error)
        raise ConfigError(f"config file {one_line(path, MOST_CAUSE)} cannot be read ({why}); check the path") from error
    except ValueError as error:
        raise ConfigError(
            f"config file {one_line(path, MOST_CAUSE)} is not valid TOML ({one_line(error, MOST_CAUSE)}); correct that place"
        ) from error


def _from_environment() -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, text in sorted(os.environ.items()):
        if not name.startswith("KVCORE_"):
            continue
        *parents, leaf = name[len("KVCORE_") :].lower().split("__")
        table = values
        for parent in parents:
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                raise ConfigError(f"environment variable {name} sets a part of a value that another variable sets whole; unset one of them")
        plain = parents == ["security"]  # where a secret may look like a number, and must not become one
        table[leaf] = text if plain and text.lower() != "none" else _scalar(text)
    return values


def _scalar(text: str) -> object:
    """Environment text as the value it spells: a number, none, or the text itself.

    Words for true and false stay text: the setting's type reads them, so that they mean the same here as in a dict.
    """
    if re.fullmatch(r"[+-]?\d{1,300}", text):  # longer ones Python may refuse to read
        return int(text)
    if re.fullmatch(r"[+-]?(\d+\.\d*|\.\d+|\d+)([eE][+-]?\d+)?", text):
        return float(text)
    return None if text.lower() == "none" else text


def _merge(into: dict[str, Any], values: dict[str, Any], place: str, origin: dict[str, str], prefix: str) -> None:
    for name, value in values.items():
        full = prefix + name
        value = value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
        if isinstance(value, dict) and isinstance(into.get(name, {}), dict):
            _merge(into.setdefault(name, {}), value, place, origin, full + ".")
            continue
        if full in origin and into.get(name) != value:
            winner, loser = display(full, value), display(full, into[name])
            log.info("setting %s: %s from %s wins over %s from %s", full, winner, place, loser, origin[full])
        into[name] = value
        origin[full] = place
