"""Valid values of any type that travels, as plain dicts, lists and scalars: what the type itself says of them is all that is known here."""

from __future__ import annotations

import functools
import random
import string
from typing import Any

import msgspec.inspect as mi

WORDS = ("kv", "aux", "", "local", "decode-x", "a", "0")
MOST_ITEMS = 5


@functools.cache
def described(kind: type) -> mi.Type:
    """What msgspec knows of a type."""
    return mi.type_info(kind)


def build(dice: random.Random, kind: mi.Type) -> Any:
    """A value that reads as this type."""
    make = _MAKERS.get(type(kind))
    if make is None:
        raise TypeError(f"no values are known for {kind}; add a maker for it to benchmarks/fuzz/build.py")
    return make(dice, kind)


def _struct(dice: random.Random, kind: mi.StructType) -> dict[str, Any]:
    given = [field for field in kind.fields if field.required or dice.random() < 0.8]
    found: dict[str, Any] = {field.encode_name: build(dice, field.type) for field in given}
    if kind.tag_field is not None:
        found[kind.tag_field] = kind.tag
    return found


def _int(dice: random.Random, kind: mi.IntType) -> int:
    least = 0 if kind.ge is None else kind.ge
    most = 2**63 - 1 if kind.le is None else kind.le
    most = most if kind.lt is None else kind.lt - 1
    return dice.choice((least, most, min(least + dice.randrange(64), most), dice.randint(least, most)))


def _float(dice: random.Random, kind: mi.FloatType) -> float:
    return dice.choice((0.1, 1.0, 15.0, 1e9, dice.uniform(0.01, 100)))


def _text(dice: random.Random, kind: mi.StrType) -> str:
    if dice.random() < 0.7:
        return dice.choice(WORDS)
    return "".join(dice.choices(string.ascii_letters + string.digits + "-_.", k=dice.randrange(1, min(kind.max_length or 60, 60))))


def _bytes(dice: random.Random, kind: mi.BytesType) -> bytes:
    return dice.randbytes(4 * dice.randrange(MOST_ITEMS))


def _list(dice: random.Random, kind: mi.VarTupleType) -> list[Any]:
    return [build(dice, kind.item_type) for _ in range(dice.randrange(MOST_ITEMS))]


_MAKERS: dict[type, Any] = {
    mi.StructType: _struct,
    mi.IntType: _int,
    mi.FloatType: _float,
    mi.StrType: _text,
    mi.BytesType: _bytes,
    mi.VarTupleType: _list,
    mi.TupleType: lambda dice, kind: [build(dice, item) for item in kind.item_types],
    mi.DictType: lambda dice, kind: {build(dice, kind.key_type): build(dice, kind.value_type) for _ in range(dice.randrange(MOST_ITEMS))},
    mi.UnionType: lambda dice, kind: build(dice, dice.choice(kind.types)),
    mi.EnumType: lambda dice, kind: dice.choice(list(kind.cls)).value,
    mi.LiteralType: lambda dice, kind: dice.choice(kind.values),
    mi.BoolType: lambda dice, kind: dice.random() < 0.5,
    mi.NoneType: lambda dice, kind: None,
}
