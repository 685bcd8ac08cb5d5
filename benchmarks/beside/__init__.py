"""kvcore beside today's system: the peer bench, which drives SGLang's own transfer managers over the real engines, with kvcore as one more
child. ``python -m benchmarks.beside --peer-bench DIR``; see ``docs/performance.md``.

``geometry.py`` is what a room is, ``child.py`` kvcore's child and what differs from SGLang's, ``alone.py`` the engine alone beside it,
``pairs.py`` the processes, ``rooms.py`` the measurement, ``table.py`` its figures for people, ``ends.py`` aborts and what rooms leave.
SGLang is imported by processes of its own only.
"""
