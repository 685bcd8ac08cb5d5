"""Starts the two processes, hears them, and compares what they say. Knows nothing of models."""

from __future__ import annotations

import importlib.util

from kvcore.demo.messages import Begin, Ended, Expected, Generated, Ready, Settings, Stores, Used
from kvcore.demo.report import PromptResult, Report
from kvcore.demo.worker import work
from kvcore.progress import Watch
from kvcore.sides import Sides, ToolError


def run_demo(settings: Settings, watch: Watch) -> Report:
    """Run the whole demo; ``watch`` is told what each side is doing. Raises ``ToolError`` if a process fails, dies or falls silent."""
    for library in ("torch", "transformers"):
        if importlib.util.find_spec(library) is None:
            raise ToolError(f"the demo needs {library}, which is not installed; run: pip install kvcore[transformers]")
    with Sides("demo", work, settings, settings.patience_s, watch, settings.debug) as sides:
        ready = sides.hear("prefill", Ready)
        sides.tell("decode", Begin(ready.address, ready.lengths))
        expected = [sides.hear("prefill", Expected) for _ in ready.lengths]
        generated = [sides.hear("decode", Generated) for _ in ready.lengths]
        ended = sides.hear_both(Ended)
        stores = {side: found.sizes for side, found in sides.hear_both(Stores).items()}
        used = sides.hear_both(Used)
        sides.close()
    prompts = [PromptResult(*fields) for fields in zip(ready.texts, ready.lengths, expected, generated, strict=True)]
    return Report(settings, tuple(prompts), ended, stores, used)
