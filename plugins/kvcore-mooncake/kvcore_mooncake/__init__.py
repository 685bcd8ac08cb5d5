"""kvcore backend over Mooncake. The class is ``kvcore_mooncake.backend.MooncakeBackend``, chosen as ``backend="mooncake"``."""

__version__ = "0.1.0"
