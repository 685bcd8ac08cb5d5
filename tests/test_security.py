"""Running managers with keys, tokens and certificates: who is let in, who is refused and how both sides hear of it."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
from kvcore_conformance.stage.driver import free_port

from kvcore import KVPoll, Security
from kvcore.bootstrap import RankInfo
from kvcore.bootstrap_service import BootstrapService
from kvcore.errors import ConfigError
from kvcore.http import HttpThread
from kvcore.wire import Ping, encode
from tests.helpers import SOON_S, Duo, ended, manager, memory, number, wait_until
from tests.secured import TOKEN, Pair, certificate, secured

PREFILL, DECODE, STRANGER = Pair.fresh(), Pair.fresh(), Pair.fresh()
OURS = PREFILL.with_peers(DECODE)
THEIRS = DECODE.with_peers(PREFILL)
WITH_TOKEN = Security(token=TOKEN)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def keyed() -> Iterator[Duo]:
    with secured(OURS, THEIRS) as pair:
        yield pair.pair()


def refused(pair: Duo) -> int:
    return pair.prefill.stats().counters["kvcore_refused_peers_total"]


@contextmanager
def dealers(pair: Duo, number_of: int, keys: Pair | None, server: Pair = PREFILL) -> Iterator[list[zmq.Socket[bytes]]]:
    """Sockets that have dialled prefill's control port and said something, one after the other."""
    with ExitStack() as closing:
        context = closing.enter_context(zmq.Context())
        made: list[zmq.Socket[bytes]] = []
        for _ in range(number_of):
            made.append(closing.enter_context(context.socket(zmq.DEALER)))
            made[-1].setsockopt(zmq.LINGER, 0)
            if keys is not None:
                made[-1].curve_publickey, made[-1].curve_secretkey = keys.public.encode(), keys.secret.encode()
                made[-1].curve_serverkey = server.public.encode()
            made[-1].connect(f"tcp://127.0.0.1:{pair.prefill.control.port}")
            made[-1].send(encode("somebody-1", "", Ping()))
        yield made


@contextmanager
def serving() -> Iterator[HttpThread]:
    http = HttpThread("kvcore-http-test")
    http.start()
    yield http
    http.stop()


def warnings(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [record.message for record in caplog.records if words in record.message]


def failed(pair: Duo, timeout_s: float = SOON_S) -> str:
    """Why a room of the two fails."""
    with pair.decode.receiver(number(), pair.prefill.address) as receiver:
        ended(receiver, KVPoll.FAILED, timeout_s)
        assert receiver.failure is not None
        return receiver.failure.reason


# --- keys


def test_a_room_passes_between_instances_that_let_each_other_in(keyed: Duo) -> None:
    keyed.transfer([3, 8, 1], [5, 6, 7])
    assert refused(keyed) == 0 and keyed.prefill.healthy and keyed.decode.healthy


def test_who_shows_an_allowed_key_is_answered_and_nobody_else(keyed: Duo) -> None:
    before = refused(keyed)
    with dealers(keyed, 1, DECODE) as (good,), dealers(keyed, 1, STRANGER) as (other,), dealers(keyed, 1, None) as (plain,):
        assert good.poll(int(SOON_S * 1000)), "a stranger's question comes back to a good one"
        wait_until(lambda: refused(keyed) >= before + 2)
        assert not other.poll(100) and not plain.poll(100)


def test_the_simplest_group_shares_one_pair_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(PREFILL.secret)
    shared = Security(curve_secret_file=str(path))
    with secured(shared, shared) as pair:
        pair.transfer([1], [2])
        with dealers(pair, 1, DECODE):
            wait_until(lambda: refused(pair) == 1)


def test_a_refused_key_is_logged_once_however_often_it_comes_and_the_others_go_on(keyed: Duo, caplog: pytest.LogCaptureFixture) -> None:
    before, key = refused(keyed), Pair.fresh()
    with caplog.at_level(logging.WARNING, "kvcore"), dealers(keyed, 50, key):
        for turn in range(5):
            keyed.transfer([turn], [turn])
        wait_until(lambda: refused(keyed) == before + 50)
    assert len(warnings(caplog, key.public)) == len(warnings(caplog, "refused")) == 1
    assert f"kvcore_refused_peers_total {before + 50}\n" in keyed.prefill.metrics_text()
    keyed.transfer([1], [2])


def test_a_flood_of_connections_without_keys_is_counted_and_rooms_pass_meanwhile(keyed: Duo, caplog: pytest.LogCaptureFixture) -> None:
    before = refused(keyed)
    with caplog.at_level(logging.WARNING, "kvcore"), dealers(keyed, 200, None):
        for turn in range(10):
            keyed.transfer([turn], [turn])
        wait_until(lambda: refused(keyed) >= before + 200, 30)
    assert len(warnings(caplog, "did not get as far as its curve key")) <= 1
    keyed.transfer([1], [2])


def test_an_instance_whose_key_is_not_allowed_fails_its_rooms_at_once_and_is_told_which_key(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvcore"), secured(OURS, STRANGER.with_peers(PREFILL)) as pair:
        for _ in range(4):
            reason = failed(pair)  # long before bootstrap_s
        assert f"refuses this instance: it does not let in this instance's curve key {STRANGER.public}; add it to" in reason
        assert refused(pair) == 4 and len(warnings(caplog, "refused curve key")) == len(warnings(caplog, "no way to")) == 1
        with manager("decode", memory(32), security=THEIRS) as good:
            Duo(pair.prefill, good, pair.source, memory(32)).open()[1].receive([1])
            wait_until(lambda: good.stats().peers == 1)


def test_an_instance_dials_none_whose_key_it_does_not_let_in() -> None:
    with secured(OURS, DECODE.with_peers(STRANGER)) as pair:
        assert f"its curve key {PREFILL.public} is not allowed here; add it to security.curve_peers" in failed(pair)
        assert refused(pair) == 0, "not even dialled"


@pytest.mark.parametrize(
    ("prefill", "decode", "says"),
    [
        (OURS, Security(), "takes only peers with curve keys, and this instance has none; set security.curve_secret here"),
        (
            Security(),
            THEIRS,
            "it has no curve key, and this instance, which has one, dials only such as have; set security.curve_secret there",
        ),
    ],
)
def test_where_one_side_only_has_keys_the_room_fails_at_once_and_says_which(prefill: Security, decode: Security, says: str) -> None:
    with secured(prefill, decode) as pair:
        assert says in failed(pair)
        with manager("decode", memory(32), security=THEIRS if prefill is OURS else Security()) as good:
            Duo(pair.prefill, good, pair.source, memory(32)).open()[1].receive([1])
            wait_until(lambda: good.stats().peers == 1)


def test_a_sender_that_waits_for_one_who_is_refused_says_so_when_its_limit_passes() -> None:
    with secured(OURS, STRANGER.with_peers(PREFILL), limits={"bootstrap_s": 3.0}) as pair:
        sender, receiver = pair.open()
        with sender, receiver:
            ended(receiver, KVPoll.FAILED)
            ended(sender, KVPoll.FAILED)
            assert sender.failure is not None
            assert f"the control port refused 1 connections, the latest: curve key {STRANGER.public}" in sender.failure.reason


def test_a_rank_that_has_another_key_by_now_is_dialled_anew_by_those_who_wait() -> None:
    """What the bootstrap service says of a rank's key may be outdated: it is asked again, and the old way is given up."""
    allowing = DECODE.with_peers(PREFILL, STRANGER)
    source, target = memory(32, seed=7), memory(32)
    with (
        manager("prefill", source, security=OURS) as prefill,
        manager("decode", target, security=allowing) as decode,
        serving() as http,
    ):
        address = f"127.0.0.1:{http.serve(BootstrapService(1).app(), '127.0.0.1', 0, 'test')}"
        control = f"127.0.0.1:{prefill.control.port}"
        register(address, RankInfo(0, 1, control, "prefill-old", 1, "local", curve=STRANGER.public))
        receivers = [decode.receiver(number(), address) for _ in range(3)]
        wait_until(lambda: prefill.stats().counters["kvcore_refused_peers_total"] > 0)
        register(address, RankInfo(0, 1, control, prefill.instance, 2, "local", curve=PREFILL.public))
        for receiver in receivers:
            with receiver, prefill.sender(receiver.room) as sender:
                receiver.receive([1])
                sender.send([2], last=True)
                ended(receiver, KVPoll.SUCCESS)
        assert Duo(prefill, decode, source, target).equal([2], [1])


def test_an_instance_that_comes_back_with_another_key_works_once_that_is_allowed() -> None:
    source, target = memory(32, seed=7), memory(32)
    ports = {"port": free_port(), "bootstrap_port": free_port()}
    with manager("decode", target, security=DECODE.with_peers(PREFILL, STRANGER)) as decode:
        for keys in (PREFILL, STRANGER):
            with manager("prefill", source, security=keys.with_peers(DECODE), **ports) as prefill:
                Duo(prefill, decode, source, target).transfer([1], [2])
        with manager("prefill", source, security=Pair.fresh().with_peers(DECODE), **ports) as prefill:
            assert "is not allowed here" in failed(Duo(prefill, decode, source, target))
        with manager("prefill", source, security=PREFILL.with_peers(DECODE), **ports) as prefill:
            Duo(prefill, decode, source, target).transfer([1], [2])


def test_an_instance_that_comes_back_without_keys_is_dialled_no_more() -> None:
    source, target = memory(32, seed=7), memory(32)
    ports = {"port": free_port(), "bootstrap_port": free_port()}
    with manager("decode", target, security=THEIRS) as decode:
        with manager("prefill", source, security=OURS, **ports) as prefill:
            Duo(prefill, decode, source, target).transfer([1], [2])
        with manager("prefill", source, **ports) as prefill:
            assert "set security.curve_secret there" in failed(Duo(prefill, decode, source, target))


def test_all_sockets_are_closed_again_and_counted_while_they_are_open() -> None:
    with secured(OURS, THEIRS) as pair:
        assert (pair.prefill.stats().sockets, pair.decode.stats().sockets) == (3, 3), "the port, who is asked, who fails"
        pair.pair()
        assert (pair.prefill.stats().sockets, pair.decode.stats().sockets) == (3, 5)
    assert (pair.prefill.stats().sockets, pair.decode.stats().sockets) == (0, 0)


# --- the token


def ask(address: str, method: str, path: str, token: str | None = None, body: bytes | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=SOON_S)
    try:
        connection.request(method, path, body, {} if token is None else {"Authorization": token})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def register(address: str, info: RankInfo) -> None:
    assert ask(address, "POST", "/v1/ranks", body=msgspec.json.encode(info))[0] == 200


PATHS = [("GET", "/v1/group"), ("GET", "/v1/ranks/0"), ("POST", "/v1/ranks"), ("POST", "/v1/rooms"), ("GET", "/nothing"), ("PUT", "/")]
ADMIN_PATHS = [("GET", "/metrics"), ("GET", "/rooms/1"), ("GET", "/nothing"), ("DELETE", "/metrics")]
WRONG = [
    None,
    "",
    TOKEN,
    f"Bearer {TOKEN}x",
    f"Bearer {TOKEN[:-1]}",
    f"bearer {TOKEN}",
    f"Basic {TOKEN}",
    "Bearer",
    f"Bearer \u00fc{TOKEN}",
]


def test_every_request_bears_the_token_but_those_for_health() -> None:
    with manager("prefill", memory(4), admin="127.0.0.1:0", security=WITH_TOKEN) as prefill:
        for address, paths in ((prefill.address, PATHS), (prefill.admin_address, ADMIN_PATHS)):
            for method, path in paths:
                for wrong in WRONG:
                    status, text = ask(address, method, path, wrong)
                    assert status == 401 and "token (security.token;" in json.loads(text)["error"] and TOKEN not in text
                assert ask(address, method, path, f"Bearer {TOKEN}")[0] != 401
            assert ask(address, "GET", "/health")[0] == 200
        assert ask(prefill.admin_address, "GET", "/metrics", f"Bearer {TOKEN}")[0] == 200
        assert ask(prefill.address, "GET", "/v1/group", f"Bearer {TOKEN}")[0] == 200
        counted = f'kvcore_bad_messages_total{{port="admin"}} {len(ADMIN_PATHS) * len(WRONG) + 2}'
        assert counted in prefill.metrics_text()


def test_instances_with_one_token_find_each_other_and_one_with_another_is_told() -> None:
    with secured(WITH_TOKEN, WITH_TOKEN) as pair:
        pair.transfer([1], [2])
        for wrong, what in ((Security(), "no token"), (Security(token=f"another-{TOKEN}"), "another token")):  # type: ignore[arg-type]
            with manager("decode", memory(32), security=wrong) as decode:
                reason = failed(Duo(pair.prefill, decode, pair.source, pair.target))
                assert f"answered 401: the request bears {what} (security.token; header" in reason and TOKEN not in reason
        pair.transfer([1], [2])


def test_ranks_of_a_group_register_with_the_token_and_one_without_does_not_start() -> None:
    two = {"tp_size": 2}
    with manager("prefill", memory(4), topology=two, security=WITH_TOKEN) as leader:
        with pytest.raises(ConfigError, match="rank 1 cannot register at bootstrap service .*answered 401: the request bears no token"):
            manager("prefill", memory(4), topology={**two, "tp_rank": 1}, bootstrap=leader.address)
        with manager("prefill", memory(4), topology={**two, "tp_rank": 1}, bootstrap=leader.address, security=WITH_TOKEN):
            status, text = ask(leader.address, "GET", "/v1/group", f"Bearer {TOKEN}")
            assert status == 200 and json.loads(text)["size"] == 2


def test_rooms_are_announced_and_found_with_the_token_where_a_group_has_several_data_parallel_ranks() -> None:
    with manager("prefill", source := memory(32, seed=7), topology={"dp_size": 2}, security=WITH_TOKEN) as leader:
        second = {"topology": {"dp_size": 2, "dp_rank": 1}, "bootstrap": leader.address}
        with (
            manager("prefill", memory(32, seed=8), security=WITH_TOKEN, **second),
            manager("decode", target := memory(32), security=WITH_TOKEN) as decode,
        ):
            Duo(leader, decode, source, target).transfer([1], [2])


# --- TLS

HERE = "IP:127.0.0.1"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    folder = tmp_path_factory.mktemp("certificates")
    return {
        "own": certificate(folder),
        "other": certificate(folder, "other"),
        "elsewhere": certificate(folder, "elsewhere", "IP:192.0.2.1"),
    }


def tls(files: dict[str, tuple[str, str]], name: str = "own", ca: str = "own") -> Security:
    cert, key = files[name]
    return Security(tls_cert=cert, tls_key=key, tls_ca=files[ca][0], token=TOKEN)  # type: ignore[arg-type]


def test_rooms_pass_where_the_bootstrap_service_speaks_https(files: dict[str, tuple[str, str]]) -> None:
    with secured(tls(files), tls(files), admin="127.0.0.1:0") as pair:
        pair.transfer([1], [2])
        for address in (pair.prefill.address, pair.decode.admin_address):
            with pytest.raises((http.client.HTTPException, OSError)):
                ask(address, "GET", "/health")
        pair.transfer([1], [2])
        asking = Security(tls_ca=files["own"][0], token=TOKEN)  # type: ignore[arg-type]
        with manager("decode", target := memory(32), security=asking) as decode:
            Duo(pair.prefill, decode, pair.source, target).transfer([1], [2])


@pytest.mark.parametrize(
    ("decode", "says"),
    [
        ({"token": TOKEN}, "; if it speaks TLS, set security.tls_ca here"),
        ({"token": TOKEN, "tls_ca": "other"}, "its certificate is not trusted (self-signed certificate); see security.tls_ca"),
    ],
)
def test_who_asks_a_service_with_tls_wrongly_says_so_when_the_limit_passes(
    decode: dict[str, str], says: str, files: dict[str, tuple[str, str]]
) -> None:
    decode = {name: files[value][0] if name == "tls_ca" else value for name, value in decode.items()}
    with secured(tls(files), Security(**decode), limits={"bootstrap_s": 3.0}) as pair:  # type: ignore[arg-type]
        assert says in failed(pair).replace("self signed", "self-signed")  # as older releases of OpenSSL write it


def test_who_asks_a_service_without_tls_for_it_says_so_when_the_limit_passes(files: dict[str, tuple[str, str]]) -> None:
    with secured(Security(), Security(tls_ca=files["own"][0]), limits={"bootstrap_s": 3.0}) as pair:
        assert "it does not speak TLS" in failed(pair)


def test_a_certificate_of_another_host_is_not_trusted(files: dict[str, tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore.bootstrap_client.Registrar.__init__.__kwdefaults__", {"limit_s": 3.0, "period_s": 3.0})
    with pytest.raises(ConfigError, match=r"cannot register .*its certificate is not trusted \(.*IP address mismatch.*see security.tls_ca"):
        manager("prefill", memory(4), security=tls(files, "elsewhere", "elsewhere"))


def test_a_connection_that_never_finishes_its_handshake_holds_up_nobody(files: dict[str, tuple[str, str]]) -> None:
    with secured(tls(files), tls(files)) as pair:
        host, _, port = pair.prefill.address.rpartition(":")
        idle = [socket.create_connection((host, int(port)), SOON_S) for _ in range(30)]
        for turn in range(3):
            pair.transfer([turn], [turn])
        for one in idle:
            one.close()


# --- nothing shows a secret


def test_secrets_are_in_no_log_error_history_or_metric(caplog: pytest.LogCaptureFixture, files: dict[str, tuple[str, str]]) -> None:
    secrets = (PREFILL.secret, DECODE.secret, STRANGER.secret, TOKEN)
    ours, theirs, wrong = (pair.with_peers(peer, token=TOKEN) for pair, peer in ((PREFILL, DECODE), (DECODE, PREFILL), (STRANGER, PREFILL)))
    with caplog.at_level(logging.DEBUG), secured(ours, theirs, admin="127.0.0.1:0") as pair:
        pair.transfer([1], [2])
        sender, receiver = pair.open()
        receiver.abort()
        ended(sender, KVPoll.FAILED)
        with manager("decode", memory(32), security=wrong) as refused_one:
            texts = [failed(Duo(pair.prefill, refused_one, pair.source, pair.target))]
        for one, handle in ((pair.prefill, sender), (pair.decode, receiver)):
            texts += [one.explain(handle.room), one.metrics_text(), repr(one.stats()), repr(one.config), str(handle.failure)]
            texts += [ask(one.admin_address, "GET", path, f"Bearer {TOKEN}")[1] for path in ("/metrics", f"/rooms/{handle.room}")]
        texts += [repr(vars(thing)) for thing in (pair.prefill._core, pair.prefill._core.channel, pair.prefill._core._http)]
    assert not any(secret in text for secret in secrets for text in (*texts, caplog.text))


def test_threads_are_those_of_any_manager(keyed: Duo) -> None:
    """What keys add happens on the control thread."""
    assert not [thread.name for thread in threading.enumerate() if "zap" in thread.name.lower() or "auth" in thread.name.lower()]
