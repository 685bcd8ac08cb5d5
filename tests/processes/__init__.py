"""Real child processes for tests: ``worker`` is what runs in a child, ``driver`` starts children and talks to them over pipes."""
