"""Waits, and hears the key that ends a live page."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

QUIT = frozenset(b"qQ\x03\x04")
"""q, and Ctrl-C and Ctrl-D where the terminal does not make signals of them"""


@contextmanager
def waiting() -> Iterator[Callable[[float], bool]]:
    """Yields what waits so many seconds, and says whether somebody wants to go on: False after the key."""
    if not sys.stdin.isatty():
        yield lambda seconds: not select.select([], [], [], seconds)[0]
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)

    def wait(seconds: float) -> bool:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return not ready or not QUIT & set(os.read(descriptor, 64))

    try:
        yield wait
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
