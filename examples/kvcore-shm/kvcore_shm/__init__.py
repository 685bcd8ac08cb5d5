"""A kvcore backend over shared memory, between processes of one host."""

__version__ = "0.1.0"
