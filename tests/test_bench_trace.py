"""``kvcore bench trace``: traces as they are read, pages as they are shared, and a replay whose every figure is counted again."""

from __future__ import annotations

import json
import random
from itertools import count

from tests.helpers import ROOT

SAMPLE = ROOT / "examples" / "trace.jsonl"

# --- the sample


def sample(seed: int, conversations: int = 12, turns: int = 4) -> str:
    """Conversations over a minute that share the start of a system's prompt; each turn's input is all that was said before and
    something new. As many requests as there are turns, in order of time."""
    chance, names = random.Random(seed), count(2)
    requests = []
    for _ in range(conversations):
        at_ms, tokens, blocks = int(20_000 * chance.random()), 1024, [0, 1]
        for _ in range(turns):
            tokens += 60 + int(1600 * chance.random() ** 2)
            blocks += [next(names) for _ in range(-(-tokens // 512) - len(blocks))]
            output = 20 + int(280 * chance.random())
            requests.append({"timestamp": at_ms, "input_length": tokens, "output_length": output, "hash_ids": list(blocks)})
            if tokens % 512:
                blocks.pop()  # it will be another one once more is written into it
            tokens += output
            at_ms += 4000 + int(8000 * chance.random())
    return "".join(json.dumps(request) + "\n" for request in sorted(requests, key=lambda request: request["timestamp"]))


def test_the_sample_is_what_its_generator_makes() -> None:
    assert SAMPLE.read_text(encoding="utf-8") == sample(seed=9)
