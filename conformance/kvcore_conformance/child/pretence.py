"""In a child: a manager that tells its peers another version of itself, or another backend, than it has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from kvcore import core, wire


@contextmanager
def pretending(*, major: int, minor: int, **claims: str) -> Iterator[None]:
    """Managers made in the block introduce themselves so: fields of ``Introduction``; versions of 0 and texts of "" stay as they are."""
    version, introduce = wire.VERSION, core.__dict__["Introduction"]
    claimed = (major or version[0], minor or version[1])

    def introduced(*args: object) -> wire.Introduction:
        fields = {name: claim for name, claim in claims.items() if claim}
        found: wire.Introduction = msgspec.structs.replace(introduce(*args), version=claimed, **fields)
        return found

    core.__dict__["Introduction"], wire.__dict__["VERSION"] = introduced, claimed
    try:
        yield
    finally:
        core.__dict__["Introduction"], wire.__dict__["VERSION"] = introduce, version
