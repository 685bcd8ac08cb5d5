"""``python -m benchmarks.fuzz``: bad bytes for every port and every message, while good rooms go on.

The i-th message is made from (seed, i) and what it is about: who it is from, which rooms live. So one can be sent alone.
"""
