"""Rows of the doctor's tables."""

from __future__ import annotations

from typing import NamedTuple

OK, WARN, MISSING, DEGRADED = "ok", "warn", "missing", "degraded"


class Finding(NamedTuple):
    """One line of the doctor's table."""

    name: str
    state: str
    detail: str
    remedy: str = ""
