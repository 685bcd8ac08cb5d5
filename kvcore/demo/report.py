"""What the demo has found, and whether it is as it should be."""

from __future__ import annotations

from dataclasses import dataclass

from kvcore.demo.messages import Ended, Expected, Generated, Settings, Used


@dataclass(frozen=True, slots=True)
class PromptResult:
    """One prompt: what one process generates from it, and what decode generated from the pages it was sent."""

    text: str
    n_tokens: int
    expected: Expected
    generated: Generated

    @property
    def equal(self) -> bool:
        """Whether the tokens are the same, all of them."""
        return self.expected.tokens == self.generated.tokens

    def as_json(self) -> dict[str, object]:
        """Plain values for ``--json``; times in milliseconds."""
        return {
            "text": self.text,
            "tokens": self.n_tokens,
            "equal": self.equal,
            "pages": self.generated.pages,
            "bytes": self.generated.nbytes,
            "moving_ms": round(self.expected.moving_s * 1e3, 3),
            "total_ms": round(self.generated.total_s * 1e3, 3),
            "expected_tokens": list(self.expected.tokens),
            "generated_tokens": list(self.generated.tokens),
            "expected_text": self.expected.text,
            "generated_text": self.generated.text,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """The whole demo: all prompts, how the aborted room ended on both sides, the stores of rooms left on both, and what they used."""

    settings: Settings
    prompts: tuple[PromptResult, ...]
    ended: dict[str, Ended]
    stores: dict[str, dict[str, int]]
    used: dict[str, Used]
    """Of each process: the sides, and where a side has several ranks these too."""

    @property
    def problems(self) -> list[str]:
        """What is not as it should be, each in a few words; empty if all is well."""
        unequal = [room for room, prompt in enumerate(self.prompts) if not prompt.equal]
        found = []
        if unequal:
            rooms = ", ".join(str(room) for room in unequal)
            cause = " after a page was zeroed on the way" if self.settings.corrupt else ""
            found.append(f"tokens differ in {len(unequal)} of {len(self.prompts)} prompts (room {rooms}){cause}")
        if self.settings.corrupt and not unequal:
            found.append("a page was zeroed on the way and no token differs; these prompts do not show it")
        for side, end in self.ended.items():
            if (end.state, end.code, end.origin) != ("FAILED", "aborted", "decode"):
                found.append(f"the aborted room is {end.state} on {side} ({end.reason or 'no reason'})")
        for side, sizes in self.stores.items():
            held = ", ".join(f"{name} {size}" for name, size in sizes.items() if size)
            if held:
                found.append(f"stores of {side} are not empty: {held}")
        for side, its in self.used.items():
            if others := ", ".join(name for name in its.imported if name != self.settings.backend.partition("@")[0]):
                found.append(f"{side} has imported other backends too: {others}")
        return found

    @property
    def engine(self) -> str:
        """What moved the pages, with its version."""
        return self.used["prefill"].engine

    @property
    def nbytes(self) -> int:
        """Bytes that decode received for all prompts."""
        return sum(prompt.generated.nbytes for prompt in self.prompts)

    @property
    def summary(self) -> str:
        """The last line."""
        if self.problems:
            return f"failed: {'; '.join(self.problems)}"
        count = len(self.prompts)
        return f"ok: {count} of {count} prompts equal, 1 room aborted, all stores empty"

    def as_json(self) -> dict[str, object]:
        """Plain values for ``--json``."""
        return {
            "ok": not self.problems,
            "summary": self.summary,
            "model": self.settings.model,
            "backend": self.settings.backend,
            "engine": self.engine,
            "bytes": self.nbytes,
            "page_size": self.settings.page_size,
            "prompts": [prompt.as_json() for prompt in self.prompts],
            "aborted": {
                side: {"state": end.state, "reason": end.reason, "code": end.code, "origin": end.origin} for side, end in self.ended.items()
            },
            "stores": self.stores,
            "imported_backends": {side: list(its.imported) for side, its in self.used.items()},
            "problems": self.problems,
        }
