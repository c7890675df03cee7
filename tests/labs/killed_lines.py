"""Python code that ends before any of its lines, as in a process that is killed there."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Killed(BaseException):
    """Nothing runs after this, in a daemon that was killed."""


@contextmanager
def killed_at(line: int, files: Collection[str | None]) -> Iterator[None]:
    """Raise Killed before the ``line``-th line that runs of these files."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in files or frame.f_code.co_name == "full":  # a lock of the whole process
            return None
        if event == "line":
            count += 1
            if count == line:
                raise Killed
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
