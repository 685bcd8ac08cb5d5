"""Keys, tokens and certificates as settings: what is refused, what is read from files, what is never shown, what is warned of."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvcore import Config, KVManager, Pool, Security, access
from kvcore.access import Access, CurveKeys, unlike
from kvcore.config import display
from kvcore.errors import ConfigError
from tests.commands import kvcore as run
from tests.helpers import manager, memory
from tests.secured import TOKEN, Pair, certificate

PAIR, OTHER = Pair.fresh(), Pair.fresh()


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("KVCORE_"):
            monkeypatch.delenv(name)


def access_of(**security: Any) -> Access:
    return Access.of(Config(role="decode", security=Security(**security)))


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


# --- what is refused


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"curve_secret": PAIR.secret[1:]}, ("curve_secret: must be", "40 characters")),
        ({"curve_secret": '"' * 40}, ("curve_secret: must be",)),
        ({"curve_secret": 5}, ("curve_secret: ",)),
        ({"curve_secret": PAIR.secret, "curve_peers": PAIR.public}, ("curve_peers: must be a list",)),
        ({"curve_secret": PAIR.secret, "curve_peers": [PAIR.public, PAIR.secret[:39]]}, ("curve_peers.1: must be",)),
        ({"curve_secret": PAIR.secret, "curve_secret_file": "f"}, ("both", "leave one out")),
        ({"curve_peers": [PAIR.public]}, ("no key", "set curve_secret")),
        ({"token": "fifteen-of-them"}, ("token: must be", "16")),
        ({"token": "sixteen and blank"}, ("token: must be",)),
        ({"token": 1234567890123456}, ("token: ",)),
        ({"token": TOKEN, "token_file": "f"}, ("both", "leave one out")),
        ({"tls_cert": "c", "tls_ca": "a"}, ("tls_key", "set both")),
        ({"tls_key": "k", "tls_ca": "a"}, ("tls_cert", "set both")),
        ({"tls_cert": "c", "tls_key": "k"}, ("tls_ca",)),
        ({"tokn": TOKEN}, ("tokn: there is no such setting",)),
    ],
)
def test_wrong_settings_are_named_and_no_value_is_shown(settings: dict[str, Any], says: tuple[str, ...]) -> None:
    for make in (lambda: Security(**settings), lambda: Config(role="decode", security=settings)):  # type: ignore[arg-type]
        with pytest.raises(ConfigError) as error:
            make()
        chain = f"{error.value} {error.value.__cause__} {error.value.__cause__!r}"
        assert all(word in str(error.value) for word in says) and "\n" not in str(error.value)
        for value in settings.values():
            for text in value if isinstance(value, list) else [str(value)]:
                assert len(text) < 15 or text not in chain


def test_a_prefill_group_whose_instances_ask_over_tls_serves_tls() -> None:
    with pytest.raises(ConfigError, match="the bootstrap service here has no certificate; set security.tls_cert"):
        Config(role="prefill", security=Security(tls_ca="a"))
    assert Config(role="decode", security=Security(tls_ca="a")).security.tls_ca == "a"


@pytest.mark.parametrize(
    ("setting", "text", "says"),
    [
        ("curve_secret_file", None, "cannot be read (No such file"),
        ("curve_secret_file", PAIR.secret[1:], "must be a curve key of 40 characters"),
        ("curve_secret_file", "\u00fc" * 40, "must be a curve key of 40 characters"),
        ("curve_secret_file", "#" * 40, "must be a curve key of 40 characters"),
        ("token_file", None, "cannot be read (No such file"),
        ("token_file", "", "must be 16 to 512"),
        ("token_file", "two words of a token", "must be 16 to 512"),
        ("tls_ca", None, "FileNotFoundError"),
        ("tls_ca", "nothing", "give certificates as a PEM file"),
    ],
    ids=["no key file", "short", "not ASCII", "no key", "no token file", "empty", "blanks", "no certificates", "no PEM"],
)
def test_a_file_that_cannot_be_used_is_named_with_its_setting(setting: str, text: str | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        access_of(**{setting: str(path)})
    assert f"security.{setting.removesuffix('_file')}" in str(error.value) and says in str(error.value)
    assert not text or text not in str(error.value)


def test_a_public_key_that_is_none_is_refused_when_a_manager_starts() -> None:
    with pytest.raises(ConfigError, match="security.curve_peers has a text that is no curve key"):
        access_of(curve_secret=PAIR.secret, curve_peers=["#" * 40])


def test_a_certificate_and_key_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    (cert, key), (_, another) = certificate(tmp_path, "one"), certificate(tmp_path, "two")
    assert access_of(tls_cert=cert, tls_key=key, tls_ca=cert).guard.serving is not None
    for wrong in (another, str(tmp_path / "none"), cert):
        with pytest.raises(ConfigError, match="security.tls_cert and tls_key.*cannot be used.*give a certificate and its private key"):
            access_of(tls_cert=cert, tls_key=wrong, tls_ca=cert)


def test_a_key_that_is_encrypted_is_refused_and_nobody_is_asked_for_its_password(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    locked = str(tmp_path / "locked")
    subprocess.run(["openssl", "pkey", "-in", key, "-aes128", "-passout", "pass:hidden", "-out", locked], check=True, timeout=60)
    with pytest.raises(ConfigError, match="cannot be used"):
        access_of(tls_cert=cert, tls_key=locked, tls_ca=cert)


def test_a_pyzmq_without_curve_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access.zmq, "has", lambda what: False)
    with pytest.raises(ConfigError, match="without CURVE; reinstall"):
        access_of(curve_secret=PAIR.secret)


def test_a_manager_whose_keys_cannot_be_read_does_not_start_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="security.token_file"):
        manager("prefill", memory(4), security=Security(token_file=str(tmp_path / "none")))


# --- what is read


def test_secrets_come_from_settings_files_and_the_environment_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = access_of(curve_secret=PAIR.secret, curve_peers=[OTHER.public], token=TOKEN)
    assert given.keys == CurveKeys(PAIR.public, PAIR.secret, frozenset({PAIR.public, OTHER.public})) and given.guard.token == TOKEN
    files = access_of(
        curve_secret_file=write(tmp_path / "key", f"{PAIR.secret}\n"), curve_peers=[OTHER.public],
        token_file=write(tmp_path / "token", f" {TOKEN}\n"),
    )  # fmt: skip
    assert files == given
    monkeypatch.setenv("KVCORE_SECURITY__CURVE_SECRET", PAIR.secret)
    monkeypatch.setenv("KVCORE_SECURITY__TOKEN", TOKEN)
    loaded = Config.load(write(tmp_path / "kvcore.toml", f"role = 'decode'\n[security]\ncurve_peers = ['{OTHER.public}']"))
    assert Access.of(loaded) == given


def test_an_instance_lets_its_own_key_in_and_without_a_list_no_other() -> None:
    keys = access_of(curve_secret=PAIR.secret).keys
    assert keys is not None and keys.allowed == {PAIR.public}
    assert access_of() == Access(None, access.OPEN)


@pytest.mark.parametrize("text", ["1234567890123456", "00000000000000001", "1e5000000000000000", "1.0000000000000000"])
def test_a_token_in_the_environment_that_looks_like_a_number_stays_as_it_is(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCORE_SECURITY__TOKEN", text)
    assert Access.of(Config.load(role="decode")).guard.token == text
    monkeypatch.setenv("KVCORE_SECURITY__TOKEN", "none")
    assert Access.of(Config.load(role="decode")).guard.token == ""


def test_new_keys_are_a_pair_of_which_only_the_owner_can_read_the_secret_one(tmp_path: Path) -> None:
    path = tmp_path / "key"
    done = run("keys", str(path))
    assert done.returncode == 0 and stat.S_IMODE(path.stat().st_mode) == 0o600
    keys = access_of(curve_secret_file=str(path)).keys
    assert keys is not None and done.stdout.strip() == keys.public and keys.secret not in done.stdout + done.stderr
    again = run("keys", str(path))
    assert again.returncode == 1 and "give a file that is not there yet" in again.stderr and path.read_text().strip() == keys.secret


@pytest.mark.parametrize(
    ("keys", "theirs", "says"),
    [
        (None, "", ""),
        (None, PAIR.public, "this instance has none; set security.curve_secret here"),
        (CurveKeys(PAIR.public, "", frozenset({PAIR.public})), PAIR.public, ""),
        (CurveKeys(PAIR.public, "", frozenset({PAIR.public})), "", "set security.curve_secret there"),
        (CurveKeys(PAIR.public, "", frozenset({PAIR.public})), OTHER.public, "is not allowed here; add it to security.curve_peers"),
    ],
    ids=["neither has", "theirs only", "own", "ours only", "not allowed"],
)
def test_who_cannot_be_dialled_is_told_which_side_has_keys(keys: CurveKeys | None, theirs: str, says: str) -> None:
    found = unlike(keys, theirs)
    assert says in found and bool(says) == bool(found)


# --- what is never shown


def test_secrets_are_in_no_text_of_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "kvcore.toml", f"role = 'decode'\n[security]\ntoken = '{TOKEN}-of-the-file'\ncurve_secret = '{OTHER.secret}'")
    monkeypatch.setenv("KVCORE_SECURITY__TOKEN", TOKEN)
    monkeypatch.setenv("KVCORE_SECURITY__CURVE_SECRET", PAIR.secret)
    with caplog.at_level(logging.DEBUG):
        config = Config.load(path, security=Security(token=f"{TOKEN}-of-the-argument"))  # type: ignore[arg-type]
    made = Access.of(config)
    assert "setting security.token: a value that is not shown from environment wins over a value that is not shown from" in caplog.text
    assert made.guard.token == f"{TOKEN}-of-the-argument"
    shown = f"{config!r} {config} {config.model_dump()} {config.model_dump_json()} {made!r} {made.keys!r} {made.guard!r} {caplog.text}"
    assert not any(secret in shown for secret in (TOKEN, PAIR.secret, OTHER.secret))


@pytest.mark.parametrize(
    ("name", "value", "shows"),
    [
        ("port", 5, True),
        ("Config.limits", {"input_s": 5}, True),
        ("security.token", "x", False),
        ("Security.tokn", "x", False),
        ("Config.securty", {"token": "x"}, False),
        ("Config.a", {"b": {"curve_secret": "x"}}, False),
        ("backend_options.password", "x", False),
    ],
)
def test_a_value_is_shown_unless_its_name_says_that_it_may_be_a_secret(name: str, value: object, shows: bool) -> None:
    assert display(name, value) == (repr(value) if shows else "a value that is not shown")


def test_a_misspelt_variable_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCORE_SECURTY__TOKEN", TOKEN)
    with pytest.raises(ConfigError) as error:
        Config.load(role="decode")
    assert "securty: there is no such setting" in str(error.value) and TOKEN not in f"{error.value}{error.value.__cause__}"


# --- what is warned of


def test_a_port_that_others_reach_and_nothing_guards_is_told_once_when_a_manager_starts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvcore"), manager("prefill", memory(4), bind="0.0.0.0", admin="0.0.0.0:0"):
        told = [record.message for record in caplog.records if record.name == "kvcore.access"]
    advice = {"control": "security.curve_secret", "bootstrap": "security.token", "admin": "security.token"}
    assert told == [
        f"the {port} port on 0.0.0.0 is open to all who reach it; set {setting}, or keep it on a closed network"
        for port, setting in advice.items()
    ]


@pytest.mark.parametrize(
    ("settings", "ports"),
    [
        ({}, []),
        ({"bind": "127.0.0.5", "admin": "localhost:0"}, []),
        ({"host": "[::1]", "admin": "[::1]:0"}, []),
        ({"bind": "::"}, ["control", "bootstrap"]),
        ({"bind": "0.0.0.0", "role": "decode"}, ["control"]),
        ({"host": "node-3"}, ["control", "bootstrap"]),
        ({"admin": "10.0.0.1:80"}, ["admin"]),
        ({"bind": "0.0.0.0", "security": Security(curve_secret=PAIR.secret)}, ["bootstrap"]),  # type: ignore[arg-type]
        ({"bind": "0.0.0.0", "security": Security(token=TOKEN)}, ["control"]),  # type: ignore[arg-type]
        ({"bind": "0.0.0.0", "security": Security(token=TOKEN, curve_secret=PAIR.secret)}, []),  # type: ignore[arg-type]
    ],
)
def test_nothing_is_said_of_ports_on_loopback_or_with_keys(
    settings: dict[str, Any], ports: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kvcore.access"):
        Access.of(Config(**{"role": "prefill", **settings}))
    assert [record.message.split()[1] for record in caplog.records] == ports


def test_a_manager_says_nothing_by_default(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvcore"), KVManager(Config(role="decode"), [Pool.from_tensors("kv", memory(4), page_size=16)]):
        assert caplog.records == []
