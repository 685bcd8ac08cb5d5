"""Real processes over NIXL: what is killed, frozen, started again; what it costs when idle; and how a process ends that has used it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvcore_conformance import Subject
from kvcore_conformance.stage.crew import Crew
from kvcore_conformance.stage.driver import Child
from kvcore_conformance.stage.footprint import idle_s
from kvcore_conformance.stage.frozen import check_late_is_seen, check_nothing_late
from kvcore_conformance.stage.waits import until

from tests.engine_processes import (
    BRIEF,
    check_frozen_killed_and_started_again,
    check_killed_in_the_middle,
    holds_nothing,
    moved,
    new_room,
)
from tests.helpers import ROOT

TCP = {"UCX_TLS": "tcp"}
SEEN_S = 2.0


@pytest.fixture(scope="module")
def crews() -> Iterator[dict[str, Crew]]:
    """Processes over each transport."""
    crews = {"tcp": Crew(TCP, "nixl"), "shm": Crew({}, "nixl")}
    try:
        yield crews
    finally:
        for crew in crews.values():
            crew.end()


@pytest.fixture(params=["tcp", "shm"])
def crew(request: pytest.FixtureRequest, crews: dict[str, Crew]) -> Crew:
    return crews[request.param]


def test_r3_nothing_comes_late_from_or_to_a_process_that_stood_still() -> None:
    check_nothing_late(Subject("nixl", env=TCP))


def test_the_test_of_that_test() -> None:
    check_late_is_seen(Subject("nixl", env=TCP))


@pytest.mark.parametrize("role", ["prefill", "both"])
def test_r4_a_write_to_a_killed_process_is_proved_to_be_over_unless_this_side_is_written_to_as_well(
    crews: dict[str, Crew], role: str
) -> None:
    with crews["tcp"].lend(2) as (prefill, doomed):
        check_killed_in_the_middle(prefill, doomed, role)


def test_p2_p3_killed_frozen_and_started_again(crews: dict[str, Crew]) -> None:
    """Over TCP bytes of the dead may still wait in a socket, and NIXL does not say when they are in."""
    with crews["shm"].lend(3) as (prefill, decode, successor):
        check_frozen_killed_and_started_again(prefill, decode, successor, unproven=True)


def costs(child: Child) -> int:
    """Open files and threads of a process."""
    proc = Path(f"/proc/{child.pid}")
    return len(list((proc / "fd").iterdir())) + len(list((proc / "task").iterdir()))


@pytest.mark.parametrize(
    ("transport", "number"), [("tcp", 2), *(pytest.param(name, 20, marks=pytest.mark.slow) for name in ("tcp", "shm"))]
)
def test_killed_processes_leave_nothing_behind(crews: dict[str, Crew], transport: str, number: int) -> None:
    crew = crews[transport]
    with crew.lend(1) as (prefill,):
        prefill.start("prefill", limits=BRIEF)
        most = 0
        for _ in range(number):
            with crew.lend(1) as (doomed,):
                moved(prefill, doomed.start("decode", limits=BRIEF))
                most = most or costs(prefill)  # with one peer
                doomed.kill()
            holds_nothing(prefill, peers=0)
        until(lambda: costs(prefill) < most, f"less than {most} open files and threads, with no peer: {costs(prefill)}", 15.0)


def test_idle_costs_next_to_nothing_also_while_rooms_wait(crew: Crew) -> None:
    with crew.lend(2) as (prefill, decode):
        prefill.start("prefill")
        decode.start("decode")
        moved(prefill, decode)
        for waits in (False, True):
            if waits:
                room = new_room()
                prefill.sender(room)
                decode.receiver(room, prefill).receive([1])
            used = idle_s(prefill, decode, seconds=SEEN_S)
            assert used < 0.02 * SEEN_S, f"with rooms that wait: {waits}; seconds used: {used}"


DEAF = """
import os, socket
from nixl_pair import Node, pair
from tests.helpers import memory

def listeners():
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(number))) as one:
                found |= {int(number)} if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) else set()
        except OSError:
            pass  # no socket
    return found

with pair() as both:
    others = listeners()
    deaf = Node("decode", "deaf", memory(64, 2, 4096))
    for number in listeners() - others:
        with socket.socket(fileno=os.dup(number)) as one:
            one.shutdown(socket.SHUT_RDWR)  # as UCX does itself when it has no free file for who comes
    try:
        both.prefill.backend.kvcore_connect(deaf.peer())
    except ConnectionError as error:
        print("told:", error)
    print("others:", both.ended(both.post([3], [1])).kind.value, flush=True)
    os._exit(0)  # what UCX has lost it cannot close
"""


def test_a_peer_whose_engine_accepts_nobody_is_told_what_to_do() -> None:
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    command, variables = [sys.executable, "-c", DEAF], {**os.environ, **TCP, "UCX_MODULES": "^ib", "PYTHONPATH": path}
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
    said = [line for line in ended.stdout.splitlines() if line.startswith(("told:", "others:"))]
    assert len(said) == 2 and said[1] == "others: done", ended.stdout + ended.stderr
    assert said[0].startswith("told: peer deaf cannot be loaded (nixlBackendError")
    assert "run one NIXL on both sides; or it ran out of open files" in said[0] and said[0].endswith("raise ulimit -n there and restart it")


ENDS = """
import os
from tests.helpers import duo
with duo("nixl") as pair:
    pair.transfer([1, 2], [3, 4])
print(os.environ["UCX_MODULES"])
"""


@pytest.mark.parametrize(("given", "found"), [({}, "^ib"), ({"UCX_MODULES": "cma"}, "cma")])
def test_a_process_that_used_it_ends_well_and_ucx_modules_of_the_user_stays(given: dict[str, str], found: str) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in ("UCX_MODULES", "UCX_TLS")}
    command = [sys.executable, "-c", ENDS]
    ended = subprocess.run(command, env={**kept, "PYTHONPATH": str(ROOT), **given}, capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout.decode().strip()) == (0, found), ended.stderr.decode()
