"""How a script brings the model to where it is about something, and says which rule an answer breaks."""

from __future__ import annotations

from collections.abc import Callable

from kvcore.states import KVPoll
from tests.model.ghosts import Lifetime, Modules, Violation
from tests.model.world import World

Scenario = Callable[[Modules], None]
SCENARIOS: list[Scenario] = []


def scenario(script: Scenario) -> Scenario:
    SCENARIOS.append(script)
    return script


def need(holds: object, rule: str, text: str) -> None:
    if not holds:
        raise Violation(rule, text)


def pair(world: World, number: int = 0, pages: int = 2, place: str = "A") -> tuple[Lifetime, Lifetime]:
    """Both sides of a new use, met."""
    use = world.new_use(number, place, pages)
    lives = world.open(use, use.first[0]), world.open(use, "decode" if use.first[0] == "prefill" else "prefill")
    world.settle()
    return lives if lives[0].key.side == "prefill" else lives[::-1]


def published(world: World, number: int = 0, pages: int = 2, place: str = "A") -> tuple[Lifetime, Lifetime]:
    sender, receiver = pair(world, number, pages, place)
    world.receive(receiver)
    world.settle()
    return sender, receiver


def in_flight(world: World, number: int = 0, pages: int = 2, place: str = "A") -> tuple[Lifetime, Lifetime]:
    """All pages handed over, and given to the engine."""
    sender, receiver = published(world, number, pages, place)
    world.send(sender, pages, last=True)
    world.settle()
    return sender, receiver


def end(world: World, how: str = "done", count: int | None = None) -> None:
    """Tickets come to something, and everybody hears of it."""
    engine = world.nodes["P"].engine
    for ticket in engine.pending[:count]:
        engine.end(ticket, how)
    world.settle()
    world.settle()


def ended(life: Lifetime, state: KVPoll, rule: str) -> None:
    need(life.handle.poll() is state, rule, f"{life} is {life.handle.poll().name} instead of {state.name}: {life.handle.failure}")


MOMENTS = (pair, published, in_flight)
