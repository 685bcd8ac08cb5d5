"""Broken backends, each in one way that real ones are: the ``local`` backend with one fault. For the proof that the kit sees them.

Every animal moves pages in a plain transfer. What it breaks is in its docstring; ``conformance/tests/test_zoo.py`` says by which rules
the kit catches it.
"""
