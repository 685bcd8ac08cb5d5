"""What a decode rank gathers from the ranks of a prefill group: whom it expects, and who writes what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvcore import mapping
from kvcore.bootstrap import Group, RankInfo
from kvcore.pairing import Peer
from kvcore.wire import Introduction


def expected(me: Introduction, group: Group, dp_rank: int, room: int) -> tuple[RankInfo, ...]:
    """The ranks of a group that have to do with this one in a room; ``ValueError`` if that group cannot serve it."""
    sizes = group.ranks[0].place
    if dp_rank >= sizes.dp_size:
        raise ValueError(f"dp_rank is {dp_rank} and it has {sizes.dp_size} data-parallel ranks; name the one that serves the room")
    ranks = group.of(dp_rank)
    return tuple(ranks[rank] for rank in mapping.sources(mapping.sent(me.pools), sizes, me.place, room))


def why_incomplete(me: Introduction, peers: Sequence[Peer]) -> str | None:
    """Which layers no stage of the group has, in words; None if there are none."""
    missing = mapping.uncovered(me.pools, [peer.intro.pools for peer in peers])
    return f"{missing}; give the prefill stages all layers" if missing is not None else None


def writers(peers: Sequence[Peer], room: int) -> Mapping[int, frozenset[str]]:
    """The instances that write each layer of a room here."""
    found: dict[int, set[str]] = {}
    for peer in peers:
        for layer in peer.layers(room):
            found.setdefault(layer, set()).add(peer.instance)
    return {layer: frozenset(names) for layer, names in found.items()}
