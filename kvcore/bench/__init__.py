"""``kvcore bench``: measurements, each in a module of its own.

``setup.py`` is what those of two processes share, ``floor.py`` the engine alone beside them, ``socket_floor.py`` that of ``local``,
``report.py`` the JSON object that all write, ``command.py`` the command line. A measurement has its parameters, a ``measure`` that returns
a list of results, a ``table`` of them for people, and what its two processes do; those of ``trace.py`` are in ``replay.py``, each a
``scheduler.py``, and ``trace_floor.py``, with the requests of ``trace_file.py``, the pages of ``prefix_cache.py`` and ``page_content.py``.
"""
