"""What the protocol says in the situations that gave the contract its rules, one step after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcore.protocol import receiver, receiver_state, sender, sender_state
from kvcore.protocol.events import (
    Clear,
    Effect,
    Ended,
    Event,
    Fail,
    Got,
    Hand,
    Lost,
    Open,
    Pair,
    Party,
    Receive,
    Route,
    Send,
    Start,
    Timeout,
    Timer,
    Unproven,
)
from kvcore.protocol.messages import Abort, Ack, Destination, Drained, Here, Join, Layers, PoolPages, Relay, Status, Which
from kvcore.states import FailureCode, KVPoll, Reason, RoomId

ROOM = RoomId(7)
PAGE = (PoolPages("kv", bytes(4)),)
CHUNK = (("kv", 1, 1),)
WHY = Reason(FailureCode.ABORTED, "enough", "decode")
HERS = Reason(FailureCode.ABORTED, "stop", "prefill")


class Rank:
    """One rank of one side, and what it did last."""

    def __init__(self, side: str, rank: int = 0) -> None:
        self.module, self.facts = (sender, sender_state) if side == "S" else (receiver, receiver_state)
        self.state: Any = sender_state.Sender(ROOM, rank=rank) if side == "S" else receiver_state.Receiver(ROOM, rank=rank)

    def take(self, *events: Event) -> list[Effect]:
        """Take events, and give back the effects of the last one."""
        effects: Sequence[Effect] = ()
        for event in events:
            self.state, effects = self.module.step(self.state, event)
        return list(effects)

    def poll(self) -> KVPoll:
        return self.state.life.state

    def safe(self, generation: int = 1) -> bool:
        return self.facts.release_safe(self.state, generation)

    def timer(self, kind: str) -> Timer:
        return next(timer for timer in self.facts.timers(self.state) if timer.subject[0] == kind)


def of(kind: Any, rg: int, sg: int, *more: Any) -> Any:
    return kind(*ROOM, rg, sg, *more)


def got(message: Any, source: str = "", rank: int = 0, size: int = 1) -> Got:
    default = "S" if isinstance(message, Here | Status | Which | Drained | Relay | Layers) else "R"
    return Got(message, Party(source or f"{default}{rank}", rank, size))


def sent(effects: list[Effect]) -> list[Any]:
    return [effect.message for effect in effects if isinstance(effect, Send)]


def verdicts(effects: list[Effect]) -> list[tuple[str, KVPoll]]:
    return [(effect.to, effect.message.state) for effect in effects if isinstance(effect, Send) and isinstance(effect.message, Status)]


def transferring() -> Rank:
    """A sender with one ticket in flight."""
    rank = Rank("S")
    rank.take(Open(1), Hand(1, CHUNK, True), got(of(Join, 1, 0)), got(of(Destination, 1, 1, PAGE, 1)))
    assert rank.poll() is KVPoll.TRANSFERRING
    return rank


def published() -> Rank:
    """A receiver whose pages may be written."""
    rank = Rank("R")
    effects = rank.take(Open(1), Route(1, (Party("S0"),)), Receive(1, PAGE), got(of(Here, 1, 1)))
    assert sent(effects) == [of(Destination, 1, 1, PAGE, 1)]
    assert not rank.safe()
    return rank


# --- one pair


def test_a_hand_off() -> None:
    prefill, decode = transferring(), published()
    effects = prefill.take(Ended(Pair("R0", 1, 1), 1, True, True))
    assert sent(effects) == [of(Status, 1, 1, KVPoll.SUCCESS, None, b"")]
    effects = decode.take(got(sent(effects)[0]))
    assert sent(effects) == [of(Ack, 1, 1, True)]
    assert decode.poll() is prefill.poll() is KVPoll.SUCCESS
    assert decode.safe() and prefill.safe()
    prefill.take(got(sent(effects)[0]), Clear(1))
    decode.take(Clear(1))
    assert prefill.state.empty and decode.state.empty


def test_a4_a_receiver_that_only_joined_is_told() -> None:
    prefill = Rank("S")
    assert sent(prefill.take(Open(1), got(of(Join, 1, 0)))) == [of(Here, 1, 1)]
    assert sent(prefill.take(Fail(1, HERS))) == [of(Status, 1, 1, KVPoll.FAILED, HERS, b"")]


def test_a5_pages_handed_over_after_the_end_start_nothing() -> None:
    prefill = transferring()
    prefill.take(Fail(1, HERS))
    assert prefill.take(Hand(1, CHUNK, True)) == []


def test_s5_a_reason_names_side_and_rank() -> None:
    prefill, decode = Rank("S", rank=3), Rank("R", rank=2)
    for rank in (prefill, decode):
        rank.take(Open(1), Timeout(Timer("bootstrap_s", ("state", 1) if rank is prefill else ("state", 1, False))))
    assert (prefill.state.life.reason.side, prefill.state.life.reason.rank) == ("prefill", 3)
    assert (decode.state.life.reason.side, decode.state.life.reason.rank) == ("decode", 2)
    assert decode.state.life.reason.code is FailureCode.TIMEOUT


def test_s8_receive_starts_the_limit_anew() -> None:
    decode = Rank("R")
    decode.take(Open(1), Route(1, (Party("S0"),)), got(of(Here, 1, 1)))
    before = decode.timer("state")
    decode.take(Receive(1, PAGE))
    assert before.limit == decode.timer("state").limit == "input_s"
    assert before != decode.timer("state")
    assert decode.take(Timeout(before)) == []
    assert decode.poll() is KVPoll.WAITING_FOR_INPUT


def test_t3_page_counts_that_differ_fail_the_room() -> None:
    prefill = Rank("S")
    prefill.take(Open(1), Hand(1, (("kv", 2, 2),), True), got(of(Join, 1, 0)))
    effects = prefill.take(got(of(Destination, 1, 1, PAGE, 1)))
    (status,) = sent(effects)
    assert status.reason.code is FailureCode.BAD_PAGES
    assert "2 pages" in status.reason.text and "listed 1" in status.reason.text
    assert not any(isinstance(effect, Start) for effect in effects)


# --- aborts


def test_a7_an_abort_that_names_nobody_is_asked_back() -> None:
    prefill = Rank("S")
    assert sent(prefill.take(Open(1), got(of(Abort, 1, 0, WHY)))) == [of(Which, 1, 1)]
    assert prefill.poll() is KVPoll.BOOTSTRAPPING
    assert sent(prefill.take(got(of(Abort, 1, 1, WHY)))) == [of(Drained, 1, 1, False)]
    assert prefill.state.life.reason == WHY


def test_a7_a_failed_receiver_names_both_when_asked() -> None:
    decode = Rank("R")
    assert sent(decode.take(Open(1), Route(1, (Party("S0"),)), Fail(1, WHY))) == [of(Abort, 1, 0, WHY)]
    assert sent(decode.take(got(of(Which, 1, 5)))) == [of(Abort, 1, 5, WHY)]


def test_c4_reopening_withdraws_an_abort_that_names_nobody() -> None:
    decode = Rank("R")
    decode.take(Open(1), Route(1, (Party("S0"),)), Clear(1), Open(2))
    assert decode.take(got(of(Which, 1, 5))) == []
    assert decode.facts.resend(decode.state) == ()


def test_a7_an_unpaired_abort_is_credited_to_an_older_unpaired_end() -> None:
    prefill = Rank("S")
    prefill.take(Open(1), Clear(1), Open(2))
    assert sent(prefill.take(got(of(Abort, 1, 0, WHY)))) == [of(Drained, 1, 1, False)]
    assert prefill.poll() is KVPoll.BOOTSTRAPPING


def test_a7_an_abort_for_a_room_nobody_opened_gets_no_answer_and_waits() -> None:
    prefill = Rank("S")
    assert prefill.take(got(of(Abort, 1, 0, WHY))) == []
    assert sent(prefill.take(Open(1), got(of(Abort, 1, 0, WHY)))) == [of(Which, 1, 1)]


def test_a8_a_rejection_is_told_once_the_route_is_known() -> None:
    decode = Rank("R")
    turned_down = Reason(FailureCode.REJECTED, "full", "decode")
    decode.take(Open(1), Fail(1, turned_down), Clear(1))
    assert sent(decode.take(Route(1, (Party("S0"),)))) == [of(Abort, 1, 0, turned_down)]


# --- rooms that ended, or that nobody opened


def test_a7_a_join_for_a_room_that_ended_unpaired_is_refused_with_its_reason() -> None:
    prefill, decode = Rank("S"), Rank("R")
    prefill.take(Open(1), Fail(1, HERS), Clear(1))
    (status,) = sent(prefill.take(got(of(Join, 1, 0))))
    assert status == of(Status, 1, 1, KVPoll.FAILED, HERS, b"")
    assert sent(decode.take(Open(1), Route(1, (Party("S0"),)), got(status))) == [of(Ack, 1, 1, True)]
    assert decode.state.life.reason == HERS
    prefill.take(got(of(Ack, 1, 1, True)))
    assert prefill.state.empty


def test_a7_a_dead_receivers_ack_does_not_end_the_refusal() -> None:
    prefill = Rank("S")
    prefill.take(Open(1), Fail(1, HERS), Clear(1), got(of(Ack, 1, 1, False)))
    assert sent(prefill.take(got(of(Join, 2, 0)))) == [of(Status, 2, 1, KVPoll.FAILED, HERS, b"")]


def test_a7_the_refusal_stands_for_each_destination_rank() -> None:
    prefill = Rank("S")
    prefill.take(Open(1), got(of(Join, 1, 0), rank=0, size=2), got(of(Abort, 1, 1, WHY), rank=0, size=2))
    assert sent(prefill.take(got(of(Join, 1, 0), rank=1, size=2))) == [of(Status, 1, 1, KVPoll.FAILED, WHY, b"")]
    prefill.take(got(of(Ack, 1, 1, True), rank=1, size=2), Clear(1))
    assert prefill.state.empty


def test_a7_no_such_room_counts_only_before_the_join_is_answered() -> None:
    prefill, early, late = Rank("S"), Rank("R"), published()
    assert prefill.take(got(of(Join, 1, 0))) == []
    (status,) = sent(prefill.take(Timeout(prefill.timer("join"))))
    assert (status.sg, status.reason.code) == (0, FailureCode.NO_SUCH_ROOM)
    early.take(Open(1), Route(1, (Party("S0"),)), got(status))
    assert early.state.life.reason == status.reason
    assert late.take(got(status)) == []
    assert late.poll() is KVPoll.WAITING_FOR_INPUT


def test_p6_a_destination_of_an_older_lifetime_binds_nothing() -> None:
    prefill = Rank("S")
    prefill.take(Open(1), Clear(1), Open(2), Hand(2, CHUNK, True))
    effects = prefill.take(got(of(Destination, 1, 1, PAGE, 1)))
    assert [message.state for message in sent(effects)] == [KVPoll.FAILED]
    assert prefill.state.life.dests == ()


def test_c2_the_handle_of_an_older_lifetime_clears_nothing() -> None:
    for rank in (Rank("S"), Rank("R")):
        rank.take(Open(1), Clear(1), Open(2))
        assert rank.take(Clear(1)) == []
        assert rank.poll() is KVPoll.BOOTSTRAPPING


# --- release safety


def test_r2_drained_is_said_when_the_last_ticket_has_ended() -> None:
    prefill, decode = transferring(), published()
    (abort,) = sent(decode.take(Fail(1, WHY)))
    assert not any(isinstance(message, Drained) for message in sent(prefill.take(got(abort))))
    assert not prefill.safe()
    effects = prefill.take(Ended(Pair("R0", 1, 1), 1, True, True))
    assert of(Drained, 1, 1, False) in sent(effects)
    assert not decode.safe()
    decode.take(got(of(Drained, 1, 1, False)))
    assert decode.safe() and prefill.safe()


def test_r3_a_ticket_given_up_without_proof_is_never_drained() -> None:
    prefill, decode, pair = transferring(), published(), Pair("R0", 1, 1)
    prefill.take(Ended(pair, 1, False, False, HERS))
    assert prefill.poll() is KVPoll.FAILED
    assert not prefill.safe()
    assert Unproven(1, pair, 1) in prefill.take(Timeout(prefill.timer("ticket")))
    decode.take(Fail(1, WHY))
    (answer,) = sent(prefill.take(got(of(Abort, 1, 1, WHY))))
    assert answer == of(Drained, 1, 1, True)
    decode.take(got(answer))
    assert not decode.safe()
    assert decode.facts.resend(decode.state) == ()
    assert [type(effect) for effect in decode.take(Timeout(decode.timer("drain")))] == [Unproven]
    assert decode.safe()


def test_r4_drained_counts_only_from_the_instance_the_destination_went_to() -> None:
    decode = published()
    decode.take(Fail(1, WHY), got(of(Drained, 1, 1, False), source="S0 after a restart"))
    assert not decode.safe()


# --- several ranks


def test_t5_a_rank_counts_once_and_its_success_is_final() -> None:
    decode = Rank("R")
    decode.take(Open(1), Route(1, (Party("S0", 0, 2), Party("S1", 1, 2))), Receive(1, PAGE))
    decode.take(got(of(Here, 1, 3), rank=0), got(of(Here, 1, 4), rank=1))
    first = got(of(Status, 1, 3, KVPoll.SUCCESS, None, b""), rank=0)
    decode.take(first, first, got(of(Status, 1, 3, KVPoll.FAILED, HERS, b""), rank=0))
    assert decode.poll() is KVPoll.TRANSFERRING
    decode.take(got(of(Status, 1, 4, KVPoll.SUCCESS, None, b""), rank=1))
    assert decode.poll() is KVPoll.SUCCESS


def test_t5_a_failure_is_relayed_to_the_other_sender_ranks() -> None:
    decode = Rank("R")
    decode.take(Open(1), Route(1, (Party("S0", 0, 2), Party("S1", 1, 2))), got(of(Here, 1, 4), rank=1))
    effects = decode.take(got(of(Status, 1, 3, KVPoll.FAILED, HERS, b""), rank=0))
    assert of(Abort, 1, 4, HERS) in sent(effects)


def test_t5_success_is_said_to_each_destination_and_not_withdrawn() -> None:
    prefill = Rank("S")
    prefill.take(Open(1), Hand(1, CHUNK, True))
    for rank in (0, 1):
        prefill.take(got(of(Join, 1, 0), rank=rank, size=2), got(of(Destination, 1, 1, PAGE, 2), rank=rank, size=2))
    effects = prefill.take(Ended(Pair("R0", 1, 1), 1, True, True))
    assert verdicts(effects) == [("R0", KVPoll.SUCCESS)]
    effects = prefill.take(Ended(Pair("R1", 1, 1), 1, False, True, HERS))
    assert verdicts(effects) == [("R1", KVPoll.FAILED)]
    assert prefill.poll() is KVPoll.FAILED
    (again,) = sent(prefill.take(got(of(Destination, 1, 1, PAGE, 2), rank=0, size=2)))
    assert again.state is KVPoll.SUCCESS


def test_p2_a_joined_rank_that_is_lost_fails_the_room_unless_another_has_joined_for_it() -> None:
    gone = Lost("R1", Reason(FailureCode.PEER_LOST, "gone", "prefill"))
    for another, state in (("", KVPoll.FAILED), ("R1b", KVPoll.BOOTSTRAPPING)):
        prefill = Rank("S")
        prefill.take(Open(1), got(of(Join, 1, 0), rank=0, size=2), got(of(Join, 1, 0), rank=1, size=2))
        if another:
            prefill.take(got(of(Join, 1, 0), source=another, rank=1, size=2))
        effects = prefill.take(gone)
        assert prefill.poll() is state
        assert [to for to, _ in verdicts(effects)] == ([] if another else ["R0"])


def test_t3_destination_ranks_that_are_unlike_fail_the_room() -> None:
    prefix = (PoolPages("kv", bytes(4), 3),)
    for pages, shape, says in (
        (PAGE, (1, 2), "of a group of tp 1, pp 2, where 2 are due, and rank 0 named 2, of a group of tp 2, pp 1"),
        (prefix, (2, 1), "destination rank 0 has prefix pages {} and rank 1 {'kv': 3}"),
    ):
        prefill = Rank("S")
        prefill.take(Open(1), Hand(1, CHUNK, True))
        for rank, listed, its in ((0, PAGE, (2, 1)), (1, pages, shape)):
            party = Party(f"R{rank}", rank, 2, 0, its)
            prefill.take(Got(of(Join, 1, 0), party), Got(of(Destination, 1, 1, listed, 2), party))
        assert prefill.poll() is KVPoll.FAILED and says in prefill.state.life.reason.text


def test_t5_who_has_done_its_part_may_go() -> None:
    """A sender rank that has said success, and a receiver rank that was told it."""
    decode = gathering()
    decode.take(Lost("S0", HERS))
    assert decode.poll() is KVPoll.TRANSFERRING
    decode.take(got(of(Status, 1, 4, KVPoll.SUCCESS, None, b""), rank=1))
    assert decode.poll() is KVPoll.SUCCESS
    assert gathering_after(Lost("S1", HERS)) is KVPoll.FAILED
    prefill = half_done()
    prefill.take(Lost("R0", HERS))
    assert prefill.poll() is KVPoll.TRANSFERRING
    prefill.take(Ended(Pair("R1", 1, 1), 1, True, True))
    assert prefill.poll() is KVPoll.SUCCESS


def gathering_after(event: Event) -> KVPoll:
    decode = gathering()
    decode.take(event)
    return decode.poll()


def half_done() -> Rank:
    """A sender of two destinations that has said success to the first."""
    prefill = Rank("S")
    prefill.take(Open(1), Hand(1, CHUNK, True))
    for rank in (0, 1):
        prefill.take(got(of(Join, 1, 0), rank=rank, size=2), got(of(Destination, 1, 1, PAGE, 2), rank=rank, size=2))
    prefill.take(Ended(Pair("R0", 1, 1), 1, True, True))
    return prefill


def relays(effects: list[Effect]) -> list[tuple[str, Any]]:
    return [(effect.to, effect.message.reason) for effect in effects if isinstance(effect, Send) and isinstance(effect.message, Relay)]


def test_t5_a_failure_is_passed_on_to_those_that_keep_this_ranks_success() -> None:
    assert relays(half_done().take(Fail(1, WHY))) == [("R0", WHY)]
    assert relays(half_done().take(got(of(Abort, 1, 1, HERS), rank=1, size=2))) == [("R0", HERS)]
    done = half_done()
    done.take(Ended(Pair("R1", 1, 1), 1, True, True))
    assert done.poll() is KVPoll.SUCCESS
    assert relays(done.take(got(of(Abort, 1, 1, HERS), rank=1, size=2))) == [("R0", HERS)]
    assert done.poll() is KVPoll.SUCCESS


def gathering() -> Rank:
    """A receiver of two sender ranks, the first of which has said success."""
    decode = Rank("R")
    decode.take(Open(1), Route(1, (Party("S0", 0, 2), Party("S1", 1, 2))), Receive(1, PAGE))
    decode.take(got(of(Here, 1, 3), rank=0), got(of(Here, 1, 4), rank=1), got(of(Status, 1, 3, KVPoll.SUCCESS, None, b""), rank=0))
    return decode


def test_t5_a_relay_ends_the_live_room_that_it_names_and_nothing_else() -> None:
    for wrong in (of(Relay, 1, 4, HERS), of(Relay, 2, 3, HERS), of(Relay, 1, 0, HERS)):
        decode = gathering()
        assert decode.take(got(wrong, rank=0)) == [] and decode.poll() is KVPoll.TRANSFERRING
    decode = gathering()
    effects = decode.take(got(of(Relay, 1, 3, HERS), rank=0))
    assert decode.poll() is KVPoll.FAILED and of(Abort, 1, 4, HERS) in sent(effects)
    whole = gathering()
    whole.take(got(of(Status, 1, 4, KVPoll.SUCCESS, None, b""), rank=1), got(of(Relay, 1, 3, HERS), rank=0))
    assert whole.poll() is KVPoll.SUCCESS


def test_t1_what_is_said_of_layers_counts_in_its_order() -> None:
    decode = gathering()
    decode.take(got(of(Layers, 1, 4, 2, (0, 1)), rank=1), got(of(Layers, 1, 4, 1, (0,)), rank=1), got(of(Layers, 1, 3, 9, (7,)), rank=1))
    assert [source.layers for source in decode.state.life.sources] == [(), (0, 1)]
