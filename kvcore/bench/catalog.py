"""What can be measured: where each measurement lives, what tells its results apart, and in words what it is and how it is read."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple


class Of(NamedTuple):
    """A note about a field, read only where a result has it."""

    field: str
    text: str


@dataclass(frozen=True, slots=True)
class Measurement:
    """``module`` has ``Parameters`` and ``Result``; ``names``: the fields of a result that say what it is of; ``reading``: notes."""

    module: str
    names: tuple[str, ...]
    what: str
    reading: tuple[str | Of, ...]

    @property
    def parameters(self) -> type[Any]:
        """Its parameters, a dataclass."""
        return self._type("Parameters")

    @property
    def result(self) -> type[Any]:
        """One of its results, a dataclass."""
        return self._type("Result")

    def name(self, result: Mapping[str, Any]) -> str:
        """What a result is of, for people."""
        return ", ".join(_said(name, result[name]) for name in self.names if name in result and (name, result[name]) != ("waiting", 0))

    def notes(self, results: Sequence[Mapping[str, Any]], several: bool) -> Iterator[str]:
        """How these results are read; ``several``: whether they are of several ranks a side."""
        there = {name for result in results for name, value in result.items() if value is not None}
        for note in self.reading:
            if isinstance(note, str):
                yield note
            elif note.field in there:
                yield note.text
        if several:
            yield RANKS
            yield from [ALONE_ONLY] * any(isinstance(note, Of) for note in self.reading)

    def _type(self, name: str) -> type[Any]:
        found: type[Any] = getattr(importlib.import_module(f"kvcore.bench.{self.module}"), name)
        assert is_dataclass(found) and fields(found)
        return found


ROOM = (
    "kvcore moves the KV cache of LLM requests from prefill to decode instances. A room is one hand-off of one request, whose pages go "
    "from prefill's memory to decode's; it ends as SUCCESS or as FAILED."
)
BESIDE = (
    Of(
        "raw",
        '"Engine alone" (raw) is the engine of the backend used directly, in the same two processes, with the same bytes by the same '
        "descriptors, by the fastest of its own ways; its turns and kvcore's alternate. It pairs nobody, opens no room and could not "
        "tell when one is over.",
    ),
    Of(
        "bare",
        '"Bare machine" (bare) is a message of 200 bytes there and back over ZeroMQ between the same two processes, the same of two of a '
        "room's letters that are made and read in Python (letters), and one thread's copy of the same pages.",
    ),
)
RANKS = (
    "Of several ranks a side (topology pNdM: N of prefill and M of decode, each a process) a room is one room on all of them: a page "
    "holds all heads over a whole side, and each rank its share. A room's time is from the first rank that begins to the last that ends; "
    "CPU time and memory are those of all ranks of a side together."
)
ALONE_ONLY = "Neither the engine alone nor the bare machine stands beside several ranks, since these are of two processes."
CPU = "CPU time is that of whole processes, all their threads."
SPREAD = (
    "A figure that each repeat has one of is their median; the least and the most of them stand beside it, and as a thin line in the plots."
)
TOGETHER = (
    "Times of which each repeat has many, one a room or request, are of all repeats together: their median, their percentiles and the most "
    "of them. The least and the most beside such a figure are of the repeats' own; where none stand, it is of all together only."
)

MEASUREMENTS = {
    "bench rooms": Measurement(
        "rooms",
        ("measured_from", "waiting", "in_flight"),
        "How many rooms a second go from prefill to decode, how long one takes, and what it costs. A room has one page, so "
        "what counts is all that kvcore does for a room beside the copy: it is opened on both sides, published, announced, moved, "
        "acknowledged and cleared. Every byte is compared with what was sent, outside the measured time.",
        (
            "Latency is what the caller on decode sees until SUCCESS. With many rooms in flight most of it is the queue in front of the "
            "cores.",
            CPU,
            *BESIDE,
            Of(
                "latency_over_wire",
                "With one room in flight, latency over the wire (latency_over_wire) is the latency over the engine's own transfer and the "
                "control messages it cannot do without, each half a round trip of the bare machine: 1 would be as fast as the wire.",
            ),
            SPREAD,
            TOGETHER,
        ),
    ),
    "bench bandwidth": Measurement(
        "bandwidth",
        ("page_bytes", "order"),
        "How many bytes a second one room at a time moves from prefill to decode, and what they cost, by the size of a page. "
        "Every byte is compared with what was sent, outside the measured time.",
        ("A GB is 10^9 bytes, a GiB 2^30.", CPU, *BESIDE, SPREAD),
    ),
    "bench abort": Measurement(
        "abort",
        ("aborted_by", "rooms"),
        "How long it takes, while many rooms are live (open on both sides, and not over), until the other side of a room knows that it was "
        "aborted: from the call of abort on one side until a thread of the other side that waits for the room has seen FAILED.",
        (TOGETHER,),
    ),
    "bench kill": Measurement(
        "kill",
        ("struck", "signal", "stage"),
        "How long it takes until the rooms of one side have failed with a reason after the other side was killed (SIGKILL) or "
        "fell silent (SIGSTOP): until a thread that waits for the room has seen FAILED. As many rooms are at each of three stages: joined, "
        "which is open on both sides with nothing published yet; published, so that prefill knows decode's pages, with nothing handed over "
        "yet; and transferring, of which a first chunk has been moved and the last is to come.",
        (
            "The liveness limit (liveness_s) counts from the last message that the side sent before it was struck, not from the signal.",
            "The code of a failure says what it was: PEER_LOST, the other side is gone or silent; BACKEND, the transfer engine reported a "
            "failure; docs/failures.md has them all.",
            "That a process is gone is seen on the same host before the liveness limit; across hosts there is only its silence, for which "
            "a process stands here that is stopped.",
            TOGETHER,
        ),
    ),
    "bench idle": Measurement(
        "idle",
        ("rooms",),
        "What a paired prefill and decode cost while nothing moves, without rooms and with many that wait, published on decode "
        "with nothing handed over on prefill: the CPU time of each as a share of one core, the engine's threads included; the time of one "
        "poll_all, the call by which a scheduler asks how all its rooms are; and the memory that each room takes.",
        (
            "100 % would be one core that is always busy.",
            "Memory is what is resident and no other's, over what was before the rooms were opened, by room. The flight record is full "
            "before that: it is bounded, and no room's. It is measured once.",
            SPREAD,
        ),
    ),
    "bench trace": Measurement(
        "trace",
        ("requests",),
        "How a trace of requests goes from prefill to decode when each comes at its time: how long it queues for pages, how "
        "long its transfer takes, how many end within a limit, and what was not sent since decode still had it. Every page, sent or "
        "skipped, is compared with what it ought to be, on a thread beside the measured loops.",
        (
            "Queueing is from a request's arrival until both sides have pages for it; transfer from when prefill has also written them "
            "until decode's loop sees SUCCESS; total is all of it.",
            "A request is good if its total is within the limit.",
            'Decode holds the pages of a request for so long as "token ms" says for each token of its output.',
            "CPU time is that of whole processes, all their threads, without writing and comparing pages.",
            *BESIDE,
            Of(
                "raw",
                "The engine alone moves the pages of one request after the other, while requests of a trace come at their own times, some "
                "of them together.",
            ),
            SPREAD,
            TOGETHER,
        ),
    ),
    "bench plan": Measurement(
        "plan",
        ("case",),
        "How long the planner takes from the indices of a chunk's pages, which are handed over at once, to the engine's descriptors, which "
        "name the copies to be made; in one process, without a backend or memory.",
        ("Each case has a target, which its median must not pass.", SPREAD),
    ),
}


WORDS = {
    "rooms": "rooms",
    "in_flight": "rooms in flight",
    "page_bytes": "bytes of a page",
    "room_bytes": "bytes of a room",
    "order": "how pages lie",
    "repeats": "repeats",
    "measured_from": "the clock starts at",
    "waiting": "rooms that wait meanwhile",
    "liveness_s": "liveness limit, in seconds",
    "gap_s": "seconds from abort to abort",
    "window_s": "seconds looked at",
    "requests": "requests at most",
    "speed": "times as fast as in the trace",
    "page_tokens": "tokens of a page",
    "memory_bytes": "bytes of either side's memory",
    "limit_ms": "milliseconds that a good request may take",
    "step_ms": "milliseconds from look to look at the rooms",
    "options": "options of the backend",
    "host": "address that all processes use",
}
"""Parameters, for people; others by their names."""

NAMES = {
    "in_flight": "{} in flight",
    "waiting": "{} waiting",
    "measured_from": "from {}",
    "page_bytes": "pages of {} bytes",
    "aborted_by": "aborted by {}",
    "rooms": "{} rooms",
    "requests": "{} requests",
    "pages": "{} pages",
    "regions": "{} regions",
    "cut": "batches of {}",
    "ranks": "{} ranks",
}
"""What a result is of, for people."""


def _said(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(_said(*each) for each in value.items() if each[1] is not None and each[0] != "target_ms")
    if isinstance(value, bool):
        return name if value else f"not {name}"
    return NAMES.get(name, "{}").format(value)
