"""Kind K9: rooms over every family of addresses, and addresses and ports that peers can use.

How addresses are read is in ``test_addresses``, who listens where in ``test_bootstrap`` and ``test_config``.
"""

from __future__ import annotations

import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import msgspec
import pytest
from aiohttp import web

from kvcore import KVManager
from kvcore.bootstrap import RankInfo
from kvcore.layouts import Place
from tests.cases.ports import ask
from tests.helpers import SOON_S, Duo, manager, memory


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]", "::1%1", "localhost"])
def test_c77_a_room_completes_in_each_family(host: str) -> None:
    """Bootstrap, control and data ports are all of that family."""
    source, target = memory(8, seed=3), memory(8)
    with manager("prefill", source, host=host) as prefill, manager("decode", target, host=host) as decode:
        Duo(prefill, decode, source, target).transfer([1, 2], [3, 4])


def test_c78_listening_everywhere_and_publishing_loopback_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def warned() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "kvcore.interfaces"]

    with caplog.at_level(logging.WARNING, "kvcore.interfaces"):
        manager("decode", memory(2), bind="0.0.0.0").close()
        [told] = warned()
        assert "peers are given 127.0.0.1" in told and "set host" in told
        caplog.clear()
        manager("decode", memory(2), bind="127.0.0.2").close()
        manager("decode", memory(2)).close()
        assert warned() == []


def test_c78_a_rank_of_another_host_that_publishes_loopback_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with manager("prefill", memory(2)) as prefill, caplog.at_level(logging.WARNING, "kvcore.bootstrap"):
        monkeypatch.setattr(web.Request, "remote", property(lambda _: "10.0.0.5"))
        body = msgspec.json.encode(RankInfo(0, 1, "127.0.0.1:7000", "another", 2**63 - 1, "local", Place()))
        for _ in range(2):
            assert ask(prefill.address, "POST", "/v1/ranks", body)[0] == 200
        assert len([line for line in caplog.messages if "from 10.0.0.5 and publishes 127.0.0.1:7000" in line]) == 1


def test_c80_twenty_managers_started_at_once_share_no_port() -> None:
    """With default settings, on one host."""
    with ExitStack() as stack, ThreadPoolExecutor(20) as pool:
        started = list(pool.map(lambda number: manager("prefill" if number % 2 else "decode", memory(2)), range(20)))
        for one in started:
            stack.callback(one.close)
        ports = [port for one in started for port in listened(one)]
        assert len(ports) == len(set(ports)) == 30
        for port in ports:
            socket.create_connection(("127.0.0.1", port), SOON_S).close()


def listened(one: KVManager) -> list[int]:
    """Control port, and prefill's bootstrap port."""
    return [one.control.port] + ([int(one.address.rpartition(":")[2])] if one.config.role == "prefill" else [])
