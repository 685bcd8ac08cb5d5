"""kvcore backend over Ascend memfabric. The class is ``kvcore_ascend.backend.AscendBackend``, chosen as ``backend="ascend"``."""

__version__ = "0.1.0"
