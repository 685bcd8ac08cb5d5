"""A process with a backend that is written to: opens it over a file's memory, says how it is reached, and waits for the end of stdin."""

from __future__ import annotations

import json
import sys

import numpy as np
from kvcore_mooncake.backend import MooncakeBackend
from kvcore_mooncake.options import MooncakeOptions
from mooncake_pair import context

from kvcore import Pool


def main() -> None:
    file, pages, page_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    array = np.memmap(file, np.uint8, "r+", shape=(pages, page_bytes))
    pool = Pool.from_tensors("kv", [array], page_size=16)
    name = file.rpartition("/")[2]
    backend = MooncakeBackend()
    backend.kvcore_open(MooncakeOptions(), context("decode", name, pool))
    backend.kvcore_register(pool.regions)
    endpoint = backend.kvcore_endpoint().data.hex()
    sys.stdout.write(json.dumps({"name": name, "endpoint": endpoint, "ptr": pool.regions[0].ptr}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
