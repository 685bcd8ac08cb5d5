"""Pairing and losing peers: real ``Peers`` over a channel, hooks and a home that the test plays itself, under a made-up clock."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kvcore import Pool, peers
from kvcore.access import CurveKeys
from kvcore.addresses import Address
from kvcore.channel import Channel, Route
from kvcore.hookspecs import Capabilities, Endpoint, Hooks
from kvcore.layouts import Place
from kvcore.pairing import Peer
from kvcore.peers import Peers
from kvcore.process import this_process
from kvcore.protocol.events import Party
from kvcore.states import FailureCode, Side
from kvcore.wire import (
    Hello,
    Introduction,
    Letter,
    Ping,
    Process,
    Refuse,
    RegionInfo,
    RoomBody,
    Stranger,
    Welcome,
    decode,
    encode,
)
from tests.helpers import memory

LIVENESS_S, SEND_S, BEAT_S = 15.0, 5.0, 1.0
ADDRESS = "127.0.0.1:9"
PIDS = {"prefill-1": 11, "decode-1": 21}
SOCKET: Any = None

POOL = Pool.from_tensors("kv", memory(8), page_size=16)


def introduction(instance: str, version: tuple[int, int] = (1, 0)) -> Introduction:
    process = Process("this host", PIDS.get(instance, 99), "0")
    regions = tuple(RegionInfo.of(region) for region in POOL.regions)
    role, limits = instance.partition("-")[0], (LIVENESS_S, 5.0, 60.0, 30.0)
    return Introduction(version, instance, 1, role, Place(), "fake", "1", (POOL.geometry,), regions, *limits, process)


class FakeChannel:
    """Keeps what is sent."""

    keys: CurveKeys | None = None

    def __init__(self) -> None:
        self.sent: list[tuple[Route, Letter]] = []
        self.bad: list[str] = []
        self.wake = 0.0

    def dial(self, address: Address, curve: str = "") -> Route:
        return Route(SOCKET, address=str(address))

    def wake_by(self, when: float) -> None:
        self.wake = when

    def send(self, route: Route, frame: bytes, now: float) -> bool:
        self.sent.append((route, decode(frame)))
        return True

    def hang_up(self, route: Route) -> None:
        route.closed = True

    def note_bad(self, what: str) -> None:
        self.bad.append(what)


class Waiter:
    """Waits for a link, until told that nobody does."""

    def __init__(self) -> None:
        self.interested = True
        self.met: list[str] = []
        self.refusals: list[tuple[FailureCode, str]] = []

    def wanted(self) -> bool:
        return self.interested

    def paired(self, peer: Peer) -> None:
        self.met.append(peer.instance)

    def refused(self, code: FailureCode, text: str) -> None:
        self.refusals.append((code, text))


class Bench:
    """One instance's peers. It is their home, and what it is asked to do slowly happens at ``work``."""

    def __init__(self, me: str, *, fences: bool = False, declares: bool = True, needs_process_to_write: bool = False) -> None:
        self.name = me
        self.fences = fences
        self.holding = False
        self.spoken: dict[str, int] = {}
        self.lost_peers: list[tuple[str, str, bool]] = []
        self.fenced_pages: list[tuple[str, Side]] = []
        self.connected: list[str] = []
        self.slow: list[tuple[Callable[[], object], Callable[[object, BaseException | None], None]]] = []
        hooks = SimpleNamespace(
            kvcore_endpoint=lambda: Endpoint(b"here"),
            kvcore_connect=lambda peer: self.connected.append(peer.id),
            kvcore_disconnect=lambda peer: self.fences,
        )
        able = Capabilities(fences_on_disconnect=fences and declares, needs_process_to_write=needs_process_to_write)
        self.peers = Peers(introduction(me), SEND_S, cast(Hooks, hooks), able, self)
        self.channel = FakeChannel()
        self.peers.channel = cast(Channel, self.channel)
        self.begun = time.monotonic()

    # --- the home

    def got(self, side: Side, message: RoomBody, party: Party) -> bool:
        return True

    def lost(self, instance: str, text: str, replaced: bool) -> None:
        self.lost_peers.append((instance, text, replaced))

    def fenced(self, instance: str, side: Side) -> None:
        self.fenced_pages.append((instance, side))

    def slowly(self, call: Callable[[], object], then: Callable[[object, BaseException | None], None]) -> None:
        self.slow.append((call, then))

    def holds(self, instance: str) -> bool:
        return self.holding

    def spoken_to(self) -> dict[str, int]:
        return self.spoken

    def event(self, name: str, room: object = None, **details: str | int | float) -> None: ...

    # --- what a test does

    def work(self) -> None:
        """Make the slow calls, and what follows from them."""
        while self.slow:
            call, then = self.slow.pop(0)
            then(call(), None)

    def take(self, body: Any, source: str, route: Route | None = None, to: str | None = None) -> None:
        self.peers.on_frame(route or Route(SOCKET, b"its identity"), encode(source, self.name if to is None else to, body))

    def greeted_by(self, source: str, pairing: int = 1, **spoken: int) -> None:
        """A decode instance says hello, and is connected."""
        names = {name.replace("_", "-"): generation for name, generation in spoken.items()}
        self.take(Hello(pairing, introduction(source), b"there", (), names), source, to="")
        self.work()

    def dial(self) -> tuple[Waiter, Route, Hello]:
        """Dial a prefill instance; the hello is out."""
        waiter = Waiter()
        self.peers.link(ADDRESS, waiter)
        self.work()
        route, letter = self.channel.sent[-1]
        assert isinstance(letter.body, Hello)
        return waiter, route, letter.body

    def pair_with_prefill(self) -> Route:
        waiter, route, hello = self.dial()
        self.take(Welcome(hello.pairing, introduction("prefill-1"), b"there"), "prefill-1", route)
        self.work()
        assert waiter.met == ["prefill-1"]
        return route

    def run(self, until_s: float, since_s: float = 0.0) -> None:
        """Tick as a control thread does that is never late."""
        now = self.begun + since_s
        while now < self.begun + until_s:
            now = max(now + 0.001, min(self.peers.tick(now), self.begun + until_s))
        self.peers.tick(self.begun + until_s)

    def size(self, store: str) -> int:
        return self.peers.sizes()[store]

    def answers(self, kind: type) -> list[Any]:
        return [letter.body for _, letter in self.channel.sent if isinstance(letter.body, kind)]


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Process ids that are known to be gone."""
    ids: set[int] = set()
    monkeypatch.setattr(peers, "known_gone", lambda process: process.pid in ids)
    return ids


# --- send_s and liveness_s


def test_send_s_a_peer_that_nothing_can_be_sent_to_is_lost() -> None:
    bench = Bench("prefill-1")
    bench.greeted_by("decode-1")
    bench.greeted_by("decode-2")
    blocked = bench.peers.peer("prefill", "decode-1")
    assert blocked is not None
    blocked.route.blocked_at = bench.begun
    bench.run(SEND_S - 0.1)
    assert bench.size("peers") == 2
    bench.run(SEND_S + 1.1, SEND_S)
    [(instance, text, replaced)] = bench.lost_peers
    assert instance == "decode-1" and "no control message could be sent to it for send_s (5 s)" in text and not replaced
    assert bench.peers.peer("prefill", "decode-2") is not None


def test_p2_a_silent_peer_is_lost_after_liveness_s_and_is_pinged_until_then() -> None:
    bench = Bench("prefill-1")
    bench.greeted_by("decode-1")
    bench.run(LIVENESS_S - 1.0)
    assert bench.size("peers") == 1 and len(bench.answers(Ping)) >= 13
    bench.run(LIVENESS_S + 1.1, LIVENESS_S - 1.0)
    assert [text for _, text, _ in bench.lost_peers] == ["peer decode-1 lost: silent for liveness_s (15 s)"]


def test_p2_a_manager_that_did_not_listen_itself_loses_nobody_for_that_but_r7_starts_nothing() -> None:
    bench = Bench("prefill-1")
    bench.greeted_by("decode-1")
    peer = bench.peers.peer("prefill", "decode-1")
    assert peer is not None and peer.heard_lately(bench.begun + 1)
    bench.run(1.0)
    back = 1.0 + 3 * LIVENESS_S  # its control thread was stalled until then
    bench.peers.tick(bench.begun + back)
    assert bench.size("peers") == 1
    assert not peer.heard_lately(bench.begun + back), "R7: it may have gone meanwhile"
    bench.run(back + LIVENESS_S - 2.5, back)
    assert bench.size("peers") == 1
    bench.run(back + LIVENESS_S + 1.0, back + LIVENESS_S - 2.5)
    assert bench.size("peers") == 0, "excused only for the stall"


def test_p2_the_excuse_ends_when_the_peer_is_heard() -> None:
    bench = Bench("prefill-1")
    bench.greeted_by("decode-1")
    bench.run(1.0)
    bench.peers.tick(bench.begun + 100.0)
    bench.take(Ping(), "decode-1")
    peer = bench.peers.peer("prefill", "decode-1")
    assert peer is not None and peer.excused == 0.0


# --- R4: proof


@pytest.mark.parametrize(
    ("needs", "dies", "fences", "expected"),
    [
        (True, True, False, [("prefill-1", "decode")]),
        (True, False, False, []),
        (False, True, False, []),
        (False, False, True, [("prefill-1", "decode")]),
        (False, True, True, [("prefill-1", "decode"), ("prefill-1", "prefill")]),
    ],
    ids=["gone and needs its process", "only silent", "gone, but its engine writes on", "fenced by disconnect", "fenced and gone"],
)
def test_r4_what_fences_the_pages_of_a_lost_peer(
    gone: set[int], needs: bool, dies: bool, fences: bool, expected: list[tuple[str, str]]
) -> None:
    bench = Bench("decode-1", fences=fences, needs_process_to_write=needs)
    bench.pair_with_prefill()
    bench.holding = True
    if dies:
        gone.add(PIDS["prefill-1"])
    bench.run(LIVENESS_S + 2.0)
    assert len(bench.lost_peers) == 1 and ("its process is gone" in bench.lost_peers[0][1]) == dies
    assert bench.fenced_pages == [] or not fences, "not before disconnect has answered"
    bench.work()
    assert sorted(set(bench.fenced_pages)) == expected


def test_r4_a_disconnect_fences_writes_here_only_where_the_backend_declares_it(gone: set[int]) -> None:
    """What this side's own engine reads is its own affair: its disconnect says that it reads for that peer no more."""
    bench = Bench("decode-1", fences=True, declares=False)
    bench.pair_with_prefill()
    bench.holding = True
    gone.add(PIDS["prefill-1"])
    bench.run(LIVENESS_S + 2.0)
    bench.work()
    assert set(bench.fenced_pages) == {("prefill-1", "prefill")}


def test_r4_a_silent_peer_whose_process_is_found_gone_later_is_fenced_then(gone: set[int]) -> None:
    bench = Bench("decode-1", needs_process_to_write=True)
    bench.pair_with_prefill()
    bench.holding = True
    bench.run(LIVENESS_S + 2.0)
    bench.work()
    bench.run(LIVENESS_S + 5.0, LIVENESS_S + 2.0)
    assert bench.size("peers") == 0 and bench.fenced_pages == []
    gone.add(PIDS["prefill-1"])
    bench.run(LIVENESS_S + 7.0, LIVENESS_S + 5.0)
    assert ("prefill-1", "decode") in bench.fenced_pages and ("prefill-1", "prefill") not in bench.fenced_pages


def test_r4_a_proof_about_an_old_pairing_fences_nothing_of_the_new_one() -> None:
    bench = Bench("decode-1", fences=True)
    route = bench.pair_with_prefill()
    bench.holding = True
    bench.take(Stranger(), "prefill-1", route)
    bench.work()
    assert set(bench.fenced_pages) == {("prefill-1", "decode")} and bench.size("departed_peers") == 1
    bench.pair_with_prefill()
    bench.fenced_pages.clear()
    bench.run(5.0)
    assert bench.size("peers") == 1 and bench.size("departed_peers") == 0 and bench.fenced_pages == []


def test_r4_a_disconnect_that_answers_after_the_peer_departed_again_proves_nothing_of_the_later_pairing() -> None:
    bench = Bench("prefill-1", fences=True)
    bench.greeted_by("decode-1")
    bench.holding = True
    first = bench.peers.peer("prefill", "decode-1")
    assert first is not None
    bench.peers.lose(first, "a test says so")
    [(disconnect, answered)] = bench.slow
    bench.slow.clear()
    bench.greeted_by("decode-1", pairing=2)
    answered(disconnect(), None)
    assert bench.fenced_pages == [] and bench.size("peers") == 1


def test_c7_who_departed_is_forgotten_when_nothing_waits_for_proof() -> None:
    bench = Bench("decode-1")
    route = bench.pair_with_prefill()
    bench.holding = True
    bench.take(Stranger(), "prefill-1", route)
    bench.work()
    bench.run(3.0)
    assert bench.peers.sizes() == {"peers": 0, "links": 0, "link_waiters": 0, "pairings": 0, "departed_peers": 1}
    bench.holding = False
    bench.run(5.0, 3.0)
    assert bench.size("departed_peers") == 0
    route = bench.pair_with_prefill()
    bench.take(Stranger(), "prefill-1", route)
    bench.work()
    assert bench.size("departed_peers") == 0, "nothing was held: at once"


# --- hello


def test_c1_a_returning_instance_has_the_generations_it_speaks_of_marked_expired() -> None:
    bench = Bench("prefill-1")
    bench.greeted_by("decode-1", prefill_1=7, prefill_2=70)
    bench.greeted_by("decode-2", prefill_2=70)
    expired = {name: peer.party(1).expired for (_, name), peer in bench.peers.pairings.items()}
    assert expired == {"decode-1": 7, "decode-2": 0}


def test_c1_a_hello_speaks_of_the_earlier_meetings() -> None:
    bench = Bench("decode-1")
    bench.spoken = {"prefill-1": 3}
    _, _, hello = bench.dial()
    assert hello.spoken == {"prefill-1": 3}


def with_unknown_fields(letter: bytes) -> bytes:
    content = msgspec.msgpack.decode(letter)
    content["priority"] = "high"
    content["body"]["colours"] = ["red", {"deep": 1}]
    content["body"]["me"]["rack"] = 12
    content["body"]["me"]["process"]["nice"] = 5
    content["body"]["me"]["pools"][0]["compressed"] = True
    content["body"]["me"]["regions"][0]["numa"] = 1
    return msgspec.msgpack.encode(content)


def test_p1_unknown_fields_and_a_higher_minor_version_are_no_hindrance() -> None:
    bench = Bench("prefill-1")
    hello = Hello(1, introduction("decode-1", (1, 9)), b"there")
    bench.peers.on_frame(Route(SOCKET, b"i"), with_unknown_fields(encode("decode-1", "", hello)))
    bench.work()
    assert bench.size("peers") == 1 and bench.channel.bad == []
    [welcome] = bench.answers(Welcome)
    asking = Bench("decode-1")
    _, route, said = asking.dial()
    answer = msgspec.structs.replace(welcome, pairing=said.pairing, me=introduction("prefill-1", (1, 4)))
    asking.peers.on_frame(route, with_unknown_fields(encode("prefill-1", "decode-1", answer)))
    asking.work()
    assert asking.size("peers") == 1 and asking.channel.bad == []


def test_p1_another_major_version_is_refused_naming_both(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench("prefill-1")
    hello = Hello(5, introduction("decode-1", (2, 3)), b"there")
    with caplog.at_level(logging.WARNING, "kvcore.peers"):
        bench.peers.on_frame(Route(SOCKET, b"i"), msgspec.msgpack.encode(Letter(2, "decode-1", "", hello)))
    bench.work()
    [refusal] = bench.answers(Refuse)
    assert refusal.pairing == 5 and refusal.code is FailureCode.INCOMPATIBLE
    assert "control protocol 1.0 here and 2.3 there" in refusal.text and refusal.text in caplog.text
    assert bench.size("peers") == 0 and bench.connected == [] and len(bench.channel.bad) == 1


def test_p1_a_refusal_is_read_whatever_version_says_it() -> None:
    bench = Bench("decode-1")
    waiter, route, hello = bench.dial()
    refusal = Refuse(hello.pairing, "control protocol 2.3 here and 1.0 there")
    bench.peers.on_frame(route, msgspec.msgpack.encode(Letter(2, "prefill-1", "decode-1", refusal)))
    assert waiter.refusals == [(FailureCode.INCOMPATIBLE, refusal.text)]
    assert bench.size("links") == 0, "P4: the next room dials again"


def test_p1_a_letter_of_another_major_version_of_a_paired_peer_is_dropped() -> None:
    bench = Bench("prefill-1")
    bench.greeted_by("decode-1")
    before = len(bench.channel.sent)
    bench.peers.on_frame(Route(SOCKET, b"i"), msgspec.msgpack.encode(Letter(2, "decode-1", "prefill-1", Stranger())))
    assert bench.size("peers") == 1 and len(bench.channel.bad) == 1 and len(bench.channel.sent) == before


def test_p5_pairings_under_way_are_bounded_and_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MAX_PAIRINGS", 3)
    bench = Bench("prefill-1")

    def hellos() -> None:
        for number in range(5):
            bench.take(Hello(number, introduction(f"decode-{number}"), b"there"), f"decode-{number}", to="")

    hellos()
    assert bench.size("pairings") == 3
    bench.work()
    assert bench.size("pairings") == 0 and sorted(bench.connected) == ["decode-0", "decode-1", "decode-2"]
    hellos()
    bench.work()
    assert bench.size("peers") == 5


def test_p5_a_hello_that_is_repeated_is_paired_once() -> None:
    bench = Bench("prefill-1")
    hello = Hello(1, introduction("decode-1"), b"there")
    for _ in range(3):
        bench.take(hello, "decode-1", to="")
    bench.work()
    assert bench.connected == ["decode-1"] and len(bench.answers(Welcome)) == 1
    bench.take(hello, "decode-1", to="")
    bench.work()
    assert bench.connected == ["decode-1"] and len(bench.answers(Welcome)) == 2 and bench.lost_peers == []


def test_p5_a_hello_in_the_letter_of_another_instance_is_bad() -> None:
    bench = Bench("prefill-1")
    bench.greeted_by("decode-1")
    before = len(bench.channel.sent)
    bench.take(Hello(2, introduction("decode-1"), b"there"), "decode-2", to="")
    bench.work()
    assert bench.channel.bad == ["hello of 'decode-1' in a letter of 'decode-2'"]
    assert len(bench.channel.sent) == before and list(bench.peers.pairings) == [("prefill", "decode-1")] and bench.lost_peers == []


def test_p5_a_welcome_in_the_letter_of_another_instance_is_refused() -> None:
    bench = Bench("decode-1")
    waiter, route, hello = bench.dial()
    bench.take(Welcome(hello.pairing, introduction("prefill-1"), b"there"), "prefill-2", route)
    bench.work()
    assert bench.size("peers") == 0 and bench.connected == [] and waiter.refusals[0][0] is FailureCode.INCOMPATIBLE


# --- links


def test_hellos_back_off_while_somebody_waits() -> None:
    bench = Bench("decode-1")
    bench.dial()
    said = []
    now = bench.begun + 0.01
    while len(said) < 6:
        count = len(bench.answers(Hello))
        now = bench.peers.tick(now)
        bench.peers.tick(now)
        said += [now] * (len(bench.answers(Hello)) - count)
    gaps = [later - sooner for sooner, later in zip([bench.begun, *said], said, strict=False)]
    assert gaps == pytest.approx([0.2, 0.4, 0.8, 1.6, 2.0, 2.0], abs=0.1)


def test_a_link_that_nobody_waits_for_any_more_is_dropped() -> None:
    bench = Bench("decode-1")
    waiter, route, _ = bench.dial()
    bench.run(2 * SEND_S)
    assert bench.size("links") == 1 and not route.closed, "somebody waits"
    waiter.interested = False
    bench.run(3 * SEND_S - 0.5, 2 * SEND_S)
    assert bench.size("links") == 1, "another room may want it soon"
    bench.run(3 * SEND_S + 1.5, 3 * SEND_S - 0.5)
    assert bench.size("links") == 0 and route.closed
    said = len(bench.answers(Hello))
    bench.run(5 * SEND_S, 4 * SEND_S)
    assert len(bench.answers(Hello)) == said
    assert bench.dial()[1] is not route and bench.size("links") == 1, "P4: the next room dials again"


# --- how a peer is lost


@pytest.mark.parametrize(
    ("closing", "level", "why", "replaced"),
    [(True, logging.INFO, "it was closed", False), (False, logging.WARNING, "it does not know this instance any more", True)],
)
def test_a_closing_peer_is_no_warning_and_not_looked_for_again(
    caplog: pytest.LogCaptureFixture, closing: bool, level: int, why: str, replaced: bool
) -> None:
    bench = Bench("decode-1")
    route = bench.pair_with_prefill()
    with caplog.at_level(logging.INFO, "kvcore.peers"):
        bench.take(Stranger(closing), "prefill-1", route)
    assert bench.lost_peers == [("prefill-1", f"peer prefill-1 lost: {why}", replaced)]
    assert [record.levelno for record in caplog.records if "lost" in record.message] == [level]


def test_p3_another_instance_at_a_peers_address_replaces_it() -> None:
    bench = Bench("decode-1")
    route = bench.pair_with_prefill()
    bench.take(Stranger(), "prefill-2", route)
    assert bench.lost_peers == [("prefill-1", "peer prefill-1 lost: instance prefill-2 is at its address now", True)]
    assert route.closed and bench.size("links") == 0


def test_this_process_is_not_known_to_be_gone() -> None:
    me = this_process()
    assert not peers.known_gone(me)
    assert peers.known_gone(msgspec.structs.replace(me, started="0")), "another process has its number now"
    assert not peers.known_gone(msgspec.structs.replace(me, started="0", host="elsewhere")), "R4: silence is not knowledge"
