"""The figures for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.beside.rooms import AGREE, FLOORS, PEER, Cost, RawTurn, Result, Spread, Turn

NAMES = {"sglang": "SGLang", "kvcore": "kvcore"}
RATIOS = {
    "rooms_per_s": "rooms/s",
    "p50_ms": "p50",
    "p99_ms": "p99",
    "cpu_us": "CPU",
    "cpu_us_above_raw": "CPU above the engine alone",
}


def table(results: Sequence[Result]) -> Iterator[str]:
    """All cases, one after the other."""
    for one in results:
        counts = " or ".join(str(count) for count in sorted(set(one.descriptors.values())))
        yield f"{one.backend} {one.config}: {one.room_bytes} bytes by {counts} descriptors, {one.in_flight} in flight"
        yield f"  {'':<26} {'rooms/s':>22} {'GB/s':>6} {'p50 ms':>22} {'p99 ms':>22} {'CPU us: prefill':>22} {'decode':>22}"
        for system, turns in one.turns.items():
            yield _system(NAMES[system], turns)
        for name, raw in one.raw.items():
            yield _raw(name, raw)
        between = [f"{text} {one.ratios[name]}" for name, text in RATIOS.items() if name in one.ratios]
        if between:
            yield "  kvcore over SGLang: " + ", ".join(between)
        for system, text in NAMES.items():
            if f"{system}_rate_over_raw" in one.ratios:
                yield f"  {text}'s rate over the engine alone: {one.ratios[f'{system}_rate_over_raw']}"
        yield "  idle, % of a core: " + ", ".join(
            f"{NAMES[system]} {sides['prefill']:.1f} + {sides['decode']:.1f}" for system, sides in one.idle_pct.items()
        )
        if one.raw_agreement:
            pages, both = (f"{ratio:.2f}" for ratio in one.raw_agreement)
            word = "agree" if one.raw_agrees else "DO NOT AGREE"
            yield f"  the engine alone, {FLOORS} over {PEER}: {pages} for the pages, {both} with side records: {word} within {AGREE:.0%}"
        yield ""


def _system(name: str, turns: Sequence[Turn]) -> str:
    rate, p50, p99 = (_spread(turns, field) for field in ("rooms_per_s", "p50_ms", "p99_ms"))
    gb = Spread.of([turn.gb_per_s for turn in turns]).median
    return f"  {name:<26} {rate:>22} {gb:>6.2f} {p50:>22} {p99:>22} {_cpu(turns)}"


def _raw(name: str, turns: Sequence[RawTurn]) -> str:
    rate = _spread(turns, "rooms_per_s")
    p50 = Spread.of([turn.kv_aux_us / 1e3 for turn in turns])
    return f"  {name:<26} {rate:>22} {'':>6} {p50!s:>22} {'':>22} {_cpu(turns)}"


def _cpu(turns: Sequence[Cost]) -> str:
    return " ".join(f"{_spread(turns, field):>22}" for field in ("prefill_cpu_us", "decode_cpu_us"))


def _spread(turns: Sequence[Cost], field: str) -> str:
    return str(Spread.of([getattr(turn, field) for turn in turns]))
