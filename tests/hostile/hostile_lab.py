"""What the tests of attacks share: attackers as processes of other users, and what a victim beside them measures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mounting import PATIENCE_S, KvfuseMount

ATTACKER = 65533
"""a user who owns nothing"""
HERE = Path(__file__).parent


class AttackProcess:
    """A running ``attack_*.py``. Lines of JSON each way."""

    def __init__(self, program: str, *arguments: object) -> None:
        command = [sys.executable, str(HERE / program), *map(str, arguments)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.pid = self._process.pid

    def hear(self, seconds: float = PATIENCE_S) -> dict[str, Any]:
        """The next line that the attack says. AssertionError where it ends, or says nothing for so long."""
        stdout = self._process.stdout
        assert stdout
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.append(stdout.readline()), daemon=True)
        reader.start()
        reader.join(seconds)
        assert lines, f"the attack says nothing for {seconds:g} s"
        assert lines[0], f"the attack ended with {self._process.wait()}"
        return dict(json.loads(lines[0]))

    def tell(self, word: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                stream.close()


@contextmanager
def attacker(program: str, mount: KvfuseMount, *arguments: object, uid: int = ATTACKER) -> Iterator[AttackProcess]:
    """``program UID MOUNT ARGUMENTS...``, killed at the end."""
    process = AttackProcess(program, uid, mount.point, *arguments)
    try:
        yield process
    finally:
        process.kill()


def slowest(work: Callable[[], object], seconds: float) -> float:
    """Repeat ``work`` for so long: the longest that one took, in seconds."""
    longest, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        work()
        longest = max(longest, time.perf_counter() - started)
    return longest


def ask_daemon(mount: KvfuseMount) -> None:
    """A small question that the kernel cannot answer from its cache: the event loop has to."""
    try:
        os.stat(mount.point / f"absent-{time.monotonic_ns()}")
    except FileNotFoundError:
        pass
