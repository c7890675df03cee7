"""Which request a task serves: log lines that are written meanwhile carry its number.

Tasks and threads that a request begins inherit it. Each door sets `SERVED` for a request that Python answers; what C
answers writes no lines.
"""

from __future__ import annotations

import itertools
from contextvars import ContextVar

SERVED: ContextVar[tuple[str, int] | None] = ContextVar("served", default=None)
"""(kind, number) of the request; None: work beside requests"""
NUMBERS = itertools.count(1)
"""of this process. ``SERVED.set((kind, next(NUMBERS)))`` begins a request: a function would cost half as much again"""


def described() -> str | None:
    """The request as text, such as "write 1234"; None: this is no request's work."""
    served = SERVED.get()
    return f"{served[0]} {served[1]}" if served is not None else None
