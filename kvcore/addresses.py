"""Addresses as people write them: ``host:port``, with IPv6 in brackets."""

from __future__ import annotations

import functools
import ipaddress
import logging
import re
import socket
from dataclasses import dataclass

from kvcore.errors import ConfigError, cause, shown

log = logging.getLogger("kvcore.addresses")

_FORM = 'host:port, IPv6 in brackets, such as "10.0.0.7:8998", "node-3:8998" or "[fe80::1%eth0]:8998"'
_HOST_FORM = 'a name or an address, such as "10.0.0.7", "node-3" or "fe80::1%eth0"'
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
_SCOPE = re.compile(r"[A-Za-z0-9_.~-]+")
_PORT = re.compile(r"[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class Address:
    """A host (a name, IPv4, or IPv6 without brackets but with its %scope) and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if self.ipv6 else f"{self.host}:{self.port}"

    @property
    def ipv6(self) -> bool:
        """Whether the host is an IPv6 literal. A name may still resolve to one, so sockets allow both families anyway."""
        return ":" in self.host

    @property
    def wildcard(self) -> bool:
        """Whether this names every address of a host: good to bind, useless to a peer."""
        if not self.ipv6 and not self.host.replace(".", "").isdigit():
            return False
        return ipaddress.ip_address(self.host).is_unspecified

    @property
    def loopback(self) -> bool:
        """Whether this leads to the same host everywhere: an address, or localhost. Of another name it is not known."""
        if not self.ipv6 and not self.host.replace(".", "").isdigit():
            return self.host == "localhost"
        found = ipaddress.ip_address(self.host)
        mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
        return (mapped or found).is_loopback

    @property
    def zmq(self) -> str:
        """As ZeroMQ binds and connects it: ``tcp://[::1]:5555``."""
        return f"tcp://{self}"

    @property
    def http(self) -> str:
        """As the start of a URL: ``http://[fe80::1%25eth0]:8998`` (RFC 6874 writes the scope's % as %25)."""
        return f"http://{self}".replace("%", "%25")


def parse(text: str, what: str, *, any_port: bool = False) -> Address:
    """The address that ``text`` spells. With ``any_port`` port 0 is allowed too, for addresses to bind.

    Raises ``ConfigError`` naming ``what`` (the setting), the text and the allowed form.
    """
    if not isinstance(text, str):
        raise _refusal(what, text, "not a string", _FORM)
    return _parse(text, what, any_port)


@functools.lru_cache(1024)  # every receiver names its prefill's
def _parse(text: str, what: str, any_port: bool) -> Address:
    bracketed = text.startswith("[")
    host, colon, port = text[1:].rpartition("]:") if bracketed else text.rpartition(":")
    if not colon or not _PORT.fullmatch(port):
        raise _refusal(what, text, "no port number", _FORM)
    if not (0 if any_port else 1) <= int(port) <= 65535:
        raise _refusal(what, text, f"port {port} is out of range", _FORM)
    if bracketed != (":" in host):
        raise _refusal(what, text, "brackets belong around IPv6, and only there", _FORM)
    return Address(_checked(host, what, text, _FORM), int(port))


def parse_host(text: str, what: str) -> str:
    """The bare host that ``text`` spells, without a port; brackets around IPv6 may be there or not.

    Raises ``ConfigError`` naming ``what`` (the setting), the text and the allowed form.
    """
    if not isinstance(text, str):
        raise _refusal(what, text, "not a string", _HOST_FORM)
    bracketed = text.startswith("[") and text.endswith("]") and ":" in text
    return _checked(text[1:-1] if bracketed else text, what, text, _HOST_FORM)


def own_host() -> str:
    """The address of this host that the default route leaves from, else loopback; logged, since it is a guess (C79)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation; a datagram socket sends nothing by connecting
            host = str(probe.getsockname()[0])
        except OSError:
            host = "127.0.0.1"
    log.info("host: chose %s as the address given to peers; set host to override", host)
    return host


def own_address(backend: str, host: str, family: socket.AddressFamily = socket.AF_UNSPEC) -> str:
    """The address of this host that ``host`` means, IPv6 without brackets, for an engine that is to listen there.

    Raises ``ConfigError`` if it cannot: an engine may take a minute to find that out, or end the process over it.
    """
    try:
        found, kind, _, _, place = socket.getaddrinfo(host, 0, family, socket.SOCK_STREAM)[0]
        with socket.socket(found, kind) as probe:
            probe.bind(place)
    except OSError as error:
        wanted = "an IPv4 address" if family == socket.AF_INET else "an address"
        raise ConfigError(f"backend {backend!r} cannot listen on host {host!r} ({cause(error)}); give {wanted} of this host") from error
    return str(place[0])


def _checked(host: str, what: str, text: str, form: str) -> str:
    if ":" in host:
        return _checked_ipv6(host, what, text, form)
    if len(host) > 253 or not _NAME.fullmatch(host):
        raise _refusal(what, text, f"{shown(host)} is not a host name", form)
    if host.replace(".", "").isdigit():
        try:
            ipaddress.IPv4Address(host)
        except ValueError as error:
            raise _refusal(what, text, f"{shown(host)} is not an IPv4 address", form) from error
    return host


def _checked_ipv6(host: str, what: str, text: str, form: str) -> str:
    address, percent, scope = host.partition("%")
    try:
        ipaddress.IPv6Address(address)
    except ValueError as error:
        raise _refusal(what, text, f"{shown(host)} is not an IPv6 address", form) from error
    if percent and not _SCOPE.fullmatch(scope):
        raise _refusal(what, text, f"{shown(scope)} is not the name of an interface", form)
    return host


def _refusal(what: str, text: object, reason: str, form: str) -> ConfigError:
    return ConfigError(f"{what} must be {form}; got {shown(text)} ({reason})")
