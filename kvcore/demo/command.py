"""The command ``kvcore demo``: options in, lines or JSON out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from kvcore.cli_options import Backend, Timeout
from kvcore.demo.driver import run_demo
from kvcore.demo.messages import Settings
from kvcore.demo.report import PromptResult, Report
from kvcore.installed import find_backend
from kvcore.progress import progress

TEXT_WIDTH = 48
MOST_PAGE_SIZE = 65_536
LEGEND = (
    "ms moving: a ticket in flight; ms total: from opened to its end, waiting for prefill's computation included; "
    "a prompt's last token is not moved"
)


def demo(
    context: typer.Context,
    model: Annotated[
        str, typer.Option(metavar="tiny|smollm2|DIR", help="A made-up model, SmolLM2-135M, or a local causal model.")
    ] = "smollm2",
    backend: Backend = "local",
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", exists=True, dir_okay=False, readable=True, help="UTF-8, one prompt a line; default: 20 of 1 to 1050 tokens."
        ),
    ] = None,
    page_size: Annotated[int, typer.Option(min=1, max=MOST_PAGE_SIZE, help="Tokens in a page.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each prompt.")] = 16,
    prefill_tp: Annotated[int, typer.Option(min=1, help="Processes of prefill, each with its share of the KV heads.")] = 1,
    decode_tp: Annotated[int, typer.Option(min=1, help="Processes of decode, likewise.")] = 1,
    corrupt: Annotated[bool, typer.Option("--corrupt", help="Zero one page on the way, to see that the tokens then differ.")] = False,
    timeout: Timeout = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Move a real model's KV cache from a prefill to a decode process and check every token."""
    if model not in ("tiny", "smollm2") and not Path(model).is_dir():
        raise typer.BadParameter(f"{model!r} is not tiny, smollm2 or a folder", param_hint="--model")
    find_backend(backend)  # a misspelt name should not wait for the model
    settings = Settings(
        model=model,
        backend=backend,
        prompts=str(prompts) if prompts else None,
        page_size=page_size,
        max_new_tokens=max_new_tokens,
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        corrupt=corrupt,
        patience_s=timeout,
        debug=bool(context.obj),
    )
    with progress() as watch:
        report = run_demo(settings, watch)
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    else:
        typer.echo("\n".join(lines(report)))
    if report.problems:
        raise typer.Exit(1)


def lines(report: Report) -> Iterator[str]:
    """The report for people, ending with its summary."""
    settings = report.settings
    moved_by = f"backend {settings.backend} ({report.engine})"
    yield f"model {settings.model}, {moved_by}, {settings.page_size} tokens a page; {_processes(settings)}"
    yield "room tokens pages       bytes ms moving ms total  equal  prompt -> generated"
    for room, prompt in enumerate(report.prompts):
        yield f"{room:>4} {_row(prompt)}"
        if not prompt.equal:
            yield f"     expected {_short(prompt.expected.text)}"
    yield LEGEND
    yield f"room {len(report.prompts)}, aborted by decode in the middle of its transfer:"
    for side, end in report.ended.items():
        yield f"  {side:10} {end.state}: {end.reason or 'no reason'} ({end.code or 'no code'}, from {end.origin or 'nowhere'})"
    yield "stores of rooms, all rooms cleared:"
    for side, sizes in report.stores.items():
        yield f"  {side:10} {', '.join(f'{name} {size}' for name, size in sizes.items())}"
    yield report.summary


def _processes(settings: Settings) -> str:
    if settings.prefill_tp == settings.decode_tp == 1:
        return "prefill and decode are processes"
    return f"prefill is {settings.prefill_tp} processes and decode {settings.decode_tp}, by KV heads"


def _row(prompt: PromptResult) -> str:
    moved = prompt.generated
    times = f"{prompt.expected.moving_s * 1e3:>9.1f} {moved.total_s * 1e3:>8.0f}"
    texts = f"{_short(prompt.text)} -> {_short(moved.text)}"
    return f"{prompt.n_tokens:>6} {moved.pages:>5} {moved.nbytes:>11,} {times}  {'yes' if prompt.equal else 'NO':5}  {texts}"


def _short(text: str) -> str:
    line = json.dumps(text, ensure_ascii=False)[1:-1]
    return f'"{line}"' if len(line) <= TEXT_WIDTH else f'"{line[: TEXT_WIDTH - 3]}..."'
