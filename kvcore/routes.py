"""From a prefill address to paired sender ranks: asks the bootstrap service, dials each rank, and tells the room its route."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvcore.bootstrap import REFRESH_S, Group, LookupFailure, RankInfo
from kvcore.bootstrap_client import Directory
from kvcore.pairing import Peer
from kvcore.peers import Peers
from kvcore.states import FailureCode, RoomId
from kvcore.whereabouts import Whereabouts

MOST_PRUNED = 1000


@dataclass(eq=False, slots=True)
class Search:
    """One receiver's way to its sender ranks. ``wanted`` says whether the room still needs it; ``expects`` which of a group's ranks it
    takes, or raises ``ValueError`` if that group cannot serve it."""

    address: str
    room: RoomId
    dp_rank: int | None
    expects: Callable[[Group, int], tuple[RankInfo, ...]]
    wanted: Callable[[], bool]
    found: Callable[[list[Peer]], None]
    failed: Callable[[FailureCode, str], None]
    token: int = 0
    group: Group | None = None
    expected: tuple[RankInfo, ...] = ()
    linked: set[RankInfo] = field(default_factory=set)
    peers: dict[int, Peer] = field(default_factory=dict)
    asked_at: float = 0.0
    unlocate: Callable[[], None] = lambda: None
    asked_again: bool = False
    over: bool = False


@dataclass(eq=False, slots=True)
class _RankWaiter:
    search: Search
    info: RankInfo
    routes: Routes

    def wanted(self) -> bool:
        return not self.search.over and self.search.wanted()

    def paired(self, peer: Peer) -> None:
        self.routes.rank_paired(self.search, self.info, peer)

    def refused(self, code: FailureCode, text: str) -> None:
        self.routes.rank_refused(self.search, self.info, code, text)


@dataclass(eq=False, slots=True)
class _Way:
    """A group that paired instances were found through, and these: by the data-parallel rank asked for, and the room's turn."""

    group: Group
    peers: dict[tuple[int | None, int], list[Peer]] = field(default_factory=dict)


class Routes:
    """Searches under way. Runs on the control thread but for the lookup itself, and for ``known``."""

    def __init__(
        self, directory: Directory, whereabouts: Whereabouts, peers: Peers, on_control: Callable[[Callable[[], None]], None]
    ) -> None:
        self._directory, self._whereabouts, self._peers, self._on_control = directory, whereabouts, peers, on_control
        self._searches: dict[Search, None] = {}
        self._ways: dict[str, _Way] = {}
        """By address; to be forgotten with any of its instances."""

    def known(self, address: str, room: RoomId, dp_rank: int | None) -> list[Peer] | None:
        """A room's sender ranks, where that takes no question; else ``find`` them. From any thread, with the lock that rooms are told under
        of a peer's loss: so none of these is lost before the room knows it."""
        way = self._ways.get(address)
        if way is None or not self._directory.holds(address, way.group):
            return None
        peers = way.peers.get((dp_rank, _turn(way.group, room)))
        return peers if peers and all(self._peers.peer("decode", peer.instance) is peer for peer in peers) else None

    def find(self, search: Search) -> None:
        """Begin; where the group is known it takes no question."""
        self._searches[search] = None
        self._look_up(search)

    def _look_up(self, search: Search) -> None:
        search.asked_at = time.monotonic()
        search.token = self._directory.lookup(search.address, lambda result: self._on_control(lambda: self._looked_up(search, result)))

    def _looked_up(self, search: Search, result: Group | LookupFailure) -> None:
        if search.over or not search.wanted():
            return self._forget(search)
        if isinstance(result, LookupFailure):
            return self.end(search, FailureCode.PEER_LOST, str(result))
        search.group = result
        dp_rank = 0 if result.ranks[0].place.dp_size == 1 and search.dp_rank is None else search.dp_rank
        if dp_rank is not None:
            return self._located(search, result, dp_rank)

        def located(found: int) -> None:
            self._on_control(lambda: self._located(search, result, found))

        search.unlocate = self._whereabouts.locate(search.address, search.room, located)

    def _located(self, search: Search, group: Group, dp_rank: int) -> None:
        """It is known which data-parallel rank has the room."""
        if search.over or search.group is not group:
            return
        try:
            search.expected = search.expects(group, dp_rank)
        except ValueError as error:
            return self.end(search, FailureCode.INCOMPATIBLE, f"prefill group {search.address}: {error}")
        search.peers = {rank: peer for rank, peer in search.peers.items() if peer.instance in {info.instance for info in search.expected}}
        fresh = [info for info in search.expected if info not in search.linked]
        search.linked = set(search.expected)
        for info in fresh:
            self._peers.link(info.control, _RankWaiter(search, info, self), info.curve)

    def rank_paired(self, search: Search, info: RankInfo, peer: Peer) -> None:
        """One rank is paired; with the last the route is known."""
        group = search.group
        if search.over or group is None or info not in search.expected:
            return
        if peer.instance != info.instance:
            return self._outdated(search, group, info, peer)
        self._way(search.address, group)
        search.peers[info.rank] = peer
        self._conclude(search)

    def rank_refused(self, search: Search, info: RankInfo, code: FailureCode, text: str) -> None:
        """One rank cannot be paired: the room fails, and the others are found all the same, to be told (A4)."""
        if search.over or info not in search.expected:
            return
        self._doubt(search)
        search.expected = tuple(other for other in search.expected if other != info)
        search.failed(code, text)
        self._conclude(search)

    def _conclude(self, search: Search) -> None:
        if all(info.rank in search.peers for info in search.expected):
            self._forget(search)
            if search.expected:
                peers, group = [search.peers[info.rank] for info in search.expected], search.group
                if group is not None and (search.dp_rank is not None or group.ranks[0].place.dp_size == 1):
                    self._way(search.address, group).peers[search.dp_rank, _turn(group, search.room)] = peers
                search.found(peers)

    def _way(self, address: str, group: Group) -> _Way:
        """The way to a group; a newer one takes the place of an older."""
        if address not in self._ways or self._ways[address].group is not group:
            self._ways[address] = _Way(group)
        return self._ways[address]

    def _outdated(self, search: Search, group: Group, info: RankInfo, peer: Peer) -> None:
        """Another instance than the one looked up answers at a rank's address: ask the bootstrap service once more."""
        self._directory.forget(search.address, group)
        if not search.asked_again:
            search.asked_again = True
            search.group = None
            search.unlocate()
            search.linked.clear()
            search.peers.clear()
            return self._look_up(search)
        text = f"expected instance {info.instance} at {info.control} and found {peer.instance}; does {search.address} belong to that group?"
        self.end(search, FailureCode.PEER_LOST, text)

    def end(self, search: Search, code: FailureCode, text: str) -> None:
        """Give a search up, and tell its room why."""
        if search.over:
            return
        self._doubt(search)
        self._forget(search)
        search.failed(code, text)

    def _forget(self, search: Search) -> None:
        search.over = True
        self._searches.pop(search, None)
        self._directory.drop(search.token)
        search.unlocate()

    def prune(self, now: float) -> None:
        """Drop searches that no room wants any more; where ranks do not answer, ask whether they are elsewhere by now. At ``MOST_PRUNED``,
        and the next time at those that follow."""
        for search in list(itertools.islice(self._searches, MOST_PRUNED)):
            del self._searches[search]
            self._searches[search] = None
            if not search.wanted():
                self._doubt(search)
                self._forget(search)
            elif search.group is not None and now - search.asked_at >= REFRESH_S:
                self._doubt(search)
                self._directory.drop(search.token)
                search.unlocate()
                self._look_up(search)

    def _doubt(self, search: Search) -> None:
        """What was told of a group may be outdated."""
        if search.group is not None:
            self._directory.forget(search.address, search.group)

    def lost(self, instance: str) -> None:
        """A peer was lost: ask the bootstrap service anew before its address is used again."""
        for address, way in list(self._ways.items()):
            if any(info.instance == instance for info in way.group.ranks):
                self._directory.forget(address, way.group)
                del self._ways[address]
        for search in self._searches:
            search.peers = {rank: peer for rank, peer in search.peers.items() if peer.instance != instance}
            search.linked = {info for info in search.linked if info.instance != instance}

    def why(self, address: str) -> str:
        """Why an address has not led anywhere so far."""
        if error := self._directory.last_error(address):
            return f"prefill {address}: {error}"
        search = next((search for search in self._searches if search.address == address), None)
        if search is not None and search.group is None:
            return f"prefill {address}: its bootstrap service has not answered"
        if search is not None and not search.expected:
            return f"prefill {address}: no data-parallel rank has opened the room"
        silent = [info for info in search.expected if info.rank not in search.peers] if search is not None else []
        return f"prefill {address}: rank {silent[0].rank} at {silent[0].control} does not answer" if silent else ""

    def sizes(self) -> dict[str, int]:
        """Entries held."""
        return {"searches": len(self._searches), "groups": len(self._ways)} | {
            f"directory_{name}": size for name, size in (self._directory.sizes() | self._whereabouts.sizes()).items()
        }


def _turn(group: Group, room: RoomId) -> int:
    """Rooms with one turn have to do with the same ranks (``mapping``)."""
    return room.number % group.ranks[0].place.tp_size
