"""Which addresses of this host its settings mean, where they name a network interface or nothing (C79)."""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import socket
from pathlib import Path

from kvcore.addresses import Address, own_host, parse_host
from kvcore.errors import ConfigError, cause, shown

log = logging.getLogger("kvcore.interfaces")

SIOCGIFADDR = 0x8915
"""Linux's question for the IPv4 address of an interface."""
LINK_LOCAL = 0x20


def placed(host: str, bind: str) -> dict[str, str]:
    """The settings ``host`` and ``bind`` with the addresses they stand for: that of a network interface for its name, one that is chosen
    for an empty ``host`` (C79).

    Raises ``ConfigError`` for what is to be listened on and is neither an interface of this host nor a name that has an address.
    """
    found = {
        "host": _place(host, "host", here=not bind) if host else own_host(),
        "bind": _place(bind, "bind", here=True) if bind else "",
    }
    if Address(found["host"], 0).loopback and bind and not Address(found["bind"], 0).loopback:
        text = "host: peers are given %s, which leads them nowhere from other hosts, but %s is listened on; set host"
        log.warning(text, found["host"], found["bind"])
    return found


def _place(text: str, what: str, *, here: bool) -> str:
    host = parse_host(text, what)
    if ":" in host or host.replace(".", "").isdigit():
        return host
    interfaces = [name for _, name in socket.if_nameindex()]
    if host in interfaces:
        found = _interface_ipv4(host) or _interface_ipv6(host)
        if found is None:
            raise ConfigError(f"{what}: network interface {shown(host)} has no address; give it one, or name another")
        log.info("%s: %s is the address of network interface %s", what, found, host)
        return found
    try:
        if here:
            socket.getaddrinfo(host, 0)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{what}: {shown(host)} is neither a name with an address ({cause(error)}) nor a network interface of this host; "
            f"give an address, or an interface among {', '.join(interfaces)}"
        ) from error
    return host


def _interface_ipv4(name: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, name.encode().ljust(256, b"\0"))
        except OSError:
            return None  # it has none
    return socket.inet_ntoa(answer[20:24])


def _interface_ipv6(name: str) -> str | None:
    """The address with the widest scope; a link-local one with its interface."""
    try:
        fields = [line.split() for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()]
    except OSError:
        return None  # IPv6 is off
    found = sorted((int(scope, 16), address) for address, _, _, scope, _, owner in fields if owner == name)
    if not found:
        return None
    scope, address = found[0]
    return f"{ipaddress.IPv6Address(int(address, 16))}" + (f"%{name}" if scope == LINK_LOCAL else "")
