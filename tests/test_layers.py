"""Layers that are handed over apart (T1): sequences of their own, what decode is told of them, and what does not fit."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvcore import FailureCode, KVPoll, PageError
from tests.helpers import BACKENDS, Duo, duo, ended, wait_until

LAYERS = 4
MINE, THEIRS = [3, 8, 1], [0, 5, 2]


@pytest.fixture(params=BACKENDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Duo]:
    with duo(request.param, layers=LAYERS) as made:
        yield made


def test_t1_each_layer_can_be_sent_as_it_is_computed(pair: Duo) -> None:
    sender, receiver = pair.open()
    with sender, receiver:
        receiver.receive(THEIRS)
        for layer in range(LAYERS):
            sender.send(MINE, layers=range(layer, layer + 1), last=layer == LAYERS - 1)
            if layer < LAYERS - 1:
                wait_until(lambda layer=layer: receiver.layers_ready() == set(range(layer + 1)), what=f"layer {layer} to be told")  # type: ignore[misc]
                assert np.array_equal(pair.source[layer][MINE], pair.target[layer][THEIRS])
                assert not any(array.any() for array in pair.target[layer + 1 :])
        ended(receiver, KVPoll.SUCCESS)
        ended(sender, KVPoll.SUCCESS)
        assert receiver.layers_ready() == set(range(LAYERS)) and pair.equal(MINE, THEIRS)
    pair.stores_empty()


def test_t1_each_layer_goes_on_in_its_own_sequence(pair: Duo) -> None:
    """Layers 0 and 1 page by page, layers 2 and 3 all at once, and the end in an empty chunk."""
    sender, receiver = pair.open()
    with sender, receiver:
        receiver.receive(THEIRS)
        for page in MINE:
            sender.send([page], layers=range(2))
        sender.send(MINE, layers=range(2, LAYERS))
        sender.send([], last=True)
        ended(receiver, KVPoll.SUCCESS)
        assert pair.equal(MINE, THEIRS)


def test_t1_a_layer_that_is_behind_is_not_ready(pair: Duo) -> None:
    sender, receiver = pair.open()
    with sender, receiver:
        receiver.receive(THEIRS)
        sender.send(MINE[:1], layers=range(LAYERS))
        wait_until(lambda: receiver.layers_ready() == set(range(LAYERS)), what="all layers of the first page")
        sender.send(MINE[1:], layers=range(1, 2))
        wait_until(lambda: receiver.layers_ready() == {1}, what="only the layer that has all pages announced")


def test_t3_a_room_whose_layers_lack_pages_fails_on_both_sides(pair: Duo) -> None:
    sender, receiver = pair.open()
    with sender, receiver:
        receiver.receive(THEIRS)
        sender.send(MINE, layers=range(LAYERS - 1), last=True)
        for handle in (sender, receiver):
            ended(handle, KVPoll.FAILED)
            assert handle.failure is not None and handle.failure.code is FailureCode.BAD_PAGES
            assert "handed over 0 to 3 (by layer) pages and destination rank 0 listed 3" in handle.failure.reason


def test_a_range_of_layers_may_be_as_long_as_it_likes(pair: Duo) -> None:
    sender, receiver = pair.open()
    with sender, receiver:
        receiver.receive(THEIRS)
        began = time.monotonic()
        sender.send(MINE, layers=range(2**62), last=True)
        assert time.monotonic() - began < 1.0
        ended(receiver, KVPoll.SUCCESS)
        assert pair.equal(MINE, THEIRS)


def test_layers_that_do_not_fit_are_refused_and_the_room_goes_on(pair: Duo) -> None:
    sender, receiver = pair.open()
    with sender, receiver:
        receiver.receive(THEIRS)
        for wrong, says in (
            (range(LAYERS, LAYERS + 2), r"range\(4, 6\) has no layer of the pool; choose from \(0, 1, 2, 3\)"),
            ([0], "pass a range of layer ids"),
            (1, "pass a range of layer ids"),
        ):
            with pytest.raises(PageError, match=says):
                sender.send(MINE, layers=wrong)  # type: ignore[arg-type]
        sender.send(MINE[:1], layers=range(2))
        with pytest.raises(PageError, match=r"its layers stand at different pages, \[0, 1\]"):
            sender.send(MINE)
        sender.send(MINE[:1], layers=range(2, LAYERS))
        sender.send(MINE[1:], last=True)
        ended(receiver, KVPoll.SUCCESS)
        assert pair.equal(MINE, THEIRS)
