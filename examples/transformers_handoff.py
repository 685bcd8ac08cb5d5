"""Prefill a prompt with a transformers model in one process, and go on decoding in another, from the pages that kvcore has moved.

``python transformers_handoff.py`` runs both sides; ``transformers_handoff.py prefill`` and ``transformers_handoff.py decode`` run one
each, for two terminals, in either order.

Needs the extra kvcore[transformers]. The model is a small one of random weights; put ``from_pretrained`` in ``make_model`` for yours.
"""

import inspect
import multiprocessing
import sys

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvcore
from kvcore.integrations.transformers import PagedKV

LIMITS = kvcore.Limits(bootstrap_s=120)  # for how long one side looks for the other
PORT, ROOM, PAGE_SIZE, NEW_TOKENS = 9000, 1, 16, 12
PROMPT = list(b"A prompt that both sides know, since the router gave it to them. A token is a byte here.")


def make_model():
    torch.manual_seed(0)  # so that both sides have the same weights
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
        initializer_range=0.15, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def generate(model, tokens, cache, count):
    """The next ``count`` tokens, greedily. Computes only what the cache does not hold yet, and adds it to the cache."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # as older releases call it
    out = model.generate(torch.tensor([tokens]), max_new_tokens=count, do_sample=False, pad_token_id=0, **{name: cache})
    return out[0, len(tokens) :].tolist()


def prefill(port):
    model = make_model()
    kv = PagedKV(model.config, num_pages=64, page_size=PAGE_SIZE)  # dtype= and device= as the model has them
    config = kvcore.Config(role="prefill", bootstrap_port=port, limits=LIMITS)
    with kvcore.KVManager(config, pools=[kv.pool]) as manager, manager.sender(ROOM) as sender:
        cache = DynamicCache(config=model.config)
        first = generate(model, PROMPT, cache, count=1)[0]  # now the cache holds K and V of the whole prompt
        pages = kv.allocate(kv.pages_for(len(PROMPT)))
        kv.write(cache, pages, start=0, n_tokens=len(PROMPT))
        sender.send(pages, last=True, record=first.to_bytes(4, "little"))
        sender.wait()
        sender.raise_for_failure()
        print(f"prefill: {sender.metrics.bytes} bytes in {sender.metrics.pages} pages moved, first token {first}")
        kv.free(pages)  # after SUCCESS they are release-safe; after a failure ask is_release_safe() first


def decode(port):
    model = make_model()
    kv = PagedKV(model.config, num_pages=32, page_size=PAGE_SIZE)
    kv.allocate(5)  # so that pages have other numbers here
    with (
        kvcore.KVManager(kvcore.Config(role="decode", limits=LIMITS), pools=[kv.pool]) as manager,
        manager.receiver(ROOM, prefill=f"127.0.0.1:{port}") as receiver,
    ):
        pages = kv.allocate(kv.pages_for(len(PROMPT)))
        receiver.receive(pages)
        receiver.wait()
        receiver.raise_for_failure()
        cache = kv.read(pages, len(PROMPT))
        first = int.from_bytes(receiver.record, "little")
        tokens = [first, *generate(model, [*PROMPT, first], cache, NEW_TOKENS - 1)]
    print("decode: ", tokens)
    alone = generate(model, PROMPT, DynamicCache(config=model.config), NEW_TOKENS)
    print("decode: one process alone generates the same" if tokens == alone else f"decode: one process alone generates {alone}")


def main():
    side, port = (sys.argv[1:2] or ["both"])[0], int((sys.argv[2:3] or [PORT])[0])
    if side == "both":
        other = multiprocessing.get_context("spawn").Process(target=prefill, args=(port,), daemon=True)
        other.start()
        decode(port)
        other.join()
        sys.exit(other.exitcode)
    (prefill if side == "prefill" else decode)(port)


if __name__ == "__main__":
    main()
