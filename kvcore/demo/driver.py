"""Starts the two processes, hears them, and compares what they say. Knows nothing of models."""

from __future__ import annotations

import importlib.util

from kvcore.demo.messages import Begin, Ended, Expected, Generated, Part, Ready, Settings, Stores, Used
from kvcore.demo.report import PromptResult, Report
from kvcore.demo.worker import work
from kvcore.progress import Watch
from kvcore.sides import Sides, ToolError


def run_demo(settings: Settings, watch: Watch) -> Report:
    """Run the whole demo; ``watch`` is told what each side is doing. Raises ``ToolError`` if a process fails, dies or falls silent."""
    for library in ("torch", "transformers"):
        if importlib.util.find_spec(library) is None:
            raise ToolError(f"the demo needs {library}, which is not installed; run: pip install 'kvcore[transformers]'")
    ranks = settings.prefill_tp, settings.decode_tp
    with Sides("demo", work, settings, settings.patience_s, watch, settings.debug, ranks) as sides:
        ready = sides.hear("prefill", Ready)
        begin = Begin(ready.address, ready.lengths)
        for rank in range(1, settings.prefill_tp):
            sides.tell("prefill", begin, rank)
        for rank in range(settings.decode_tp):
            sides.tell("decode", begin, rank)
        expected = [sides.hear("prefill", Expected) for _ in ready.lengths]
        generated = [_generated(sides, settings.decode_tp) for _ in ready.lengths]
        ended = {sides.named(place): end for place, end in sides.hear_all(Ended).items()}
        stores = {sides.named(place): found.sizes for place, found in sides.hear_all(Stores).items()}
        used = {sides.named(place): found for place, found in sides.hear_all(Used).items()}
        sides.close()
    prompts = [PromptResult(*fields) for fields in zip(ready.texts, ready.lengths, expected, generated, strict=True)]
    return Report(settings, tuple(prompts), ended, stores, used)


def _generated(sides: Sides[Settings], decode_tp: int) -> Generated:
    """What decode generates for the next room, from what its other ranks give to the first."""
    for rank in range(1, decode_tp):
        sides.tell("decode", sides.hear("decode", Part, rank))
    return sides.hear("decode", Generated)
