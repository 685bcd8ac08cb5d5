"""A guest with the backend ``mori``."""

from kvcore_mori.backend import MoriBackend
from kvcore_mori.options import MoriOptions

from tests.engine_nodes import serve

if __name__ == "__main__":
    serve(MoriBackend(), MoriOptions())
