"""How a process with managers ends: without ``close``, and as a fork of one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.helpers import BACKENDS, ROOT, SOON_S

UNCLOSED = """
import sys
from tests.helpers import manager, memory, wait_until
prefill, decode = [manager(role, memory(256, 2, 1 << 20), backend=sys.argv[1]) for role in ("prefill", "decode")]
sender, receiver = prefill.sender(1), decode.receiver(1, prefill.address)
receiver.receive(range(256))
sender.send(range(256), last=sys.argv[2] == "all")
wait_until(lambda: sender.poll().name in ("TRANSFERRING", "SUCCESS"))
"""

FORKED = """
import os, sys
from tests.helpers import duo
with duo("local") as both:
    both.pair()
    sender, receiver = both.open()
    child = os.fork()
    if not child:
        receiver.abort()
        sender.clear()
        both.prefill.close()
        both.decode.close()
        with duo("local") as own:
            own.transfer([5], [6])
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    both.transfer([1, 2], [3, 4])
    receiver.receive([1])
    sender.send([2], last=True)
    assert receiver.wait(20).name == sender.wait(20).name == "SUCCESS"
    print("the parent goes on")
"""


HANGING = """
import sys, threading
from kvcore import core, hookimpl
from tests.helpers import manager, memory, wait_until
core.STOP_S, core.ENGINE_S = 0.2, 0.4
hangs = threading.Event()

class Stuck:
    @hookimpl(tryfirst=True)
    def kvcore_transfer(self, transfer):
        hangs.set()
        threading.Event().wait()

prefill, decode = [manager(role, memory(4)) for role in ("prefill", "decode")]
prefill.add_observer(Stuck())
sender, receiver = prefill.sender(1), decode.receiver(1, prefill.address)
receiver.receive([1])
sender.send([2], last=True)
assert hangs.wait(20)
"""


def ended(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=6 * SOON_S, check=False)


@pytest.mark.parametrize("sent", ["all", "some"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_manager_that_is_not_closed_is_closed_when_the_process_ends_also_in_mid_transfer(backend: str, sent: str) -> None:
    done = ended(UNCLOSED, backend, sent)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("was not closed; closing it, since its process ends") == 2 and "Traceback" not in done.stderr


def test_a_manager_is_not_closed_by_a_fork_of_its_process_which_can_have_its_own() -> None:
    """Nor are its rooms ended by what becomes of their handles in there, where nothing is sent."""
    done = ended(FORKED)
    assert (done.returncode, done.stdout) == (0, "the parent goes on\n"), done.stderr
    assert done.stderr.count("is not closed in its child") >= 2


def test_a_process_ends_though_its_engine_hangs() -> None:
    done = ended(HANGING)
    assert done.returncode == 0, done.stderr
    assert "kvcore-progress in kvcore_transfer" in done.stderr and "Traceback" not in done.stderr
