"""Waits for a key at the terminal while a page is shown. No other byte does anything, whatever a terminal sends."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress

QUIT = frozenset(b"qQ")
ESCAPE = 0x1B
INTRODUCERS = frozenset(b"[O")
"""after an escape: CSI and SS3, whose last byte is a letter and may be a q"""
LAST = range(0x40, 0x7F)
READ_SIZE = 1024


class KeyParser:
    """Finds keys among the bytes of a terminal, also where a sequence comes in pieces. Pure."""

    def __init__(self) -> None:
        self._state = 0
        """0: a key is next; 1: an escape was read; 2: within a sequence"""

    def has_quit(self, data: bytes) -> bool:
        """A q was pressed, by itself."""
        found = [self._take(byte) for byte in data]  # all of them: what follows may be half of a sequence
        return any(found)

    def _take(self, byte: int) -> bool:
        if byte == ESCAPE:
            self._state = 1
        elif self._state == 1:
            self._state = 2 if byte in INTRODUCERS else 0  # else it is Alt and a key
        elif self._state == 2:
            self._state = 0 if byte in LAST else 2
        else:
            return byte in QUIT
        return False


class Keyboard:
    """Of the terminal at stdin; where there is none, nobody presses a key."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._parser = KeyParser()

    def wait_quit(self, seconds: float) -> bool:
        """Wait for q, at most ``seconds``. Whether it was pressed."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._descriptor is None:
                time.sleep(left)
            elif select.select([self._descriptor], [], [], left)[0]:
                data = self._read()
                if self._parser.has_quit(data):
                    return True
        return False

    def _read(self) -> bytes:
        """Where the terminal has gone, nobody presses a key any more."""
        assert self._descriptor is not None
        try:
            data = os.read(self._descriptor, READ_SIZE)
        except OSError:
            data = b""
        if not data:
            self._descriptor = None
        return data


@contextmanager
def keyboard() -> Iterator[Keyboard]:
    """Keys are read at once, and not shown, in the body. Ctrl-C and Ctrl-Z stay what they are."""
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (OSError, ValueError, termios.error, AttributeError):
        yield Keyboard(None)
        return
    try:
        tty.setcbreak(descriptor, termios.TCSADRAIN)
        yield Keyboard(descriptor)
    finally:
        with suppress(termios.error):  # the terminal has gone
            termios.tcsetattr(descriptor, termios.TCSAFLUSH, before)
