"""Waiting until a mount does again what it is asked; where it does not, the reason is told."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mounting import PATIENCE_S, KvfuseMount

_T = TypeVar("_T")

RETRY_SECONDS = 0.1
FAILURES_MAX = 12
"""that are told"""
LOG_LINES_MAX = 40


class Asker:
    """Asks a mount, in a thread, until it stores what it is given: strictly, and in relaxed folders by an fsync.

    A call that hangs holds up that thread alone: the reason can still be told.
    """

    def __init__(self, mount: KvfuseMount) -> None:
        self.mount = mount
        self._began = time.monotonic()
        self._call = ("nothing", self._began)
        self._failures: deque[str] = deque(maxlen=FAILURES_MAX)
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def wait(self) -> float:
        """Seconds until the mount answered. AssertionError that says what it did instead."""
        self._thread.start()
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            self._given_up.set()
            raise AssertionError(f"{self.mount.point} does not answer for {PATIENCE_S:g} s\n{self._reasons()}")
        return time.monotonic() - self._began

    def _ask(self) -> None:
        while not self._given_up.is_set():
            try:
                self._store_all()
            except OSError as error:
                what, began = self._call
                seconds = time.monotonic() - began
                self._failures.append(f"{began - self._began:6.2f} s: {what} failed after {seconds:.2f} s: {error}")
                self._given_up.wait(RETRY_SECONDS)
            else:
                return

    def _store_all(self) -> None:
        for folder in ("strict", "relaxed"):
            path = self.mount.point / folder / "again"
            file = self._timed(f"open of {path}", lambda: os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))  # noqa: B023
            try:
                self._timed(f"write of {path}", lambda: os.write(file, b"again"))  # noqa: B023
            finally:
                self._timed(f"close of {path}", lambda: os.close(file))  # noqa: B023
        path = self.mount.point / "relaxed"
        folder_file = self._timed(f"open of {path}", lambda: os.open(path, os.O_RDONLY))
        try:
            self._timed(f"fsync of {path}", lambda: os.fsync(folder_file))
        finally:
            os.close(folder_file)

    def _timed(self, what: str, call: Callable[[], _T]) -> _T:
        self._call = what, time.monotonic()
        return call()

    def _reasons(self) -> str:
        what, began = self._call
        stats = self.mount.point / ".kvfuse" / "stats"
        return "\n".join(
            [
                f"under way for {time.monotonic() - began:.2f} s: {what}",
                "the last failures:",
                *self._failures,
                "the daemon's last words:",
                *self.mount.log.read_text(errors="replace").splitlines()[-LOG_LINES_MAX:],
                "its figures:",
                _output("timeout", "2", "cat", str(stats)),
                "its threads, as the kernel sees them:",
                kernel_stacks(self.mount.pid),
                "and the interpreter:",
                _output("py-spy", "dump", "--pid", str(self.mount.pid)),
            ]
        )


def kernel_stacks(pid: int) -> str:
    """Where each thread of a process is in the kernel."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            found.append(f"{task.name} {state}\n{(task / 'stack').read_text()}")
        except OSError:
            continue  # it ended
    return "\n".join(found)


def _output(*command: str) -> str:
    """What a command says; that it is not installed, where that is so."""
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not installed"
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        return f"{command[0]} does not end"
    return done.stdout + done.stderr
