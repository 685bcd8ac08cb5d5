"""``kvcore bench``: measurements, each in a module of its own.

``setup.py`` is what those of two processes share, ``waiting.py`` the rooms that wait in some and ``loop.py`` how rooms are carried,
``floor.py`` the engine alone beside them, ``socket_floor.py`` that of ``local``, ``bare.py`` the bare machine, ``command.py`` the command
line. A measurement has its parameters, a ``measure`` that returns a list of results, a ``table`` of them for people, and what its two
processes do; it stands in ``catalog.py`` with what it is in words. Those of ``trace.py`` are in ``replay.py``, each a ``scheduler.py``,
and ``trace_floor.py``, with the requests of ``trace_file.py``, the pages of ``prefix_cache.py`` and ``page_content.py``.

What they tell is in ``report.py``, the JSON object that all write and its schema, ``page.py`` and ``plots.py``, the page for people, and
``compare.py``. These know a result by the names of its fields alone: a figure ``x`` with its unit at the end, ``x_each`` with every repeat,
``…_percentiles`` from 0 to 100, ``raw`` and ``bare`` for the floors. ``fields.py`` is how such fields are declared and made.
"""
