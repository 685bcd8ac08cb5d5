"""The transfer contract of kvcore, all of it. ``pytest --kvcore-profile=full`` runs the full profile."""

from kvcore_conformance.suite import *  # noqa: F403
