"""Small scripts about rooms, each about a few rules. They hold for the shipped modules, and mutants are caught by them.

A script does what it is about and asks what no rule looks at by itself; the rules of every moment are checked after every action.
"""

from __future__ import annotations

from kvcore.states import KVPoll
from tests.model.ghosts import Lifetime, Limits, Modules, Use
from tests.model.staging import MOMENTS, end, ended, in_flight, need, pair, published, scenario
from tests.model.world import World


@scenario
def rooms_end_well(modules: Modules) -> None:
    """T1, T4, T5, R6, C7: chunks, a flag, several rooms and attempts at once, then nothing is left."""
    world = World(modules=modules)
    flags = []
    for number in range(3):
        sender, receiver = pair(world, number, pages=3, place="AB"[number % 2])
        flags.append(world.send(sender, 1, last=False, wait=True))
        world.receive(receiver)
        world.send(sender, 2, last=True)
    world.settle()
    for flag in flags:
        assert flag is not None
        world.fire(flag)
        world.settle()
        end(world)
    for life in world.lives:
        ended(life, KVPoll.SUCCESS, "T5")
    world.finish(silent=False)


@scenario
def aborts(modules: Modules) -> None:
    """A2 to A5, C3, S5: on either side, at every moment, twice, and told to the other side at once."""
    for moment in MOMENTS:
        for who in (0, 1):
            for call in ("abort", "clear"):
                world = World(modules=modules)
                lives = moment(world)
                chunks = len(world.nodes["P"].engine.pending)
                (world.abort if call == "abort" else world.clear)(lives[who])
                first = lives[who].handle.failure
                lives[who].handle.abort("another reason")
                world.rules.check()
                world.settle()
                ended(lives[1 - who], KVPoll.FAILED, "A4" if call == "abort" else "C3")
                told = lives[1 - who].handle.failure
                need(told and first and told.reason == first.reason, "S5", f"{lives[1 - who]} reports {told} instead of {first}")
                need(len(world.nodes["P"].engine.aborted) == chunks, "A5", f"{chunks} tickets ran and not all were cancelled")
                end(world, "failed")
                need(all(life.handle.is_release_safe() for life in lives), "R1", "all tickets have ended, and pages are not safe")
                world.finish(silent=True)


@scenario
def success_is_final(modules: Modules) -> None:
    """A3, S1: an abort of a room that succeeded changes nothing."""
    world = World(modules=modules)
    lives = in_flight(world)
    end(world)
    for life in lives:
        world.abort(life)
        ended(life, KVPoll.SUCCESS, "A3")
        world.clear(life)
        ended(life, KVPoll.SUCCESS, "C5")


@scenario
def a_clear_is_told(modules: Modules) -> None:
    """C3: the peer of a room that is cleared while it lives hears of it, long before any waiting limit."""
    for who in (0, 1):
        world = World(modules=modules)
        lives = published(world)
        world.clear(lives[who])
        for _ in range(4):
            world.settle()
            world.advance(0.25)
        ended(lives[1 - who], KVPoll.FAILED, "C3")


@scenario
def old_handles(modules: Modules) -> None:
    """C2, C4, C5: what handles of an old use say or do never touches the next use of the same name."""
    for clear in (True, False):
        world = World(modules=modules)
        old = in_flight(world)
        world.abort(old[0])
        world.settle()
        for life in old if clear else ():
            world.clear(life)
        new = published(world)
        need(new[0].use.id == old[0].use.id, "C4", "the old use has ended on both sides, and its name cannot be used again")
        for life in old:
            need(not life.handle.is_release_safe(), "R5", f"{life} has a ticket in flight")
            world.abort(life)
            world.clear(life)
            world.clear(life)
        end(world, "failed")
        for life in old:
            need(life.handle.is_release_safe(), "R1", f"{life}: its ticket has ended, and its pages are not safe")
        need(not new[1].handle.is_release_safe(), "R1", f"{new[1]} is published")
        world.send(new[0], 2, last=True)
        world.settle()
        end(world)
        for life in new:
            ended(life, KVPoll.SUCCESS, "C4")
        world.finish(silent=False)


@scenario
def live_rooms_are_refused(modules: Modules) -> None:
    """C6."""
    world = World(modules=modules)
    for life in in_flight(world):
        world.open_live(life)
    end(world)
    for life in list(world.lives):
        ended(life, KVPoll.SUCCESS, "C6")


@scenario
def limits_pass(modules: Modules) -> None:
    """S8: each state's limit, on either side, neither early nor late, with nobody asking."""
    for bootstrap_s, input_s, transfer_s in ((3.0, 5.0, 8.0), (8.0, 3.0, 5.0), (5.0, 8.0, 3.0)):
        limits = Limits(bootstrap_s, input_s, transfer_s, ticket_s=20.0, quarantine_s=40.0)
        for moment in (*MOMENTS, alone):
            world = World(limits, limits, modules)
            moment(world)
            world.deaf = True
            world.advance(2.0)
            need(not any(life.state.terminal for life in world.lives), "S8", "no limit was due")
            world.finish(silent=False)


def alone(world: World) -> tuple[Lifetime, Lifetime]:
    """Each side without the other."""
    return world.open(world.new_use(0, "A"), "prefill"), world.open(world.new_use(1, "B"), "decode")


@scenario
def receive_restarts_its_limit(modules: Modules) -> None:
    """S8: ``input_s`` runs anew from ``receive``."""
    world = World(modules=modules)
    _, receiver = pair(world)
    world.deaf = True
    world.advance(7.0)
    world.receive(receiver)
    world.advance(7.0)
    ended(receiver, KVPoll.WAITING_FOR_INPUT, "S8")
    world.advance(1.0)
    ended(receiver, KVPoll.FAILED, "S8")


@scenario
def other_events_restart_no_limit(modules: Modules) -> None:
    """S8: a limit runs from the state's beginning, whatever else happens in it."""
    world = World(modules=modules)
    sender, receiver = alone(world)
    world.advance(5.0)
    world.send(sender, 1, last=False)
    world.receive(receiver)
    world.deaf = True
    world.advance(3.0)
    for life in (sender, receiver):
        ended(life, KVPoll.FAILED, "S8")


@scenario
def letters_are_lost(modules: Modules) -> None:
    """P6: whatever is lost once is said again, and all ends well."""
    world = World(modules=modules)
    use = world.new_use(0, "A", 1)
    sender, receiver = world.open(use, "prefill"), world.open(use, "decode")
    for act in (lambda: None, lambda: world.receive(receiver), lambda: world.send(sender, 1, last=True)):
        act()
        world.settle()
        lose_all(world, 0.75)
        world.settle()
    ticket = world.nodes["P"].engine.pending
    need(ticket, "P6", "the destination was lost once and never said again")
    world.nodes["P"].engine.end(ticket[0], "done")
    world.work(world.nodes["P"])
    ended(sender, KVPoll.SUCCESS, "T5")
    lose_all(world, 1.5)
    world.settle()
    ended(receiver, KVPoll.SUCCESS, "P6")


def lose_all(world: World, seconds: float) -> None:
    """What is on its way is lost; then time passes."""
    world.letters.clear()
    world.advance(seconds)


@scenario
def arguments_are_checked_once(modules: Modules) -> None:
    """T1: nothing after the last chunk, and one destination."""
    world = World(modules=modules)
    sender, receiver = pair(world)
    world.receive(receiver)
    world.receive(receiver)
    world.send(sender, 2, last=True)
    world.send(sender, 0, last=True)
    world.settle()
    end(world)
    ended(receiver, KVPoll.SUCCESS, "T1")


@scenario
def nobody_is_there(modules: Modules) -> None:
    """A7, A8, C7: rooms of one side only, rejections, and joins for what nobody opens leave nothing behind."""
    world = World(modules=modules)
    uses: list[Use] = [world.new_use(number, "A") for number in range(3)]
    world.open(uses[0], "decode")
    world.reject(uses[1])
    world.open(uses[2], "prefill")
    world.settle()
    world.advance(2.5)
    world.settle()
    need(all(life.handle.poll().terminal for life in world.lives if life.key.side == "decode"), "A7", "no answer after orphan_s")
    turned_down = world.open(world.new_use(3, "B"), "prefill")
    world.reject(turned_down.use)
    world.settle()
    ended(turned_down, KVPoll.FAILED, "A8")
    world.finish(silent=False)


@scenario
def the_last_ticket_ends_after_an_abort(modules: Modules) -> None:
    """S1, S6, C5: a room that has failed stays failed, whatever its tickets come to, cleared or not."""
    for call in (World.abort, World.clear):
        world = World(modules=modules)
        lives = in_flight(world)
        call(world, lives[0])
        world.settle()
        end(world)
        for life in lives:
            ended(life, KVPoll.FAILED, "S1")


@scenario
def a_chunk_after_the_end(modules: Modules) -> None:
    """A5: ``send`` on a room that has ended keeps nothing and starts nothing."""
    world = World(modules=modules)
    sender, _ = published(world)
    world.abort(sender)
    world.send(sender, 2, last=True)
    need(not sender.room.chunks and not sender.room.pages, "A5", f"{sender} keeps a chunk")
    world.settle()
    need(not world.nodes["P"].ledger.tickets, "A5", f"{sender} has a ticket")
