"""What the blocks of a namespace are: model, revision of its weights, dtype, layout, page size, ranks, hash, seed, ...

A descriptor is a JSON object of strings and integers. It is kept as text, written in one way: keys in order, and no
space anywhere. Two that differ mean blocks that do not fit each other. One that is a later *version* of another has the
same fields but for a larger integer ``version``: whoever comes with it wants no block of the former.
"""

from __future__ import annotations

import json
from typing import Any

from kvfuse.errors import InvalidArgument

SIZE_MAX = 1000
"""bytes of the text"""
VERSION = "version"


def parse_descriptor(text: str) -> str:
    """The descriptor as it is kept; "" for none. InvalidArgument."""
    if not text:
        return ""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"a descriptor is a JSON object: {error}") from None
    if not isinstance(fields, dict) or not fields or not all(type(value) in (str, int) for value in fields.values()):
        raise InvalidArgument("a descriptor is a JSON object of strings and integers")
    if not isinstance(fields.get(VERSION, 0), int):
        raise InvalidArgument("the version of a descriptor is an integer")
    kept = json.dumps(fields, sort_keys=True, separators=(",", ":")).replace(" ", "\\u0020")
    if len(kept) > SIZE_MAX:
        raise InvalidArgument(f"a descriptor has at most {SIZE_MAX} bytes, not {len(kept)}")
    return kept


def is_newer(new: str, old: str) -> bool:
    """A descriptor is a later version of another."""
    one, other = _fields(new), _fields(old)
    return one.pop(VERSION, 0) > other.pop(VERSION, 0) and one == other


def difference(pinned: str, given: str) -> str:
    """Each field in which they differ, with both values."""
    one, other = _fields(pinned), _fields(given)
    names = [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
    return ", ".join(f"{name} is {_value(one, name)}, not {_value(other, name)}" for name in names)


def _fields(text: str) -> dict[str, Any]:
    return dict(json.loads(text)) if text else {}


def _value(fields: dict[str, Any], name: str) -> str:
    return repr(fields[name]) if name in fields else "absent"
