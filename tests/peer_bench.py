"""A peer bench without SGLang: its module with a child that moves nothing, and a floor for ``local`` that does, over a socket."""

from __future__ import annotations

from pathlib import Path

from tests.made_backends import make_backend

BENCH = """
import threading, time
from types import SimpleNamespace
import numpy as np
from benchmarks.beside.geometry import AUX, Geometry

CONFIGS = {"small": dict(tensors=3, item=64, pages=2, pool=32, scatter=True)}
BACKENDS = {"floored": dict(env={"MARK": "of the peer bench"})}

class Child:
    def __init__(self, role, backend, config, port, peer, environment):
        self.side, self.peer, self.geometry = {"P": "prefill", "D": "decode"}[role], peer, Geometry.of(config)
        self.arrays, _ = self.geometry.zeros()
        self.kv = [SimpleNamespace(numpy=lambda array=array: array.reshape(-1)) for array in self.arrays]
        self.meta = SimpleNamespace(get_buf_infos=lambda: ([], [], list(AUX)))
        if self.side == "decode":
            threading.Thread(target=self.take, daemon=True).start()

    def take(self):
        while True:
            self.peer.recv()
            self.fill(1)
            self.peer.send(None)

    def fill(self, slots):
        for tensor, array in enumerate(self.arrays):
            for slot in range(slots):
                array[self.geometry.listed(slot, "decode")] = self.geometry.source(tensor)[self.geometry.listed(slot, "prefill")]

    def run_rooms(self, base, n, window, poll_us):
        t0 = time.monotonic()
        if self.side == "decode":
            self.fill(min(n, window))
        time.sleep(0.001 * n)
        return dict(t0=t0, t1=time.monotonic(), cpu=0.004 * n, lat=[0.002] * n, bad=0)

    def zero(self):
        for array in self.arrays:
            array[:] = 0

    def raw(self, n, thread):
        self.peer.send(None)
        self.peer.recv()
        return dict(kv=[5e-5] * n, kv_aux=[1e-4] * n, descs=6, cpu=1e-4 * n)

    def idle_cpu(self, secs):
        return dict(cpu_pct=99.0)
"""

FLOOR = """
import ctypes, threading
from multiprocessing.connection import Client, Listener
from kvcore.hookspecs import Endpoint

class Floor:
    ways = ("socket",)

    def open(self, options, context, regions):
        if context.side == "prefill":
            return Endpoint(b"")
        self.listener, self.pipe = Listener((context.host, 0)), None
        return Endpoint(str(self.listener.address[1]).encode())

    def connect(self, peer):
        self.pipe = Client(("127.0.0.1", int(peer.endpoint.data)))

    def prepare(self, way, transfers, at_once):
        return lambda: self.move(transfers)

    def move(self, transfers):
        for one in transfers:
            rows = zip(one.local_address.tolist(), one.remote_address.tolist(), one.length.tolist())
            self.pipe.send([(to, ctypes.string_at(at, size)) for at, to, size in rows])
            self.pipe.recv()

    def serve(self, stop):
        self.pipe = self.pipe or self.listener.accept()
        while not stop.is_set():
            if self.pipe.poll(0.01):
                for to, content in self.pipe.recv():
                    ctypes.memmove(to, content, len(content))
                self.pipe.send(None)

    def close(self):
        pass
"""


def make_floored(root: Path) -> Path:
    """A backend ``floored`` with this floor; returns the folder for the path."""
    make_backend(root, "floored")
    (root / "made_floor.py").write_text(FLOOR)
    with (root / "kvcore_floored-1.5.dist-info" / "entry_points.txt").open("a") as file:
        file.write("[kvcore.bench]\nfloored = made_floor:Floor\n")
    return root


def make_peer_bench(root: Path) -> Path:
    """A folder for ``--peer-bench``, whose child fills the pages of decode by itself."""
    root.mkdir()
    (root / "bench_sglang.py").write_text(BENCH)
    return root
