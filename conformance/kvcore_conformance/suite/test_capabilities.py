"""Of the engine alone, without a manager: what is declared works, and what it says of its tickets is true."""

from __future__ import annotations

import pytest

from kvcore import Capabilities
from kvcore_conformance.marks import full, rule
from kvcore_conformance.stage.arena import POOLS, number
from kvcore_conformance.stage.bare import MOST_BYTES, PROMPT_S, TINY, Bare, State, bare_pair, brief, descriptors, engines
from kvcore_conformance.stage.crew import Crew
from kvcore_conformance.stage.driver import PoolSpec, error_of
from kvcore_conformance.stage.frozen import standing_still
from kvcore_conformance.stage.waits import SOON_S, stays, until

KV, AUX = POOLS
ALL = {"kv": (range(KV.pages), range(KV.pages))}
OLD, NEW = {"kv": (range(24), range(24))}, {"kv": (range(24, KV.pages), range(24, KV.pages))}
MANY = 100
"""So many times all pages: 38 MiB, so that it is still under way when the next call comes."""
FEW = 20
LIVE = 400
"""Tickets at once."""
TRIES, FREEZES = 5, 3
GLANCE_S = 0.06
"""Long enough for whoever calls a small ticket done too early."""
STANDS_S = 1.2
LIMIT_BYTES = 17 << 20
"""A transfer's bytes where the backend sets no limit: more than 24 bits say."""


def under_way(bare: Bare, name: str, times: int = MANY) -> int:
    """A batch that takes its time; its room."""
    room = number()
    bare.prefill.post(name, room, bare.to, ALL, times=times)
    until(lambda: bool(bare.decode.memory.changed("kv")), "the first bytes arrive")
    return room


# --- what a ticket's end means


@rule("R6")
def test_r6_a_ticket_that_is_done_has_all_its_bytes_in_place(bare: Bare) -> None:
    """Of two that run at once each is looked at the instant that it is done."""
    front, back = {"kv": (range(40), range(40))}, {"kv": (range(40, 48), range(47, 39, -1))}
    room = number()
    bare.expect(front)
    bare.expect(back)
    bare.prefill.post("front", room, bare.to, front, times=MANY)
    bare.prefill.post("back", room, bare.to, back)
    for name, pages in (("back", back), ("front", front)):
        states = bare.prefill.ends(name)
        lacks = set(bare.decode.memory.wrong("kv")) & set(pages["kv"][1])
        assert not lacks or brief(states) != {"done": len(states)}, f"batch {name!r} was done, and pages {sorted(lacks)} were not in place"
    bare.prefill.do("clear", room)


@rule("R6")
def test_r6_a_small_ticket_is_not_done_while_the_reader_takes_nothing(bare: Bare, able: Capabilities) -> None:
    """Unless its bytes are in place all the same, or the backend says that done does not mean that."""
    room, page = number(), {"kv": ([5], [6])}
    bare.expect(page)
    with standing_still(bare.decode.child):
        bare.prefill.post("small", room, bare.to, page)
        bare.prefill.do("wait", "small", GLANCE_S, waits_s=GLANCE_S)
        early = brief(bare.prefill.states("small"))
        lacks = bare.decode.memory.wrong("kv")
    assert not able.visible_on_done or "done" not in early or not lacks, f"decode stands still, a ticket was {early}, and it lacks {lacks}"
    states = bare.prefill.ends("small")
    assert set(brief(states)) == {"done"}, f"decode stood still for {GLANCE_S:g} s, and a ticket ended as {brief(states)}"
    bare.intact()
    bare.prefill.do("clear", room)


@rule("A5")
def test_a5_each_ticket_ends_after_abort(bare: Bare, able: Capabilities) -> None:
    """And early, where the engine can cancel; abort of what has ended is harmless."""
    chances = 0
    for n in range(TRIES):
        bare.fresh()
        room = under_way(bare, "big", MANY << n)
        chances += "pending" in brief(bare.prefill.states("big"))
        bare.prefill.do("abort", "big")
        states = bare.prefill.ends("big")
        bare.prefill.do("abort", "big")
        bare.prefill.do("abort_tickets", "big")
        bare.prefill.do("clear", room)
        bare.rests()
        if not able.cancel or cancelled(states):
            return
    assert chances, f"it never occurred that a batch was still under way when it was to be aborted: {brief(states)}"
    pytest.fail(f"cancel is declared, and of tickets that were aborted as they began none ended early: {brief(states)}")


def cancelled(states: list[State]) -> int:
    """How many transfers the engine ended before they were done."""
    return sum(kind == "failed" and reason != "never posted" for kind, _, reason in states)


@rule("R3")
def test_r3_what_is_called_quiescent_after_abort_writes_no_more(bare: Bare, able: Capabilities) -> None:
    """An engine that cannot cancel may be done with all of it before it says anything."""
    for n in range(TRIES):
        room = under_way(bare, "big", MANY << n)
        caught = "pending" in brief(bare.prefill.states("big"))
        error_of(lambda: bare.prefill.do("abort", "big"))  # what it raises, or does not end, is a matter of A5
        bare.prefill.do("wait", "big", SOON_S, waits_s=SOON_S)
        states = bare.prefill.states("big")
        quiet = all(kind == "done" or quiescent for kind, quiescent, _ in states)
        if quiet and any(kind != "done" for kind, _, _ in states):
            late = bare.written()
            assert not late, f"all tickets had ended ({brief(states)}), and pages {late} were written after that"
        bare.prefill.do("clear", room)
        bare.rests()
        if caught or not able.cancel:
            return
    pytest.fail(f"it never occurred that a batch was still under way when it was to be aborted: {brief(states)}")


@rule("R3")
def test_r3_what_is_refused_when_much_is_under_way_is_not_written(bare: Bare) -> None:
    """An engine need not refuse any of it; what fails and is not called quiescent may be written, and what is done is a matter of R6."""
    room = number()
    bare.prefill.post("much", room, bare.to, ALL, times=2 * MANY)
    states = bare.prefill.ends("much")
    refused = [quiescent for kind, quiescent, _ in states if kind != "done"]
    if refused and all(refused):
        late = bare.written()
        assert not late, f"all tickets had ended ({brief(states)}), and pages {late} were written after that"
    bare.prefill.do("clear", room)
    bare.rests()


@rule("R3")
@full
def test_r3_what_is_called_quiescent_while_the_reader_stands_still_writes_no_more(crew: Crew) -> None:
    """Nor what was told to be tried again and was aborted then; what is still pending may be written. An engine that needs no reader may
    be done with all of it each time."""
    for n in range(FREEZES):
        with bare_pair(crew, POOLS) as bare:
            room = under_way(bare, "big", MANY << n)
            with standing_still(bare.decode.child):
                caught = "pending" in brief(bare.prefill.states("big"))
                stays(lambda: True, "decode stands still", STANDS_S)
                error_of(lambda: bare.prefill.do("abort", "big"))
                bare.prefill.do("wait", "big", GLANCE_S, waits_s=GLANCE_S)
                states = bare.prefill.states("big")
                bare.decode.memory.wipe()
            if all(quiescent for kind, quiescent, _ in states if kind != "done"):
                bare.prefill.post("aside", aside := number(), bare.to, {"aux": ([1], [2])})
                bare.prefill.do("wait", "aside", SOON_S, waits_s=SOON_S)
                late = bare.decode.memory.changed("kv")
                assert not late, f"decode stood still, all tickets had ended ({brief(states)}), and pages {late} were written after that"
                bare.prefill.do("clear", aside)
            bare.prefill.do("clear", room)
        if caught:
            return


@rule("R3")
def test_r3_a_closed_engine_that_can_fence_takes_nothing_in(bare: Bare, crew: Crew, able: Capabilities) -> None:
    """Neither of what is under way nor of what comes later. One that is written to without its help need not be able to."""
    if not able.fences_on_disconnect:
        return
    with engines(crew, "decode") as (closed,):
        closed.start()
        pair = Bare(bare.prefill, closed)
        pair.join()
        room = under_way(pair, "big", FEW)
        for what in ("unregister", "close"):
            closed.do(what)
        closed.memory.wipe()
        for name in ("next", "the one after"):
            bare.prefill.post(name, room, pair.to, OLD)
        for name in ("big", "next", "the one after"):
            bare.prefill.do("wait", name, SOON_S, waits_s=SOON_S)
        late = closed.memory.changed("kv")
        assert not late, f"decode was closed, and pages {late} were written after that"
        bare.prefill.do("clear", room)
        bare.prefill.do("disconnect", pair.to)


@rule("R6")
def test_r6_tickets_that_are_live_at_once_are_told_apart(bare: Bare) -> None:
    """So many that a number of eight bits does not do."""
    room = number()
    bare.prefill.post("many", room, bare.to, {"aux": ([1], [2])}, times=LIVE)
    error_of(lambda: bare.prefill.ends("many"))
    twins = bare.prefill.do("twins")
    assert twins == 0, f"of tickets that had not ended {twins} equalled another"
    bare.prefill.do("clear", room)


@rule("C2")
@pytest.mark.parametrize("when", ["never posted", "done", "running"])
def test_c2_the_backend_may_clear_a_room_any_number_of_times(bare: Bare, when: str) -> None:
    room = number()
    if when == "running":
        room = under_way(bare, "big")
    elif when == "done":
        bare.prefill.post("small", room, bare.to, {"aux": ([1], [2])})
        bare.prefill.ends("small")
    for _ in range(3):
        bare.prefill.do("clear", room)
    bare.rests()
    bare.prefill.do("clear", room)


@rule("B6")
def test_b6_abort_waits_for_nothing(bare: Bare) -> None:
    """Whether or not it raises (A5). What else a machine does can only add to what it takes."""
    took = list[float]()
    while not took or (min(took) > PROMPT_S and len(took) < 2 * TRIES):
        room = under_way(bare, "big")
        error_of(lambda: bare.prefill.do("abort", "big"))
        took.append(bare.prefill.do("abort_s"))
        bare.prefill.do("clear", room)
        bare.rests()
    assert min(took) <= PROMPT_S, f"kvcore_abort of a batch under way took {[f'{one * 1000:.1f} ms' for one in took]}"


@rule("B6")
def test_b6_a_large_transfer_is_begun_and_not_awaited(bare: Bare, able: Capabilities) -> None:
    """Unless the backend declares that it blocks."""
    room = number()
    bare.prefill.post("large", room, bare.to, ALL, times=FEW)
    bare.prefill.do("wait", "large", SOON_S, waits_s=SOON_S)
    least = min(bare.prefill.do("took", "large"))
    assert able.blocking or least <= PROMPT_S, f"of {FEW} transfers at once none was begun in less than {least * 1000:.1f} ms"
    bare.prefill.do("clear", room)


@rule("T7")
def test_t7_abort_and_clear_of_a_room_end_no_other_ones_tickets(bare: Bare) -> None:
    room, other = under_way(bare, "big"), number()
    bare.prefill.post("other", other, bare.to, ALL, times=5)
    bare.prefill.do("abort", "big")
    bare.prefill.do("clear", room)
    states = bare.prefill.ends("other")
    assert set(brief(states)) == {"done"}, f"a room was aborted and cleared, and another's tickets ended as {brief(states)}"
    bare.prefill.do("clear", other)
    bare.rests()


@rule("B4")
def test_b4_the_backend_holds_nothing_of_a_room_that_was_cleared(bare: Bare) -> None:
    until(lambda: bare.prefill.held() == [], f"nothing is held of rooms cleared before: {bare.prefill.held()}")
    rooms = [number() for _ in range(3)]
    for room in rooms:
        bare.prefill.post(f"one of {room}", room, bare.to, {"aux": ([1], [2])})
    for room in rooms:
        bare.prefill.ends(f"one of {room}")
    bare.prefill.do("clear", rooms[0])
    held = bare.prefill.held()
    assert rooms[0] not in held and set(held) <= set(rooms), f"the rooms are {rooms}, the first was cleared, and held are {held}"
    for room in rooms[1:]:
        bare.prefill.do("clear", room)
    running = under_way(bare, "big")
    bare.prefill.do("clear", running)
    until(lambda: bare.prefill.held() == [], f"nothing is held any more: {bare.prefill.held()}")
    bare.rests()
    held = bare.prefill.held()
    assert held == [], f"the last write of a room that was cleared has ended, and since then rooms are held: {held}"


@rule("C4")
def test_c4_what_ends_after_clear_ends_nothing_else(bare: Bare) -> None:
    """The next batch is done when its own bytes are in place."""
    room, other = number(), number()
    bare.prefill.post("old", room, bare.to, OLD, times=MANY)
    until(lambda: bool(bare.decode.memory.changed("kv")), "the first bytes arrive")
    bare.prefill.do("clear", room)
    bare.prefill.post("new", other, bare.to, NEW, times=5)
    states = bare.prefill.ends("new")
    lacks = (bare.decode.memory.pages("kv") != bare.prefill.memory.pages("kv")).any(axis=(0, 2))[list(NEW["kv"][1])]
    assert brief(states) != {"done": len(states)} or not lacks.any(), f"it was done, and {lacks.sum()} of its pages were not in place"
    bare.prefill.do("clear", other)
    bare.rests()


@rule("C4")
@pytest.mark.parametrize("how", ["aborted", "cleared"])
def test_c4_the_next_lifetime_of_a_room_is_another(bare: Bare, how: str) -> None:
    """The same number and attempt with another generation: that the old one is aborted, or cleared meanwhile, is nothing to it."""
    room = under_way(bare, "old", FEW)
    if how == "aborted":
        error_of(lambda: bare.prefill.do("abort", "old"))  # what it raises, or does not end, is a matter of A5
        bare.prefill.do("wait", "old", SOON_S, waits_s=SOON_S)
        bare.prefill.do("clear", room)
    bare.prefill.post("new", room, bare.to, NEW, times=5, generation=2)
    if how == "cleared":
        until(lambda: bare.prefill.do("took", "new")[0] > 0.0, "the new one's first transfer is with the engine")
        bare.prefill.do("clear", room)
    states = bare.prefill.ends("new")
    assert set(brief(states)) == {"done"}, f"an old lifetime of the room was {how}, and the new one's tickets ended as {brief(states)}"
    bare.prefill.do("clear", room, generation=2)
    bare.rests()


@rule("R4")
def test_r4_a_proof_of_disconnect_is_one(bare: Bare, able: Capabilities) -> None:
    """Where it is declared: after True from the decode side nothing of the other arrives any more, whatever that begins then; and True
    comes of an idle peer."""
    room = under_way(bare, "big")
    fenced = bare.decode.do("disconnect", bare.prefill.instance)
    bare.decode.memory.wipe()
    bare.prefill.do("wait", "big", SOON_S, waits_s=SOON_S)
    for name in ("next", "the one after") if fenced and able.fences_on_disconnect else ():
        bare.prefill.post(name, room, bare.to, OLD)
        bare.prefill.do("wait", name, SOON_S, waits_s=SOON_S)
    late = bare.decode.memory.changed("kv")
    assert not (fenced and able.fences_on_disconnect and late), f"disconnect was True on the decode side, and pages {late} came after it"
    bare.prefill.do("clear", room)
    bare.prefill.do("disconnect", bare.to)
    bare.fresh()
    bare.join()
    if able.fences_on_disconnect:
        proved = bare.decode.do("disconnect", bare.prefill.instance)
        assert proved, "it is declared that disconnect can prove that a peer writes no more, and of one that was idle it proves nothing"
        bare.prefill.do("disconnect", bare.to)
        bare.join()


# --- limits and forms that are declared


@rule("T1")
def test_t1_a_transfer_of_as_many_descriptors_as_declared_works(bare: Bare, able: Capabilities) -> None:
    most = descriptors(able)
    parts = bare.moves({TINY: (range(0, 2 * most, 2), range(1, 2 * most, 2))})
    assert parts == 1, f"{most} descriptors were to be one transfer, and are {parts}"


@rule("T1")
@full
def test_t1_a_transfer_of_as_many_bytes_as_declared_works(crew: Crew, able: Capabilities) -> None:
    most = min(able.max_bytes or LIMIT_BYTES, MOST_BYTES)
    with bare_pair(crew, [PoolSpec("kv", pages=4, page_bytes=most // 2, layers=1)]) as large:
        parts = large.moves({"kv": ([0, 1], [2, 3])})
        assert parts == 1, f"{most} bytes were to be one transfer, and are {parts}"


@rule("T1")
def test_t1_pages_move_with_and_without_their_lists(bare: Bare) -> None:
    """A backend that takes lists of pages is also given transfers without, such as of a page above its limits."""
    scattered = {"kv": ([3, 30, 31, 32, 7], [8, 40, 2, 3, 21])}
    for named in (True, False):
        bare.fresh()
        bare.moves(scattered, named=named)


@rule("B6")
def test_b6_transfers_of_many_rooms_run_beside_each_other(bare: Bare, able: Capabilities) -> None:
    """As many at once as may block, and some more."""
    rooms = [number() for _ in range(able.parallel + 3)]
    bare.expect(ALL)
    for n, room in enumerate(rooms):
        bare.prefill.post(f"part {n}", room, bare.to, {"kv": (pages := range(n % 12, KV.pages, 12), pages)}, times=4)
    bare.prefill.post("rest", rooms[0], bare.to, ALL)
    for name in ("rest", *(f"part {n}" for n in range(len(rooms)))):
        states = bare.prefill.ends(name)
        assert brief(states) == {"done": len(states)}, f"{name!r} of {len(rooms)} rooms at once ended as {brief(states)}"
    bare.intact()
    for room in rooms:
        bare.prefill.do("clear", room)


# --- peers


@rule("P3")
def test_p3_a_reconnect_reaches_the_new_peer(bare: Bare, crew: Crew) -> None:
    """Another engine takes the place of one that was disconnected, while that still runs."""
    with engines(crew, "decode", instances=[bare.to]) as (new,):
        new.start()
        before = bare.decode.memory.pages("kv").copy()
        bare.prefill.do("disconnect", bare.to)
        Bare(bare.prefill, new).join()
        assert (bare.decode.memory.pages("kv") == before).all(), "after a disconnect and a connect the old peer was written to"
        bare.prefill.do("disconnect", bare.to)
    bare.fresh()
    bare.join()
