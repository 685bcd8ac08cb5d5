"""Small scripts about tickets, engines and peers, like those about rooms in ``scenarios``."""

from __future__ import annotations

from kvcore.states import KVPoll, RoomKey
from tests.model.ghosts import Limits, Modules
from tests.model.staging import end, ended, in_flight, need, published, scenario
from tests.model.world import World


@scenario
def parts_end_one_by_one(modules: Modules) -> None:
    """T5, R6: a ticket of several parts ends with the last of them."""
    world = World(modules=modules, split=True)
    sender, receiver = in_flight(world, pages=3)
    need(len(world.nodes["P"].engine.pending) == 3, "T5", "three pages apart are three parts")
    for _ in range(2):
        end(world, count=1)
        ended(sender, KVPoll.TRANSFERRING, "T5")
    end(world)
    ended(sender, KVPoll.SUCCESS, "T5")
    ended(receiver, KVPoll.SUCCESS, "R6")


@scenario
def retries(modules: Modules) -> None:
    """T6: submitted again with back-off, and not after an abort; what waits for its turn then ends."""
    world = World(modules=modules)
    sender, receiver = in_flight(world)
    for _ in range(3):
        end(world, "retry")
        need(not world.nodes["P"].engine.pending, "T6", "submitted again at once")
        world.advance(1.0)
        need(len(world.nodes["P"].engine.pending) == 1, "T6", "never submitted again")
    world.abort(sender)
    end(world, "retry")
    world.advance(1.0)
    need(not world.nodes["P"].engine.pending, "A5", f"{sender} was aborted, and its ticket was submitted again")
    world.settle()
    need(receiver.handle.is_release_safe(), "R1", f"{receiver}: its sender's ticket is over, and its pages are not safe")
    world.finish(silent=False)


@scenario
def a_ticket_takes_too_long(modules: Modules) -> None:
    """S8, R1, R3, R5: past ``ticket_s`` the room fails, and its pages wait until the ticket ends after all."""
    world = World(Limits(transfer_s=30.0), Limits(transfer_s=30.0), modules)
    sender, receiver = in_flight(world)
    world.advance(5.0)
    ended(sender, KVPoll.FAILED, "S8")
    world.settle()
    ended(receiver, KVPoll.FAILED, "A4")
    need(not sender.handle.is_release_safe() and not receiver.handle.is_release_safe(), "R3", "a ticket still runs")
    end(world, "done")
    need(sender.handle.is_release_safe() and receiver.handle.is_release_safe(), "R3", "the ticket is over, and that proves it")
    need(not sender.handle.release_unproven and not receiver.handle.release_unproven, "R3", "proved, and told as unproven")


@scenario
def no_proof(modules: Modules) -> None:
    """R3: pages of a ticket that failed without being known to be over wait for ``quarantine_s``, and the handles say so."""
    for how in ("unproven", "raised"):
        world = World(modules=modules)
        if how == "raised":
            world.nodes["P"].engine.answers.append(how)
        sender, receiver = in_flight(world)
        end(world, "unproven")
        ended(sender, KVPoll.FAILED, "R3")
        ended(receiver, KVPoll.FAILED, "A4")
        world.advance(15.0)
        for life in (sender, receiver):
            need(not life.handle.is_release_safe(), "R3", f"{life}: nothing proves that its pages are free")
        world.advance(2.0)
        world.settle()
        world.advance(18.0)
        for life in (sender, receiver):
            need(life.handle.is_release_safe() and life.handle.release_unproven, "R3", f"{life}: not released by limit, or not told so")
            need(life.node.unproven_of == {life.key.generation: 2}, "R3", f"{life}: counted {life.node.unproven_of}")
        world.finish(silent=False)


@scenario
def clear_with_a_ticket_in_flight(modules: Modules) -> None:
    """C1: the backend hears of the clear after the last ticket."""
    world = World(modules=modules)
    sender, receiver = in_flight(world)
    world.clear(sender)
    world.settle()
    need(sender.key in world.nodes["P"].engine.held, "C1", "the backend was told to drop what it works on")
    need(world.nodes["P"].table.sizes()["tickets"] == 1 == world.nodes["P"].ledger.tickets, "C1", "a ticket in flight was dropped")
    end(world, "failed")
    need(not world.nodes["P"].engine.held, "C1", "the backend was never told to clear")
    need(receiver.handle.is_release_safe(), "R2", f"{receiver} never heard that its sender has drained")


@scenario
def one_peer_of_two_dies(modules: Modules) -> None:
    """P2, R4: its rooms fail, all of them and no others, and what it cannot touch any more is free."""
    world = World(modules=modules, fences=True)
    lost, kept = [in_flight(world, number) for number in (0, 1)], in_flight(world, 2, place="B")
    world.restart("A")
    world.give_up(world.nodes["P"], "A.0")
    world.work(world.nodes["P"])
    for sender, _ in lost:
        ended(sender, KVPoll.FAILED, "P2")
        need(sender.handle.is_release_safe(), "R4", f"{sender}: its peer is fenced")
    need(world.nodes["P"].ledger.tickets == 1, "P2", "the tickets of the dead peer alone are dropped")
    end(world)
    for life in kept:
        ended(life, KVPoll.SUCCESS, "P2")
    world.finish(silent=False)


@scenario
def the_cancel_is_late(modules: Modules) -> None:
    """A5, P2: nothing starts after an abort though the progress thread lags, and other rooms go on."""
    world = World(modules=modules)
    kept = in_flight(world, 1)
    sender, receiver = published(world)
    world.send(sender, 2, last=True)
    start = world.nodes["P"].ledger.cancel
    orders: list[RoomKey] = []
    world.nodes["P"].ledger.cancel = orders.append
    world.abort(sender)
    world.settle()
    need(len(world.nodes["P"].engine.pending) == 1, "A5", f"a ticket of {sender} was started after its abort")
    for key in orders:
        start(key)
    world.settle()
    need(receiver.handle.is_release_safe(), "R2", f"{receiver} never heard that nothing was started")
    end(world)
    for life in kept:
        ended(life, KVPoll.SUCCESS, "P2")


@scenario
def a_part_fails(modules: Modules) -> None:
    """R1, R2, R5: a ticket of which one part has failed goes on until the others have ended."""
    world = World(modules=modules, split=True)
    sender, receiver = in_flight(world, pages=3)
    end(world, "failed", count=1)
    for life in (sender, receiver):
        ended(life, KVPoll.FAILED, "A4")
        need(not life.handle.is_release_safe(), "R1", f"two parts of a ticket of {life} still run")
    end(world, "failed")
    for life in (sender, receiver):
        need(life.handle.is_release_safe(), "R1", f"all parts of {life} have ended")


@scenario
def a_peer_is_silent(modules: Modules) -> None:
    """R7, P2: no ticket starts towards a peer that was not heard for ``liveness_s``, and its rooms fail."""
    world = World(modules=modules)
    sender, _ = published(world)
    world.send(sender, 2, last=True)
    world.cut.add("A")
    world.clock.now += 5.0
    world.work(world.nodes["P"])
    need(not world.nodes["P"].engine.pending, "R7", "a ticket was started")
    world.advance(1.0)
    ended(sender, KVPoll.FAILED, "P2")
