"""How an engine's scheduler drives rooms: it never waits for one, and never gives away a page that an engine may still touch.

Run it with ``python scheduler_loop.py``. Both sides run in one loop here, to keep it short; in an engine each has its own, of the
same shape.
"""

import time
from collections import deque
from functools import partial

import numpy as np

import kvcore

PAGES, PAGES_EACH, REQUESTS, CANCELLED = 8, 3, 6, 4  # pages for two requests at a time, so that pages must be used again


class Scheduler:
    """One side: requests queue for pages, rooms are polled together, pages come back when they are safe."""

    def __init__(self, name, manager, open_room, begin):
        self.name, self.manager, self.open_room, self.begin = name, manager, open_room, begin
        self.free = list(range(PAGES))
        self.waiting = deque()  # handles that have no pages yet
        self.running = {}  # handle -> its pages
        self.releasing = []  # (handle, pages) of rooms that have ended, until their pages are safe

    def arrive(self, room):
        """Open the room at once, not when there are pages: the other side is looking for it, and an abort finds it."""
        self.waiting.append(self.open_room(room))

    def step(self):
        """What a scheduler does between two forward passes. Nothing here blocks.

        Pages are given out in one order on both sides, since a room moves only when it has pages on both.
        """
        while self.waiting and (len(self.free) >= PAGES_EACH or self.waiting[0].poll().terminal):
            handle = self.waiting.popleft()
            pages = [] if handle.poll().terminal else [self.free.pop(0) for _ in range(PAGES_EACH)]
            self.running[handle] = pages
            self.begin(handle, pages)  # does nothing on a room that has failed meanwhile
        handles = list(self.running)
        for handle, state in zip(handles, self.manager.poll_all(handles), strict=True):
            if state.terminal:
                self.ended(handle, state, self.running.pop(handle))
        self.releasing = [(handle, pages) for handle, pages in self.releasing if not self.released(handle, pages)]

    def ended(self, handle, state, pages):
        why = f": {handle.failure.reason}" if handle.failure else ""
        print(f"{self.name}: room {handle.room} {state.name} with pages {pages}{why}")
        handle.clear()  # the handle still answers for itself afterwards
        self.releasing.append((handle, pages))

    def released(self, handle, pages):
        """A failed room's pages may still be read (prefill) or written (decode) for a while."""
        if not handle.is_release_safe():
            return False
        self.free += pages
        return True

    @property
    def idle(self):
        return not (self.waiting or self.running or self.releasing)


def main():
    source, target = (np.zeros((PAGES, 16, 8), np.float32) for _ in range(2))
    right = []

    def compute_and_send(sender, pages):
        source[pages] = sender.room  # stands for the forward pass that fills the pages
        sender.send(pages, last=True)

    class DecodeScheduler(Scheduler):
        def ended(self, handle, state, pages):
            if state is kvcore.KVPoll.SUCCESS:
                right.append((target[pages] == handle.room).all())  # an engine would decode from these pages now
            super().ended(handle, state, pages)

    with (
        kvcore.KVManager(kvcore.Config(role="prefill"), pools=[kvcore.Pool.from_tensors("kv", [source], page_size=16)]) as here,
        kvcore.KVManager(kvcore.Config(role="decode"), pools=[kvcore.Pool.from_tensors("kv", [target], page_size=16)]) as there,
    ):
        prefill = Scheduler("prefill", here, here.sender, compute_and_send)
        decode = DecodeScheduler("decode", there, partial(there.receiver, prefill=here.address), kvcore.Receiver.receive)
        for room in range(REQUESTS):
            prefill.arrive(room)
            decode.arrive(room)
        decode.waiting[CANCELLED].abort("the user went away")
        while not (prefill.idle and decode.idle):
            prefill.step()
            decode.step()
            time.sleep(0.005)  # stands for a forward pass
        print(f"{len(right)} rooms arrived, all right: {all(right)}")
        print(f"pages free again: {len(prefill.free)} and {len(decode.free)} of {PAGES}")


if __name__ == "__main__":
    main()
