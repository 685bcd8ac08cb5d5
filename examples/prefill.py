"""Fill pages, and hand the pages of one request over. Run this, and decode.py in another terminal, in either order."""

import sys

import numpy as np

import kvcore

port = int(sys.argv[1]) if len(sys.argv) > 1 else 8998
random = np.random.default_rng(seed=0)
layers = [random.random((64, 16, 128), np.float32) for _ in range(4)]  # 64 pages of 16 tokens in each of 4 layers
kv = kvcore.Pool.from_tensors("kv", layers, page_size=16)
config = kvcore.Config(role="prefill", bootstrap_port=port)

with kvcore.KVManager(config, pools=[kv]) as manager, manager.sender(room=7) as sender:
    print("prefill: decode finds me at", manager.address)
    sender.send([3, 4, 5])  # a first chunk, as soon as it is computed
    sender.send([9], last=True, record=b"the first token")
    sender.wait()  # an engine would poll() instead
    sender.raise_for_failure()
    print(f"prefill: {sender.poll().name}, {sender.metrics.bytes} bytes in {sender.metrics.pages} pages")
