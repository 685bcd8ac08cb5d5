"""The room protocol without I/O: two pure state machines, one a side, and the messages between them.

``sender.step`` and ``receiver.step`` take a frozen state and an event and return the next state and effects. There are no threads,
sockets, clocks or engines here: timers are events, what must be armed is derived from the state by ``timers``, and what a side
still wants to know or to tell is derived by ``resend``. Every message states a fact about one pair of lifetimes, is idempotent,
and its resend is the query; loss, repetition and reordering need no code of their own.
All of it is immutable and without cycles, so that the garbage collector need not look at it.
"""
