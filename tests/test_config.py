"""Settings: what is refused when a config is built, where settings come from and which place wins."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field, ValidationError, field_validator

from kvcore.config import Config, Limits, Security, Topology, describe, like
from kvcore.errors import ConfigError, KVCoreError
from kvcore.layouts import Place

DEFAULTS = {
    "bootstrap_s": 300,
    "input_s": 300,
    "transfer_s": 300,
    "ticket_s": 60,
    "liveness_s": 15,
    "quarantine_s": 600,
    "orphan_s": 30,
    "send_s": 5,
    "drain_s": 30,
}


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("KVCORE_"):
            monkeypatch.delenv(name)


def refused(error: BaseException, *words: str) -> None:
    assert isinstance(error, ConfigError) and isinstance(error, KVCoreError) and isinstance(error, ValueError)
    for word in words:
        assert word in str(error)
    assert "\n" not in str(error)


def test_the_defaults_are_those_of_the_documentation() -> None:
    assert Limits().model_dump() == DEFAULTS
    config = Config(role="prefill")
    assert (config.backend, config.backend_options, config.host, config.bind) == ("local", {}, "127.0.0.1", "")
    assert (config.port, config.bootstrap_port, config.bootstrap, config.admin) == (0, 0, None, None)
    assert config.topology.place == Place()


def test_any_limit_can_be_below_a_second() -> None:
    short = dict.fromkeys(DEFAULTS, 0.05) | {"quarantine_s": 0.2}
    assert Limits(**short).model_dump() == short


@pytest.mark.parametrize("quarantine", [75, 75.0, 10])
def test_r7_a_quarantine_not_above_liveness_and_ticket_is_refused(quarantine: float) -> None:
    with pytest.raises(ConfigError) as error:
        Limits(quarantine_s=quarantine)
    refused(error.value, "quarantine_s", f"{quarantine:g}", "75")
    assert Limits(quarantine_s=75.1).quarantine_s == 75.1


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "*"])
def test_c78_a_wildcard_is_never_the_address_given_to_peers(host: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config(role="both", host=host)
    refused(error.value, host, "bind")
    assert Config(role="both", bind=host).bind == host


@pytest.mark.parametrize("field", ["port", "bootstrap_port"])
@pytest.mark.parametrize("value", [-1, 65536, "80", 1.0, True, None])
def test_ports_are_integers_in_range(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as error:
        Config(role="both", **{field: value})
    refused(error.value, field, repr(value))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, ("role", "required")),
        ({"role": "sender"}, ("role", "'prefill', 'decode' or 'both'", "'sender'")),
        ({"role": "both", "rol": 1}, ("rol", "1")),
        ({"role": "both", "limits": {"transfers_s": 1}}, ("transfers_s", "1")),
        ({"role": "both", "limits": 5}, ("limits", "5")),
        ({"role": "decode", "topology": {"tp_size": 0}}, ("tp_size", "0")),
        ({"role": "decode", "topology": {"tp_size": 2, "tp_rank": 2}}, ("topology", "tp_rank 2", "0 .. 1")),
        ({"role": "decode", "topology": {"tp_size": 1024, "pp_size": 2}}, ("topology", "2048", "1024")),
        ({"role": "prefill", "topology": {"tp_size": 2, "tp_rank": 1}}, ("rank 1 of 2", "bootstrap")),
        ({"role": "prefill", "bootstrap": "nowhere"}, ("bootstrap", "nowhere")),
        ({"role": "both", "backend_options": [1]}, ("backend_options", "[1]")),
        ({"role": "both", "port": {}}, ("port", "{}")),
    ],
)
def test_wrong_settings_are_named_with_value_and_allowed_form(values: dict[str, Any], says: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        Config(**values)
    refused(error.value, *says)
    assert isinstance(error.value.__cause__, ValidationError)


def test_all_wrong_settings_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        Config(role="x", port=-1)
    refused(error.value, "role", "port")


def test_a_backend_that_is_not_allowed_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        Config(role="both", backend="nixl", security=Security(backends=("local", "mori")))
    refused(error.value, "'nixl'", "'local', 'mori'")
    assert Config(role="both", security=Security(backends=("local",))).backend == "local"


@pytest.mark.parametrize("settings", [Config(role="both"), Limits(), Topology(), Security()])
def test_settings_do_not_change_once_built(settings: BaseModel) -> None:
    name = next(iter(type(settings).model_fields))
    with pytest.raises(ValidationError):
        setattr(settings, name, getattr(settings, name))


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


FILE = """
role = "prefill"
port = 1000
backend_options = { frame = 1 }
[limits]
transfer_s = 10
input_s = 20
"""


def test_c81_argument_wins_over_environment_over_file_and_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "kvcore.toml", FILE)
    monkeypatch.setenv("KVCORE_PORT", "2000")
    monkeypatch.setenv("KVCORE_LIMITS__TRANSFER_S", "11")
    monkeypatch.setenv("KVCORE_BACKEND_OPTIONS__DEPTH", "4")
    with caplog.at_level(logging.INFO, "kvcore.config"):
        config = Config.load(path, port=3000, backend_options={"frame": 2})
    assert (config.role, config.port, config.backend_options) == ("prefill", 3000, {"frame": 2, "depth": 4})
    assert (config.limits.transfer_s, config.limits.input_s) == (11, 20)
    assert sorted(record.getMessage() for record in caplog.records) == [
        f"setting backend_options.frame: 2 from argument wins over 1 from {path}",
        f"setting limits.transfer_s: 11 from environment wins over 10 from {path}",
        f"setting port: 2000 from environment wins over 1000 from {path}",
        "setting port: 3000 from argument wins over 2000 from environment",
    ]


def test_c81_the_same_value_twice_is_not_worth_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVCORE_PORT", "1000")
    with caplog.at_level(logging.INFO, "kvcore.config"):
        assert Config.load(write(tmp_path / "kvcore.toml", FILE), limits={"transfer_s": 10}).port == 1000
    assert caplog.records == []


def test_c81_a_model_as_argument_overrides_only_what_it_sets(tmp_path: Path) -> None:
    config = Config.load(write(tmp_path / "kvcore.toml", FILE), limits=Limits(input_s=5), security=Security())
    assert (config.limits.transfer_s, config.limits.input_s) == (10, 5)


@pytest.mark.parametrize(
    ("variables", "toml", "arguments", "text"),
    [
        ({"KVCORE_LIMITS__TRANSFER_S": "5m"}, "", {}, "limits.transfer_s: must be .*, got '5m' (from KVCORE_LIMITS__TRANSFER_S)"),
        ({"KVCORE_PORT": "70000"}, "port = 80000", {}, "port: .*, got 70000 (from KVCORE_PORT)"),
        ({"KVCORE_PROT": "1"}, "", {}, "prot: there is no such setting, correct its name or remove it, got 1 (from KVCORE_PROT)"),
        ({}, "port = -1", {}, "port: .*, got -1 (from FILE)"),
        ({}, "[limits]\ninput_s = 0", {}, "limits.input_s: must be .*, got 0 (from FILE)"),
        ({"KVCORE_HOST": "0.0.0.0"}, "port = 7000", {}, "host '0.0.0.0' is a wildcard .* (from KVCORE_HOST)"),
        ({"KVCORE_LIMITS__TICKET_S": "70"}, "[limits]\nquarantine_s = 75\ninput_s = 9", {},
         "limits: quarantine_s (75) must be above .* (from FILE, KVCORE_LIMITS__TICKET_S)"),
        ({"KVCORE_PORT": "1"}, "port = 2", {"port": -3}, "port: .*, got -3"),
        ({"KVCORE_PORT": "-1"}, "", {"limits": {"input_s": 0}},
         "port: .*, got -1 (from KVCORE_PORT); limits.input_s: must be .*, got 0"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_told_with_the_place_it_came_from(
    variables: dict[str, str], toml: str, arguments: dict[str, Any], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    path = write(tmp_path / "kvcore.toml", toml)
    with pytest.raises(ConfigError) as error:
        Config.load(path, role="both", **arguments)
    refused(error.value)
    pattern = re.escape(f"Config refused: {text}".replace("FILE", str(path))).replace(r"\.\*", ".*")
    assert re.fullmatch(pattern, str(error.value)), str(error.value)
    assert isinstance(error.value.__cause__, ValidationError)


def test_other_variables_of_the_environment_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOT_KVCORE_PORT", "1")
    assert Config.load(role="both") == Config(role="both")


def test_a_misspelt_variable_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCORE_PROT", "1")
    with pytest.raises(ConfigError) as error:
        Config.load(role="both")
    refused(error.value, "prot", "1")


def test_a_variable_that_sets_part_of_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCORE_LIMITS", "5")
    monkeypatch.setenv("KVCORE_LIMITS__INPUT_S", "5")
    with pytest.raises(ConfigError) as error:
        Config.load(role="both")
    refused(error.value, "KVCORE_LIMITS__INPUT_S")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("-5", -5),
        ("1.5", 1.5),
        (".5", 0.5),
        ("1e3", 1000.0),
        ("none", None),
        ("None", None),
        ("on", "on"),
        ("true", "true"),
        (" true ", " true "),
        ("", ""),
        ("mlx5_0", "mlx5_0"),
        ("0x10", "0x10"),
        ("nan", "nan"),
    ],
)
def test_c101_environment_text_is_a_number_none_or_itself(text: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCORE_BACKEND_OPTIONS__KEY", text)
    read = Config.load(role="both").backend_options["key"]
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "cannot be read"), (b"port = ", "not valid TOML"), (b"\xff\xfe", "not valid TOML"), (b"[limits]\ninput_s = -1", "input_s")],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "kvcore.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        Config.load(path, role="both")
    refused(error.value, says, *([str(path)] if says != "input_s" else []))


class Model(BaseModel):
    size: int = Field(1, le=9)
    names: tuple[str, ...] = ()
    where: Annotated[str, like("a+://b", "a://b")] = ""
    even: int = 2

    @field_validator("even")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("must be\neven")
        return value


@pytest.mark.parametrize("text", ["port = " + "1" * 5000, "a = " + "[" * 5000 + "]" * 5000])
def test_a_file_that_python_refuses_to_read_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "kvcore.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        Config.load(path)
    assert str(error.value).isprintable() and len(str(error.value)) < 400
    with pytest.raises(ConfigError, match="config file 5 cannot be read"):
        Config.load(5)  # type: ignore[arg-type]


def test_a_number_in_the_environment_may_have_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCORE_LIMITS__INPUT_S", "1" * 5000)
    with pytest.raises(ConfigError, match="input_s: must be a finite number of seconds above 0, got inf"):
        Config.load(role="both")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"size": 10}, "Thing refused: size: input should be less than or equal to 9, got 10"),
        ({"even": 3}, "Thing refused: even: must be even, got 3"),
        ({"size": 10, "even": 3}, "Thing refused: size: input should be less than or equal to 9, got 10; even: must be even, got 3"),
        ({"names": "eth0"}, 'Thing refused: names: must be a list, such as ["a", "b"], got \'eth0\''),
        ({"where": "a://bc"}, "Thing refused: where: must be a://b, got 'a://bc'"),
        ({"where": "aa://b\n"}, "Thing refused: where: must be a://b, got 'aa://b\\n'"),
        ({"size": "a\nb"}, "Thing refused: size: input should be a valid integer, unable to parse string as an integer, got 'a\\nb'"),
    ],
)
def test_describe_tells_setting_value_and_allowed_form_in_one_line(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError) as error:
        Model(**values)
    assert describe("Thing", error.value) == text
