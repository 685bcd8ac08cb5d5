"""``python -m tests.cases.drawing PROCESSES IDS THREADS LIFETIMES FOLDER``: processes forked at once draw ids, each into a file."""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from pathlib import Path

from kvcore import KVManager
from kvcore.process import instance_id
from tests.helpers import manager, memory


def draw(prefill: KVManager, room: int, count: int, found: list[int]) -> None:
    """The generations of so many lifetimes of one room."""
    for _ in range(count):
        with prefill.sender(room) as sender:
            found.append(sender.generation)


def child(ids: int, threads: int, count: int, folder: Path) -> None:
    """One process: ids of instances, then a manager, and threads that open rooms of it at once."""
    drawn = [instance_id("prefill") for _ in range(ids)]
    found: list[int] = []
    with manager("prefill", memory(2), limits={"orphan_s": 0.05, "drain_s": 0.05}) as prefill:
        drawing = [threading.Thread(target=draw, args=(prefill, room, count, found)) for room in range(threads)]
        for thread in drawing:
            thread.start()
        for thread in drawing:
            thread.join()
        told = {"ids": drawn, "instance": prefill.instance, "generations": found}
    (folder / f"{os.getpid()}.json").write_text(json.dumps(told), encoding="ascii")


def run(ids: int, threads: int, count: int, folder: Path) -> int:
    """A child's exit code; it must not return into the parent's loop."""
    try:
        child(ids, threads, count, folder)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main(processes: int, ids: int, threads: int, count: int, folder: Path) -> None:
    """Fork while nothing but the imports has happened, so that whatever a process inherits is the same in all."""
    go, start = os.pipe()
    pids = []
    for _ in range(processes):
        pid = os.fork()
        if pid == 0:
            os.close(start)
            os.read(go, 1)  # ends when the parent lets go
            os._exit(run(ids, threads, count, folder))
        pids.append(pid)
    os.close(start)
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    sys.exit(any(codes))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:-1]), Path(sys.argv[-1]))
