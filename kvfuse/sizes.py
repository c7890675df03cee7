"""Sizes in bytes as people write and read them."""

from __future__ import annotations

import re
from fractions import Fraction

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_UNITS = {"": 1, "b": 1, "kib": KIB, "k": KIB, "kb": 10**3, "mib": MIB, "m": MIB, "mb": 10**6, "gib": GIB, "g": GIB}
_UNITS |= {"gb": 10**9, "tib": 1 << 40, "t": 1 << 40, "tb": 10**12, "pib": 1 << 50, "p": 1 << 50, "pb": 10**15}


def parse_size(text: str) -> int:
    """Bytes of "64GiB", "64G" (the same), "64GB" (10**9), "1.5 TiB" or "4096". ValueError otherwise."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size")
    return int(Fraction(match[1]) * unit)


def format_size(size: int) -> str:
    """A size as people read it: exact where a unit divides it ("64GiB"), else one decimal ("1.3GiB")."""
    for name, unit in (("PiB", 1 << 50), ("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= unit:
            return f"{size // unit}{name}" if size % unit == 0 else f"{size / unit:.1f}{name}"
    return f"{size}B"
