"""A guest with the backend ``mooncake``."""

from kvcore_mooncake.backend import MooncakeBackend
from kvcore_mooncake.options import MooncakeOptions

from tests.engine_nodes import serve

if __name__ == "__main__":
    serve(MooncakeBackend(), MooncakeOptions())
