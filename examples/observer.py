"""Watch what a manager does: events of rooms and peers, and every transfer that it gives to the backend.

Run it with ``python observer.py``.
"""

import numpy as np

import kvcore


class Watcher:
    """Any object with hook implementations can be an observer; it names the hooks and arguments that it wants."""

    def __init__(self, side):
        self.side = side

    @kvcore.hookimpl
    def kvcore_on_event(self, event):
        """Called on a thread of its own, so it may take its time; what it raises is logged and disturbs no room."""
        room = f"room {event.room.number} " if event.room else ""
        print(f"{self.side}: {event.name} {room}{event.details}")

    @kvcore.hookimpl(wrapper=True)
    def kvcore_transfer(self, transfer):
        """Around a hook of the backend. This one runs on the thread that moves the data, so keep it as short as this."""
        started = yield  # the backend starts the batch; what it returns is passed on
        print(f"{self.side}: chunk {transfer.chunk} of room {transfer.room.number}, {transfer.nbytes} bytes")
        return started


def main():
    source, target = np.ones((8, 16, 8), np.float32), np.zeros((8, 16, 8), np.float32)
    with (
        kvcore.KVManager(kvcore.Config(role="prefill"), pools=[kvcore.Pool.from_tensors("kv", [source], page_size=16)]) as prefill,
        kvcore.KVManager(kvcore.Config(role="decode"), pools=[kvcore.Pool.from_tensors("kv", [target], page_size=16)]) as decode,
    ):
        prefill.add_observer(Watcher("prefill"))
        decode.add_observer(Watcher("decode"))
        with prefill.sender(1) as sender, decode.receiver(1, prefill=prefill.address) as receiver:
            sender.send([0, 1, 5], last=True)
            receiver.receive([7, 2, 3])
            sender.wait()
            receiver.wait()
        with prefill.sender(2) as sender, decode.receiver(2, prefill=prefill.address) as receiver:
            receiver.abort("not wanted any more")
            sender.wait()
            print("\n" + prefill.explain(2))  # a room's history, until it is cleared
        print("prefill:", prefill.stats().counters)


if __name__ == "__main__":
    main()
