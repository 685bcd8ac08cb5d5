"""Receive the pages of one request from prefill.py, and check every byte of them."""

import sys

import numpy as np

import kvcore

port = int(sys.argv[1]) if len(sys.argv) > 1 else 8998
cache = [np.zeros((32, 16, 128), np.float32) for _ in range(4)]  # as many layers, but a pool of another size
kv = kvcore.Pool.from_tensors("kv", cache, page_size=16)

with (
    kvcore.KVManager(kvcore.Config(role="decode"), pools=[kv]) as manager,
    manager.receiver(room=7, prefill=f"127.0.0.1:{port}") as receiver,
):
    receiver.receive([20, 2, 11, 12])  # where the sender's pages 3, 4, 5 and 9 go
    receiver.wait()
    receiver.raise_for_failure()
    print("decode:", receiver.poll().name, receiver.record)

random = np.random.default_rng(seed=0)
sent = [random.random((64, 16, 128), np.float32) for _ in range(4)]
equal = all(np.array_equal(mine[[20, 2, 11, 12]], theirs[[3, 4, 5, 9]]) for mine, theirs in zip(cache, sent, strict=True))
print("decode: the bytes are equal" if equal else "decode: the bytes DIFFER")
