"""A trace of requests, in the format that Mooncake publishes: what is asked of a prefill and a decode instance over time.

A line is a JSON object: ``timestamp`` in milliseconds, ``input_length`` and ``output_length`` in tokens, and ``hash_ids``, one for each
block of 512 tokens of the input, of which the last may be shorter. An id stands for a block and all that come before it, so requests
whose first ids are the same begin alike, and no id stands twice in one line. Other fields are left alone.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from kvcore.errors import ConfigError, one_line

BLOCK_TOKENS = 512
MOST_LINE_BYTES = 1 << 20
MOST_LINES = 1_000_000
FORMAT = "a line is a JSON object with timestamp, input_length, output_length and hash_ids"

Tokens = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Line(msgspec.Struct):
    """A line as it is written."""

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e12)]
    input_length: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    output_length: Tokens
    hash_ids: list[int]


DECODER = msgspec.json.Decoder(Line)


@dataclass(frozen=True, slots=True)
class Request:
    """``arrival_s``: seconds after the trace's first. ``blocks``: a number for each block of the input; equal numbers, in whichever
    request, are the same block after the same blocks."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]

    def pages(self, page_tokens: int) -> list[int]:
        """How many pages of so many tokens each block takes; 512 must be a multiple of it."""
        short = -self.input_tokens % BLOCK_TOKENS // page_tokens
        whole = BLOCK_TOKENS // page_tokens
        return [whole] * (len(self.blocks) - 1) + [whole - short]


def read(path: Path, most: int) -> list[Request]:
    """The first ``most`` requests of a trace, in order of time: lines whose timestamps go backwards are sorted, those of one time stay in
    the file's order. Raises ``ConfigError``, which names file and line, for what is no such trace."""
    lines = heapq.nsmallest(most, _lines(path), key=lambda line: line.timestamp)
    if not lines:
        raise ConfigError(f"trace {path} holds no request; write one a line: {FORMAT}")
    known: dict[tuple[int, int, int], int] = {}
    return [
        Request((line.timestamp - lines[0].timestamp) / 1e3, line.input_length, line.output_length, tuple(_blocks(line, known)))
        for line in lines
    ]


def digest(requests: Sequence[Request]) -> str:
    """The same for the same requests only, as far as they are played alike."""
    return hashlib.sha256(msgspec.json.encode(requests)).hexdigest()[:16]


def _lines(path: Path) -> Iterator[Line]:
    try:
        with path.open("rb") as file:
            number = 0
            while text := file.readline(MOST_LINE_BYTES + 1):
                number += 1
                where = f"trace {path}, line {number}"
                if number > MOST_LINES:
                    raise ConfigError(f"trace {path} has more than {MOST_LINES} lines; give a part of it")
                if len(text) > MOST_LINE_BYTES:
                    raise ConfigError(f"{where}: it is longer than {MOST_LINE_BYTES} bytes; write one request a line: {FORMAT}")
                if text.strip():
                    yield _line(text, where)
    except OSError as error:
        raise ConfigError(f"trace {path} cannot be read ({error.strerror}); give a file of requests: {FORMAT}") from error


def _line(text: bytes, where: str) -> Line:
    try:
        line = DECODER.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: {one_line(error, 200)}; correct it: {FORMAT}") from error
    blocks = -(-line.input_length // BLOCK_TOKENS)
    if len(line.hash_ids) != blocks:
        raise ConfigError(
            f"{where}: {len(line.hash_ids)} hash_ids for an input of {line.input_length} tokens; "
            f"give {blocks}, one for each {BLOCK_TOKENS} tokens"
        )
    if len(set(line.hash_ids)) != blocks:
        twice = next(name for name, count in Counter(line.hash_ids).items() if count > 1)
        raise ConfigError(f"{where}: id {twice} stands in hash_ids twice; an id is of a block and all before it, so give each once")
    return line


def _blocks(line: Line, known: dict[tuple[int, int, int], int]) -> Iterator[int]:
    """Numbers of the blocks. ``known``: those given so far, by the number of the block before, the id, and the tokens in it."""
    before = -1
    for index, name in enumerate(line.hash_ids):
        tokens = min(BLOCK_TOKENS, line.input_length - index * BLOCK_TOKENS)
        before = known.setdefault((before, name, tokens), len(known))
        yield before
