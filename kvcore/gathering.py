"""What a decode rank gathers from the ranks of a prefill group: whom it expects, and who writes what."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore import mapping
from kvcore.bootstrap import Group, RankInfo
from kvcore.layouts import MAX_RANKS, SideRecord
from kvcore.pairing import Gathered, Peer
from kvcore.wire import Introduction


def expected(me: Introduction, group: Group, dp_rank: int, room: int) -> tuple[RankInfo, ...]:
    """The ranks of a group that have to do with this one in a room; ``ValueError`` if that group cannot serve it.

    Where nothing can be mapped it is the leader, which refuses to pair, so that the reason is known on both sides.
    """
    sizes = group.ranks[0].place
    if dp_rank >= sizes.dp_size:
        raise ValueError(f"dp_rank is {dp_rank} and it has {sizes.dp_size} data-parallel ranks; name the one that serves the room")
    ranks = group.of(dp_rank)
    try:
        met = mapping.sources(mapping.sent(me.pools), sizes, me.place, room)
    except ValueError:
        met = (0,)
    return tuple(ranks[rank] for rank in met)


def gathered(me: Introduction, peers: Sequence[Peer], room: int) -> Gathered:
    """What these ranks write in a room; the same for each room with the same turn, so it is kept with the first of them."""
    key, known = (room % peers[0].intro.place.tp_size, tuple(peer.instance for peer in peers)), peers[0].gathered
    if key not in known:
        if len(known) >= MAX_RANKS:  # the others have been restarted that often
            known.clear()
        known[key] = _gathered(me, peers, room)
    return known[key]


def _gathered(me: Introduction, peers: Sequence[Peer], room: int) -> Gathered:
    incoming = {peer.instance: mapping.shares(peer.intro.pools, me.pools, peer.intro.place, me.place, room) for peer in peers}
    writers: dict[int, set[str]] = {}
    for instance, shares in incoming.items():
        for pool in me.pools:
            if pool.name in shares and not isinstance(pool.layout, SideRecord):  # which is of no layer
                for region in shares[pool.name].remote_region.tolist():
                    writers.setdefault(pool.layers[region], set()).add(instance)
    wrong = mapping.not_once(me.pools, list(incoming.values()))
    return Gathered(
        {layer: frozenset(names) for layer, names in writers.items()},
        wrong and f"{wrong}; give each layer to one prefill stage, on all of its ranks (layers=)",
    )
