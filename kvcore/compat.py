"""Whether two instances may pair: everything that must agree, checked before any page is held (P1, T3, R7)."""

from __future__ import annotations

from kvcore.errors import KVCoreError
from kvcore.mapping import why_not
from kvcore.planner import Layout
from kvcore.wire import Introduction, one_line


def misfit(mine: Introduction, theirs: Introduction) -> str | None:
    """The first difference that forbids pairing, naming both values and what to do; None if the two fit."""
    for check in (_protocol, _backend, _roles, _pools, _limits):
        text = check(mine, theirs)
        if text is not None:
            return f"{mine.instance} ({mine.role}, here) and {theirs.instance} ({theirs.role}, there) do not fit: {text}"
    return None


def fitting(mine: Introduction, theirs: Introduction) -> Layout | str:
    """Where the other instance's pages lie, or why the two do not fit, in one line."""
    text = misfit(mine, theirs)
    if text is not None:
        return one_line(text)
    try:
        return Layout.of(theirs.pools, [info.region() for info in theirs.regions])
    except (KVCoreError, ValueError, OverflowError) as error:
        return one_line(f"{theirs.instance} describes its memory wrongly: {error}")


def _protocol(mine: Introduction, theirs: Introduction) -> str | None:
    if mine.version[0] == theirs.version[0]:
        return None
    return f"control protocol {_version(mine.version)} here and {_version(theirs.version)} there; run one major version on both sides"


def _backend(mine: Introduction, theirs: Introduction) -> str | None:
    if mine.backend != theirs.backend:
        return f"backend {mine.backend!r} here and {theirs.backend!r} there; choose one for both sides"
    if mine.wire_version != theirs.wire_version:
        return f"backend {mine.backend!r} has wire version {mine.wire_version} here and {theirs.wire_version} there; upgrade the older side"
    return None


def _roles(mine: Introduction, theirs: Introduction) -> str | None:
    if "both" in (mine.role, theirs.role) or mine.role != theirs.role:
        return None
    return f"role {mine.role!r} here and {theirs.role!r} there; a room needs a prefill and a decode side"


def _pools(mine: Introduction, theirs: Introduction) -> str | None:
    text = why_not(mine.pools, theirs.pools, mine.place, theirs.place)
    return f"{text}; both sides must be set up for one model and one page size" if text is not None else None


def _limits(mine: Introduction, theirs: Introduction) -> str | None:
    if mine.orphan_s != theirs.orphan_s:
        return f"limits.orphan_s is {mine.orphan_s:g} here and {theirs.orphan_s:g} there; set one value on both sides"
    for one, other, where in ((mine, theirs, ("here", "there")), (theirs, mine, ("there", "here"))):
        needed = other.liveness_s + other.ticket_s
        if one.quarantine_s is not None and one.quarantine_s <= needed:
            return (
                f"limits.quarantine_s is {one.quarantine_s:g} {where[0]}, and liveness_s + ticket_s is {needed:g} {where[1]}; "
                f"quarantine_s must be above"
            )
    return None


def _version(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
