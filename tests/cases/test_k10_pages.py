"""Layout, pages and chunks: what is sent is what arrives, each page once, and what does not fit is refused before a byte moves."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

import kvcore
from kvcore import FailureCode, Handle, KVManager, KVPoll, PageError, Pool, Region, introduction
from kvcore.faults import ControlTap
from kvcore.hookspecs import DONE, Capabilities, Transfer
from kvcore.wire import Letter, Refuse
from tests.fake_backends import MemoryBackend, install
from tests.helpers import BACKENDS, SOON_S, Calls, Duo, config, duo, ended, manager, memory, number, stays, wait_until

PAGE = 64
"""Tokens in a page."""
CHUNKS = (1, 63, 64, 65, 0)
"""Tokens in a chunk; in all, three pages and one token more."""
PER_ROOM = 4
"""Pages that these fill."""


@pytest.fixture(params=BACKENDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Duo]:
    with duo(request.param) as both:
        yield both.pair()


def failure(handle: Handle) -> kvcore.KVTransferError:
    """Why a room has failed; it has, soon."""
    ended(handle, KVPoll.FAILED)
    found = handle.failure
    assert found is not None
    return found


def lie(receiver: kvcore.Receiver, pages: Sequence[int]) -> None:
    """``receive`` with indices that it would refuse, as a peer without that check would publish them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pool, "indices", lambda _, pages: np.array(pages, np.int64))
        patch.setattr("kvcore.handles.check_distinct", lambda *_: None)
        receiver.receive(pages)


# --- C83


def sends(tokens: Sequence[int], pages: Sequence[int], last_is_empty: bool) -> list[tuple[list[int], bool]]:
    """What an engine hands over after each chunk: the pages that it completed, and with the end of the prompt the one begun."""
    handed, computed, out = 0, 0, []
    for turn, count in enumerate(tokens, 1):
        computed += count
        complete = len(pages) if turn == len(tokens) else computed // PAGE
        out.append((list(pages[handed:complete]), turn == len(tokens) and not last_is_empty))
        handed = complete
    return [*out, ([], True)] if last_is_empty else out


@pytest.mark.parametrize("prefix", [0, 1, PER_ROOM], ids=["nothing held", "a page held", "all held"])
@pytest.mark.parametrize("last_is_empty", [False, True], ids=["last with tokens", "last empty"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_c83_chunks_that_end_within_pages(backend: str, last_is_empty: bool, prefix: int) -> None:
    """Chunks of 1, 63, 64, 65 and 0 tokens in every order: each page arrives once, and success comes with the last chunk, not before."""
    orders = list(itertools.permutations(CHUNKS))
    calls = Calls()
    with duo(backend, pages=PER_ROOM * len(orders)) as both:
        both.prefill.add_observer(calls)
        targets = np.random.default_rng(5).permutation(PER_ROOM * len(orders)).reshape(-1, PER_ROOM)
        rooms: list[tuple[kvcore.Sender, kvcore.Receiver, list[tuple[list[int], bool]]]] = []
        moved: dict[int, int] = {}
        for turn, order in enumerate(orders):
            mine = list(range(PER_ROOM * turn + prefix, PER_ROOM * (turn + 1)))
            theirs = targets[turn, prefix:].tolist()
            sender, receiver = both.open()
            steps = sends(order, mine, last_is_empty) if prefix < PER_ROOM else [([], False)] * len(order) + [([], True)]
            if turn % 2:
                receiver.receive(theirs, prefix_pages=prefix)
            for pages, _ in steps[:-1]:
                sender.send(pages)
            if not turn % 2:
                receiver.receive(theirs, prefix_pages=prefix)
            rooms.append((sender, receiver, steps))
            early = len([page for pages, _ in steps[:-1] for page in pages])
            moved |= dict(zip(theirs[:early], mine[:early], strict=True))
        wait_until(lambda: not moved or both.equal(list(moved.values()), list(moved)), what="all but the last chunks")
        stays(lambda: not any(handle.poll().terminal for sender, receiver, _ in rooms for handle in (sender, receiver)), 0.1)
        for sender, _, steps in rooms:
            sender.send(*steps[-1])
        for sender, receiver, _ in rooms:
            ended(sender, KVPoll.SUCCESS)
            ended(receiver, KVPoll.SUCCESS)
            assert dict(sender.prefix_pages) == {"kv": prefix}
        held = set(targets[:, :prefix].flatten().tolist())
        written = [page for page in targets.flatten().tolist() if page not in held]
        of_page = {page: PER_ROOM * turn + place for turn, row in enumerate(targets.tolist()) for place, page in enumerate(row)}
        assert both.equal([of_page[page] for page in written], written) and both.untouched(sorted(held))
        given = {(one.room, one.chunk, one.remote_address.tobytes()): one.nbytes for one in calls.transfers}  # some again after RETRY
        assert sum(given.values()) == len(written) * 64 * len(both.source), "each byte once"


# --- C85

BAD = {
    "count": ([3, 32], "page index 32 is not in 0 .. 31"),
    "larger": ([3, 2**31 - 1], "page index 2147483647 is not in 0 .. 31"),
    "negative": ([3, -1], "page index -1 is not in 0 .. 31"),
    "repeated": ([3, 3], r"page index 3 is listed twice (pool has 32 pages)"),
    "repeated later": ([3, 8, 3], r"page index 3 is listed twice (pool has 32 pages)"),
    "late": ([3, 8, 32], "page index 32 is not in 0 .. 31"),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("chunk", [1, 3], ids=["page by page", "at once"])
@pytest.mark.parametrize("first", ["send", "receive"])
def test_c85_destination_indices_that_are_no_pages(pair: Duo, first: str, chunk: int, what: str) -> None:
    """A destination with a bad index anywhere fails the room on both sides with index and bound, before the engine is given any of it."""
    pages, text = BAD[what]
    calls = Calls()
    pair.prefill.add_observer(calls)
    sender, receiver = pair.open()

    def hand_over() -> None:
        for start in range(0, len(pages), chunk):
            mine = list(range(len(pages)))[start : start + chunk]
            sender.send(mine, last=start + chunk >= len(pages))

    steps: list[Callable[[], object]] = [hand_over, lambda: lie(receiver, pages)]
    for step in steps if first == "send" else reversed(steps):
        step()
    for handle in (sender, receiver):
        found = failure(handle)
        assert found.code is FailureCode.BAD_PAGES and found.side == "prefill"
        assert "pool 'kv'" in found.reason and text in found.reason
        assert handle.wait_release_safe(SOON_S)
    assert calls.transfers == [] and pair.untouched()
    pair.transfer([1, 2], [5, 4])


@pytest.mark.parametrize("pages", [5, None, [[1, 2]], [[1], [2, 3]], np.array(3)], ids=repr)
def test_c85_what_is_no_flat_list_is_refused_where_it_is_given(pair: Duo, pages: Any) -> None:
    """Either side refuses what is no flat list of indices, and the room goes on."""
    sender, receiver = pair.open()
    for call in (sender.send, receiver.receive):
        with pytest.raises(PageError, match=r"pool 'kv': .*; pass one flat list"):
            call(pages)
    receiver.receive([3])
    sender.send([3], last=True)
    ended(receiver, KVPoll.SUCCESS)


@pytest.mark.parametrize("bad", [32, 33, 2**31, 2**63, -1, -(2**40), 3.0, 1.5, "3", None, True, np.float32(2)], ids=repr)
def test_c85_indices_that_are_no_pages_are_refused_where_they_are_given(pair: Duo, bad: Any) -> None:
    """Either side refuses an index that is no page of its pool, naming index and bound; nothing is published and the room goes on."""
    sender, receiver = pair.open()
    for call in (sender.send, receiver.receive):
        with pytest.raises(PageError, match=r"pool 'kv': page index .*0 \.\. 31") as error:
            call([3, bad])
        shown = bad.item() if isinstance(bad, np.generic) else bad
        assert str(shown) in str(error.value)
    with pytest.raises(PageError, match=r"page index 3 is listed twice \(pool has 32 pages\)"):
        receiver.receive([3, 8, 3])
    receiver.receive([3])
    sender.send([3], last=True)
    ended(receiver, KVPoll.SUCCESS)
    assert pair.equal([3], [3])


# --- C86


def pools(**changes: Any) -> list[Pool]:
    facts: dict[str, Any] = {"layers": 2, "page_bytes": 64, "page_size": 16, "dtype": np.uint8, "part": "", "names": ["kv"]} | changes
    shape = 8, facts["page_bytes"] // np.dtype(facts["dtype"]).itemsize
    return [
        Pool.from_tensors(
            name, [np.ones(shape, facts["dtype"]) for _ in range(facts["layers"])], page_size=facts["page_size"], part=facts["part"]
        )
        for name in facts["names"]
    ]


UNLIKE: dict[str, tuple[dict[str, Any], str, str]] = {
    "page size": ({"page_size": 32}, "16", "32"),
    "dtype of other size": ({"dtype": np.float16}, "'uint8'", "'float16'"),
    "dtype of one size": ({"dtype": np.int8}, "'uint8'", "'int8'"),
    "more layers": ({"layers": 3}, "(0, 1)", "(0, 1, 2)"),
    "fewer layers": ({"layers": 1}, "(0, 1)", "(0,)"),
    "bytes per page": ({"page_bytes": 128}, "64", "128"),
    "parts": ({"part": "k"}, "('', '')", "('k', 'k')"),
    "other pool": ({"names": ["latent"]}, "['kv']", "['latent']"),
    "one pool more": ({"names": ["kv", "aux"]}, "['kv']", "['aux', 'kv']"),
}
"""How one side differs from the other, and the two values that must be named."""


@pytest.mark.parametrize("odd_side", ["prefill", "decode"])
@pytest.mark.parametrize("what", UNLIKE)
@pytest.mark.parametrize("backend", BACKENDS)
def test_c86_unlike_layouts(backend: str, what: str, odd_side: str, caplog: pytest.LogCaptureFixture) -> None:
    """A layout that differs in anything is refused at pairing: both values named on both sides, and no page has moved; others go on."""
    changes, here, there = UNLIKE[what]
    of = {"prefill": {}, "decode": {}, "other": {}, odd_side: changes}
    of["other"] = of["prefill"]
    calls = Calls()
    with (
        caplog.at_level(logging.WARNING, "kvcore.peers"),
        KVManager(config("prefill", backend), pools(**of["prefill"])) as prefill,
        KVManager(config("decode", backend), pools(**of["decode"])) as decode,
        KVManager(config("decode", backend), pools(**of["other"])) as other,
        prefill.sender(number()) as sender,
        decode.receiver(sender.room, prefill.address) as receiver,
    ):
        prefill.add_observer(calls)
        receiver.receive({name: [1] for name in of["decode"].get("names", ["kv"])})
        found = failure(receiver)
        assert found.code is FailureCode.INCOMPATIBLE and receiver.wait_release_safe(SOON_S)
        logged = [record.getMessage() for record in caplog.records if "refused to pair" in record.getMessage()]
        assert logged
        for text in (found.reason, *logged):
            assert prefill.instance in text and decode.instance in text
            assert here in text and there in text
        assert (prefill.stats().peers, decode.stats().peers) == (0, 0)
        with other.receiver(sender.room, prefill.address) as fit:
            fit.receive({})
            sender.send({}, last=True)
            ended(fit, KVPoll.SUCCESS)
        assert calls.transfers == []


# --- C87


@contextmanager
def dialect(speaker: KVManager, rewrite: Callable[[dict[str, Any]], None]) -> Iterator[ControlTap]:
    """Have all letters that a manager sends rewritten on their way out, as one of another version would write them."""
    with ControlTap(speaker) as tap:

        def each(letter: Letter, outgoing: bool) -> bool:
            if not outgoing:
                return False
            content = msgspec.to_builtins(letter, builtin_types=(bytes,))
            rewrite(content)
            tap.inject(msgspec.msgpack.encode(content), outgoing=True, peer=letter.to)
            return True

        tap.drop(each)
        yield tap


def newer(content: dict[str, Any]) -> None:
    """Unknown fields at every level, and the highest minor version where one is told."""
    for name, value in list(content.items()):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict) and name != "spoken":
                newer(item)
        if name == "version":
            content[name] = [value[0], 99]
    content["colours"] = {"deep": [1, None, "blue"]}


@pytest.mark.parametrize("speaker", ["prefill", "decode", "both"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_c87_a_newer_minor_version_with_unknown_fields(backend: str, speaker: str, caplog: pytest.LogCaptureFixture) -> None:
    """A peer whose every message has fields unknown here and a higher minor version works in full: success, abort, failure and reuse."""
    with duo(backend) as both, ExitStack() as stack, caplog.at_level(logging.WARNING, "kvcore"):
        for manager in {"prefill": [both.prefill], "decode": [both.decode], "both": [both.prefill, both.decode]}[speaker]:
            stack.enter_context(dialect(manager, newer))
        for attempt in (0, 1):
            sender, receiver = both.open(70_000_000, attempt)
            receiver.receive([3, 4])
            sender.send([1])
            sender.send([2], last=True, record=b"first token")
            ended(receiver, KVPoll.SUCCESS)
            assert receiver.record == b"first token" and both.equal([1, 2], [3, 4])
            sender.clear()
            receiver.clear()
        for abort_here in ("prefill", "decode"):
            sender, receiver = both.open()
            receiver.receive([5])
            wait_until(lambda sender=sender: sender.poll() is KVPoll.WAITING_FOR_INPUT)
            (sender if abort_here == "prefill" else receiver).abort("not wanted")
            assert failure(receiver).reason == failure(sender).reason == "not wanted"
            assert receiver.wait_release_safe(SOON_S)
            sender.clear()
            receiver.clear()
        both.stores_empty()
        assert [m.stats().counters["kvcore_bad_messages_total"] for m in (both.prefill, both.decode)] == [0, 0]
        assert not [record for record in caplog.records if record.exc_info]


def of_major_2(content: dict[str, Any]) -> None:
    content["v"] = 2


@pytest.mark.parametrize("speaker", ["prefill", "decode"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_c87_another_major_version(backend: str, speaker: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A peer of another major version is refused on both sides with both versions named; no parse error, and others go on."""
    source, target = memory(8, seed=3), memory(8)
    with ExitStack() as stack, caplog.at_level(logging.WARNING, "kvcore"):
        usual = {
            role: stack.enter_context(manager(role, arrays, backend=backend)) for role, arrays in (("prefill", source), ("decode", target))
        }
        with monkeypatch.context() as patch:
            patch.setattr(introduction, "VERSION", (2, 3))
            odd = stack.enter_context(manager(speaker, memory(8), backend=backend))
        tap = stack.enter_context(dialect(odd, of_major_2))
        prefill, decode = (odd, usual["decode"]) if speaker == "prefill" else (usual["prefill"], odd)
        sender = prefill.sender(number())
        receiver = decode.receiver(sender.room, prefill.address)
        receiver.receive([1])
        found = failure(receiver)
        assert found.code is FailureCode.INCOMPATIBLE and receiver.wait_release_safe(SOON_S)
        refused = [record.getMessage() for record in caplog.records if "refused to pair" in record.getMessage()]
        assert refused
        for text in (found.reason, *refused):
            assert "control protocol" in text and "1.0" in text and "2.3" in text
        assert [seen for seen in tap.seen if isinstance(seen.letter.body, Refuse)], "told by a letter that every version reads"
        assert not sender.poll().terminal
        assert not [record for record in caplog.records if record.exc_info]
        pair = Duo(usual["prefill"], usual["decode"], source, target)
        pair.transfer([1, 2], [3, 4])


# --- C89

TOP = 0xFFFF_0000_0000_0000


class Distant(MemoryBackend):
    """Moves nothing: the addresses are those of no memory. What it was given is in ``transfers``."""

    able = Capabilities(max_bytes=2**40)

    def post(self, transfer: Transfer) -> Any:
        return DONE


@pytest.mark.parametrize("base", [TOP, 2**63 - 2**40, 2**31, 2**64 - 2**47], ids=hex)
@pytest.mark.parametrize("page_bytes", [2**20, 2**30, 2**31 + 8, 2**33], ids=hex)
def test_c89_addresses_are_exact(base: int, page_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Base addresses with the top bit set and products above 2**31, 2**32 and 2**44 reach the engine exactly, by way of the wire."""
    fake = install(monkeypatch, Distant)
    pages, layers = 2**13, 2
    regions = [
        [Region(base - 4097 * (side + 1) + layer * pages * page_bytes, pages * page_bytes) for layer in range(layers)] for side in (0, 1)
    ]
    made = [Pool("kv", listed, num_pages=pages, page_size=16) for listed in regions]
    mine, theirs = [0, 1, 5000, pages - 1], [pages - 1, 3, 4097, 0]
    with KVManager(config("prefill"), made[:1]) as prefill, KVManager(config("decode"), made[1:]) as decode:
        sender = prefill.sender(number())
        receiver = decode.receiver(sender.room, prefill.address)
        receiver.receive(theirs)
        sender.send(mine, last=True)
        ended(receiver, KVPoll.SUCCESS)
        found = [
            row
            for transfer in fake.made[0].transfers
            for row in zip(*(column.tolist() for column in (transfer.local_address, transfer.remote_address, transfer.length)), strict=True)
        ]
        wanted = [
            (here.ptr + page * page_bytes, there.ptr + target * page_bytes, page_bytes)
            for here, there in zip(*regions, strict=True)
            for page, target in zip(mine, theirs, strict=True)
        ]
        assert sorted(found) == sorted(wanted)
        assert sender.metrics.bytes == len(mine) * layers * page_bytes


def test_c89_what_no_address_reaches_is_refused() -> None:
    """A region that does not end within 64 bits is refused where it is given, with address and length."""
    for ptr, nbytes in ((2**64 - 8, 16), (TOP, 2**49), (2**64, 8), (-8, 16)):
        with pytest.raises(kvcore.ConfigError, match=rf"region 0 at {ptr:#x} with {nbytes} bytes"):
            Pool("kv", [Region(ptr, nbytes)], num_pages=2, page_size=16)


# --- C90


def port_of(manager: KVManager) -> int:
    return int(manager.address.rpartition(":")[2])


@pytest.mark.parametrize(("before", "after"), [(8, 16), (16, 8), (32, 40), (40, 32), (8, 8)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_c90_a_peer_that_registers_again_with_another_page_count(backend: str, before: int, after: int) -> None:
    """Page counts may differ between the sides; of a peer that comes back, the new count bounds what a room may name."""
    source, port = memory(32, seed=3), 0
    with manager("prefill", source, backend=backend) as prefill:
        for count in (before, after):
            target = memory(count)
            with manager("decode", target, backend=backend, port=port) as decode:
                port = port_of(decode)
                both = Duo(prefill, decode, source, target)
                both.transfer([31, 1], [count - 1, 0])
                sender, receiver = both.open()
                lie(receiver, [count])
                sender.send([1], last=True)
                for handle in (sender, receiver):
                    assert f"page index {count} is not in 0 .. {count - 1}" in failure(handle).reason
                    handle.clear()
                both.transfer([0], [count - 1])


@pytest.mark.parametrize(("before", "after"), [(8, 16), (16, 8)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_c90_a_prefill_that_comes_back_with_another_page_count(backend: str, before: int, after: int) -> None:
    """A prefill instance restarted at its address with another page count serves rooms with pages up to its own new count."""
    target, port = memory(32), 0
    with manager("decode", target, backend=backend) as decode:
        for count in (before, after):
            source = memory(count, seed=count)
            with manager("prefill", source, backend=backend, bootstrap_port=port) as prefill:
                port = port_of(prefill)
                Duo(prefill, decode, source, target).transfer([count - 1, 0], [31, 2])
                with pytest.raises(PageError, match=rf"page index {count} is not in 0 \.\. {count - 1}"):
                    prefill.sender(number()).send([count])
