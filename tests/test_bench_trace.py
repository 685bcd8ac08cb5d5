"""``kvcore bench trace``: traces as they are read, pages as they are shared, and a replay whose every figure is counted again."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from kvcore import Handle, KVPoll, Receiver, Sender, cli
from kvcore.bench import trace
from kvcore.bench.bare import Bare
from kvcore.bench.floor import Figures
from kvcore.bench.page_content import PageContent
from kvcore.bench.prefix_cache import Lease, PrefixCache
from kvcore.bench.replay import Decode, Prefill
from kvcore.bench.scheduler import Parameters, Played
from kvcore.bench.setup import Address, Setup
from kvcore.bench.trace_file import Request, digest, read
from kvcore.bench.waiting import Opener
from kvcore.buffers import Buffer
from kvcore.progress import unwatched
from kvcore.sides import ToolError
from kvcore.states import Side
from tests.commands import kvcore, one_line
from tests.helpers import ROOT, duo, stays, wait_until
from tests.made_backends import LYING, make_backend

SAMPLE = ROOT / "examples" / "trace.jsonl"
FAST = ("--speed", "60", "--page-bytes", "1024", "--requests", "20", "--repeats", "1")

# --- the sample


def sample(seed: int, conversations: int = 12, turns: int = 4) -> str:
    """Conversations over less than a minute that share the start of a system's prompt; each turn's input is all that was said before and
    something new. As many requests as there are turns, in order of time."""
    chance, names = random.Random(seed), count(2)
    requests = []
    for _ in range(conversations):
        at_ms, tokens, blocks = int(20_000 * chance.random()), 1024, [0, 1]
        for _ in range(turns):
            tokens += 60 + int(1600 * chance.random() ** 2)
            blocks += [next(names) for _ in range(-(-tokens // 512) - len(blocks))]
            output = 20 + int(280 * chance.random())
            requests.append({"timestamp": at_ms, "input_length": tokens, "output_length": output, "hash_ids": list(blocks)})
            if tokens % 512:
                blocks.pop()  # it will be another one once more is written into it
            tokens += output
            at_ms += 4000 + int(8000 * chance.random())
    return "".join(json.dumps(request) + "\n" for request in sorted(requests, key=lambda request: request["timestamp"]))


def test_the_sample_is_what_its_generator_makes() -> None:
    assert SAMPLE.read_text(encoding="utf-8") == sample(seed=9)


# --- what is read


def written(folder: Path, *lines: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def line(timestamp: float, tokens: int, *ids: int, output: int = 1, **more: object) -> dict[str, object]:
    return {"timestamp": timestamp, "input_length": tokens, "output_length": output, "hash_ids": ids, **more}


def starts(tokens: int, ids: list[int]) -> list[tuple[object, ...]]:
    """What each block of a request is: all ids up to its own, and how many tokens it has."""
    return [(*ids[: n + 1], min(512, tokens - 512 * n)) for n in range(len(ids))]


def test_blocks_have_one_number_where_they_begin_alike_and_another_where_they_do_not(tmp_path: Path) -> None:
    lines = [
        line(0, 1024, 7, 8), line(0, 1025, 7, 8, 9), line(0, 600, 7, 8), line(0, 1024, 8, 7), line(0, 1000, 2**70, -1), line(0, 600, 7, 8)
    ]  # fmt: skip
    for path in (written(tmp_path, *lines), SAMPLE):
        asked = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
        requests = read(path, 1000)
        pairs = [
            pair
            for one, request in zip(asked, requests, strict=True)
            for pair in zip(starts(one["input_length"], one["hash_ids"]), request.blocks, strict=True)
        ]
        assert len(set(pairs)) == len({start for start, _ in pairs}) == len({number for _, number in pairs})


@pytest.mark.parametrize("page_tokens", [1, 16, 64, 512])
def test_a_block_takes_as_many_pages_as_hold_its_tokens(page_tokens: int, tmp_path: Path) -> None:
    for tokens in (1, 15, 16, 17, 511, 512, 513, 1000, 1024, 1025):
        (request,) = read(written(tmp_path, line(0, tokens, *range(-(-tokens // 512)))), 1)
        pages = request.pages(page_tokens)
        assert len(pages) == len(request.blocks) and sum(pages) == -(-tokens // page_tokens)
        assert all(each == 512 // page_tokens for each in pages[:-1])


def test_requests_are_in_order_of_time_from_the_first_on(tmp_path: Path) -> None:
    path = written(tmp_path, line(2500.5, 1, 0), line(2000, 2, 0, more="left alone"), line(2500.5, 3, 0), line(9000, 4, 0))
    path.write_text("\n" + path.read_text(encoding="utf-8") + "\n \n", encoding="utf-8")
    found = read(path, 3)
    assert [(one.arrival_s, one.input_tokens) for one in found] == [(0.0, 2), (0.5005, 1), (0.5005, 3)]


def test_a_digest_is_that_of_what_is_played(tmp_path: Path) -> None:
    path = written(tmp_path, line(0, 512, 7, more=1), line(5, 600, 7, 8))
    same = path.rename(tmp_path / "other.jsonl")
    played = digest(read(same, 2))
    assert played == digest(read(written(tmp_path, line(100, 512, 1), line(105, 600, 1, 2)), 9))
    others = [
        (line(0, 512, 7), line(6, 600, 7, 8)),
        (line(0, 512, 7), line(5, 600, 8, 9)),
        (line(0, 512, 7), line(5, 601, 7, 8)),
        (line(0, 512, 7),),
    ]
    assert len({played, *(digest(read(written(tmp_path, *lines), 9)) for lines in others)}) == 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no request; write one a line"),
        ("\n \n", "holds no request; write one a line"),
        ("{}", "line 1: Object missing required field"),
        ("\n\n[1]", "line 3: Expected `object`, got `array`"),
        ('{"timestamp": 0,', "line 1: Input data was truncated"),
        ('\n{"timestamp": "0", "input_length": 1, "output_length": 1, "hash_ids": [1]}', "line 2: Expected `float`, got `str`"),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": [1]}', "line 1: Expected `float` >= 0"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}', "line 1: Expected `int` >= 1"),
        ('{"timestamp": 0, "input_length": 1.5, "output_length": 1, "hash_ids": [1]}', "line 1: Expected `int`, got `float`"),
        ('{"timestamp": 0, "input_length": 1, "output_length": -1, "hash_ids": [1]}', "line 1: Expected `int` >= 0"),
        ('{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}', "line 1: 1 hash_ids for an input of 513 tokens"),
        ('{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1, 2]}', "line 1: 2 hash_ids for an input of 512 tokens"),
        ('\n{"timestamp": 0, "input_length": 1537, "output_length": 1, "hash_ids": [1, 5, 2, 5]}', "line 2: id 5 stands in hash_ids twice"),
        ('{"a": ' + "[" * 100_000, "line 1: "),
        ("1" * (2 << 20), "line 1: it is longer than 1048576 bytes"),
        ("\x00\ud800\x1b[2J", "line 1: JSON is malformed"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_refused_in_one_line_that_says_where(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    assert cli.run(["bench", "trace", str(path)]) == 1
    out, error = capsys.readouterr()
    assert not out and one_line(error) and f"{path.name}" in error and said in error


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("nowhere.jsonl",), 2, "'nowhere.jsonl' does not exist"),
        ((str(SAMPLE), "--page-tokens", "48"), 2, "no multiple of 48"),
        ((str(SAMPLE), "--speed", "nan"), 2, "nan is not a number above 0"),
        ((str(SAMPLE), "--memory", "262144"), 1, "takes 18 pages, and a side's memory has 16; give --memory 294912 or more"),
    ],
)
def test_what_cannot_be_played_is_refused_in_one_line(
    arguments: tuple[str, ...], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["bench", "trace", *arguments]) == code
    out, error = capsys.readouterr()
    assert not out and one_line(error) and said in error


def test_a_trace_that_takes_long_says_so_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its requests end 35 and 25 seconds after the first arrival, and are played three times: an hour, and a second less than a minute."""
    path = written(tmp_path, line(7000, 1, 0, output=1750), line(17_000, 1, 0, output=750))
    monkeypatch.setattr(trace, "play", Mock(side_effect=ToolError("begun")))
    for speed, said in ((105 / 3600, "at --speed 0.0291667 2 requests, played 3 times, take 1:00:00 at least"), (105 / 59, "")):
        assert cli.run(["bench", "trace", str(path), "--speed", str(speed), "--repeats", "2"]) == 1
        assert capsys.readouterr().err == f"kvcore: {said}\n" * bool(said) + "kvcore: begun\n"


# --- pages


def test_content_differs_from_page_to_page_and_one_wrong_byte_is_found() -> None:
    content, buffer, pages = PageContent(4096), Buffer(frozenset({"cpu"}), 600, 4096), np.arange(600)
    numbers = pages * 977 + 5
    content.write(buffer, pages, numbers)
    assert len({page.tobytes() for page in buffer.read()}) == len({page[8:].tobytes() for page in buffer.read()}) == 600
    assert not np.array_equal(*content.of(np.array([7, 7 + (1 << 40)])))
    content.check(buffer, pages, numbers, Setup("local"))
    buffer.tensor[599, 4095] ^= 1
    with pytest.raises(ToolError, match="1 of 88 pages have arrived with wrong bytes"):
        content.check(buffer, pages, numbers, Setup("local"))


@pytest.mark.parametrize("seed", range(20))
def test_what_is_said_to_be_there_is_there_and_no_page_in_use_is_given_away(seed: int) -> None:
    """A page's content is noted beside the cache, and what it says is held against that."""
    chance, total = random.Random(seed), 24
    cache, content, live = PrefixCache(range(total)), dict[int, int](), list[tuple[Lease, bool]]()
    held = refused = 0
    for _ in range(600):
        if live and chance.random() < 0.5:
            lease, filled = live.pop(chance.randrange(len(live)))
            cache.release(lease) if filled else (cache.filled(lease), live.append((lease, True)))
        else:
            blocks = [chance.randrange(2)]
            while len(blocks) < 4 and chance.random() < 0.7:
                blocks.append(10 * (blocks[-1] + 1) + chance.randrange(2))
            made = cache.lease(blocks, [2] * len(blocks))
            used = {page for lease, _ in live for page in lease.pages.tolist()}
            if made is None:
                assert len(used) + 2 * len(blocks) > total
                refused += 1
                continue
            there, missing = made.pages[: made.prefix].tolist(), made.pages[made.prefix :].tolist()
            assert [content.get(page) for page in there] == [block for block in blocks for _ in range(2)][: made.prefix]
            assert not used & set(missing) and len(set(made.pages.tolist())) == 2 * len(blocks)
            content.update(zip(missing, [block for block in blocks for _ in range(2)][made.prefix :], strict=True))
            live.append((made, False))
            held += made.prefix
        assert cache.in_use == len({page for lease, _ in live for page in lease.pages.tolist()})
    assert held and refused


def leased(cache: PrefixCache, *blocks: int) -> Lease:
    lease = cache.lease(blocks, [1] * len(blocks))
    assert lease is not None
    return lease


def served(cache: PrefixCache, *blocks: int) -> int:
    """A request from first to last; how many of its pages were there."""
    lease = leased(cache, *blocks)
    cache.filled(lease)
    cache.release(lease)
    return lease.prefix


def test_pages_used_longest_ago_go_first_and_of_a_request_the_last() -> None:
    cache = PrefixCache(range(6))
    assert [served(cache, 1, 2, 3), served(cache, 4, 5, 6), served(cache, 1)] == [0, 0, 1]
    assert served(cache, 7) == 0  # takes the page of 3: 1 was used again, and without 2 it is of no use
    assert served(cache, 1, 2, 3) == 2  # takes that of 6
    assert served(cache, 4, 5, 6) == 2


def test_what_is_under_way_is_not_there_yet_and_two_that_bring_the_same_leave_it_once() -> None:
    cache = PrefixCache(range(4))
    one, two = leased(cache, 1, 2), leased(cache, 1, 2)
    assert (one.prefix, two.prefix, cache.in_use) == (0, 0, 4)
    assert cache.lease([3], [1]) is None
    cache.filled(one)
    cache.filled(two)
    cache.release(two)
    assert cache.in_use == 2 and leased(cache, 1, 2).pages.tolist() == one.pages.tolist()
    assert leased(cache, 3, 4).prefix == 0


# --- what is played


def skipped(path: Path, played: dict[Side, Played], page_tokens: int) -> list[int]:
    """Pages that decode had, if it forgets nothing: of the longest beginning that had arrived for anyone when a request got its pages."""
    asked = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    decode, found = played["decode"], []
    for number, one in enumerate(asked):
        there = {
            start
            for other, before in enumerate(asked)
            if other != number and decode.complete_s[other] <= decode.placed_s[number]
            for start in starts(before["input_length"], before["hash_ids"])
        }
        mine = starts(one["input_length"], one["hash_ids"])
        leading = next((n for n, start in enumerate(mine) if start not in there), len(mine))
        found.append(-(-min(512 * leading, one["input_length"]) // page_tokens))
    return found


def pages_of(path: Path, page_tokens: int) -> list[int]:
    return [-(-json.loads(text)["input_length"] // page_tokens) for text in path.read_text(encoding="utf-8").splitlines()]


def test_what_decode_had_already_is_skipped_and_all_else_is_sent(tmp_path: Path) -> None:
    """The sample within a twentieth of a second, so that many are under way at a time, and its requests once more when they are over."""
    path, lines = tmp_path / "trace.jsonl", SAMPLE.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines) + "".join(json.dumps(json.loads(text) | {"timestamp": 2_000_000}) + "\n" for text in lines))
    parameters = Parameters(path, speed=1000, page_tokens=32, page_bytes=512, repeats=1)
    (played,), floor = trace.play(Setup("local"), parameters, read(path, 1000), unwatched)
    prefill, decode = played["prefill"], played["decode"]
    sent, pages = [moved.size for moved in decode.moved], pages_of(path, 32)
    assert sent == [moved.size for moved in prefill.moved]
    assert [a + b for a, b in zip(sent, skipped(path, played, 32), strict=True)] == pages
    assert 0 in sent and 0 < sum(sent) < sum(pages)
    assert (decode.placed_s < decode.complete_s).all() and (prefill.placed_s < prefill.complete_s).all()
    assert (prefill.complete_s < decode.complete_s).all()
    assert floor.figures is not None and len(floor.figures.rates) == 1


def test_where_memory_is_short_requests_queue_and_what_is_not_used_makes_room() -> None:
    short = 2 * max(pages_of(SAMPLE, 64))
    parameters = Parameters(SAMPLE, speed=200, page_bytes=512, memory_bytes=512 * short, limit_ms=1e-3, repeats=1)
    requests = read(SAMPLE, 1000)
    (played,), floor = trace.play(Setup("local"), parameters, requests, unwatched)
    found = trace.result(parameters, requests, [played], floor.bare)
    decode, arrived = played["decode"], np.array([request.arrival_s for request in requests]) / 200
    for side in played.values():
        assert 0 < side.pages_most <= short
        assert (np.diff(side.placed_s) >= 0).all(), "pages are given out in order of arrival"
    held_s = np.array([request.output_tokens for request in requests]) * parameters.token_ms / 1e3 / 200
    for number, at in enumerate(decode.placed_s):
        held = (decode.placed_s < at) & (decode.complete_s + held_s > at)
        in_use = {page for other in np.flatnonzero(held) for page in decode.moved[other].tolist()}
        assert not in_use & set(decode.moved[number].tolist()) and len(in_use) + decode.moved[number].size <= short
    queued_s = np.maximum(decode.placed_s, played["prefill"].placed_s) - arrived
    assert found.queueing_ms_max == pytest.approx(1e3 * float(queued_s.max())) and queued_s.max() > held_s.min()
    assert found.good_share == found.good_per_s == 0
    assert found.bytes_sent + found.bytes_skipped == found.bytes_verified // 2 == 512 * sum(pages_of(SAMPLE, 64))


def test_figures_are_those_of_the_times() -> None:
    requests = [Request(arrival, 1024, 10, (0, 1)) for arrival in (0.0, 10.0, 20.0, 30.0)]
    page, none = np.array([3]), np.empty(0, np.int64)
    here = Played(np.array([0.0, 1, 2, 3.5]), np.array([0.1, 1.1, 2.1, 3.6]), [page, page, none, page], 7, 1, 0.4)
    there = Played(np.array([0.2, 1.0, 2.4, 3.0]), np.array([0.3, 1.5, 2.5, 4.0]), [page, page, none, page], 9, 2, 0.8)
    again = Played(there.placed_s, there.complete_s + 1.0, there.moved, 5, 0, 1.6)
    alone = Figures("fast", {"fast": 9.0}, (10.0, 5.0), {"prefill": (0.3, 0.9), "decode": (3.0, 9.0)}, (60.0, 80.0))
    parameters = Parameters(Path("t"), speed=10, page_tokens=512, page_bytes=100, limit_ms=500.0)
    repeats: list[dict[Side, Played]] = [{"prefill": here, "decode": there}, {"prefill": here, "decode": again}]
    found = trace.result(parameters, requests, repeats, Bare(0.1, (0.1,), 0.2, (0.2,), None, ()), alone)
    assert (found.queueing_ms_median, found.queueing_ms_max) == (pytest.approx(300.0), pytest.approx(500.0))
    assert found.transfer_ms_mean_each == (pytest.approx(250.0), pytest.approx(1250.0)) and found.transfer_ms_mean == pytest.approx(750.0)
    assert found.transfer_ms_median_each == (pytest.approx(250.0), pytest.approx(1250.0))
    assert (found.total_ms_median_each[0], found.total_ms_max) == (pytest.approx(500.0), pytest.approx(2000.0))
    assert len(found.total_ms_percentiles) == 101 and found.total_ms_percentiles[0] == pytest.approx(300.0)
    assert (found.good_share_each, found.good_per_s_each) == ((0.75, 0.0), (0.75, 0.0)) and found.good_share == 0.375
    assert (found.bytes_sent, found.bytes_skipped, found.bytes_verified, found.skipped_share) == (600, 1000, 2400, 0.625)
    assert (found.prefill_pages_most, found.decode_pages_most, found.quarantined_pages_most) == (7, 9, 2)
    assert (found.prefill_cpu_ms_per_request, found.decode_cpu_ms_per_request) == (pytest.approx(100.0), pytest.approx(300.0))
    assert found.raw is not None and (found.raw.transfer_ms_mean_each, found.raw.transfer_ms_median) == ((100.0, 200.0), 70.0)
    assert found.raw.kvcore_times_each == (pytest.approx(3.0), pytest.approx(6.5))  # of 0.1, 0.4 and 0.4 s, and a second more
    assert (found.raw.prefill_cpu_ms_per_transfer, found.raw.decode_cpu_ms_per_transfer) == (pytest.approx(200.0), pytest.approx(2000.0))
    assert "4 requests in 4.50 s, 2 times" in "\n".join(trace.table([found]))


def test_a_trace_is_played_as_a_command() -> None:
    done = kvcore("bench", "trace", str(SAMPLE), *FAST, "--json", "-")
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    assert (found["command"], found["parameters"]["speed"], found["parameters"]["requests"]) == ("bench trace", 60, 20)
    (one,) = found["results"]
    assert (one["requests"], one["quarantined_pages_most"]) == (20, 0)
    for time in ("queueing_ms", "transfer_ms", "total_ms"):
        shares = [one[f"{time}_{share}"] for share in ("median", "p90", "p99", "max")]
        assert shares[0] >= 0 and shares == sorted(shares) and one[f"{time}_percentiles"][99] == shares[2]
    assert 2 * (one["bytes_sent"] + one["bytes_skipped"]) == one["bytes_verified"] == 2 * 1024 * sum(pages_of(SAMPLE, 64)[:20])
    assert one["prefill_cpu_ms_per_request"] > 0 and one["decode_cpu_ms_per_request"] > 0
    assert one["raw"]["way"] == "sendmsg" and one["raw"]["kvcore_times"] > 1


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """The command over a backend of that body, for this process to run."""

    def make(body: str) -> list[str]:
        monkeypatch.syspath_prepend(make_backend(tmp_path, "mine", body))
        return ["bench", "trace", str(SAMPLE), *FAST, "--backend", "mine"]

    return make


def test_a_trace_is_told_in_a_table_also_without_an_engine_alone(
    made: Callable[[str], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(made("")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("20 requests in ") and lines[-2].startswith("all of ") and "no floor of mine is installed" in lines[-1]


@pytest.mark.parametrize(("kind", "handle"), [(Prefill, Sender), (Decode, Receiver)], ids=["prefill", "decode"])
def test_pages_are_used_again_only_when_their_room_is_release_safe(kind: type[Prefill | Decode], handle: type[Handle]) -> None:
    """Two requests, memory for one of them, rooms that are over at once and not safe for long."""
    requests = [Request(0.0, 1024, 1, (0, 1)), Request(0.0, 1024, 1, (2, 3))]
    parameters = Parameters(Path("t"), speed=1e6, page_tokens=512, page_bytes=64, memory_bytes=3 * 64)
    rooms = [Mock(handle, prefix_pages={"kv": 0}, **{"is_release_safe.return_value": False}) for _ in requests]
    states = dict.fromkeys(rooms, KVPoll.WAITING_FOR_INPUT)
    mine = Mock(**{"poll_all.side_effect": lambda handles: [states[one] for one in handles]})
    side = kind(Mock(**{"open.side_effect": rooms}), mine, Buffer(frozenset({"cpu"}), 3, 64), (Setup("local"), parameters, requests), 0)
    if isinstance(side, Decode):
        side.content.check = Mock()  # type: ignore[method-assign]  # nobody writes here

    def stepped(left: int) -> bool:
        side.step()
        return side.left == left

    side.open(0)
    side.open(1)
    wait_until(lambda: not stepped(0) and len(side.played.moved[0]) == 2)
    states[rooms[0]] = KVPoll.SUCCESS
    stays(lambda: not stepped(1) and not len(side.played.moved[1]), 0.2)
    assert rooms[0].clear.called
    rooms[0].is_release_safe.return_value = True
    wait_until(lambda: stepped(1) and len(side.played.moved[1]) == 2)
    states[rooms[1]] = KVPoll.SUCCESS
    rooms[1].is_release_safe.return_value = True
    wait_until(lambda: stepped(0))
    side.aside.close()


def test_prefill_neither_writes_nor_keeps_twice_what_an_earlier_request_has_written() -> None:
    """Two requests that begin alike, memory for both only where they share that, and a decode that has it already for the second."""
    requests = [Request(0.0, 1024, 1, (0, 1)), Request(0.0, 1024, 1, (0, 2))]
    parameters = Parameters(Path("t"), page_tokens=512, page_bytes=64, memory_bytes=3 * 64)
    rooms = [Mock(Sender, prefix_pages={"kv": there}) for there in (0, 1)]
    mine = Mock(**{"poll_all.side_effect": lambda handles: [KVPoll.WAITING_FOR_INPUT] * len(handles)})
    settings = (Setup("local"), parameters, requests)
    prefill = Prefill(Mock(**{"open.side_effect": rooms}), mine, Buffer(frozenset({"cpu"}), 3, 64), settings, 0)
    prefill.content.write = written = Mock()  # type: ignore[method-assign]
    for number in (0, 1):
        prefill.open(number)
        wait_until(lambda number=number: prefill.step() is not None or bool(rooms[number].send.called))  # type: ignore[misc]
    (first, own), (second,) = (room.send.call_args.args[0].tolist() for room in rooms)
    assert len({first, own, second}) == prefill.played.pages_most == 3
    found = [(call.args[1].tolist(), call.args[2].tolist()) for call in written.call_args_list]
    assert found == [([first, own], [0, 1]), ([second], [2])]
    prefill.aside.close()


# --- what goes wrong

LATE = """
@hookimpl
def kvcore_transfer(self, transfer):
    import numpy as np
    self.calls = getattr(self, "calls", 0) + 1
    if self.calls == 2:
        self.seen = set(transfer.remote_offset.tolist())
    if self.calls == 4:
        count = len(self.seen)
        names = ("local_region", "remote_region", "local_offset", "length")
        again = {name: np.append(getattr(transfer, name), [getattr(transfer, name)[0]] * count) for name in names}
        again = {name: array.astype(getattr(transfer, name).dtype) for name, array in again.items()}
        transfer = replace(transfer, remote_offset=np.append(transfer.remote_offset, np.array([*self.seen], np.uint64)), **again)
    return super().kvcore_transfer(transfer)
"""
"""Its fourth transfer, that of the third request, writes into the pages of the second, the first request's, too."""
REFUSING = """
@hookimpl
def kvcore_transfer(self, transfer):
    if transfer.room.number > 1:
        raise OSError("link down")
    return super().kvcore_transfer(transfer)
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (LYING, "pages have arrived with wrong bytes; try: kvcore doctor mine"),
        pytest.param(LATE, "pages have arrived with wrong bytes; try: kvcore doctor mine", marks=pytest.mark.slow),
        pytest.param(REFUSING, "link down", marks=pytest.mark.slow),
    ],
    ids=["not sent", "overwritten while nobody used it", "failed"],
)
def test_what_goes_wrong_fails_the_measurement(
    body: str, said: str, made: Callable[[str], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(made(body)) == 1
    out, error = capsys.readouterr()
    assert not out and one_line(error) and said in error


def test_a_room_that_gets_nowhere_fails_the_measurement_after_the_time_that_was_given() -> None:
    requests = [Request(0.0, 512, 1, (0,))]
    settings = (Setup("local", patience_s=0.2), Parameters(Path("t"), page_tokens=512, page_bytes=64, memory_bytes=64 * 32), requests)
    with duo() as pair:
        opener = Opener(pair.decode, "decode", Mock(**{"hear.return_value": Address(pair.prefill.address)}))
        decode = Decode(opener, pair.decode, Buffer(frozenset({"cpu"}), 32, 64), settings, attempt=0)
        decode.open(0)
        decode.step()
        with pytest.raises(
            ToolError, match="request 1 is still BOOTSTRAPPING 0.2 s after decode had pages for it; try: kvcore doctor local"
        ):
            wait_until(lambda: decode.step() is not None)
        decode.aside.close()
