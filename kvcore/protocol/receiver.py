"""The receiver's half of the room protocol: what each event does to one room of one decode rank.

``_Turn.fail`` is the only way to FAILED, ``_Turn.publish`` the only way a destination becomes writable. Once published, pages
are released by SUCCESS, by Drained or success of each sender rank, by a fence, or by ``quarantine_s`` (R1, R3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from kvcore.protocol.events import (
    Clear,
    Effect,
    Event,
    Fail,
    Fenced,
    Forget,
    Got,
    Lost,
    Open,
    Pair,
    Receive,
    Route,
    Seek,
    Send,
    Timeout,
    Unproven,
    cleared,
    timed_out,
)
from kvcore.protocol.messages import Ack, Drained, Here, Layers, Relay, Status, Which
from kvcore.protocol.receiver_state import Drain, Life, Receiver, Source, Unrouted, ask, tell, timers
from kvcore.states import FailureCode, KVPoll, Reason


def step(state: Receiver, event: Event) -> tuple[Receiver, tuple[Effect, ...]]:
    """Take one event. The state is unchanged, and nothing is to be done, where the event is about nothing that lives here."""
    turn = _Turn(state)
    kind = type(event.message) if isinstance(event, Got) else type(event)
    handler = _HANDLERS.get(kind)
    if handler is not None:
        handler(turn, event)
    return turn.state, tuple(turn.out)


class _Turn:
    """One step under way: the state so far and the effects."""

    def __init__(self, state: Receiver) -> None:
        self.state = state
        self.out: list[Effect] = []

    # --- the guarded core

    def live(self, generation: int | None = None) -> Life | None:
        """The stored lifetime if it is not terminal (and is the one named)."""
        life = self.state.life
        if life is None or life.state.terminal or (generation is not None and life.generation != generation):
            return None
        return life

    def set_life(self, life: Life | None) -> None:
        self.state = replace(self.state, life=life)

    def set_source(self, life: Life, source: Source) -> Life:
        """Store one sender rank's part, and what it means for the room's state."""
        sources = tuple(source if old.party.instance == source.party.instance else old for old in life.sources)
        life = replace(life, sources=sources)
        if all(item.state is KVPoll.SUCCESS for item in sources):
            life = replace(life, state=KVPoll.SUCCESS)
        elif life.joined:
            begun = any(item.state >= KVPoll.TRANSFERRING for item in sources)
            life = replace(life, state=max(life.state, KVPoll.TRANSFERRING if begun else KVPoll.WAITING_FOR_INPUT))
        self.set_life(life)
        return life

    def fail(self, reason: Reason, lost: str | None = None) -> None:
        """Become FAILED, once, with the reason (S5, S6); keep what each sender rank must hear or still answer."""
        life = self.live()
        if life is None:
            return
        unpaired = not life.joined
        self.set_life(replace(life, state=KVPoll.FAILED, reason=reason, unpaired=unpaired))
        if not life.sources:
            self.state = replace(self.state, unrouted=(*self.state.unrouted, Unrouted(life.generation, reason)))
        for source in life.sources:
            writable = source.published and source.state is not KVPoll.SUCCESS
            gone = source.party.instance == lost
            if writable or not (gone or source.state is KVPoll.FAILED):
                pages = life.listed if writable else 0
                self.keep(Drain(source.party, life.generation, source.sg, writable, reason, pages))

    def publish(self, life: Life, source: Source) -> Life:
        """Send the destination to a joined rank of a live lifetime; from now on it may write the pages."""
        source = replace(source, published=True)
        life = self.set_source(life, source)
        self.out.append(ask(self.state.room, life, source))
        return life

    # --- drain records

    def drain(self, instance: str, rg: int) -> Drain | None:
        return next((drain for drain in self.state.drains if (drain.party.instance, drain.rg) == (instance, rg)), None)

    def keep(self, drain: Drain) -> None:
        """Store a drain record in place of the one for the same lifetime and rank, and ask."""
        self.drop(drain)
        self.state = replace(self.state, drains=(*self.state.drains, drain))
        if drain.asking:
            self.out.append(tell(self.state.room, drain))

    def drop(self, drain: Drain) -> None:
        key = (drain.party.instance, drain.rg)
        self.state = replace(self.state, drains=tuple(old for old in self.state.drains if (old.party.instance, old.rg) != key))

    # --- events from the handle

    def on_open(self, event: Open) -> None:
        if self.live() is not None:
            return
        if self.state.life is not None:
            self.on_clear(Clear(self.state.life.generation))
        drains = tuple(drain for drain in self.state.drains if drain.sg or drain.published)  # C4: reopening withdraws the unpaired
        self.state = replace(self.state, life=Life(event.generation), drains=drains, unrouted=())
        self.out.append(Seek(event.generation))

    def on_route(self, event: Route) -> None:
        """Now it is known who to join, or whom to tell of a failure that came before."""
        for item in self.state.unrouted:
            if item.rg == event.generation:
                self.state = replace(self.state, unrouted=tuple(old for old in self.state.unrouted if old != item))
                for party in event.parties:
                    self.keep(Drain(party, item.rg, 0, published=False, reason=item.reason))
        life = self.live(event.generation)
        if life is None or life.sources:
            return
        life = replace(life, sources=tuple(Source(party) for party in event.parties))
        self.set_life(life)
        self.out += [ask(self.state.room, life, source) for source in life.sources]

    def on_receive(self, event: Receive) -> None:
        life = self.live(event.generation)
        if life is None or life.pages is not None:
            return
        life = replace(life, pages=event.pages)
        self.set_life(life)
        for source in life.sources:
            if source.sg:
                life = self.publish(life, source)

    def on_fail(self, event: Fail) -> None:
        if self.live(event.generation) is not None:
            self.fail(event.reason)

    def on_clear(self, event: Clear) -> None:
        life = self.state.life
        if life is None or life.generation != event.generation:
            return
        self.fail(cleared(self.state.room, "decode", self.state.rank))
        self.set_life(None)
        self.out.append(Forget(event.generation))

    # --- messages

    def on_here(self, event: Got) -> None:
        life = self.live(event.message.rg)
        source = life.source(event.source.instance) if life is not None else None
        if life is None or source is None or source.sg or not event.message.sg:
            return
        source = replace(source, sg=event.message.sg)
        life = self.set_source(life, source)
        if life.pages is not None:
            self.publish(life, source)

    def on_status(self, event: Got) -> None:
        message, instance = event.message, event.source.instance
        assert isinstance(message, Status)
        if message.sg == 0:
            return self.on_no_such_room(message, instance)
        life = self.live(message.rg)
        source = life.source(instance) if life is not None else None
        if life is not None and source is not None:
            self.take_verdict(life, source, message)
        if message.state.terminal:
            self.acknowledge(message, instance)

    def take_verdict(self, life: Life, source: Source, message: Status) -> None:
        """A sender rank speaks of this live lifetime. Before Here only a refusal counts; its success is final."""
        if source.sg == 0 and message.state is KVPoll.FAILED:
            source = replace(source, sg=message.sg)
        if source.sg != message.sg or source.state is KVPoll.SUCCESS:
            return
        if message.state is KVPoll.FAILED:
            self.set_source(life, replace(source, state=KVPoll.FAILED))
            return self.fail(message.reason or Reason(FailureCode.INTERNAL, "the sender gave no reason", "prefill", source.party.rank))
        if not source.published or message.state is source.state:
            return
        if message.state is KVPoll.SUCCESS and message.record:
            life = replace(life, record=message.record)
        self.set_source(life, replace(source, state=message.state))

    def acknowledge(self, message: Status, instance: str) -> None:
        """Say that a verdict was taken; ``live`` if by the stored lifetime that knows this sender lifetime."""
        life = self.state.life
        source = life.source(instance) if life is not None and life.generation == message.rg else None
        live = source is not None and source.sg == message.sg
        self.out.append(Send(instance, Ack(message.room, message.attempt, message.rg, message.sg, live)))

    def on_no_such_room(self, message: Status, instance: str) -> None:
        life = self.live(message.rg)
        source = life.source(instance) if life is not None else None
        if source is not None and source.sg == 0 and message.state is KVPoll.FAILED:
            text = f"no such room {self.state.room} at the prefill side"
            self.fail(message.reason or Reason(FailureCode.NO_SUCH_ROOM, text, "prefill", source.party.rank))

    def on_which(self, event: Got) -> None:
        """A live sender asks which lifetime an unnamed abort meant: name both, unless this lifetime lives or knows another."""
        drain = self.drain(event.source.instance, event.message.rg)
        if drain is not None and not drain.published and drain.sg in (0, event.message.sg):
            self.keep(replace(drain, sg=event.message.sg))

    def on_drained(self, event: Got) -> None:
        message = event.message
        assert isinstance(message, Drained)
        drain = self.drain(event.source.instance, message.rg)
        if drain is None or drain.sg not in (0, message.sg):
            return
        self.drop(drain)
        if message.expired and drain.published:
            self.keep(replace(drain, asking=False))

    def on_layers(self, event: Got) -> None:
        """A sender rank says which layers are in; the latest word counts."""
        message = event.message
        assert isinstance(message, Layers)
        life = self.live(message.rg)
        source = life.source(event.source.instance) if life is not None else None
        if life is not None and source is not None and source.published and source.sg == message.sg and source.step < message.step:
            self.set_source(life, replace(source, step=message.step, layers=message.layers))

    def on_relay(self, event: Got) -> None:
        """Another rank of this group failed. This room fails with it, also where every rank that is left would succeed (T5)."""
        message = event.message
        assert isinstance(message, Relay)
        life = self.live(message.rg)
        source = life.source(event.source.instance) if life is not None else None
        if source is not None and source.sg == message.sg:
            self.fail(message.reason or Reason(FailureCode.ABORTED, "another rank failed", "decode", self.state.rank))

    # --- peers and timers

    def on_lost(self, event: Lost) -> None:
        life = self.live()
        source = life.source(event.instance) if life is not None else None
        if life is not None and source is not None and source.state is not KVPoll.SUCCESS:  # whose word is final (T5)
            self.lose_source(life, event)
        for drain in self.state.drains:
            if drain.party.instance == event.instance and not drain.published:
                self.drop(drain)

    def lose_source(self, life: Life, event: Lost) -> None:
        """A room that has met no sender yet looks for its route again: another instance may be there by now (P3)."""
        if not event.replaced or any(source.sg for source in life.sources):
            return self.fail(event.reason, lost=event.instance)
        self.set_life(replace(life, sources=()))
        self.out.append(Seek(life.generation))

    def on_fenced(self, event: Fenced) -> None:
        for drain in self.state.drains:
            if drain.party.instance == event.instance:
                self.drop(drain)

    def on_timeout(self, event: Timeout) -> None:
        if event.timer not in timers(self.state):
            return
        kind, *subject = event.timer.subject
        _TIMEOUTS[str(kind)](self, event, *subject)

    def on_state_timeout(self, event: Timeout, generation: int, _restarted: bool) -> None:
        life = self.live(generation)
        if life is None:
            return
        text = timed_out(self.state.room, event.timer.limit, _waited_for(life), event.note)
        self.fail(Reason.of(FailureCode.TIMEOUT, text, "decode", self.state.rank))

    def on_drain_timeout(self, event: Timeout, instance: str, rg: int) -> None:
        drain = self.drain(instance, rg)
        if drain is None:
            return
        self.drop(drain)
        if drain.published:
            self.out.append(Unproven(rg, Pair(instance, rg, drain.sg), pages=drain.pages))

    def on_unrouted_timeout(self, event: Timeout, rg: int) -> None:
        self.state = replace(self.state, unrouted=tuple(item for item in self.state.unrouted if item.rg != rg))


def _waited_for(life: Life) -> str:
    if not life.sources:
        return "the prefill side's address"
    if life.state is KVPoll.BOOTSTRAPPING:
        return f"prefill rank {min(source.party.rank for source in life.sources if not source.sg)} to open the room"
    if life.pages is None:
        return "receive to be called"
    return "the sender's first chunk" if life.state is KVPoll.WAITING_FOR_INPUT else "the sender's last chunk"


_TIMEOUTS: dict[str, Callable[..., None]] = {
    "state": _Turn.on_state_timeout,
    "drain": _Turn.on_drain_timeout,
    "unrouted": _Turn.on_unrouted_timeout,
}

_HANDLERS: dict[type, Callable[[_Turn, Any], None]] = {
    Open: _Turn.on_open,
    Route: _Turn.on_route,
    Receive: _Turn.on_receive,
    Fail: _Turn.on_fail,
    Clear: _Turn.on_clear,
    Here: _Turn.on_here,
    Status: _Turn.on_status,
    Which: _Turn.on_which,
    Drained: _Turn.on_drained,
    Layers: _Turn.on_layers,
    Relay: _Turn.on_relay,
    Lost: _Turn.on_lost,
    Fenced: _Turn.on_fenced,
    Timeout: _Turn.on_timeout,
}
