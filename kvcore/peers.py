"""Pairing of instances, and whether they live: who may speak to the rooms here.

Decode dials prefill's control port and says Hello; prefill connects its engine and says Welcome on the same connection; decode
connects its engine; from then on room messages pass. Whoever hears from an instance it is not paired with, or is addressed by
another name than its own, answers Stranger and does nothing else (P3). Nothing about a peer is remembered as bad (P4). All of
it runs on the control thread, but for ``peer`` and ``send``, which whoever is at the sockets calls.
"""

from __future__ import annotations

import logging
import secrets
import time

from kvcore import addresses, hookspecs, wire
from kvcore.channel import Channel, Route
from kvcore.compat import fitting, misfit
from kvcore.errors import IncompatiblePeerError, KVCoreError, cause, shown
from kvcore.hookspecs import Capabilities, Endpoint, Hooks
from kvcore.logs import SparingLog, about
from kvcore.pairing import Departed, Home, Link, Peer, Waiter, addressee, engine_peer, other_side
from kvcore.planner import Layout
from kvcore.process import known_gone
from kvcore.protocol.messages import RoomMessage
from kvcore.states import FailureCode, Side
from kvcore.wire import Body, Hello, Introduction, Letter, Ping, Refuse, RoomBody, Stranger, Welcome, checked, decode, encode, one_line

log = logging.getLogger("kvcore.peers")

LAST_HELLO_S = 2.0
CLOSED = "it was closed"
MAX_PAIRINGS = 4096
"""Pairings under way at once; further hellos are dropped and come again (P5)."""
MAX_PEERS = 16_384
"""Instances paired with a side at once; a further one is refused (P5)."""


class Peers:
    """All paired instances and dialled links of one manager."""

    def __init__(self, me: Introduction, send_s: float, hooks: Hooks, capabilities: Capabilities, home: Home) -> None:
        self.me = me
        self._send_s = send_s
        self._hooks, self._capabilities, self._home = hooks, capabilities, home
        self._beat_s = min(1.0, me.liveness_s / 4)
        self._due = 0.0
        self._refusals, self._comings = SparingLog(log), SparingLog(log)
        self._pairing_now: dict[str, int] = {}
        self._links: dict[str, Link] = {}
        self._departed: dict[str, Departed] = {}
        self.pairings: dict[tuple[Side, str], Peer] = {}
        """By our side: a peer with both roles may be paired twice."""
        self.channel: Channel  # set by the manager, before anything arrives

    # --- sending and dialling

    def peer(self, side: Side, instance: str) -> Peer | None:
        """The instance paired with our ``side``."""
        return self.pairings.get((side, instance))

    def send(self, instance: str, message: RoomBody) -> None:
        """Send a room message to a paired instance; dropped if it is none."""
        peer = self.peer(other_side(addressee(message)), instance)
        if peer is not None:
            self._write(peer.route, instance, message)

    def ask(self, instance: str, question: wire.Explain) -> bool:
        """Ask a paired instance about a room; False if it is none."""
        peer = self.peer("prefill", instance) or self.peer("decode", instance)
        if peer is not None:
            self._write(peer.route, instance, question)
        return peer is not None

    def _write(self, route: Route, to: str, body: Body) -> None:
        self.channel.send(route, encode(self.me.instance, to, body), time.monotonic())

    def link(self, address: str, waiter: Waiter, curve: str = "") -> None:
        """Have ``waiter`` told of the instance at a control address, paired, or why it cannot be.

        ``curve``: the public key that it must have; "" for none.
        """
        link, waiters = self._links.get(address), [waiter]
        if link is not None and link.curve != curve and link.peer is None:  # it insists on a key that is another's by now
            self._drop_link(link)
            waiters += link.waiters
            link = None
        try:
            link = link or self._dial(address, curve)
        except (KVCoreError, OSError) as error:
            code = FailureCode.INCOMPATIBLE if isinstance(error, IncompatiblePeerError) else FailureCode.PEER_LOST
            for each in waiters:
                each.refused(code, f"control address {address} cannot be dialled: {error}")
            return None
        if link.peer is not None:
            return waiter.paired(link.peer)
        link.waiters += waiters

    def _dial(self, address: str, curve: str) -> Link:
        route = self.channel.dial(addresses.parse(address, "control address"), curve)
        link = self._links[address] = Link(address, route, secrets.randbits(53), idle_since=time.monotonic(), curve=curve)
        self._home.slowly(self._hooks.kvcore_endpoint, lambda found, error: self._greet(link, found, error))
        return link

    def _greet(self, link: Link, found: object, error: BaseException | None) -> None:
        if self._links.get(link.address) is not link:
            return
        if not isinstance(found, Endpoint):
            why = cause(error) if error is not None else shown(found)
            return self._refuse_link(link, FailureCode.BACKEND, f"the backend gave no endpoint for a peer: {why}")
        try:
            link.hello = checked(self.me.instance, "", Hello(link.pairing, self.me, found.data, tuple(found.keys), self._home.spoken_to()))
        except (TypeError, ValueError) as unfit:
            return self._refuse_link(link, FailureCode.BACKEND, f"the backend gave an endpoint that cannot travel: {unfit}")
        self._say_hello(link, time.monotonic())

    def _say_hello(self, link: Link, now: float) -> None:
        self.channel.send(link.route, link.hello, now)
        link.next_hello = now + link.hello_s
        link.hello_s = min(2 * link.hello_s, LAST_HELLO_S)
        self.channel.wake_by(link.next_hello)

    def _refuse_link(self, link: Link, code: FailureCode, text: str) -> None:
        """Give a link up and tell who waits. The next room dials again (P4)."""
        self._refusals.say(logging.WARNING, f"pairing with {link.address} failed: {text}")
        self._give_up(link, code, text)

    def _give_up(self, link: Link, code: FailureCode, text: str) -> None:
        self._drop_link(link)
        for waiter in link.waiters:
            waiter.refused(code, text)

    def _drop_link(self, link: Link) -> None:
        self.channel.hang_up(link.route)
        if self._links.get(link.address) is link:
            del self._links[link.address]

    def on_refused(self, route: Route, why: str) -> None:
        """A dialled instance does not let this one in, or no more."""
        link = self._links.get(route.address)
        if link is not None and link.route is route and link.peer is None:
            self._give_up(link, FailureCode.INCOMPATIBLE, f"{link.address} refuses this instance: {why}")

    # --- letters

    def on_frame(self, route: Route, frame: bytes) -> None:
        """Take one frame, whatever it is (P5)."""
        try:
            letter = decode(frame)
        except ValueError as error:
            return self.channel.note_bad(str(error))
        body = letter.body
        if letter.v != self.me.version[0] and not isinstance(body, Refuse):  # which tells just that
            return self._on_foreign(route, letter)
        if isinstance(body, Hello):
            return self._on_hello(route, letter, body)
        if letter.to != self.me.instance:
            return self._write(route, letter.source, Stranger())
        if isinstance(body, (Welcome, Refuse, Stranger)):
            return self._on_answer(route, letter)
        peer = self.pairings.get(("decode" if route.identity is None else "prefill", letter.source))
        if peer is None:  # where a hello of ours is out, it may be paired already from its side
            return self._write(route, letter.source, Ping() if self._greets(route) else Stranger())
        self._hear(peer, route)
        if peer.poisoned:
            return None
        if isinstance(body, RoomMessage):
            if peer.side != addressee(body) or not self._home.got(peer.side, body, peer.party(body.room)):
                self.channel.note_bad(f"{type(body).__name__} of room {body.room} from {peer.instance} makes no sense here")
        elif isinstance(body, wire.Explain):
            self._write(route, letter.source, self._home.stories.answer(body))
        elif isinstance(body, wire.Story):
            self._home.stories.told(letter.source, body)

    def _greets(self, route: Route) -> bool:
        link = self._links.get(route.address)
        return link is not None and link.route is route and link.peer is None

    def _on_foreign(self, route: Route, letter: Letter) -> None:
        """Another major version: the letter is dropped, but a hello is told why (P1)."""
        self.channel.note_bad(f"control protocol {letter.v} where {self.me.version[0]} is spoken, from {letter.source!r}")
        text = misfit(self.me, letter.body.me) if isinstance(letter.body, Hello) else None
        if isinstance(letter.body, Hello) and text is not None:
            self._refuse(route, letter.source, Refuse(letter.body.pairing, one_line(text)))

    def _hear(self, peer: Peer, route: Route) -> None:
        peer.heard, peer.excused = time.monotonic(), 0.0
        peer.route.identity = route.identity  # it may have reconnected

    def _on_answer(self, route: Route, letter: Letter) -> None:
        link = self._links.get(route.address)
        body = letter.body
        if link is None or link.route is not route:
            peer = self.peer("prefill", letter.source)
            if isinstance(body, Stranger) and peer is not None:
                self.lose(peer, _parting(body), replaced=not body.closing)
            return
        if isinstance(body, Welcome):
            self._on_welcome(link, letter, body)
        elif isinstance(body, Refuse) and body.pairing == link.pairing:
            self._refuse_link(link, body.code, one_line(body.text))
        elif isinstance(body, Stranger) and link.peer is not None:
            text = _parting(body)
            if letter.source != link.peer.instance:
                text = f"instance {letter.source} is at its address now"
            self.lose(link.peer, text, replaced=not body.closing)

    # --- pairing: prefill

    def _on_hello(self, route: Route, letter: Letter, hello: Hello) -> None:
        source = letter.source
        if hello.me.instance != source:
            return self.channel.note_bad(f"hello of {hello.me.instance!r} in a letter of {source!r}")
        peer = self.peer("prefill", source)
        if peer is not None and peer.pairing == hello.pairing:
            self._hear(peer, route)
            self.channel.send(peer.route, peer.welcome, time.monotonic())
            return
        if self._pairing_now.get(source) == hello.pairing:
            return
        if len(self._pairing_now) >= MAX_PAIRINGS:
            return self._refusals.say(logging.WARNING, f"hello of {source} dropped: {MAX_PAIRINGS} pairings are under way; it comes again")
        layout = fitting(self.me, hello.me)
        if isinstance(layout, str):
            return self._refuse(route, source, Refuse(hello.pairing, layout))
        if peer is None and len(self.pairings) >= MAX_PEERS:
            text = f"{self.me.instance} is paired with {MAX_PEERS} instances, the most it takes; use another prefill instance"
            return self._refuse(route, source, Refuse(hello.pairing, text, FailureCode.RESOURCES))
        if peer is not None:
            self.lose(peer, "it pairs anew")
        self._pairing_now[source] = hello.pairing
        theirs = engine_peer(hello.me, hello.data, hello.keys)
        self._home.slowly(lambda: self._connect(theirs), lambda found, error: self._connected(route, hello, layout, found, error))

    def _refuse(self, route: Route, source: str, refuse: Refuse) -> None:
        self._refusals.say(logging.WARNING, f"refused to pair: {refuse.text}", about(peer=source))
        self._write(route, source, refuse)

    def _connect(self, theirs: hookspecs.Peer) -> Endpoint:
        endpoint = self._hooks.kvcore_endpoint()
        self._hooks.kvcore_connect(peer=theirs)
        return endpoint

    def _connected(self, route: Route, hello: Hello, layout: Layout, found: object, error: BaseException | None) -> None:
        source = hello.me.instance
        if self._pairing_now.get(source) == hello.pairing:
            del self._pairing_now[source]
        try:
            if not isinstance(found, Endpoint):
                raise error or TypeError(f"kvcore_endpoint returned {found!r:.100}")
            welcome = checked(self.me.instance, source, Welcome(hello.pairing, self.me, found.data, tuple(found.keys)))
        except BaseException as why:
            self._refusals.say(logging.WARNING, f"the engine cannot reach {source}: {cause(why)}", about(peer=source))
            text = f"the prefill engine cannot reach this instance: {cause(why)}"
            return self._write(route, source, Refuse(hello.pairing, one_line(text), FailureCode.BACKEND))
        spoken = hello.spoken.get(self.me.instance, 0)
        self._pair(Peer("prefill", self.me, hello.me, layout, hello.pairing, route, welcome, time.monotonic(), self.me.liveness_s, spoken))
        self.channel.send(route, welcome, time.monotonic())

    def _pair(self, peer: Peer) -> None:
        self.pairings[peer.side, peer.instance] = peer
        self._departed.pop(peer.instance, None)  # what proves that it was gone proves nothing now
        text = f"paired with {peer.instance} ({peer.intro.role} rank {peer.intro.place.number})"
        self._comings.say(logging.INFO, text, about(peer=peer.instance))
        self._home.event("paired", peer=peer.instance)

    # --- pairing: decode

    def _on_welcome(self, link: Link, letter: Letter, welcome: Welcome) -> None:
        if welcome.pairing != link.pairing or link.connecting or link.peer is not None:
            return
        layout = fitting(self.me, welcome.me) if welcome.me.instance == letter.source else "its letter names another instance"
        if isinstance(layout, str):
            return self._refuse_link(link, FailureCode.INCOMPATIBLE, layout)
        link.connecting = True
        theirs = engine_peer(welcome.me, welcome.data, welcome.keys)
        self._home.slowly(lambda: self._hooks.kvcore_connect(peer=theirs), lambda _, error: self._linked(link, welcome, layout, error))

    def _linked(self, link: Link, welcome: Welcome, layout: Layout, error: BaseException | None) -> None:
        if self._links.get(link.address) is not link:
            return
        if error is not None:
            return self._refuse_link(link, FailureCode.BACKEND, f"the decode engine cannot reach {welcome.me.instance}: {cause(error)}")
        peer = Peer("decode", self.me, welcome.me, layout, welcome.pairing, link.route, b"", time.monotonic(), self.me.liveness_s)
        link.peer = peer
        self._pair(peer)
        waiters, link.waiters = link.waiters, []
        for waiter in waiters:
            waiter.paired(peer)

    # --- losing

    def lose(self, peer: Peer, text: str, *, gone: bool = False, replaced: bool = False) -> None:
        """Drop a peer: its rooms fail, the engine is told to forget it, and proof about its pages is looked for (P2, R4)."""
        if self.pairings.get((peer.side, peer.instance)) is not peer:
            return
        for lost in [lost for lost in self.pairings.values() if lost.instance == peer.instance]:  # the engine forgets both
            del self.pairings[lost.side, lost.instance]
            for link in [link for link in self._links.values() if link.peer is lost]:
                self._drop_link(link)
        place = peer.intro.place
        name = peer.instance if place.total == 1 else f"{peer.instance} ({peer.intro.role} rank {place.number})"
        text = f"peer {name} lost: {text}"
        self._comings.say(logging.INFO if text.endswith(CLOSED) else logging.WARNING, text, about(peer=peer.instance))
        departed = self._departed[peer.instance] = Departed(peer.intro, gone)
        self._home.lost(peer.instance, text, replaced)
        self._home.event("peer_lost", peer=peer.instance, reason=text)
        self._home.slowly(
            lambda: self._hooks.kvcore_disconnect(peer=peer.instance),
            lambda fenced, _error: self._disconnected(departed, fenced is True),
        )

    def broken(self, instance: str, text: str) -> None:
        """The backend says that the path is poisoned: lose the peer and have it pair anew."""
        peer = self.peer("prefill", instance)
        if peer is not None:
            self._write(peer.route, instance, Stranger())
            self.lose(peer, f"the path to it is broken: {text}")

    def farewell(self) -> None:
        """Tell all peers, as well as it can be done, that this instance knows them no more: it is closing."""
        for peer in self.pairings.values():
            if peer.instance != self.me.instance:
                self._write(peer.route, peer.instance, Stranger(closing=True))

    def _disconnected(self, departed: Departed, fenced: bool) -> None:
        departed.disconnected = fenced
        if self._departed.get(departed.intro.instance) is departed:
            self._seek_proof(departed)

    def _seek_proof(self, departed: Departed) -> None:
        """R4, R3: fence the pages that wait for a lost peer as soon as it is proved that nothing of it can touch them."""
        instance = departed.intro.instance
        departed.gone = departed.gone or known_gone(departed.intro.process)
        able = self._capabilities  # what is not declared is not believed either
        if (departed.disconnected and able.fences_on_disconnect) or (departed.gone and able.needs_process_to_write):
            self._home.fenced(instance, "decode")
        if departed.disconnected and departed.gone:
            self._home.fenced(instance, "prefill")
        if not self._home.holds(instance):
            del self._departed[instance]

    # --- time

    def tick(self, now: float) -> float:
        """Ping, notice who is silent or gone, say hello again; returns when to come back."""
        greeted = [self._greet_again(link, now) for link in list(self._links.values())]
        if now >= self._due:
            stalled, self._due = now - self._due if self._due else 0.0, now + self._beat_s
            for peer in list(self.pairings.values()):
                peer.excused += stalled
                self._check(peer, now)
            for departed in list(self._departed.values()):
                self._seek_proof(departed)
            self._due = min([self._due, *(peer.heard + peer.excused + self.me.liveness_s for peer in self.pairings.values())])
        return min([self._due, *greeted])

    def _check(self, peer: Peer, now: float) -> None:
        if now - peer.pinged >= self._beat_s:
            peer.pinged = now
            self._write(peer.route, peer.instance, Ping())
        blocked = peer.route.blocked_at
        if known_gone(peer.intro.process):
            self.lose(peer, "its process is gone", gone=True)
        elif now >= peer.heard + peer.excused + self.me.liveness_s:
            self.lose(peer, f"silent for liveness_s ({self.me.liveness_s:g} s)")
        elif blocked is not None and now - blocked > self._send_s + peer.excused:
            self.lose(peer, f"no control message could be sent to it for send_s ({self._send_s:g} s)")

    def _greet_again(self, link: Link, now: float) -> float:
        """Repeat the hello of a link that somebody waits for; give up one that nobody does."""
        if link.peer is not None or not link.hello:
            return now + self._beat_s
        if now < link.next_hello:
            return link.next_hello
        link.waiters = [waiter for waiter in link.waiters if waiter.wanted()]
        if link.waiters:
            link.idle_since = now
        elif now - link.idle_since > self._send_s:
            self._drop_link(link)
            return now + self._beat_s
        link.next_hello = now + link.hello_s
        if not link.connecting:
            self._say_hello(link, now)
        return link.next_hello

    def sizes(self) -> dict[str, int]:
        """Entries of every per-peer store (C7)."""
        return {
            "peers": len(self.pairings),
            "links": len(self._links),
            "link_waiters": sum(len(link.waiters) for link in list(self._links.values())),
            "pairings": len(self._pairing_now),
            "departed_peers": len(self._departed),
        }


def _parting(stranger: Stranger) -> str:
    return CLOSED if stranger.closing else "it does not know this instance any more"
