"""The fields of what measurements write, each with what it is where it is declared."""

from __future__ import annotations

import msgspec


def told(what: str) -> msgspec.Meta:
    """What a field is, with its unit, in one line: it stands beside the type, in ``Annotated``, and so in the JSON Schema.

    An ``x_each`` goes without, since it is the ``x`` beside it of each repeat.
    """
    return msgspec.Meta(description=what)
