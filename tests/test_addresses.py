"""Addresses: every family, one form, one error text (C77)."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given, strategies as st

from kvcore import interfaces
from kvcore.addresses import Address, own_address, parse, parse_host
from kvcore.errors import ConfigError, shown
from kvcore.interfaces import placed
from tests.helpers import Duo, manager, memory


@pytest.mark.parametrize(
    ("text", "host", "port", "zmq", "http"),
    [
        ("127.0.0.1:8998", "127.0.0.1", 8998, "tcp://127.0.0.1:8998", "http://127.0.0.1:8998"),
        ("node-3.rack_1.example:1", "node-3.rack_1.example", 1, "tcp://node-3.rack_1.example:1", "http://node-3.rack_1.example:1"),
        ("[::1]:8998", "::1", 8998, "tcp://[::1]:8998", "http://[::1]:8998"),
        ("[fe80::1%lo]:65535", "fe80::1%lo", 65535, "tcp://[fe80::1%lo]:65535", "http://[fe80::1%25lo]:65535"),
        ("[::ffff:10.0.0.7]:80", "::ffff:10.0.0.7", 80, "tcp://[::ffff:10.0.0.7]:80", "http://[::ffff:10.0.0.7]:80"),
    ],
)
def test_c77_each_family_has_each_form(text: str, host: str, port: int, zmq: str, http: str) -> None:
    address = parse(text, "bootstrap")
    assert address == Address(host, port)
    assert (str(address), address.zmq, address.http) == (text, zmq, http)
    assert address.ipv6 == (":" in host)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        ":80",
        "::1",
        "::1:8998",
        "[::1]",
        "[::1]8998",
        "[::1]:",
        "[]:80",
        "[127.0.0.1]:80",
        "[node]:80",
        "fe80::1%lo:80",
        "[fe80::1%]:80",
        "[fe80::1%a b]:80",
        "[fe80::1%a%b]:80",
        "[g::1]:80",
        "node",
        "node:",
        "node:http",
        "node:0",
        "node:65536",
        "node:-1",
        "node:+1",
        "node:8_0",
        "node:٨٠",
        "node: 80",
        " node:80",
        "node:80\n",
        "no de:80",
        "nöde:80",
        "-node:80",
        "http://node:80",
        "user@node:80",
        "node/x:80",
        "node%lo:80",
        "999.1.1.1:80",
        "127.1:80",
        "2130706433:80",
        "a" * 254 + ":80",
    ],
)
def test_c77_a_bad_address_is_refused_naming_setting_text_and_form(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "bootstrap")
    message = str(caught.value)
    assert message.startswith("bootstrap must be host:port, IPv6 in brackets")
    assert shown(text) in message
    assert "\n" not in message


@pytest.mark.parametrize("value", [None, 8998, b"node:80", ["node", 80]])
def test_what_is_no_text_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="admin must be"):
        parse(value, "admin")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="host must be"):
        parse_host(value, "host")  # type: ignore[arg-type]


def test_port_0_only_where_an_address_is_bound() -> None:
    assert parse("127.0.0.1:0", "admin", any_port=True).port == 0
    with pytest.raises(ConfigError, match="port 0 is out of range"):
        parse("127.0.0.1:0", "prefill")


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("node-3", "node-3"),
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("fe80::1%lo", "fe80::1%lo"),
        ("[fe80::1%lo]", "fe80::1%lo"),
    ],
)
def test_c77_a_host_without_port(text: str, host: str) -> None:
    assert parse_host(text, "host") == host


@pytest.mark.parametrize("text", ["", "[]", "[node]", "[::1", "::1]", "[::1]:80", "node:80", "1.2.3", "a b", "*"])
def test_c77_a_bad_host_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="host must be a name or an address"):
        parse_host(text, "host")


@pytest.mark.parametrize(
    ("host", "wildcard"), [("0.0.0.0", True), ("::", True), ("0:0::0", True), ("127.0.0.1", False), ("::1", False), ("node", False)]
)
def test_c78_wildcards_are_known_as_such(host: str, wildcard: bool) -> None:
    assert Address(host, 80).wildcard is wildcard


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.7", False),
        ("node", False),
    ],
)
def test_c78_loopback_is_known_as_such(host: str, loopback: bool) -> None:
    assert Address(host, 80).loopback is loopback


_HOSTS = st.one_of(
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
    st.ip_addresses(v=6).map(lambda address: f"{address}%eth0.7"),
    st.from_regex(r"[a-z][a-z0-9-]{0,20}[a-z]", fullmatch=True),
)


@given(_HOSTS, st.integers(1, 65535))
def test_c77_what_is_written_is_read_back(host: str, port: int) -> None:
    address = Address(host, port)
    assert parse(str(address), "prefill") == address
    assert parse_host(host, "host") == host


@given(st.text())
def test_any_text_is_an_address_or_a_config_error(text: str) -> None:
    try:
        address = parse(text, "prefill")
    except ConfigError:
        return
    assert str(address).casefold() == text.casefold() or int(text.rpartition(":")[2]) == address.port


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_an_address_of_this_host_is_found_for_an_engine_that_listens_there(host: str) -> None:
    assert own_address("mine", host, socket.AF_INET) == "127.0.0.1"


@pytest.mark.parametrize(
    ("host", "family", "wanted"),
    [
        ("192.0.2.1", socket.AF_UNSPEC, "an address"),
        ("::1", socket.AF_INET, "an IPv4 address"),
        ("2001:db8::1", socket.AF_UNSPEC, "an address"),
    ],
)
def test_an_address_of_another_host_is_refused_at_once(host: str, family: socket.AddressFamily, wanted: str) -> None:
    with pytest.raises(ConfigError, match=rf"^backend 'mine' cannot listen on host '{host}' \(.*\); give {wanted} of this host$"):
        own_address("mine", host, family)


# --- which address of this host is meant


def test_c79_an_explicit_address_or_interface_wins_over_any_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "own_host", lambda: "192.0.2.7")
    assert placed("", "") == {"host": "192.0.2.7", "bind": ""}
    assert placed("127.0.0.2", "") == {"host": "127.0.0.2", "bind": ""}
    assert placed("[::1]", "::") == {"host": "::1", "bind": "::"}
    assert placed("lo", "lo") == {"host": "127.0.0.1", "bind": "127.0.0.1"}
    assert placed("localhost", "") == {"host": "localhost", "bind": ""}
    assert placed("name-of-a-service.invalid", "127.0.0.1")["host"] == "name-of-a-service.invalid", "which peers may know"


def test_c79_an_interface_with_addresses_of_ipv6_only_is_known_by_the_widest(monkeypatch: pytest.MonkeyPatch) -> None:
    table = """fe80000000000000000000000000abcd 04 40 20 80     eth7
20010db8000000000000000000000002 04 40 00 80     eth7
fe80000000000000000000000000abce 05 40 20 80     eth8
"""
    monkeypatch.setattr(interfaces, "_interface_ipv4", lambda name: None)
    monkeypatch.setattr(interfaces.socket, "if_nameindex", lambda: [(4, "eth7"), (5, "eth8")])
    monkeypatch.setattr(interfaces.Path, "read_text", lambda *_, **__: table)
    assert placed("eth7", "eth8") == {"host": "2001:db8::2", "bind": "fe80::abce%eth8"}


@pytest.mark.parametrize("setting", ["host", "bind"])
def test_c79_an_interface_that_does_not_exist_is_refused_with_those_that_do(setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        manager("prefill", memory(4), **{setting: "eth77"})
    text = str(caught.value)
    assert text.startswith(f"{setting}: 'eth77' is neither a name with an address")
    assert all(name in text for _, name in socket.if_nameindex())


def test_c79_a_room_completes_over_a_named_interface() -> None:
    source, target = memory(8, seed=3), memory(8)
    with manager("prefill", source, host="lo") as prefill, manager("decode", target, host="lo") as decode:
        assert prefill.address.startswith("127.0.0.1:")
        Duo(prefill, decode, source, target).transfer([1, 2], [3, 4])
