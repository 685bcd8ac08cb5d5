"""A long mixed load with faults, and with processes that die, stand still, leave and come; see ``docs/reliability.md``."""
