"""B: on which threads hooks are called, beside which others, and for how long."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest

from kvcore import Capabilities
from kvcore_conformance.marks import full, rule
from kvcore_conformance.stage.arena import Pair, number, paired
from kvcore_conformance.stage.bare import PROMPT_S, Bare, brief, engines
from kvcore_conformance.stage.crew import Crew
from kvcore_conformance.stage.driver import error_of
from kvcore_conformance.stage.frozen import standing_still
from kvcore_conformance.stage.waits import SOON_S, until

BUSY_S = 0.005
"""What a hook that should take a millisecond takes as a median, on a machine that is busy."""
STALL_S = 3.0
"""What goes to another peer has ended by then, whatever is the matter with one."""
BOUND_S = 10.0
"""A connect has ended by then, whatever it was given."""
KV = {"kv": (range(48), range(48))}


def mixed(pair: Pair, rooms: int) -> None:
    """A load of transfers, aborts and clears, several rooms at once."""
    ends = []
    for n in range(rooms):
        room = pair.open()
        room.receive()
        room.send()
        if n % 3 == 1:
            room.side("prefill" if n % 2 else "decode").abort("not this one")
        ends.append(room)
    for room in ends:
        room.sender.wait()
        room.receiver.wait()
        room.clear()
        pair.accept(room)


@rule("B5")
def test_b5_hooks_come_from_the_cores_threads_and_not_beside_each_other(crew: Crew) -> None:
    with paired(crew, meet=False) as pair:
        both = (pair.prefill, pair.decode)
        for child in both:
            child.work("aid", "spy:Spy", "spy")
        pair.transfer()
        mixed(pair, 12)
        for child in both:
            child.call("manager", "close")
            called = child.call("spy", "called")
            strangers, beside = child.call("spy", "strangers"), child.call("spy", "beside")
            assert {"kvcore_connect", "kvcore_close"} <= set(called), f"on {child.role} only these hooks were called: {called}"
            assert not strangers, f"hooks of {child.role} were called on threads that are not the core's: {strangers}"
            assert not beside, f"hooks of {child.role} ran beside each other: {beside}"


@rule("B5")
@pytest.mark.parametrize(("state", "within"), [("gone", SOON_S), pytest.param("standing still", BOUND_S, marks=full)])
def test_b5_a_peer_that_cannot_be_reached_stalls_no_other(bare: Bare, crew: Crew, able: Capabilities, state: str, within: float) -> None:
    """To connect to it ends, whether or not it says so, and what goes to another peer meanwhile arrives: while it lasts, unless no hook
    may run beside another."""
    with engines(crew, "decode") as (other,):
        other.start()
        away = other.peer()
        if state == "gone":
            other.child.kill()
        with standing_still(other.child) if state != "gone" else nullcontext():
            room = number()
            bare.expect(KV)
            bare.prefill.do("begin_connect", away)
            bare.prefill.post("big", room, bare.to, KV, times=5)
            ended = bare.prefill.do("wait", "big", STALL_S, waits_s=STALL_S)
            stalls = not ended and bare.prefill.do("connects")
            error = error_of(lambda: bare.prefill.do("end_connect", within))
            assert error is None or error.kind != "TimeoutError", f"to connect to a peer that is {state} has not ended after {within:g} s"
            assert able.exclusive or not stalls, (
                f"{STALL_S:g} s beside a connect to a peer that is {state} transfers to another had not ended"
            )
            states = bare.prefill.ends("big")
            assert set(brief(states)) == {"done"}, f"while a peer was {state}, transfers to another ended as {brief(states)}"
            bare.intact()
            bare.prefill.do("clear", room)
        bare.prefill.do("disconnect", away["id"])


@rule("B5")
def test_b5_a_peer_that_stands_still_in_a_write_stalls_no_other(bare: Bare, crew: Crew, able: Capabilities) -> None:
    """Unless its write blocks the only transfer that there may be: of several the core keeps one for the others."""
    most = (1 if able.exclusive else able.parallel) - 1 if able.blocking else 20
    if not most:
        return
    with engines(crew, "decode") as (other,):
        other.start()
        Bare(bare.prefill, other).join()
        stuck, free = number(), number()
        bare.prefill.post("stuck", stuck, other.instance, KV, times=most)
        until(lambda: bool(other.memory.changed("kv")), "the first bytes arrive")
        bare.expect(KV)
        with standing_still(other.child):
            bare.prefill.post("free", free, bare.to, KV)
            arrived = "a peer stands still in the middle of a write, and what goes to another arrives"
            until(lambda: not bare.decode.memory.wrong("kv"), arrived, STALL_S)
        states = bare.prefill.ends("free")
        assert set(brief(states)) == {"done"}, f"while a peer stood still, a transfer to another ended as {brief(states)}"
        bare.intact()
        bare.prefill.do("wait", "stuck", SOON_S, waits_s=SOON_S)
        for room in (stuck, free):
            bare.prefill.do("clear", room)
        bare.prefill.do("disconnect", other.instance)


@rule("B6")
def test_b6_hooks_on_the_progress_thread_are_quick(crew: Crew) -> None:
    with paired(crew) as pair:
        for child in (pair.prefill, pair.decode):
            child.work("aid", "spy:Spy", "spy")
        mixed(pair, 12)
        for child in (pair.prefill, pair.decode):
            took = child.call("spy", "quick")
            slow = {
                hook: f"{least * 1000:.1f} and {median * 1000:.1f} ms" for hook, (least, median) in took.items()
                if least > PROMPT_S or median > BUSY_S
            }  # fmt: skip
            assert not slow, f"hooks of {child.role} that must return within a millisecond take, at the least and as a median: {slow}"


def senseless(bare: Bare) -> list[dict[str, str]]:
    """Peers whose endpoints are not what any engine has said. The first names this one whole, with bytes behind it that may be ignored."""
    good = bare.decode.peer()
    whole = bytes.fromhex(good["data"])
    some = (whole + b"\xff" * 9, b"", b"\0" * 64, random.Random(1).randbytes(200), whole[: len(whole) // 2])
    return [{**good, "id": f"stranger-{number()}", "data": data.hex()} for data in some]


@rule("B5")
def test_b5_a_connect_to_what_makes_no_sense_ends(bare: Bare) -> None:
    """Whether or not it says so (T7)."""
    for bad in senseless(bare):
        error = error_of(lambda bad=bad: bare.prefill.do("connect", bad, within=BOUND_S))  # type: ignore[misc]
        if error is not None and error.kind == "TimeoutError":
            bare.prefill.child.end()  # it serves no more
            pytest.fail(f"to connect to an endpoint that begins with {bad['data'][:40]!r} (hex) has not ended after {BOUND_S:g} s")
        error_of(lambda bad=bad: bare.prefill.do("disconnect", bad["id"]))  # type: ignore[misc]


@rule("T7")
def test_t7_an_endpoint_that_makes_no_sense_is_an_error_of_that_peer_only(bare: Bare) -> None:
    for n, bad in enumerate(senseless(bare)):
        error = error_of(lambda bad=bad: bare.prefill.do("connect", bad, within=BOUND_S))  # type: ignore[misc]
        assert error is not None or n == 0, f"to connect to an endpoint that begins with {bad['data'][:40]!r} (hex) raised nothing"
        if error is not None and error.kind == "TimeoutError":  # a matter of B5, and this engine serves no more
            bare.prefill.child.end()
            return
        bare.prefill.do("disconnect", bad["id"])
    bare.moves({"kv": ([5], [6])})
