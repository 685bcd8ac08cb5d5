"""kvcore backend over AMD mori. The class is ``kvcore_mori.backend.MoriBackend``, chosen as ``backend="mori"``."""

__version__ = "0.1.0"
