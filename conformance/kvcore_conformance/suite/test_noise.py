"""P5: bytes that no peer would send, on every port of both processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcore_conformance.marks import full, rule
from kvcore_conformance.stage.arena import LIMITS, POOLS, Pair, number
from kvcore_conformance.stage.bare import bare_pair
from kvcore_conformance.stage.crew import Crew
from kvcore_conformance.stage.driver import Child, free_port
from kvcore_conformance.stage.noise import Noise, listening
from kvcore_conformance.stage.waits import until

MESSAGES = 300
"""In all; some of each kind come to each port."""
NOISE_S = 15.0


@pytest.fixture
def proof(tmp_path: Path) -> Path:
    """What is made where received bytes are unpickled or evaluated."""
    return tmp_path / "evaluated"


@rule("P5")
def test_p5_any_bytes_on_the_core_s_ports_are_counted_and_harmless(pair: Pair, crew: Crew, proof: Path) -> None:
    control = free_port()
    with crew.lend(1) as (prefill,):
        prefill.start("prefill", pair.source.specs, limits=LIMITS, port=control, admin="127.0.0.1:0")
        mine = Pair(prefill, pair.decode, pair.source, pair.target)
        mine.transfer()
        room = mine.open()
        room.receive()
        mine.expect(room)
        make_noise([f"127.0.0.1:{control}", pair.decode.address], [prefill.address, prefill.admin], proof)
        room.send()
        room.ends("SUCCESS")
        mine.intact()
        room.clear()
        for child, port in ((prefill, "control"), (prefill, "bootstrap_port"), (pair.decode, "control")):
            assert child.bad_messages(port) > 0, f"bad messages on {port} of {child.role} are not counted"
        assert prefill.work("stats")["peers"] == 1, "a stranger has become a peer"
        unharmed(prefill, pair.decode, proof=proof)


@rule("P5")
@full
def test_p5_any_bytes_on_the_engine_s_own_ports_are_harmless(crew: Crew, proof: Path) -> None:
    """Where it has some: both processes live, and pages move."""
    with bare_pair(crew, POOLS) as both:
        children = both.prefill.child, both.decode.child
        make_noise([], [port for child in children for port in listening(child.pid)], proof)
        died = [side for side, child in zip(("prefill", "decode"), children, strict=True) if not child.running]
        assert not died, f"the noise on its engine's ports has ended the process of {died}"
        both.moves({"kv": ([5], [6])})
        unharmed(*children, proof=proof)


def make_noise(control: list[str], tcp: list[str], proof: Path) -> None:
    """Send some of everything to every port, if there is one."""
    if control or tcp:
        noise = Noise(control, tcp, proof, seed=number())
        with noise:
            until(lambda: noise.sent > MESSAGES, f"{MESSAGES} bad messages were taken", NOISE_S)


def unharmed(*children: Child, proof: Path) -> None:
    """Nothing raised but, where it does, the backend for reasons of its own; and nothing was evaluated."""
    for child in children:
        raised = [text for text in child.logged("Traceback") if "fast_hooks" not in text]
        assert not raised, f"a bad message raised: {raised[0][-500:]}"
    assert not proof.exists(), "bytes that were received have been unpickled or evaluated"
