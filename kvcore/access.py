"""Who may talk to this instance: the keys, the token and the certificates that the settings name, read and checked when it starts."""

from __future__ import annotations

import logging
import os
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from pydantic import SecretStr
from zmq.utils import z85

from kvcore.addresses import Address, parse, parse_host
from kvcore.config import BEARER, BEARER_FORM, KEY, KEY_FORM, Config, Security
from kvcore.errors import MOST_CAUSE, ConfigError, cause, one_line

log = logging.getLogger("kvcore.access")


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """This instance's pair of keys as Z85 text, and the public keys that it lets in and dials, its own among them."""

    public: str
    secret: str = field(repr=False)
    allowed: frozenset[str]


@dataclass(frozen=True, slots=True)
class Guard:
    """How HTTP ports are guarded, and asked: the token ("" without), and TLS for serving and for asking (None: plain HTTP)."""

    token: str = field(default="", repr=False)
    serving: ssl.SSLContext | None = None
    asking: ssl.SSLContext | None = None

    @classmethod
    def of(cls, security: Security) -> Guard:
        """Read what the settings name; raises ``ConfigError``."""
        token = _secret("token", security.token, security.token_file, BEARER, BEARER_FORM)
        return cls(token, _serving(security), _asking(security))


OPEN = Guard()


@dataclass(frozen=True, slots=True)
class Access:
    """What ``Security`` comes to. ``keys`` is None where the control port is open."""

    keys: CurveKeys | None
    guard: Guard

    @classmethod
    def of(cls, config: Config) -> Access:
        """Read what the settings name, and warn of ports that they leave open; raises ``ConfigError``, which never shows a secret."""
        access = cls(_keys(config.security), Guard.of(config.security))
        access._warn_if_open(config)
        return access

    def _warn_if_open(self, config: Config) -> None:
        host = parse_host(config.bind or config.host, "bind")
        bound = [("control", host, "security.curve_secret", self.keys is not None)]
        if config.role != "decode" and config.bootstrap is None:
            bound.append(("bootstrap", host, "security.token", bool(self.guard.token)))
        if config.admin is not None:
            bound.append(("admin", parse(config.admin, "admin", any_port=True).host, "security.token", bool(self.guard.token)))
        for port, where, setting, guarded in bound:
            if not guarded and not Address(where, 0).loopback:
                log.warning("the %s port on %s is open to all who reach it; set %s, or keep it on a closed network", port, where, setting)


def unlike(keys: CurveKeys | None, theirs: str) -> str:
    """Why a rank that publishes this public key ("" for none) cannot be dialled with ours; "" if it can."""
    if keys is None:
        return "it takes only peers with curve keys, and this instance has none; set security.curve_secret here" if theirs else ""
    if not theirs:
        return "it has no curve key, and this instance, which has one, dials only such as have; set security.curve_secret there"
    return "" if theirs in keys.allowed else f"its curve key {theirs} is not allowed here; add it to security.curve_peers"


def new_keys(path: str) -> str:
    """Write a fresh secret key to a new file that only its owner may read, and return the public key."""
    public, secret = zmq.curve_keypair()
    try:
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(secret + b"\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{one_line(path, MOST_CAUSE)} cannot be made ({cause(error)}); give a file that is not there yet") from error
    return public.decode()


def _keys(security: Security) -> CurveKeys | None:
    secret = _secret("curve_secret", security.curve_secret, security.curve_secret_file, KEY, KEY_FORM)
    if not secret:
        return None
    if not zmq.has("curve"):
        raise ConfigError("security.curve_secret is set, and the installed pyzmq was built without CURVE; reinstall it from a wheel")
    try:
        public = zmq.curve_public(secret.encode()).decode()
    except zmq.ZMQError as error:
        raise ConfigError(f"security.curve_secret is no curve key; it must be {KEY_FORM}") from error
    _check_all(security.curve_peers or ())
    return CurveKeys(public, secret, frozenset({public, *(security.curve_peers or ())}))


def _check_all(peers: Sequence[str]) -> None:
    for peer in peers:
        try:
            z85.decode(peer)
        except Exception as error:  # of several kinds: struct's among them
            raise ConfigError("security.curve_peers has a text that is no curve key; each must be what kvcore keys prints") from error


def _secret(name: str, given: SecretStr | None, path: str | None, pattern: str, form: str) -> str:
    if path is None:
        return given.get_secret_value() if given is not None else ""
    where = f"security.{name}_file {one_line(path, MOST_CAUSE)}"
    try:
        text = Path(path).read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"{where} cannot be read ({error.strerror}); check the path and who may read it") from error
    except ValueError:
        text = ""
    if not re.fullmatch(pattern, text):
        raise ConfigError(f"{where} does not hold what it should; it must be {form}")
    return text


def _serving(security: Security) -> ssl.SSLContext | None:
    if security.tls_cert is None or security.tls_key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(security.tls_cert, security.tls_key, password=lambda: b"")  # or it would be asked for on the terminal
    except (OSError, ValueError) as error:
        files = one_line(f"{security.tls_cert} and {security.tls_key}", MOST_CAUSE)
        raise ConfigError(
            f"security.tls_cert and tls_key, {files}, cannot be used ({cause(error)}); give a certificate and its private key as PEM files"
        ) from error
    return context


def _asking(security: Security) -> ssl.SSLContext | None:
    if security.tls_ca is None:
        return None
    try:
        return ssl.create_default_context(cafile=security.tls_ca)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"security.tls_ca {one_line(security.tls_ca, MOST_CAUSE)} cannot be used ({cause(error)}); give certificates as a PEM file"
        ) from error
