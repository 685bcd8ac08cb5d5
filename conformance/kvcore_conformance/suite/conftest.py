"""The fixtures of the suite, for runs of the suite itself."""

from kvcore_conformance.fixtures import *  # noqa: F403
