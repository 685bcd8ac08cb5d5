"""A process with a backend that is written to: opens it over a file's memory, says how it is reached, and does what stdin says."""

from __future__ import annotations

import json
import sys
from itertools import chain

import numpy as np
from kvcore_mori.backend import MoriBackend
from kvcore_mori.options import MoriOptions
from mori_pair import context

from kvcore import Pool


def main() -> None:
    file, pages, page_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    pool = Pool.from_tensors("kv", [np.memmap(file, np.uint8, "r+", shape=(pages, page_bytes))], page_size=16)
    name, backend = file.rpartition("/")[2], MoriBackend()
    backend.kvcore_open(MoriOptions(), context("decode", name, pool))
    backend.kvcore_register(pool.regions)
    for order in chain(["begin"], sys.stdin):
        if order.strip() == "unregister":
            backend.kvcore_unregister(pool.regions)
        elif order.strip() == "register":
            backend.kvcore_register(pool.regions)
        endpoint = backend.kvcore_endpoint()
        told = {"name": name, "data": endpoint.data.hex(), "keys": [key.hex() for key in endpoint.keys], "ptr": pool.regions[0].ptr}
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
    backend.kvcore_close()


if __name__ == "__main__":
    main()
