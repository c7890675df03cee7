"""A program at a real pseudo-terminal, and what a person sees there: pyte is the terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyte
from mounting import KVFUSE, PATIENCE_S


class Terminal:
    """A program in ``columns`` by ``lines``."""

    def __init__(self, command: Sequence[str | Path], columns: int, lines: int) -> None:
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self._here, there = pty.openpty()
        fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.modes = termios.tcgetattr(there)
        self._there = there  # kept open: modes are compared after the program
        environment = {
            name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")
        }
        self._process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", *map(str, command)], stdin=there, stdout=there, stderr=there,
            env={**environment, "TERM": "xterm-256color"}, start_new_session=True,
        )  # fmt: skip

    @property
    def lines(self) -> list[str]:
        """What is seen, without spaces at the ends of lines."""
        return [line.rstrip() for line in self._screen.display]

    def has(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def press(self, keys: bytes) -> None:
        os.write(self._here, keys)

    def wait_for(self, text: str) -> None:
        """Until it is seen."""
        self._take_until(lambda: self.has(text), f"{text!r} in the terminal")

    def wait_change(self) -> None:
        """Until something else is seen."""
        before = self.lines
        self._take_until(lambda: self.lines != before, "another page")

    def wait_end(self) -> int:
        """Until the program has ended and all that it wrote is seen; its exit status."""
        self._take_until(lambda: self._process.poll() is not None, "the end of the program")
        self.drain(0)
        return self._process.returncode

    def drain(self, seconds: float = 0.2) -> None:
        """Take what is still on its way, of a page that was written at once."""
        while self._take(seconds):
            pass

    @property
    def modes_now(self) -> list[object]:
        return termios.tcgetattr(self._there)

    def _take(self, seconds: float) -> bool:
        if not select.select([self._here], [], [], seconds)[0]:
            return False
        self._stream.feed(os.read(self._here, 1 << 16))
        return True

    def _take_until(self, is_so: object, what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():  # type: ignore[operator]
            assert time.monotonic() < deadline, f"{what}: still not after {PATIENCE_S:g} s:\n" + "\n".join(self.lines)
            self._take(0.05)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        os.close(self._here)
        os.close(self._there)


@contextmanager
def at_terminal(*words: str | Path, columns: int = 80, lines: int = 24) -> Iterator[Terminal]:
    """`kvfuse WORDS` there."""
    terminal = Terminal([*KVFUSE, *words], columns, lines)
    try:
        yield terminal
    finally:
        terminal.close()
