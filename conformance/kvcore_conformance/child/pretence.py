"""In a child: a manager that tells its peers another version of itself, or another backend, than it has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from kvcore import introduction, wire
from kvcore.layouts import Place


class Newer:
    """Encodes letters with fields that this version does not know, as a newer minor version may (P1)."""

    def encode(self, letter: wire.Letter) -> bytes:
        """As the encoder of ``wire``."""
        fields = msgspec.msgpack.decode(msgspec.msgpack.encode(letter))
        for struct in (fields, fields["body"], fields["body"].get("me", {})):
            struct["novelty"] = {"since": [1, "minor"]}
        return msgspec.msgpack.encode(fields)


@contextmanager
def pretending(*, major: int, minor: int, tp_size: int = 0, **claims: str | float) -> Iterator[None]:
    """Managers made in the block introduce themselves so: fields of ``Introduction``, or as the first rank of several; versions of 0
    and texts of "" stay as they are. What one of another minor version says has fields that nobody here knows."""
    version, introduce, encoder = wire.VERSION, introduction.__dict__["Introduction"], wire.__dict__["_encoder"]
    claimed = (major or version[0], minor or version[1])

    def introduced(*args: object) -> wire.Introduction:
        fields: dict[str, object] = {name: claim for name, claim in claims.items() if claim}
        fields |= {"place": Place(tp_size)} if tp_size else {}
        found: wire.Introduction = msgspec.structs.replace(introduce(*args), version=claimed, **fields)
        return found

    introduction.__dict__["Introduction"], wire.__dict__["VERSION"] = introduced, claimed
    wire.__dict__["_encoder"] = Newer() if minor else encoder
    try:
        yield
    finally:
        introduction.__dict__["Introduction"], wire.__dict__["VERSION"], wire.__dict__["_encoder"] = introduce, version, encoder
