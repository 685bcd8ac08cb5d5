"""The flight record and what is told from it: a room's story, on both sides, also after it is gone."""

from __future__ import annotations

import logging
import threading
import time
import typing
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvcore import KVPoll, RoomError, Security
from kvcore.faults import ControlTap
from kvcore.flight import _WORDS, MOST_ENTRIES, MOST_TOLD, FlightRecord
from kvcore.protocol import events as ev
from kvcore.protocol.messages import Abort, Ack, Destination, Join, Layers, PoolPages, Status
from kvcore.states import FailureCode, Reason, RoomId
from kvcore.stories import ANSWERS_PER_S, BUSY, GONE, NO_ANSWER, Stories
from kvcore.wire import MAX_STORY, Explain, Story
from tests.commands import kvcore, one_line
from tests.helpers import Duo, duo, ended, manager, memory, wait_until
from tests.interrupts import everywhere
from tests.secured import TOKEN, certificate

ROOM = RoomId(7)


@pytest.fixture
def pair() -> Iterator[Duo]:
    with duo(orphan_s=0.4) as both:
        yield both.pair()


def moved(pair: Duo) -> RoomId:
    sender, receiver = pair.open()
    receiver.receive([1, 2])
    sender.send([3], last=False)
    sender.send([4], last=True, record=b"secret")
    ended(sender, KVPoll.SUCCESS)
    ended(receiver, KVPoll.SUCCESS)
    sender.clear()
    receiver.clear()
    return RoomId(sender.room, sender.attempt)


def in_order(story: str, *parts: str) -> bool:
    """Whether the parts stand in a text one after the other."""
    at = 0
    for part in parts:
        at = story.find(part, at) + 1
        if not at:
            return False
    return True


# --- the ring


def test_it_keeps_the_newest_and_no_page_lists() -> None:
    record, message = FlightRecord(), Destination(7, 0, 1, 2, (PoolPages("kv", b"\1\0\0\0"),))
    record.note("prefill", ROOM, ev.Got(message, ev.Party("decode-1")))
    record.note("decode", ROOM, "said again", (ev.Send("prefill-1", message),))
    record.note("decode", ROOM, ev.Receive(1, message.pages))
    [got] = record.of("prefill", ROOM)
    sent, received = record.of("decode", ROOM)
    assert "PoolPages" not in repr([got, sent, received])
    assert got.texts == ["got Destination (receiver 1, sender 2) from decode-1"] and got.peers == {"decode-1"}
    assert sent.texts == ["said again", "sent Destination (receiver 1, sender 2) to prefill-1"] and sent.peers == {"prefill-1"}
    assert received.texts == ["the destination was handed over: 1 pages of 'kv'"] and received.peers == set()
    for _ in range(MOST_ENTRIES + 5):
        record.note("prefill", RoomId(8), "more")
    assert len(record) == MOST_ENTRIES and record.of("prefill", ROOM) == []
    assert len(record.of("prefill", RoomId(8))) == MOST_TOLD


def test_whatever_a_signal_handler_raises_it_goes_on_and_forgets_what_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore.flight.MOST_ENTRIES", 4)
    record, rooms = FlightRecord(), [RoomId(number) for number in range(3)]

    def note_each() -> None:
        for room in rooms:
            record.note("prefill", room, "x")

    for _ in everywhere(note_each, ("call", "line"), ("kvcore/flight.py",)):
        note_each()
        assert len(record) <= 4
    for _ in range(5):
        record.note("prefill", ROOM, "x")
    assert len(record.of("prefill", ROOM)) == 4 and len(record._rooms) == 1


def test_a_story_of_which_the_beginning_is_lost_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a room looks younger than it is."""
    monkeypatch.setattr("kvcore.flight.MOST_ENTRIES", 3)
    record, party = FlightRecord(), ev.Party("decode-1")
    for what in (ev.Open(1), ev.Got(Join(7, 0, 1, 0), party), "said again"):
        record.note("prefill", ROOM, what)
    assert record.lines(record.of("prefill", ROOM))[0].endswith("opened, generation 1")
    record.note("prefill", ROOM, "more")
    assert "got Join" in record.lines(record.of("prefill", ROOM))[0], "a sender's story may begin with a join"
    record.note("prefill", ROOM, "more")
    lost, first, *_ = record.lines(record.of("prefill", ROOM))
    assert "has left the record" in lost and "said again" in first
    assert record.lines([]) == []


def test_every_event_and_effect_has_words() -> None:
    assert set(_WORDS) == {*typing.get_args(ev.Event), *typing.get_args(ev.Effect)}


def test_a_note_takes_microseconds() -> None:
    record, event, took = FlightRecord(), ev.Ended(ev.Pair("decode-1", 1, 2), 1, True, True), list[float]()
    for _ in range(20):
        began = time.thread_time()
        for number in range(1000):
            record.note("prefill", RoomId(number), event)
        took.append((time.thread_time() - began) / 1000)
    assert min(took) < 20e-6


# --- the story of a room


def test_the_story_has_both_sides_also_after_clear(pair: Duo) -> None:
    room = moved(pair)
    wait_until(lambda: "got Ack" in pair.prefill.explain(room.number, wait_s=0))
    for here, there in ((pair.prefill, pair.decode), (pair.decode, pair.prefill)):
        story = here.explain(room.number)
        own, other = story.split(f"\n{there.instance}: ", 1)
        sender, receiver = (own, other) if here is pair.prefill else (other, own)
        assert in_order(sender, f"room {room} (prefill)", "BOOTSTRAPPING", "sent Here", "got Destination")
        assert in_order(sender, "a chunk was handed over", "ticket of chunk 1", "started", "ticket of chunk 2", "done", "SUCCESS")
        assert in_order(sender, "sent Status SUCCESS", "cleared")
        assert in_order(receiver, f"room {room} (decode)", "BOOTSTRAPPING", "sender ranks: ", "got Here", "sent Destination", "SUCCESS")
        assert "nothing is stored" in own and "secret" not in story
        assert story.count("kept: ") == 0
        assert len(here.explain(room.number, wait_s=0).splitlines()) == len(own.splitlines())


def test_one_side_alone_is_told_without_asking(pair: Duo) -> None:
    room = moved(pair)
    assert "(decode)" not in pair.prefill.explain(room.number, side="prefill")
    assert pair.prefill.explain(10**6) == "room 1000000 (prefill)\n  nothing is stored\n"


def test_who_does_not_answer_is_named_and_not_waited_for(pair: Duo) -> None:
    room = moved(pair)
    with ControlTap(pair.decode) as tap:
        tap.drop(lambda letter, _: isinstance(letter.body, Explain))
        began = time.monotonic()
        story = pair.prefill.explain(room.number, wait_s=0.2)
        assert f"{pair.decode.instance}: {NO_ANSWER}\n" in story and 0.2 <= time.monotonic() - began < 5
    pair.decode.close()
    wait_until(lambda: pair.prefill.stats().peers == 0)
    assert f"{pair.decode.instance}: {GONE}\n" in pair.prefill.explain(room.number, wait_s=30)
    assert pair.prefill.stats().stores["questions"] == 0


def test_a_failure_is_told_where_it_came_from(pair: Duo) -> None:
    sender, receiver = pair.open()
    receiver.abort("the client is gone")
    ended(sender, KVPoll.FAILED)
    assert in_order(
        pair.prefill.explain(sender.room), "got Abort", "FAILED: ", "the client is gone", "(decode)", "failed here", "sent Abort"
    )


@pytest.mark.parametrize("wait_s", [-1, float("nan"), True, "1", None, 1e300])
def test_an_odd_time_to_wait_is_refused(pair: Duo, wait_s: Any) -> None:
    with pytest.raises(RoomError, match="wait_s"):
        pair.prefill.explain(7, wait_s=wait_s)


# --- questions and answers


class FakeHome:
    def __init__(self, story: str = "what is known\n") -> None:
        self.text, self.asked = story, list[str]()

    def story(self, room: int, attempt: int) -> str:
        return self.text

    def met(self, room: RoomId) -> set[str]:
        return {"decode-1", "decode-2"}

    def ask(self, instance: str, question: Explain) -> bool:
        self.asked.append(instance)
        return True

    def on_control(self, call: Any) -> None:
        call()


def test_only_who_was_asked_answers_and_only_once() -> None:
    stories = Stories(FakeHome())
    with stories.asking(ROOM) as asked:
        stories.told("decode-9", Story(1, "forged"))
        stories.told("decode-1", Story(9, "of another question"))
        stories.told("decode-1", Story(1, "first\n  \x1b[31mred\n"))
        stories.told("decode-1", Story(1, "second"))
        assert not asked.complete.done()
        stories.told("decode-2", Story(1, ""))
        assert asked.complete.done()
        stories.told("decode-2", Story(1, "late"))
    assert asked.text().startswith("what is known\ndecode-1: \n  first\n  ") and asked.text().endswith(f"decode-2: {NO_ANSWER}\n")
    assert not any(word in asked.text() for word in ("\x1b", "forged", "second", "late", "another"))
    stories.told("decode-2", Story(1, "after the end"))
    assert len(stories) == 0


def test_answers_are_bounded_in_size_and_number() -> None:
    now = [0.0]
    stories = Stories(FakeHome("x" * (MAX_STORY + 5)), lambda: now[0])
    answers = [stories.answer(Explain(number, 7)) for number in range(3 * ANSWERS_PER_S)]
    assert sum(answer.text != BUSY for answer in answers) == ANSWERS_PER_S
    assert len(answers[0].text) == MAX_STORY and answers[-1] == Story(3 * ANSWERS_PER_S - 1, BUSY)
    now[0] += 1.0
    assert stories.answer(Explain(1, 7)).text != BUSY


# --- the command


def test_the_command_shows_both_sides() -> None:
    source, target = memory(8, seed=3), memory(8)
    with manager("prefill", source, admin="127.0.0.1:0") as prefill, manager("decode", target) as decode:
        room = moved(Duo(prefill, decode, source, target).pair())
        done = kvcore("explain", str(room.number), "--address", prefill.admin_address)
    assert (done.returncode, done.stderr) == (0, "")
    assert in_order(done.stdout, "(prefill)", "SUCCESS", f"{decode.instance}:", "(decode)", "SUCCESS")


def test_the_command_shows_its_token_and_speaks_tls(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    token = tmp_path / "token"
    token.write_text(TOKEN)
    security = Security(token_file=str(token), tls_cert=cert, tls_key=key, tls_ca=cert)
    with manager("prefill", memory(4), admin="127.0.0.1:0", security=security) as prefill:
        asked = ("explain", "7", "--address", prefill.admin_address, "--tls-ca", cert)
        done = kvcore(*asked, "--token-file", str(token))
        assert (done.returncode, done.stdout, done.stderr) == (0, "room 7 (prefill)\n  nothing is stored\n", "")
        assert "give it with --token-file" in kvcore(*asked).stderr
        assert "gave no answer" in kvcore(*asked[:-2]).stderr


def test_the_command_follows_nobody_elsewhere_with_its_token(tmp_path: Path) -> None:
    asked: list[str] = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(302)
            self.send_header("Location", f"http://127.0.0.1:{server.server_port}/elsewhere")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    (tmp_path / "token").write_text(TOKEN)
    with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            done = kvcore("explain", "7", "--address", f"127.0.0.1:{server.server_port}", "--token-file", str(tmp_path / "token"))
        finally:
            server.shutdown()
    assert done.returncode == 1 and "answered 302" in done.stderr and one_line(done.stderr)
    assert asked == ["/rooms/7?attempt=0"]


def test_the_command_says_what_is_wrong() -> None:
    with manager("prefill", memory(4)) as prefill:
        for address, code, part in (
            ("127.0.0.1:1", 1, "127.0.0.1:1 gave no answer (Connection refused); see whether it runs; else pass"),
            (prefill.address, 1, "answered 404"),  # the bootstrap service
            ("nowhere", 1, "--address"),
        ):
            done = kvcore("explain", "7", "--address", address)
            assert done.returncode == code and part in done.stderr and one_line(done.stderr)
    assert kvcore("explain", "x", "--address", "127.0.0.1:1").returncode == 2


# --- logs


def test_log_records_name_room_and_peer_in_fields(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvcore")
    with duo(bootstrap_s=0.2) as pair:
        pair.pair()
        lonely = pair.prefill.sender(2**40, attempt=3)
        ended(lonely, KVPoll.FAILED)
    limits = [record.__dict__ for record in caplog.records if "bootstrap_s passed" in record.getMessage()]
    assert [(one["room"], one["attempt"], one["side"], one["generation"]) for one in limits] == [(2**40, 3, "prefill", lonely.generation)]
    paired = [record.__dict__["peer"] for record in caplog.records if record.getMessage().startswith("paired with")]
    assert sorted(paired) == sorted([pair.prefill.instance, pair.decode.instance])


def test_an_entry_keeps_no_lists_and_no_more_than_the_beginning_of_a_reason() -> None:
    record, long = FlightRecord(), Reason.of(FailureCode.ABORTED, "x" * 1000, "decode")
    status = Status(7, 0, 1, 2, KVPoll.FAILED, long, b"r" * 1000)
    for message in (Layers(7, 0, 1, 2, 3, tuple(range(4096))), status, Abort(7, 0, 1, 2, long)):
        record.note("prefill", ROOM, ev.Got(message, ev.Party("decode-1")))
    record.note("prefill", ROOM, "FAILED: " + "y" * 5000)
    assert all(len(repr(entry)) < 1200 for entry in record.of("prefill", ROOM))
    for _ in range(2 * MOST_TOLD):
        record.note("prefill", ROOM, "again")
    assert len(record.of("prefill", ROOM)) == MOST_TOLD


def test_what_is_kept_is_told_in_words(pair: Duo) -> None:
    with ControlTap(pair.decode) as tap:
        tap.drop(lambda letter, _: isinstance(letter.body, Ack))
        room = moved(pair)
        told = pair.prefill.explain(room.number, wait_s=0)
    assert f"kept: SUCCESS, which {pair.decode.instance} has not acknowledged" in told and "secret" not in told


def test_a_closed_manager_asks_nobody(pair: Duo) -> None:
    room = moved(pair)
    pair.prefill.close()
    began = time.monotonic()
    assert "SUCCESS" in pair.prefill.explain(room.number, wait_s=60) and time.monotonic() - began < 30
    assert pair.prefill.stats().stores["control_calls"] == 0
