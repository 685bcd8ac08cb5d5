"""The command ``kvcore demo``: options in, lines or JSON out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvcore.demo.driver import SIDES, Watch, run_demo
from kvcore.demo.messages import Settings, Side
from kvcore.demo.report import PromptResult, Report

TEXT_WIDTH = 48
MOST_PAGE_SIZE = 65_536
MOST_S = 86_400.0
LEGEND = (
    "ms moving: a ticket in flight; ms total: from opened to its end, waiting for prefill's computation included; "
    "a prompt's last token is not moved"
)


def _timeout(seconds: float) -> float:
    """An option's callback instead of its ``max``, which lets NaN pass."""
    if not 1 <= seconds <= MOST_S:
        raise typer.BadParameter(f"{seconds:g} is not a number of seconds from 1 to {MOST_S:g}")
    return seconds


def demo(
    context: typer.Context,
    model: Annotated[
        str, typer.Option(metavar="tiny|smollm2|DIR", help="A made-up model, SmolLM2-135M, or a local causal model.")
    ] = "smollm2",
    backend: Annotated[str, typer.Option(metavar="NAME", help="The backend that moves the pages.")] = "local",
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", exists=True, dir_okay=False, readable=True, help="UTF-8, one prompt a line; default: 20 of 1 to 1050 tokens."
        ),
    ] = None,
    page_size: Annotated[int, typer.Option(min=1, max=MOST_PAGE_SIZE, help="Tokens in a page.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each prompt.")] = 16,
    corrupt: Annotated[bool, typer.Option("--corrupt", help="Zero one page on the way, to see that the tokens then differ.")] = False,
    timeout: Annotated[
        float, typer.Option(callback=_timeout, help=f"Seconds without a sign of life before giving up, 1 to {MOST_S:g}.")
    ] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Move a real model's KV cache from a prefill to a decode process and check every token."""
    if model not in ("tiny", "smollm2") and not Path(model).is_dir():
        raise typer.BadParameter(f"{model!r} is not tiny, smollm2 or a folder", param_hint="--model")
    settings = Settings(
        model=model,
        backend=backend,
        prompts=str(prompts) if prompts else None,
        page_size=page_size,
        max_new_tokens=max_new_tokens,
        corrupt=corrupt,
        patience_s=timeout,
        debug=bool(context.obj),
    )
    with _progress() as watch:
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
    yield f"model {settings.model}, backend {settings.backend}, {settings.page_size} tokens a page; prefill and decode are processes"
    yield "room tokens pages       bytes ms moving ms total  equal  prompt -> generated"
    for room, prompt in enumerate(report.prompts):
        yield f"{room:>4} {_row(prompt)}"
        if not prompt.equal:
            yield f"     expected {_short(prompt.expected.text)}"
    yield LEGEND
    yield f"room {len(report.prompts)}, aborted by decode in the middle of its transfer:"
    for side in SIDES:
        end = report.ended[side]
        yield f"  {side:8} {end.state}: {end.reason or 'no reason'} ({end.code or 'no code'}, from {end.origin or 'nowhere'})"
    yield "stores of rooms, all rooms cleared:"
    for side in SIDES:
        yield f"  {side:8} {', '.join(f'{name} {size}' for name, size in report.stores[side].items())}"
    yield report.summary


def _row(prompt: PromptResult) -> str:
    moved = prompt.generated
    times = f"{prompt.expected.moving_s * 1e3:>9.1f} {moved.total_s * 1e3:>8.0f}"
    texts = f"{_short(prompt.text)} -> {_short(moved.text)}"
    return f"{prompt.n_tokens:>6} {moved.pages:>5} {moved.nbytes:>11,} {times}  {'yes' if prompt.equal else 'NO':5}  {texts}"


def _short(text: str) -> str:
    line = json.dumps(text, ensure_ascii=False)[1:-1]
    return f'"{line}"' if len(line) <= TEXT_WIDTH else f'"{line[: TEXT_WIDTH - 3]}..."'


@contextmanager
def _progress() -> Iterator[Watch]:
    """What both sides are doing, on stderr, if a person watches; else nothing."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks = {side: bar.add_task(f"{side}: starting", total=None) for side in SIDES}

        def watch(side: Side, text: str) -> None:
            bar.update(tasks[side], description=f"{side}: {text}")

        yield watch
