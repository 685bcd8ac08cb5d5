"""A process with a backend over a file's memory: says how it is reached, and writes its pages to whom each line of stdin names."""

from __future__ import annotations

import json
import os
import sys

import numpy as np
from ascend_pair import PROTOCOL
from kvcore_ascend import native
from kvcore_ascend.backend import AscendBackend
from kvcore_ascend.options import AscendOptions

from kvcore import Pool, Region, Transfer
from kvcore.hookspecs import Endpoint, Peer
from kvcore.mapping import whole
from kvcore.planner import Layout, plan
from kvcore.states import RoomKey
from tests.engine_nodes import context


def main() -> None:
    file, pages, page_bytes, side, session = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine writes to stdout
    array = np.memmap(file, np.uint8, "r+", shape=(int(pages), int(page_bytes)))
    if side != "decode":
        array[:] = np.random.default_rng(5).integers(1, 255, array.shape, np.uint8)
    if session:  # an engine that has this one and no other
        engine = native.load()[0].TransferEngine
        initialize = engine.initialize
        engine.initialize = lambda self, url, _, *rest: initialize(self, url, session, *rest)
    pool = Pool.from_tensors("kv", [array], page_size=16)
    name = file.rpartition("/")[2]
    backend = AscendBackend()
    backend.kvcore_open(AscendOptions(protocol=PROTOCOL), context("ascend", side, name, pool))
    backend.kvcore_register(pool.regions)
    told = {"name": name, "data": backend.kvcore_endpoint().data.hex(), "ptr": pool.regions[0].ptr, "session": backend._session}
    print(json.dumps(told), file=answers, flush=True)
    layout = Layout.of((pool.geometry,), pool.regions)
    for line in sys.stdin:
        asked = json.loads(line)
        there = Pool("kv", [Region(*one) for one in asked["regions"]], num_pages=asked["pages"], page_size=16, dtype="uint8")
        other = Layout.of((there.geometry,), there.regions)
        backend.kvcore_connect(Peer(asked["id"], Endpoint(bytes.fromhex(asked["endpoint"])), there.regions, (there.geometry,)))
        pages = np.array(asked["mine"], np.int64), np.array(asked["theirs"], np.int64)
        parts = plan(layout, other, {"kv": pages}, whole((pool.geometry,))).descriptors()
        arrays = (parts.local_region, parts.remote_region, parts.local_offset, parts.remote_offset, parts.length)
        state = backend.kvcore_transfer(Transfer(RoomKey("prefill", 1, 0, 1), asked["id"], *arrays, layout.base, other.base))
        print(json.dumps(state.kind.value), file=answers, flush=True)


if __name__ == "__main__":
    main()
