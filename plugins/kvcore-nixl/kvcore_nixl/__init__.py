"""kvcore backend over NIXL. The class is ``kvcore_nixl.backend.NixlBackend``, chosen as ``backend="nixl"``."""

__version__ = "0.1.0"
